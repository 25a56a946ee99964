//! The device's primary context, which all of a process shares.
//!
//! Owns the one place where a loss of the device is remembered: after it every call says `Lost`
//! and none reaches the driver.
use std::marker::PhantomData;
use std::sync::{Mutex, OnceLock, PoisonError};

use cudarc::driver::sys::CUstreamCaptureMode as CaptureMode;
use cudarc::driver::sys::{self, CUcontext, CUdevice, CUevent, CUresult, CUstream};
use kv_core::{DeviceError, DeviceErrorKind};

use super::error::{check, error, refuse};
use super::facts::{Driver, OPEN};

/// A retained primary context.
#[derive(Debug)]
pub(super) struct Context {
    raw: CUcontext,
    device: CUdevice,
    pub(super) driver: Driver,
    /// For what the host waits for at once; null until it was opened.
    setup: CUstream,
    /// What the driver said when the device was lost.
    lost: OnceLock<String>,
    /// Events that were dropped, for the next that are needed.
    events: Mutex<Vec<EventHandle>>,
}

/// An event without an owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct EventHandle(pub(super) CUevent);

// SAFETY: the driver lets any thread use an event, and events of a context at the same time.
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
    /// of other libraries are of the same.
    pub(super) fn open(device: CUdevice, driver: Driver) -> Result<Self, DeviceError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: a place for a context, and a device of this driver.
        check(OPEN, unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut raw, device) })?;
        let setup = std::ptr::null_mut();
        let (lost, events) = (OnceLock::new(), Mutex::default());
        let mut context = Self { raw, device, driver, setup, lost, events };
        context.setup = context.open_stream(OPEN)?;
        Ok(context)
    }

    /// Opens a stream that no other stream waits for unless it is told to.
    pub(super) fn open_stream(&self, operation: &'static str) -> Result<CUstream, DeviceError> {
        let _current = self.enter(operation)?.relax();
        let mut raw = std::ptr::null_mut();
        // SAFETY: a place for a stream; the context is current.
        let code = unsafe { sys::cuStreamCreate(&raw mut raw, NON_BLOCKING) };
        self.check(operation, code)?;
        Ok(raw)
    }

    /// A stream for work that the host waits for at once.
    pub(super) fn setup_stream(&self) -> CUstream {
        self.setup
    }

    pub(super) fn raw(&self) -> CUcontext {
        self.raw
    }

    pub(super) fn device(&self) -> CUdevice {
        self.device
    }

    /// Makes the context current on this thread, until the result is dropped.
    ///
    /// # Errors
    /// `Lost` once the device is.
    pub(super) fn enter(&self, operation: &'static str) -> Result<Current<'_>, DeviceError> {
        if let Some(said) = self.lost.get() {
            return Err(refuse(DeviceErrorKind::Lost, operation, said.clone()));
        }
        let mut current = std::ptr::null_mut();
        // SAFETY: a place for a context.
        self.check(operation, unsafe { sys::cuCtxGetCurrent(&raw mut current) })?;
        let pushed = current != self.raw;
        if pushed {
            // SAFETY: the context is retained as long as `self` is there.
            self.check(operation, unsafe { sys::cuCtxPushCurrent_v2(self.raw) })?;
        }
        Ok(Current { pushed, relaxed: None, _context: PhantomData })
    }

    /// `Ok` for success; remembers a loss.
    pub(super) fn check(&self, operation: &'static str, code: CUresult) -> Result<(), DeviceError> {
        if code == CUresult::CUDA_SUCCESS {
            return Ok(());
        }
        Err(self.error(operation, code))
    }

    /// Our error of a call that failed; remembers a loss.
    pub(super) fn error(&self, operation: &'static str, code: CUresult) -> DeviceError {
        let error = error(operation, code);
        if error.kind() == DeviceErrorKind::Lost {
            self.lost.get_or_init(|| super::error::DriverError(code).to_string());
        }
        error
    }

    /// An event that nothing waits for, without a clock.
    pub(super) fn event(&self, operation: &'static str) -> Result<EventHandle, DeviceError> {
        let mut kept = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(event) = kept.pop() {
            return Ok(event);
        }
        drop(kept);
        let mut raw = std::ptr::null_mut();
        // SAFETY: a place for an event; callers have entered the context.
        let code = unsafe { sys::cuEventCreate(&raw mut raw, DISABLE_TIMING) };
        self.check(operation, code)?;
        Ok(EventHandle(raw))
    }

    /// Takes an event back. Streams that wait for it go on waiting for what it marked.
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
                // SAFETY: opened by `open`, and nobody uses it any more.
                let _ = unsafe { sys::cuStreamDestroy_v2(self.setup) };
            }
        }
        // SAFETY: retained by `open`; all that belongs to it holds this context and is gone.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// The context is current on this thread, as it was before once this is dropped.
#[derive(Debug)]
pub(super) struct Current<'a> {
    pushed: bool,
    relaxed: Option<CaptureMode>,
    /// Not `Send`: what is current belongs to a thread.
    _context: PhantomData<(&'a Context, *const ())>,
}

impl Current<'_> {
    /// Allows what a capture by this thread would forbid, such as loading a kernel. Nothing that is
    /// done until the drop may depend on captured work.
    pub(super) fn relax(mut self) -> Self {
        let mut mode = CaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: a place for a mode, which gets the one there was.
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
            // SAFETY: the mode there was, see `relax`.
            let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
        }
        if self.pushed {
            let mut context = std::ptr::null_mut();
            // SAFETY: a place for a context; takes off what `enter` pushed.
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
    fn after_a_loss_every_call_says_so() {
        let driver =
            Driver { version: 13000, batch_copies: false, param_info: false, pools: false };
        let (raw, setup) = (std::ptr::null_mut(), std::ptr::null_mut());
        let (lost, events) = (OnceLock::new(), Mutex::default());
        // No driver gave it, and none gets it back.
        let context = ManuallyDrop::new(Context { raw, device: 0, driver, setup, lost, events });
        let error = context.error("launch", CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        assert_eq!(error.kind(), DeviceErrorKind::OutOfMemory);
        assert_eq!(context.lost.get(), None, "a lack of memory is no loss");
        let error = context.error("launch", CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        assert_eq!(error.kind(), DeviceErrorKind::Lost);
        context.error("launch", CUresult::CUDA_ERROR_LAUNCH_FAILED);
        for operation in ["upload", "record"] {
            // The driver is not asked: there may be none on this machine.
            let error = context.enter(operation).unwrap_err();
            assert_eq!((error.kind(), error.operation()), (DeviceErrorKind::Lost, operation));
            assert!(error.to_string().contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{error}");
        }
    }
}
