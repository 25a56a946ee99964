//! Bytes of Python tensors, and streams. The only module with unsafe code.
//!
//! A tensor says where its bytes are, and only its framework can know whether that is true. Every
//! address here comes from torch's own `Tensor`, or from a descriptor of `DLPack`. Every stream
//! comes from an object of its framework, or is a handle that the caller answers for.
#![allow(unsafe_code, reason = "Python lends memory as addresses; docs/unsafe.md has the rules")]
#[cfg(feature = "cuda")]
use std::ffi::c_void;
use std::marker::PhantomData;
#[cfg(feature = "cuda")]
use std::{mem, process};
use std::{ptr, slice};

use dlpark::ffi::DLDevice;
#[cfg(feature = "cuda")]
use dlpark::metadata::Fixed;
use dlpark::python::CudaStreamRequest;
use dlpark::python::consumer::{DlpackStream, ImportedDlpack, StreamArg, stream};
use dlpark::{Managed, ManagedTensorBase};
use kv::DType;
use kv::backend::{AnyBuffer, AnyFence, AnyQueue};
#[cfg(feature = "cuda")]
use kv::cuda::{CudaBuffer, CudaFence};
use kv::error::DeviceError;
#[cfg(feature = "cuda")]
use kv::error::DeviceErrorKind;
#[cfg(feature = "cuda")]
use pyo3::exceptions::PyBufferError;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;

use crate::card::Card;
#[cfg(feature = "cuda")]
use crate::tensor::dtype_of;
use crate::torch::torch;

/// Host memory of a Python object, for as long as the object is borrowed.
///
/// Other Python threads may write the same memory meanwhile, as they may under every extension that
/// lets the interpreter go. The bytes are then any bytes.
#[derive(Debug)]
pub(crate) struct Lent<'a> {
    /// Established by the constructors: `len` bytes from here are the owner's, or `len` is 0.
    begin: *mut u8,
    len: usize,
    owner: PhantomData<&'a ()>,
}

// SAFETY: plain bytes without affinity to a thread; the borrow keeps their owner.
unsafe impl Send for Lent<'_> {}
// SAFETY: a shared borrow only reads; `bytes_mut` needs an exclusive one.
unsafe impl Sync for Lent<'_> {}

impl<'a> Lent<'a> {
    /// Borrows `len` bytes from the first element of a tensor of torch.
    ///
    /// # Errors
    /// A `TypeError` for an object that is no `torch.Tensor`; those of `data_ptr`, for tensors
    /// without storage.
    pub(crate) fn of_torch(tensor: &'a Bound<'_, PyAny>, len: usize) -> PyResult<Self> {
        let address = address_of_torch(tensor)?;
        Ok(Self { begin: ptr::with_exposed_provenance_mut(address), len, owner: PhantomData })
    }

    /// Borrows `len` bytes from the first element of an imported tensor.
    ///
    /// # Errors
    /// A `TypeError` for a descriptor that contradicts itself.
    pub(crate) fn of_dlpack(tensor: &'a ImportedDlpack, len: usize) -> PyResult<Self> {
        let described =
            tensor.validate().map_err(|error| PyTypeError::new_err(error.to_string()))?;
        // SAFETY: the import has validated the descriptor, whose owner `tensor` keeps; DLPack
        // promises that the offset is inside the allocation.
        let begin = unsafe { described.offset_bytes_ptr() };
        let begin = begin.map_err(|error| PyTypeError::new_err(error.to_string()))?;
        Ok(Self { begin: begin.cast_mut(), len, owner: PhantomData })
    }

    /// Returns the bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: the constructors established the range; a `u8` has no alignment.
        unsafe { slice::from_raw_parts(self.begin, self.len) }
    }

    /// Returns the bytes of an output, which `Tensor::output` has found writable and apart from the
    /// inputs.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        if self.len == 0 {
            return &mut [];
        }
        // SAFETY: the constructors established the range; a `u8` has no alignment.
        unsafe { slice::from_raw_parts_mut(self.begin, self.len) }
    }

    /// Returns the address of the first byte, and the number of bytes.
    pub(crate) fn range(&self) -> (usize, usize) {
        (self.begin.addr(), self.len)
    }
}

/// Returns the address of the first element of a tensor of torch.
///
/// # Errors
/// A `TypeError` for an object that is no `torch.Tensor`; those of `data_ptr`, for tensors without
/// storage.
pub(crate) fn address_of_torch(tensor: &Bound<'_, PyAny>) -> PyResult<usize> {
    let py = tensor.py();
    if !torch(py)?.is_some_and(|torch| torch.is_tensor(tensor)) {
        return Err(PyTypeError::new_err("a torch.Tensor is expected"));
    }
    tensor.call_method0(intern!(py, "data_ptr"))?.extract()
}

