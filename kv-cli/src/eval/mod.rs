//! `kv eval`: the accuracy of stored formats, each against f32 on the same text.
//!
//! All caches read the text together, chunk by chunk, so that f32 is computed once and only the
//! logits of one chunk are in memory.
mod metrics;
mod report;

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, bail};
use kv::KvFormat;
use kv::quant::Calibration;
use kv::quant::Stored;
use kv_runner::calibrate;
use kv_runner::reader::{self, Reader};
use rayon::prelude::*;

use crate::args::EvalArgs;
use crate::loaded::Loaded;
use crate::num::{to_u32, to_u64, to_usize};
use crate::{chart, output, progress};
use metrics::{Distribution, Score, Summary};
use report::{Line, Report};

/// Tokens per forward pass.
const CHUNK: usize = 256;
/// Default size of a window, and most windows.
const WINDOW: u32 = 512;
const WINDOWS_MAX: usize = 8;

/// The text is too short for the requested windows.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the text has {got} tokens, {needed} are needed: {skipped} skipped, and {windows} windows of \
     {window}"
)]
struct TextTooShort {
    got: usize,
    needed: usize,
    skipped: usize,
    windows: usize,
    window: usize,
}

/// A format to measure.
struct Format {
    /// The text of the option.
    label: String,
    /// The format with the options of the run.
    stored: Stored,
}

/// The cache of one format, and its scores so far.
struct FormatRun<'m> {
    label: String,
    reader: Reader<'m>,
    scores: Vec<Score>,
}

pub(crate) fn run(args: &EvalArgs) -> anyhow::Result<()> {
    if let Some(path) = &args.plot {
        output::check_writable(path)?;
    }
    let has_calibration = args.calib.is_some() || args.calib_text.is_some();
    let formats = formats(args, has_calibration)?;
    let loaded = Loaded::open(&args.model)?;
    let ids = loaded.read_tokens(&args.text)?;
    let windows = windows(args, &ids, loaded.model.config().context())?;
    let constants = calibrate(args, &loaded, &formats)?;
    let window = windows.first().map_or(0, |window| to_u32(window.len()));
    let cut = (args.block_size, window);
    let format_runs = format_runs(&loaded, formats, &constants.by_prefix, cut)?;
    let format_runs = evaluate(&loaded, format_runs, &windows)?;
    let measured = format_runs.into_iter().filter_map(|format_run| {
        let summary = Summary::of(&format_run.scores)?;
        let spec = format_run.reader.spec();
        Some((Line::new(format_run.label, spec, &summary), spec.memory().bytes_per_token))
    });
    let report = Report {
        args,
        loaded: &loaded,
        windows: &windows,
        constants: constants.about,
        lines: measured.collect(),
    };
    report.print()?;
    if let Some(path) = &args.plot {
        chart::write(path, &[report.chart()])?;
    }
    Ok(())
}

/// Returns the formats to measure, with its prefix prefix transform of the options.
fn formats(args: &EvalArgs, has_calibration: bool) -> anyhow::Result<Vec<Format>> {
    let mut formats = args.format.clone();
    if formats.is_empty() {
        let all = KvFormat::all().filter(|format| *format != KvFormat::F32);
        let can = all.filter(|format| has_calibration || format.given_scales().is_none());
        formats = can.map(Stored::plain).collect();
    }
    let format = |mut stored: Stored| {
        let label = stored.to_string();
        if stored.calibration.is_some() {
            bail!("{label}: one calibration serves all formats, give --calib or --calib-text");
        }
        if !has_calibration {
            stored.check_scales("--calib-text FILE or --calib FILE")?;
        }
        if args.no_transform {
            stored.transform = stored.transform.or(Some(false));
        }
        stored.full_precision_prefix = stored.full_precision_prefix.or(args.full_precision_prefix);
        Ok(Format { label, stored })
    };
    formats.into_iter().map(format).collect()
}

/// Returns the parts of the text to read.
fn windows<'t>(args: &EvalArgs, ids: &'t [u32], context: u32) -> anyhow::Result<Vec<&'t [u32]>> {
    let window = args.window.unwrap_or(WINDOW.min(context));
    if window > context {
        bail!("--window {window}: the model's context is {context}");
    }
    let skipped = to_usize(args.skip_tokens);
    let rest = ids.get(skipped..).unwrap_or_default();
    let window = to_usize(window);
    let held = rest.len().checked_div(window).unwrap_or(0);
    let windows = args.windows.map_or(held.clamp(1, WINDOWS_MAX), to_usize);
    if windows > held {
        // A caller may ask for any windows.
        let needed = windows.saturating_mul(window).saturating_add(skipped);
        return Err(TextTooShort { got: ids.len(), needed, skipped, windows, window }.into());
    }
    Ok(rest.chunks_exact(window.max(1)).take(windows).collect())
}

