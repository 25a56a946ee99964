//! Quantised KV to the bit: the transform of rows, its calibration, and the codecs of `kv-format`.
//!
//! | module | owns |
//! |---|---|
//! | [`row`], [`minifloat`], [`lloyd`], [`quality`] | re-exported: codecs of rows and their error |
//! | [`transform`] | mean, balance, signs and Hadamard rotation of a row |
//! | [`block`] | rows in 16 bits, and the mean of a full block |
//! | [`calibrate`] | the transform's constants and scales, from observed rows |
//! | [`mod@file`] | a calibration as a safetensors file |
//! | [`stored`] | formats and their options as text: `int8/l4,tail=on` |
//!
//! Everything is scalar and safe: this is the reference for the kernels of devices.
#![forbid(unsafe_code)]
pub mod block;
pub mod calibrate;
pub mod file;
pub mod stored;
pub mod transform;

pub use kv_format::{lloyd, minifloat, quality, row};
