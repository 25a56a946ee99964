//! Phi-3: continues a text.
#[path = "../common/mod.rs"]
mod common;
#[rustfmt::skip]
#[allow(warnings, reason = "kept as candle-transformers has it")]
mod model;

use std::process::ExitCode;

use anyhow::ensure;
use candle_core::Tensor;
use common::{Folder, Options};
use kv_candle::CandleStep;
use model::{Config, Model};

fn main() -> ExitCode {
    common::main(|options: &Options| {
        let folder = Folder::open(&options.model)?;
        let config: Config = folder.config()?;
        ensure!(config.num_attention_heads > 0, "num_attention_heads is 0");
        let model = Model::new(&config, folder.weights()?)?;
        let (layers, kv_heads) = (config.num_hidden_layers, config.num_key_value_heads);
        let spec = common::spec(layers, kv_heads, config.head_dim())?;
        common::print(options, &folder, spec, |ids: &Tensor, step: &CandleStep<'_>| {
            model.forward(ids, step)
        })
    })
}
