//! The cache of a model, from a few choices.
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

/// How the memory of a cache is divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a report names each of them")]
pub enum Layout {
    /// Blocks that sequences take as they grow.
    Paged {
        /// Tokens of a block.
        block_size: u32,
        /// Blocks of the cache.
        num_blocks: u32,
    },
    /// One block for each sequence.
    Contiguous {
        /// Sequences at once.
        sequences: u32,
        /// Tokens of each.
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

/// The choices of a cache for a [`Scheduler`](crate::Scheduler).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheOptions {
    /// How its memory is divided.
    pub layout: Layout,
    /// How K and V are stored.
    pub stored: Stored,
    /// Whether prompts reuse what is cached of others.
    pub reuse: bool,
}

impl CacheOptions {
    /// A cache in f32 whose prompts reuse what is cached of others.
    pub fn new(layout: Layout) -> Self {
        Self { layout, stored: Stored::plain(KvFormat::F32), reuse: true }
    }

    /// Reserves the cache on a device. Formats that need constants take them from `calibration`.
    ///
    /// # Errors
    /// [`Error::Cache`] for choices that do not fit each other, and for a device without the memory
    /// or without the format.
    pub fn open(
        &self,
        model: &Decoder,
        backend: AnyBackend,
        calibration: Option<&Calibration>,
    ) -> Result<KvCache, Error> {
        let spec = self.spec(model.config())?;
        Ok(match calibration {
            Some(constants) => KvCache::with_calibration(backend, spec, constants.clone())?,
            None => KvCache::new(backend, spec)?,
        })
    }

    fn spec(&self, model: &ModelConfig) -> Result<CacheSpec, SpecError> {
        self.stored.spec(model, |builder| {
            let builder = builder
                .max_seq_len(model.context())
                // What a sequence says must not depend on its neighbours.
                .determinism(Determinism::BatchInvariant)
                .prefix_reuse(if self.reuse { PrefixReuse::Partial } else { PrefixReuse::Off })
                // Prompts that arrive together compute what they share once.
                .publish_at(PublishAt::Begin);
            match self.layout {
                Layout::Paged { block_size, num_blocks } => builder.paged(block_size, num_blocks),
                Layout::Contiguous { sequences, tokens } => builder.contiguous(sequences, tokens),
            }
        })
    }
}
