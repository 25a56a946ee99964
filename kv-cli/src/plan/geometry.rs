//! The rows that a decoder keeps per token and layer: all that a plan needs of a model.
use std::collections::HashSet;

/// The rows that one layer keeps per token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct LayerKind {
    pub(super) kv_heads: u32,
    pub(super) head_dim_k: u32,
    pub(super) head_dim_v: u32,
    /// Number of tokens that a query sees, including its own; `None` for all.
    pub(super) window: Option<u32>,
    /// Whether V is the leading part of K (MLA), so that the model needs only K.
    pub(super) is_latent: bool,
}

/// The cache of one model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Geometry {
    /// `model_type` of a `config.json`, `general.architecture` of a GGUF file.
    pub(super) architecture: String,
    /// Number of layers, including those without a KV cache.
    pub(super) num_layers: u32,
    /// One entry per layer with its own KV cache, in order.
    pub(super) layers: Vec<LayerKind>,
    /// Tokens per sequence, if the file gives it.
    pub(super) context: Option<u32>,
    /// Notes about the figures.
    pub(super) notes: Vec<String>,
}

impl Geometry {
    /// Returns kinds of layers in the order of their first layer, with the number of layers of
    /// each.
    pub(super) fn kinds(&self) -> Vec<(LayerKind, u32)> {
        let mut seen = HashSet::new();
        let first = self.layers.iter().filter(|kind| seen.insert(**kind));
        let kinds: Vec<_> = first.copied().collect();
        let count = |kind: LayerKind| {
            let layers = self.layers.iter().filter(|layer| **layer == kind);
            layers.fold(0_u32, |n, _| n + 1)
        };
        kinds.into_iter().map(|kind| (kind, count(kind))).collect()
    }
}

/// A model whose cache cannot be planned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum GeometryError {
    #[error("{field} is {got}, expected {expected}")]
    Field { field: String, got: String, expected: &'static str },
    #[error("{field} is missing")]
    Missing { field: &'static str },
    #[error("{field} is 0, at least 1 is needed")]
    Zero { field: String },
    #[error("{field} is {got}, at most {max} is possible")]
    TooLarge { field: String, got: u64, max: u32 },
    #[error("{field} {got} is not a multiple of {of} {divisor}")]
    NotDivisible { field: &'static str, got: u32, of: &'static str, divisor: u32 },
    #[error("{first} is {first_value}, but {second} is {second_value}")]
    Contradiction { first: String, first_value: String, second: String, second_value: String },
    #[error("{field} has {got} entries for {expected} layers")]
    Entries { field: String, got: usize, expected: u32 },
    #[error("no KV cache to plan: {why}")]
    NoCache { why: &'static str },
}

/// Upper limit of counts in a file, so that products of a few fit into `u64`.
pub(super) const COUNT_MAX: u32 = 1 << 20;
/// Most layers of a cache.
pub(super) const LAYERS_MAX: u32 = 65_535;

/// Divides without a remainder.
pub(super) fn divide(
    (field, got): (&'static str, u32),
    (of, divisor): (&'static str, u32),
) -> Result<u32, GeometryError> {
    match (got.checked_div(divisor), got.checked_rem(divisor)) {
        (Some(quotient), Some(0)) => Ok(quotient),
        _ => Err(GeometryError::NotDivisible { field, got, of, divisor }),
    }
}

/// Converts a count between 1 and `max` to `u32`.
pub(super) fn bounded(field: &str, got: u64, max: u32) -> Result<u32, GeometryError> {
    let field = || field.to_owned();
    match u32::try_from(got) {
        Ok(0) => Err(GeometryError::Zero { field: field() }),
        Ok(count) if count <= max => Ok(count),
        _ => Err(GeometryError::TooLarge { field: field(), got, max }),
    }
}

/// Makes a note about layers without a cache of their own.
pub(super) fn note_of_others(kept: usize, all: u32, what: &str) -> Option<String> {
    let others = usize::try_from(all).unwrap_or(usize::MAX).saturating_sub(kept);
    (others > 0).then(|| {
        format!(
            "{others} of {all} layers are {what}: what they keep of a sequence does not grow with \
             its tokens and is not counted"
        )
    })
}
