//! Rows of K and V in the blocks of a plane.
use kv_core::KvFormat;
use kv_core::backend::{PlaneLayout, PlaneView};
use kv_core::calibration::{HeadConstants, PlaneConstants};
use kv_core::error::DeviceError;
use kv_core::invariant::Invariant;
use kv_core::num::{to_offset, to_u64, to_usize};
use kv_cpu_kernels::{Element, Encoding, RowLayout};
use kv_quant::block;

use super::unsupported;
use crate::access::{Locked, Span};
use crate::buffer::CpuBuffer;

/// Scale of the decoded values of a row.
#[derive(Debug, Clone, Copy)]
pub(crate) enum RowScale {
    /// The same for every row.
    Given(f32),
    /// The f16 scale after the codes of each row.
    Stored,
}

/// A locked plane: all its segments were entered, with the sizes of its layout.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PlaneRows<'a> {
    view: PlaneView<'a, CpuBuffer>,
    codes: RowLayout,
    wide: RowLayout,
    constants: Option<&'a [f32]>,
}

impl<'a> PlaneRows<'a> {
    /// Checks that the plane has the blocks below `num_blocks`, the blocks of `planned` if given,
    /// and its constants if it needs any.
    ///
    /// # Safety
    /// 1. All segments of `view` were entered in `locked`, for writing if [`Self::get_mut`] is
    ///    used, and `constants` is the span of its constants there.
    pub(crate) unsafe fn new(
        _locked: &'a Locked<'_>,
        view: PlaneView<'a, CpuBuffer>,
        constants: Option<Span>,
        num_blocks: u32,
        planned: Option<&PlaneLayout>,
        operation: &'static str,
    ) -> Result<Self, DeviceError> {
        let layout = view.layout();
        let alike = planned.is_none_or(|planned| {
            planned.block_size() == layout.block_size() && planned.slot_map() == layout.slot_map()
        });
        if layout.num_blocks() < num_blocks || !alike {
            return Err(unsupported(
                operation,
                "the plan was checked against another geometry than the plane's",
            ));
        }
        let rows = |format: KvFormat| {
            RowLayout::of(format, layout.head_dim())
                .ok_or_else(|| unsupported(operation, format!("stored format {format}")))
        };
        let (codes, wide) = (rows(layout.format())?, rows(layout.wide_format())?);
        let constants = constants.map(|span| {
            // SAFETY: the span is live memory that is not written while the gates are held, by
            // condition 1.
            unsafe { std::slice::from_raw_parts(span.base().cast_const(), span.len()) }
        });
        let constants = constants.map(bytemuck::try_cast_slice::<u8, f32>).transpose();
        let (heads, dim) = (to_usize(layout.num_kv_heads()), to_usize(layout.head_dim()));
        let needed = PlaneConstants::len_of(heads, dim);
        let constants = match constants {
            Ok(values) if !layout.has_constants() => values.and(None),
            Ok(Some(values)) if values.len() >= needed => Some(values),
            _ => return Err(unsupported(operation, "the plane lacks the constants it needs")),
        };
        Ok(Self { view, codes, wide, constants })
    }
    /// The same plane, its rows read in the order of [`RowLayout::in_pairs`] where all have one
    /// layout.
    pub(crate) fn in_pairs(self) -> Self {
        let pairs = (self.codes.in_pairs(), self.wide.in_pairs());
        let (codes, wide) = if self.codes == self.wide { pairs } else { (self.codes, self.wide) };
        Self { codes, wide, ..self }
    }
    /// Returns whether rows are read in pairs of bf16.
    pub(crate) fn is_in_pairs(&self) -> bool {
        self.codes.encoding() == Encoding::Bf16Pairs
    }
    pub(crate) fn layout(&self) -> &PlaneLayout {
        self.view.layout()
    }
    /// Layout of the rows kept in 16 bits, or of the others.
    pub(crate) fn rows(&self, is_wide: bool) -> &RowLayout {
        if is_wide { &self.wide } else { &self.codes }
    }
    /// Constants of a kv head, where the plane has some.
    pub(crate) fn head_constants(&self, head: u32) -> Option<HeadConstants<'a>> {
        let layout = self.view.layout();
        let (heads, dim) = (to_usize(layout.num_kv_heads()), to_usize(layout.head_dim()));
        HeadConstants::of(self.constants?, heads, dim, to_usize(head))
    }
    /// Constants of a kv head, where rows are transformed.
    pub(crate) fn transform(&self, head: u32) -> Option<HeadConstants<'a>> {
        self.head_constants(head).filter(|_| self.view.layout().transforms())
    }
    /// The element type of rows that are stored neither transformed nor quantised.
    pub(crate) fn plain_element(&self) -> Option<Element> {
        let layout = self.view.layout();
        let plain = Element::of_format(layout.format());
        plain.filter(|_| !layout.transforms())
    }
    /// Scale of the decoded rows of a kv head, those kept in 16 bits or the others.
    pub(crate) fn scale(&self, head: u32, is_wide: bool) -> RowScale {
        if self.rows(is_wide).has_scale() {
            return RowScale::Stored;
        }
        let constants = self.head_constants(head).filter(|_| !is_wide);
        RowScale::Given(constants.map_or(1.0, |constants| constants.scale))
    }

    /// The mean that is subtracted from the codes of kv head `head` in a block, in f16.
    pub(crate) fn mean(&self, block: u32, head: u32) -> &'a [u8] {
        let layout = self.view.layout();
        let bytes = to_offset(KvFormat::F16.row_bytes(layout.head_dim()));
        self.get(block, layout.mean_begin(head), bytes)
    }
    /// The same, decoded.
    pub(crate) fn read_mean(&self, block: u32, head: u32, values: &mut [f32]) {
        block::decode_wide(self.mean(block, head), values);
    }

    /// Returns the address of bytes `begin..begin + len` of a block; `None` outside the plane.
    fn find(&self, block: u32, begin: u64, len: usize) -> Option<*mut u8> {
        let layout = self.view.layout();
        let (segment, at) = layout.locate(block);
        let inside = begin.checked_add(to_u64(len))? <= layout.block_bytes();
        let first = to_offset(at.checked_add(begin)?);
        let buffer = self.view.segment(segment)?;
        let fits = first.checked_add(len)? <= buffer.len() && block < layout.num_blocks();
        (inside && fits).then(|| buffer.base().wrapping_add(first))
    }

    /// As [`Self::find`].
    ///
    /// # Panics
    /// Outside the plane: a plan names no such block, and no row ends after its block.
    fn locate(&self, block: u32, begin: u64, len: usize) -> *mut u8 {
        self.find(block, begin, len).invariant("a plan names rows inside the blocks of its plane")
    }

    /// Bytes `begin..begin + len` of a block.
    pub(crate) fn get(&self, block: u32, begin: u64, len: usize) -> &'a [u8] {
        let first = self.locate(block, begin, len).cast_const();
        // SAFETY: inside a segment that is locked (condition 1 of `new`); the operation itself
        // writes planes only through `get_mut`, whose condition keeps the two apart.
        unsafe { std::slice::from_raw_parts(first, len) }
    }

    /// Returns bytes `begin..begin + len` of a block, for writing.
    ///
    /// # Safety
    /// 1. The plane was locked for writing.
    /// 2. No two live slices of the plane share a byte.
    pub(crate) unsafe fn get_mut(&self, block: u32, begin: u64, len: usize) -> &'a mut [u8] {
        let first = self.locate(block, begin, len);
        // SAFETY: inside a segment, with conditions 1 and 2.
        unsafe { std::slice::from_raw_parts_mut(first, len) }
    }
}
