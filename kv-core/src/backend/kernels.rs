//! Common host code of GPU backends: the numbers of kernel parameters, and the checks of plan and
//! arguments together.
//!
//! Kernels check nothing, and plan and arguments may have been checked at different times.
use kv_format::{DType, KvFormat, ScaleGroup, Scaling};

use crate::error::{DeviceError, DeviceErrorKind};
use crate::geometry::{Axes, BlockOrder, PlaneLayout};
use crate::num::to_usize;
use crate::tensor::{TensorDataMut, TokenRows, TokenTensorMut};

/// Stored formats that the kernels of both GPU backends read and write. A backend that is ahead of
/// the other adds to this list in a list of its own.
pub const FORMATS: &[KvFormat] = &[
    KvFormat::F32,
    KvFormat::F16,
    KvFormat::Bf16,
    KvFormat::Fp8E4m3(Scaling::Tensor),
    KvFormat::Fp8E4m3(Scaling::Head),
    KvFormat::Fp8E4m3(Scaling::Row),
    KvFormat::Fp8E5m2(Scaling::Tensor),
    KvFormat::Fp8E5m2(Scaling::Head),
    KvFormat::Fp8E5m2(Scaling::Row),
    KvFormat::Int8(Scaling::Row),
    KvFormat::Int8(Scaling::Tensor),
    KvFormat::Int8(Scaling::Head),
    KvFormat::L6(ScaleGroup::Row),
    KvFormat::L6(ScaleGroup::Group32),
    KvFormat::L4(ScaleGroup::Row),
    KvFormat::L4(ScaleGroup::Group32),
    KvFormat::L3(ScaleGroup::Row),
    KvFormat::L3(ScaleGroup::Group32),
    KvFormat::Q8_0,
    KvFormat::Q4_0,
    KvFormat::Nvfp4,
];

/// Creates the error for an operation that a device cannot do.
pub fn unsupported(operation: &'static str, why: impl Into<String>) -> DeviceError {
    DeviceError::new(DeviceErrorKind::Unsupported, operation).with_detail(why)
}

/// The rows that a plan requires of a tensor.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::exhaustive_structs, reason = "backends make it")]
pub struct Room {
    /// Entries of the batch.
    pub entries: usize,
    /// Tokens of the longest entry.
    pub longest: u32,
    /// Tokens of all entries.
    pub total: u32,
}

impl Room {
    /// Checks that a tensor has the rows that the plan of this call requires.
    ///
    /// # Errors
    /// `Unsupported` for a tensor that was checked against another plan.
    pub fn check(self, rows: &TokenRows, operation: &'static str) -> Result<(), DeviceError> {
        let batch = to_usize(rows.batch());
        let fits = match rows.axes() {
            Axes::Thd => rows.tokens() >= self.total,
            Axes::Bshd | Axes::Sbhd => batch >= self.entries && rows.tokens() >= self.longest,
        };
        check_plan(fits, operation)
    }
    /// Checks that stored rows of `tokens` tokens are those of all entries, and of the same plan.
    ///
    /// # Errors
    /// As [`Self::check`].
    pub fn check_stored(self, tokens: u32, operation: &'static str) -> Result<(), DeviceError> {
        check_plan(tokens >= self.total, operation)
    }
}

fn check_plan(fits: bool, operation: &'static str) -> Result<(), DeviceError> {
    if fits {
        return Ok(());
    }
    Err(unsupported(operation, "the arguments were checked against another plan"))
}

/// Checks that a plane has the blocks and the slots of a plan, and one of the backend's formats. A
/// cache has no others, but a plane over the caller's buffers may.
///
/// # Errors
/// `Unsupported` otherwise.
pub fn check_plane(
    layout: &PlaneLayout,
    (num_blocks, planned): (u32, Option<&PlaneLayout>),
    formats: &[KvFormat],
    operation: &'static str,
) -> Result<(), DeviceError> {
    let is_alike = planned.is_none_or(|planned| {
        planned.block_size() == layout.block_size() && planned.slot_map() == layout.slot_map()
    });
    if layout.num_blocks() < num_blocks || !is_alike {
        let why = "the plan was checked against another geometry than the plane's";
        return Err(unsupported(operation, why));
    }
    let format = layout.format();
    if !formats.contains(&format) {
        return Err(unsupported(operation, format!("format {format}: kernels do not have it")));
    }
    Ok(())
}

/// Returns the buffer of an output, and the byte at which its rows begin.
///
/// # Panics
/// If it lies in host memory: [`HostOutputs`](crate::backend::HostOutputs) must replace such
/// outputs first.
#[expect(clippy::panic, reason = "our own mistake: every call exchanges its host outputs")]
pub fn device_output<'t, Buf>(tensor: &'t mut TokenTensorMut<'_, Buf>) -> (&'t Buf, u64) {
    match tensor.data() {
        TensorDataMut::Device { buffer, offset } => (buffer, *offset),
        TensorDataMut::Host(_) => panic!("outputs in host memory were exchanged for a buffer"),
    }
}

/// Returns the alignment that kernels need of the buffers of a plane, in bytes: quantised rows are
/// read two bytes at a time.
pub fn plane_align(layout: &PlaneLayout) -> u32 {
    if layout.format() == KvFormat::F32 { 4 } else { 2 }
}

/// Returns the number of an element type in kernels.
///
/// # Panics
/// If token rows cannot have this type, which the core has checked.
pub const fn dtype_code(dtype: DType) -> u32 {
    assert!(dtype.is_float(), "rows of tokens are f32, f16 or bf16");
    dtype.kernel_code()
}

/// Returns the number of the order of a tensor's axes in kernels.
pub fn axes_code(axes: Axes) -> u32 {
    match axes {
        Axes::Bshd => 0,
        Axes::Sbhd => 1,
        Axes::Thd => 2,
    }
}

/// Returns the bytes from a head to the next of its token, in a 16-bit row among codes.
pub fn wide_head_stride(layout: &PlaneLayout) -> u64 {
    match layout.order() {
        BlockOrder::Nhd => layout.row_bytes() * u64::from(layout.slot_map().wide_slots()),
        BlockOrder::Hnd => layout.head_stride(),
    }
}

/// Returns the number of 16-bit rows among codes that fit in a block.
pub fn wide_per_block(layout: &PlaneLayout) -> u32 {
    (layout.block_size() / layout.slot_map().wide_slots()).max(1)
}
