//! Kinds of caches for random operation sequences: small, so that blocks are short.
use kv_core::spec::{KeyMean, PrefixReuse, Transform};
use kv_core::{CacheSpec, KvFormat, Scaling};
use kv_testkit::rng::Rng;

use crate::recurrence::with_states;

pub(crate) const LAYERS: u16 = 2;
pub(crate) const HEADS: u32 = 2;
const BLOCK: u32 = 4;
const WINDOW: u32 = 12;
const SINKS: u32 = 4;

/// Kinds of caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Plain,
    Partial,
    Window,
    LayerWindow,
    OtherBlocks,
    Int8,
    Prefix,
    Tail,
    States,
    StatesAndWindow,
    StatesAlone,
}

impl Kind {
    pub(crate) const ALL: [Self; 11] = [
        Self::Plain,
        Self::Partial,
        Self::Window,
        Self::LayerWindow,
        Self::OtherBlocks,
        Self::Int8,
        Self::Prefix,
        Self::Tail,
        Self::States,
        Self::StatesAndWindow,
        Self::StatesAlone,
    ];

    /// Returns whether some layers have recurrent states.
    pub(crate) fn has_states(self) -> bool {
        matches!(self, Self::States | Self::StatesAndWindow | Self::StatesAlone)
    }
    /// Returns the layers with rows.
    pub(crate) fn layers(self) -> std::ops::Range<u16> {
        if self == Self::StatesAlone { 0..0 } else { 0..LAYERS }
    }

    /// Returns whether rows are rounded.
    pub(crate) fn is_coded(self) -> bool {
        matches!(self, Self::Int8 | Self::Prefix | Self::Tail)
    }
    /// Returns the values of a head.
    pub(crate) fn dim(self) -> u32 {
        if self.is_coded() { 32 } else { 4 }
    }
    /// Returns the values of a row.
    pub(crate) fn width(self) -> usize {
        (HEADS * self.dim()) as usize
    }
    /// Returns how far a value may be from what was written.
    pub(crate) fn tolerance(self) -> f32 {
        if self.is_coded() { 16.0 } else { 0.0 }
    }

    /// Returns first row and number of the rows that every sequence of `len` tokens has.
    pub(crate) fn rows(self, layer: u16, len: u32) -> Vec<(u32, u32)> {
        let in_layer = matches!(self, Self::LayerWindow | Self::StatesAndWindow) && layer == 1;
        let has_window = self == Self::Window || in_layer;
        if !has_window || len <= WINDOW {
            return vec![(0, len)];
        }
        let sinks = if self == Self::Window { SINKS } else { 0 };
        vec![(0, sinks), (len - WINDOW, WINDOW)]
    }

    /// Chooses a specification.
    pub(crate) fn spec(self, rng: &mut Rng) -> CacheSpec {
        let blocks = rng.pick(&[6, 12, 24, 64, 64]);
        let spec = CacheSpec::builder().layers(LAYERS).kv_heads(HEADS).head_dim(self.dim());
        let format = if self.is_coded() { KvFormat::Int8(Scaling::Row) } else { KvFormat::F32 };
        let spec = spec.format(format);
        let spec = match self {
            Self::Int8 => spec.transform(Transform::On),
            Self::Prefix => spec.transform(Transform::On).full_precision_prefix(6),
            Self::Tail => spec.tail(true).key_mean(KeyMean::PerBlock),
            _ => spec,
        };
        let spec = spec.paged(if self.is_coded() { 16 } else { BLOCK }, blocks);
        let spec = match self {
            Self::Window => spec.window_left(WINDOW).sink_tokens(SINKS),
            Self::LayerWindow | Self::StatesAndWindow => {
                spec.group([1], |group| group.window_left(WINDOW))
            }
            Self::OtherBlocks => {
                spec.group([1], |group| group.paged(2 * BLOCK, blocks.div_ceil(2)))
            }
            _ => spec,
        };
        let snapshots = rng.pick(&[2, 5, 30]);
        let spec = match self {
            Self::States => with_states(spec.layers(3), &[2], (snapshots, rng.pick(&[1, 1, 3]))),
            // The second layer has both.
            Self::StatesAndWindow => with_states(spec.layers(3), &[1, 2], (snapshots, 1)),
            Self::StatesAlone => with_states(spec, &[0, 1], (snapshots, 1)),
            _ => spec,
        };
        let is_partial = self == Self::Partial || self.has_states() && !rng.one_in(6);
        let reuse = if is_partial { PrefixReuse::Partial } else { PrefixReuse::FullBlocks };
        spec.prefix_reuse(reuse)
            .changes(rng.pick(&[2, 8, 256]))
            .events(rng.pick(&[16, 1 << 14]))
            .wipe_on_release(rng.one_in(2))
            .max_seq_len(200)
            .max_sequences(6)
            .build()
            .unwrap()
    }
}
