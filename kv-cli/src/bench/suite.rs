//! `kv bench --suite`: every case of a grid beside its limit.
use std::sync::Arc;

use anyhow::Context;
use indicatif::ProgressBar;
use kv::backend::Backend;
use kv::cpu::AttendShape;
use kv::cuda::{CudaBackend, CudaOptions};
use kv::{CacheError, Device, DeviceError, DeviceErrorKind};

use super::clock::{Samples, gb_per_s};
use super::grid::{self, Case};
use super::limit::{Limit, Walk};
use super::lines::{LimitKind, Measured, Report};
use super::plain::PlainCopy;
use super::planned::Planned;
use super::report::RunsOn;
use super::rig::Rig;
use super::work::{self, Operation};
use super::{open_cpu, open_wgpu, plot};
use crate::args::BenchArgs;
use crate::memory::{Bytes, available};
use crate::num::to_u64;
use crate::{output, progress};

/// Memory that is assumed where a card does not tell.
const CARD_MEMORY: u64 = 16 << 30;
/// Memory to read: at least, and at most.
const READ: (u64, u64) = (1 << 28, 1 << 32);
/// The part of the memory allowed that is read, if that is between the two.
const READ_PART: u64 = 8;

pub(super) fn run(args: &BenchArgs) -> anyhow::Result<()> {
    if args.explain {
        return explain(args);
    }
    if let Some(path) = &args.plot {
        output::check_writable(path)?;
    }
    let report = match &args.backend {
        Device::Cpu => on_cpu(args),
        Device::Wgpu { adapter } => {
            let backend = open_wgpu(adapter)?;
            Suite::new(args, backend.describe().runs_on)?.measure(vec![backend])
        }
        Device::Cuda { index } => {
            let backend = CudaBackend::open(&CudaOptions::new(*index))?;
            Suite::new(args, backend.describe().runs_on)?.measure(vec![backend])
        }
        other => anyhow::bail!("{other} cannot be measured"),
    }?;
    if let Some(path) = &args.plot {
        let svg = plot::draw(&report.lines())?;
        std::fs::write(path, svg).with_context(|| path.display().to_string())?;
    }
    if args.json {
        return output::json(&report.lines());
    }
    output::text(&report.show())
}

/// Prints which attention strategy runs each shape, for every instruction set that was asked for.
fn explain(args: &BenchArgs) -> anyhow::Result<()> {
    let suite = Suite::new(args, RunsOn::Cpu)?;
    let isas =
        if args.isa.is_empty() { vec![None] } else { args.isa.iter().copied().map(Some).collect() };
    let mut lines: Vec<String> = Vec::new();
    for isa in isas {
        let cpu = open_cpu(isa, None)?;
        for case in &suite.cases {
            let queries = match case.operation {
                Operation::Decode => 1,
                Operation::Prefill => case.shape.context,
                _ => continue,
            };
            let shape = AttendShape {
                formats: [case.stored.k, case.stored.v],
                head_dims: [case.shape.head_dim; 2],
                group: case.shape.q_heads.div_euclid(case.shape.kv_heads.max(1)),
                queries,
            };
            let why = cpu.explain(&shape).unwrap_or_else(|| "no kernels".into());
            let AttendShape { group, head_dims: [dim, _], .. } = shape;
            let formats = case.stored.formats();
            let line = format!(
                "{}: {formats}, group {group}, head_dim {dim}, {queries} queries: {why}",
                cpu.isa()
            );
            if !lines.contains(&line) {
                lines.push(line);
            }
        }
    }
    anyhow::ensure!(!lines.is_empty(), "--explain needs the suite decode or prefill");
    output::text(&lines.join("\n"))
}

/// With every instruction set and every number of threads that were asked for.
fn on_cpu(args: &BenchArgs) -> anyhow::Result<Report> {
    fn choices<T: Copy>(given: &[T]) -> Vec<Option<T>> {
        if given.is_empty() { vec![None] } else { given.iter().copied().map(Some).collect() }
    }
    let mut backends = Vec::new();
    for isa in choices(&args.isa) {
        for threads in choices(&args.threads) {
            backends.push(open_cpu(isa, threads)?);
        }
    }
    Suite::new(args, RunsOn::Cpu)?.measure(backends)
}

/// What is to be measured.
struct Suite<'a> {
    args: &'a BenchArgs,
    cases: Vec<Case>,
    /// Bytes that a case may take.
    memory: u64,
    bar: ProgressBar,
}

