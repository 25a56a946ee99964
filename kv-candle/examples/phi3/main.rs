//! Phi-3, with its sliding window: continues a text.
#[path = "../common/mod.rs"]
mod common;
#[rustfmt::skip]
#[allow(warnings, reason = "kept as candle-transformers has it")]
pub(crate) mod model;

use std::process::ExitCode;

use anyhow::ensure;
use candle_core::Tensor;
use common::{Folder, Geometry, Options};
use kv_candle::CandleStep;
use model::{Config, Model};

fn main() -> ExitCode {
    common::main(run)
}

/// Runs the example and returns its text.
pub(crate) fn run(options: &Options) -> anyhow::Result<String> {
    let folder = Folder::open(&options.model)?;
    let config: Config = folder.config()?;
    ensure!(config.num_attention_heads > 0, "num_attention_heads is 0");
    let geometry = Geometry {
        kv_heads: config.num_key_value_heads,
        head_dim: config.head_dim(),
        windows: vec![config.sliding_window; config.num_hidden_layers],
    };
    let model = Model::new(&config, folder.weights()?)?;
    let forward = |ids: &Tensor, step: &CandleStep<'_>| model.forward(ids, step);
    common::continue_prompt(options, &folder, &geometry, forward)
}