/// The calibration of the formats.
struct Constants {
    /// Constants by the length of the full-precision prefix: its tokens are left out, because they
    /// stay in 16 bits. A file's constants are used for any length.
    by_prefix: BTreeMap<u32, Calibration>,
    /// The source of the constants.
    about: String,
}

fn calibrate(args: &EvalArgs, loaded: &Loaded, formats: &[Format]) -> anyhow::Result<Constants> {
    let prefixes: BTreeSet<_> =
        formats.iter().map(|format| format.stored.full_precision_prefix()).collect();
    if let Some(path) = &args.calib {
        let calibration = calibrate::load(path, &loaded.model)?;
        let by_prefix = prefixes.into_iter().map(|prefix| (prefix, calibration.clone())).collect();
        return Ok(Constants { by_prefix, about: format!("constants from {}", path.display()) });
    }
    let Some(path) = &args.calib_text else {
        return Ok(Constants { by_prefix: BTreeMap::new(), about: "no calibration".to_owned() });
    };
    let mut ids = loaded.read_tokens(path)?;
    ids.truncate(to_usize(args.calib_tokens));
    let prefixes: Vec<_> = prefixes.into_iter().collect();
    let calibrators = progress::calibrate(&loaded.model, &loaded.backend, &ids, &prefixes)?;
    let finished = calibrators.iter().map(|calibrator| {
        let finished = calibrate::finish(calibrator, &loaded.model);
        finished.with_context(|| path.display().to_string())
    });
    let by_prefix = prefixes.into_iter().zip(finished).map(|(prefix, made)| Ok((prefix, made?)));
    let about = format!("constants from {} tokens of {}", ids.len(), path.display());
    Ok(Constants { by_prefix: by_prefix.collect::<anyhow::Result<_>>()?, about })
}

/// Makes a cache for every format.
fn format_runs<'m>(
    loaded: &'m Loaded,
    formats: Vec<Format>,
    calibrations: &BTreeMap<u32, Calibration>,
    (block_size, window): (u32, u32),
) -> anyhow::Result<Vec<FormatRun<'m>>> {
    let format_run = |Format { label, stored }: Format| {
        let constants = calibrations.get(&stored.full_precision_prefix());
        let device = &loaded.backend;
        let spec = reader::spec(&loaded.model, &stored, block_size, window);
        let reader = spec
            .map_err(kv_runner::Error::from)
            .and_then(|spec| Reader::new(&loaded.model, device, spec, constants));
        let reader = reader.with_context(|| label.clone())?;
        Ok(FormatRun { label, reader, scores: Vec::new() })
    };
    formats.into_iter().map(format_run).collect()
}

/// Reads all windows with every format and with f32.
fn evaluate<'m>(
    loaded: &'m Loaded,
    mut format_runs: Vec<FormatRun<'m>>,
    windows: &[&[u32]],
) -> anyhow::Result<Vec<FormatRun<'m>>> {
    let window = windows.first().map_or(0, |window| window.len());
    let mut plain = Reader::f32(&loaded.model, &loaded.backend, to_u32(window))?;
    let read = window.saturating_sub(1) * windows.len();
    let bar = progress::tokens(to_u64(read * (format_runs.len() + 1)));
    for window in windows {
        plain.begin()?;
        for format_run in &mut format_runs {
            format_run.reader.begin()?;
        }
        // The last token has no successor to predict.
        let next = window.get(1..).unwrap_or_default();
        for (chunk, next) in window.chunks(CHUNK).zip(next.chunks(CHUNK)) {
            let chunk = chunk.get(..next.len()).unwrap_or(chunk);
            let expected = plain.logits(chunk)?;
            bar.inc(to_u64(chunk.len()));
            for format_run in &mut format_runs {
                let got = format_run.reader.logits(chunk)?;
                let scores = compare(&expected, &got, next);
                format_run.scores.extend(scores.with_context(|| format_run.label.clone())?);
                bar.inc(to_u64(chunk.len()));
            }
        }
    }
    bar.finish_and_clear();
    Ok(format_runs)
}

/// Scores one chunk: rows of logits of f32 and of a format, and the tokens that follow.
fn compare(expected: &[f32], got: &[f32], next: &[u32]) -> anyhow::Result<Vec<Score>> {
    let vocab = expected.len().checked_div(next.len()).unwrap_or(0).max(1);
    let rows = expected.par_chunks(vocab).zip(got.par_chunks(vocab)).zip(next.par_iter());
    let score = |((expected, got), next): ((&[f32], &[f32]), &u32)| {
        let expected = Distribution::new(expected).context("f32")?;
        let score = expected.compare(&Distribution::new(got)?, to_usize(*next));
        score.context("a token is beyond the vocabulary")
    };
    rows.map(score).collect()
}