impl<'a> Suite<'a> {
    /// The cases that fit; tells of those that do not.
    fn new(args: &'a BenchArgs, runs_on: RunsOn) -> anyhow::Result<Self> {
        let memory = match (args.memory, runs_on) {
            (Some(Bytes(bytes)), _) => bytes,
            (None, RunsOn::Card) => CARD_MEMORY,
            (None, RunsOn::Cpu | RunsOn::Software) => available().div_euclid(2),
        };
        // Who asks for a context gets it, however long it takes.
        let flops_max = if args.context.is_empty() { grid::flops_max(runs_on) } else { u64::MAX };
        let mut cases = grid::cases(args, runs_on)?;
        let mut left_out = Vec::new();
        cases.retain(|case| {
            let refusal = if case.memory > memory {
                Some(format!("{} of memory, {} are allowed", Bytes(case.memory), Bytes(memory)))
            } else if case.work.flops > flops_max {
                Some(format!("{} GFLOP; give --context to have it", giga(case.work.flops)))
            } else {
                None
            };
            left_out.extend(refusal.as_ref().map(|reason| format!("{}: {reason}", name(case))));
            refusal.is_none()
        });
        tell(&left_out)?;
        anyhow::ensure!(!cases.is_empty(), "no case fits");
        Ok(Self { args, cases, memory, bar: ProgressBar::hidden() })
    }

    /// Measures every case on each of the devices.
    fn measure<B: Limit>(mut self, backends: Vec<B>) -> anyhow::Result<Report> {
        let rounds = |case: &Case| u64::from(case.shape.rounds).saturating_add(1);
        let turns: u64 = self.cases.iter().map(rounds).sum();
        self.bar = progress::rounds(turns.saturating_mul(to_u64(backends.len())));
        let mut report = Report::new(self.args.backend.to_string());
        for backend in backends {
            self.measure_on(&Arc::new(backend), &mut report)?;
        }
        self.bar.finish_and_clear();
        Ok(report)
    }

    fn measure_on<B: Limit>(&self, backend: &Arc<B>, report: &mut Report) -> anyhow::Result<()> {
        let facts = backend.describe();
        let (least, most) = if facts.runs_on == RunsOn::Software { (0, READ.0) } else { READ };
        let read = self.memory.div_euclid(READ_PART).clamp(least, most).min(self.memory);
        let has_limit = |case: &Case| case.operation != Operation::Plan;
        let read = if self.cases.iter().any(has_limit) { read } else { 0 };
        let mut beside = Beside { backend, arena: backend.arena(read)? };
        report.device(facts, backend.choice());
        let mut lines = Vec::new();
        for group in grid::groups(&self.cases) {
            let cases: Vec<_> =
                group.iter().filter_map(|index| Some((*index, self.cases.get(*index)?))).collect();
            let measured = self.measure_group(&cases, &mut beside);
            let name = || cases.first().map(|(_, case)| name(case)).unwrap_or_default();
            match measured {
                Err(error) if is_beyond(&error) => {
                    self.bar.suspend(|| tell(&[format!("{}: {error:#}", name())]))?;
                }
                measured => lines.extend(measured.with_context(name)?),
            }
        }
        lines.sort_by_key(|(index, _)| *index);
        let measured = lines
            .into_iter()
            .filter_map(|(index, measured)| Some((self.cases.get(index)?, measured)));
        measured.for_each(|(case, measured)| report.push(case, measured));
        Ok(())
    }

    /// Measures cases that share a cache.
    fn measure_group<B: Limit>(
        &self,
        cases: &[(usize, &Case)],
        beside: &mut Beside<'_, B>,
    ) -> anyhow::Result<Vec<(usize, Measured)>> {
        let Some((_, first)) = cases.first() else { return Ok(Vec::new()) };
        let operations: Vec<_> = cases.iter().map(|(_, case)| case.operation).collect();
        let mut lines = Vec::new();
        if first.operation == Operation::Plan {
            let mut rig = Planned::new(first, beside.backend.capabilities())?;
            for (index, case) in cases {
                lines.push((*index, self.measure_case(case, beside, |runs| rig.run(runs))?));
            }
            return Ok(lines);
        }
        let mut rig = Rig::new(&first.shape, &first.stored, beside.backend, &operations)?;
        for (index, case) in cases {
            let run = |runs| rig.run(case.operation, runs);
            lines.push((*index, self.measure_case(case, beside, run)?));
        }
        Ok(lines)
    }

    /// Measures one case and its limit in turns; `run` answers the seconds of so many runs.
    fn measure_case<B: Limit>(
        &self,
        case: &Case,
        beside: &mut Beside<'_, B>,
        mut run: impl FnMut(u32) -> anyhow::Result<f64>,
    ) -> anyhow::Result<Measured> {
        let limit = limit_of(case);
        let (mut samples, mut limits) = (Samples::default(), Samples::default());
        let mut bytes = 0;
        let mut rounds = case.shape.rounds;
        let mut round = 0;
        // The first round warms up.
        while round <= rounds {
            samples.take(&mut run)?;
            match limit {
                Limited::By(LimitKind::Read, _) => {
                    let seconds = beside.read(&mut bytes)?;
                    if round > 0 {
                        limits.push(seconds);
                    }
                }
                Limited::By(LimitKind::Copy, walk) => {
                    bytes = walk.bytes.saturating_mul(walk.layers).saturating_mul(2);
                    limits
                        .take(|runs| Ok(beside.backend.walk(&mut beside.arena, walk, runs)?))?;
                }
                Limited::Not => {}
            }
            self.bar.inc(1);
            rounds = samples.rounds(case.shape.rounds);
            round = round.saturating_add(1);
        }
        self.bar.inc(case.shape.rounds.saturating_sub(rounds).into());
        let kind = match limit {
            Limited::By(kind, _) => Some(kind),
            Limited::Not => None,
        };
        Ok(Measured {
            seconds: samples.median() / f64::from(case.shape.layers.max(1)),
            limit: kind.map(|kind| (kind, gb_per_s(bytes, limits.median()))),
            rounds,
        })
    }
}

