//! Errors of a calibrator.
use std::fmt;

use kv_core::LayerId;
use kv_core::backend::Plane;

use crate::calibrate::{LayerShape, MIN_TOKENS};

/// One of the three tensors that a calibrator observes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_enums, reason = "attention has three")]
pub enum Tensor {
    /// Keys.
    K,
    /// Values.
    V,
    /// Queries.
    Q,
}

/// Rows that cannot be observed, or too few of them.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CalibrateError {
    /// Numbers of heads or channels that are zero, or more than a plane can have.
    #[error("layer {layer}: no plane has {shape}")]
    Shape {
        /// The layer.
        layer: LayerId,
        /// The shape that was given.
        shape: LayerShape,
    },
    /// More layers than a [`LayerId`] can name.
    #[error("more than 65536 layers")]
    TooManyLayers,
    /// A layer that the calibrator was not made for.
    #[error("layer {layer} of a calibrator for {num_layers}")]
    UnknownLayer {
        /// The layer.
        layer: LayerId,
        /// Number of layers of the calibrator.
        num_layers: usize,
    },
    /// A number of query heads that is not a multiple of the kv heads.
    #[error("layer {layer}: {q_heads} query heads are not a multiple of {num_kv_heads} kv heads")]
    QueryHeads {
        /// The layer.
        layer: LayerId,
        /// Query heads given.
        q_heads: u32,
        /// Heads of K and V.
        num_kv_heads: u32,
    },
    /// Keys whose length is not a multiple of a token's.
    #[error("layer {layer}: K has {got} values, not a multiple of {token} (a token)")]
    PartOfToken {
        /// The layer.
        layer: LayerId,
        /// Values of one token.
        token: usize,
        /// Values given.
        got: usize,
    },
    /// Values or queries for another number of tokens than the keys.
    #[error("layer {layer}: {tensor} has {got} values, {expected} expected from the length of K")]
    Length {
        /// The layer.
        layer: LayerId,
        /// The tensor.
        tensor: Tensor,
        /// Values that fit K.
        expected: usize,
        /// Values given.
        got: usize,
    },
    /// More tokens than can be counted.
    #[error("layer {layer}: more than 2^32 - 1 tokens")]
    TooManyTokens {
        /// The layer.
        layer: LayerId,
    },
    /// A NaN or an infinity.
    #[error(
        "layer {layer}, {tensor}: {value} at position {position}, head {head}, channel {channel}"
    )]
    NotFinite {
        /// The layer.
        layer: LayerId,
        /// The tensor.
        tensor: Tensor,
        /// Position in the sequence.
        position: u64,
        /// Head of the tensor.
        head: usize,
        /// Channel of the head.
        channel: usize,
        /// The value there.
        value: f32,
    },
    /// Too few tokens for useful constants.
    #[error("layer {layer} saw {tokens} tokens that count, {MIN_TOKENS} are needed")]
    TooFewTokens {
        /// The layer.
        layer: LayerId,
        /// Tokens that counted.
        tokens: u32,
    },
    /// Rows so large that their transform is not finite.
    #[error("layer {layer}, {plane}, head {head}: rows are too large to be rotated in f32")]
    Overflow {
        /// The layer.
        layer: LayerId,
        /// Its K or its V.
        plane: Plane,
        /// The kv head.
        head: usize,
    },
}

impl fmt::Display for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::K => "K",
            Self::V => "V",
            Self::Q => "Q",
        })
    }
}

impl fmt::Display for LayerShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { num_kv_heads, head_dim_k, head_dim_v } = self;
        write!(f, "{num_kv_heads} kv heads of {head_dim_k} (K) and {head_dim_v} (V) channels")
    }
}
