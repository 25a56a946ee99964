//! Runs a model over one text, with a cache of its own.
// Reads files that may be anything.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
use candle_core::{Device, Tensor};
use kv::backend::AnyBackend;
use kv::error::SpecError;
use kv::quant::{Calibration, Stored};
use kv::spec::Determinism;
use kv::{CacheSpec, KvCache, KvFormat, SequenceId, StartOptions, StepInput};
use kv_candle::CandleStep;

use crate::cache::blocks_of;
use crate::error::Error;
use crate::model::{Decoder, Tap};

/// The only sequence.
const TEXT: SequenceId = SequenceId(0);

/// Teacher forcing: reads given tokens and returns the logits after each.
///
/// Every token is written to the cache before attention, so a token attends to all others, and to
/// itself, in their stored form.
#[derive(Debug)]
pub struct Reader<'m> {
    model: &'m Decoder,
    cache: KvCache,
}

impl<'m> Reader<'m> {
    /// Allocates the cache that [`spec`] describes.
    ///
    /// # Errors
    /// [`Error::Cache`], see [`KvCache::new`].
    pub fn new(
        model: &'m Decoder,
        backend: &AnyBackend,
        spec: CacheSpec,
        calibration: Option<&Calibration>,
    ) -> Result<Self, Error> {
        let builder = KvCache::builder(backend.clone(), spec);
        let cache = builder.calibration(calibration.cloned()).build()?;
        Ok(Self { model, cache })
    }

    /// Allocates an f32 cache, which keeps every value, for texts of up to `tokens_max` tokens.
    ///
    /// # Errors
    /// [`Error::Cache`], see [`KvCache::new`].
    pub fn f32(model: &'m Decoder, backend: &AnyBackend, tokens_max: u32) -> Result<Self, Error> {
        // Attention over f32 does not depend on the block size.
        let spec = spec(model, &Stored::plain(KvFormat::F32), 16, tokens_max)?;
        Self::new(model, backend, spec, None)
    }

    /// Begins another text.
    ///
    /// # Errors
    /// [`Error::Cache`] if the device fails.
    pub fn begin(&mut self) -> Result<(), Error> {
        self.cache.reset()?;
        self.cache.start(TEXT, &[], StartOptions::default())?;
        Ok(())
    }

    /// Reads the next tokens of the text and returns the logits after each: `[tokens, vocab]`.
    ///
    /// # Errors
    /// [`Error::Cache`] for a text that is too long or a device failure, [`Error::Tensor`].
    pub fn logits(&mut self, tokens: &[u32]) -> Result<Vec<f32>, Error> {
        let hidden = self.read(tokens, &mut |_| Ok(()))?;
        Ok(self.model.logits(&hidden)?.flatten_all()?.to_vec1()?)
    }

    /// Reads the next tokens; returns a row of the last layer for each.
    pub(crate) fn read(&mut self, tokens: &[u32], tap: &mut Tap<'_>) -> Result<Tensor, Error> {
        let step = self.cache.begin_step(&[StepInput::tokens(TEXT, tokens)])?;
        let step = CandleStep::over(step, &Device::Cpu)?;
        let hidden = self.model.hidden(&step, tokens, tap)?;
        step.commit()?;
        Ok(hidden)
    }

    /// Returns the spec of the cache.
    pub fn spec(&self) -> &CacheSpec {
        self.cache.state().spec()
    }
}

/// Makes the spec of a cache for one sequence of `tokens_max` tokens, without a spare block.
///
/// # Errors
/// Those of the builder.
pub fn spec(
    model: &Decoder,
    stored: &Stored,
    block_size: u32,
    tokens_max: u32,
) -> Result<CacheSpec, SpecError> {
    let blocks = blocks_of(&model.config().few_blocks(stored, block_size)?, tokens_max).max(1);
    model.config().spec(stored, |cache| {
        let cache = cache.max_sequences(1).paged(block_size, blocks);
        cache.determinism(Determinism::BatchInvariant)
    })
}