/// A device, and the memory for its limits.
struct Beside<'a, B: Limit> {
    backend: &'a Arc<B>,
    arena: B::Arena,
}

impl<B: Limit> Beside<'_, B> {
    /// Seconds of reading all memory; says how many bytes that is.
    fn read(&mut self, bytes: &mut u64) -> Result<f64, DeviceError> {
        let (read, seconds) = self.backend.read(&mut self.arena)?;
        *bytes = read;
        Ok(seconds)
    }
}

/// What an operation is held to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Limited {
    By(LimitKind, Walk),
    Not,
}

/// What only reads is held to reading, what writes as much to a copy of as many bytes. K and V of
/// the model and what comes out of a cache are the same memory for every layer, as they are in the
/// operation itself.
fn limit_of(case: &Case) -> Limited {
    let walk = |from_moves, to_moves| Walk {
        bytes: case.work.bytes().div_ceil(2).next_multiple_of(4),
        layers: case.shape.layers.into(),
        from_moves,
        to_moves,
    };
    match case.operation {
        Operation::Decode | Operation::Prefill => Limited::By(LimitKind::Read, walk(true, false)),
        Operation::Append | Operation::AppendPrompt => {
            Limited::By(LimitKind::Copy, walk(false, true))
        }
        Operation::Gather => Limited::By(LimitKind::Copy, walk(true, false)),
        Operation::Copy => Limited::By(LimitKind::Copy, walk(true, true)),
        Operation::Plan => Limited::Not,
    }
}

/// Whether the device lacks the memory or the means for a case.
fn is_beyond(error: &anyhow::Error) -> bool {
    let is_it = |error: &(dyn std::error::Error + 'static)| {
        let of_cache = || match error.downcast_ref() {
            Some(CacheError::Device(error)) => Some(error),
            _ => None,
        };
        let kind = error.downcast_ref().or_else(of_cache).map(DeviceError::kind);
        matches!(kind, Some(DeviceErrorKind::OutOfMemory | DeviceErrorKind::Unsupported))
    };
    error.chain().any(is_it)
}

/// What a case is called where it is left out.
fn name(case: &Case) -> String {
    let Case { operation, stored, shape, .. } = case;
    let work::Shape { batch, context, q_heads, kv_heads, head_dim, .. } = shape;
    format!(
        "{} {}, {batch} x {context} tokens, {q_heads} heads on {kv_heads} of {head_dim}, blocks of \
         {}",
        operation.name(),
        stored.formats(),
        shape.block_size
    )
}

fn giga(count: u64) -> u64 {
    count.div_euclid(1_000_000_000)
}

/// Says on standard error what is left out.
fn tell(left_out: &[String]) -> anyhow::Result<()> {
    left_out.iter().try_for_each(|line| output::note(&format!("left out: {line}")))
}

#[cfg(test)]
mod tests {
    use super::super::lines::tests::args;
    use super::*;

    #[test]
    fn what_writes_is_held_to_a_copy_of_as_many_bytes() {
        let few = ["--suite", "all", "--batch", "2", "--context", "8", "--formats", "int8-head"];
        let cases = grid::cases(&args(&few), RunsOn::Cpu).expect("cases");
        for case in &cases {
            let layers = u64::from(case.shape.layers);
            match (case.operation, limit_of(case)) {
                (Operation::Plan, Limited::Not)
                | (Operation::Decode | Operation::Prefill, Limited::By(LimitKind::Read, _)) => {}
                (operation, Limited::By(LimitKind::Copy, walk)) => {
                    assert!(walk.bytes * 2 >= case.work.bytes());
                    assert!(walk.bytes * 2 < case.work.bytes() + 8);
                    assert_eq!(walk.layers, layers);
                    let places = match operation {
                        Operation::Append | Operation::AppendPrompt => (false, true),
                        Operation::Gather => (true, false),
                        _ => (true, true),
                    };
                    assert_eq!((walk.from_moves, walk.to_moves), places, "{operation:?}");
                }
                (operation, limit) => panic!("{operation:?}: {limit:?}"),
            }
        }
    }

    #[test]
    fn only_what_a_device_cannot_do_is_left_out() {
        let error = |kind| anyhow::Error::new(DeviceError::new(kind, "alloc")).context("a case");
        for kind in [DeviceErrorKind::OutOfMemory, DeviceErrorKind::Unsupported] {
            assert!(is_beyond(&error(kind)), "{kind:?}");
            let inside = CacheError::from(DeviceError::new(kind, "alloc"));
            assert!(is_beyond(&inside.into()), "{kind:?}");
        }
        assert!(!is_beyond(&error(DeviceErrorKind::Lost)));
        assert!(!is_beyond(&anyhow::anyhow!("another")));
    }
}
