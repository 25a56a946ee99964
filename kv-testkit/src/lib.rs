//! The conformance suite: oracles in f64, a naive model of a cache, golden vectors, and the cases
//! that every backend must pass.
//!
//! A backend crate calls [`run`] from `tests/conformance.rs` (`harness = false`):
//!
//! ```no_run
//! use std::process::ExitCode;
//!
//! use kv_core::backend::NullBackend;
//!
//! fn main() -> ExitCode {
//!     kv_testkit::run("null", || Ok(NullBackend::new()))
//! }
//! ```
//!
//! The code here prefers obvious over fast, and knows nothing of how a backend works.
#![forbid(unsafe_code)]
#![expect(
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    clippy::float_cmp,
    clippy::exhaustive_enums,
    clippy::exhaustive_structs,
    reason = "an oracle must read as the formula it states, and a panic here is a failed case"
)]
mod amount;
mod case;
pub mod consumer;
pub mod device;
pub mod differential;
mod fault;
pub mod fixture;
mod harness;
mod kernels;
mod late;
pub mod model;
pub mod oracle;
mod provenance;
#[cfg(unix)]
pub mod proxy;
pub mod rng;
#[cfg(unix)]
pub mod servers;
pub mod stateful;
pub mod store;
mod suite;
pub mod tokens;
pub mod tolerance;
pub mod traces;
mod vectors;

pub use case::{Case, CaseError, Outcome};
pub use device::{Device, Shared};
pub use fault::{
    FaultInjector, FaultKind, FaultyFence, FaultyHostPool, FaultyQueue, FaultyReadback,
};
pub use harness::run;
pub use kernels::{assert_kernel_formats, kernel_constants};
pub use late::{LateDevice, LateFence, LateQueue, LateReadback};
pub use vectors::run_vectors;
