//! Models of candle-transformers, ported to this cache, against candle-transformers itself: the
//! same random weights and tokens in both.
#![expect(clippy::unwrap_used, clippy::arithmetic_side_effects, reason = "tests")]
mod complaints;
mod exact;
mod models;
mod parity;
mod run;

#[rustfmt::skip]
#[allow(warnings, reason = "kept as candle-transformers has it")]
#[path = "../../examples/gemma3/model.rs"]
mod gemma3;
#[rustfmt::skip]
#[allow(warnings, reason = "kept as candle-transformers has it")]
#[path = "../../examples/llama/model.rs"]
mod llama;
#[rustfmt::skip]
#[allow(warnings, reason = "kept as candle-transformers has it")]
#[path = "../../examples/mistral/model.rs"]
mod mistral;
#[rustfmt::skip]
#[allow(warnings, reason = "kept as candle-transformers has it")]
#[path = "../../examples/phi3/model.rs"]
mod phi3;
#[rustfmt::skip]
#[allow(warnings, reason = "kept as candle-transformers has it")]
mod qwen2;
#[rustfmt::skip]
#[allow(warnings, reason = "kept as candle-transformers has it")]
#[path = "../../examples/qwen3/model.rs"]
mod qwen3;