/// Returns the address of the first element of an imported tensor.
///
/// # Errors
/// A `TypeError` for a descriptor that contradicts itself.
pub(crate) fn address_of_dlpack(tensor: &ImportedDlpack) -> PyResult<usize> {
    let refused = || PyTypeError::new_err("the tensor ends past the last address");
    let described = tensor.validate().map_err(|error| PyTypeError::new_err(error.to_string()))?;
    let offset = usize::try_from(described.byte_offset()).map_err(|_| refused())?;
    described.data_ptr().addr().checked_add(offset).ok_or_else(refused)
}

/// Memory of a Python object on the CUDA device of a cache, for as long as the object is borrowed.
#[derive(Debug)]
pub(crate) struct LentOnCard<'a> {
    buffer: AnyBuffer,
    range: (usize, usize),
    owner: PhantomData<&'a ()>,
}

impl<'a> LentOnCard<'a> {
    /// Borrows `len` bytes from the first element of a tensor of torch, which is on this device.
    ///
    /// # Errors
    /// Those of [`address_of_torch`]; a `ValueError` for an address that is not a multiple of 16.
    pub(crate) fn of_torch(
        card: &Card,
        tensor: &'a Bound<'_, PyAny>,
        len: usize,
    ) -> PyResult<Self> {
        let range = (address_of_torch(tensor)?, len);
        // SAFETY: torch says that the tensor is on this device (`Described::of_torch`), and keeps
        // its memory as long as the tensor (1). `Order::run` orders the call with torch's stream,
        // in whose order torch reuses memory (2).
        unsafe { Self::wrap(card, range) }
    }

    /// Borrows `len` bytes from the first element of an imported tensor, which is on this device.
    ///
    /// # Errors
    /// Those of [`address_of_dlpack`]; a `ValueError` for an address that is not a multiple of 16.
    pub(crate) fn of_dlpack(card: &Card, tensor: &'a ImportedDlpack, len: usize) -> PyResult<Self> {
        let range = (address_of_dlpack(tensor)?, len);
        // SAFETY: the descriptor says that the tensor is on this device (`Described::of_dlpack`),
        // and keeps its memory (1). The producer has ordered its work before that of the stream
        // which it was told, and `Order::run` waits for the call, unless the caller has named the
        // stream and answers for what uses the memory on others (2).
        unsafe { Self::wrap(card, range) }
    }

    /// # Safety
    /// 1. The range is memory of the device for the lifetime of the result.
    /// 2. Others use it before the work that is recorded until then, or after it.
    #[cfg(feature = "cuda")]
    unsafe fn wrap(card: &Card, range: (usize, usize)) -> PyResult<Self> {
        let refused = |error: &dyn std::fmt::Display| PyValueError::new_err(error.to_string());
        let address = u64::try_from(range.0).map_err(|error| refused(&error))?;
        let len = u64::try_from(range.1).map_err(|error| refused(&error))?;
        // SAFETY: condition 1 (1, 2: queues keep handles of captured launches alone, and none
        // captures here), and condition 2 (3).
        let buffer = unsafe { card.backend.wrap_unchecked(address, len) };
        let buffer = AnyBuffer::new(buffer.map_err(|error| refused(&error))?);
        Ok(Self { buffer, range, owner: PhantomData })
    }

    #[cfg(not(feature = "cuda"))]
    unsafe fn wrap(card: &Card, _range: (usize, usize)) -> PyResult<Self> {
        match *card {}
    }

    /// Returns the memory as a buffer of the device.
    pub(crate) fn buffer(&self) -> &AnyBuffer {
        &self.buffer
    }

    /// Returns the address of the first byte, and the number of bytes.
    pub(crate) fn range(&self) -> (usize, usize) {
        self.range
    }
}

/// Memory of a cache on a CUDA device, which lives as long as the last tensor over it.
#[cfg(feature = "cuda")]
#[derive(Debug, Clone)]
pub(crate) struct Kept {
    buffer: CudaBuffer,
    process: u32,
}

#[cfg(feature = "cuda")]
impl Drop for Kept {
    fn drop(&mut self) {
        if process::id() != self.process {
            // A fork of the process cannot use the driver: its copy is never freed.
            mem::forget(self.buffer.clone());
        }
    }
}

#[cfg(feature = "cuda")]
impl Kept {
    /// Takes a handle of a buffer, `None` for one that is not of CUDA.
    pub(crate) fn of(buffer: &AnyBuffer) -> Option<Self> {
        let buffer = buffer.downcast_ref::<CudaBuffer>()?.clone();
        Some(Self { buffer, process: process::id() })
    }

