//! Addresses of values: rows of the caller's tensors, rows in the blocks of a plane,
//! and stored rows without blocks.
mod plane;
mod stored;
mod tensor;

use kv_core::DType;
use kv_core::error::{DeviceError, DeviceErrorKind};
use kv_cpu_kernels::Element;

pub(crate) use plane::{PlaneRows, RowScale};
pub(crate) use stored::{StoredIn, StoredOut};
pub(crate) use tensor::{Room, RowAt, RowsIn, RowsOut};

/// Creates an `Unsupported` error with its detail.
pub(crate) fn unsupported(operation: &'static str, detail: impl Into<String>) -> DeviceError {
    DeviceError::new(DeviceErrorKind::Unsupported, operation).with_detail(detail)
}

/// Returns the element type of a tensor.
fn element(dtype: DType, operation: &'static str) -> Result<Element, DeviceError> {
    Element::of_tensor(dtype).ok_or_else(|| unsupported(operation, format!("element type {dtype}")))
}
