//! Kernels: the inner loops, one table of them an instruction set.
//!
//! [`scores`], [`sums`] and [`body`] hold each loop once, [`stored`] and [`codes`] each encoding
//! once, written in the primitives of [`simd`]; the other files here supply the primitives and
//! instantiate the loops behind their target features. [`matrix`] multiplies whole tiles where a
//! unit for that exists. [`Kernels`] is the safe way in: arguments are slices whose bounds each
//! kernel asserts once. Knows nothing of plans, blocks or threads.
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
mod quant;
mod rows;
mod scores;
mod simd;
mod stored;
mod sums;
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
pub(crate) use matrix::{BLOCK, Matrix, Memory, Queries, QueryShape, StoredRows, VISIT};
pub(crate) use rows::TileRows;
pub(crate) use simd::LANES_MAX;
pub(crate) use stored::GROUP;

#[cfg(target_arch = "x86_64")]
pub(crate) use matrix::amx::is_available as has_amx;

use crate::encoding::{Element, Encoding, RowLayout};
use crate::isa::Isa;

/// Most tokens that are scored, weighed and summed together.
pub(crate) const TILE: usize = 128;
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

type Decode = unsafe fn(&RowLayout, &[u8], &mut [f32]);
type Encode = unsafe fn(&[f32], &mut [u8]);

/// The kernels of one instruction set. Calling one is sound only on a CPU that has the set.
pub(crate) struct Table {
    tokens: usize,
    scores: [unsafe fn(&mut Scores<'_>, &mut Ahead<'_>); Encoding::COUNT],
    sums: [unsafe fn(&mut Sums<'_>, &mut Ahead<'_>); Encoding::COUNT],
    decode: [Decode; Encoding::COUNT],
    /// By element type.
    encode: [Encode; 3],
    row_scales: unsafe fn(&TileRows<'_>, &RowLayout) -> [f32; TILE],
    /// With shorter exponentials, and with exact ones.
    softmax: [unsafe fn(&mut Softmax<'_>, &mut Ahead<'_>); 2],
    combine: unsafe fn(&mut [f32], f32, &[f32], f32),
    scale: unsafe fn(&mut [f32], f32),
    split_pairs: unsafe fn(&mut [f32]),
    join_pairs: unsafe fn(&mut [f32]),
    copy_past: unsafe fn(&[u8], &mut [u8], &[u8]),
    fence: unsafe fn(),
    encode_row: quant::EncodeRow,
}

/// A table whose instruction set this CPU has.
#[derive(Clone, Copy)]
pub(crate) struct Kernels(&'static Table, Option<&'static matrix::Table>);

impl std::fmt::Debug for Kernels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kernels").finish_non_exhaustive()
    }
}

impl Kernels {
    /// The kernels of `isa`, `None` when this CPU lacks it.
    pub(crate) fn of(isa: Isa) -> Option<Self> {
        if !isa.is_available() {
            return None;
        }
        Some(match isa {
            Isa::Scalar => Self(&scalar::TABLE, None),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Self(&avx2::TABLE, None),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => Self(&avx512::TABLE, None),
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => Self(&avx512::TABLE, Some(&matrix::amx::TABLE)),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => Self(&neon::TABLE, None),
            _ => return None,
        })
    }

    /// Sixteen lanes that run on any CPU.
    #[cfg(test)]
    pub(crate) fn emulated() -> Self {
        Self(&emulated::TABLE, None)
    }

    /// The same, and blocks of matrices.
    #[cfg(test)]
    pub(crate) fn emulated_matrix() -> Self {
        Self(&emulated::TABLE, Some(&matrix::emulated::TABLE))
    }

