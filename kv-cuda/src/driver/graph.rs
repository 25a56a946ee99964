//! Captured work, ready to be launched.
use std::sync::Arc;

use cudarc::driver::sys::{self, CUgraph, CUgraphExec, CUstream};
use kv_core::DeviceError;

use super::context::Context;
use crate::gpu::Graph;

/// A graph that the driver has made executable.
#[derive(Debug)]
pub(super) struct CudaGraph {
    context: Arc<Context>,
    raw: CUgraphExec,
}

// SAFETY: the driver lets any thread use a graph, one at a time; `&CudaGraph` launches nothing but
// through a `&mut` stream, and this type is not `Sync`.
unsafe impl Send for CudaGraph {}

/// A captured graph, destroyed when dropped.
struct Captured {
    raw: CUgraph,
}

impl Drop for Captured {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: the end of a capture gave it to us, and nobody else has it.
            let _ = unsafe { sys::cuGraphDestroy(self.raw) };
        }
    }
}

impl CudaGraph {
    /// Ends the capture on a stream.
    ///
    /// # Safety
    /// 1. `stream` is a stream of the context that lives.
    pub(super) unsafe fn end_capture(
        context: &Arc<Context>,
        stream: CUstream,
    ) -> Result<Self, DeviceError> {
        const END: &str = "end capture";
        let _current = context.enter(END)?;
        let mut captured = Captured { raw: std::ptr::null_mut() };
        // SAFETY: condition 1, and a place for a graph. A failure ends the capture too.
        let code = unsafe { sys::cuStreamEndCapture(stream, &raw mut captured.raw) };
        context.check(END, code)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: a place for a graph, and one that was just captured.
        let code = unsafe { sys::cuGraphInstantiateWithFlags(&raw mut raw, captured.raw, 0) };
        context.check(END, code)?;
        let graph = Self { context: Arc::clone(context), raw };
        // What launches need on the device is sent now, and not by the first replay.
        // SAFETY: a graph that was just made; condition 1, on which nothing captures any more.
        context.check(END, unsafe { sys::cuGraphUpload(graph.raw, stream) })?;
        Ok(graph)
    }

    pub(super) fn is_of(&self, context: &Arc<Context>) -> bool {
        Arc::ptr_eq(&self.context, context)
    }

    /// Launches it.
    ///
    /// # Safety
    /// 1. `stream` is a stream of the context that lives.
    /// 2. Conditions of all calls that were captured hold.
    pub(super) unsafe fn launch(&self, stream: CUstream) -> Result<(), DeviceError> {
        const REPLAY: &str = "replay";
        let _current = self.context.enter(REPLAY)?;
        // SAFETY: both conditions, and a graph that is alive as long as `self`.
        self.context.check(REPLAY, unsafe { sys::cuGraphLaunch(self.raw, stream) })
    }
}

impl Graph for CudaGraph {}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        let Ok(_current) = self.context.enter("drop a graph") else { return };
        // SAFETY: made by `end_capture`, destroyed here alone; launches go on.
        let code = unsafe { sys::cuGraphExecDestroy(self.raw) };
        let _ = self.context.check("drop a graph", code);
    }
}
