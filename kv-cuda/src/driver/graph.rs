//! Captured work, ready to be launched.
use std::sync::Arc;

use cudarc::driver::sys::{self, CUgraph, CUgraphExec, CUstream};
use kv_core::error::DeviceError;

use super::context::Context;
use crate::gpu::Graph;

/// An executable graph of the driver.
#[derive(Debug)]
pub(super) struct CudaGraph {
    context: Arc<Context>,
    raw: CUgraphExec,
}

// SAFETY: the driver lets any thread use a graph, one at a time; `&CudaGraph` launches only through
// a `&mut` stream, and this type is not `Sync`.
unsafe impl Send for CudaGraph {}

/// A captured graph, destroyed when dropped.
struct Captured {
    raw: CUgraph,
}

impl Drop for Captured {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: the end of a capture returned it, and nothing else owns it.
            let _ = unsafe { sys::cuGraphDestroy(self.raw) };
        }
    }
}

impl CudaGraph {
    /// Ends the capture on a stream.
    ///
    /// # Safety
    /// 1. `stream` is a live stream of the context.
    pub(super) unsafe fn end_capture(
        context: &Arc<Context>,
        stream: CUstream,
    ) -> Result<Self, DeviceError> {
        const END: &str = "end capture";
        let _current = context.enter(END)?;
        let mut captured = Captured { raw: std::ptr::null_mut() };
        // SAFETY: condition 1, and an out-pointer for a graph. A failure ends the capture too.
        let code = unsafe { sys::cuStreamEndCapture(stream, &raw mut captured.raw) };
        context.check(END, code)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: an out-pointer for a graph, and one that was just captured.
        let code = unsafe { sys::cuGraphInstantiateWithFlags(&raw mut raw, captured.raw, 0) };
        context.check(END, code)?;
        let graph = Self { context: Arc::clone(context), raw };
        // Send what launches need to the device now, not in the first replay.
        // SAFETY: a graph that was just made; condition 1, and nothing captures on the stream any
        // more.
        context.check(END, unsafe { sys::cuGraphUpload(graph.raw, stream) })?;
        Ok(graph)
    }

    pub(super) fn is_of(&self, context: &Arc<Context>) -> bool {
        Arc::ptr_eq(&self.context, context)
    }

    /// Launches it.
    ///
    /// # Safety
    /// 1. `stream` is a live stream of the context.
    /// 2. Conditions of all calls that were captured hold.
    pub(super) unsafe fn launch(&self, stream: CUstream) -> Result<(), DeviceError> {
        const REPLAY: &str = "replay";
        let _current = self.context.enter(REPLAY)?;
        // SAFETY: both conditions, and a graph that lives as long as `self`.
        self.context.check(REPLAY, unsafe { sys::cuGraphLaunch(self.raw, stream) })
    }
}

impl Graph for CudaGraph {}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        let Ok(_current) = self.context.enter("drop a graph") else { return };
        // SAFETY: made by `end_capture`, destroyed only here; submitted launches complete.
        let code = unsafe { sys::cuGraphExecDestroy(self.raw) };
        let _ = self.context.check("drop a graph", code);
    }
}