    /// Tokens of a tile for loops over vectors: [`TILE`] or fewer.
    pub(crate) fn tokens(self) -> usize {
        self.0.tokens
    }
    /// Scores a tile of K. Asks for some of `ahead` meanwhile, as the next two do.
    pub(crate) fn scores(self, args: &mut Scores<'_>, ahead: &mut Ahead<'_>) {
        let kernel = of_encoding(&self.0.scores, args.layout.encoding());
        // SAFETY: the CPU has the instruction set, by `Self::of`.
        unsafe { kernel(args, ahead) }
    }
    /// Adds a tile of V.
    pub(crate) fn sums(self, args: &mut Sums<'_>, ahead: &mut Ahead<'_>) {
        let kernel = of_encoding(&self.0.sums, args.layout.encoding());
        // SAFETY: the CPU has the instruction set, by `Self::of`.
        unsafe { kernel(args, ahead) }
    }
    /// Turns scores into weights.
    pub(crate) fn softmax(self, args: &mut Softmax<'_>, ahead: &mut Ahead<'_>) {
        let [short, exact] = self.0.softmax;
        let kernel = if args.exact { exact } else { short };
        // SAFETY: the CPU has the instruction set, by `Self::of`.
        unsafe { kernel(args, ahead) }
    }
    /// Decodes a row, short of its own scale, which is `kv_quant::row::decode_row` with a scale of
    /// 1 to the bit.
    pub(crate) fn decode(self, layout: &RowLayout, from: &[u8], to: &mut [f32]) {
        let kernel = of_encoding(&self.0.decode, layout.encoding());
        // SAFETY: the CPU has the instruction set, by `Self::of`.
        unsafe { kernel(layout, from, to) }
    }
    /// The f16 scales behind the rows of a tile.
    pub(crate) fn row_scales(self, rows: &TileRows<'_>, layout: &RowLayout) -> [f32; TILE] {
        // SAFETY: the CPU has the instruction set, by `Self::of`.
        unsafe { (self.0.row_scales)(rows, layout) }
    }
    /// Encodes all of `from`, rounded to nearest even.
    pub(crate) fn encode(self, element: Element, from: &[f32], to: &mut [u8]) {
        let [f32, f16, bf16] = self.0.encode;
        let kernel = match element {
            Element::F32 => f32,
            Element::F16 => f16,
            Element::Bf16 => bf16,
        };
        // SAFETY: the CPU has the instruction set, by `Self::of`.
        unsafe { kernel(from, to) }
    }
    /// `a = a * x + b * y`, value by value.
    pub(crate) fn combine(self, a: &mut [f32], x: f32, b: &[f32], y: f32) {
        // SAFETY: the CPU has the instruction set, by `Self::of`.
        unsafe { (self.0.combine)(a, x, b, y) }
    }
    /// `a = a * x`, value by value.
    pub(crate) fn scale(self, a: &mut [f32], x: f32) {
        // SAFETY: the CPU has the instruction set, by `Self::of`.
        unsafe { (self.0.scale)(a, x) }
    }

    /// Brings a row into the order of [`Encoding::Bf16Pairs`].
    pub(crate) fn split_pairs(self, row: &mut [f32]) {
        // SAFETY: the CPU has the instruction set, by `Self::of`.
        unsafe { (self.0.split_pairs)(row) }
    }
    /// Brings a row back into its own order.
    pub(crate) fn join_pairs(self, row: &mut [f32]) {
        // SAFETY: the CPU has the instruction set, by `Self::of`.
        unsafe { (self.0.join_pairs)(row) }
    }
}

/// The kernel of an encoding.
fn of_encoding<K: Copy>(kernels: &[K; Encoding::COUNT], encoding: Encoding) -> K {
    #[expect(clippy::indexing_slicing, reason = "an entry for every encoding")]
    kernels[encoding.index()]
}

