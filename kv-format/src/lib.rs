//! Stored formats of a KV cache, exact to the bit.
//!
//! | module | owns |
//! |---|---|
//! | [`KvFormat`], [`DType`] | names and sizes of stored formats and of tensor elements |
//! | [`row`] | encoding and decoding of one row (one token, one kv head) in every format |
//! | [`minifloat`] | FP8 E4M3 and E5M2, E2M1, E8M0 |
//! | [`lloyd`] | codebooks of the Lloyd-Max formats |
//! | [`quality`] | error of decoded rows |
//!
//! Everything is scalar and safe: this is the reference for the kernels of devices. The crate
//! depends on no other of the workspace, so that kernels are compiled again only when a format
//! changes. `kv-core` re-exports the names, `kv-quant` the codecs.
#![forbid(unsafe_code)]
mod element;
mod format;
pub mod lloyd;
pub mod minifloat;
#[doc(hidden)]
pub mod num;
pub mod quality;
pub mod row;
mod unknown_name;

pub use element::{DType, Element};
pub use format::{KvFormat, ScaleGroup, Scaling};
pub use unknown_name::UnknownName;
