//! A cache beside a model.
use candle_core::{Device, DeviceLocation};
use kv::backend::{AnyBackend, Backend};
use kv::{CacheSpec, KvCache, StepInput};

use crate::error::Error;
use crate::step::CandleStep;

/// A cache whose steps take tensors of candle.
#[derive(Debug)]
pub struct CandleCache<B: Backend = AnyBackend> {
    kv: KvCache<B>,
    device: Device,
}

impl CandleCache {
    /// Allocates a cache on the backend for a device of candle.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a device other than the CPU; [`Error::Cache`] with the errors of
    /// [`KvCache::new`].
    pub fn new(device: &Device, spec: CacheSpec) -> Result<Self, Error> {
        let backend = match device.location() {
            DeviceLocation::Cpu => kv::Device::open("cpu")?,
            location => {
                let instead =
                    "use Device::Cpu, or make the cache yourself and call CandleCache::over";
                return Err(Error::Unsupported { device: format!("{location:?}"), instead });
            }
        };
        Ok(Self::over(KvCache::new(backend, spec)?, device))
    }
}

impl<B: Backend> CandleCache<B> {
    /// Takes a cache, for models on `device`: with a calibration, other threads or another backend.
    pub fn over(kv: KvCache<B>, device: &Device) -> Self {
        Self { kv, device: device.clone() }
    }

    /// Returns the cache: lengths, statistics, probes.
    pub fn kv(&self) -> &KvCache<B> {
        &self.kv
    }

    /// Returns the cache, to start, fork, truncate and release sequences.
    pub fn kv_mut(&mut self) -> &mut KvCache<B> {
        &mut self.kv
    }

    /// Returns the cache alone.
    pub fn into_kv(self) -> KvCache<B> {
        self.kv
    }

    /// Begins a step with the tokens of some sequences. It is rolled back if it is dropped without
    /// [`CandleStep::commit`], after an error of candle too.
    ///
    /// # Errors
    /// [`Error::Cache`] with the errors of [`KvCache::begin_step`], and [`Error::Candle`]. Nothing
    /// has changed then.
    pub fn step(&mut self, inputs: &[StepInput<'_>]) -> Result<CandleStep<'_, B>, Error> {
        CandleStep::new(self.kv.begin_step(inputs)?, &self.device)
    }
}
