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
use crate::{output, progress};
use clock::Samples;
use plain::PlainCopy;
use report::{Line, Report};
use rig::Rig;
use work::Operation;

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
    let backend = Arc::new(backend);
    let turns = to_u64(args.formats.len().saturating_mul(Operation::ALL.len()));
    let bar = progress::rounds(turns.saturating_mul(u64::from(args.rounds).saturating_add(1)));
    let mut lines = Vec::new();
    for stored in &args.formats {
        let mut measure = || {
            let mut rig = Rig::new(args, stored, &backend)?;
            let mut timed =
                Operation::ALL.map(|operation| (operation, Samples::default(), Samples::default()));
            for _ in 0..=args.rounds {
                for (operation, samples, copies) in &mut timed {
                    let copied = rig.work(*operation).copied();
                    samples.take(|runs| rig.run(*operation, runs))?;
                    copies.take(|runs| rig.plain_copy(copied, runs))?;
                    bar.inc(1);
                }
            }
            let line = |(operation, samples, copies): &(Operation, Samples, Samples)| {
                let seconds = [samples.median(), copies.median()];
                Line::new(*operation, stored, rig.work(*operation), seconds)
            };
            lines.extend(timed.iter().map(line));
            anyhow::Ok(())
        };
        measure().with_context(|| stored.formats())?;
    }
    bar.finish_and_clear();
    Ok(Report::new(args, backend.describe(), lines))
}
