//! The rows that a decoder keeps per token and layer, and the recurrent states that it keeps per
//! sequence, read from a `config.json` or a GGUF file.
//!
//! Lenient in fields that a cache does not depend on, so that more models can be planned than run.
pub(crate) mod config;
pub(crate) mod gguf;
pub(crate) mod layers;
mod parts;
mod states;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::path::Path;

use serde::Serialize;

use crate::error::{ConfigError, Error, InFile};
use crate::gguf::Head;
use crate::num::to_usize;
use crate::object::field_error;
use crate::text_file::read_text;
use parts::{Found, Layers};
pub use parts::{LayerStates, StatePart};

/// The rows that one layer keeps per token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[expect(clippy::exhaustive_structs, reason = "a literal names each of the numbers")]
pub struct LayerGeometry {
    /// Number of kv heads.
    pub kv_heads: u32,
    /// Head dim of K.
    pub head_dim_k: u32,
    /// Head dim of V.
    pub head_dim_v: u32,
    /// Number of tokens that a query sees, including its own; `None` for all.
    pub window: Option<u32>,
    /// Whether V is the leading part of K (MLA), so that the model needs only K.
    #[serde(rename = "latent")]
    pub is_latent: bool,
}

/// The cache of one model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelGeometry {
    /// `model_type` of a `config.json`, `general.architecture` of a GGUF file.
    pub architecture: String,
    /// Number of layers, including those without a KV cache.
    pub num_layers: u32,
    /// One entry per layer with its own KV cache, in order.
    pub layers: Vec<LayerGeometry>,
    /// Index in the model of every entry of `layers`.
    pub layer_indices: Vec<u32>,
    /// One entry per layer with a recurrent state, in order. A layer may have rows too.
    pub states: Vec<LayerStates>,
    /// Tokens per sequence, if the file gives it.
    pub context: Option<u32>,
    /// Notes about the figures.
    pub notes: Vec<String>,
}

impl ModelGeometry {
    /// Reads a `config.json`.
    ///
    /// # Errors
    /// [`Error::File`] with the cause: [`Error::Io`], [`Error::Text`], [`Error::Json`],
    /// [`Error::Config`].
    pub fn read_config(path: &Path) -> Result<Self, Error> {
        config::parse(&read_text(path)?).in_file(path)
    }

    /// Reads the head of a GGUF file.
    ///
    /// # Errors
    /// Those of [`Head::read`], and [`Error::Config`].
    pub fn read_gguf(path: &Path) -> Result<Self, Error> {
        gguf::geometry(&Head::read(path)?.metadata()).in_file(path)
    }

    /// Returns the geometry of every layer, without its window, for a decoder that needs one size
    /// of K and V in all layers. `dim_v` is the name of the size of V.
    pub(crate) fn uniform(&self, dim_v: String) -> Result<LayerGeometry, ConfigError> {
        let Some(first) = self.layers.first() else {
            return Err(ConfigError::NoCache { why: NO_LAYER });
        };
        let (k, v, window) = (first.head_dim_k, first.head_dim_v, first.window);
        let differs = |layer: &&LayerGeometry| LayerGeometry { window, ..**layer } != *first;
        let problem = if first.is_latent {
            "keep one latent row per token, which this program does not run".to_owned()
        } else if k != v {
            let problem = format!("is {v}, but K has {k}: expected one size of both");
            return Err(field_error(dim_v, problem));
        } else if self.kept_layers() != to_usize(self.num_layers) {
            let (own, all) = (self.kept_layers(), self.num_layers);
            format!("are {all}, of which {own} have K and V of their own: expected all of them")
        } else if let Some(other) = self.layers.iter().find(differs) {
            let heads = |layer: &LayerGeometry| {
                format!("{} kv heads of {}", layer.kv_heads, layer.head_dim_k)
            };
            format!("have {} and {}: expected the same in all", heads(first), heads(other))
        } else {
            return Ok(*first);
        };
        Err(field_error("the layers of the model".to_owned(), problem))
    }

