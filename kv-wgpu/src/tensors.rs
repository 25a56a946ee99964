//! Tensors and planes as shader parameters and bindings, with a last check of their sizes.
//!
//! The core has checked shapes against a plan. This file checks facts that only the device knows:
//! the owner of a buffer and its length. It also checks that plan and arguments belong together,
//! because they may have been made at different times and shaders check nothing.
use kv_core::Axes;
pub(crate) use kv_core::backend::kernels::Room;
use kv_core::backend::kernels::{
    axes_code, check_plane, device_output, dtype_code, plane_align, wide_head_stride,
    wide_per_block,
};
use kv_core::backend::{
    PlaneLayout, PlaneView, TensorData, TokenRows, TokenTensor, TokenTensorMut,
};
use kv_core::error::DeviceError;
use kv_core::plan::StoredRows;

use crate::buffer::WgpuBuffer;
use crate::device::unsupported;
use crate::params::{FORMATS, Plane, Tensor};
use crate::recording::{Recorder, Slot};
use kv_core::num::{to_offset, to_u32, to_u64, to_usize};

/// `head_dim` must be a multiple of this, and at most [`DIM_MAX`].
pub(crate) const DIM_STEP: u32 = 4;
pub(crate) const DIM_MAX: u32 = 256;

/// The tensors and planes of one call.
#[derive(Debug)]
pub(crate) struct Call<'a> {
    pub(crate) recorder: &'a mut Recorder,
    pub(crate) operation: &'static str,
}

