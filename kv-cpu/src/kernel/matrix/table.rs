//! The loops as a table of functions, one for each instruction set that has a unit.
use super::super::ahead::Ahead;
use super::{Memory, Queries, QueryShape, Setting, StoredRows};
use crate::encoding::Encoding;

/// What the unit of one instruction set computes. Calling an entry is sound only on a CPU that has
/// the set, and between `enter` and `leave` on the same thread.
pub(crate) struct Table {
    /// Sets the unit up and returns how it was; the other sets it back.
    pub(super) enter: unsafe fn() -> Setting,
    pub(super) leave: unsafe fn(&Setting),
    pub(super) narrow: unsafe fn(usize, usize),
    pub(super) terms: unsafe fn(&[f32]) -> usize,
    pub(super) is_finite: unsafe fn(&[f32]) -> bool,
    pub(super) queries: Bring,
    /// What brings K of an encoding into blocks, and V.
    pub(super) stage: fn(Encoding) -> Option<[Stage; 2]>,
    pub(super) scores: unsafe fn(&Queries<'_>, usize, &Memory<'_>, &mut [f32]),
    /// With weights of two terms, and of three.
    pub(super) sums: [SumsBy; 2],
    /// For words, codes and bytes.
    pub(super) columns: [Bring; 3],
    pub(super) few: fn(Encoding) -> Option<Few>,
}

/// The same for few query rows, whose scores and sums are those of rows as they are stored.
#[derive(Clone, Copy)]
pub(super) struct Few {
    pub(super) scores:
        unsafe fn(&Queries<'_>, &StoredRows<'_>, &mut Memory<'_>, &mut [f32], &mut Ahead<'_>),
    pub(super) sums: [FewSums; 2],
}

pub(super) type FewSums =
    unsafe fn(&StoredRows<'_>, &mut Memory<'_>, &mut [f32], (&mut [f32], usize), &mut Ahead<'_>);
/// Brings query rows, floats and how many from one to the next, into blocks.
type Bring = unsafe fn((&[f32], usize), QueryShape, &mut [u32]);
type SumsBy = unsafe fn(&mut Memory<'_>, &mut [f32], (&mut [f32], usize));
pub(super) type Stage = unsafe fn(&StoredRows<'_>, &mut Memory<'_>, &mut Ahead<'_>);

/// Instantiates the loops for one unit and the vectors that serve it, behind the attributes given.
macro_rules! table {
    ([$(#[$attribute:meta])*] $simd:expr, $unit:expr, $enter:path, $leave:path, $narrow:path) => {
        /// The unit's loops.
        pub(in super::super) static TABLE: super::table::Table = {
            use super::super::stored::{Bf16, Bf16Pairs, E4m3, E5m2, F16, Int8};
            use super::super::ahead::{Ahead, part};
            use super::stage::Terms;
            use super::table::{Few, FewSums, Stage, Table};
            use super::{Memory, Queries, QueryShape, StoredRows};
            use crate::encoding::Encoding;

            $(#[$attribute])*
            fn terms(queries: &[f32]) -> usize {
                super::stage::terms(queries)
            }
            $(#[$attribute])*
            fn is_finite(values: &[f32]) -> bool {
                super::stage::is_finite(values)
            }
            $(#[$attribute])*
            fn queries(rows: (&[f32], usize), shape: QueryShape, to: &mut [u32]) {
                super::stage::queries($simd, rows, shape, to);
            }
            $(#[$attribute])*
            fn keys<E: Terms>(
                tile: &StoredRows<'_>,
                memory: &mut Memory<'_>,
                ahead: &mut Ahead<'_>,
            ) {
                super::stage::keys::<_, _, E>(($simd, $unit), tile, memory, ahead);
            }
            $(#[$attribute])*
            fn values<E: Terms>(
                tile: &StoredRows<'_>,
                memory: &mut Memory<'_>,
                ahead: &mut Ahead<'_>,
            ) {
                let ahead = (ahead, part::BEHIND_SCORES);
                super::stage::values::<_, _, E>(($simd, $unit), tile, memory, ahead);
            }
            $(#[$attribute])*
            fn scores(
                queries: &Queries<'_>,
                first: usize,
                memory: &Memory<'_>,
                out: &mut [f32],
            ) {
                super::products::scores(($simd, $unit), (queries, first), memory, out);
            }
            $(#[$attribute])*
            fn sums<const TERMS: usize>(
                memory: &mut Memory<'_>,
                weights: &mut [f32],
                out: (&mut [f32], usize),
            ) {
                super::products::sums::<_, _, TERMS>(($simd, $unit), memory, weights, out);
            }
            $(#[$attribute])*
            fn columns<const ARE_CODES: bool>(
                rows: (&[f32], usize),
                shape: QueryShape,
                to: &mut [u32],
            ) {
                super::columns::columns::<_, ARE_CODES>($simd, rows, shape, to);
            }
            $(#[$attribute])*
            fn byte_columns(rows: (&[f32], usize), shape: QueryShape, to: &mut [u32]) {
                super::bytes::columns($simd, rows, shape, to);
            }
            $(#[$attribute])*
            fn scores_of_bytes(
                queries: &Queries<'_>,
                tile: &StoredRows<'_>,
                memory: &mut Memory<'_>,
                out: &mut [f32],
                ahead: &mut Ahead<'_>,
            ) {
                super::bytes::scores(($simd, $unit), queries, (tile, memory), out, ahead);
            }
            $(#[$attribute])*
            fn scores_of_few<E: Terms>(
                queries: &Queries<'_>,
                tile: &StoredRows<'_>,
                memory: &mut Memory<'_>,
                out: &mut [f32],
                ahead: &mut Ahead<'_>,
            ) {
                let of = ($simd, $unit);
                super::few::scores::<_, _, E>(of, queries, (tile, memory), out, ahead);
            }
            $(#[$attribute])*
            fn sums_of_few<E: Terms, const TERMS: usize>(
                tile: &StoredRows<'_>,
                memory: &mut Memory<'_>,
                weights: &mut [f32],
                out: (&mut [f32], usize),
                ahead: &mut Ahead<'_>,
            ) {
                let of = ($simd, $unit);
                super::few::sums::<_, _, E, TERMS>(of, (tile, memory), weights, out, ahead);
            }
            fn of<E: Terms>() -> Option<([Stage; 2], Few)> {
                let sums: [FewSums; 2] = [sums_of_few::<E, 2>, sums_of_few::<E, 3>];
                Some(([keys::<E>, values::<E>], Few { scores: scores_of_few::<E>, sums }))
            }
            fn of_encoding(encoding: Encoding) -> Option<([Stage; 2], Few)> {
                match encoding {
                    Encoding::F16 => of::<F16>(),
                    Encoding::Bf16 => of::<Bf16>(),
                    Encoding::E4m3 => of::<E4m3>(),
                    Encoding::E5m2 => of::<E5m2>(),
                    Encoding::Int8 => of::<Int8>().map(|(stage, few)| {
                        (stage, Few { scores: scores_of_bytes, ..few })
                    }),
                    Encoding::Bf16Pairs => of::<Bf16Pairs>(),
                    _ => None,
                }
            }
            Table {
                enter: $enter,
                leave: $leave,
                narrow: $narrow,
                terms,
                is_finite,
                queries,
                stage: |encoding| of_encoding(encoding).map(|(stage, _)| stage),
                scores,
                sums: [sums::<2>, sums::<3>],
                columns: [columns::<false>, columns::<true>, byte_columns],
                few: |encoding| of_encoding(encoding).map(|(_, few)| few),
            }
        };
    };
}
pub(super) use table;
