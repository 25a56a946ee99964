//! The example `llama`, candle-transformers' model over this cache, against candle-transformers
//! itself: the same random weights and tokens in both.
#![expect(clippy::unwrap_used, reason = "tests")]
mod complaints;
mod exact;
mod examples;
mod models;
mod parity;
mod run;
mod serve;

#[allow(dead_code, reason = "the command line is for the example")]
#[path = "../../examples/llama/main.rs"]
mod llama;