impl Call<'_> {
    /// Binds a range for elements of `size` bytes, and returns its offset in the binding. Shaders
    /// read elements as parts of words.
    fn slot(
        &self,
        buffer: &WgpuBuffer,
        range: (u64, u64),
        (size, is_written): (u32, bool),
    ) -> Result<(Slot, u32), DeviceError> {
        let (slot, begin) = self.recorder.slot(buffer, range, (is_written, self.operation))?;
        if begin.is_multiple_of(size) {
            return Ok((slot, begin));
        }
        let why = format!("byte {} is not aligned to elements of {size} bytes", range.0);
        Err(unsupported(self.operation, why))
    }

    /// Binds an input; host memory is sent with the submission.
    pub(crate) fn input(
        &mut self,
        tensor: &TokenTensor<'_, WgpuBuffer>,
        room: Room,
    ) -> Result<(Tensor, Slot), DeviceError> {
        room.check(tensor.rows(), self.operation)?;
        let reached = tensor.bytes_reached();
        let (slot, begin) = match tensor.data() {
            TensorData::Host(given) => {
                let sent = self.recorder.push(&given[..to_offset(reached)])?;
                let most = self.recorder.shared.limits.max_storage_buffer_binding_size;
                if sent.size > most {
                    let why = format!("{} bytes; a binding covers at most {most}", sent.size);
                    return Err(unsupported(self.operation, why));
                }
                (Slot::from(sent), 0)
            }
            TensorData::Device { buffer, offset } => {
                let size = to_u32(tensor.rows().dtype().size());
                self.slot(buffer, (offset, reached), (size, false))?
            }
        };
        Ok((self.rows(tensor.rows(), begin)?, slot))
    }

    /// Binds an output. It lies in device memory: host outputs were replaced by memory of the
    /// queue.
    pub(crate) fn output(
        &mut self,
        tensor: &mut TokenTensorMut<'_, WgpuBuffer>,
        room: Room,
    ) -> Result<(Tensor, Slot), DeviceError> {
        room.check(tensor.rows(), self.operation)?;
        let (reached, shape) = (tensor.bytes_reached(), *tensor.rows());
        let (buffer, offset) = device_output(tensor);
        let size = to_u32(shape.dtype().size());
        let (slot, begin) = self.slot(buffer, (offset, reached), (size, true))?;
        Ok((self.rows(&shape, begin)?, slot))
    }

    /// Binds stored rows, and returns where they begin in the binding.
    pub(crate) fn stored(
        &self,
        rows: &StoredRows<'_, WgpuBuffer>,
        room: Room,
        is_written: bool,
    ) -> Result<(u32, Slot), DeviceError> {
        room.check_stored(rows.tokens(), self.operation)?;
        let range = (rows.offset(), rows.bytes());
        let (slot, begin) = self.slot(rows.buffer(), range, (2, is_written))?;
        Ok((begin, slot))
    }

    /// Returns the parameters of a plane, which must have the layout that the plan was checked
    /// against.
    pub(crate) fn plane(
        &self,
        view: &PlaneView<'_, WgpuBuffer>,
        num_blocks: u32,
        planned: Option<&PlaneLayout>,
    ) -> Result<Plane, DeviceError> {
        let layout = view.layout();
        check_plane(layout, (num_blocks, planned), FORMATS, self.operation)?;
        // The planes of a cache satisfy this; planes over the caller's own buffers may not.
        let dim = layout.head_dim();
        if dim > DIM_MAX || !dim.is_multiple_of(DIM_STEP) {
            let why =
                format!("head_dim {dim}: must be a multiple of {DIM_STEP} and at most {DIM_MAX}");
            return Err(unsupported(self.operation, why));
        }
        Ok(shape(layout))
    }

    /// Binds segment `index` of a plane.
    pub(crate) fn segment(
        &self,
        (view, plane): (&PlaneView<'_, WgpuBuffer>, &Plane),
        index: u32,
        is_written: bool,
    ) -> Result<(Plane, Slot), DeviceError> {
        let Some(buffer) = view.segment(to_usize(index)) else {
            let why = format!("the plane has no buffer for segment {index}");
            return Err(unsupported(self.operation, why));
        };
        let layout = view.layout();
        let range = (0, layout.segment_bytes(index));
        let (slot, data) = self.slot(buffer, range, (plane_align(layout), is_written))?;
        let first = index * layout.blocks_per_segment();
        let end = (first + layout.blocks_per_segment()).min(layout.num_blocks());
        Ok((Plane { data, first, end, ..*plane }, slot))
    }

    /// Binds kv-core's `PlaneConstants`, or a few zeros for a plane without them: a binding must
    /// exist.
    pub(crate) fn constants(
        &mut self,
        view: &PlaneView<'_, WgpuBuffer>,
    ) -> Result<Slot, DeviceError> {
        if !view.layout().has_constants() {
            return Ok(self.recorder.push(&[0_u32; 4])?.into());
        }
        let Some(buffer) = view.constants() else {
            return Err(unsupported(self.operation, "the plane lacks the constants it needs"));
        };
        let range = (0, view.layout().constants_bytes());
        let (slot, begin) = self.slot(buffer, range, (4, false))?;
        if begin == 0 {
            return Ok(slot);
        }
        Err(unsupported(self.operation, "the constants are not aligned for a binding"))
    }

    fn rows(&self, rows: &TokenRows, data: u32) -> Result<Tensor, DeviceError> {
        let size = to_u64(rows.dtype().size());
        let is_ragged = rows.axes() == Axes::Thd;
        let batch_stride = if is_ragged { 0 } else { rows.batch_stride() };
        let narrow = |elements: u64| {
            // Saturating: the strides are the caller's.
            u32::try_from(elements.saturating_mul(size))
                .map_err(|_| unsupported(self.operation, "a stride of 4 GiB or more"))
        };
        Ok(Tensor {
            data,
            batch_stride: narrow(batch_stride)?,
            token_stride: narrow(rows.token_stride())?,
            axes: axes_code(rows.axes()),
            dtype: dtype_code(rows.dtype()),
            batch: rows.batch(),
            tokens: rows.tokens(),
            heads: rows.heads(),
            dim: rows.dim(),
            ..Tensor::default()
        })
    }
}

/// Returns the parameters of a layout without those of a segment, which [`Call::segment`] adds.
/// Sizes fit 32 bits: a larger segment is refused when it is bound.
fn shape(layout: &PlaneLayout) -> Plane {
    let map = layout.slot_map();
    let (format, dim) = (layout.format(), layout.head_dim());
    let narrow = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
    Plane {
        block_bytes: narrow(layout.block_bytes()),
        token_stride: narrow(layout.token_stride()),
        head_stride: narrow(layout.head_stride()),
        wide_head_stride: narrow(wide_head_stride(layout)),
        mean_begin: narrow(layout.mean_begin(0)),
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
