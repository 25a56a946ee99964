//! Decides whether rows of a device agree with the host's definition of a format.
//!
//! On the CPU they are equal to the bit. A device that rounds the transform in other places may
//! differ in two ways:
//!
//! - a value read back through the transform may be off by its roundings;
//! - a row may be encoded like one that lies within rounding error of the row written, so a value
//!   near a decision threshold, or a scale near a midpoint, may round to the other side.
//!
//! To accept the second, each value that differs is moved towards the device's value by at most its
//! rounding error, and the row is encoded again. The model continues with the rows that the device
//! stored.
use kv_core::DType;
use kv_core::calibration::HeadConstants;

use super::check_rows;
use crate::case::CaseError;
use crate::oracle::Stored;
use crate::oracle::round::{round_f32, ulp};

/// Fails unless `got`, read as `dtype`, agrees with the stored rows `kept`.
pub(crate) fn reads(
    stored: &Stored,
    kept: &[f32],
    got: &[f32],
    dtype: DType,
) -> Result<(), CaseError> {
    let expected: Vec<_> = stored.read(kept).into_iter().map(|x| round_f32(dtype, x)).collect();
    let exactly = check_rows(got, &expected, stored.width());
    if exactly.is_ok() || stored.turned().is_none() || got.len() != expected.len() {
        return exactly;
    }
    let rows = got.chunks(stored.dim()).zip(expected.chunks(stored.dim()));
    for ((got, expected), (kept, index)) in rows.zip(kept.chunks(stored.dim()).zip(0..)) {
        let limits = stored.head(index).map(|head| read_limits(&head, kept));
        let near = |i: usize| {
            let limit = limits.as_ref().map_or(0.0, |limits| limits[i]);
            // The limit is that before rounding to the type that was read.
            let limit = match dtype {
                DType::F32 => limit,
                _ => limit + ulp(dtype, f64::from(expected[i])) as f32,
            };
            same(got[i], expected[i], limit)
        };
        if !(0..got.len()).all(near) {
            return exactly;
        }
    }
    Ok(())
}

/// Returns the rows that a device stored, given what it reads back.
///
/// # Errors
/// A row that the definition does not produce from any row within rounding error.
pub(super) fn adopted(
    stored: &Stored,
    first: u32,
    rows: &[f32],
    got: &[f32],
) -> Result<Vec<f32>, CaseError> {
    let mut kept = stored.kept(first, rows);
    let exactly = reads(stored, &kept, got, DType::F32);
    if exactly.is_ok() || got.len() != kept.len() {
        return exactly.map(|()| kept);
    }
    let theirs = stored.transformed(got);
    let mut moved = stored.transformed(rows);
    let dim = stored.dim();
    for ((kept, index), theirs) in kept.chunks_mut(dim).zip(0..).zip(theirs.chunks(dim)) {
        let written = &rows[index * dim..][..dim];
        let row = &mut moved[index * dim..][..dim];
        let head = stored.head(index);
        let limits = write_limits(head.as_ref(), written, row);
        for (((x, kept), theirs), limit) in row.iter_mut().zip(&*kept).zip(theirs).zip(&limits) {
            if !same(*theirs, *kept, *limit) {
                *x += limit * (theirs - kept).signum();
            }
        }
        stored.keep(first, index, row);
        if !row.iter().zip(&*kept).all(|(new, old)| same(*new, *old, 0.0)) {
            kept.copy_from_slice(row);
        }
    }
    // Report the difference from what was written, not from the second attempt.
    reads(stored, &kept, got, DType::F32).and(Ok(kept)).map_err(|_| match exactly {
        Err(error) => error,
        Ok(()) => CaseError::from("rows agree and disagree"),
    })
}

fn same(a: f32, b: f32, limit: f32) -> bool {
    a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= limit
}

/// Relative rounding error of a value after a rotation, between two computations.
fn roundings(dim: usize) -> f32 {
    f32::EPSILON * ((dim as f32).log2() + 3.0)
}

/// Upper bound of the sum of terms of a rotated value.
fn terms(row: impl Iterator<Item = f32>, dim: usize) -> f32 {
    row.map(f32::abs).sum::<f32>() / (dim as f32).sqrt()
}