    /// Returns the address of the first byte, and the number of bytes.
    pub(crate) fn range(&self) -> Option<(usize, usize)> {
        let address = usize::try_from(self.buffer.address()).ok()?;
        Some((address, usize::try_from(self.buffer.len()).ok()?))
    }

    /// Describes the memory as a tensor of `DLPack`, which keeps it.
    ///
    /// # Errors
    /// A `BufferError` for elements past the end of the memory.
    pub(crate) fn export<M: ManagedTensorBase>(&self, placed: &Placed) -> PyResult<Managed<M>> {
        let refused = || PyBufferError::new_err(format!("{placed:?} is not in {:?}", self.buffer));
        let (_, bytes) = self.range().ok_or_else(refused)?;
        // Whoever drops the tensor may have work with it on any stream.
        let address = usize::try_from(self.buffer.expose()).map_err(|_| refused())?;
        let end = placed.bytes().and_then(|bytes| usize::try_from(bytes).ok());
        if end.is_none_or(|end| end > bytes) {
            return Err(refused());
        }
        let described = Fixed::new(placed.shape, placed.strides);
        let mut tensor = described
            .initialize_as::<M>(Box::new(self.clone()))
            .map_err(|error| PyBufferError::new_err(error.to_string()))?;
        tensor.set_device(DLDevice::cuda(placed.ordinal)).set_dtype(dtype_of(placed.dtype)?);
        tensor.set_data(ptr::with_exposed_provenance_mut(address));
        // SAFETY: all elements lie in the memory, whose size was compared above, and the context of
        // the tensor has a handle of it; shape and strides were copied. The memory is shared, and
        // may be written: that is what a descriptor without flags says.
        Ok(unsafe { tensor.finish() })
    }
}

/// Memory of a cache on a CUDA device: none without the feature `cuda`.
#[cfg(not(feature = "cuda"))]
#[derive(Debug, Clone)]
pub(crate) enum Kept {}

#[cfg(not(feature = "cuda"))]
impl Kept {
    pub(crate) fn of(_: &AnyBuffer) -> Option<Self> {
        None
    }

    pub(crate) fn range(&self) -> Option<(usize, usize)> {
        match *self {}
    }

    pub(crate) fn export<M: ManagedTensorBase>(&self, _: &Placed) -> PyResult<Managed<M>> {
        match *self {}
    }
}

/// The elements of a tensor over memory of a cache.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "no memory is exported"))]
pub(crate) struct Placed {
    pub(crate) ordinal: i32,
    pub(crate) dtype: DType,
    pub(crate) shape: [u64; 4],
    /// Elements from one index of an axis to the next.
    pub(crate) strides: [u64; 4],
}

#[cfg(feature = "cuda")]
impl Placed {
    /// Returns the number of bytes up to the end of the last element, `None` if there are none or
    /// too many.
    fn bytes(&self) -> Option<u64> {
        let axes = self.shape.iter().zip(self.strides);
        let last = axes.into_iter().try_fold(0_u64, |last, (extent, stride)| {
            extent.checked_sub(1)?.checked_mul(stride)?.checked_add(last)
        });
        last?.checked_add(1)?.checked_mul(u64::try_from(self.dtype.size()).ok()?)
    }
}

/// A stream of CUDA that somebody else keeps: its handle, a `CUstream`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stream(usize);

/// Another name of [`Stream::LEGACY`].
const LEGACY: usize = 1;
/// The handle that names another stream in every thread.
const PER_THREAD: usize = 2;

impl Stream {
    /// The legacy default stream.
    pub(crate) const LEGACY: Self = Self(0);

