//! Tensors and planes as kernels take them: addresses, and every size once more.
//!
//! The core has checked shapes against a plan. What is checked here is what only the device knows:
//! whose memory a buffer is and how far it reaches; and that plan and arguments belong together,
//! because they may have been checked at different times and kernels check nothing.
use std::sync::Arc;

use kv_core::{
    BlockOrder, DType, DeviceError, DeviceErrorKind, KvFormat, PlaneLayout, PlaneView, QkvFormat,
    TensorData, TensorDataMut, TokenRows, TokenTensor, TokenTensorMut,
};

use crate::buffer::CudaBuffer;
use crate::capture::{self, Held};
use crate::constants::Constants;
use crate::gpu::Gpu;
use crate::params::{Address, Plane, Tensor};
use crate::scratch::{At, Pack};
use crate::step::Way;
use kv_core::num::{to_u32, to_u64, to_usize};

/// What cannot be done here.
pub(crate) fn unsupported(operation: &'static str, why: impl Into<String>) -> DeviceError {
    DeviceError::new(DeviceErrorKind::Unsupported, operation).with_detail(why)
}

/// What a plan demands of the rows of a tensor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Room {
    /// Entries of the batch.
    pub(crate) entries: usize,
    /// Tokens of the longest.
    pub(crate) longest: u32,
    /// Tokens of all.
    pub(crate) total: u32,
}

impl Room {
    fn check(self, rows: &TokenRows, operation: &'static str) -> Result<(), DeviceError> {
        let fits = match rows.format() {
            QkvFormat::Thd => rows.tokens() >= self.total,
            _ => to_usize(rows.batch()) >= self.entries && rows.tokens() >= self.longest,
        };
        if fits {
            return Ok(());
        }
        Err(unsupported(operation, "the arguments were checked against another plan"))
    }
}

/// Where an input is: in device memory, or in a pack that is yet to be sent.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Source {
    Device(Address),
    Packed(At),
}

impl Source {
    /// The rows of a tensor that is here, once the pack lies at `base`.
    pub(crate) fn rows(self, tensor: Tensor, base: Address) -> Tensor {
        let data = match self {
            Self::Device(address) => address,
            Self::Packed(at) => at.from(base),
        };
        Tensor { data, ..tensor }
    }
}

/// One call's view of the device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call<'a> {
    pub(crate) gpu: &'a Arc<dyn Gpu>,
    pub(crate) operation: &'static str,
    pub(crate) held: &'a Held,
}

impl Call<'_> {
    /// Address of a range of a buffer of this device, for elements of `size` bytes. Kernels that
    /// read elements off their size would lose the device.
    fn on(
        self,
        buffer: &CudaBuffer,
        range: (u64, u64),
        size: usize,
    ) -> Result<Address, DeviceError> {
        self.held.note(buffer);
        let address = buffer.on(self.gpu, range, self.operation)?;
        if address.is_multiple_of(to_u64(size)) {
            return Ok(address);
        }
        let why = format!("{address:#x}, where elements of {size} bytes should begin");
        Err(unsupported(self.operation, why))
    }

    /// An input; bytes of the host go along in `pack`.
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
                Source::Packed(pack.push(bytes.get(..reached).unwrap_or(bytes)))
            }
            TensorData::Device { buffer, offset } => {
                let range = (offset, tensor.bytes_reached());
                Source::Device(self.on(buffer, range, tensor.rows().dtype().size())?)
            }
        };
        Ok((rows(tensor.rows(), 0), source))
    }

    /// An output, which lies in device memory.
    pub(crate) fn output(
        self,
        tensor: &mut TokenTensorMut<'_, CudaBuffer>,
        room: Room,
    ) -> Result<Tensor, DeviceError> {
        room.check(tensor.rows(), self.operation)?;
        let (reached, shape) = (tensor.bytes_reached(), *tensor.rows());
        match tensor.data() {
            TensorDataMut::Host(_) => {
                Err(unsupported(self.operation, "an output in host memory: download it instead"))
            }
            TensorDataMut::Device { buffer, offset } => {
                let address = self.on(buffer, (*offset, reached), shape.dtype().size())?;
                Ok(rows(&shape, address))
            }
        }
    }

    /// A plane.
    pub(crate) fn plane(
        self,
        view: &PlaneView<'_, CudaBuffer>,
        num_blocks: u32,
        planned: Option<&PlaneLayout>,
        (constants, way): (&mut Constants, &mut Way<'_>),
    ) -> Result<Plane, DeviceError> {
        let layout = view.layout();
        let alike = planned.is_none_or(|planned| {
            planned.block_size() == layout.block_size() && planned.slot_map() == layout.slot_map()
        });
        if layout.num_blocks() < num_blocks || !alike {
            let why = "the plan was checked against another geometry than the plane's";
            return Err(unsupported(self.operation, why));
        }
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
        // What is asked of the base, is asked of every segment: one that does not lie on 16 bytes
        // stands for them. Kernels look at the list alone.
        let odd = segments.iter().find(|segment| !segment.is_multiple_of(16));
        plane.base = odd.or(segments.first()).copied().unwrap_or(0);
        plane.segments = constants.get((way, self.held), &segments)?;
        Ok(plane)
    }

    fn segment(self, view: &PlaneView<'_, CudaBuffer>, index: u32) -> Result<Address, DeviceError> {
        let Some(buffer) = view.segment(to_usize(index)) else {
            let why = format!("the plane has no buffer for segment {index}");
            return Err(unsupported(self.operation, why));
        };
        // Rows of codes are read two bytes at a time.
        let size = if view.layout().format() == KvFormat::F32 { 4 } else { 2 };
        self.on(buffer, (0, view.layout().segment_bytes(index)), size)
    }
}

