//! The transform of stored rows as its formula states it, in the arithmetic of the reference or of
//! the plain computation.
use kv_core::calibration::PlaneConstants;

use super::attention::Real;

/// Constants of the transforms of K and V of a layer; `None` where rows are not transformed.
#[derive(Debug, Clone, Default)]
pub struct Transforms {
    /// The constants of K.
    pub k: Option<PlaneConstants>,
    /// The constants of V.
    pub v: Option<PlaneConstants>,
}

/// One query, transformed for the stored keys of its head.
#[derive(Debug)]
pub(super) struct Query<R> {
    /// `R(sign * q * balance)`.
    pub(super) transformed: Vec<R>,
    /// `q . mean`, part of every score.
    pub(super) bias: R,
    /// Magnitudes that rounding errors of the transformed values are proportional to.
    pub(super) sizes: Vec<f64>,
    /// The magnitude for the bias.
    pub(super) bias_size: f64,
}

impl Transforms {
    /// Transforms a query for the stored keys of `head`.
    pub(super) fn query<R: Real>(&self, q: &[f32], head: usize) -> Query<R> {
        let mut transformed: Vec<R> = q.iter().map(|x| R::of(*x)).collect();
        let mut query = Query {
            transformed: Vec::new(),
            bias: R::of(0.0),
            sizes: vec![0.0; q.len()],
            bias_size: 0.0,
        };
        if let Some(head) = self.k.as_ref().and_then(|k| k.head(head)) {
            for (x, mean) in q.iter().zip(head.mean) {
                let term = R::of(*x) * R::of(*mean);
                query.bias = query.bias + term;
                query.bias_size += term.value().abs();
            }
            for (x, back) in transformed.iter_mut().zip(head.back) {
                *x = *x * R::of(*back);
            }
            query.sizes = spread(&transformed.iter().map(|x| x.value().abs()).collect::<Vec<_>>());
            rotate(&mut transformed);
        }
        query.transformed = transformed;
        query
    }

    /// Transforms an output back, together with the magnitudes of its errors.
    pub(super) fn output<R: Real>(&self, out: &mut [R], magnitudes: &mut Vec<f64>, head: usize) {
        if let Some(head) = self.v.as_ref().and_then(|v| v.head(head)) {
            rotate(out);
            for (x, back) in out.iter_mut().zip(head.back) {
                *x = *x * R::of(*back);
            }
            *magnitudes = spread(magnitudes);
        }
    }
}

/// Returns the lengths of the blocks that a row is rotated in: its length as a sum of powers of
/// two, largest first.
fn blocks(len: usize) -> impl Iterator<Item = usize> {
    (0..usize::BITS).rev().map(|bit| 1 << bit).filter(move |power| len & power != 0)
}

/// Applies the orthonormal Walsh-Hadamard transform to every block.
pub(crate) fn rotate<R: Real>(values: &mut [R]) {
    let mut begin = 0;
    for len in blocks(values.len()) {
        let block = &mut values[begin..begin + len];
        let mut stride = 1;
        while stride < len {
            for i in (0..len).filter(|i| i & stride == 0) {
                let (a, b) = (block[i], block[i + stride]);
                block[i] = a + b;
                block[i + stride] = a + b * R::of(-1.0);
            }
            stride *= 2;
        }
        let norm = R::of(1.0) / R::root(len);
        for x in block {
            *x = *x * norm;
        }
        begin += len;
    }
}

/// Returns the error magnitudes of a rotated row: every value of a block gets its share of all of
/// them.
fn spread(sizes: &[f64]) -> Vec<f64> {
    let mut all = Vec::with_capacity(sizes.len());
    for len in blocks(sizes.len()) {
        let sum: f64 = sizes[all.len()..][..len].iter().sum();
        all.extend(std::iter::repeat_n(sum / (len as f64).sqrt(), len));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rotates_by_hand_and_back() {
        let mut row = [1.0_f64, 2.0, 3.0, 4.0, 5.0];
        rotate(&mut row);
        assert_eq!(row, [5.0, -1.0, -2.0, 0.0, 5.0]);
        rotate(&mut row);
        assert_eq!(row, [1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!(spread(&[1.0, 2.0, 3.0, 4.0, 5.0]), [5.0, 5.0, 5.0, 5.0, 5.0]);
    }

    #[test]
    fn is_what_the_library_computes() {
        let mut rng = crate::rng::Rng::new(5);
        for len in [1, 2, 3, 31, 64, 80, 100] {
            let row = rng.normals(len);
            let mut exact: Vec<f64> = row.iter().map(|x| f64::from(*x)).collect();
            let mut theirs = row.clone();
            rotate(&mut exact);
            kv_quant::transform::rotate(&mut theirs);
            for (exact, theirs) in exact.iter().zip(theirs) {
                assert!((exact - f64::from(theirs)).abs() < 1e-5, "{len}: {exact} {theirs}");
            }
        }
    }
}
