//! A stream as those see it who do not own it, and whether it captures.
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::CUstreamCaptureMode as CaptureMode;
use cudarc::driver::sys::CUstreamCaptureStatus as CaptureStatus;
use cudarc::driver::sys::{self, CUstream};
use kv_core::{DeviceError, DeviceErrorKind};

use super::context::Context;
use super::error::refuse;
use super::event::CudaEvent;
use super::graph::CudaGraph;
use crate::gpu::Event;
use crate::reclaim::Lane;

/// A stream that lives as long as it is on the list of those that memory is freed behind.
#[derive(Debug)]
pub(super) struct CudaLane {
    context: Arc<Context>,
    raw: CUstream,
    /// What was submitted before a capture of ours, while one is on. Locked while a capture begins
    /// or ends, so that nobody's mark becomes part of it.
    before_capture: Mutex<Option<Arc<dyn Event>>>,
}

// SAFETY: the driver lets any thread use a stream.
unsafe impl Send for CudaLane {}
// SAFETY: and several at the same time.
unsafe impl Sync for CudaLane {}

impl CudaLane {
    /// # Safety
    /// 1. `raw` is a stream of the context that lives until `Reclaim::close` is done.
    pub(super) unsafe fn new(context: &Arc<Context>, raw: CUstream) -> Self {
        Self { context: Arc::clone(context), raw, before_capture: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<dyn Event>>> {
        self.before_capture.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether anybody captures on it, or the driver cannot tell.
    pub(super) fn is_capturing(&self) -> bool {
        let Ok(_current) = self.context.enter("ask for a capture") else { return true };
        let mut status = CaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE;
        // SAFETY: a place for a status, and a stream that lives. An error leaves the status.
        let _ = unsafe { sys::cuStreamIsCapturing(self.raw, &raw mut status) };
        status != CaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE
    }

    /// Whether a capture is on that is none of ours, or the driver cannot tell.
    pub(super) fn is_captured_by_others(&self) -> bool {
        self.lock().is_none() && self.is_capturing()
    }

    pub(super) fn begin_capture(&self) -> Result<(), DeviceError> {
        const BEGIN: &str = "begin capture";
        let mut before = self.lock();
        // SAFETY: a stream of the context that lives.
        let event = unsafe { CudaEvent::record(&self.context, self.raw) }?;
        let _current = self.context.enter(BEGIN)?;
        // Other threads go on as they like; this one is refused what a graph cannot hold.
        let mode = CaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: as above.
        let code = unsafe { sys::cuStreamBeginCapture_v2(self.raw, mode) };
        self.context.check(BEGIN, code)?;
        *before = Some(Arc::new(event));
        Ok(())
    }

    pub(super) fn end_capture(&self) -> Result<CudaGraph, DeviceError> {
        let mut before = self.lock();
        // SAFETY: a stream of the context that lives.
        let graph = unsafe { CudaGraph::end_capture(&self.context, self.raw) };
        // Should a failure have left it on, the driver says so when the stream is to be marked.
        *before = None;
        graph
    }

    /// Ends a capture of ours that nobody has ended; what was captured is gone.
    pub(super) fn abandon_capture(&self) {
        let is_on = self.lock().is_some();
        if is_on {
            let _ = self.end_capture();
        }
    }
}

impl Lane for CudaLane {
    fn mark(&self) -> Result<Arc<dyn Event>, DeviceError> {
        let before = self.lock();
        if let Some(event) = &*before {
            return Ok(Arc::clone(event));
        }
        if self.is_capturing() {
            let reason = "somebody captures on the stream";
            return Err(refuse(DeviceErrorKind::Unsupported, "mark a stream", reason));
        }
        // SAFETY: a stream of the context that lives, by the condition of `new`.
        Ok(Arc::new(unsafe { CudaEvent::record(&self.context, self.raw) }?))
    }
}
