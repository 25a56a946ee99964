//! What says that submitted work is done: fences, and bytes on their way to the host.
use std::sync::Arc;
use std::task::{Context, Poll};

use kv_core::backend::{Fence, Readback};
use kv_core::{DeviceError, DeviceErrorKind};

use crate::gpu::{Event, Gpu, Stream};
use crate::pins::Piece;
use crate::waiter::Waiter;

/// Signals that work submitted before is done.
///
/// To [`wait`](Fence::wait) keeps a core busy, because the answer of a step is wanted when it is
/// there and not a wake-up later: tens of microseconds, of a step's hundreds. Who has something
/// else to do polls instead; a thread of the backend then looks for everybody.
#[derive(Debug, Clone)]
pub struct CudaFence {
    gpu: Arc<dyn Gpu>,
    event: Arc<dyn Event>,
    waiter: Arc<Waiter>,
}

/// Bytes on their way to the host.
#[derive(Debug)]
pub struct CudaReadback {
    /// Nothing was asked for where there is none.
    pub(crate) copy: Option<(CudaFence, Piece)>,
    pub(crate) len: usize,
}

impl CudaFence {
    /// Marks the work of a stream so far.
    pub(crate) fn record(
        gpu: &Arc<dyn Gpu>,
        waiter: &Arc<Waiter>,
        stream: &mut dyn Stream,
    ) -> Result<Self, DeviceError> {
        let event = stream.record()?;
        Ok(Self { gpu: Arc::clone(gpu), event, waiter: Arc::clone(waiter) })
    }

    /// Its event, for a stream of `gpu` to wait for.
    pub(crate) fn event_on(
        &self,
        gpu: &Arc<dyn Gpu>,
        operation: &'static str,
    ) -> Result<&Arc<dyn Event>, DeviceError> {
        if !Arc::ptr_eq(gpu, &self.gpu) {
            return Err(DeviceError::new(DeviceErrorKind::ForeignHandle, operation));
        }
        Ok(&self.event)
    }
}

impl Fence for CudaFence {
    fn poll(&self, cx: &mut Context<'_>) -> Poll<Result<(), DeviceError>> {
        match self.event.is_done() {
            Ok(true) => Poll::Ready(Ok(())),
            Err(error) => Poll::Ready(Err(error)),
            Ok(false) => match self.waiter.wake(&self.event, cx.waker()) {
                Ok(()) => Poll::Pending,
                Err(error) => Poll::Ready(Err(error)),
            },
        }
    }
    fn wait(&self) -> Result<(), DeviceError> {
        self.event.wait()
    }
}

impl CudaReadback {
    fn take(&mut self) -> Vec<u8> {
        let Some((_, pinned)) = self.copy.take() else {
            return Vec::new();
        };
        let len = self.len.min(pinned.len());
        // SAFETY: the copy is done, by its fence, and nobody else has these bytes.
        unsafe { std::slice::from_raw_parts(pinned.base().cast_const(), len) }.to_vec()
    }
}

impl Drop for CudaReadback {
    fn drop(&mut self) {
        if let Some((fence, pinned)) = self.copy.take()
            && fence.event.wait().is_err()
        {
            // The device is gone; whether it still writes the bytes nobody can tell.
            pinned.leak();
        }
    }
}

impl Readback for CudaReadback {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Vec<u8>, DeviceError>> {
        match self.copy.as_ref().map_or(Poll::Ready(Ok(())), |(fence, _)| fence.poll(cx)) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Ok(())) => Poll::Ready(Ok(self.take())),
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
        }
    }
    fn wait(mut self) -> Result<Vec<u8>, DeviceError> {
        if let Some((fence, _)) = &self.copy {
            fence.wait()?;
        }
        Ok(self.take())
    }
}
