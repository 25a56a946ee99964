//! Kernels of optional parts of AVX-512: VBMI and BF16.
use super::Avx512;
use super::bf16::Bf16;
use super::vbmi::Vbmi;
use crate::decode::{E4m3, E5m2, Fp8, LookedUp};
use crate::layout::Encoding;
use crate::pv::{self, Pv};
use crate::qk::{self, Bf16Rows, Bf16Words, Floats, Qk};
use crate::table::{PvFn, QkFn};

/// Returns the QK and PV kernels of FP8 by lookups, by [`TILE_ROWS`](crate::table::TILE_ROWS).
pub(crate) fn lookups(encoding: Encoding) -> Option<([QkFn; 4], [PvFn; 4])> {
    fn of<E: Fp8>() -> ([QkFn; 4], [PvFn; 4]) {
        let qk: [QkFn; 4] = [qk::<E, 1, 8>, qk::<E, 2, 8>, qk::<E, 4, 4>, qk::<E, 8, 2>];
        (qk, [pv::<E, 1, 4>, pv::<E, 2, 4>, pv::<E, 4, 2>, pv::<E, 8, 1>])
    }
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
    fn qk<E: Fp8, const R: usize, const T: usize>(x: &mut Qk<'_, '_>) {
        let rows = LookedUp::<_, E>::new(Vbmi(Avx512::witness()));
        qk::qk::<_, R, T>(Floats::<_, 2>(rows), x);
    }
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
    fn pv<E: Fp8, const R: usize, const P: usize>(x: &mut Pv<'_, '_>) {
        pv::pv::<_, R, P>(LookedUp::<_, E>::new(Vbmi(Avx512::witness())), x);
    }
    match encoding {
        Encoding::E4m3 => Some(of::<E4m3>()),
        Encoding::E5m2 => Some(of::<E5m2>()),
        _ => None,
    }
}

/// Returns the QK kernels by products of bf16, for rows of bf16, and of FP8 if lookups exist.
pub(crate) fn qk_words(encoding: Encoding, has_vbmi: bool) -> Option<[QkFn; 4]> {
    fn of<E: Fp8>() -> [QkFn; 4] {
        [fp8::<E, 1, 8>, fp8::<E, 2, 8>, fp8::<E, 4, 4>, fp8::<E, 8, 2>]
    }
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    fn bf16<const R: usize, const T: usize>(x: &mut Qk<'_, '_>) {
        let s = Avx512::witness();
        qk::qk::<_, R, T>(Bf16Words(Bf16(s), Bf16Rows(s)), x);
    }
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi")]
    fn fp8<E: Fp8, const R: usize, const T: usize>(x: &mut Qk<'_, '_>) {
        let s = Avx512::witness();
        qk::qk::<_, R, T>(Bf16Words(Bf16(s), LookedUp::<_, E>::new(Vbmi(s))), x);
    }
    match encoding {
        Encoding::Bf16Pairs => Some([bf16::<1, 8>, bf16::<2, 8>, bf16::<4, 4>, bf16::<8, 2>]),
        Encoding::E4m3 if has_vbmi => Some(of::<E4m3>()),
        Encoding::E5m2 if has_vbmi => Some(of::<E5m2>()),
        _ => None,
    }
}