    /// Returns the number of layers that keep rows or a state.
    fn kept_layers(&self) -> usize {
        let states = self.states.iter().map(|of| of.layer);
        let kept: HashSet<_> = self.layer_indices.iter().copied().chain(states).collect();
        kept.len()
    }

    /// Returns the different states of layers, in the order of their first layer, with the layers
    /// of each.
    pub fn state_kinds(&self) -> Vec<(&[StatePart], Vec<u32>)> {
        state_kinds(&self.states)
    }

    /// Returns kinds of layers in the order of their first layer, with the number of layers of
    /// each.
    pub fn kinds(&self) -> Vec<(LayerGeometry, u32)> {
        let mut seen = HashSet::new();
        let first = self.layers.iter().filter(|kind| seen.insert(**kind));
        let kinds: Vec<_> = first.copied().collect();
        let count = |kind: LayerGeometry| {
            let layers = self.layers.iter().filter(|layer| **layer == kind);
            layers.fold(0_u32, |n, _| n + 1)
        };
        kinds.into_iter().map(|kind| (kind, count(kind))).collect()
    }
}

/// Returns the different states of layers, see [`ModelGeometry::state_kinds`].
pub(crate) fn state_kinds(states: &[LayerStates]) -> Vec<(&[StatePart], Vec<u32>)> {
    let mut kinds: Vec<(&[StatePart], Vec<u32>)> = Vec::new();
    for LayerStates { layer, parts } in states {
        match kinds.iter_mut().find(|(known, _)| known == parts) {
            Some((_, layers)) => layers.push(*layer),
            None => kinds.push((parts, vec![*layer])),
        }
    }
    kinds
}

/// Note about models whose queries see the tokens of one chunk.
const CHUNKED: &str = "chunked attention is counted as a window as long as a chunk";
/// Longest window and context; a longer window means none.
const LEN_MAX: u32 = u32::MAX >> 2;
/// Upper limit of counts in a file, so that products of a few fit into `u64`.
pub(crate) const COUNT_MAX: u32 = 1 << 20;
/// The reason for which a model has no cache.
const NO_LAYER: &str = "no layer of the model has attention with a cache of its own, or a state";
/// Most layers of a cache.
pub(crate) const LAYERS_MAX: u32 = 65_535;

