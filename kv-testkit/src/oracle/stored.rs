//! Stored rows by the host's definition of every format.
//!
//! Rows are `[tokens, heads, head_dim]`. *Kept* rows are decoded but still transformed: attention
//! uses them. *Read* rows are transformed back: a gather returns them.
use kv_core::backend::{Plane, PlaneLayout, SlotMap};
use kv_core::calibration::{Calibration, CalibrationError, HeadConstants, PlaneConstants};
use kv_core::{KvFormat, LayerId};
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
    /// Describes the plane of a layer.
    ///
    /// # Errors
    /// The cache's errors for constants that do not fit.
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

    /// Returns the format of rows after the full-precision prefix.
    pub fn format(&self) -> KvFormat {
        self.layout.format()
    }
    /// Returns the head dim.
    pub fn dim(&self) -> usize {
        self.layout.head_dim() as usize
    }
    /// Returns the number of values of a token.
    pub fn width(&self) -> usize {
        self.dim() * self.layout.num_kv_heads() as usize
    }
    /// Returns the constants, if rows are transformed.
    pub fn constants(&self) -> Option<&PlaneConstants> {
        self.constants.as_ref().filter(|_| self.layout.transforms())
    }

    /// Returns the constants for the `index`-th row of a tensor, if rows are transformed.
    pub(crate) fn head(&self, index: usize) -> Option<HeadConstants<'_>> {
        self.constants()?.head(index % self.layout.num_kv_heads() as usize)
    }

    /// Transforms rows, as the encoder receives them.
    pub fn transformed(&self, rows: &[f32]) -> Vec<f32> {
        self.apply(rows, transform::store)
    }

    /// Returns the kept form of rows, the first of which has position `first`.
    pub fn kept(&self, first: u32, rows: &[f32]) -> Vec<f32> {
        let mut kept = self.transformed(rows);
        for (row, index) in kept.chunks_mut(self.dim()).zip(0..) {
            self.keep(first, index, row);
        }
        kept
    }

    /// Replaces one transformed row, `index` rows after position `first`, by its kept form.
    pub(crate) fn keep(&self, first: u32, index: usize, row: &mut [f32]) {
        let heads = self.layout.num_kv_heads() as usize;
        let position = first + (index / heads) as u32;
        if position < self.layout.slot_map().full_precision_prefix() {
            self.widen(row);
        } else {
            self.code(index % heads, row);
        }
    }

    /// Encodes and decodes a transformed row of a head.
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

    /// Rounds transformed values to the element type of rows in 16 bits among codes.
    fn widen(&self, row: &mut [f32]) {
        for x in row {
            *x = match self.format().element() {
                Some(element) => round_f32(element, *x),
                None => round_wide(*x),
            };
        }
    }

    /// Returns rows as a tail stores them, until their block is full.
    pub(crate) fn waiting(&self, rows: &[f32]) -> Vec<f32> {
        let mut rows = self.transformed(rows);
        self.widen(&mut rows);
        rows
    }

    /// Returns whether the mean of every block is subtracted from its rows.
    pub(crate) fn has_block_means(&self) -> bool {
        self.layout.has_block_means()
    }

    /// Returns the slot map of the plane, if it has a tail.
    pub(crate) fn tail(&self) -> Option<SlotMap> {
        Some(*self.layout.slot_map()).filter(SlotMap::has_tail)
    }

    /// Transforms kept rows back, as a gather returns them.
    pub fn read(&self, kept: &[f32]) -> Vec<f32> {
        self.apply(kept, transform::load)
    }

    fn apply(&self, rows: &[f32], transform_row: fn(&mut [f32], &HeadConstants<'_>)) -> Vec<f32> {
        let mut rows = rows.to_vec();
        for (row, index) in rows.chunks_mut(self.dim()).zip(0..) {
            if let Some(head) = self.head(index) {
                transform_row(row, &head);
            }
        }
        rows
    }
}
