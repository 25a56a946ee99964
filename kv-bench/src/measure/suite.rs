//! Measures every case of a grid together with its roofline.
use std::sync::Arc;

use kv::backend::Backend;
use kv::cpu::{AttendShape, Isa};
use kv::error::DeviceError;

use super::clock::{Samples, gb_per_s};
use super::error::Error;
use super::grid::{self, Case};
use super::lines::{Measured, RooflineKind, SuiteReport};
use super::memory::available;
use super::options::Options;
use super::planned::Planned;
use super::report::RunsOn;
use super::roofline::{Roofline, Walk};
use super::work::{Operation, Shape};
use super::workload::Workload;
use super::{LeftOut, OnDevice, Progress, choices, on_device, open_cpu};
use crate::num::to_u64;

/// Assumed memory of a card that does not report it.
const CARD_MEMORY: u64 = 16 << 30;
/// Smallest and largest memory for the read roofline.
const READ: (u64, u64) = (1 << 28, 1 << 32);
/// Share of the allowed memory that is read, within these limits.
const READ_PART: u64 = 8;

/// Measures every case of the suites in [`Options::suites`] that fits the device; on a CPU with
/// every instruction set and every number of threads of the options.
///
/// # Errors
/// [`Error::Device`] for a device that cannot be measured, [`Error::NoCase`] if no case fits,
/// [`Error::Case`] with the failure of one, [`Error::Cache`] for a device that cannot be opened.
pub fn measure_suites(
    options: &Options,
    progress: &mut dyn Progress,
) -> Result<SuiteReport, Error> {
    match on_device(options, Suites { options, progress })? {
        Some(report) => Ok(report),
        None => Err(Error::Device { device: options.backend.clone() }),
    }
}

/// Returns a line per decode and prefill case and instruction set that names the attention strategy
/// on the CPU and the reason why no faster one applies; empty without such cases. Unless sets are
/// given, they are the one in use, and AVX2, which most laptops have.
///
/// # Errors
/// Those of [`measure_suites`].
pub fn explain(options: &Options, progress: &mut dyn Progress) -> Result<Vec<String>, Error> {
    let suite = Suite::new(Suites { options, progress }, RunsOn::Cpu)?;
    let mut lines: Vec<String> = Vec::new();
    let mut isas = choices(&options.isa);
    if options.isa.is_empty() && Isa::AVX2.is_available() {
        isas.push(Some(Isa::AVX2));
    }
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
            let formats = case.stored;
            let line = format!(
                "{}: {formats}, group {group}, head_dim {dim}, {queries} queries: {why}",
                cpu.isa()
            );
            if !lines.contains(&line) {
                lines.push(line);
            }
        }
    }
    Ok(lines)
}

/// The suites to run, before the device is known.
struct Suites<'a> {
    options: &'a Options,
    progress: &'a mut dyn Progress,
}

impl OnDevice for Suites<'_> {
    type Output = SuiteReport;

    fn run<B: Roofline>(self, backends: Vec<B>) -> Result<SuiteReport, Error> {
        let runs_on = backends.first().map(|backend| backend.describe().runs_on);
        Suite::new(self, runs_on.unwrap_or(RunsOn::Cpu))?.measure(backends)
    }
}

/// The suites to run on a device.
struct Suite<'a> {
    options: &'a Options,
    cases: Vec<Case>,
    /// Bytes that one case may allocate.
    memory: u64,
    progress: &'a mut dyn Progress,
}

