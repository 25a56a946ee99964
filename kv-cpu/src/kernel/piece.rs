//! The query rows of some kv heads against a strip of a context, by pieces of a head and [`PIECE`]
//! tokens at most: they are scored and weighed by one loop, and summed by another.
//!
//! A vector has the scores of all rows by some tokens, so that maxima and exponentials are those of
//! all rows at once. Sums of products stay in registers, and as many query values as there is room
//! for, as loads besides those of K and V slow these down. Pieces come in the order in which memory
//! has them, and while one is at work another one is asked for, a few lines a step
//! (`docs/performance.md`).
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    reason = "rows and lanes are counted by the callers and the types here"
)]
mod ask;
mod dots;
mod multiply;
mod rows;
mod strip;
mod sums;
mod weigh;

pub(super) use self::multiply::DotBf16;
use self::rows::Rows;
use self::strip::Places;
pub(crate) use self::strip::{HeadRows, Strip};
pub(super) use self::sums::{sum, sum_e4m3};
pub(super) use self::weigh::{weigh, weigh_bf16, weigh_e4m3};
use super::simd::LANES_MAX;
use super::stored::GROUP;
use super::{Kernels, RowScale, Running, of_encoding};
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

/// What the query rows of a kv head have come to; the lanes of a row as in [`Weights`].
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
    /// What rows of K and V are multiplied with.
    scales: [RowScale<'static>; 2],
    /// Whether the query rows have no more bits than bf16. Each head has its own answer, so that
    /// its bits do not depend on which others it is met with.
    is_bf16: bool,
}

