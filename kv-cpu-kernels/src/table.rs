//! The kernels of one instruction set as a table of functions.
use kv_format::KvFormat;

use crate::layout::Encoding;
use crate::pv::Pv;
use crate::qk::Qk;
use crate::rows::KeyRows;
use crate::softmax::Softmax;

pub(crate) type QkFn = unsafe fn(&mut Qk<'_, '_>);
pub(crate) type PvFn = unsafe fn(&mut Pv<'_, '_>);
/// The second argument is the number of floats of a decoded row.
type Decode = unsafe fn(&KeyRows<'_>, usize, &mut [f32]);
type Encode = unsafe fn(&[f32], &mut [u8]);
type Convert = unsafe fn(&[u8], &mut [u8]);
/// The last argument is prefetched meanwhile.
type ConvertNonTemporal = unsafe fn(&[u8], &mut [u8], &[u8]);

/// Lists the encodings whose rows QK and PV decode in registers. Rows of the others are decoded to
/// memory, 16 at a time: 0.7 to 2.0 of the speed, for half of the time to compile the kernels.
const IN_REGISTERS: [Encoding; 9] = [
    Encoding::F32,
    Encoding::F16,
    Encoding::Bf16Pairs,
    Encoding::E4m3,
    Encoding::E5m2,
    Encoding::Int8,
    Encoding::L4,
    Encoding::Q8Block,
    Encoding::Q4Block,
];

/// Returns whether QK and PV of vectors of `lanes` decode rows of an encoding in registers. Vectors
/// of one, the reference, read `f32` and, for the means of blocks, f16.
pub(crate) const fn in_registers(lanes: usize, encoding: Encoding) -> bool {
    let mut i = 0;
    let count = if lanes == 1 { 2 } else { IN_REGISTERS.len() };
    while i < count {
        if IN_REGISTERS[i].index() == encoding.index() {
            return true;
        }
        i += 1;
    }
    false
}

/// Query rows that register tiles exist for.
pub(crate) const TILE_ROWS: [usize; 4] = [1, 2, 4, 8];

/// Tokens of a register tile of QK with `rows` query rows.
pub(crate) const fn tile_tokens(sums: usize, rows: usize) -> usize {
    match sums / rows {
        0 => 1,
        tokens if tokens > 8 => 8,
        tokens => tokens,
    }
}

/// Pairs of vectors of a register tile of PV with `rows` query rows.
pub(crate) const fn tile_pairs(sums: usize, rows: usize) -> usize {
    match sums / (2 * rows) {
        0 => 1,
        pairs if pairs > 4 => 4,
        pairs => pairs,
    }
}

/// Calling an entry is sound only on a CPU that has the instruction set.
pub(crate) struct Table {
    /// Most rows of a register tile.
    pub(crate) rows_max: usize,
    /// By encoding, then by [`TILE_ROWS`]; entries of more than `rows_max` rows are not called.
    /// `None` where rows are decoded first.
    pub(crate) qk: [Option<[QkFn; 4]>; Encoding::COUNT],
    pub(crate) pv: [Option<[PvFn; 4]>; Encoding::COUNT],
    /// The factor that decoded values lack, by encoding.
    pub(crate) factor: [f32; Encoding::COUNT],
    /// Without a soft cap, and with one.
    pub(crate) softmax: [unsafe fn(&mut Softmax<'_>); 2],
    pub(crate) decode: [Decode; Encoding::COUNT],
    pub(crate) row_scales: unsafe fn(&KeyRows<'_>, &mut [f32]),
    /// By element type.
    pub(crate) encode: [Encode; 3],
    pub(crate) encode_row: unsafe fn(KvFormat, f32, &[f32], &mut [u8]),
    pub(crate) combine: unsafe fn(&mut [f32], f32, &[f32], f32),
    pub(crate) scale: unsafe fn(&mut [f32], f32),
    pub(crate) split_pairs: unsafe fn(&mut [f32]),
    pub(crate) join_pairs: unsafe fn(&mut [f32]),
    /// From an element type to another.
    pub(crate) convert: [[Convert; 3]; 3],
    /// The same with non-temporal stores.
    pub(crate) convert_non_temporal: [[ConvertNonTemporal; 3]; 3],
    pub(crate) copy_non_temporal: ConvertNonTemporal,
    pub(crate) fence: unsafe fn(),
}

/// Instantiates the loops for one vector type, under the given attributes.
macro_rules! table {
    ([$(#[$attribute:meta])*] $simd:ty, $witness:expr) => {
        /// The kernels of this instruction set.
        pub(crate) static TABLE: $crate::table::Table = {
            use kv_format::KvFormat;

            use $crate::convert as tensors;
            use $crate::decode::{
                self as rows, Bf16, Bf16Pairs, Decode, E4m3, E5m2, F16, F32, Int8, L3, L4, L6,
                Lloyd, Nvfp4, Plain, Q4Block, Q8Block,
            };
            use $crate::layout::Encoding;
            use $crate::load::Decoded;
            use $crate::pv::{self, Pv};
            use $crate::qk::{self, Floats, Qk};
            use $crate::rows::KeyRows;
            use $crate::simd::Simd;
            use $crate::softmax::{self, Softmax};
            use $crate::table::{PvFn, QkFn, Table, in_registers, tile_pairs, tile_tokens};

            const SUMS: usize = <$simd as Simd>::SUMS;
            const LANES: usize = <$simd as Simd>::LANES;

            /// A kernel for every encoding, in the order of `Encoding`.
            macro_rules! each {
                ($kernel:ident) => {
                    [
                        $kernel::<F32>(Encoding::F32),
                        $kernel::<F16>(Encoding::F16),
                        $kernel::<Bf16>(Encoding::Bf16),
                        $kernel::<E4m3>(Encoding::E4m3),
                        $kernel::<E5m2>(Encoding::E5m2),
                        $kernel::<Int8>(Encoding::Int8),
                        $kernel::<Lloyd<L6, false>>(Encoding::L6),
                        $kernel::<Lloyd<L4, false>>(Encoding::L4),
                        $kernel::<Lloyd<L3, false>>(Encoding::L3),
                        $kernel::<Lloyd<L6, true>>(Encoding::L6Group32),
                        $kernel::<Lloyd<L4, true>>(Encoding::L4Group32),
                        $kernel::<Lloyd<L3, true>>(Encoding::L3Group32),
                        $kernel::<Q8Block>(Encoding::Q8Block),
                        $kernel::<Q4Block>(Encoding::Q4Block),
                        $kernel::<Nvfp4>(Encoding::Nvfp4),
                        $kernel::<Bf16Pairs>(Encoding::Bf16Pairs),
                    ]
                };
            }
            $(#[$attribute])*
            fn qk_rows<E: Decode, const R: usize, const T: usize>(x: &mut Qk<'_, '_>) {
                qk::qk::<_, R, T>(Floats::<_, 1>(Decoded::<$simd, E>::new($witness)), x);
            }
            const fn qk_of<E: Decode>(encoding: Encoding) -> Option<[QkFn; 4]> {
                if !in_registers(LANES, encoding) {
                    return None;
                }
                Some([
                    qk_rows::<E, 1, { tile_tokens(SUMS, 1) }>,
                    qk_rows::<E, 2, { tile_tokens(SUMS, 2) }>,
                    qk_rows::<E, 4, { tile_tokens(SUMS, 4) }>,
                    if SUMS < 16 {
                        qk_rows::<E, 4, { tile_tokens(SUMS, 4) }>
                    } else {
                        qk_rows::<E, 8, 2>
                    },
                ])
            }
            $(#[$attribute])*
            fn pv_rows<E: Decode, const R: usize, const P: usize>(x: &mut Pv<'_, '_>) {
                pv::pv::<_, R, P>(Decoded::<$simd, E>::new($witness), x);
            }
            const fn pv_of<E: Decode>(encoding: Encoding) -> Option<[PvFn; 4]> {
                if !in_registers(LANES, encoding) {
                    return None;
                }
                Some([
                    pv_rows::<E, 1, { tile_pairs(SUMS, 1) }>,
                    pv_rows::<E, 2, { tile_pairs(SUMS, 2) }>,
                    pv_rows::<E, 4, { tile_pairs(SUMS, 4) }>,
                    if SUMS < 16 {
                        pv_rows::<E, 4, { tile_pairs(SUMS, 4) }>
                    } else {
                        pv_rows::<E, 8, 1>
                    },
                ])
            }
            const fn factor_of<E: Decode>(encoding: Encoding) -> f32 {
                if in_registers(LANES, encoding) { E::FACTOR } else { 1.0 }
            }
            $(#[$attribute])*
            fn softmax<const CAP: bool>(x: &mut Softmax<'_>) {
                softmax::softmax::<_, CAP>($witness, x);
            }
            $(#[$attribute])*
            fn decode<E: Decode>(from: &KeyRows<'_>, padded: usize, to: &mut [f32]) {
                rows::decode::<_, E>($witness, from, padded, to);
            }
            const fn decode_of<E: Decode>(
                _: Encoding,
            ) -> unsafe fn(&KeyRows<'_>, usize, &mut [f32]) {
                decode::<E>
            }
            $(#[$attribute])*
            fn row_scales(from: &KeyRows<'_>, to: &mut [f32]) {
                rows::row_scales($witness, from, to);
            }
            $(#[$attribute])*
            fn encode<E: Plain>(from: &[f32], to: &mut [u8]) {
                tensors::encode::<_, E>($witness, from, to);
            }
            // The encoder of `kv-format` is inlined here, which makes it up to twice as fast.
            $(#[$attribute])*
            fn encode_row(format: KvFormat, inv_scale: f32, values: &[f32], row: &mut [u8]) {
                kv_format::row::encode_row(format, inv_scale, values, row);
            }
            $(#[$attribute])*
            fn combine(a: &mut [f32], x: f32, b: &[f32], y: f32) {
                tensors::combine($witness, a, x, b, y);
            }
            $(#[$attribute])*
            fn scale(a: &mut [f32], x: f32) {
                tensors::scale($witness, a, x);
            }
            $(#[$attribute])*
            fn split_pairs(row: &mut [f32]) {
                tensors::split_pairs($witness, row);
            }
            $(#[$attribute])*
            fn join_pairs(row: &mut [f32]) {
                tensors::join_pairs($witness, row);
            }
            $(#[$attribute])*
            fn convert<A: Plain, B: Plain>(from: &[u8], to: &mut [u8]) {
                tensors::convert::<_, A, B>($witness, from, to);
            }
            $(#[$attribute])*
            fn convert_non_temporal<A: Plain, B: Plain>(from: &[u8], to: &mut [u8], ahead: &[u8]) {
                tensors::convert_non_temporal::<_, A, B>($witness, from, to, ahead);
            }
            $(#[$attribute])*
            fn copy_non_temporal(from: &[u8], to: &mut [u8], ahead: &[u8]) {
                tensors::copy_non_temporal($witness, from, to, ahead);
            }
            $(#[$attribute])*
            fn fence() {
                Simd::fence($witness);
            }
            /// By the element type of the source, then by that of the destination.
            macro_rules! elements {
                ($kernel:ident) => {
                    [
                        [$kernel::<F32, F32>, $kernel::<F32, F16>, $kernel::<F32, Bf16>],
                        [$kernel::<F16, F32>, $kernel::<F16, F16>, $kernel::<F16, Bf16>],
                        [$kernel::<Bf16, F32>, $kernel::<Bf16, F16>, $kernel::<Bf16, Bf16>],
                    ]
                };
            }
            Table {
                rows_max: if SUMS < 16 { 4 } else { 8 },
                qk: each!(qk_of),
                pv: each!(pv_of),
                factor: each!(factor_of),
                softmax: [softmax::<false>, softmax::<true>],
                decode: each!(decode_of),
                row_scales,
                encode: [encode::<F32>, encode::<F16>, encode::<Bf16>],
                encode_row,
                combine,
                scale,
                split_pairs,
                join_pairs,
                convert: elements!(convert),
                convert_non_temporal: elements!(convert_non_temporal),
                copy_non_temporal,
                fence,
            }
        };
    };
}
pub(crate) use table;
