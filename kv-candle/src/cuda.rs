//! A cache on the stream of a CUDA device of candle, and the memory of its tensors.
use std::any::Any;

use candle_core::cuda_backend::CudaDType;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DeviceRepr, ValidAsZeroBits};
use candle_core::{Device, Error as CandleError, Result, bail};
use kv::backend::{AnyBackend, AnyBuffer, AnyQueue, Backend};
use kv::cuda::{CudaBackend, CudaBuffer, CudaOptions};
use kv::{CacheError, CacheSpec, Element, KvCache};

use crate::error::Error;

/// Device memory of candle.
pub(crate) type Slice<T> = CudaSlice<T>;

/// A value that candle and the cache both know.
pub(crate) trait Value: Element + CudaDType + DeviceRepr + ValidAsZeroBits {}
impl<T: Element + CudaDType + DeviceRepr + ValidAsZeroBits> Value for T {}

/// Handles of the legacy default stream, its explicit name, and the stream of each thread.
const BUILT_IN: [usize; 3] = [0, 1, 2];

/// Allocates a cache that records on the device's own stream: what candle and the cache do follows
/// in order, and neither waits for the other.
pub(crate) fn open(
    device: &Device,
    ordinal: usize,
    spec: CacheSpec,
) -> std::result::Result<KvCache, Error> {
    let stream = device.as_cuda_device()?.cuda_stream();
    if BUILT_IN.contains(&stream.cu_stream().addr()) {
        // Work of every thread would go to another stream, or wait for all others.
        let instead = "make the device by Device::new_cuda_with_stream: Device::new_cuda uses a \
                       stream that is another one in every thread";
        return Err(Error::Unsupported { device: format!("cuda:{ordinal}"), instead });
    }
    let options = CudaOptions::new(u32::try_from(ordinal).unwrap_or(u32::MAX));
    let backend = CudaBackend::open(&options).map_err(CacheError::from)?;
    let queue = backend.queue_on_stream(&stream).map_err(CacheError::from)?;
    Ok(KvCache::builder(AnyBackend::new(backend), spec).queue(AnyQueue::new(queue)).build()?)
}

/// Lends memory of candle to a cache.
pub(crate) struct Lender(CudaBackend);

impl Lender {
    /// Makes a lender for a cache on this backend.
    pub(crate) fn of<B: Backend>(backend: &B) -> Result<Self> {
        let any: &dyn Any = backend;
        let own = any.downcast_ref::<CudaBackend>();
        let erased = || any.downcast_ref::<AnyBackend>()?.downcast_ref::<CudaBackend>();
        match own.or_else(erased) {
            Some(backend) => Ok(Self(backend.clone())),
            None => bail!("tensors on CUDA, a cache on the backend {}", backend.name()),
        }
    }

    /// Lends memory to be read.
    pub(crate) fn read<T, Buf: Clone + 'static, R>(
        &self,
        slice: &CudaSlice<T>,
        using: impl FnOnce(&Buf) -> Result<R>,
    ) -> Result<R> {
        let using = |buffer: &CudaBuffer| using(&convert(buffer)?);
        self.0.lend(&slice.as_view(), using).map_err(CandleError::wrap)?
    }

    /// Lends memory to be written.
    pub(crate) fn write<T, Buf: Clone + 'static, R>(
        &self,
        slice: &mut CudaSlice<T>,
        using: impl FnOnce(&Buf) -> Result<R>,
    ) -> Result<R> {
        let using = |buffer: &CudaBuffer| using(&convert(buffer)?);
        self.0.lend_mut(&mut slice.as_view_mut(), using).map_err(CandleError::wrap)?
    }
}

/// Returns a handle as the backend's type, its own or the erased one.
fn convert<Buf: Clone + 'static>(buffer: &CudaBuffer) -> Result<Buf> {
    let own: &dyn Any = buffer;
    if let Some(own) = own.downcast_ref::<Buf>() {
        return Ok(own.clone());
    }
    let erased: Box<dyn Any> = Box::new(AnyBuffer::new(buffer.clone()));
    match erased.downcast::<Buf>() {
        Ok(erased) => Ok(*erased),
        Err(_) => bail!("a backend over CUDA with buffers of its own"),
    }
}
