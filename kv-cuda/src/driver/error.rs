//! Conversion of the driver's errors.
use std::ffi::{CStr, c_char};
use std::fmt;

use cudarc::driver::sys::{self, CUresult};
use kv_core::error::{DeviceError, DeviceErrorKind};

/// An error code of the driver, displayed with the driver's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DriverError(pub(super) CUresult);

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match text(self.0, sys::cuGetErrorString) {
            Some(text) => write!(f, "{:?}: {text}", self.0),
            None => write!(f, "{:?}", self.0),
        }
    }
}

impl std::error::Error for DriverError {}

type Describe = unsafe fn(CUresult, *mut *const c_char) -> CUresult;

/// Returns the driver's text for a code.
fn text(code: CUresult, describe: Describe) -> Option<String> {
    if !super::facts::is_driver_present() {
        return None;
    }
    let mut text = std::ptr::null();
    // SAFETY: `text` is valid for writes, and the library is loaded, see above.
    let answer = unsafe { describe(code, &raw mut text) };
    if answer != CUresult::CUDA_SUCCESS || text.is_null() {
        return None;
    }
    // SAFETY: a string constant of the driver, which stays loaded.
    Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

/// Converts an error of the driver.
pub(super) fn error(operation: &'static str, code: CUresult) -> DeviceError {
    let cause = DriverError(code);
    DeviceError::new(kind(code), operation).with_detail(cause.to_string()).with_source(cause)
}

/// Creates an error that did not come from a call of the driver.
pub(super) fn refuse(
    kind: DeviceErrorKind,
    operation: &'static str,
    reason: impl Into<String>,
) -> DeviceError {
    DeviceError::new(kind, operation).with_detail(reason)
}

/// Converts a result of the driver.
pub(super) fn check(operation: &'static str, code: CUresult) -> Result<(), DeviceError> {
    if code == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(error(operation, code)) }
}

/// Returns the kind of an error. Errors that the driver calls sticky, after which a context fails
/// every call, are `Lost`. So are unknown ones, because work may have been lost.
pub(super) fn kind(code: CUresult) -> DeviceErrorKind {
    use CUresult as E;
    match code {
        E::CUDA_ERROR_OUT_OF_MEMORY => DeviceErrorKind::OutOfMemory,
        E::CUDA_ERROR_DEINITIALIZED
        | E::CUDA_ERROR_CONTEXT_IS_DESTROYED
        | E::CUDA_ERROR_ECC_UNCORRECTABLE
        | E::CUDA_ERROR_NVLINK_UNCORRECTABLE
        | E::CUDA_ERROR_ILLEGAL_ADDRESS
        | E::CUDA_ERROR_LAUNCH_TIMEOUT
        | E::CUDA_ERROR_ASSERT
        | E::CUDA_ERROR_HARDWARE_STACK_ERROR
        | E::CUDA_ERROR_ILLEGAL_INSTRUCTION
        | E::CUDA_ERROR_MISALIGNED_ADDRESS
        | E::CUDA_ERROR_INVALID_ADDRESS_SPACE
        | E::CUDA_ERROR_INVALID_PC
        | E::CUDA_ERROR_LAUNCH_FAILED
        | E::CUDA_ERROR_MPS_CLIENT_TERMINATED
        | E::CUDA_ERROR_EXTERNAL_DEVICE
        | E::CUDA_ERROR_UNKNOWN => DeviceErrorKind::Lost,
        code if is_late_loss(code) => DeviceErrorKind::Lost,
        code if is_misfit(code) => DeviceErrorKind::Unsupported,
        E::CUDA_ERROR_STUB_LIBRARY
        | E::CUDA_ERROR_DEVICE_UNAVAILABLE
        | E::CUDA_ERROR_NO_DEVICE
        | E::CUDA_ERROR_INVALID_DEVICE
        | E::CUDA_ERROR_DEVICE_NOT_LICENSED
        | E::CUDA_ERROR_NOT_SUPPORTED
        | E::CUDA_ERROR_SYSTEM_NOT_READY
        | E::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
        | E::CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE => DeviceErrorKind::Unsupported,
        _ => DeviceErrorKind::Driver,
    }
}

/// Returns whether a code is one of the sticky errors that bindings before CUDA 12.8 do not name:
/// `CUDA_ERROR_CONTAINED` and `CUDA_ERROR_TENSOR_MEMORY_LEAK`.
fn is_late_loss(code: CUresult) -> bool {
    #[expect(clippy::as_conversions, reason = "the number of a variant")]
    let code = code as u32;
    [226, 721].contains(&code)
}

/// Returns whether an image does not fit this device or driver: another image may fit.
pub(super) fn is_misfit(code: CUresult) -> bool {
    use CUresult as E;
    matches!(
        code,
        E::CUDA_ERROR_INVALID_IMAGE
            | E::CUDA_ERROR_NO_BINARY_FOR_GPU
            | E::CUDA_ERROR_INVALID_PTX
            | E::CUDA_ERROR_JIT_COMPILER_NOT_FOUND
            | E::CUDA_ERROR_UNSUPPORTED_PTX_VERSION
            | E::CUDA_ERROR_JIT_COMPILATION_DISABLED
            | E::CUDA_ERROR_INVALID_SOURCE
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_the_kind_that_callers_act_on() {
        use DeviceErrorKind::{Driver, Lost, OutOfMemory, Unsupported};
        for (code, expected) in [
            (CUresult::CUDA_ERROR_OUT_OF_MEMORY, OutOfMemory),
            (CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, Lost),
            (CUresult::CUDA_ERROR_LAUNCH_FAILED, Lost),
            (CUresult::CUDA_ERROR_ECC_UNCORRECTABLE, Lost),
            (CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED, Lost),
            (CUresult::CUDA_ERROR_UNKNOWN, Lost),
            // A caller's mistake, such as an invalid stream.
            (CUresult::CUDA_ERROR_INVALID_CONTEXT, Driver),
            (CUresult::CUDA_ERROR_INVALID_HANDLE, Driver),
            (CUresult::CUDA_ERROR_NO_DEVICE, Unsupported),
            (CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU, Unsupported),
            (CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, Unsupported),
            // A launch beyond the limits leaves the context usable.
            (CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, Driver),
            (CUresult::CUDA_ERROR_INVALID_VALUE, Driver),
            (CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, Driver),
        ] {
            assert_eq!(kind(code), expected, "{code:?}");
            let error = check("launch", code).unwrap_err();
            assert_eq!((error.kind(), error.operation()), (expected, "launch"));
            assert!(error.to_string().contains(&format!("{code:?}")), "{error}");
        }
        assert!(check("launch", CUresult::CUDA_SUCCESS).is_ok());
        assert!(!is_misfit(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
    }
}
