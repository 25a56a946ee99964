//! Kernels: the inner loops, one table of them an instruction set.
//!
//! [`scores`], [`sums`] and [`body`] hold each loop once, [`stored`] and [`codes`] each encoding
//! once, written in the primitives of [`simd`]; the other files here supply the primitives and
//! instantiate the loops behind their target features. [`piece`] and [`stream`] have loops of their
//! own for the heads of one query, [`matrix`] multiplies whole tiles where a unit for that exists.
//! [`Kernels`] is the safe way in: arguments are slices whose bounds each kernel asserts once.
//! Knows nothing of plans, blocks or threads.
mod ahead;
mod body;
mod codes;
mod convert;
#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(
        dead_code,
        unused_imports,
        unused_macros,
        reason = "no other architecture has a unit, but tests emulate one"
    )
)]
mod matrix;
#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(
        dead_code,
        unused_imports,
        unused_macros,
        reason = "no other architecture has vectors of sixteen, but tests emulate them"
    )
)]
mod piece;
mod quant;
mod rows;
mod scores;
mod simd;
mod stored;
mod stream;
mod sums;
mod table;
mod tile;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(test)]
mod emulated;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;
#[cfg(test)]
mod tests;

pub(crate) use ahead::{Ahead, Runs};
pub(crate) use convert::PastCaches;
pub(crate) use matrix::{BLOCK, Columns, Matrix, Memory, Queries, QueryShape, StoredRows, VISIT};
pub(crate) use piece::{HeadRows, Lanes, Meeting, PIECE, Strip, Weights};
pub(crate) use rows::TileRows;
pub(crate) use simd::LANES_MAX;
pub(crate) use stored::GROUP;
pub(crate) use stream::{Part, Stream};

#[cfg(target_arch = "x86_64")]
pub(crate) use matrix::amx::is_available as has_amx;

use crate::encoding::{Element, Encoding, RowLayout};
use crate::isa::Isa;
use crate::read_ahead::ReadAhead;
use table::{Table, table};

/// Most tokens that are scored, weighed and summed together.
pub(crate) const TILE: usize = 128;
/// Query rows of a kv head that wait for memory more than they compute.
pub(crate) const ROWS_THAT_WAIT: usize = 2;
/// Query rows that share each load of a K or V vector.
pub(crate) const ROWS: usize = 4;

/// What the decoded values of a row are multiplied with.
#[derive(Debug, Clone, Copy)]
pub(crate) enum RowScale<'a> {
    /// The same for every row.
    Given(f32),
    /// The f16 behind the codes of each row.
    Stored,
    /// By token of the tile.
    Each(&'a [f32; TILE]),
}

/// Dot products of query rows with the tokens of a tile.
pub(crate) struct Scores<'a> {
    /// Query rows, any number.
    pub(crate) rows: usize,
    /// The rows, `stride` apart, zero from `dim` to the next multiple of [`LANES_MAX`].
    pub(crate) q: &'a [f32],
    pub(crate) stride: usize,
    /// Encoded K rows of the tile.
    pub(crate) k: &'a TileRows<'a>,
    pub(crate) layout: &'a RowLayout,
    pub(crate) scale: RowScale<'a>,
    /// Tokens of the tile to score: `begin..end`.
    pub(crate) range: (usize, usize),
    /// Scores, [`TILE`] a query row.
    pub(crate) out: &'a mut [f32],
}

/// Weighted sums of V rows, added to output rows.
pub(crate) struct Sums<'a> {
    /// Output rows, any number.
    pub(crate) rows: usize,
    /// Weights, [`TILE`] an output row; multiplied by the scales of the tokens of the range.
    pub(crate) weights: &'a mut [f32],
    /// Encoded V rows of the tile.
    pub(crate) v: &'a TileRows<'a>,
    pub(crate) layout: &'a RowLayout,
    pub(crate) scale: RowScale<'a>,
    /// Tokens of the tile to add: `begin..end`.
    pub(crate) range: (usize, usize),
    /// The rows, `stride` apart, a multiple of [`LANES_MAX`].
    pub(crate) out: &'a mut [f32],
    pub(crate) stride: usize,
}

/// Running maximum and sum of one query row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Running {
    pub(crate) max: f32,
    pub(crate) sum: f32,
}

impl Running {
    /// Nothing seen yet.
    pub(crate) const EMPTY: Self = Self { max: f32::NEG_INFINITY, sum: 0.0 };
}

/// One step of the online softmax over the scores of query rows.
pub(crate) struct Softmax<'a> {
    /// [`TILE`] scores a row; those of `range` become weights relative to the row's new maximum.
    pub(crate) scores: &'a mut [f32],
    pub(crate) range: (usize, usize),
    /// By row, added to every score before it is scaled.
    pub(crate) bias: &'a [f32],
    pub(crate) scale: f32,
    pub(crate) cap: Option<f32>,
    /// Whether anyone has use for all bits of a weight.
    pub(crate) exact: bool,
    /// By row; their number is that of the rows.
    pub(crate) running: &'a mut [Running],
    /// Sums so far, `stride` apart: brought to the new maximum.
    pub(crate) out: &'a mut [f32],
    pub(crate) stride: usize,
}

/// A table whose instruction set this CPU has.
#[derive(Clone, Copy)]
pub(crate) struct Kernels {
    loops: &'static Table,
    /// Where the set has a unit that multiplies matrices.
    matrix: Option<&'static matrix::Table>,
    stream: Option<&'static stream::Table>,
    pieces: Option<&'static piece::Loops>,
    read_ahead: ReadAhead,
}

