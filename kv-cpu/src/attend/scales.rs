//! Scales of the decoded rows of a tile, by token.
use kv_cpu_kernels::{Kernels, SCORE_PAD, TileRows};

use super::key_runs::TILE_MAX;
use crate::layout::RowScale;

/// Scales of the rows of a tile, and finite numbers after the last up to a multiple of
/// [`SCORE_PAD`].
#[repr(align(64))]
pub(super) struct TileScales([f32; TILE_MAX + SCORE_PAD]);

impl TileScales {
    #[inline]
    pub(super) const fn new() -> Self {
        Self([1.0; _])
    }

    /// The scales of some rows times a factor, `None` where all are 1.
    #[inline]
    pub(super) fn of(
        &mut self,
        kernels: Kernels,
        rows: &TileRows<'_>,
        scale: RowScale,
        factor: f32,
    ) -> Option<&[f32]> {
        let len = rows.len().next_multiple_of(SCORE_PAD);
        match scale {
            RowScale::Given(scale) if (scale * factor).to_bits() == 1.0_f32.to_bits() => {
                return None;
            }
            RowScale::Given(scale) => self.0[..len].fill(scale * factor),
            RowScale::Stored => {
                let mut token = 0;
                for run in rows.runs() {
                    kernels.row_scales(run, &mut self.0[token..]);
                    token += run.len();
                }
                self.0[token..len].fill(1.0);
                if factor.to_bits() != 1.0_f32.to_bits() {
                    self.0[..token].iter_mut().for_each(|scale| *scale *= factor);
                }
            }
        }
        Some(&self.0[..len])
    }
}
