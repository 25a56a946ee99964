//! The options of a model's cache.
use std::fmt;

use kv::backend::AnyBackend;
use kv::error::SpecError;
use kv::quant::Calibration;
use kv::spec::{Determinism, PrefixReuse, PublishAt};
use kv::{CacheSpec, KvCache, KvFormat};

use crate::config::ModelConfig;
use crate::error::Error;
use crate::model::Decoder;
use crate::stored::Stored;

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
}

impl CacheOptions {
    /// Makes the options of an f32 cache with prefix reuse.
    pub fn new(layout: Layout) -> Self {
        Self { layout, stored: Stored::plain(KvFormat::F32), reuse: true, tiers: false }
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

    fn spec(&self, model: &ModelConfig) -> Result<CacheSpec, SpecError> {
        self.stored.spec(model, |builder| {
            let builder = builder
                .max_seq_len(model.context())
                // The text of a sequence must not depend on the batch.
                .determinism(Determinism::BatchInvariant)
                .prefix_reuse(if self.reuse { PrefixReuse::Partial } else { PrefixReuse::Off })
                // Prompts that arrive together compute their common prefix once.
                .publish_at(PublishAt::Begin)
                .changes(if self.tiers { CHANGES } else { 0 });
            match self.layout {
                Layout::Paged { block_size, num_blocks } => builder.paged(block_size, num_blocks),
                Layout::Contiguous { sequences, tokens } => builder.contiguous(sequences, tokens),
            }
        })
    }
}
