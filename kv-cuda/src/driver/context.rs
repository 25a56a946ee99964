//! The device's primary context, which the whole process shares.
//!
//! Owns the one record of a lost device: after a loss every call fails with `Lost` and none reaches
//! the driver.
use std::marker::PhantomData;
use std::sync::{Mutex, OnceLock, PoisonError};

use cudarc::driver::sys::CUstreamCaptureMode as CaptureMode;
use cudarc::driver::sys::{self, CUcontext, CUdevice, CUevent, CUresult, CUstream};
use kv_core::error::{DeviceError, DeviceErrorKind};

use super::error::{check, error, refuse};
use super::facts::{Driver, OPEN};

/// A retained primary context.
#[derive(Debug)]
pub(super) struct Context {
    raw: CUcontext,
    device: CUdevice,
    pub(super) driver: Driver,
    /// For operations that the host waits for at once; null until it is opened.
    setup: CUstream,
    /// The driver's error when the device was lost.
    lost: OnceLock<String>,
    /// Events to reuse.
    events: Mutex<Vec<EventHandle>>,
}

/// An event without an owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct EventHandle(pub(super) CUevent);

// SAFETY: the driver lets any thread use an event, and several threads use events of one context.
unsafe impl Send for EventHandle {}
// SAFETY: as above.
unsafe impl Sync for EventHandle {}
// SAFETY: the driver lets any number of threads use a context at the same time; the handle is never
// written through.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Retains the primary context: the one that the runtime API uses, so that memory and streams
    /// of other libraries belong to it too.
    pub(super) fn open(device: CUdevice, driver: Driver) -> Result<Self, DeviceError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: an out-pointer for a context, and a device of this driver.
        check(OPEN, unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut raw, device) })?;
        let setup = std::ptr::null_mut();
        let (lost, events) = (OnceLock::new(), Mutex::default());
        let mut context = Self { raw, device, driver, setup, lost, events };
        context.setup = context.open_stream(OPEN)?;
        Ok(context)
    }

    /// Opens a stream that does not synchronise with the legacy default stream.
    pub(super) fn open_stream(&self, operation: &'static str) -> Result<CUstream, DeviceError> {
        let _current = self.enter(operation)?.relax();
        let mut raw = std::ptr::null_mut();
        // SAFETY: an out-pointer for a stream; the context is current.
        let code = unsafe { sys::cuStreamCreate(&raw mut raw, NON_BLOCKING) };
        self.check(operation, code)?;
        Ok(raw)
    }

    /// Returns the stream for operations that the host waits for at once.
    pub(super) fn setup_stream(&self) -> CUstream {
        self.setup
    }

    pub(super) fn raw(&self) -> CUcontext {
        self.raw
    }

    pub(super) fn device(&self) -> CUdevice {
        self.device
    }

    /// Makes the context current on this thread until the result is dropped.
    ///
    /// # Errors
    /// `Lost` after a loss of the device.
    pub(super) fn enter(&self, operation: &'static str) -> Result<Current<'_>, DeviceError> {
        if let Some(said) = self.lost.get() {
            return Err(refuse(DeviceErrorKind::Lost, operation, said.clone()));
        }
        let mut current = std::ptr::null_mut();
        // SAFETY: an out-pointer for a context.
        self.check(operation, unsafe { sys::cuCtxGetCurrent(&raw mut current) })?;
        let pushed = current != self.raw;
        if pushed {
            // SAFETY: the context is retained for the lifetime of `self`.
            self.check(operation, unsafe { sys::cuCtxPushCurrent_v2(self.raw) })?;
        }
        Ok(Current { pushed, relaxed: None, _context: PhantomData })
    }

    /// Converts a result of the driver; records a loss.
    pub(super) fn check(&self, operation: &'static str, code: CUresult) -> Result<(), DeviceError> {
        if code == CUresult::CUDA_SUCCESS {
            return Ok(());
        }
        Err(self.error(operation, code))
    }

    /// Converts an error of the driver; records a loss.
    pub(super) fn error(&self, operation: &'static str, code: CUresult) -> DeviceError {
        let error = error(operation, code);
        if error.kind() == DeviceErrorKind::Lost {
            self.lost.get_or_init(|| super::error::DriverError(code).to_string());
        }
        error
    }

    /// Returns an unused event without timing.
    pub(super) fn event(&self, operation: &'static str) -> Result<EventHandle, DeviceError> {
        let mut kept = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(event) = kept.pop() {
            return Ok(event);
        }
        drop(kept);
        let mut raw = std::ptr::null_mut();
        // SAFETY: an out-pointer for an event; callers have entered the context.
        let code = unsafe { sys::cuEventCreate(&raw mut raw, DISABLE_TIMING) };
        self.check(operation, code)?;
        Ok(EventHandle(raw))
    }

    /// Takes an event back for reuse. Streams that wait for it keep waiting for the marked work.
    pub(super) fn give_back(&self, event: EventHandle) {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).push(event);
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let events = std::mem::take(self.events.get_mut().unwrap_or_else(PoisonError::into_inner));
        if let Ok(_current) = self.enter("close cuda") {
            for event in events {
                // SAFETY: made by `event`, given back by its only owner.
                let _ = unsafe { sys::cuEventDestroy_v2(event.0) };
            }
            if !self.setup.is_null() {
                // SAFETY: opened by `open`, and not used any more.
                let _ = unsafe { sys::cuStreamDestroy_v2(self.setup) };
            }
        }
        // SAFETY: retained by `open`; everything that belongs to it held this context and is gone.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// Keeps the context current on this thread, and restores the previous one when dropped.
#[derive(Debug)]
pub(super) struct Current<'a> {
    pushed: bool,
    relaxed: Option<CaptureMode>,
    /// Makes it `!Send`: the current context belongs to a thread.
    _context: PhantomData<(&'a Context, *const ())>,
}

impl Current<'_> {
    /// Allows calls that a capture by this thread would forbid, such as loading a kernel. Nothing
    /// that is done until the drop may depend on captured work.
    pub(super) fn relax(mut self) -> Self {
        let mut mode = CaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: an out-pointer for a mode, which receives the previous one.
        let code = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
        if code == CUresult::CUDA_SUCCESS {
            self.relaxed = Some(mode);
        }
        self
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if let Some(mut mode) = self.relaxed {
            // SAFETY: the previous mode, see `relax`.
            let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
        }
        if self.pushed {
            let mut context = std::ptr::null_mut();
            // SAFETY: an out-pointer for a context; pops what `enter` pushed.
            let _ = unsafe { sys::cuCtxPopCurrent_v2(&raw mut context) };
        }
    }
}

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: u32 = 2;

#[cfg(test)]
mod tests {
    use std::mem::ManuallyDrop;

    use super::*;

    #[test]
    fn after_a_loss_every_call_fails() {
        let driver = Driver { version: 13000, ..Driver::default() };
        let (raw, setup) = (std::ptr::null_mut(), std::ptr::null_mut());
        let (lost, events) = (OnceLock::new(), Mutex::default());
        // No driver made it, so it must not be dropped.
        let context = ManuallyDrop::new(Context { raw, device: 0, driver, setup, lost, events });
        let error = context.error("launch", CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        assert_eq!(error.kind(), DeviceErrorKind::OutOfMemory);
        assert_eq!(context.lost.get(), None, "out of memory is not a loss");
        let error = context.error("launch", CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        assert_eq!(error.kind(), DeviceErrorKind::Lost);
        context.error("launch", CUresult::CUDA_ERROR_LAUNCH_FAILED);
        for operation in ["upload", "record"] {
            // The call must not reach the driver: this machine may have none.
            let error = context.enter(operation).unwrap_err();
            assert_eq!((error.kind(), error.operation()), (DeviceErrorKind::Lost, operation));
            assert!(error.to_string().contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{error}");
        }
    }
}
