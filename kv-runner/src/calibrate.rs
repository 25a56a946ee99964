//! Calibration constants of quantised storage: measured on a model, or read from a file.
use std::path::Path;

use candle_core::{D, IndexOp};
use kv::backend::AnyBackend;
use kv::quant::Calibration;
use kv::quant::calibrate::Calibrator;
use kv::quant::file::{self, Metadata};

use crate::error::{Error, InFile};
use crate::model::{Decoder, Tapped};
use crate::num::{to_u32, to_usize};
use crate::reader::Reader;

/// Tokens per forward pass.
const CHUNK: usize = 256;
/// Tokens per sequence: a longer text is read in several sequences, each from an empty cache.
const SEQUENCE_MAX: usize = 2048;
/// Number of tokens for constants that are made during a run.
const ONLINE_TOKENS: u32 = 256;

/// Reads the constants of a model from a file that [`to_file`] made.
///
/// # Errors
/// [`Error::File`] with the cause: [`Error::Io`], or [`Error::CalibrationFile`], also for a file of
/// another model.
pub fn load(path: &Path, model: &Decoder) -> Result<Calibration, Error> {
    let bytes = std::fs::read(path).in_file(path)?;
    let (calibration, metadata) = file::read(&bytes).in_file(path)?;
    metadata.check_model(&model.fingerprint()).in_file(path)?;
    Ok(of_all_layers(&calibration, model))
}

/// Returns the constants of a model from a calibrator of [`observe`].
///
/// # Errors
/// [`Error::Calibrate`] if the calibrator has seen too few tokens.
pub fn finish(calibrator: &Calibrator, model: &Decoder) -> Result<Calibration, Error> {
    Ok(of_all_layers(&calibrator.finish()?, model))
}

/// Numbers the layers that attend: those of a calibrator. The others keep nothing that is stored in
/// another format.
fn attending(model: &Decoder) -> impl Iterator<Item = Option<u16>> {
    let mut numbers = 0_u16..;
    let kinds = model.config().layer_kinds.iter();
    kinds.map(move |kind| if kind.attends { numbers.next() } else { None })
}

/// Spreads the constants of the layers that attend over all layers.
fn of_all_layers(calibration: &Calibration, model: &Decoder) -> Calibration {
    let own = calibration.layers();
    let of = |index: Option<u16>| index.and_then(|index| own.get(usize::from(index)).cloned());
    Calibration::new(attending(model).map(|index| of(index).unwrap_or_default()).collect())
}

/// Encodes the constants of a model as the bytes of a file.
///
/// # Errors
/// [`Error::Calibrate`] if the calibrator has seen too few tokens.
pub fn to_file(calibrator: &Calibrator, model: &Decoder) -> Result<Vec<u8>, Error> {
    let metadata = Metadata::of(calibrator, model.fingerprint());
    Ok(file::write(&calibrator.finish()?, &metadata)?)
}

/// Runs the model over a text and passes its rows to one calibrator for each length of the
/// full-precision prefix in `prefixes`. The cache is f32, so that the constants are those of the
/// model's own rows. `progress` gets the number of tokens after each chunk.
///
/// # Errors
/// [`Error::Cache`] for a device failure, [`Error::Calibrate`] for rows that are not finite.
pub fn observe(
    model: &Decoder,
    backend: &AnyBackend,
    ids: &[u32],
    prefixes: &[u32],
    progress: &mut dyn FnMut(usize),
) -> Result<Vec<Calibrator>, Error> {
    let mut observer = Observer::new(model, prefixes)?;
    let sequence = SEQUENCE_MAX.min(to_usize(model.config().context));
    let mut reader = Reader::f32(model, backend, to_u32(sequence.min(ids.len())))?;
    for ids in ids.chunks(sequence.max(1)) {
        reader.begin()?;
        for (chunk, index) in ids.chunks(CHUNK).zip(0_usize..) {
            let position = to_u32(index * CHUNK);
            reader.read(chunk, &mut |rows| observer.see(position, rows))?;
            progress(chunk.len());
        }
    }
    Ok(observer.calibrators)
}

/// Makes constants from the first tokens of a sequence: from its prompt and, if that is short, from
/// tokens that the model generates after it. They are constant from then on.
///
/// # Errors
/// Those of [`observe`]; also [`Error::Calibrate`] if the model's context is too short.
pub fn online(
    model: &Decoder,
    backend: &AnyBackend,
    prompt: &[u32],
    full_precision_prefix: u32,
) -> Result<Calibration, Error> {
    let mut observer = Observer::new(model, &[full_precision_prefix])?;
    // The prefix may be any number.
    let wanted = ONLINE_TOKENS.saturating_add(full_precision_prefix).min(model.config().context);
    let mut reader = Reader::f32(model, backend, wanted)?;
    reader.begin()?;
    let mut position = 0_u32;
    let mut new = prompt.iter().copied().take(to_usize(wanted)).collect::<Vec<_>>();
    while !new.is_empty() {
        let hidden = reader.read(&new, &mut |rows| observer.see(position, rows))?;
        position += to_u32(new.len());
        let last = hidden.i(new.len() - 1..)?;
        new.clear();
        if position < wanted {
            new.extend(model.logits(&last)?.argmax(D::Minus1)?.to_vec1::<u32>()?);
        }
    }
    match observer.calibrators.first() {
        Some(calibrator) => finish(calibrator, model),
        None => unreachable!("one was made for one full-precision prefix"),
    }
}

/// Calibrators that see the same rows.
struct Observer {
    calibrators: Vec<Calibrator>,
    /// The number of every layer among those that attend.
    numbers: Vec<Option<u16>>,
    q_heads: u32,
}

impl Observer {
    fn new(model: &Decoder, prefixes: &[u32]) -> Result<Self, Error> {
        let config = model.config();
        let head_dims = [config.head_dim; 2];
        let numbers: Vec<_> = attending(model).collect();
        let own = numbers.iter().flatten().max().map_or(0, |last| last.saturating_add(1));
        let calibrator = |prefix: &u32| {
            let new = Calibrator::new(own, config.kv_heads, head_dims)?;
            Ok(new.skip_first(*prefix))
        };
        let calibrators = prefixes.iter().map(calibrator).collect::<Result<_, Error>>()?;
        Ok(Self { calibrators, numbers, q_heads: config.heads })
    }

    fn see(&mut self, first_position: u32, rows: &Tapped<'_>) -> Result<(), Error> {
        let Tapped { layer, q, k, v } = *rows;
        let Some(layer) = self.numbers.get(usize::from(layer)).copied().flatten() else {
            unreachable!("only layers that attend have rows")
        };
        for calibrator in &mut self.calibrators {
            calibrator.observe(layer, first_position, k, v, q, self.q_heads)?;
        }
        Ok(())
    }
}