    /// Reads a stream: an object of torch (`cuda_stream`), of cupy (`ptr`) or with
    /// `__cuda_stream__`, or a handle, which the caller keeps open.
    ///
    /// # Errors
    /// A `TypeError` for any other object; a `ValueError` for a number that is no handle, and for
    /// the per-thread default stream.
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = object.py();
        let named = if let Some(of_torch) = object.getattr_opt(intern!(py, "cuda_stream"))? {
            of_torch
        } else if let Some(of_cupy) = object.getattr_opt(intern!(py, "ptr"))? {
            of_cupy
        } else if let Some(protocol) = object.getattr_opt(intern!(py, "__cuda_stream__"))? {
            protocol.call0()?.get_item(1)?
        } else {
            object.clone()
        };
        let handle: i128 = named.extract().map_err(|_| {
            PyTypeError::new_err(format!(
                "stream={object}: a stream of torch or cupy, or a handle, is expected"
            ))
        })?;
        match usize::try_from(handle) {
            Ok(LEGACY) => Ok(Self::LEGACY),
            Ok(PER_THREAD) => Err(PyValueError::new_err(
                "stream=2 is the per-thread default stream, another one in every thread: make a \
                 stream",
            )),
            Ok(handle) => Ok(Self(handle)),
            Err(_) => Err(PyValueError::new_err(format!("stream={handle} is no handle"))),
        }
    }

    /// Reads the stream that a consumer of `DLPack` works on.
    pub(crate) fn of_consumer(asked: CudaStreamRequest) -> Consumer {
        match asked {
            CudaStreamRequest::NoSync => Consumer::Orders,
            CudaStreamRequest::Omitted | CudaStreamRequest::LegacyDefault => {
                Consumer::On(Self::LEGACY)
            }
            CudaStreamRequest::PerThreadDefault => Consumer::Unnamed,
            CudaStreamRequest::Pointer(handle) => Consumer::On(Self(handle)),
        }
    }

    pub(crate) fn handle(self) -> usize {
        self.0
    }

    /// Opens a queue on the stream.
    ///
    /// # Errors
    /// `ForeignHandle` for a stream of another device; `Lost` or `Driver`.
    #[cfg(feature = "cuda")]
    pub(crate) fn queue(self, card: &Card) -> Result<AnyQueue, DeviceError> {
        // SAFETY: `queue_on` refuses streams of other contexts. The queue of a cache ends before
        // the object that the stream came from (`Cache::_keep`), and torch never closes streams of
        // its own; the caller answers for a handle that is a number, as `Cache` documents (1).
        // `Order::of` refuses captures of torch; the same documentation forbids all others (2).
        let queue = unsafe { card.backend.queue_on(self.raw()) };
        Ok(AnyQueue::new(queue?))
    }

    /// Marks the work that torch's current stream has now.
    ///
    /// # Errors
    /// `ForeignHandle` for a stream of another device; `Lost` or `Driver`.
    #[cfg(feature = "cuda")]
    pub(crate) fn mark(self, card: &Card) -> Result<AnyFence, DeviceError> {
        // SAFETY: a stream on which torch works is open (1), and `Order::of` or `Order::of_shared`
        // has found no capture (2).
        let fence = unsafe { card.backend.mark_stream(self.raw()) };
        Ok(AnyFence::new(fence?))
    }

    /// Makes later work of torch's current stream, or of the stream of a consumer of `DLPack`, wait
    /// for a fence.
    ///
    /// # Errors
    /// `ForeignHandle` for a stream or a fence of another device; `Lost` or `Driver`.
    #[cfg(feature = "cuda")]
    pub(crate) fn hold(self, card: &Card, fence: &AnyFence) -> Result<(), DeviceError> {
        let Some(fence) = fence.downcast_ref::<CudaFence>() else {
            return Err(DeviceError::new(DeviceErrorKind::ForeignHandle, "hold a stream"));
        };
        // SAFETY: a stream on which torch works is open, and the protocol of DLPack asks a consumer
        // for one that is (1). `Order::of`, `Order::of_shared` and `check_not_captured` have found
        // no capture of torch, and no other consumer asks for a tensor in a capture (2).
        unsafe { card.backend.hold_stream(self.raw(), fence) }
    }

    #[cfg(feature = "cuda")]
    fn raw(self) -> *mut c_void {
        ptr::with_exposed_provenance_mut(self.0)
    }
}

/// The stream on which a consumer of `DLPack` uses a tensor.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Consumer {
    /// The consumer orders its work itself.
    Orders,
    On(Stream),
    /// One that another thread cannot name.
    Unnamed,
}

/// Without the feature `cuda` there is no device to work on.
#[cfg(not(feature = "cuda"))]
#[expect(clippy::unused_self, reason = "with the feature `cuda` they use it")]
impl Stream {
    pub(crate) fn queue(self, card: &Card) -> Result<AnyQueue, DeviceError> {
        match *card {}
    }

    pub(crate) fn mark(self, card: &Card) -> Result<AnyFence, DeviceError> {
        match *card {}
    }

    pub(crate) fn hold(self, card: &Card, _fence: &AnyFence) -> Result<(), DeviceError> {
        match *card {}
    }
}

// SAFETY: the handle is that of an open stream of the device, by the conditions under which a queue
// is on it (`Stream::queue`), and `stream::cuda` follows the convention for CUDA, the only device
// for which it is passed on (`Described::of_dlpack`).
unsafe impl DlpackStream for Stream {
    fn as_python_arg(&self, _py: Python<'_>, _device: DLDevice) -> PyResult<StreamArg> {
        Ok(stream::cuda(ptr::without_provenance_mut(self.0)))
    }
}
