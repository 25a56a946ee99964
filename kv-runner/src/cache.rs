//! The caches of a model: their options, and their specs.
use std::collections::BTreeSet;
use std::fmt;

use kv::backend::AnyBackend;
use kv::engine::Limits;
use kv::error::SpecError;
use kv::quant::{Calibration, Stored};
use kv::spec::{CacheSpecBuilder, Determinism, PrefixReuse, PublishAt, StateFormat};
use kv::{CacheSpec, DType, KvCache, KvFormat};

use crate::config::ModelConfig;
use crate::error::Error;
use crate::geometry::state_kinds;
use crate::model::Decoder;

/// The layout of a cache's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a report names each of them")]
pub enum Layout {
    /// Blocks that sequences allocate as they grow.
    Paged {
        /// Tokens per block.
        block_size: u32,
        /// Number of blocks.
        num_blocks: u32,
    },
    /// One block per sequence.
    Contiguous {
        /// Largest number of sequences.
        sequences: u32,
        /// Tokens per sequence.
        tokens: u32,
    },
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Paged { block_size, num_blocks } => write!(f, "paged {block_size},{num_blocks}"),
            Self::Contiguous { sequences, tokens } => write!(f, "contiguous {sequences}x{tokens}"),
        }
    }
}

/// The recurrent states in the cache of a hybrid model; caches of other models have none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a literal names each of the numbers")]
pub struct StateOptions {
    /// Slots for running states. A sequence with tokens takes one, and every entry of a step one
    /// more, one for each draft, and one for a snapshot that it goes on from.
    pub slots: u32,
    /// The most draft tokens of a sequence in a step.
    pub drafts: u32,
    /// States that are kept behind prompts and texts, from which other prompts go on; with 0, no
    /// prompt of a hybrid model is reused.
    pub snapshots: u32,
    /// The form of snapshots.
    pub format: StateFormat,
    /// Tokens of which the length of every snapshot is a multiple.
    pub grid: u32,
}

impl StateOptions {
    /// Makes the options for `sequences` at once with `drafts` draft tokens each: slots for all of
    /// them in one step, and four snapshots for each, in the type of the states and of any length:
    /// behind the system's message, the last message, the prompt and the text.
    pub fn for_sequences(sequences: u32, drafts: u32) -> Self {
        // The state of a sequence, a snapshot that it goes on from, and those of a step. A caller
        // may ask for any number: the builder refuses too many.
        let each = drafts.saturating_add(3);
        Self {
            slots: sequences.max(1).saturating_mul(each),
            drafts,
            snapshots: sequences.max(1).saturating_mul(4),
            format: StateFormat::Same,
            grid: 1,
        }
    }
}

impl Layout {
    /// Returns how many sequences have a state at once unless the options say so: those that an
    /// engine runs, or fewer if there are fewer blocks.
    fn sequences(self) -> u32 {
        match self {
            Self::Paged { num_blocks, .. } => num_blocks.min(Limits::new(0).max_batch),
            Self::Contiguous { sequences, .. } => sequences,
        }
    }
}

/// Changes of blocks that are kept until tiers follow them.
const CHANGES: usize = 1 << 14;

/// The options of a cache for an [`Engine`](kv::engine::Engine).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheOptions {
    /// The layout of its memory.
    pub layout: Layout,
    /// The stored format of K and V.
    pub stored: Stored,
    /// Whether prompts reuse cached prefixes of others.
    pub reuse: bool,
    /// Whether the cache lists changes of blocks, which [`TieredCache`](kv::tier::TieredCache)
    /// follow.
    pub tiers: bool,
    /// Events that the cache keeps until they are taken; 0 for none.
    pub events: usize,
    /// The recurrent states of a hybrid model.
    pub states: StateOptions,
}

impl CacheOptions {
    /// Makes the options of an f32 cache with prefix reuse, and with states for the sequences of
    /// the layout, or for 8 in a paged one.
    pub fn new(layout: Layout) -> Self {
        let states = StateOptions::for_sequences(layout.sequences(), 0);
        let stored = Stored::plain(KvFormat::F32);
        Self { layout, stored, reuse: true, tiers: false, events: 0, states }
    }

