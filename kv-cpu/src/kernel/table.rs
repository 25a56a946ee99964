//! The loops as a table of functions, one for each instruction set.
use super::ahead::Ahead;
use super::quant;
use super::{Scores, Softmax, Sums, TILE, TileRows};
use crate::encoding::{Encoding, RowLayout};

type Decode = unsafe fn(&RowLayout, &[u8], &mut [f32]);
type Encode = unsafe fn(&[f32], &mut [u8]);
type Convert = unsafe fn(&[u8], &mut [u8]);
/// The last is fetched meanwhile.
type CopyPast = unsafe fn(&[u8], &mut [u8], &[u8]);

/// The kernels of one instruction set. Calling one is sound only on a CPU that has the set.
pub(crate) struct Table {
    pub(super) tokens: usize,
    pub(super) scores: [unsafe fn(&mut Scores<'_>, &mut Ahead<'_>); Encoding::COUNT],
    pub(super) sums: [unsafe fn(&mut Sums<'_>, &mut Ahead<'_>); Encoding::COUNT],
    pub(super) decode: [Decode; Encoding::COUNT],
    /// By element type.
    pub(super) encode: [Encode; 3],
    pub(super) row_scales: unsafe fn(&TileRows<'_>, &RowLayout) -> [f32; TILE],
    /// With shorter exponentials, and with exact ones.
    pub(super) softmax: [unsafe fn(&mut Softmax<'_>, &mut Ahead<'_>); 2],
    pub(super) combine: unsafe fn(&mut [f32], f32, &[f32], f32),
    pub(super) scale: unsafe fn(&mut [f32], f32),
    pub(super) split_pairs: unsafe fn(&mut [f32]),
    pub(super) join_pairs: unsafe fn(&mut [f32]),
    /// From an element type to another.
    pub(super) convert: [[Convert; 3]; 3],
    /// The same past the caches.
    pub(super) convert_past: [[CopyPast; 3]; 3],
    pub(super) copy_past: CopyPast,
    pub(super) fence: unsafe fn(),
    pub(super) encode_row: quant::EncodeRow,
}

/// A kernel for every encoding, in the order of [`Encoding`].
macro_rules! each {
    ($kernel:ident, $of_e4m3:expr) => {{
        use crate::kernel::codes::{L3, L4, L6, Lloyd, Nvfp4, Q4Block, Q8Block};
        use crate::kernel::stored::{Bf16, Bf16Pairs, E5m2, F16, F32, Int8};
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
    }};
}

/// Instantiates the loops for one vector type, behind the attributes given.
macro_rules! table {
    ([$(#[$attribute:meta])*] $simd:expr) => {
        /// The loops, for this instruction set.
        pub(super) static TABLE: super::table::Table = {
            use super::stored::{Bf16, E4m3, F16, F32, FiniteE4m3, Plain, Stored};
            use super::table::Table;
            use super::{
                Ahead, Scores, Softmax, Sums, TILE, TileRows, body, scores, sums, tile,
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
            fn convert<A: Plain, B: Plain>(from: &[u8], to: &mut [u8]) {
                body::convert::<_, A, B>($simd, from, to);
            }
            $(#[$attribute])*
            fn convert_past<A: Plain, B: Plain>(from: &[u8], to: &mut [u8], ahead: &[u8]) {
                body::convert_past::<_, A, B>($simd, from, to, ahead);
            }
            $(#[$attribute])*
            fn copy_past(from: &[u8], to: &mut [u8], ahead: &[u8]) {
                body::copy_past($simd, from, to, ahead)
            }
            $(#[$attribute])*
            fn fence() {
                super::simd::Simd::fence($simd);
            }
            /// By the element type of what is read, then by that of what is written.
            macro_rules! pairs {
                ($kernel:ident) => {
                    [
                        [$kernel::<F32, F32>, $kernel::<F32, F16>, $kernel::<F32, Bf16>],
                        [$kernel::<F16, F32>, $kernel::<F16, F16>, $kernel::<F16, Bf16>],
                        [$kernel::<Bf16, F32>, $kernel::<Bf16, F16>, $kernel::<Bf16, Bf16>],
                    ]
                };
            }
            Table {
                tokens: super::simd::tokens($simd),
                scores: super::table::each!(scores, scores_of_e4m3),
                sums: super::table::each!(sums, sums_of_e4m3),
                decode: super::table::each!(decode, decode::<E4m3>),
                encode: [encode::<F32>, encode::<F16>, encode::<Bf16>],
                row_scales,
                softmax: [softmax::<false>, softmax::<true>],
                combine,
                scale,
                split_pairs,
                join_pairs,
                convert: pairs!(convert),
                convert_past: pairs!(convert_past),
                copy_past,
                fence,
                encode_row,
            }
        };
    };
}
pub(super) use {each, table};
