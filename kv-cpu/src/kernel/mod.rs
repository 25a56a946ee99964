//! Kernels: the inner loops, one table of them an instruction set.
//!
//! [`body`] holds each loop once, written in the primitives of [`simd`]; the other files here supply
//! the primitives and instantiate the loops behind their target features. [`Kernels`] is the safe way
//! in: arguments are slices whose bounds each kernel asserts once. Knows nothing of plans, blocks or
//! threads.
mod body;
mod simd;

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

pub(crate) use simd::LANES_MAX;

use crate::encoding::Encoding;
use crate::isa::Isa;

/// Tokens that are scored, weighed and summed together. A tile of K, one of V and what is fetched ahead
/// should fit the first cache: 64 was slower for decoding by a tenth, and no better for prefill.
pub(crate) const TILE: usize = 32;
/// Query rows that share each load of a K or V vector.
pub(crate) const ROWS: usize = 4;

/// Dot products of a few query rows with the tokens of a tile.
pub(crate) struct Scores<'a> {
    /// Query rows: 1, 2 or [`ROWS`].
    pub(crate) rows: usize,
    /// The rows, `stride` apart, zero from `dim` to the next multiple of [`LANES_MAX`].
    pub(crate) q: &'a [f32],
    pub(crate) stride: usize,
    pub(crate) dim: usize,
    /// Encoded K rows of the tile.
    pub(crate) k: &'a [&'a [u8]],
    /// Tokens of the tile to score: `begin..end`.
    pub(crate) range: (usize, usize),
    /// Scores, [`TILE`] a query row.
    pub(crate) out: &'a mut [f32],
    /// Rows that are wanted soon, fetched one a token; may be empty.
    pub(crate) ahead: &'a [&'a [u8]],
}

/// Weighted sums of V rows, added to a few output rows.
pub(crate) struct Sums<'a> {
    /// Output rows: 1, 2 or [`ROWS`].
    pub(crate) rows: usize,
    /// Weights, [`TILE`] an output row.
    pub(crate) weights: &'a [f32],
    /// Encoded V rows of the tile.
    pub(crate) v: &'a [&'a [u8]],
    /// Tokens of the tile to add: `begin..end`.
    pub(crate) range: (usize, usize),
    pub(crate) dim: usize,
    /// The rows, `stride` apart, a multiple of [`LANES_MAX`].
    pub(crate) out: &'a mut [f32],
    pub(crate) stride: usize,
    /// Rows that are wanted soon, fetched one a token; may be empty.
    pub(crate) ahead: &'a [&'a [u8]],
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

/// One step of the online softmax over the scores of one query row.
pub(crate) struct Softmax<'a> {
    /// [`TILE`] scores; those of `range` become weights relative to the new maximum.
    pub(crate) scores: &'a mut [f32],
    pub(crate) range: (usize, usize),
    pub(crate) scale: f32,
    pub(crate) cap: Option<f32>,
    pub(crate) running: &'a mut Running,
}

/// One function an encoding.
#[derive(Clone, Copy)]
pub(crate) struct PerEncoding<T> {
    f32: T,
    f16: T,
    bf16: T,
}

impl<T: Copy> PerEncoding<T> {
    fn get(&self, encoding: Encoding) -> T {
        match encoding {
            Encoding::F32 => self.f32,
            Encoding::F16 => self.f16,
            Encoding::Bf16 => self.bf16,
        }
    }
}

type Decode = unsafe fn(&[u8], &mut [f32]);
type Encode = unsafe fn(&[f32], &mut [u8]);

