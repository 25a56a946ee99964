//! Gemma 3, most of whose layers have a sliding window: continues a text.
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
        let window_left = common::window_left(config.sliding_window)?;
        let pattern = config.sliding_window_pattern;
        ensure!(pattern > 0, "sliding_window_pattern is 0");
        let model = Model::new(false, &config, folder.weights()?)?;
        let (layers, kv_heads) = (config.num_hidden_layers, config.num_key_value_heads);
        let spec = common::spec(layers, kv_heads, config.head_dim)?;
        // Layers with a window keep no more tokens than it has.
        let is_full = |number: usize| number.checked_rem(pattern).is_none_or(|rest| rest == 0);
        let windowed = (1..=layers).zip(0..).filter(|(number, _)| !is_full(*number));
        let spec =
            spec.group(windowed.map(|(_, layer)| layer), |group| group.window_left(window_left));
        common::print(options, &folder, spec, |ids: &Tensor, step: &CandleStep<'_>| {
            model.forward(ids, step)
        })
    })
}
