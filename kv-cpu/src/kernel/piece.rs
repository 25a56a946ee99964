//! A few query rows against a piece of a context, [`PIECE`] tokens at most: they are scored and
//! weighed by one loop, and summed by another.
//!
//! A vector has the scores of all rows by some tokens, so that maxima and exponentials are those of
//! all rows at once, and all sums of products stay in registers. Pieces come in the order in which
//! memory has them, and while one is at work another one is asked for, a few lines a step
//! (`docs/performance.md`).
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    reason = "rows and lanes are counted by the callers and the types here"
)]
mod ask;
mod rows;
mod sums;
mod weigh;

use self::rows::Rows;
pub(super) use self::sums::{sum, sum_e4m3};
pub(super) use self::weigh::{weigh, weigh_e4m3};
use super::simd::LANES_MAX;
use super::stored::GROUP;
use super::{Kernels, Part, RowScale, Running, of_encoding};
use crate::encoding::{Encoding, RowLayout};

/// Most tokens of a piece.
pub(crate) const PIECE: usize = LANES_MAX;

/// Tokens whose scores by so many rows share a vector.
const fn tokens_of(rows: usize) -> usize {
    LANES_MAX / rows.next_power_of_two()
}

/// Most query rows that meet a piece at once.
const ROWS_MAX: usize = 8;

/// Whether there are loops for so many query rows.
const fn has_rows(rows: usize) -> bool {
    matches!(rows, 1..=4 | ROWS_MAX)
}

/// Weights of a piece: vectors of lanes `row * tokens_of(rows) + token`, as many as there are.
pub(crate) type Weights = [f32; ROWS_MAX * PIECE];

/// What some query rows have come to; the lanes of a row as in [`Weights`].
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
pub(crate) struct Lanes {
    /// What is added to scores before they are scaled.
    bias: [f32; LANES_MAX],
    /// What weights are relative to, about the greatest score: the same in all lanes of a row, and
    /// finite, so that what is infinitely less weighs nothing.
    max: [f32; LANES_MAX],
    /// Of the weights of a row each lane has a part.
    sum: [f32; LANES_MAX],
}

impl Lanes {
    /// Nothing seen yet by rows of these biases.
    pub(crate) fn new(bias: &[f32]) -> Self {
        let mut lanes =
            Self { bias: [0.0; LANES_MAX], max: [f32::MIN; LANES_MAX], sum: [0.0; LANES_MAX] };
        for (lanes, bias) in lanes.bias.chunks_mut(tokens_of(bias.len())).zip(bias) {
            lanes.fill(*bias);
        }
        lanes
    }

    /// Maximum and sum of one of so many rows.
    pub(crate) fn running(&self, row: usize, rows: usize) -> Running {
        let tokens = tokens_of(rows);
        let sum: f32 = self.sum[row * tokens..][..tokens].iter().sum();
        // Where nothing weighs, nothing was seen.
        if sum == 0.0 { Running::EMPTY } else { Running { max: self.max[row * tokens], sum } }
    }
}

/// Rows of K or V of a piece, and what to ask for meanwhile.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PieceRows<'a> {
    pub(crate) now: Part<'a>,
    pub(crate) next: Part<'a>,
    pub(crate) layout: &'a RowLayout,
    pub(crate) scale: RowScale<'a>,
}

/// A piece, and the query rows that meet it.
pub(crate) struct Piece<'a> {
    pub(crate) k: PieceRows<'a>,
    pub(crate) v: PieceRows<'a>,
    pub(crate) tokens: usize,
    /// How many query rows: such a number as [`Kernels::has_pieces`] takes.
    pub(crate) rows: usize,
    /// The rows, `q_stride` apart.
    pub(crate) q: &'a [f32],
    pub(crate) q_stride: usize,
    /// What scores are multiplied with.
    pub(crate) scale: f32,
    /// Whether anyone has use for all bits of a weight.
    pub(crate) exact: bool,
    pub(crate) lanes: &'a mut Lanes,
    /// Of this piece; multiplied by the scales of V in the end.
    pub(crate) weights: &'a mut Weights,
    /// Sums so far, `out_stride` apart.
    pub(crate) out: &'a mut [f32],
    pub(crate) out_stride: usize,
}

type Loop = unsafe fn(&mut Piece<'_>);

/// The loops of one instruction set, by encoding. Calling one is sound only on a CPU that has it.
pub(crate) struct Table {
    /// Scores and weighs a piece.
    pub(super) weigh: [Loop; Encoding::COUNT],
    /// Adds its values by their weights.
    pub(super) sum: [Loop; Encoding::COUNT],
}

impl Kernels {
    /// Whether so many query rows may meet pieces of rows of these layouts.
    pub(crate) fn has_pieces(self, rows: usize, layouts: [&RowLayout; 4]) -> bool {
        let is_whole = |rows: &RowLayout| rows.dim().is_multiple_of(GROUP);
        self.pieces.is_some() && has_rows(rows) && layouts.into_iter().all(is_whole)
    }

    /// Lets query rows meet a piece, where [`Self::has_pieces`] has said so.
    pub(crate) fn meet_piece(self, args: &mut Piece<'_>) {
        if let Some(table) = self.pieces {
            let weigh = of_encoding(&table.weigh, args.k.layout.encoding());
            let sum = of_encoding(&table.sum, args.v.layout.encoding());
            // SAFETY: the CPU has the instruction set, by `Self::of`.
            unsafe { weigh(args) };
            // SAFETY: as above.
            unsafe { sum(args) };
        }
    }
}

/// Instantiates the loops for one vector type, behind the attributes given.
macro_rules! table {
    ([$(#[$attribute:meta])*] $simd:expr) => {
        /// The loops over pieces.
        pub(super) static PIECES: super::piece::Table = {
            use super::piece::{self, Piece, Table};
            use super::stored::Stored;

            $(#[$attribute])*
            fn weigh<E: Stored>(args: &mut Piece<'_>) {
                piece::weigh::<_, E>($simd, args);
            }
            $(#[$attribute])*
            fn weigh_e4m3(args: &mut Piece<'_>) {
                piece::weigh_e4m3($simd, args);
            }
            $(#[$attribute])*
            fn sum<E: Stored>(args: &mut Piece<'_>) {
                piece::sum::<_, E>($simd, args);
            }
            $(#[$attribute])*
            fn sum_e4m3(args: &mut Piece<'_>) {
                piece::sum_e4m3($simd, args);
            }
            Table {
                weigh: super::table::each!(weigh, weigh_e4m3),
                sum: super::table::each!(sum, sum_e4m3),
            }
        };
    };
}
pub(super) use table;
