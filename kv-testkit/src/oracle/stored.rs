//! What a plane keeps of the rows written to it, by the host's definition of every format.
//!
//! Rows are `[tokens, heads, head_dim]`. *Kept* rows are decoded, but not turned back: what
//! attention reads. *Read* rows are what a gather returns.
use kv_core::calibration::{HeadConstants, PlaneConstants};
use kv_core::{Calibration, CalibrationError, KvFormat, LayerId, Plane, PlaneLayout, SlotMap};
use kv_quant::block::round_wide;
use kv_quant::row::{decode_row, encode_row};
use kv_quant::transform;

use super::round::round_f32;

/// One plane, without blocks or a device.
#[derive(Debug, Clone)]
pub struct Stored {
    layout: PlaneLayout,
    constants: Option<PlaneConstants>,
}

impl Stored {
    /// The plane of a layer.
    ///
    /// # Errors
    /// What a cache answers to constants that do not fit.
    pub fn new(
        layer: LayerId,
        plane: Plane,
        layout: PlaneLayout,
        calibration: Option<&Calibration>,
    ) -> Result<Self, CalibrationError> {
        let given = calibration.and_then(|all| all.layer(layer)).map(|given| match plane {
            Plane::Key => &given.k,
            Plane::Value => &given.v,
        });
        Ok(Self { layout, constants: PlaneConstants::new(layer, plane, &layout, given)? })
    }

    /// Encoding of rows after the full-precision prefix.
    pub fn format(&self) -> KvFormat {
        self.layout.format()
    }
    /// Values of a row.
    pub fn dim(&self) -> usize {
        self.layout.head_dim() as usize
    }
    /// Values of a token.
    pub fn width(&self) -> usize {
        self.dim() * self.layout.num_kv_heads() as usize
    }
    /// Constants, where rows are transformed.
    pub fn turned(&self) -> Option<&PlaneConstants> {
        self.constants.as_ref().filter(|_| self.layout.transforms())
    }

    /// Constants of the `index`-th row of a tensor, where rows are transformed.
    pub(crate) fn head(&self, index: usize) -> Option<HeadConstants<'_>> {
        self.turned()?.head(index % self.layout.num_kv_heads() as usize)
    }

    /// Rows as they reach the encoder.
    pub fn transformed(&self, rows: &[f32]) -> Vec<f32> {
        self.turn(rows, transform::store)
    }

    /// What is kept of rows, the first of them at position `first` of its sequence.
    pub fn kept(&self, first: u32, rows: &[f32]) -> Vec<f32> {
        let mut kept = self.transformed(rows);
        for (row, index) in kept.chunks_mut(self.dim()).zip(0..) {
            self.keep(first, index, row);
        }
        kept
    }

    /// Replaces one transformed row, the `index`-th behind position `first`, by what is kept of it.
    pub(crate) fn keep(&self, first: u32, index: usize, row: &mut [f32]) {
        let heads = self.layout.num_kv_heads() as usize;
        let position = first + (index / heads) as u32;
        if position < self.layout.slot_map().full_precision_prefix() {
            self.widen(row);
        } else {
            self.code(index % heads, row);
        }
    }

    /// Replaces a transformed row of a head by what its codes say.
    pub(crate) fn code(&self, head: usize, row: &mut [f32]) {
        let format = self.format();
        if !format.is_quantised() {
            return self.widen(row);
        }
        let head = self.constants.as_ref().and_then(|all| all.head(head));
        let (scale, inverse) = head.map_or((1.0, 1.0), |head| (head.scale, head.inv_scale));
        let mut bytes = vec![0; format.row_bytes(self.layout.head_dim()) as usize];
        encode_row(format, inverse, row, &mut bytes);
        decode_row(format, scale, &bytes, row);
    }

    /// Replaces transformed values by what an element of the plane holds, of 16 bits among codes.
    fn widen(&self, row: &mut [f32]) {
        for x in row {
            *x = match self.format().element() {
                Some(element) => round_f32(element, *x),
                None => round_wide(*x),
            };
        }
    }

    /// Rows as they wait for their block to be full.
    pub(crate) fn waiting(&self, rows: &[f32]) -> Vec<f32> {
        let mut rows = self.transformed(rows);
        self.widen(&mut rows);
        rows
    }

    /// Whether a mean is taken off the rows of every block.
    pub(crate) fn has_block_means(&self) -> bool {
        self.layout.has_block_means()
    }

    /// The slots of the plane, where rows wait in some of them.
    pub(crate) fn tail(&self) -> Option<SlotMap> {
        Some(*self.layout.slot_map()).filter(SlotMap::has_tail)
    }

    /// Kept rows as a gather returns them.
    pub fn read(&self, kept: &[f32]) -> Vec<f32> {
        self.turn(kept, transform::load)
    }

    fn turn(&self, rows: &[f32], how: fn(&mut [f32], &HeadConstants<'_>)) -> Vec<f32> {
        let mut rows = rows.to_vec();
        for (row, index) in rows.chunks_mut(self.dim()).zip(0..) {
            if let Some(head) = self.head(index) {
                how(row, &head);
            }
        }
        rows
    }
}