fn read_limits(head: &HeadConstants<'_>, kept: &[f32]) -> Vec<f32> {
    // The smallest block of a rotation has the fewest terms and the largest share of each.
    let most = terms(kept.iter().copied(), block_min(kept.len()));
    let limit =
        |(back, mean): (&f32, &f32)| roundings(kept.len()) * (most * back.abs() + mean.abs());
    head.back.iter().zip(head.mean).map(limit).collect()
}

fn write_limits(head: Option<&HeadConstants<'_>>, written: &[f32], row: &[f32]) -> Vec<f32> {
    let turned = head.map_or(0.0, |head| {
        let all = written.iter().zip(head.mean).zip(head.into);
        let most = all.map(|((x, mean), into)| (x.abs() + mean.abs()) * into);
        terms(most, block_min(row.len())) * roundings(row.len())
    });
    // A scale's reciprocal, the product, and the scale itself.
    row.iter().map(|x| turned + 4.0 * f32::EPSILON * x.abs()).collect()
}

fn block_min(dim: usize) -> usize {
    1 << dim.trailing_zeros()
}

#[cfg(test)]
mod tests {
    use kv_core::{BlockOrder, KvFormat, LayerId, Plane, PlaneLayout, PlaneShape, Scaling};

    use super::*;
    use crate::rng::Rng;

    const DIM: usize = 64;

    /// INT8 with a scale per row.
    fn stored(transforms: bool) -> Stored {
        let shape = PlaneShape {
            num_blocks: 1,
            block_size: 1,
            num_kv_heads: 1,
            head_dim: DIM as u32,
            order: BlockOrder::Hnd,
            format: KvFormat::Int8(Scaling::Row),
        };
        let layout = PlaneLayout::new(shape).unwrap().with_transform(transforms);
        Stored::new(LayerId(0), Plane::Key, layout, None).unwrap()
    }

    /// A row whose scale is 1/64: value 5 lies between codes 10 and 11, value 6 on a code.
    fn written(stored: &Stored) -> Vec<f32> {
        let mut row: Vec<_> = Rng::new(1).normals(DIM).iter().map(|x| x / 4.0).collect();
        (row[3], row[5], row[6]) = (127.0 / 64.0, 10.5 / 64.0, -20.0 / 64.0);
        stored.read(&row)
    }

    #[test]
    fn a_value_at_a_threshold_may_fall_to_either_side() {
        for transforms in [false, true] {
            let stored = stored(transforms);
            let rows = written(&stored);
            let kept = stored.kept(0, &rows);
            let mut other = kept.clone();
            assert!((kept[5] - 10.5 / 64.0).abs() == 0.5 / 64.0, "{}", kept[5]);
            other[5] = 21.0 / 64.0 - kept[5];
            for row in [&kept, &other] {
                let adopted = adopted(&stored, 0, &rows, &stored.read(row)).unwrap();
                assert_eq!(&adopted, row, "transforms: {transforms}");
            }
        }
    }

    #[test]
    fn nothing_else_may() {
        for transforms in [false, true] {
            let stored = stored(transforms);
            let rows = written(&stored);
            let kept = stored.kept(0, &rows);
            // One step beside a code, two steps from a threshold, less than a step, another scale.
            for (index, steps) in [(6, 1.0), (5, 2.0), (5, -2.0), (6, 0.25), (40, 0.02)] {
                let mut other = kept.clone();
                other[index] += steps / 64.0;
                let refused = adopted(&stored, 0, &rows, &stored.read(&other));
                assert!(refused.is_err(), "{index}, {steps}, transforms: {transforms}");
            }
            let scaled: Vec<_> = kept.iter().map(|x| x * (1.0 + 1.0 / 1024.0)).collect();
            assert!(adopted(&stored, 0, &rows, &stored.read(&scaled)).is_err());
            let mut nan = stored.read(&kept);
            nan[7] = f32::NAN;
            assert!(adopted(&stored, 0, &rows, &nan).is_err());
        }
    }

    #[test]
    fn reading_may_round_where_it_turns_rows_back() {
        let [plain, turned] = [false, true].map(stored);
        let kept = plain.kept(0, &written(&plain));
        for (stored, allowed) in [(plain, false), (turned, true)] {
            let mut got = stored.read(&kept);
            got[9] = f32::from_bits(got[9].to_bits() + 1);
            assert_eq!(reads(&stored, &kept, &got, DType::F32).is_ok(), allowed);
            got[9] += 1e-3;
            assert!(reads(&stored, &kept, &got, DType::F32).is_err());
        }
    }
}
