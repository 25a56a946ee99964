//! Tests of the program: each of them runs the binary.
#![expect(clippy::expect_used, clippy::panic, reason = "helpers of tests fail as tests do")]
mod architectures;
mod bench;
mod devices;
mod eval;
mod fleet;
mod gguf_models;
mod golden;
#[cfg(feature = "serve")]
mod load;
mod models;
mod plan;
mod quantised;
#[path = "../../../kv-runner/src/model/recorded.rs"]
mod recorded;
mod refusals;
mod replay;
mod session;
mod sharing;
mod support;
#[cfg(target_os = "linux")]
mod tier;
#[cfg(target_os = "linux")]
mod tiers;
mod variants;
