//! A model that reads one text through a cache of its own.
use candle_core::Tensor;
use kv::{
    AnyBackend, CacheSpec, Calibration, Determinism, KvCache, SequenceId, SpecError, StartOptions,
    StepInput,
};

use crate::model::{Llama, Tap};
use crate::stored::{Stored, blocks_of};

/// The one sequence there is.
const TEXT: SequenceId = SequenceId(0);
/// Tokens of a block; attention does not depend on it.
const BLOCK_SIZE: u32 = 16;

/// Teacher forcing: given tokens go in, and what the model makes of each comes out.
///
/// Every token is written to the cache before it is attended to, so a token sees all others, and
/// itself, as they are stored.
#[derive(Debug)]
pub(crate) struct Reader<'m> {
    model: &'m Llama,
    cache: KvCache,
}

impl<'m> Reader<'m> {
    /// Reserves a cache for texts of so many tokens.
    pub(crate) fn new(
        model: &'m Llama,
        backend: &AnyBackend,
        stored: &Stored,
        calibration: Option<&Calibration>,
        tokens_max: u32,
    ) -> anyhow::Result<Self> {
        let (spec, backend) = (spec(model, stored, tokens_max)?, backend.clone());
        let cache = match calibration {
            Some(calibration) => KvCache::with_calibration(backend, spec, calibration.clone())?,
            None => KvCache::new(backend, spec)?,
        };
        Ok(Self { model, cache })
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
fn spec(model: &Llama, stored: &Stored, tokens_max: u32) -> Result<CacheSpec, SpecError> {
    let cache = |blocks| {
        let cache = stored.cache(model.config()).max_sequences(1).paged(BLOCK_SIZE, blocks);
        cache.determinism(Determinism::BatchInvariant).build()
    };
    cache(blocks_of(&cache(1)?, tokens_max).max(1))
}