/// The kernels of one instruction set. Calling one is sound only on a CPU that has the set.
pub(crate) struct Table {
    scores: PerEncoding<unsafe fn(&mut Scores<'_>)>,
    sums: PerEncoding<unsafe fn(&mut Sums<'_>)>,
    decode: PerEncoding<Decode>,
    encode: PerEncoding<Encode>,
    softmax: unsafe fn(&mut Softmax<'_>) -> f32,
    combine: unsafe fn(&mut [f32], f32, &[f32], f32),
    scale: unsafe fn(&mut [f32], f32),
}

/// A table whose instruction set this CPU has.
#[derive(Clone, Copy)]
pub(crate) struct Kernels(&'static Table);

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
        Some(Self(match isa {
            Isa::Scalar => &scalar::TABLE,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &avx2::TABLE,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => &avx512::TABLE,
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => &neon::TABLE,
            _ => return None,
        }))
    }

    /// Sixteen lanes that run on any CPU.
    #[cfg(test)]
    pub(crate) fn emulated() -> Self {
        Self(&emulated::TABLE)
    }

    /// Scores a tile of K in `encoding`.
    pub(crate) fn scores(self, encoding: Encoding, args: &mut Scores<'_>) {
        let kernel = self.0.scores.get(encoding);
        // SAFETY: the CPU has the instruction set, by `Self::of`.
        unsafe { kernel(args) }
    }
    /// Adds a tile of V in `encoding`.
    pub(crate) fn sums(self, encoding: Encoding, args: &mut Sums<'_>) {
        let kernel = self.0.sums.get(encoding);
        // SAFETY: the CPU has the instruction set, by `Self::of`.
        unsafe { kernel(args) }
    }
    /// Turns scores into weights; returns the factor that output rows summed so far need.
    pub(crate) fn softmax(self, args: &mut Softmax<'_>) -> f32 {
        // SAFETY: the CPU has the instruction set, by `Self::of`.
        unsafe { (self.0.softmax)(args) }
    }
    /// Decodes as many values as `to` has room for.
    pub(crate) fn decode(self, encoding: Encoding, from: &[u8], to: &mut [f32]) {
        let kernel = self.0.decode.get(encoding);
        // SAFETY: the CPU has the instruction set, by `Self::of`.
        unsafe { kernel(from, to) }
    }
    /// Encodes all of `from`, rounded to nearest even.
    pub(crate) fn encode(self, encoding: Encoding, from: &[f32], to: &mut [u8]) {
        let kernel = self.0.encode.get(encoding);
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

    /// Copies a run of values from one encoding to another, through `f32` where they differ.
    pub(crate) fn convert(self, from: (Encoding, &[u8]), to: (Encoding, &mut [u8])) {
        const CHUNK: usize = 256;
        let ((from_encoding, from), (to_encoding, to)) = (from, to);
        if from_encoding == to_encoding {
            to.copy_from_slice(from);
            return;
        }
        let mut values = [0.0; CHUNK];
        let from = from.chunks(CHUNK.saturating_mul(from_encoding.size()));
        let to = to.chunks_mut(CHUNK.saturating_mul(to_encoding.size()));
        for (from, to) in from.zip(to) {
            let len = to.len().checked_div(to_encoding.size()).unwrap_or(0);
            let Some(values) = values.get_mut(..len) else {
                continue;
            };
            self.decode(from_encoding, from, values);
            self.encode(to_encoding, values, to);
        }
    }
}

/// Instantiates the loops of [`body`] for one vector type, behind the attributes given.
macro_rules! table {
    ([$(#[$attribute:meta])*] $simd:expr) => {
        /// The loops, for this instruction set.
        pub(super) static TABLE: super::Table = {
            use super::body;
            use super::simd::{Bf16, F16, F32};
            use super::{PerEncoding, Scores, Softmax, Sums, Table};
            super::table! { @encoding [$(#[$attribute])*] $simd;
                scores_f32 sums_f32 decode_f32 encode_f32 F32;
                scores_f16 sums_f16 decode_f16 encode_f16 F16;
                scores_bf16 sums_bf16 decode_bf16 encode_bf16 Bf16;
            }
            $(#[$attribute])*
            fn softmax(args: &mut Softmax<'_>) -> f32 {
                body::softmax($simd, args)
            }
            $(#[$attribute])*
            fn combine(a: &mut [f32], x: f32, b: &[f32], y: f32) {
                body::combine($simd, a, x, b, y)
            }
            $(#[$attribute])*
            fn scale(a: &mut [f32], x: f32) {
                body::scale($simd, a, x)
            }
            Table {
                scores: PerEncoding { f32: scores_f32, f16: scores_f16, bf16: scores_bf16 },
                sums: PerEncoding { f32: sums_f32, f16: sums_f16, bf16: sums_bf16 },
                decode: PerEncoding { f32: decode_f32, f16: decode_f16, bf16: decode_bf16 },
                encode: PerEncoding { f32: encode_f32, f16: encode_f16, bf16: encode_bf16 },
                softmax,
                combine,
                scale,
            }
        };
    };
    (@encoding [$(#[$attribute:meta])*] $simd:expr; ) => {};
    (@encoding [$(#[$attribute:meta])*] $simd:expr;
        $scores:ident $sums:ident $decode:ident $encode:ident $stored:ty; $($rest:tt)*) => {
        $(#[$attribute])*
        fn $scores(args: &mut Scores<'_>) {
            body::scores::<_, $stored>($simd, args)
        }
        $(#[$attribute])*
        fn $sums(args: &mut Sums<'_>) {
            body::sums::<_, $stored>($simd, args)
        }
        $(#[$attribute])*
        fn $decode(from: &[u8], to: &mut [f32]) {
            body::decode::<_, $stored>($simd, from, to)
        }
        $(#[$attribute])*
        fn $encode(from: &[f32], to: &mut [u8]) {
            body::encode::<_, $stored>($simd, from, to)
        }
        super::table! { @encoding [$(#[$attribute])*] $simd; $($rest)* }
    };
}
use table;
