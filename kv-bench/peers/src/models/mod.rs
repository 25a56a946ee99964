//! A whole decode step of a model on candle, with candle's own cache and with this one: the same
//! model, the same K and V, in one process.
//!
//! Embedding, norms, RoPE, projections and MLP are candle's in every contender ([`decoder`]), in
//! f32 with random weights. What differs is the cache and attention:
//!
//! - `candle`: concatenated tensors, repeated heads, two products and a softmax, as in
//!   candle-transformers' `llama`;
//! - `candle flash`: the same tensors, transposed for `candle_nn::attention::flash_attn`, as in its
//!   `qwen3` on a CPU;
//! - `kv`: `CandleCache`, with a step that is begun, attended in every layer and committed.
//!
//! All caches hold the same number of tokens for each sequence, because candle's hold one length
//! for a batch. Tokens of a step are dropped after it, so each timed step begins at the same
//! length.
//!
//! # Threads
//! Every contender uses all cores, as each does without being told: candle by `rayon`, this library
//! by the pool of its CPU backend. `RAYON_NUM_THREADS` limits candle alone.
//!
//! # What is checked
//! Before anything is timed, the logits of one step are compared with those of `candle`
//! ([`error_max`]); other logits are an error.
//!
//! # Memory
//! `cache` is the bytes of candle's K and V, and of all blocks of ours. The peak is the cache and
//! what the first step added to the memory of the process, by the kernel's mark of resident memory;
//! it is absent on systems other than Linux. Memory that the allocator had kept is not added, so
//! peaks of a few MiB are too low. Formats that do not fit beside candle are measured beside it
//! after the others, or left out.
mod candle;
mod case;
mod decoder;
mod memory;
mod ours;
mod report;

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use candle_core::{Device, Tensor};
use kv::KvFormat;

use self::candle::{Candle, Way};
use self::case::Case;
use self::decoder::Decoder;
use self::memory::Peak;
use self::ours::Ours;
pub(crate) use self::report::Report;
use self::report::{Line, Measured};
use crate::Options;

/// Turns of each contender.
const TURNS: usize = 9;
/// Steps that took this long together end a contender's turns after [`TURNS_LONG`], or after one
/// if a single step takes as long.
const LONG: Duration = Duration::from_secs(8);
const TURNS_LONG: usize = 3;
/// Time that the steps of a turn take together.
const TURN: Duration = Duration::from_millis(150);
const STEPS_MAX: u128 = 10;
/// Pause before a turn, in which the threads of the last contender stop spinning.
const PAUSE: Duration = Duration::from_millis(20);
/// Memory that is left to the rest of the machine.
const RESERVE: u64 = 1 << 30;

/// Returns the largest error of a format: the norm of the difference from candle's logits over the
/// norm of candle's logits. Wrong heads, positions or scales give more than the first.
fn error_max(format: KvFormat) -> f64 {
    match format {
        KvFormat::F32 => 1e-4,
        KvFormat::Bf16 | KvFormat::F16 => 5e-3,
        KvFormat::Int8(_) => 2e-2,
        _ => 1e-1,
    }
}

/// Measures every case that has all filters in its name.
pub(crate) fn run(options: &Options) -> Result<Report> {
    let cases = case::cases(options.is_full, &options.filters);
    ensure!(!cases.is_empty(), "no case has all of {:?} in its name", options.filters);
    let mut report = Report::new(rayon::current_num_threads());
    if !options.json {
        print!("{}", report.head());
    }
    let positions = cases.iter().map(|case| case.context + 1).max().unwrap_or(1);
    for shape in [case::SMOLLM2, case::WIDE] {
        let cases = || cases.iter().filter(|case| case.shape == shape);
        if cases().next().is_none() {
            continue;
        }
        let decoder = Decoder::random(shape, positions)?;
        for case in cases() {
            let measured = measure(case, &decoder).with_context(|| case.to_string())?;
            if !options.json {
                print!("{}", measured.text());
            }
            report.cases.push(measured);
        }
    }
    Ok(report)
}

/// The contender that computes a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Who {
    Candle(Way),
    /// Our cache with this number.
    Ours(usize),
}

/// All contenders of a case that are in memory at once.
struct Table<'a> {
    decoder: &'a Decoder,
    tokens: Tensor,
    candle: Candle,
    ours: Vec<(KvFormat, Ours)>,
}

impl<'a> Table<'a> {
    fn new(case: &Case, decoder: &'a Decoder, formats: &[KvFormat]) -> Result<Self> {
        let candle = Candle::filled(case)?;
        let ours = formats.iter().map(|format| {
            let ours = Ours::filled(case, *format, &candle);
            Ok((*format, ours.with_context(|| format.to_string())?))
        });
        let ours = ours.collect::<Result<_>>()?;
        let vocabulary = u32::try_from(case.shape.vocabulary)?;
        let tokens = (0..u32::try_from(case.batch)?).map(|at| (at * 7919 + 1) % vocabulary);
        let tokens: Vec<u32> = tokens.collect();
        let tokens = Tensor::from_vec(tokens, case.batch, &Device::Cpu)?;
        Ok(Self { decoder, tokens, candle, ours })
    }