impl Lanes {
    /// Nothing seen yet by query rows with these biases; see [`Self::set_scales`].
    pub(crate) fn new(q: &[f32], bias: &[f32], scales: [RowScale<'static>; 2]) -> Self {
        let zero = [0.0; LANES_MAX];
        let is_bf16 = q.iter().all(|value| value.to_bits() << 16 == 0);
        let mut lanes = Self { bias: zero, max: [f32::MIN; LANES_MAX], sum: zero, scales, is_bf16 };
        for (lanes, bias) in lanes.bias.chunks_mut(tokens_of(bias.len())).zip(bias) {
            lanes.fill(*bias);
        }
        lanes
    }

    /// Rows of K and V are multiplied with these from now on.
    pub(crate) fn set_scales(&mut self, scales: [RowScale<'static>; 2]) {
        self.scales = scales;
    }

    /// Maximum and sum of one of so many rows.
    pub(crate) fn running(&self, row: usize, rows: usize) -> Running {
        let tokens = tokens_of(rows);
        let sum: f32 = self.sum[row * tokens..][..tokens].iter().sum();
        // Where nothing weighs, nothing was seen.
        if sum == 0.0 { Running::EMPTY } else { Running { max: self.max[row * tokens], sum } }
    }
}

/// A strip, and the query rows that meet it.
pub(crate) struct Meeting<'a> {
    pub(crate) strip: &'a Strip<'a>,
    /// Those behind it, which may be empty.
    pub(crate) next: [&'a Strip<'a>; 2],
    pub(crate) layouts: [&'a RowLayout; 2],
    /// Query rows of a kv head: such a number as [`Kernels::has_pieces`] takes.
    pub(crate) rows: usize,
    /// The rows, `q_stride` apart, head by head.
    pub(crate) q: &'a [f32],
    pub(crate) q_stride: usize,
    /// What scores are multiplied with.
    pub(crate) scale: f32,
    /// Whether anyone has use for all bits of a weight.
    pub(crate) exact: bool,
    /// By head.
    pub(crate) lanes: &'a mut [Lanes],
    /// Of the piece at hand; multiplied by the scales of V in the end.
    pub(crate) weights: &'a mut Weights,
    /// Sums so far, `out_stride` apart, head by head.
    pub(crate) out: &'a mut [f32],
    pub(crate) out_stride: usize,
}

impl Meeting<'_> {
    /// Whether products of bf16 are worth it. With fewer rows memory is waited for, and gives less
    /// when scores take less time (`docs/performance.md`).
    fn has_use_for_bf16(&self) -> bool {
        let k = self.layouts[0];
        k.encoding() == Encoding::Bf16Pairs && (self.rows == ROWS_MAX || k.dim() <= 2 * GROUP)
    }

    /// What the loops rely on.
    fn check(&self) {
        let Strip { heads, tokens, planes } = self.strip;
        assert!(*heads > 0 && *tokens > 0, "a strip has rows");
        for (plane, layout) in planes.iter().zip(self.layouts) {
            let last = (heads - 1) * plane.per_head + (tokens - 1) * plane.stride;
            let fits = plane.bytes == layout.bytes() && last + plane.bytes <= plane.rows.len();
            assert!(fits && layout.dim().is_multiple_of(GROUP), "rows lie inside their strip");
        }
        let [k, v] = self.layouts.map(RowLayout::dim);
        let all = heads * self.rows;
        assert!(
            has_rows(self.rows)
                && self.lanes.len() >= *heads
                && self.q_stride >= k
                && self.q.len() >= all * self.q_stride
                && self.out_stride >= v
                && self.out_stride.is_multiple_of(LANES_MAX)
                && self.out.len() >= all * self.out_stride,
            "query and output rows lie inside their slices"
        );
    }
}

/// One of a strip: [`PIECE`] tokens of a head, or fewer.
pub(crate) struct Piece {
    head: usize,
    tokens: usize,
    /// Where K and V begin, and where those that are wanted soon do.
    begins: [*const u8; 2],
    soon: [*const u8; 2],
}

/// What takes a piece of a strip that was checked.
pub(crate) type Loop = unsafe fn(&mut Meeting<'_>, &Piece);

/// The loops of a CPU.
#[derive(Clone, Copy)]
pub(crate) struct Loops {
    pub(super) table: &'static Table,
    /// That over K of [`Encoding::Bf16Pairs`] for queries of bf16, if the CPU has such products.
    pub(super) weigh_bf16: Option<Loop>,
}

/// The loops of one instruction set, by encoding. Calling one is sound only on a CPU that has it.
pub(crate) struct Table {
    /// Scores and weighs a piece.
    pub(super) weigh: [Loop; Encoding::COUNT],
    /// Adds its values by their weights.
    pub(super) sum: [Loop; Encoding::COUNT],
}

/// Pieces of so many bytes of K at most are asked for two ahead: one is over too soon.
const BYTES_AHEAD: usize = 4 << 10;

impl Kernels {
    /// Whether so many query rows may meet pieces of rows of these layouts.
    pub(crate) fn has_pieces(self, rows: usize, layouts: [&RowLayout; 4]) -> bool {
        let is_whole = |rows: &RowLayout| rows.dim().is_multiple_of(GROUP);
        self.pieces.is_some() && has_rows(rows) && layouts.into_iter().all(is_whole)
    }

    /// Lets query rows meet a strip, where [`Self::has_pieces`] has said so.
    pub(crate) fn meet_strip(self, args: &mut Meeting<'_>) {
        let Some(Loops { table, weigh_bf16 }) = self.pieces else {
            return;
        };
        args.check();
        let [k, v] = args.layouts.map(RowLayout::encoding);
        let (weigh, sum) = (of_encoding(&table.weigh, k), of_encoding(&table.sum, v));
        let weigh_bf16 = weigh_bf16.filter(|_| args.has_use_for_bf16()).unwrap_or(weigh);
        let (strip, [next, last]) = (args.strip, args.next);
        let mut soon = Places::new([strip, next, last]);
        soon.next();
        if strip.planes[0].bytes * PIECE <= BYTES_AHEAD {
            soon.next();
        }
        let mut place = (0, 0);
        while place.0 < strip.heads {
            let begins = strip.begins(place);
            let piece = Piece {
                head: place.0,
                tokens: (strip.tokens - place.1).min(PIECE),
                begins,
                soon: soon.next().unwrap_or(begins),
            };
            let weigh = if args.lanes[place.0].is_bf16 { weigh_bf16 } else { weigh };
            // SAFETY: the CPU has the instruction set, by `Self::of`. The strip was checked, and
            // the piece is one of it.
            unsafe { weigh(args, &piece) };
            // SAFETY: as above.
            unsafe { sum(args, &piece) };
            place = strip.behind(place);
        }
    }
}

/// Instantiates the loops for one vector type, behind the attributes given.
macro_rules! table {
    ([$(#[$attribute:meta])*] $simd:expr) => {
        /// The loops over pieces.
        pub(super) static PIECES: super::piece::Table = {
            use super::piece::{self, Meeting, Piece, Table};
            use super::stored::Stored;

            $(#[$attribute])*
            unsafe fn weigh<E: Stored>(args: &mut Meeting<'_>, piece: &Piece) {
                // SAFETY: the condition is passed on.
                unsafe { piece::weigh::<_, E>($simd, args, piece) };
            }
            $(#[$attribute])*
            unsafe fn weigh_e4m3(args: &mut Meeting<'_>, piece: &Piece) {
                // SAFETY: the condition is passed on.
                unsafe { piece::weigh_e4m3($simd, args, piece) };
            }
            $(#[$attribute])*
            unsafe fn sum<E: Stored>(args: &mut Meeting<'_>, piece: &Piece) {
                // SAFETY: the condition is passed on.
                unsafe { piece::sum::<_, E>($simd, args, piece) };
            }
            $(#[$attribute])*
            unsafe fn sum_e4m3(args: &mut Meeting<'_>, piece: &Piece) {
                // SAFETY: the condition is passed on.
                unsafe { piece::sum_e4m3($simd, args, piece) };
            }
            Table {
                weigh: super::table::each!(weigh, weigh_e4m3),
                sum: super::table::each!(sum, sum_e4m3),
            }
        };
    };
}
pub(super) use table;
