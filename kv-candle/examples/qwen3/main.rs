//! Qwen3: continues a text.
#[path = "../common/mod.rs"]
mod common;
#[rustfmt::skip]
#[allow(warnings, reason = "kept as candle-transformers has it")]
mod model;

use std::process::ExitCode;

use candle_core::Tensor;
use common::{Folder, Options};
use kv_candle::CandleStep;
use model::{Config, ModelForCausalLM};

fn main() -> ExitCode {
    common::main(|options: &Options| {
        let folder = Folder::open(&options.model)?;
        let config: Config = folder.config()?;
        let model = ModelForCausalLM::new(&config, folder.weights()?)?;
        let spec =
            common::spec(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)?;
        common::print(options, &folder, spec, |ids: &Tensor, step: &CandleStep<'_>| {
            model.forward(ids, step)
        })
    })
}
