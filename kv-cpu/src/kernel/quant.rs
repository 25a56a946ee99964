//! Rows of quantised formats: what `kv-quant` encodes, to the same bits.
//!
//! That crate knows no instruction sets, but all that it does to encode a row is inlined into its
//! caller, which has one here: up to twice as fast (`docs/performance.md`). Rotations are called as
//! they are: wider vectors made them slower.
use kv_core::KvFormat;

use super::{Kernels, TileRows};
use crate::encoding::{Encoding, RowLayout};

pub(super) type EncodeRow = unsafe fn(KvFormat, f32, &[f32], &mut [u8]);

impl Kernels {
    /// [`kv_quant::row::encode_row`].
    pub(crate) fn encode_row(
        self,
        format: KvFormat,
        inv_scale: f32,
        values: &[f32],
        row: &mut [u8],
    ) {
        // SAFETY: the CPU has the instruction set, by `Self::of`.
        unsafe { (self.loops.encode_row)(format, inv_scale, values, row) }
    }

    /// Decodes a row with its own scale, or the given one: `kv_quant::row::decode_row` to the bit.
    pub(crate) fn decode_scaled(self, layout: &RowLayout, given: f32, from: &[u8], to: &mut [f32]) {
        if layout.encoding() == Encoding::Nvfp4 {
            // Its definition rounds the product of both scales first, which only sums may ignore.
            kv_quant::row::decode_row(KvFormat::Nvfp4, given, from, to);
            return;
        }
        self.decode(layout, from, to);
        let scale = if layout.has_scale() {
            let row = TileRows::of([from], layout.bytes());
            let [scale, ..] = self.row_scales(&row, layout);
            scale
        } else {
            given
        };
        if scale.to_bits() != 1.0_f32.to_bits() {
            self.scale(to, scale);
        }
    }
}
