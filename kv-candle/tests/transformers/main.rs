//! Models of candle-transformers, ported to this cache, against candle-transformers itself: the
//! same random weights and tokens in both.
#![expect(clippy::unwrap_used, reason = "tests")]
#![expect(clippy::duplicate_mod, reason = "every example is a program of its own")]
mod complaints;
mod exact;
mod examples;
mod models;
mod parity;
mod run;
mod serve;

#[allow(dead_code, reason = "the command line is for the examples")]
#[path = "../../examples/gemma3/main.rs"]
mod gemma3;
#[allow(dead_code, reason = "the command line is for the examples")]
#[path = "../../examples/llama/main.rs"]
mod llama;
#[allow(dead_code, reason = "the command line is for the examples")]
#[path = "../../examples/mistral/main.rs"]
mod mistral;
#[allow(dead_code, reason = "the command line is for the examples")]
#[path = "../../examples/phi3/main.rs"]
mod phi3;
#[rustfmt::skip]
#[allow(warnings, reason = "kept as candle-transformers has it")]
mod qwen2;
#[allow(dead_code, reason = "the command line is for the examples")]
#[path = "../../examples/qwen3/main.rs"]
mod qwen3;
