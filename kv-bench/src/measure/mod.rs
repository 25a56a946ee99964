//! Measures the operations of a cache on a device, and a plain copy of memory there.
//!
//! Every operation is interleaved with its roofline, round by round, so that other load on the
//! machine affects both. [`measure`] times four operations in a few formats at one shape,
//! [`measure_suites`] a grid of shapes. [`measure_tiers`] does the same for stores of lower tiers,
//! each beside its disk or a plain client.
mod clock;
mod error;
mod grid;
mod lines;
mod memory;
mod options;
mod plain;
mod planned;
mod report;
mod roofline;
mod suite;
mod tier;
mod work;
mod workload;

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Instant;

use kv::Device;
use kv::cpu::{CpuBackend, CpuOptions, Isa};
use kv::error::DeviceError;

use crate::num::to_u64;
use clock::Samples;
pub use error::Error;
pub use grid::{Case, cases};
pub use lines::{CaseLine, Measured, Part, RooflineKind, SuiteReport, middle};
pub use options::{BlockSize, Formats, Options, Suite};
use plain::PlainCopy;
pub use report::{Facts, Line, Report, RunsOn};
use roofline::Roofline;
pub use suite::{explain, measure_suites};
pub use tier::{TierError, TierLine, TierOptions, TierReport, measure_tiers};
pub use work::{Operation, Shape, Work};
use workload::Workload;

/// Observes the progress of a measurement.
pub trait Progress {
    /// Called when a measurement of `rounds` rounds begins.
    fn begin(&mut self, rounds: u64);
    /// Called after `rounds` more rounds.
    fn advance(&mut self, rounds: u64);
    /// Called when a case of a suite is left out.
    fn left_out(&mut self, case: &str, why: &LeftOut);
}

/// The reason why a case of a suite is not measured.
#[derive(Debug)]
#[non_exhaustive]
pub enum LeftOut {
    /// It needs more memory than allowed.
    Memory {
        /// Bytes that it needs.
        needed: u64,
        /// Bytes that a case may take.
        allowed: u64,
    },
    /// It takes long, and its context was not given.
    Arithmetic {
        /// Floating-point operations.
        flops: u64,
    },
    /// The device lacks the memory or a feature.
    Device(Error),
}

/// Measures four operations in every format, at one shape.
///
/// # Errors
/// [`Error::Device`] for a device that cannot be measured, [`Error::Case`] with the failure of a
/// format, [`Error::Cache`] for a device that cannot be opened.
pub fn measure(options: &Options, progress: &mut dyn Progress) -> Result<Report, Error> {
    match on_device(options, SingleShape { options, progress })? {
        Some(report) => Ok(report),
        None => Err(Error::Device { device: options.backend.clone() }),
    }
}

/// A task that runs on opened devices of any type.
trait OnDevice {
    /// Its result.
    type Output;

    /// Runs the task on devices of one type.
    fn run<B: Roofline>(self, backends: Vec<B>) -> Result<Self::Output, Error>;
}

/// Opens the device of the options, a CPU once per instruction set and number of threads; returns
/// `None` for one that cannot be measured.
fn on_device<T: OnDevice>(options: &Options, task: T) -> Result<Option<T::Output>, Error> {
    match &options.backend {
        Device::Cpu => {
            let mut backends = Vec::new();
            for isa in choices(&options.isa) {
                for threads in choices(&options.threads) {
                    backends.push(open_cpu(isa, threads)?);
                }
            }
            task.run(backends).map(Some)
        }
        #[cfg(feature = "wgpu")]
        Device::Wgpu { adapter } => {
            use kv::Adapter;
            use kv::wgpu::{AdapterName, WgpuBackend, WgpuOptions};
            let name = match adapter {
                Adapter::Index(index) => AdapterName::Index(*index),
                Adapter::Named(name) => AdapterName::Named(name.clone()),
            };
            task.run(vec![WgpuBackend::open(&WgpuOptions::new(name))?]).map(Some)
        }
        #[cfg(feature = "cuda")]
        Device::Cuda { index } => {
            use kv::cuda::{CudaBackend, CudaOptions};
            task.run(vec![CudaBackend::open(&CudaOptions::new(*index))?]).map(Some)
        }
        _ => Ok(None),
    }
}

/// Returns the given choices, or the device's own.
fn choices<T: Copy>(given: &[T]) -> Vec<Option<T>> {
    if given.is_empty() { vec![None] } else { given.iter().copied().map(Some).collect() }
}

fn open_cpu(isa: Option<Isa>, threads: Option<NonZeroUsize>) -> Result<CpuBackend, DeviceError> {
    let mut options = CpuOptions::default();
    if let Some(isa) = isa {
        options = options.with_isa(isa);
    }
    if let Some(threads) = threads {
        options = options.with_threads(threads.get());
    }
    CpuBackend::open(options)
}

/// A measurement without a suite.
struct SingleShape<'a> {
    options: &'a Options,
    progress: &'a mut dyn Progress,
}

impl OnDevice for SingleShape<'_> {
    type Output = Report;

    /// Measures every format on the first device.
    fn run<B: Roofline>(self, backends: Vec<B>) -> Result<Report, Error> {
        let Self { options, progress } = self;
        let device = || Error::Device { device: options.backend.clone() };
        let backend = Arc::new(backends.into_iter().next().ok_or_else(device)?);
        let facts = backend.describe();
        let shape = Shape::new(options, facts.runs_on);
        let formats = work::formats(options);
        let samples = to_u64(formats.len() * Operation::FOUR.len());
        progress.begin(samples * (u64::from(shape.rounds) + 1));
        let mut lines = Vec::new();
        for stored in formats {
            let measured = measure_format(&shape, stored, &backend, progress);
            lines.extend(measured.map_err(|error| error.of_case(stored.to_string()))?);
        }
        Ok(Report::new(options.backend.to_string(), facts, shape, lines))
    }
}

/// An operation, its work, its samples and those of the plain copy.
type Timed = (Operation, Work, [Samples; 2]);

/// Measures one format.
fn measure_format<B: PlainCopy>(
    shape: &Shape,
    stored: Formats,
    backend: &Arc<B>,
    progress: &mut dyn Progress,
) -> Result<Vec<Line>, Error> {
    let spec = work::spec(shape, stored)?;
    let mut timed: Vec<Timed> = Vec::new();
    for operation in Operation::FOUR {
        timed.push((operation, work::work(shape, &spec, operation), Default::default()));
    }
    let mut workload = Workload::new(shape, stored, backend, &Operation::FOUR)?;
    let most = timed.iter().map(|(_, work, _)| work.copied()).max().unwrap_or(0);
    let (mut memory, mut queue) = (backend.reserve(most)?, backend.queue()?);
    // The first round warms up.
    for _ in 0..=shape.rounds {
        for (operation, work, [samples, copies]) in &mut timed {
            samples.take(|runs| workload.run(*operation, runs))?;
            copies.take(|runs| {
                let begin = Instant::now();
                for _ in 0..runs {
                    backend.copy(&mut queue, &mut memory, work.copied())?;
                }
                workload::drain(&mut queue)?;
                Ok(begin.elapsed().as_secs_f64())
            })?;
            progress.advance(1);
        }
    }
    let line = |(operation, work, samples): &Timed| {
        Line::new(*operation, stored, *work, samples.each_ref().map(Samples::median))
    };
    Ok(timed.iter().map(line).collect())
}
