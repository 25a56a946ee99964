//! Views of the caller's tensors, and their checked form.
//!
//! The caller's bytes are not copied first: a view says where they are, and the backend uses them
//! in place during the call. A caller creates a [`TensorView`] without any check; a backend gets a
//! [`TokenTensor`] with every extent, stride, type and byte count checked.
mod checked;
mod entries;
mod strided;
#[cfg(test)]
mod tests;

pub(crate) use checked::{HostRows, TokenRequirement};
pub use checked::{TokenRows, TokenTensor, TokenTensorMut};
pub(crate) use entries::EntryShape;
use kv_format::{DType, Element};
pub use strided::{AxisOrder, Strided, StridedError};

pub use crate::dims::Dims;

/// The bytes of an input.
#[derive(Debug)]
#[expect(clippy::exhaustive_enums, reason = "a byte is on the host or on the device")]
pub enum TensorData<'a, Buf> {
    /// In host memory: used in place by the CPU, staged for a device.
    Host(&'a [u8]),
    /// In memory of the backend's device.
    Device {
        /// The buffer.
        buffer: &'a Buf,
        /// First byte.
        offset: u64,
    },
}

impl<Buf> Clone for TensorData<'_, Buf> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<Buf> Copy for TensorData<'_, Buf> {}

impl<'a, Buf> TensorData<'a, Buf> {
    /// Takes values in host memory.
    pub fn values<T: Element>(values: &'a [T]) -> Self {
        Self::Host(bytemuck::cast_slice(values))
    }
}

/// The bytes of an output.
#[derive(Debug)]
#[expect(clippy::exhaustive_enums, reason = "a byte is on the host or on the device")]
pub enum TensorDataMut<'a, Buf> {
    /// In host memory. Backends of other devices copy the rows there before the call returns, or
    /// refuse it as `Unsupported`.
    Host(&'a mut [u8]),
    /// In memory of the backend's device. It must not alias an input of the same call.
    Device {
        /// The buffer.
        buffer: &'a Buf,
        /// First byte.
        offset: u64,
    },
}

/// An input tensor of the caller: element type, extents, strides, bytes.
///
/// The inner two axes (head, dim) are dense; the outer strides are free. `Buf` is the type of the
/// device's buffers. A view is made without a check: the call that takes it refuses extents, types
/// and lengths of bytes that do not fit.
///
/// ```
/// use kv::TensorView;
/// use kv::backend::NullBuffer;
///
/// let rows = [0.5_f32; 24];
/// let view: TensorView<'_, NullBuffer> = TensorView::host(&rows, &[3, 2, 4]);
/// assert_eq!(view.dims().as_slice(), [3, 2, 4]); // 3 tokens, 2 heads, 4 values each
/// ```
#[derive(Debug)]
pub struct TensorView<'a, Buf> {
    data: TensorData<'a, Buf>,
    meta: Meta,
}

impl<Buf> Clone for TensorView<'_, Buf> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<Buf> Copy for TensorView<'_, Buf> {}

/// An output tensor of the caller: a [`TensorView`] that a call writes to.
#[derive(Debug)]
pub struct TensorViewMut<'a, Buf> {
    data: TensorDataMut<'a, Buf>,
    meta: Meta,
}

#[derive(Debug, Clone, Copy)]
struct Meta {
    dtype: DType,
    dims: Dims,
    outer_strides: Option<[u64; 2]>,
}

impl<'a, Buf> TensorView<'a, Buf> {
    /// Describes a dense tensor in host memory.
    pub fn host<T: Element>(values: &'a [T], dims: &[u32]) -> Self {
        Self::host_bytes(T::DTYPE, bytemuck::cast_slice(values), dims)
    }
    /// Describes a dense tensor in host memory, given as bytes.
    pub fn host_bytes(dtype: DType, bytes: &'a [u8], dims: &[u32]) -> Self {
        Self { data: TensorData::Host(bytes), meta: Meta::dense(dtype, dims) }
    }
    /// Describes a dense tensor in device memory, `offset` bytes into `buffer`.
    pub fn device(dtype: DType, buffer: &'a Buf, offset: u64, dims: &[u32]) -> Self {
        Self { data: TensorData::Device { buffer, offset }, meta: Meta::dense(dtype, dims) }
    }
    /// Sets the strides of the outer axes, in elements: of the two outer axes of a `bshd` or `sbhd`
    /// tensor, of the one outer axis (and an unused second) of a `thd` tensor.
    #[must_use]
    pub fn with_outer_strides(mut self, strides: [u64; 2]) -> Self {
        self.meta.outer_strides = Some(strides);
        self
    }
    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.meta.dtype
    }
    /// Returns the extents.
    pub fn dims(&self) -> Dims {
        self.meta.dims
    }
}

impl<'a, Buf> TensorViewMut<'a, Buf> {
    /// Describes a dense tensor in host memory, which holds its rows when the call that writes it
    /// returns.
    ///
    /// On a GPU that call submits the work recorded so far, waits until it is done and copies the
    /// rows: a synchronisation for every layer, where an output in device memory needs none. It is
    /// refused as [`Unsupported`](crate::error::DeviceErrorKind::Unsupported) during a capture of
    /// launches, and if the thread may not wait
    /// ([`host_outputs`](crate::backend::Capabilities::host_outputs)).
    pub fn host<T: Element>(values: &'a mut [T], dims: &[u32]) -> Self {
        Self::host_bytes(T::DTYPE, bytemuck::cast_slice_mut(values), dims)
    }
    /// Describes a dense tensor in host memory, given as bytes; see [`Self::host`].
    pub fn host_bytes(dtype: DType, bytes: &'a mut [u8], dims: &[u32]) -> Self {
        Self { data: TensorDataMut::Host(bytes), meta: Meta::dense(dtype, dims) }
    }
    /// Describes a dense tensor in device memory, `offset` bytes into `buffer`.
    pub fn device(dtype: DType, buffer: &'a Buf, offset: u64, dims: &[u32]) -> Self {
        Self { data: TensorDataMut::Device { buffer, offset }, meta: Meta::dense(dtype, dims) }
    }
    /// Sets the strides of the outer axes; see [`TensorView::with_outer_strides`].
    #[must_use]
    pub fn with_outer_strides(mut self, strides: [u64; 2]) -> Self {
        self.meta.outer_strides = Some(strides);
        self
    }
    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.meta.dtype
    }
    /// Returns the extents.
    pub fn dims(&self) -> Dims {
        self.meta.dims
    }
}

impl<Buf> TensorViewMut<'_, Buf> {
    /// Reads `[.., heads]` as `[.., heads, 1]`, so that one number per head is checked like a row.
    pub(crate) fn with_unit_dim(mut self) -> Self {
        self.meta.dims = self.meta.dims.with_unit();
        self
    }
}

impl Meta {
    fn dense(dtype: DType, dims: &[u32]) -> Self {
        Self { dtype, dims: Dims::new(dims), outer_strides: None }
    }
}
