//! Gemma 3, most of whose layers have a sliding window: continues a text.
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
    let pattern = config.sliding_window_pattern;
    ensure!(pattern > 0, "sliding_window_pattern is 0");
    // One layer of each pattern, its last, sees everything.
    let is_full = |number: usize| number.checked_rem(pattern) == Some(0);
    let window = |number| (!is_full(number)).then_some(config.sliding_window);
    let geometry = Geometry {
        kv_heads: config.num_key_value_heads,
        head_dim: config.head_dim,
        windows: (1..=config.num_hidden_layers).map(window).collect(),
    };
    let model = Model::new(false, &config, folder.weights()?)?;
    let forward = |ids: &Tensor, step: &CandleStep<'_>| model.forward(ids, step);
    common::continue_prompt(options, &folder, &geometry, forward)
}
