//! Completion of work on a stream.
use std::any::Any;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUresult, CUstream};
use kv_core::error::{DeviceError, DeviceErrorKind};

use super::context::{Context, EventHandle};
use super::error::refuse;
use crate::gpu::Event;

/// A recorded event; its handle is reused once this is dropped.
#[derive(Debug)]
pub(super) struct CudaEvent {
    context: Arc<Context>,
    handle: EventHandle,
}

impl CudaEvent {
    /// Marks the work of a stream so far.
    ///
    /// # Safety
    /// 1. `stream` is a live stream of the context.
    pub(super) unsafe fn record(
        context: &Arc<Context>,
        stream: CUstream,
    ) -> Result<Self, DeviceError> {
        const RECORD: &str = "record an event";
        let _current = context.enter(RECORD)?;
        let event = Self { handle: context.event(RECORD)?, context: Arc::clone(context) };
        // SAFETY: condition 1, and an event of the same context.
        let code = unsafe { sys::cuEventRecord(event.handle.0, stream) };
        context.check(RECORD, code)?;
        Ok(event)
    }

    /// Makes later work of a stream wait for the work that an event marks.
    ///
    /// # Errors
    /// `ForeignHandle` for an event of another device; `Lost` or `Driver`.
    ///
    /// # Safety
    /// 1. `stream` is a live stream of the context.
    pub(super) unsafe fn hold(
        context: &Arc<Context>,
        stream: CUstream,
        event: &dyn Event,
    ) -> Result<(), DeviceError> {
        const WAIT: &str = "wait for an event";
        let event: &dyn Any = event;
        let event = event.downcast_ref::<Self>();
        let event = event.filter(|event| event.is_of(context)).ok_or_else(|| {
            refuse(DeviceErrorKind::ForeignHandle, WAIT, "an event of another device")
        })?;
        let _current = context.enter(WAIT)?;
        // SAFETY: condition 1, and an event of the same context, which lives.
        let code = unsafe { sys::cuStreamWaitEvent(stream, event.handle.0, 0) };
        context.check(WAIT, code)
    }

    pub(super) fn handle(&self) -> EventHandle {
        self.handle
    }

    pub(super) fn is_of(&self, context: &Arc<Context>) -> bool {
        Arc::ptr_eq(&self.context, context)
    }
}

impl Event for CudaEvent {
    fn is_done(&self) -> Result<bool, DeviceError> {
        const QUERY: &str = "query an event";
        // A capture elsewhere in the process would forbid the query.
        let _current = self.context.enter(QUERY)?.relax();
        // SAFETY: the event lives as long as `self`.
        match unsafe { sys::cuEventQuery(self.handle.0) } {
            CUresult::CUDA_SUCCESS => Ok(true),
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => Err(self.context.error(QUERY, code)),
        }
    }

    fn wait(&self) -> Result<(), DeviceError> {
        const WAIT: &str = "wait for an event";
        let _current = self.context.enter(WAIT)?.relax();
        // SAFETY: the event lives as long as `self`.
        self.context.check(WAIT, unsafe { sys::cuEventSynchronize(self.handle.0) })
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        self.context.give_back(self.handle);
    }
}
