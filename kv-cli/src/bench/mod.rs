//! `kv bench`: what a cache does on a device, beside a plain copy of memory there.
//!
//! Every operation and its limit are timed in turns, round by round, so that whatever else the
//! machine does meets both.
mod clock;
mod grid;
mod limit;
mod lines;
mod plain;
mod planned;
mod plot;
mod report;
mod rig;
mod suite;
mod work;

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use kv::DeviceError;
use kv::cpu::{CpuBackend, CpuOptions, Isa};
use kv::cuda::{CudaBackend, CudaOptions};
use kv::wgpu::{AdapterName, WgpuBackend, WgpuOptions};
use kv::{Adapter, Device};

use crate::args::BenchArgs;
use crate::num::to_u64;
use kv_runner::stored::Stored;
use crate::{output, progress};
use clock::Samples;
use plain::PlainCopy;
use report::{Line, Report};
use rig::Rig;
use work::{Operation, Shape, Work};

pub(crate) fn run(args: &BenchArgs) -> anyhow::Result<()> {
    if !args.suite.is_empty() {
        return suite::run(args);
    }
    let report = match &args.backend {
        Device::Cpu => {
            let cpu = open_cpu(args.isa.first().copied(), args.threads.first().copied())?;
            measure(args, cpu)
        }
        Device::Wgpu { adapter } => measure(args, open_wgpu(adapter)?),
        Device::Cuda { index } => measure(args, CudaBackend::open(&CudaOptions::new(*index))?),
        other => anyhow::bail!("{other} cannot be measured"),
    }?;
    if args.json {
        return output::json(&report);
    }
    output::text(&report.show())
}

fn open_cpu(isa: Option<Isa>, threads: Option<NonZeroUsize>) -> Result<CpuBackend, DeviceError> {
    let mut options = CpuOptions::default();
    if let Some(isa) = isa {
        options = options.isa(isa);
    }
    if let Some(threads) = threads {
        options = options.threads(threads.get());
    }
    CpuBackend::open(options)
}

fn open_wgpu(adapter: &Adapter) -> Result<WgpuBackend, DeviceError> {
    let name = match adapter {
        Adapter::Index(index) => AdapterName::Index(*index),
        Adapter::Named(name) => AdapterName::Named(name.clone()),
    };
    WgpuBackend::open(&WgpuOptions::new(name))
}

/// Measures every format on an opened device.
fn measure<B: PlainCopy>(args: &BenchArgs, backend: B) -> anyhow::Result<Report> {
    let facts = backend.describe();
    let backend = Arc::new(backend);
    let shape = Shape::new(args, facts.runs_on);
    let formats = work::formats(args)?;
    let turns = to_u64(formats.len().saturating_mul(Operation::FOUR.len()));
    let bar = progress::rounds(turns.saturating_mul(u64::from(shape.rounds).saturating_add(1)));
    let mut lines = Vec::new();
    for stored in &formats {
        let measured = measure_format(&shape, stored, &backend, || bar.inc(1));
        lines.extend(measured.with_context(|| stored.formats())?);
    }
    bar.finish_and_clear();
    Ok(Report::new(args.backend.to_string(), facts, shape, lines))
}

/// An operation, what it moves, its times, and those of the plain copy beside it.
type Timed = (Operation, Work, [Samples; 2]);

/// Measures one format; calls `turn` after every operation of every round.
fn measure_format<B: PlainCopy>(
    shape: &Shape,
    stored: &Stored,
    backend: &Arc<B>,
    turn: impl Fn(),
) -> anyhow::Result<Vec<Line>> {
    let spec = work::spec(shape, stored)?;
    let mut timed: Vec<Timed> = Vec::new();
    for operation in Operation::FOUR {
        timed.push((operation, work::work(shape, &spec, operation)?, Default::default()));
    }
    let mut rig = Rig::new(shape, stored, backend, &Operation::FOUR)?;
    let most = timed.iter().map(|(_, work, _)| work.copied()).max().unwrap_or(0);
    let (mut memory, mut queue) = (backend.reserve(most)?, backend.queue()?);
    // The first round warms up.
    for _ in 0..=shape.rounds {
        for (operation, work, [samples, copies]) in &mut timed {
            samples.take(|runs| rig.run(*operation, runs))?;
            copies.take(|runs| {
                let begin = Instant::now();
                for _ in 0..runs {
                    backend.copy(&mut queue, &mut memory, work.copied())?;
                }
                rig::drain(&mut queue)?;
                Ok(begin.elapsed().as_secs_f64())
            })?;
            turn();
        }
    }
    let line = |(operation, work, samples): &Timed| {
        Line::new(*operation, stored, *work, samples.each_ref().map(Samples::median))
    };
    Ok(timed.iter().map(line).collect())
}