    fn all(&self) -> Vec<Who> {
        let candle = [Way::Matmul, Way::Flash].map(Who::Candle);
        candle.into_iter().chain((0..self.ours.len()).map(Who::Ours)).collect()
    }

    /// Computes a step, and drops its tokens. Returns the time of the first, and the logits.
    fn step(&mut self, who: Who) -> Result<(Duration, Tensor)> {
        let Self { decoder, tokens, candle, ours } = self;
        let begin = Instant::now();
        let logits = match who {
            Who::Candle(way) => candle.step(decoder, tokens, way)?,
            Who::Ours(at) => ours[at].1.step(decoder, tokens)?,
        };
        let took = begin.elapsed();
        match who {
            Who::Candle(_) => candle.rewind()?,
            Who::Ours(at) => ours[at].1.rewind()?,
        }
        Ok((took, logits))
    }

    fn bytes(&self, who: Who) -> u64 {
        match who {
            Who::Candle(_) => self.candle.bytes(),
            Who::Ours(at) => self.ours[at].1.bytes(),
        }
    }

    fn error_max(&self, who: Who) -> f64 {
        match who {
            Who::Candle(_) => error_max(KvFormat::F32),
            Who::Ours(at) => error_max(self.ours[at].0),
        }
    }
}

/// The results of a contender.
struct Entry {
    who: Who,
    /// Time of the step whose logits were compared.
    first: Duration,
    error: f64,
    bytes: u64,
    peak: Option<u64>,
    samples: Vec<Duration>,
}

fn measure(case: &Case, decoder: &Decoder) -> Result<Measured> {
    let mut measured = Measured::new(case);
    let Groups { groups, refused } = Groups::new(case, memory::available())?;
    for (format, reason) in refused {
        measured.refuse(case.name(format), reason);
    }
    for formats in groups {
        let mut table = Table::new(case, decoder, &formats)?;
        let mut entries = check(&mut table)?;
        time(&mut table, &mut entries)?;
        let [candle, flash, ours @ ..] = &entries[..] else { unreachable!("candle has two") };
        for (format, ours) in formats.iter().zip(ours) {
            measured.lines.push(Line::new(case, *format, ours, [candle, flash]));
        }
    }
    Ok(measured)
}

/// Formats of a case by how they fit into memory.
struct Groups {
    /// Formats that fit beside candle at once.
    groups: Vec<Vec<KvFormat>>,
    /// Formats that fit in no group, with the reason.
    refused: Vec<(KvFormat, String)>,
}

impl Groups {
    fn new(case: &Case, available: Option<u64>) -> Result<Self> {
        let limit = available.map_or(u64::MAX, |bytes| bytes.saturating_sub(RESERVE));
        let candle = case.candle_bytes();
        let mut groups: Vec<(u64, Vec<KvFormat>)> = Vec::new();
        let mut refused = Vec::new();
        for format in &case.formats {
            let bytes = ours::bytes(&ours::spec(case, *format)?);
            let all = candle.saturating_add(bytes);
            if all > limit {
                let [all, candle, limit] = [all, candle, limit].map(|bytes| bytes >> 20);
                let reason = format!("needs {all} MiB, {candle} of them for candle");
                refused.push((*format, format!("{reason}; {limit} MiB are free")));
                continue;
            }
            match groups.iter_mut().find(|(taken, _)| taken.saturating_add(bytes) <= limit) {
                Some((taken, formats)) => {
                    *taken += bytes;
                    formats.push(*format);
                }
                None => groups.push((all, vec![*format])),
            }
        }
        let groups = groups.into_iter().map(|(_, formats)| formats).collect();
        Ok(Self { groups, refused })
    }
}

/// Computes one step of each contender; fails if their logits differ.
fn check(table: &mut Table<'_>) -> Result<Vec<Entry>> {
    let mut expected = Vec::new();
    let mut entries = Vec::new();
    for who in table.all() {
        let peak = Peak::begin();
        let (first, logits) = table.step(who)?;
        let rise = peak.and_then(|peak| peak.end());
        let logits: Vec<f32> = logits.flatten_all()?.to_vec1()?;
        if expected.is_empty() {
            expected.clone_from(&logits);
        }
        let error = error(&logits, &expected);
        // A NaN must not pass.
        ensure!(
            error <= table.error_max(who),
            "{who:?} computes something else: logits are {error:.1e} off"
        );
        let bytes = table.bytes(who);
        let peak = rise.map(|rise| bytes.saturating_add(rise));
        entries.push(Entry { who, first, error, bytes, peak, samples: Vec::new() });
    }
    Ok(entries)
}

