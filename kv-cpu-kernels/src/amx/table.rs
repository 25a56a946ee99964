//! AMX kernels as a table of functions, one for each implementation of the unit.
use super::{Memory, QueryShape};
use crate::layout::Encoding;
use crate::prefetch::Prefetch;
use crate::rows::TileRows;

/// A configuration of the tile registers, in the form of LDTILECFG.
#[repr(C, align(64))]
pub(crate) struct TileConfig(pub(crate) [u8; 64]);

/// The kernels of one unit. Calling an entry is sound only on a CPU that has the unit; all but
/// `enter`, `terms` and `is_finite` only between `enter` and `leave` on the same thread.
pub(crate) struct Table {
    /// Configures tile registers as blocks, and returns the configuration before.
    pub(crate) enter: unsafe fn() -> TileConfig,
    /// Restores a configuration.
    pub(crate) leave: unsafe fn(&TileConfig),
    /// Configures tile registers for [`super::Narrow`]: columns of scores, and rows of sums.
    pub(crate) narrow: unsafe fn(usize, usize),
    pub(crate) terms: unsafe fn(&[f32]) -> usize,
    pub(crate) is_finite: unsafe fn(&[f32]) -> bool,
    pub(crate) pack_rows: PackQueries,
    /// In each [`super::ColumnOrder`].
    pub(crate) pack_columns: [PackQueries; 2],
    pub(crate) gemm_scores: unsafe fn(PackedQueries<'_>, usize, &Memory<'_>, &mut [f32]),
    /// With weights of two terms, and of three.
    pub(crate) gemm_sums: [GemmSums; 2],
    pub(crate) kernel: fn(Encoding) -> Option<Kernel>,
}

/// The kernels that read stored rows of one encoding.
#[derive(Clone, Copy)]
pub(crate) struct Kernel {
    pub(crate) pack_keys: Pack,
    pub(crate) pack_values: Pack,
    pub(crate) narrow_scores: NarrowScores,
    /// With weights of two terms, and of three.
    pub(crate) narrow_sums: [NarrowSums; 2],
}

/// Words of the query rows of one kv head.
pub(crate) type PackedQueries<'a> = (&'a [u32], QueryShape);
type PackQueries = unsafe fn(&[f32], QueryShape, &mut [u32]);
type Pack = unsafe fn(&TileRows<'_>, &mut Memory<'_>, &mut Prefetch<'_>);
type GemmSums = unsafe fn(&mut Memory<'_>, &[f32], (&mut [f32], usize));
type NarrowScores =
    unsafe fn(PackedQueries<'_>, (&TileRows<'_>, &mut Memory<'_>), &mut [f32], &mut Prefetch<'_>);
/// Weights come with the number of their rows.
type NarrowSums = unsafe fn(
    (&TileRows<'_>, &mut Memory<'_>),
    (&[f32], usize),
    (&mut [f32], usize),
    &mut Prefetch<'_>,
);

/// Instantiates the kernels for one unit and the vectors that serve it, under the given attributes.
macro_rules! table {
    ([$(#[$attribute:meta])*] $simd:expr, $unit:expr, $enter:path, $leave:path, $narrow:path) => {
        /// The kernels of this unit.
        pub(crate) static TABLE: $crate::amx::table::Table = {
            use $crate::amx::pack::{self, Terms};
            use $crate::amx::table::{Kernel, PackedQueries, Table};
            use $crate::amx::{Memory, QueryShape, gemm, narrow as narrow_kernels};
            use $crate::rows::TileRows;
            use $crate::decode::{Bf16, Bf16Pairs, E4m3, E5m2, F16, Int8};
            use $crate::layout::Encoding;
            use $crate::prefetch::Prefetch;

            $(#[$attribute])*
            fn terms(queries: &[f32]) -> usize {
                pack::terms(queries)
            }
            $(#[$attribute])*
            fn is_finite(values: &[f32]) -> bool {
                pack::is_finite(values)
            }
            $(#[$attribute])*
            fn pack_rows(rows: &[f32], shape: QueryShape, to: &mut [u32]) {
                pack::query_rows($simd, rows, shape, to);
            }
            $(#[$attribute])*
            fn pack_columns<const ARE_CODES: bool>(
                rows: &[f32],
                shape: QueryShape,
                to: &mut [u32],
            ) {
                pack::query_columns::<_, ARE_CODES>($simd, rows, shape, to);
            }
            $(#[$attribute])*
            fn pack_keys<E: Terms>(
                k: &TileRows<'_>,
                memory: &mut Memory<'_>,
                prefetch: &mut Prefetch<'_>,
            ) {
                pack::keys::<_, _, E>(($simd, $unit), k, memory, prefetch);
            }
            $(#[$attribute])*
            fn pack_values<E: Terms>(
                v: &TileRows<'_>,
                memory: &mut Memory<'_>,
                prefetch: &mut Prefetch<'_>,
            ) {
                pack::values::<_, _, E>(($simd, $unit), v, memory, prefetch);
            }
            $(#[$attribute])*
            fn gemm_scores(
                queries: PackedQueries<'_>,
                first: usize,
                memory: &Memory<'_>,
                to: &mut [f32],
            ) {
                gemm::scores($unit, (queries, first), memory, to);
            }
            $(#[$attribute])*
            fn gemm_sums<const TERMS: usize>(
                memory: &mut Memory<'_>,
                weights: &[f32],
                out: (&mut [f32], usize),
            ) {
                gemm::sums::<_, _, TERMS>(($simd, $unit), memory, weights, out);
            }
            $(#[$attribute])*
            fn narrow_scores<E: Terms>(
                queries: PackedQueries<'_>,
                tile: (&TileRows<'_>, &mut Memory<'_>),
                to: &mut [f32],
                prefetch: &mut Prefetch<'_>,
            ) {
                narrow_kernels::scores::<_, _, E>(($simd, $unit), queries, tile, to, prefetch);
            }
            $(#[$attribute])*
            fn narrow_sums<E: Terms, const TERMS: usize>(
                tile: (&TileRows<'_>, &mut Memory<'_>),
                weights: (&[f32], usize),
                out: (&mut [f32], usize),
                prefetch: &mut Prefetch<'_>,
            ) {
                let of = ($simd, $unit);
                narrow_kernels::sums::<_, _, E, TERMS>(of, tile, weights, out, prefetch);
            }
            fn kernel_of<E: Terms>() -> Option<Kernel> {
                Some(Kernel {
                    pack_keys: pack_keys::<E>,
                    pack_values: pack_values::<E>,
                    narrow_scores: narrow_scores::<E>,
                    narrow_sums: [narrow_sums::<E, 2>, narrow_sums::<E, 3>],
                })
            }
            fn kernel(encoding: Encoding) -> Option<Kernel> {
                match encoding {
                    Encoding::F16 => kernel_of::<F16>(),
                    Encoding::Bf16 => kernel_of::<Bf16>(),
                    Encoding::Bf16Pairs => kernel_of::<Bf16Pairs>(),
                    Encoding::E4m3 => kernel_of::<E4m3>(),
                    Encoding::E5m2 => kernel_of::<E5m2>(),
                    Encoding::Int8 => kernel_of::<Int8>(),
                    _ => None,
                }
            }
            Table {
                enter: $enter,
                leave: $leave,
                narrow: $narrow,
                terms,
                is_finite,
                pack_rows,
                pack_columns: [pack_columns::<false>, pack_columns::<true>],
                gemm_scores,
                gemm_sums: [gemm_sums::<2>, gemm_sums::<3>],
                kernel,
            }
        };
    };
}
pub(crate) use table;
