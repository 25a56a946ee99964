//! A model that reads one text through a cache of its own.
use candle_core::Tensor;
use kv::backend::AnyBackend;
use kv::error::SpecError;
use kv::quant::Calibration;
use kv::spec::Determinism;
use kv::{CacheSpec, KvCache, KvFormat, SequenceId, StartOptions, StepInput};

use crate::error::Error;
use crate::model::{Decoder, Tap};
use crate::stored::{Stored, blocks_of};

/// The only sequence.
const TEXT: SequenceId = SequenceId(0);

/// Teacher forcing: given tokens go in, and what the model makes of each comes out.
///
/// Every token is written to the cache before it is attended to, so a token sees all others, and
/// itself, as they are stored.
#[derive(Debug)]
pub struct Reader<'m> {
    model: &'m Decoder,
    cache: KvCache,
}

impl<'m> Reader<'m> {
    /// Reserves a cache as [`spec`] describes it.
    ///
    /// # Errors
    /// [`Error::Cache`], as [`KvCache::new`].
    pub fn new(
        model: &'m Decoder,
        backend: &AnyBackend,
        spec: CacheSpec,
        calibration: Option<&Calibration>,
    ) -> Result<Self, Error> {
        let backend = backend.clone();
        let cache = match calibration {
            Some(calibration) => KvCache::with_calibration(backend, spec, calibration.clone())?,
            None => KvCache::new(backend, spec)?,
        };
        Ok(Self { model, cache })
    }

    /// Reserves a cache in f32, which keeps every value, for texts of up to `tokens_max` tokens.
    ///
    /// # Errors
    /// [`Error::Cache`], as [`KvCache::new`].
    pub fn f32(model: &'m Decoder, backend: &AnyBackend, tokens_max: u32) -> Result<Self, Error> {
        // Attention over f32 does not depend on the size of a block.
        let spec = spec(model, &Stored::plain(KvFormat::F32), 16, tokens_max)?;
        Self::new(model, backend, spec, None)
    }

    /// Begins another text.
    ///
    /// # Errors
    /// [`Error::Cache`] where the device fails.
    pub fn begin(&mut self) -> Result<(), Error> {
        self.cache.reset()?;
        self.cache.start(TEXT, &[], StartOptions::default())?;
        Ok(())
    }

    /// Reads the next tokens of the text and returns the logits after each: `[tokens, vocab]`.
    ///
    /// # Errors
    /// [`Error::Cache`] for a text that is too long and for a device that fails,
    /// [`Error::Tensor`].
    pub fn logits(&mut self, tokens: &[u32]) -> Result<Vec<f32>, Error> {
        let hidden = self.read(tokens, &mut |_| Ok(()))?;
        Ok(self.model.logits(&hidden)?.flatten_all()?.to_vec1()?)
    }

    /// Reads the next tokens; a row of the last layer for each.
    pub(crate) fn read(&mut self, tokens: &[u32], tap: &mut Tap<'_>) -> Result<Tensor, Error> {
        let mut step = self.cache.begin_step(&[StepInput::tokens(TEXT, tokens)])?;
        let hidden = self.model.hidden(&mut step, tokens, tap)?;
        step.commit()?;
        Ok(hidden)
    }

    /// Returns the description of the cache.
    pub fn spec(&self) -> &CacheSpec {
        self.cache.spec()
    }
}

/// Describes a cache for one sequence of `tokens_max` tokens, and no block more.
///
/// # Errors
/// As the builder's.
pub fn spec(
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
