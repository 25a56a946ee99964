//! The device, the clock, and the output of records.
use std::error::Error;
use std::fs::File;
use std::io::{Write, stdout};
use std::time::{Duration, Instant};

use kv_core::KvFormat;
use kv_core::backend::Backend;
use kv_cuda::{CudaBackend, CudaOptions};
use kv_testkit::Shared;

use crate::headline;
use crate::options::Options;
use crate::record::Record;

pub(crate) type Result<T, E = Box<dyn Error + Send + Sync>> = std::result::Result<T, E>;

/// Bytes that a bench cycles through: several times the size of any L2.
const ROTATED: u64 = 512 << 20;

/// State shared by all benches.
pub(crate) struct Bench {
    pub(crate) device: Shared<CudaBackend>,
    pub(crate) is_tiny: bool,
    card: String,
    /// Why kernels start one after another, if they do.
    serial: Option<String>,
    /// Selected measures: all, one format, one name.
    choice: (Option<KvFormat>, Option<String>),
    /// Whether headlines are being measured.
    is_headline: bool,
    clock: Clock,
    /// Bytes per second of a copy, counted as read and as written.
    copy_rate: Option<f64>,
    out: Box<dyn Write>,
}

/// Bytes and operations of one call.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Work {
    /// Minimum bytes read and written in device memory.
    pub(crate) bytes: u64,
    /// Multiplications and additions.
    pub(crate) flops: u64,
}

/// The timing of samples.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clock {
    repeats: u32,
    /// Minimum duration of one sample.
    sample: Duration,
    /// Maximum calls in one sample.
    calls_max: u32,
}

impl Clock {
    /// Returns the median time of one call in microseconds: calls of a sample are submitted one
    /// after another and waited for together.
    pub(crate) fn time<C>(
        &self,
        work: &mut C,
        mut submit: impl FnMut(&mut C, u32) -> Result<()>,
        mut wait: impl FnMut(&mut C) -> Result<()>,
    ) -> Result<f64> {
        let mut call = 0_u32;
        let mut run = |calls: u32| {
            let begin = Instant::now();
            for _ in 0..calls {
                submit(work, call)?;
                call = call.wrapping_add(1);
            }
            wait(work)?;
            Ok::<_, Box<dyn Error + Send + Sync>>(begin.elapsed())
        };
        // The first call loads kernels and allocates memory; the second takes the usual time.
        run(1)?;
        let one = run(1)?.max(Duration::from_nanos(100));
        let fitting = self.sample.as_secs_f64() / one.as_secs_f64();
        let calls = (1..self.calls_max).find(|n| f64::from(*n) >= fitting);
        let calls = calls.unwrap_or(self.calls_max);
        run(calls)?;
        let mut samples = Vec::new();
        for _ in 0..self.repeats {
            samples.push(run(calls)?.as_secs_f64() * 1e6 / f64::from(calls));
        }
        Ok(median(samples))
    }

    /// Makes each call a sample of its own.
    pub(crate) fn each(self) -> Self {
        Self { calls_max: 1, repeats: self.repeats.saturating_mul(5), ..self }
    }
}

/// Returns the middle sample, or the mean of the middle two; 0 without samples.
pub(crate) fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    let upper = samples.len() / 2;
    let lower = samples.len().saturating_sub(1) / 2;
    match (samples.get(lower), samples.get(upper)) {
        (Some(lower), Some(upper)) => f64::midpoint(*lower, *upper),
        _ => 0.0,
    }
}

impl Bench {
    pub(crate) fn open(options: &Options) -> Result<Self> {
        let backend = if options.emulated {
            emulated()?
        } else {
            CudaBackend::open(&CudaOptions::new(options.device))?
        };
        let (card, serial) = (backend.card().to_owned(), backend.serial_launches());
        let clock = if options.tiny {
            Clock { repeats: 3, sample: Duration::ZERO, calls_max: 2 }
        } else {
            Clock { repeats: 21, sample: Duration::from_millis(2), calls_max: 1000 }
        };
        let out: Box<dyn Write> = match &options.out {
            Some(file) => Box::new(File::create(file)?),
            None => Box::new(stdout()),
        };
        let device = Shared::new(backend);
        let choice = (options.format, options.only.clone());
        let (is_tiny, is_headline, copy_rate) = (options.tiny, false, None);
        Ok(Self { device, is_tiny, card, serial, choice, is_headline, clock, copy_rate, out })
    }