    /// Allocates the cache on a device. Formats that need constants take them from `calibration`.
    ///
    /// # Errors
    /// [`Error::Cache`] for options that contradict each other, and for a device that lacks the
    /// memory or the format.
    pub fn open(
        &self,
        model: &Decoder,
        backend: AnyBackend,
        calibration: Option<&Calibration>,
    ) -> Result<KvCache, Error> {
        let spec = self.spec(model.config())?;
        Ok(KvCache::builder(backend, spec).calibration(calibration.cloned()).build()?)
    }

    pub(crate) fn spec(&self, model: &ModelConfig) -> Result<CacheSpec, SpecError> {
        let snapshots = if self.reuse { self.states.snapshots } else { 0 };
        let states = StateOptions { snapshots, ..self.states };
        model.spec_with(&self.stored, &states, |builder| {
            let builder = builder
                .max_seq_len(model.context())
                // The text of a sequence must not depend on the batch.
                .determinism(Determinism::BatchInvariant)
                .prefix_reuse(if self.reuse { PrefixReuse::Partial } else { PrefixReuse::Off })
                // Prompts that arrive together compute their common prefix once.
                .publish_at(PublishAt::Begin)
                .changes(if self.tiers { CHANGES } else { 0 })
                .events(self.events);
            match self.layout {
                Layout::Paged { block_size, num_blocks } => builder.paged(block_size, num_blocks),
                Layout::Contiguous { sequences, tokens } => builder.contiguous(sequences, tokens),
            }
        })
    }
}

impl ModelConfig {
    /// Makes the spec of a cache for the model; `set` adds the memory layout and other settings for
    /// all layers.
    ///
    /// Layers with one window form a group, which keeps no more than that window. Layers without a
    /// window come first. The states of a hybrid model are those of one sequence without drafts and
    /// snapshots.
    ///
    /// # Errors
    /// Those of the builder.
    pub fn spec(
        &self,
        stored: &Stored,
        set: impl FnOnce(CacheSpecBuilder) -> CacheSpecBuilder,
    ) -> Result<CacheSpec, SpecError> {
        let states = StateOptions { snapshots: 0, ..StateOptions::for_sequences(1, 0) };
        self.spec_with(stored, &states, set)
    }

    /// Does what [`Self::spec`] does, with states of a hybrid model for more sequences.
    ///
    /// # Errors
    /// Those of the builder.
    pub fn spec_with(
        &self,
        stored: &Stored,
        states: &StateOptions,
        set: impl FnOnce(CacheSpecBuilder) -> CacheSpecBuilder,
    ) -> Result<CacheSpec, SpecError> {
        let builder = CacheSpec::builder().layers(self.layers());
        let builder = builder.kv_heads(self.kv_heads).head_dim(self.head_dim);
        let mut builder = set(stored.apply(builder));
        let windows: BTreeSet<_> =
            self.layer_kinds.iter().filter_map(|kind| kind.window_left).collect();
        for left in windows {
            let kinds = (0..).zip(&self.layer_kinds);
            let layers = kinds.filter(|(_, kind)| kind.window_left == Some(left));
            builder =
                builder.group(layers.map(|(layer, _)| layer), |group| group.window_left(left));
        }
        for (parts, layers) in state_kinds(&self.states) {
            // A geometry has no more layers than these.
            let layers = layers.into_iter().filter_map(|layer| u16::try_from(layer).ok());
            builder = builder.states(layers, |builder| {
                // As the model computes all of them.
                let shapes = parts.iter().map(|part| part.shape.as_slice());
                let builder = shapes.fold(builder, |all, shape| all.part(shape, DType::F32));
                let StateOptions { slots, drafts, snapshots, format, grid } = *states;
                builder.slots(slots).drafts(drafts).snapshots(snapshots, format).grid(grid)
            });
        }
        builder.build()
    }

    /// Makes the spec of the smallest cache for the model with blocks of `block_size` tokens, to
    /// ask it for sizes.
    ///
    /// # Errors
    /// Those of the builder.
    pub fn few_blocks(&self, stored: &Stored, block_size: u32) -> Result<CacheSpec, SpecError> {
        self.spec(stored, |cache| cache.paged(block_size, stored.blocks_min()))
    }
}

/// Returns the number of blocks that one sequence needs to grow to `tokens` tokens in steps of any
/// size, with its full-precision prefix and tail.
pub fn blocks_of(spec: &CacheSpec, tokens: u32) -> u32 {
    spec.groups().iter().map(|group| group.slot_map().blocks_reserved(tokens)).max().unwrap_or(0)
}