impl std::fmt::Debug for Kernels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kernels").finish_non_exhaustive()
    }
}

impl Kernels {
    /// The kernels of `isa`, which read ahead so; `None` when this CPU lacks it.
    pub(crate) fn of(isa: Isa, read_ahead: ReadAhead) -> Option<Self> {
        if !isa.is_available() {
            return None;
        }
        let with = |loops, stream, pieces| Self { loops, matrix: None, stream, pieces, read_ahead };
        Some(match isa {
            Isa::Scalar => with(&scalar::TABLE, None, None),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => with(&avx2::TABLE, Some(&avx2::STREAM), None),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => with(&avx512::TABLE, Some(&avx512::STREAM), Some(&avx512::LOOPS)),
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => {
                let matrix = Some(&matrix::amx::TABLE);
                Self { matrix, ..Self::of(Isa::Avx512, read_ahead)? }
            }
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => with(&neon::TABLE, Some(&neon::STREAM), None),
            _ => return None,
        })
    }

    /// Sixteen lanes that run on any CPU.
    #[cfg(test)]
    pub(crate) fn emulated() -> Self {
        Self {
            loops: &emulated::TABLE,
            matrix: None,
            stream: Some(&emulated::STREAM),
            pieces: Some(&emulated::LOOPS),
            read_ahead: ReadAhead::all(crate::read_ahead::Fetch::First),
        }
    }

    /// The same with blocks of matrices, and without what is put into words.
    #[cfg(test)]
    pub(crate) fn emulated_matrix() -> Self {
        let (matrix, pieces) = (Some(&matrix::emulated::TABLE), Some(&emulated::PIECES));
        Self { matrix, pieces, ..Self::emulated() }
    }

    /// Tokens of a tile for loops over vectors: [`TILE`] or fewer.
    pub(crate) fn tokens(self) -> usize {
        self.loops.tokens
    }
    /// Scores a tile of K. Asks for some of `ahead` meanwhile, as the next two do.
    pub(crate) fn scores(self, args: &mut Scores<'_>, ahead: &mut Ahead<'_>) {
        let kernel = of_encoding(&self.loops.scores, args.layout.encoding());
        // SAFETY: the CPU has the instruction set, by `Self::of`.
        unsafe { kernel(args, ahead) }
    }
    /// Adds a tile of V.
    pub(crate) fn sums(self, args: &mut Sums<'_>, ahead: &mut Ahead<'_>) {
        let kernel = of_encoding(&self.loops.sums, args.layout.encoding());
        // SAFETY: the CPU has the instruction set, by `Self::of`.
        unsafe { kernel(args, ahead) }
    }
    /// Turns scores into weights.
    pub(crate) fn softmax(self, args: &mut Softmax<'_>, ahead: &mut Ahead<'_>) {
        let [short, exact] = self.loops.softmax;
        let kernel = if args.exact { exact } else { short };
        // SAFETY: the CPU has the instruction set, by `Self::of`.
        unsafe { kernel(args, ahead) }
    }
    /// Decodes a row, short of its own scale, which is `kv_quant::row::decode_row` with a scale of
    /// 1 to the bit.
    pub(crate) fn decode(self, layout: &RowLayout, from: &[u8], to: &mut [f32]) {
        let kernel = of_encoding(&self.loops.decode, layout.encoding());
        // SAFETY: the CPU has the instruction set, by `Self::of`.
        unsafe { kernel(layout, from, to) }
    }
    /// The f16 scales behind the rows of a tile.
    pub(crate) fn row_scales(self, rows: &TileRows<'_>, layout: &RowLayout) -> [f32; TILE] {
        // SAFETY: the CPU has the instruction set, by `Self::of`.
        unsafe { (self.loops.row_scales)(rows, layout) }
    }
    /// Encodes all of `from`, rounded to nearest even.
    pub(crate) fn encode(self, element: Element, from: &[f32], to: &mut [u8]) {
        let kernel = of_element(self.loops.encode, element);
        // SAFETY: the CPU has the instruction set, by `Self::of`.
        unsafe { kernel(from, to) }
    }
    /// `a = a * x + b * y`, value by value.
    pub(crate) fn combine(self, a: &mut [f32], x: f32, b: &[f32], y: f32) {
        // SAFETY: the CPU has the instruction set, by `Self::of`.
        unsafe { (self.loops.combine)(a, x, b, y) }
    }
    /// `a = a * x`, value by value.
    pub(crate) fn scale(self, a: &mut [f32], x: f32) {
        // SAFETY: the CPU has the instruction set, by `Self::of`.
        unsafe { (self.loops.scale)(a, x) }
    }

    /// Brings a row into the order of [`Encoding::Bf16Pairs`].
    pub(crate) fn split_pairs(self, row: &mut [f32]) {
        // SAFETY: the CPU has the instruction set, by `Self::of`.
        unsafe { (self.loops.split_pairs)(row) }
    }
    /// Brings a row back into its own order.
    pub(crate) fn join_pairs(self, row: &mut [f32]) {
        // SAFETY: the CPU has the instruction set, by `Self::of`.
        unsafe { (self.loops.join_pairs)(row) }
    }
}

/// What is there for an element type.
fn of_element<K>([f32, f16, bf16]: [K; 3], element: Element) -> K {
    match element {
        Element::F32 => f32,
        Element::F16 => f16,
        Element::Bf16 => bf16,
    }
}

/// The kernel of an encoding.
fn of_encoding<K: Copy>(kernels: &[K; Encoding::COUNT], encoding: Encoding) -> K {
    #[expect(clippy::indexing_slicing, reason = "an entry for every encoding")]
    kernels[encoding.index()]
}