/// Divides without a remainder.
pub(crate) fn divide(
    (field, got): (&'static str, u32),
    (of, divisor): (&'static str, u32),
) -> Result<u32, ConfigError> {
    match (got.checked_div(divisor), got.checked_rem(divisor)) {
        (Some(quotient), Some(0)) => Ok(quotient),
        _ => Err(ConfigError::NotDivisible { field, got, of, divisor }),
    }
}

/// Checks that a number is at least 1.
pub(crate) fn non_zero(field: &str, got: u32) -> Result<u32, ConfigError> {
    bounded(field, got.into(), u32::MAX)
}

/// Checks that a list has one entry per layer.
pub(crate) fn per_layer<T>(
    field: String,
    list: Vec<T>,
    num_layers: u32,
) -> Result<Vec<T>, ConfigError> {
    if list.len() == to_usize(num_layers) {
        return Ok(list);
    }
    Err(field_error(field, format!("has {} entries for {num_layers} layers", list.len())))
}

/// Returns whether the layer is the last one of its period.
fn is_last(index: u32, period: u32) -> bool {
    (index + 1).is_multiple_of(period)
}

/// The rows and the states of a model's layers.
struct Kept {
    /// Index of the layer, and its rows.
    rows: Vec<(u32, LayerGeometry)>,
    states: Vec<LayerStates>,
}

impl Kept {
    /// Collects what layers keep: of each its index, its rows, and whether it is recurrent.
    fn of(
        layers: impl Iterator<Item = (u32, Option<LayerGeometry>, bool)>,
        found: Option<&Found>,
    ) -> Self {
        let (mut rows, mut states) = (Vec::new(), Vec::new());
        for (layer, own, is_recurrent) in layers {
            rows.extend(own.map(|own| (layer, own)));
            let has_state =
                |(parts, of): &&Found| !parts.is_empty() && (is_recurrent || *of == Layers::All);
            if let Some((parts, _)) = found.filter(has_state) {
                states.push(LayerStates { layer, parts: parts.clone() });
            }
        }
        Self { rows, states }
    }

    /// Refuses a model of which nothing is kept.
    fn check(&self) -> Result<(), ConfigError> {
        if self.rows.is_empty() && self.states.is_empty() {
            return Err(ConfigError::NoCache { why: NO_LAYER });
        }
        Ok(())
    }

    fn into_geometry(
        self,
        architecture: String,
        num_layers: u32,
        context: Option<u32>,
        notes: Vec<String>,
    ) -> ModelGeometry {
        let (layer_indices, layers) = self.rows.into_iter().unzip();
        let states = self.states;
        ModelGeometry { architecture, num_layers, layers, layer_indices, states, context, notes }
    }
}

/// Heads of the layers with attention.
struct Rows {
    /// Number of kv heads per layer, 0 for none, or one number for all.
    kv_heads: Vec<u32>,
    dim_k: u32,
    dim_v: u32,
    is_latent: bool,
    /// Heads and their size in layers without a window, if they differ.
    global: (Option<u32>, Option<u32>),
}

impl Rows {
    /// Returns the rows of one layer, `None` for a layer without heads.
    fn layer(&self, index: usize, window: Option<u32>) -> Option<LayerGeometry> {
        let (heads, dim) = if window.is_none() { self.global } else { (None, None) };
        let own = match self.kv_heads.as_slice() {
            [one] => *one,
            list => list.get(index).copied().unwrap_or(0),
        };
        let layer = LayerGeometry {
            kv_heads: heads.unwrap_or(own),
            head_dim_k: dim.unwrap_or(self.dim_k),
            head_dim_v: dim.unwrap_or(self.dim_v),
            window,
            is_latent: self.is_latent,
        };
        Some(layer).filter(|layer| layer.kv_heads > 0)
    }
}

/// Refuses models without a KV cache, which are on one of two lists.
fn check_attention(
    architecture: &str,
    state_space: &str,
    encoders: &str,
) -> Result<(), ConfigError> {
    let is_of = |list: &str| list.split_whitespace().any(|name| name == architecture);
    if is_of(state_space) {
        let why = "the model has no attention, and what it keeps of a sequence is not known";
        Err(ConfigError::NoCache { why })
    } else if is_of(encoders) {
        Err(ConfigError::NoCache { why: "the model is an encoder" })
    } else {
        Ok(())
    }
}

/// Makes a note about the last layers, if they have no cache of their own.
fn note_of_shared(shared: u32, all: u32) -> Option<String> {
    (shared > 0).then(|| {
        format!("the last {shared} of {all} layers read what earlier ones keep: not counted")
    })
}

/// Converts a count between 1 and `max` to `u32`.
pub(crate) fn bounded(field: &str, got: u64, max: u32) -> Result<u32, ConfigError> {
    let field = || field.to_owned();
    match u32::try_from(got) {
        Ok(0) => Err(ConfigError::Zero { field: field() }),
        Ok(count) if count <= max => Ok(count),
        _ => Err(ConfigError::TooLarge { field: field(), got, max }),
    }
}

/// Makes a note about layers without a cache of their own.
fn note_of_others(kept: usize, all: u32, what: &str) -> Option<String> {
    let others = to_usize(all).saturating_sub(kept);
    (others > 0).then(|| {
        format!(
            "{others} of {all} layers are {what}: what they keep of a sequence does not grow with \
             its tokens and is not counted"
        )
    })
}