impl<'a> Suite<'a> {
    /// Chooses the cases that fit.
    fn new(Suites { options, progress }: Suites<'a>, runs_on: RunsOn) -> Result<Self, Error> {
        let memory = match (options.memory, runs_on) {
            (Some(bytes), _) => bytes,
            (None, RunsOn::Card) => CARD_MEMORY,
            (None, RunsOn::Cpu | RunsOn::Software) => available().div_euclid(2),
        };
        // A given context is measured, however long it takes.
        let flops_max =
            if options.context.is_empty() { grid::flops_max(runs_on) } else { u64::MAX };
        let mut cases = grid::cases(options, runs_on)?;
        cases.retain(|case| {
            let refusal = if case.memory > memory {
                Some(LeftOut::Memory { needed: case.memory, allowed: memory })
            } else if case.work.flops > flops_max {
                Some(LeftOut::Arithmetic { flops: case.work.flops })
            } else {
                None
            };
            if let Some(refusal) = &refusal {
                progress.left_out(&name(case), refusal);
            }
            refusal.is_none()
        });
        if cases.is_empty() {
            return Err(Error::NoCase);
        }
        Ok(Self { options, cases, memory, progress })
    }

    /// Measures every case on each of the devices.
    fn measure<B: Roofline>(mut self, backends: Vec<B>) -> Result<SuiteReport, Error> {
        let rounds = |case: &Case| u64::from(case.shape.rounds) + 1;
        let samples: u64 = self.cases.iter().map(rounds).sum();
        self.progress.begin(samples * to_u64(backends.len()));
        let mut report = SuiteReport::new(self.options.backend.to_string());
        for backend in backends {
            self.measure_on(&Arc::new(backend), &mut report)?;
        }
        Ok(report)
    }

    fn measure_on<B: Roofline>(
        &mut self,
        backend: &Arc<B>,
        report: &mut SuiteReport,
    ) -> Result<(), Error> {
        let facts = backend.describe();
        let (least, most) = if facts.runs_on == RunsOn::Software { (0, READ.0) } else { READ };
        let read = self.memory.div_euclid(READ_PART).clamp(least, most).min(self.memory);
        let has_roofline = |case: &Case| case.operation != Operation::Plan;
        let read = if self.cases.iter().any(has_roofline) { read } else { 0 };
        let mut device = OpenDevice { backend, arena: backend.arena(read)? };
        report.device(facts, backend.choice());
        let mut lines = Vec::new();
        for group in grid::groups(&self.cases) {
            let cases: Vec<_> =
                group.iter().filter_map(|index| Some((*index, *self.cases.get(*index)?))).collect();
            let measured = self.measure_group(&cases, &mut device);
            let name = || cases.first().map(|(_, case)| name(case)).unwrap_or_default();
            match measured {
                Err(error) if error.is_beyond_device() => {
                    self.progress.left_out(&name(), &LeftOut::Device(error));
                }
                measured => lines.extend(measured.map_err(|error| error.of_case(name()))?),
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
    fn measure_group<B: Roofline>(
        &mut self,
        cases: &[(usize, Case)],
        device: &mut OpenDevice<'_, B>,
    ) -> Result<Vec<(usize, Measured)>, Error> {
        let Some((_, first)) = cases.first() else { return Ok(Vec::new()) };
        let operations: Vec<_> = cases.iter().map(|(_, case)| case.operation).collect();
        let mut lines = Vec::new();
        if first.operation == Operation::Plan {
            let mut planned = Planned::new(first, device.backend.capabilities())?;
            for (index, case) in cases {
                lines.push((*index, self.measure_case(case, device, |runs| planned.run(runs))?));
            }
            return Ok(lines);
        }
        let mut workload = Workload::new(&first.shape, first.stored, device.backend, &operations)?;
        for (index, case) in cases {
            let run = |runs| workload.run(case.operation, runs);
            lines.push((*index, self.measure_case(case, device, run)?));
        }
        Ok(lines)
    }

    /// Measures one case interleaved with its roofline; `run` returns the seconds of several runs.
    fn measure_case<B: Roofline>(
        &mut self,
        case: &Case,
        device: &mut OpenDevice<'_, B>,
        mut run: impl FnMut(u32) -> Result<f64, Error>,
    ) -> Result<Measured, Error> {
        let bound = roofline_of(case);
        let (mut samples, mut limits) = (Samples::default(), Samples::default());
        let mut bytes = 0;
        let mut rounds = case.shape.rounds;
        let mut round = 0;
        // The first round warms up.
        while round <= rounds {
            samples.take(&mut run)?;
            match bound {
                Bound::By(RooflineKind::Read, _) => {
                    let seconds = device.read(&mut bytes)?;
                    if round > 0 {
                        limits.push(seconds);
                    }
                }
                Bound::By(RooflineKind::Copy, walk) => {
                    bytes = walk.bytes * walk.layers * 2;
                    limits
                        .take(|runs| Ok(device.backend.walk(&mut device.arena, walk, runs)?))?;
                }
                Bound::Not => {}
            }
            self.progress.advance(1);
            rounds = samples.rounds(case.shape.rounds);
            round += 1;
        }
        self.progress.advance(case.shape.rounds.saturating_sub(rounds).into());
        let kind = match bound {
            Bound::By(kind, _) => Some(kind),
            Bound::Not => None,
        };
        Ok(Measured {
            seconds: samples.median() / f64::from(case.shape.layers.max(1)),
            limit: kind.map(|kind| (kind, gb_per_s(bytes, limits.median()))),
            rounds,
        })
    }
}

/// A device, and the memory for its rooflines.
struct OpenDevice<'a, B: Roofline> {
    backend: &'a Arc<B>,
    arena: B::Arena,
}

impl<B: Roofline> OpenDevice<'_, B> {
    /// Reads all memory and returns the seconds; sets `bytes` to the number of bytes.
    fn read(&mut self, bytes: &mut u64) -> Result<f64, DeviceError> {
        let (read, seconds) = self.backend.read(&mut self.arena)?;
        *bytes = read;
        Ok(seconds)
    }
}

/// The roofline of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bound {
    By(RooflineKind, Walk),
    Not,
}