/// Number of an element type, as `KvDtype` has it.
pub(crate) fn dtype(dtype: DType) -> u32 {
    match dtype {
        DType::F16 => 1,
        DType::Bf16 => 2,
        // Tensors of token rows are of one of the three, by the core's check.
        _ => 0,
    }
}

/// Number of a stored format, as `KvFormat` of the kernels has it.
pub(crate) fn format(format: KvFormat) -> u32 {
    to_u32(KvFormat::all().position(|known| known == format).unwrap_or(usize::MAX))
}

fn rows(rows: &TokenRows, data: Address) -> Tensor {
    let size = to_u64(rows.dtype().size());
    let (axes, batch_stride) = match rows.format() {
        QkvFormat::Bshd => (0, rows.batch_stride()),
        QkvFormat::Sbhd => (1, rows.batch_stride()),
        _ => (2, 0),
    };
    Tensor {
        data,
        batch_stride: batch_stride.saturating_mul(size),
        token_stride: rows.token_stride().saturating_mul(size),
        axes,
        dtype: dtype(rows.dtype()),
        batch: rows.batch(),
        tokens: rows.tokens(),
        heads: rows.heads(),
        dim: rows.dim(),
    }
}

/// The numbers of a layout, without addresses.
pub(crate) fn shape(layout: &PlaneLayout) -> Plane {
    let map = layout.slot_map();
    let (format_, dim) = (layout.format(), layout.head_dim());
    let narrow = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
    let wide_head_stride = match layout.order() {
        BlockOrder::Nhd => layout.row_bytes().saturating_mul(map.wide_slots().into()),
        _ => layout.head_stride(),
    };
    Plane {
        block_bytes: layout.block_bytes(),
        token_stride: layout.token_stride(),
        head_stride: layout.head_stride(),
        wide_head_stride,
        mean_begin: layout.mean_begin(0),
        blocks_per_segment: layout.blocks_per_segment(),
        num_blocks: layout.num_blocks(),
        block_size: layout.block_size(),
        num_kv_heads: layout.num_kv_heads(),
        head_dim: dim,
        format: format(format_),
        row_bytes: narrow(layout.row_bytes()),
        scales_begin: narrow(format_.scales_begin(dim)),
        transforms: layout.transforms().into(),
        block_means: layout.has_block_means().into(),
        sinks: map.sinks(),
        wide_slots: map.wide_slots(),
        wide_per_block: layout.block_size().checked_div(map.wide_slots()).unwrap_or(1).max(1),
        has_tail: map.has_tail().into(),
        ..Plane::default()
    }
}
