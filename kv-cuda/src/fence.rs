//! Completion of submitted work: fences, and downloads.
use std::sync::Arc;
use std::task::{Context, Poll};

use kv_core::backend::{Fence, Readback};
use kv_core::error::{DeviceError, DeviceErrorKind};

use crate::gpu::{Event, Gpu, Stream};
use crate::pins::PinnedBuffer;
use crate::waiter::Waiter;

/// Signals that the work submitted before it is done.
///
/// [`wait`](Fence::wait) spins on a core, because a wake-up would add tens of microseconds to a
/// step of hundreds. A caller with other work polls instead; a thread of the backend then polls for
/// all such callers.
#[derive(Debug, Clone)]
pub struct CudaFence {
    gpu: Arc<dyn Gpu>,
    event: Arc<dyn Event>,
    waiter: Arc<Waiter>,
}

/// A download: bytes that the device copies to the host.
#[derive(Debug)]
pub struct CudaReadback {
    /// `None` for a download of no bytes.
    pub(crate) copy: Option<(CudaFence, PinnedBuffer)>,
    pub(crate) len: usize,
}

impl CudaFence {
    /// Marks the work of a stream so far.
    pub(crate) fn record(
        gpu: &Arc<dyn Gpu>,
        waiter: &Arc<Waiter>,
        stream: &mut dyn Stream,
    ) -> Result<Self, DeviceError> {
        Ok(Self::on(gpu, waiter, stream.record()?))
    }

    /// Wraps an event of a stream.
    pub(crate) fn on(gpu: &Arc<dyn Gpu>, waiter: &Arc<Waiter>, event: Arc<dyn Event>) -> Self {
        Self { gpu: Arc::clone(gpu), event, waiter: Arc::clone(waiter) }
    }

    /// Returns its event.
    pub(crate) fn event(&self) -> &Arc<dyn Event> {
        &self.event
    }

    /// Returns its event, for a stream of `gpu` to wait for.
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
        // SAFETY: the copy is done, by its fence, and nothing else uses these bytes.
        unsafe { std::slice::from_raw_parts(pinned.base().cast_const(), len) }.to_vec()
    }
}

impl Drop for CudaReadback {
    fn drop(&mut self) {
        if let Some((fence, pinned)) = self.copy.take()
            && fence.event.wait().is_err()
        {
            // The device is gone and may still write the bytes: never reuse them.
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
