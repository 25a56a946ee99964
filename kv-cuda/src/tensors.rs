//! Tensors and planes as kernel parameters, with a last check of their sizes.
//!
//! The core has checked shapes against a plan. This file checks facts that only the device knows:
//! the owner of a buffer and its length. It also checks that plan and arguments belong together,
//! because they may have been made at different times and kernels check nothing.

use kv_core::Axes;
pub(crate) use kv_core::backend::kernels::{Room, unsupported};
use kv_core::backend::kernels::{
    axes_code, check_plane, device_output, dtype_code, plane_align, wide_head_stride,
    wide_per_block,
};
use kv_core::backend::{
    PlaneLayout, PlaneView, TensorData, TokenRows, TokenTensor, TokenTensorMut,
};
use kv_core::error::DeviceError;
use kv_core::plan::StoredRows;

use crate::buffer::{CudaBuffer, Place};
use crate::capture::{self, Held};
use crate::constants::Constants;
use crate::params::{Address, FORMATS, Plane, Tensor};
use crate::scratch::{At, Pack};
use crate::step::Transfer;
use kv_core::num::{to_u64, to_usize};

/// The place of an input: in device memory, or in a pack that is not sent yet.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Source {
    Device(Address),
    Packed(At),
}

impl Source {
    /// Returns the tensor with the address it has in a pack that lies at `base`.
    pub(crate) fn rows(self, tensor: Tensor, base: Address) -> Tensor {
        let data = match self {
            Self::Device(address) => address,
            Self::Packed(at) => at.from(base),
        };
        Tensor { data, ..tensor }
    }
}

/// The device as seen by one call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call<'a> {
    pub(crate) place: Place<'a>,
    pub(crate) operation: &'static str,
    pub(crate) held: &'a Held,
}

impl Call<'_> {
    /// Returns the address of a range of a buffer of this device, for elements of `size` bytes.
    /// Misaligned reads in kernels would lose the device.
    fn on(
        self,
        buffer: &CudaBuffer,
        range: (u64, u64),
        size: usize,
    ) -> Result<Address, DeviceError> {
        if buffer.is_lent() && self.held.is_on() {
            return Err(capture::refused("memory that is lent for one call"));
        }
        self.held.note(buffer);
        let address = buffer.on(self.place, range, self.operation)?;
        if address.is_multiple_of(to_u64(size)) {
            return Ok(address);
        }
        let why = format!("address {address:#x} is not aligned to elements of {size} bytes");
        Err(unsupported(self.operation, why))
    }

    /// Returns an input; host memory is added to `pack`.
    pub(crate) fn input(
        self,
        tensor: &TokenTensor<'_, CudaBuffer>,
        room: Room,
        pack: &mut Pack,
    ) -> Result<(Tensor, Source), DeviceError> {
        room.check(tensor.rows(), self.operation)?;
        let source = match tensor.data() {
            TensorData::Host(bytes) => {
                if self.held.is_on() {
                    return Err(capture::refused("a tensor in host memory"));
                }
                let reached = kv_core::num::to_offset(tensor.bytes_reached());
                Source::Packed(pack.push(&bytes[..reached]))
            }
            TensorData::Device { buffer, offset } => {
                let range = (offset, tensor.bytes_reached());
                Source::Device(self.on(buffer, range, tensor.rows().dtype().size())?)
            }
        };
        Ok((rows(tensor.rows(), 0), source))
    }

    /// Returns an output. It lies in device memory: host outputs were replaced by memory of the
    /// queue.
    pub(crate) fn output(
        self,
        tensor: &mut TokenTensorMut<'_, CudaBuffer>,
        room: Room,
    ) -> Result<Tensor, DeviceError> {
        room.check(tensor.rows(), self.operation)?;
        let (reached, shape) = (tensor.bytes_reached(), *tensor.rows());
        let (buffer, offset) = device_output(tensor);
        let address = self.on(buffer, (offset, reached), shape.dtype().size())?;
        Ok(rows(&shape, address))
    }

    /// Returns the address of stored rows.
    pub(crate) fn stored(
        self,
        rows: &StoredRows<'_, CudaBuffer>,
        room: Room,
    ) -> Result<Address, DeviceError> {
        room.check_stored(rows.tokens(), self.operation)?;
        self.on(rows.buffer(), (rows.offset(), rows.bytes()), size_of::<u16>())
    }

    /// Returns the parameters of a plane.
    pub(crate) fn plane(
        self,
        view: &PlaneView<'_, CudaBuffer>,
        num_blocks: u32,
        planned: Option<&PlaneLayout>,
        (constants, transfer): (&mut Constants, &mut Transfer<'_>),
    ) -> Result<Plane, DeviceError> {
        let layout = view.layout();
        check_plane(layout, (num_blocks, planned), FORMATS, self.operation)?;
        let mut plane = shape(layout);
        if layout.has_constants() {
            let Some(buffer) = view.constants() else {
                return Err(unsupported(self.operation, "the plane lacks the constants it needs"));
            };
            plane.constants = self.on(buffer, (0, layout.constants_bytes()), size_of::<f32>())?;
        }
        if layout.num_segments() == 1 {
            plane.base = self.segment(view, 0)?;
            return Ok(plane);
        }
        let segments = (0..layout.num_segments()).map(|index| self.segment(view, index));
        let segments = segments.collect::<Result<Vec<_>, _>>()?;
        // Alignment requirements apply to every segment: the first misaligned one represents them
        // all. Kernels only use the list.
        let odd = segments.iter().find(|segment| !segment.is_multiple_of(16));
        plane.base = odd.or(segments.first()).copied().unwrap_or(0);
        plane.segments = constants.get((transfer, self.held), &segments)?;
        Ok(plane)
    }

    fn segment(self, view: &PlaneView<'_, CudaBuffer>, index: u32) -> Result<Address, DeviceError> {
        let Some(buffer) = view.segment(to_usize(index)) else {
            let why = format!("the plane has no buffer for segment {index}");
            return Err(unsupported(self.operation, why));
        };
        let layout = view.layout();
        self.on(buffer, (0, layout.segment_bytes(index)), to_usize(plane_align(layout)))
    }
}

