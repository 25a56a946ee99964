//! The KV cache as a Python module: `kvblock._kvblock`, which `kvblock` re-exports.
//!
//! | module | owns |
//! |---|---|
//! | `cache` | `Cache`: sequences, tiers, sessions, events |
//! | `guarded` | what a cache's lock guards: its owner and the open step |
//! | `step` | `Step`: one forward pass |
//! | `engine` | `Engine`: continuous batches |
//! | `te` | the calls of TransformerEngine, for `kvblock.te` |
//! | `plane` | planes of a cache on CUDA, as tensors that share their memory |
//! | `calibrate` | `Calibrator`: the constants of stored formats |
//! | `settings` | the arguments of `Cache`, and devices by name |
//! | `states` | `States`: the recurrent states of some layers |
//! | `shared` | a value behind a lock, in the process that made it |
//! | `card` | the CUDA device of a cache, and the order of calls with the work of others there |
//! | `tensor` | tensors of torch, and of everything that speaks `DLPack` |
//! | `torch` | the names of torch, and its streams |
//! | `memory` | their bytes, and streams: the only module with unsafe code |
//! | `report` | counts, events and errors as Python objects |
//!
//! # Locks
//! A cache is one mutex. A thread lets the interpreter go before it locks, and unlocks before it
//! takes the interpreter back, so neither lock is ever waited for with the other in hand.
#![allow(
    clippy::needless_pass_by_value,
    reason = "functions that Python calls own their arguments"
)]
mod cache;
mod calibrate;
mod card;
mod engine;
mod guarded;
mod memory;
mod plane;
mod report;
mod settings;
mod shared;
mod states;
mod step;
mod te;
mod tensor;
mod torch;

use pyo3::pymodule;

/// The compiled half of `kvblock`.
#[pymodule]
mod _kvblock {
    #[pymodule_export]
    use super::cache::Cache;
    #[pymodule_export]
    use super::calibrate::Calibrator;
    #[pymodule_export]
    use super::engine::{Batch, Engine};
    #[pymodule_export]
    use super::plane::CachePlane;
    #[pymodule_export]
    use super::report::{device_names, feature_names};
    #[pymodule_export]
    use super::states::States;
    #[pymodule_export]
    use super::step::Step;
    #[pymodule_export]
    use super::te::{InferenceConfig, InferenceParams};

    /// The version of the library.
    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");
}