    /// Sets whether the following measures are headlines.
    pub(crate) fn set_headline(&mut self, is_headline: bool) {
        self.is_headline = is_headline;
    }

    pub(crate) fn wants_format(&self, format: KvFormat) -> bool {
        self.choice.0.is_none_or(|only| only == format)
    }

    /// Returns whether a measure is selected and is not measured as a headline elsewhere.
    pub(crate) fn wants(&self, format: KvFormat, name: &str) -> bool {
        let is_chosen = self.choice.1.as_deref().is_none_or(|only| only == name);
        is_chosen && self.wants_format(format) && (self.is_headline || !headline::has(name))
    }

    pub(crate) fn clock(&self) -> Clock {
        self.clock
    }

    /// Records facts about the device.
    pub(crate) fn facts(&mut self) -> Result<()> {
        let card = Record::new("fact", "card").text("value", &self.card);
        self.put(card)?;
        let launches = Record::new("fact", "dependent launches");
        self.put(launches.text("value", self.serial.as_deref().unwrap_or("used")))?;
        let capabilities = self.device.capabilities();
        let numbers = [
            ("memory_bytes", capabilities.buffer_bytes_max),
            ("multiprocessors", capabilities.workers.into()),
            ("repeats", self.clock.repeats.into()),
            ("rotated_bytes", self.rotated()),
        ];
        for (name, value) in numbers {
            self.put(Record::new("fact", name).number("value", value as f64))?;
        }
        Ok(())
    }

    /// Returns the bytes that a bench cycles through.
    pub(crate) fn rotated(&self) -> u64 {
        if self.is_tiny { 1 << 16 } else { ROTATED }
    }
    /// Returns the bytes of the device that one bench may use.
    pub(crate) fn room(&self) -> u64 {
        self.device.capabilities().buffer_bytes_max / 10 * 7
    }

    pub(crate) fn check(&mut self, name: &str, result: &Result<(), String>) -> Result<()> {
        let detail = result.as_ref().err().map_or("", String::as_str);
        self.put(Record::new("check", name).truth("passed", result.is_ok()).text("detail", detail))
    }

    pub(crate) fn skip(&mut self, name: &str, why: &str) -> Result<()> {
        self.put(Record::new("skipped", name).text("detail", why))
    }

    /// Sets the copy rate, the reference of other rates.
    pub(crate) fn set_copy(&mut self, bytes: u64, micros: f64) {
        self.copy_rate = (micros > 0.0).then(|| bytes as f64 / micros);
    }

    pub(crate) fn measure(&mut self, name: &str, work: Work, micros: f64) -> Result<()> {
        let mut record = Record::new("measure", name).number("us", micros);
        if work.bytes > 0 {
            let rate = work.bytes as f64 / micros;
            record = record.number("bytes", work.bytes as f64).number("gb_per_s", rate / 1e3);
            if let Some(copy) = self.copy_rate {
                record = record.number("of_copy", rate / copy);
            }
        }
        if work.flops > 0 {
            record = record.number("tflop_per_s", work.flops as f64 / micros / 1e6);
        }
        self.put(record)
    }

    fn put(&mut self, record: Record) -> Result<()> {
        self.out.write_all(record.line().as_bytes())?;
        Ok(self.out.flush()?)
    }
}

#[cfg(feature = "emulated")]
fn emulated() -> Result<CudaBackend> {
    Ok(CudaBackend::emulated(&kv_cuda::EmulatorOptions::default())?)
}

#[cfg(not(feature = "emulated"))]
fn emulated() -> Result<CudaBackend> {
    Err("built without the feature `emulated`".into())
}
