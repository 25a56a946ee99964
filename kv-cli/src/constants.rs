//! The constants of quantised storage: made from what the model computes, or read from a file.
use std::path::Path;

use anyhow::Context;
use candle_core::{D, IndexOp};
use kv::quant::calibrate::Calibrator;
use kv::quant::file::{self, Metadata};
use kv::{AnyBackend, Calibration};

use crate::model::{Decoder, Tapped};
use crate::num::{to_u32, to_u64, to_usize};
use crate::progress;
use crate::reader::Reader;

/// Tokens that go through the model at once.
const CHUNK: usize = 256;
/// Tokens of one sequence: a longer text is read in several, each from an empty cache.
const SEQUENCE_MAX: usize = 2048;
/// Tokens that constants made on the way come from.
const ONLINE_TOKENS: u32 = 256;

/// Constants of this model from a file that `kv calibrate` wrote.
pub(crate) fn load(path: &Path, model: &Decoder) -> anyhow::Result<Calibration> {
    let describe = || path.display().to_string();
    let bytes = std::fs::read(path).with_context(describe)?;
    let (calibration, metadata) = file::read(&bytes).with_context(describe)?;
    metadata.check_model(&model.fingerprint()?).with_context(describe)?;
    Ok(calibration)
}

/// The bytes of such a file.
pub(crate) fn file(calibrator: &Calibrator, model: &Decoder) -> anyhow::Result<Vec<u8>> {
    let metadata = Metadata::of(calibrator, model.fingerprint()?);
    Ok(file::write(&calibrator.finish()?, &metadata)?)
}

/// Shows a text to a calibrator for each of these numbers of sinks. The model reads with an f32
/// cache, so that the constants are those of its own rows.
pub(crate) fn observe(
    model: &Decoder,
    backend: &AnyBackend,
    ids: &[u32],
    sinks: &[u32],
) -> anyhow::Result<Vec<Calibrator>> {
    let mut observer = Observer::new(model, sinks)?;
    let sequence = SEQUENCE_MAX.min(to_usize(model.config().context));
    let mut reader = Reader::f32(model, backend, to_u32(sequence.min(ids.len())))?;
    let bar = progress::tokens(to_u64(ids.len())).with_message("calibration");
    for ids in ids.chunks(sequence.max(1)) {
        reader.begin()?;
        for (chunk, index) in ids.chunks(CHUNK).zip(0_usize..) {
            let position = to_u32(index.saturating_mul(CHUNK));
            reader.read(chunk, &mut |rows| observer.see(position, rows))?;
            bar.inc(to_u64(chunk.len()));
        }
    }
    bar.finish_and_clear();
    Ok(observer.calibrators)
}

/// Constants from the first tokens of a sequence: of its prompt, and where that is short, of what
/// the model goes on with. From then on they are frozen.
pub(crate) fn online(
    model: &Decoder,
    backend: &AnyBackend,
    prompt: &[u32],
    sinks: u32,
) -> anyhow::Result<Calibration> {
    let mut observer = Observer::new(model, &[sinks])?;
    let wanted = ONLINE_TOKENS.saturating_add(sinks).min(model.config().context);
    let mut reader = Reader::f32(model, backend, wanted)?;
    reader.begin()?;
    let mut position = 0_u32;
    let mut new = prompt.iter().copied().take(to_usize(wanted)).collect::<Vec<_>>();
    while !new.is_empty() {
        let hidden = reader.read(&new, &mut |rows| observer.see(position, rows))?;
        position = position.saturating_add(to_u32(new.len()));
        let last = hidden.i(new.len().saturating_sub(1)..)?;
        new.clear();
        if position < wanted {
            new.extend(model.logits(&last)?.argmax(D::Minus1)?.to_vec1::<u32>()?);
        }
    }
    let mut calibrators = observer.calibrators.iter();
    let calibrator = calibrators.next().context("one was made for one number of sinks")?;
    Ok(calibrator.finish()?)
}

/// Calibrators that see the same rows.
struct Observer {
    calibrators: Vec<Calibrator>,
    q_heads: u32,
}

impl Observer {
    fn new(model: &Decoder, sinks: &[u32]) -> anyhow::Result<Self> {
        let config = model.config();
        let head_dims = [config.head_dim; 2];
        let calibrator = |sinks: &u32| {
            let new = Calibrator::new(config.layers(), config.kv_heads, head_dims)?;
            Ok(new.skip_first(*sinks))
        };
        let calibrators = sinks.iter().map(calibrator).collect::<anyhow::Result<_>>()?;
        Ok(Self { calibrators, q_heads: config.heads })
    }

    fn see(&mut self, first_position: u32, rows: &Tapped<'_>) -> anyhow::Result<()> {
        let Tapped { layer, q, k, v } = *rows;
        for calibrator in &mut self.calibrators {
            calibrator.observe(layer, first_position, k, v, q, self.q_heads)?;
        }
        Ok(())
    }
}
