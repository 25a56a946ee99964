//! Stored formats of a KV cache, exact to the bit.
//!
//! | module | owns |
//! |---|---|
//! | [`row`] | encoding and decoding of one row (one token, one kv head) in every format |
//! | [`minifloat`] | FP8 E4M3 and E5M2, E2M1, E8M0 |
//! | [`lloyd`] | codebooks of the Lloyd-Max formats |
//! | [`transform`] | mean, balance, signs and Hadamard rotation of a row |
//! | [`block`] | rows in 16 bits, and the mean of a full block |
//! | [`calibrate`] | the transform's constants and scales, from observed rows |
//! | [`mod@file`] | a calibration as a safetensors file |
//! | [`quality`] | error of decoded rows |
//!
//! Everything is scalar and safe: this is the reference for the kernels of devices.
#![forbid(unsafe_code)]
pub mod block;
pub mod calibrate;
pub mod file;
pub mod lloyd;
pub mod minifloat;
pub mod quality;
pub mod row;
pub mod transform;
