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
    /// Allocates a cache on the backend for a device of candle: the CPU with the feature `cpu`,
    /// which is on by default, or with the feature `cuda` a card. There it works on the device's
    /// own stream, so neither waits for the other.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a device without a backend, and for a CUDA device on a built-in
    /// stream, as `Device::new_cuda` makes them: the message names the constructor to use.
    /// [`Error::Device`] if the device cannot be opened or its feature is off, [`Error::Cache`]
    /// with the errors of [`KvCache::new`]; a cache on the CPU that is larger than the memory that
    /// is left has a [`DeviceError::shortage`](kv::error::DeviceError::shortage).
    pub fn new(device: &Device, spec: CacheSpec) -> Result<Self, Error> {
        let kv = match device.location() {
            DeviceLocation::Cpu => KvCache::new(kv::Device::open("cpu")?, spec)?,
            #[cfg(feature = "cuda")]
            DeviceLocation::Cuda { gpu_id } => crate::cuda::open(device, gpu_id, spec)?,
            #[cfg(not(feature = "cuda"))]
            DeviceLocation::Cuda { gpu_id } => {
                let instead = "build kv-candle with its feature cuda";
                return Err(Error::Unsupported { device: format!("cuda:{gpu_id}"), instead });
            }
            DeviceLocation::Metal { gpu_id } => {
                let instead = "there is no backend for Metal tensors: use Device::Cpu or CUDA";
                return Err(Error::Unsupported { device: format!("metal:{gpu_id}"), instead });
            }
        };
        Ok(Self::over(kv, device))
    }
}

impl<B: Backend> CandleCache<B> {
    /// Takes a cache, for models on `device`: with a calibration, other threads or another backend.
    /// A cache for tensors on CUDA must be on their stream (`CudaBackend::queue_on_stream`,
    /// [`KvCacheBuilder::queue`](kv::KvCacheBuilder::queue)).
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
        CandleStep::over(self.kv.begin_step(inputs)?, &self.device)
    }
}
