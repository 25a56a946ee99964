//! The rows that the kernels of `row_lanes.h` take: rows that fit the registers of a few lanes. A
//! refusal gives the reason for which the general kernel, which takes every row, is launched.
use kv_core::{KvFormat, ScaleGroup, Scaling};

use super::Refusal;
use crate::params::{Plane, Tensor};

/// Values of `head_dim` that the kernels support, in the order of their lists of names.
pub(super) const DIMS: [u32; 3] = [64, 128, 256];

/// Formats with one byte per value and given scales.
const GIVEN: [KvFormat; 6] = [
    KvFormat::Fp8E4m3(Scaling::Tensor),
    KvFormat::Fp8E4m3(Scaling::Head),
    KvFormat::Fp8E5m2(Scaling::Tensor),
    KvFormat::Fp8E5m2(Scaling::Head),
    KvFormat::Int8(Scaling::Tensor),
    KvFormat::Int8(Scaling::Head),
];
/// Formats with one byte per value and a scale after each row.
const SCALED: [KvFormat; 3] = [
    KvFormat::Fp8E4m3(Scaling::Row),
    KvFormat::Fp8E5m2(Scaling::Row),
    KvFormat::Int8(Scaling::Row),
];

/// Lloyd-Max formats with a scale after each row.
const LLOYD: [KvFormat; 3] =
    [KvFormat::L6(ScaleGroup::Row), KvFormat::L4(ScaleGroup::Row), KvFormat::L3(ScaleGroup::Row)];

pub(super) const NO_DIM: Refusal = "head_dim is not 64, 128 or 256";
pub(super) const WIDE_ROWS: Refusal = "codes with a tail, a full-precision prefix or block means";
pub(super) const UNALIGNED: Refusal = "rows that do not begin at multiples of 16 bytes";
pub(super) const TOO_MANY: Refusal = "2^31 rows or more";

/// The rows of a plane, as far as the kernels differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rows {
    /// Values in 16 or 32 bits.
    Plain,
    /// One-byte codes.
    Codes,
    /// Lloyd-Max codes with one scale.
    Lloyd,
    /// Other codes.
    Other,
}

/// Returns the index in [`DIMS`] of a plane's `head_dim`, and its kind of rows.
pub(super) fn of_plane(plane: &Plane) -> Result<(usize, Rows), Refusal> {
    let is_of = |formats: &[KvFormat]| formats.iter().any(|it| it.kernel_code() == plane.format);
    let Some(dim) = DIMS.iter().position(|dim| *dim == plane.head_dim) else {
        return Err(NO_DIM);
    };
    if plane.has_tail != 0 || plane.full_precision_prefix != 0 || plane.block_means != 0 {
        return Err(WIDE_ROWS);
    }
    // Rows of other kinds may begin at any even address.
    let (rows, needs_alignment) = match () {
        () if is_of(KvFormat::PLAIN) => (Rows::Plain, true),
        () if is_of(&GIVEN) => (Rows::Codes, true),
        () if is_of(&SCALED) => (Rows::Codes, false),
        () if is_of(&LLOYD) => (Rows::Lloyd, false),
        () => (Rows::Other, false),
    };
    let strides = [plane.base, plane.block_bytes, plane.token_stride, plane.head_stride];
    if needs_alignment && !strides.iter().all(|n| n.is_multiple_of(16)) {
        return Err(UNALIGNED);
    }
    Ok((dim, rows))
}

/// Checks that every row of a caller's tensor begins at a multiple of 16 bytes.
pub(super) fn check_tensor(tensor: &Tensor) -> Result<(), Refusal> {
    let strides = [tensor.data, tensor.batch_stride, tensor.token_stride];
    if strides.iter().all(|n| n.is_multiple_of(16)) { Ok(()) } else { Err(UNALIGNED) }
}

/// Returns the rows of a thread block: 2,048 values, 16 in each of 128 threads.
pub(super) fn rows(head_dim: u32) -> u32 {
    2048_u32.checked_div(head_dim).unwrap_or(1).max(1)
}

/// Returns the thread blocks for all rows.
pub(super) fn blocks(tokens: u32, heads: u32, head_dim: u32) -> Result<u32, Refusal> {
    let all = tokens.checked_mul(heads).filter(|all| *all < 1 << 31).ok_or(TOO_MANY)?;
    Ok(all.div_ceil(rows(head_dim)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plane(format: KvFormat, head_dim: u32) -> Plane {
        let row_bytes = u32::try_from(format.row_bytes(head_dim)).unwrap();
        let stride = u64::from(row_bytes);
        Plane {
            format: format.kernel_code(),
            head_dim,
            row_bytes,
            token_stride: stride,
            head_stride: stride * 16,
            block_bytes: stride * 32,
            ..Plane::default()
        }
    }

    #[test]
    fn each_rule_chooses_or_refuses() {
        let e4m3 = KvFormat::Fp8E4m3(Scaling::Tensor);
        let int8 = KvFormat::Int8(Scaling::Row);
        for (index, dim) in DIMS.into_iter().enumerate() {
            for format in GIVEN.into_iter().chain(SCALED) {
                assert_eq!(of_plane(&plane(format, dim)), Ok((index, Rows::Codes)), "{format}");
            }
            for format in [KvFormat::L4(ScaleGroup::Group32), KvFormat::Nvfp4, KvFormat::Q8_0] {
                assert_eq!(of_plane(&plane(format, dim)), Ok((index, Rows::Other)), "{format}");
            }
            for format in LLOYD {
                assert_eq!(of_plane(&plane(format, dim)), Ok((index, Rows::Lloyd)), "{format}");
            }
            for format in KvFormat::PLAIN {
                assert_eq!(of_plane(&plane(*format, dim)), Ok((index, Rows::Plain)), "{format}");
            }
        }
        let base = plane(e4m3, 128);
        for (plane, why) in [
            (plane(e4m3, 96), NO_DIM),
            (Plane { has_tail: 1, ..base }, WIDE_ROWS),
            (Plane { full_precision_prefix: 4, ..base }, WIDE_ROWS),
            (Plane { block_means: 1, ..base }, WIDE_ROWS),
            (Plane { base: 8, ..base }, UNALIGNED),
            (Plane { block_bytes: 4096 + 8, ..base }, UNALIGNED),
        ] {
            assert_eq!(of_plane(&plane), Err(why));
        }
        let odd = Plane { base: 2, ..plane(int8, 128) };
        assert_eq!(of_plane(&odd), Ok((1, Rows::Codes)), "rows with a scale need even addresses");
        let tensor = Tensor { data: 256, token_stride: 2048, ..Tensor::default() };
        assert_eq!(check_tensor(&tensor), Ok(()));
        assert_eq!(check_tensor(&Tensor { data: 258, ..tensor }), Err(UNALIGNED));
        assert_eq!(check_tensor(&Tensor { token_stride: 2040, ..tensor }), Err(UNALIGNED));
        assert_eq!(blocks(17, 8, 128), Ok(9));
        assert_eq!(blocks(1 << 28, 8, 128), Err(TOO_MANY));
    }
}
