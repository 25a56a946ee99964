//! A model that reads one text through a cache of its own.
use candle_core::Tensor;
use kv::{
    AnyBackend, CacheSpec, Calibration, Determinism, KvCache, KvFormat, SequenceId, SpecError,
    StartOptions, StepInput,
};

use crate::model::{Decoder, Tap};
use crate::stored::{Stored, blocks_of};

/// The one sequence there is.
const TEXT: SequenceId = SequenceId(0);

/// Teacher forcing: given tokens go in, and what the model makes of each comes out.
///
/// Every token is written to the cache before it is attended to, so a token sees all others, and
/// itself, as they are stored.
#[derive(Debug)]
pub(crate) struct Reader<'m> {
    model: &'m Decoder,
    cache: KvCache,
}

impl<'m> Reader<'m> {
    /// Reserves a cache.
    pub(crate) fn new(
        model: &'m Decoder,
        backend: &AnyBackend,
        spec: CacheSpec,
        calibration: Option<&Calibration>,
    ) -> anyhow::Result<Self> {
        let backend = backend.clone();
        let cache = match calibration {
            Some(calibration) => KvCache::with_calibration(backend, spec, calibration.clone())?,
            None => KvCache::new(backend, spec)?,
        };
        Ok(Self { model, cache })
    }

    /// Reserves a cache that keeps every value, for texts of so many tokens.
    pub(crate) fn f32(
        model: &'m Decoder,
        backend: &AnyBackend,
        tokens_max: u32,
    ) -> anyhow::Result<Self> {
        // Attention over f32 does not depend on the size of a block.
        let spec = spec(model, &Stored::plain(KvFormat::F32), 16, tokens_max)?;
        Self::new(model, backend, spec, None)
    }

    /// Forgets what was read.
    pub(crate) fn begin(&mut self) -> anyhow::Result<()> {
        self.cache.reset()?;
        self.cache.start(TEXT, &[], StartOptions::default())?;
        Ok(())
    }

    /// Reads on; a row of the last layer for each token.
    pub(crate) fn read(&mut self, tokens: &[u32], tap: &mut Tap<'_>) -> anyhow::Result<Tensor> {
        let mut step = self.cache.begin_step(&[StepInput::tokens(TEXT, tokens)])?;
        let hidden = self.model.hidden(&mut step, tokens, tap)?;
        step.commit()?;
        Ok(hidden)
    }

    pub(crate) fn spec(&self) -> &CacheSpec {
        self.cache.spec()
    }
}

/// One sequence of so many tokens, and no block more.
pub(crate) fn spec(
    model: &Decoder,
    stored: &Stored,
    block_size: u32,
    tokens_max: u32,
) -> Result<CacheSpec, SpecError> {
    let blocks = blocks_of(&stored.few_blocks(model.config(), block_size)?, tokens_max).max(1);
    stored.spec(model.config(), |cache| {
        let cache = cache.max_sequences(1).paged(block_size, blocks);
        cache.determinism(Determinism::BatchInvariant)
    })
}
