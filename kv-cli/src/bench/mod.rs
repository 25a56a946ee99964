//! `kv bench`: what a cache does on a device, beside a plain copy of memory there.
//!
//! Every operation and its copy are timed in turns, round by round, so that whatever else the
//! machine does meets both.
mod clock;
mod plain;
mod report;
mod rig;
mod work;

use std::sync::Arc;

use anyhow::Context;
use kv::cpu::{CpuBackend, CpuOptions};
use kv::cuda::{CudaBackend, CudaOptions};
use kv::wgpu::{AdapterName, WgpuBackend, WgpuOptions};
use kv::{Adapter, Device};

use crate::args::BenchArgs;
use crate::num::to_u64;
use crate::stored::Stored;
use crate::{output, progress};
use clock::Samples;
use plain::PlainCopy;
use report::{Line, Report};
use rig::Rig;
use work::{Operation, Shape};

pub(crate) fn run(args: &BenchArgs) -> anyhow::Result<()> {
    let report = match &args.backend {
        Device::Cpu => measure(args, CpuBackend::open(CpuOptions::default())?),
        Device::Wgpu { adapter } => {
            let name = match adapter {
                Adapter::Index(index) => AdapterName::Index(*index),
                Adapter::Named(name) => AdapterName::Named(name.clone()),
            };
            measure(args, WgpuBackend::open(&WgpuOptions::new(name))?)
        }
        Device::Cuda { index } => measure(args, CudaBackend::open(&CudaOptions::new(*index))?),
        other => anyhow::bail!("{other} cannot be measured"),
    }?;
    if args.json {
        return output::json(&report);
    }
    output::text(&report.show())
}

/// Measures every format on an opened device.
fn measure<B: PlainCopy>(args: &BenchArgs, backend: B) -> anyhow::Result<Report> {
    let facts = backend.describe();
    let backend = Arc::new(backend);
    let shape = Shape::new(args, facts.runs_on);
    let turns = to_u64(args.formats.len().saturating_mul(Operation::ALL.len()));
    let bar = progress::rounds(turns.saturating_mul(u64::from(shape.rounds).saturating_add(1)));
    let mut lines = Vec::new();
    for stored in &args.formats {
        let measured = measure_format(&shape, stored, &backend, || bar.inc(1));
        lines.extend(measured.with_context(|| stored.formats())?);
    }
    bar.finish_and_clear();
    Ok(Report::new(args.backend.to_string(), facts, shape, lines))
}

/// An operation, its times, and those of the plain copy beside it.
type Timed = (Operation, Samples, Samples);

/// Measures one format; calls `turn` after every operation of every round.
fn measure_format<B: PlainCopy>(
    shape: &Shape,
    stored: &Stored,
    backend: &Arc<B>,
    turn: impl Fn(),
) -> anyhow::Result<Vec<Line>> {
    let mut rig = Rig::new(shape, stored, backend)?;
    let mut timed: [Timed; 4] =
        Operation::ALL.map(|operation| (operation, Samples::default(), Samples::default()));
    // The first round warms up.
    for _ in 0..=shape.rounds {
        for (operation, samples, copies) in &mut timed {
            let copied = rig.work(*operation).copied();
            samples.take(|runs| rig.run(*operation, runs))?;
            copies.take(|runs| rig.plain_copy(copied, runs))?;
            turn();
        }
    }
    let line = |(operation, samples, copies): &Timed| {
        let seconds = [samples.median(), copies.median()];
        Line::new(*operation, stored, rig.work(*operation), seconds)
    };
    Ok(timed.iter().map(line).collect())
}