fn rows(rows: &TokenRows, data: Address) -> Tensor {
    let size = to_u64(rows.dtype().size());
    let is_ragged = rows.axes() == Axes::Thd;
    let batch_stride = if is_ragged { 0 } else { rows.batch_stride() };
    Tensor {
        data,
        // The caller's strides; of an axis of 1 they may be any, and nothing uses them.
        batch_stride: batch_stride.saturating_mul(size),
        token_stride: rows.token_stride().saturating_mul(size),
        axes: axes_code(rows.axes()),
        dtype: dtype_code(rows.dtype()),
        batch: rows.batch(),
        tokens: rows.tokens(),
        heads: rows.heads(),
        dim: rows.dim(),
    }
}

/// Returns the parameters of a layout, without addresses.
pub(crate) fn shape(layout: &PlaneLayout) -> Plane {
    let map = layout.slot_map();
    let (format, dim) = (layout.format(), layout.head_dim());
    // Rows that a device takes are shorter than its shared memory.
    let narrow = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
    Plane {
        block_bytes: layout.block_bytes(),
        token_stride: layout.token_stride(),
        head_stride: layout.head_stride(),
        wide_head_stride: wide_head_stride(layout),
        mean_begin: layout.mean_begin(0),
        blocks_per_segment: layout.blocks_per_segment(),
        num_blocks: layout.num_blocks(),
        block_size: layout.block_size(),
        num_kv_heads: layout.num_kv_heads(),
        head_dim: dim,
        format: format.kernel_code(),
        row_bytes: narrow(layout.row_bytes()),
        scales_begin: narrow(format.scales_begin(dim)),
        transforms: layout.transforms().into(),
        block_means: layout.has_block_means().into(),
        full_precision_prefix: map.full_precision_prefix(),
        wide_slots: map.wide_slots(),
        wide_per_block: wide_per_block(layout),
        has_tail: map.has_tail().into(),
        ..Plane::default()
    }
}
