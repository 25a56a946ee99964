//! A non-owning handle of a stream, with the state of its capture.
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::CUstreamCaptureMode as CaptureMode;
use cudarc::driver::sys::CUstreamCaptureStatus as CaptureStatus;
use cudarc::driver::sys::{self, CUstream};
use kv_core::error::{DeviceError, DeviceErrorKind};

use super::context::Context;
use super::error::refuse;
use super::event::CudaEvent;
use super::graph::CudaGraph;
use crate::gpu::Event;
use crate::reclaim::StreamHandle;

/// A stream whose work memory is freed after, until it is closed.
#[derive(Debug)]
pub(super) struct CudaStreamHandle {
    context: Arc<Context>,
    raw: CUstream,
    /// An event for the work before a capture of ours, while one is active. Locked while a capture
    /// begins or ends, so that no mark becomes part of the capture.
    before_capture: Mutex<Option<Arc<dyn Event>>>,
}

// SAFETY: the driver lets any thread use a stream.
unsafe impl Send for CudaStreamHandle {}
// SAFETY: and several threads at the same time.
unsafe impl Sync for CudaStreamHandle {}

impl CudaStreamHandle {
    /// # Safety
    /// 1. `raw` is a stream of the context, alive until `Reclaim::close` is done.
    pub(super) unsafe fn new(context: &Arc<Context>, raw: CUstream) -> Self {
        Self { context: Arc::clone(context), raw, before_capture: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<dyn Event>>> {
        self.before_capture.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether a capture is active on it, or the driver cannot tell.
    pub(super) fn is_capturing(&self) -> bool {
        let Ok(_current) = self.context.enter("query a capture") else { return true };
        let mut status = CaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE;
        // SAFETY: an out-pointer for a status, and a live stream. An error leaves the status.
        let _ = unsafe { sys::cuStreamIsCapturing(self.raw, &raw mut status) };
        status != CaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE
    }

    /// Returns whether a capture is active that is not ours, or the driver cannot tell.
    pub(super) fn is_captured_by_others(&self) -> bool {
        self.lock().is_none() && self.is_capturing()
    }

    pub(super) fn begin_capture(&self) -> Result<(), DeviceError> {
        const BEGIN: &str = "begin capture";
        let mut before = self.lock();
        // SAFETY: a live stream of the context.
        let event = unsafe { CudaEvent::record(&self.context, self.raw) }?;
        let _current = self.context.enter(BEGIN)?;
        // Only this thread is restricted: calls that a graph cannot hold are refused.
        let mode = CaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: as above.
        let code = unsafe { sys::cuStreamBeginCapture_v2(self.raw, mode) };
        self.context.check(BEGIN, code)?;
        *before = Some(Arc::new(event));
        Ok(())
    }

    pub(super) fn end_capture(&self) -> Result<CudaGraph, DeviceError> {
        let mut before = self.lock();
        // SAFETY: a live stream of the context.
        let graph = unsafe { CudaGraph::end_capture(&self.context, self.raw) };
        // If a failure has left the capture active, the driver reports it at the next mark.
        *before = None;
        graph
    }

    /// Ends an active capture of ours and drops the captured work.
    pub(super) fn abandon_capture(&self) {
        let is_on = self.lock().is_some();
        if is_on {
            let _ = self.end_capture();
        }
    }
}

impl StreamHandle for CudaStreamHandle {
    fn mark(&self) -> Result<Arc<dyn Event>, DeviceError> {
        let before = self.lock();
        if let Some(event) = &*before {
            return Ok(Arc::clone(event));
        }
        if self.is_capturing() {
            let reason = "a capture is active on the stream";
            return Err(refuse(DeviceErrorKind::Unsupported, "mark a stream", reason));
        }
        // SAFETY: a live stream of the context, by the condition of `new`.
        Ok(Arc::new(unsafe { CudaEvent::record(&self.context, self.raw) }?))
    }
}
