//! Mistral, with its sliding window: continues a text.
#[path = "../common/mod.rs"]
mod common;
#[rustfmt::skip]
#[allow(warnings, reason = "kept as candle-transformers has it")]
mod model;

use std::process::ExitCode;

use anyhow::Context;
use candle_core::Tensor;
use common::{Folder, Options};
use kv_candle::CandleStep;
use model::{Config, Model};

fn main() -> ExitCode {
    common::main(|options: &Options| {
        let folder = Folder::open(&options.model)?;
        let config: Config = folder.config()?;
        let head_dim = config.hidden_size.checked_div(config.num_attention_heads);
        let head_dim = config.head_dim.or(head_dim).context("num_attention_heads is 0")?;
        let model = Model::new(&config, folder.weights()?)?;
        let mut spec =
            common::spec(config.num_hidden_layers, config.num_key_value_heads, head_dim)?;
        if let Some(window) = config.sliding_window {
            // A query sees its own token and those before it, as many as the window has.
            spec = spec.window_left(common::window_left(window)?);
        }
        common::print(options, &folder, spec, |ids: &Tensor, step: &CandleStep<'_>| {
            model.forward(ids, step)
        })
    })
}