/// Returns the roofline of a case: reading for operations that only read, a copy of the same number
/// of bytes for those that write as much. Input and output tensors are the same memory for every
/// layer, as in the operation itself.
fn roofline_of(case: &Case) -> Bound {
    let walk = |from_moves, to_moves| Walk {
        bytes: case.work.bytes().div_ceil(2).next_multiple_of(4),
        layers: case.shape.layers.into(),
        from_moves,
        to_moves,
    };
    match case.operation {
        Operation::Decode | Operation::Prefill => Bound::By(RooflineKind::Read, walk(true, false)),
        Operation::Append | Operation::AppendPrompt => {
            Bound::By(RooflineKind::Copy, walk(false, true))
        }
        Operation::Gather => Bound::By(RooflineKind::Copy, walk(true, false)),
        Operation::Copy => Bound::By(RooflineKind::Copy, walk(true, true)),
        Operation::Plan => Bound::Not,
    }
}

/// Formats the name of a case that is left out.
fn name(case: &Case) -> String {
    let Case { operation, stored, shape, .. } = case;
    let Shape { batch, context, q_heads, kv_heads, head_dim, .. } = shape;
    format!(
        "{} {}, {batch} x {context} tokens, {q_heads} heads on {kv_heads} of {head_dim}, blocks of \
         {}",
        operation.name(),
        stored,
        shape.block_size
    )
}

#[cfg(test)]
mod tests {
    use super::super::options;
    use super::*;

    #[test]
    fn operations_that_write_have_a_copy_as_roofline() {
        let few = Options {
            suites: vec![options::Suite::All],
            batch: vec![2],
            context: vec![8],
            formats: vec!["int8-head".parse().expect("a format")],
            ..Options::default()
        };
        let cases = grid::cases(&few, RunsOn::Cpu).expect("cases");
        for case in &cases {
            let layers = u64::from(case.shape.layers);
            match (case.operation, roofline_of(case)) {
                (Operation::Plan, Bound::Not)
                | (Operation::Decode | Operation::Prefill, Bound::By(RooflineKind::Read, _)) => {}
                (operation, Bound::By(RooflineKind::Copy, walk)) => {
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
                (operation, bound) => panic!("{operation:?}: {bound:?}"),
            }
        }
    }
}
