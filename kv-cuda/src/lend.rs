//! Streams and memory of programs that hold them through cudarc, as those on candle do.
//!
//! A [`CudaStream`] is kept open by the queue on it. Memory is lent for the length of a call, and
//! cudarc frees it in the order of its stream, so work that was recorded on that stream in the
//! meantime is done before. Every condition of the unsafe calls below is established here, so that
//! the callers need none.
use std::sync::Arc;

use cudarc::driver::{
    CudaContext, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceSlice,
};
use kv_core::error::{DeviceError, DeviceErrorKind};

use crate::backend::{CudaBackend, require_aligned};
use crate::buffer::{CallerStream, CudaBuffer};
use crate::params::Address;
use crate::queue::CudaQueue;
use kv_core::num::to_u64;

const QUEUE: &str = "open a queue on a stream";
const LEND: &str = "lend device memory";

impl CudaBackend {
    /// Opens a queue on a stream of cudarc, which stays open as long as the queue.
    ///
    /// A thread that captures on the stream must have run a step before the capture, and keeps
    /// captured memory usable itself, as for all work that it captures.
    ///
    /// # Errors
    /// `ForeignHandle` for a stream of another device, `Unsupported` for the per-thread stream,
    /// which is another one in every thread; `Lost` or `Driver`.
    pub fn queue_on_stream(&self, stream: &Arc<CudaStream>) -> Result<CudaQueue, DeviceError> {
        self.require_context(stream.context(), QUEUE)?;
        let handle = caller_stream(stream);
        if handle == PER_THREAD {
            let error = DeviceError::new(DeviceErrorKind::Unsupported, QUEUE);
            return Err(error.with_detail("the per-thread stream is another one in every thread"));
        }
        let raw = stream.cu_stream().cast();
        // SAFETY: the context was compared above, and the queue keeps the stream open (1). A
        // capture on a stream that others record on is cudarc's own to forbid (2).
        let mut queue = unsafe { self.queue_on(raw)? };
        queue.set_lending(handle, Arc::<CudaStream>::clone(stream));
        Ok(queue)
    }

    /// Lends memory of cudarc, to be read, as a buffer of its bytes for the length of a call. Only
    /// the queue on the memory's own stream accepts it ([`Self::queue_on_stream`]), outside of
    /// captures.
    ///
    /// # Errors
    /// `ForeignHandle` for memory of another device, `Unsupported` for an address that is not a
    /// multiple of 16. The result of `using` otherwise.
    ///
    /// # Aborts
    /// Ends the process if `using` keeps a handle of the buffer.
    pub fn lend<T, R>(
        &self,
        memory: &CudaView<'_, T>,
        using: impl FnOnce(&CudaBuffer) -> R,
    ) -> Result<R, DeviceError> {
        let stream = memory.stream();
        self.require_context(stream.context(), LEND)?;
        // Notes a reader for other streams when it is dropped.
        let (address, _reading) = memory.device_ptr(stream);
        self.lend_bytes((address, to_u64(memory.num_bytes())), stream, using)
    }

    /// Does what [`Self::lend`] does, for memory that is written.
    ///
    /// # Errors
    /// Those of [`Self::lend`].
    ///
    /// # Aborts
    /// Ends the process if `using` keeps a handle of the buffer.
    pub fn lend_mut<T, R>(
        &self,
        memory: &mut CudaViewMut<'_, T>,
        using: impl FnOnce(&CudaBuffer) -> R,
    ) -> Result<R, DeviceError> {
        let (stream, bytes) = (Arc::clone(memory.stream()), to_u64(memory.num_bytes()));
        self.require_context(stream.context(), LEND)?;
        // Notes a writer for other streams when it is dropped.
        let (address, _writing) = memory.device_ptr_mut(&stream);
        self.lend_bytes((address, bytes), &stream, using)
    }

    fn lend_bytes<R>(
        &self,
        range: (Address, u64),
        stream: &CudaStream,
        using: impl FnOnce(&CudaBuffer) -> R,
    ) -> Result<R, DeviceError> {
        require_aligned(range.0)?;
        // SAFETY: a view of cudarc is memory of its context, which was compared, and is borrowed
        // until this function returns; no handle is left then, or the process ends (1). cudarc
        // frees it in the order of its stream (2).
        let buffer = unsafe { CudaBuffer::lent(&self.gpu, range, caller_stream(stream)) };
        let loan = Loan(buffer);
        Ok(using(&loan.0))
    }

    fn require_context(
        &self,
        context: &CudaContext,
        operation: &'static str,
    ) -> Result<(), DeviceError> {
        if self.gpu.is_context(context.cu_ctx().cast()) {
            return Ok(());
        }
        Err(DeviceError::new(DeviceErrorKind::ForeignHandle, operation))
    }
}

/// Memory that is lent until this is dropped.
struct Loan(CudaBuffer);

impl Drop for Loan {
    fn drop(&mut self) {
        if self.0.is_only_handle() {
            return;
        }
        #[expect(clippy::print_stderr, reason = "the process ends here")]
        {
            eprintln!("a handle of {:?} was kept after the call it was lent for", self.0);
        }
        // The memory may be freed as soon as this returns, or unwinds.
        std::process::abort();
    }
}

/// Returns the handle that tells a stream from others of its context.
pub(crate) fn caller_stream(stream: &CudaStream) -> CallerStream {
    CallerStream(stream.cu_stream().addr())
}

/// The handle that names another stream in every thread.
const PER_THREAD: CallerStream = CallerStream(2);