/// Returns the norm of the difference over the norm of what was expected.
fn error(values: &[f32], expected: &[f32]) -> f64 {
    if values.len() != expected.len() {
        return f64::INFINITY;
    }
    let pairs = || values.iter().zip(expected).map(|(a, b)| (f64::from(*a), f64::from(*b)));
    let difference: f64 = pairs().map(|(a, b)| (a - b).powi(2)).sum();
    (difference / pairs().map(|(_, b)| b.powi(2)).sum::<f64>()).sqrt()
}

/// Times the contenders, interleaved.
fn time(table: &mut Table<'_>, entries: &mut [Entry]) -> Result<()> {
    for turn in 0..TURNS {
        let mut order: Vec<_> = entries.iter_mut().collect();
        if turn % 2 == 1 {
            order.reverse();
        }
        for entry in order {
            let spent: Duration = entry.samples.iter().sum();
            let turns = match spent > LONG {
                true if entry.first > LONG => 1,
                true => TURNS_LONG,
                false => TURNS,
            };
            if turn >= turns {
                continue;
            }
            std::thread::sleep(PAUSE);
            let steps = TURN.as_nanos() / entry.first.as_nanos().max(1);
            let steps = usize::try_from(steps.clamp(1, STEPS_MAX))?;
            if entry.first < TURN * 4 {
                // Threads wake up, and the weights move into the caches.
                table.step(entry.who)?;
            }
            for _ in 0..steps {
                entry.samples.push(table.step(entry.who)?.0);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use kv::quant::{ScaleGroup, Scaling};

    use super::*;
    use crate::models::case::Shape;

    const SMALL: Shape = Shape {
        name: "small",
        hidden: 32,
        layers: 3,
        q_heads: 4,
        kv_heads: 2,
        head_dim: 16,
        mlp: 64,
        vocabulary: 100,
    };

    fn case(batch: usize, formats: &[KvFormat]) -> Case {
        Case { shape: SMALL, batch, context: 600, formats: formats.to_vec() }
    }

    /// Both ways of candle and every format of ours give the same logits, for one sequence and for
    /// several, and again after the tokens of steps were dropped.
    #[test]
    fn all_contenders_compute_the_same() {
        let formats = [
            KvFormat::F32,
            KvFormat::Bf16,
            KvFormat::Int8(Scaling::Row),
            KvFormat::L4(ScaleGroup::Row),
        ];
        for batch in [1, 3] {
            let decoder = Decoder::random(SMALL, 601).unwrap();
            let mut table = Table::new(&case(batch, &formats), &decoder, &formats).unwrap();
            for _ in 0..2 {
                let entries = check(&mut table).unwrap();
                assert_eq!(entries.len(), 6);
                assert!(entries[2].error < 1e-5, "{}", entries[2].error);
            }
        }
    }

    #[test]
    fn another_cache_is_detected() {
        let decoder = Decoder::random(SMALL, 700).unwrap();
        let formats = [KvFormat::F32];
        let mut table = Table::new(&case(2, &formats), &decoder, &formats).unwrap();
        let other = Case { context: 599, ..case(2, &formats) };
        table.ours[0].1 = Ours::filled(&other, KvFormat::F32, &table.candle).unwrap();
        let error = check(&mut table).err().unwrap().to_string();
        assert!(error.contains("computes something else"), "{error}");
    }

    #[test]
    fn formats_share_memory_with_candle_or_are_left_out() {
        let [f32, bf16] = [KvFormat::F32, KvFormat::Bf16];
        let case = case(1, &[f32, bf16]);
        let of = |format| ours::bytes(&ours::spec(&case, format).unwrap());
        let candle = case.candle_bytes() + RESERVE;
        let groups = |available| Groups::new(&case, available).unwrap();
        assert_eq!(groups(None).groups, [vec![f32, bf16]]);
        assert_eq!(groups(Some(candle + of(f32))).groups, [vec![f32], vec![bf16]]);
        let Groups { groups: fit, refused } = groups(Some(candle + of(bf16)));
        assert_eq!((fit, refused[0].0), (vec![vec![bf16]], f32));
        assert_eq!(groups(Some(0)).refused.len(), 2);
    }

    #[test]
    fn errors_are_relative_and_nan_is_none() {
        assert_eq!(error(&[3.0, -4.0], &[3.0, -4.0]), 0.0);
        assert!((error(&[3.0, -4.5], &[3.0, -4.0]) - 0.1).abs() < 1e-6);
        assert!(error(&[f32::NAN, 1.0], &[1.0, 1.0]).is_nan());
        assert_eq!(error(&[3.0], &[3.0, 1.0]), f64::INFINITY);
    }
}