/// Instantiates the loops for one vector type, behind the attributes given.
macro_rules! table {
    ([$(#[$attribute:meta])*] $simd:expr) => {
        /// The loops, for this instruction set.
        pub(super) static TABLE: super::Table = {
            use super::codes::{L3, L4, L6, Lloyd, Nvfp4, Q4Block, Q8Block};
            use super::stored::{Bf16, Bf16Pairs, E4m3, E5m2, F16, F32, FiniteE4m3, Int8};
            use super::stored::{Plain, Stored};
            use super::{
                Ahead, Scores, Softmax, Sums, TILE, Table, TileRows, body, scores, sums, tile,
            };
            use crate::encoding::RowLayout;
            use kv_core::KvFormat;

            $(#[$attribute])*
            fn scores<E: Stored>(args: &mut Scores<'_>, ahead: &mut Ahead<'_>) {
                scores::scores::<_, E>($simd, args, ahead);
            }
            $(#[$attribute])*
            fn sums<E: Stored>(args: &mut Sums<'_>, ahead: &mut Ahead<'_>) {
                sums::sums::<_, E>($simd, args, ahead);
            }
            $(#[$attribute])*
            fn scores_of_e4m3(args: &mut Scores<'_>, ahead: &mut Ahead<'_>) {
                if FiniteE4m3::holds($simd, args.k, args.range, args.layout) {
                    scores::scores::<_, FiniteE4m3>($simd, args, ahead);
                } else {
                    scores::scores::<_, E4m3>($simd, args, ahead);
                }
            }
            $(#[$attribute])*
            fn sums_of_e4m3(args: &mut Sums<'_>, ahead: &mut Ahead<'_>) {
                if FiniteE4m3::holds($simd, args.v, args.range, args.layout) {
                    sums::sums::<_, FiniteE4m3>($simd, args, ahead);
                } else {
                    sums::sums::<_, E4m3>($simd, args, ahead);
                }
            }
            $(#[$attribute])*
            fn decode<E: Stored>(layout: &RowLayout, from: &[u8], to: &mut [f32]) {
                body::decode::<_, E>($simd, layout, from, to)
            }
            $(#[$attribute])*
            fn encode<E: Plain>(from: &[f32], to: &mut [u8]) {
                body::encode::<_, E>($simd, from, to)
            }
            $(#[$attribute])*
            fn encode_row(format: KvFormat, inv_scale: f32, values: &[f32], row: &mut [u8]) {
                kv_quant::row::encode_row(format, inv_scale, values, row);
            }
            $(#[$attribute])*
            fn row_scales(rows: &TileRows<'_>, layout: &RowLayout) -> [f32; TILE] {
                tile::row_scales($simd, rows, layout)
            }
            $(#[$attribute])*
            fn softmax<const EXACT: bool>(args: &mut Softmax<'_>, ahead: &mut Ahead<'_>) {
                body::softmax::<_, EXACT>($simd, args, ahead);
            }
            $(#[$attribute])*
            fn combine(a: &mut [f32], x: f32, b: &[f32], y: f32) {
                body::combine($simd, a, x, b, y)
            }
            $(#[$attribute])*
            fn scale(a: &mut [f32], x: f32) {
                body::scale($simd, a, x)
            }
            $(#[$attribute])*
            fn split_pairs(row: &mut [f32]) {
                super::stored::split_pairs($simd, row);
            }
            $(#[$attribute])*
            fn join_pairs(row: &mut [f32]) {
                super::stored::join_pairs($simd, row);
            }
            $(#[$attribute])*
            fn copy_past(from: &[u8], to: &mut [u8], ahead: &[u8]) {
                body::copy_past($simd, from, to, ahead)
            }
            $(#[$attribute])*
            fn fence() {
                super::simd::Simd::fence($simd);
            }
            /// A kernel for every encoding, in the order of `Encoding`.
            macro_rules! each {
                ($kernel:ident, $of_e4m3:expr) => {
                    [
                        $kernel::<F32>,
                        $kernel::<F16>,
                        $kernel::<Bf16>,
                        $of_e4m3,
                        $kernel::<E5m2>,
                        $kernel::<Int8>,
                        $kernel::<Lloyd<L6, false>>,
                        $kernel::<Lloyd<L4, false>>,
                        $kernel::<Lloyd<L3, false>>,
                        $kernel::<Lloyd<L6, true>>,
                        $kernel::<Lloyd<L4, true>>,
                        $kernel::<Lloyd<L3, true>>,
                        $kernel::<Q8Block>,
                        $kernel::<Q4Block>,
                        $kernel::<Nvfp4>,
                        $kernel::<Bf16Pairs>,
                    ]
                };
            }
            Table {
                tokens: super::simd::tokens($simd),
                scores: each!(scores, scores_of_e4m3),
                sums: each!(sums, sums_of_e4m3),
                decode: each!(decode, decode::<E4m3>),
                encode: [encode::<F32>, encode::<F16>, encode::<Bf16>],
                row_scales,
                softmax: [softmax::<false>, softmax::<true>],
                combine,
                scale,
                split_pairs,
                join_pairs,
                copy_past,
                fence,
                encode_row,
            }
        };
    };
}
use table;
