//! Weighted sums of rows of V.
use super::*;
use kv_cpu_kernels::{OUTPUT_PAD, Prefetch, Pv};

const WEIGHT_STRIDE: usize = TOKENS_MAX + 3;

/// Rows of V, rows of weights, and the expected sums.
struct Sums<'a> {
    v: &'a Stored,
    tokens: usize,
    weights: &'a [f32],
    /// By row, then by value: the sum and its size.
    expected: Vec<Vec<(f64, f64)>>,
}

impl<'a> Sums<'a> {
    /// The last tokens by all rows of weights.
    fn new(v: &'a Stored, tokens: usize, weights: &'a [f32]) -> Self {
        let column = |i: usize| v.last_values(tokens).iter().map(|row| row[i]).collect();
        let by_value: Vec<Vec<f32>> = (0..v.layout.dim()).map(column).collect();
        let of_row = |row: &[f32]| by_value.iter().map(|all| dot(&row[..tokens], all)).collect();
        Self { v, tokens, weights, expected: weights.chunks(WEIGHT_STRIDE).map(of_row).collect() }
    }
}

/// Adds the tokens to some rows, and compares every value.
fn check(kernels: Kernels, sums: &Sums<'_>, rows: usize) {
    let Sums { v, weights, expected, .. } = sums;
    let tokens = sums.tokens;
    let dim = v.layout.dim();
    let padded = dim.next_multiple_of(OUTPUT_PAD);
    let stride = padded + rows % 2 * OUTPUT_PAD;
    let mut out = vec![0.0; rows * stride];
    for row in out.chunks_mut(stride) {
        row[..dim].fill(0.25);
        row[padded..].fill(7.0);
    }
    let by_token = v.scales(kernels, tokens);
    let mut scaled = weights[..rows * WEIGHT_STRIDE].to_vec();
    for row in scaled.chunks_mut(WEIGHT_STRIDE) {
        row.iter_mut().zip(&by_token).for_each(|(weight, scale)| *weight *= scale);
        row[tokens..].fill(f32::NAN);
    }
    let runs = runs_of(v.last(tokens));
    kernels.pv(&mut Pv {
        rows,
        weights: &scaled[..(rows - 1) * WEIGHT_STRIDE + tokens],
        weight_stride: WEIGHT_STRIDE,
        v: TileRows::new(&runs),
        out: &mut out,
        out_stride: stride,
        decoded: &mut vec![f32::NAN; kernels.decoded_len(&v.layout)],
        prefetch: &mut Prefetch::new(kernels.prefetch(), &runs, &runs),
    });
    for (row, (out, expected)) in out.chunks(stride).zip(expected).enumerate() {
        for (i, (got, (sum, size))) in out[..dim].iter().zip(expected).enumerate() {
            assert!(
                is_near(*got, 0.25 + sum, (0.25 + size, tokens)),
                "{kernels:?} {:?}, dim {dim}, {rows} rows, {tokens} tokens: value {row} {i} is \
                 {got}, not {}",
                v.layout.encoding(),
                0.25 + sum
            );
        }
        assert!(out[dim..padded].iter().all(|x| *x == 0.0), "{kernels:?}: padding {dim}");
        assert!(out[padded..].iter().all(|x| *x == 7.0), "{kernels:?}: after the padding {dim}");
    }
}

#[test]
fn outputs_are_weighted_sums() {
    let mut random = Random::new(3);
    for kind in kinds() {
        for dim in DIMS {
            let v = Stored::new(&mut random, kind, dim, TOKENS_MAX);
            let weights = random.units(ROWS_MAX * WEIGHT_STRIDE);
            for sums in TOKENS.map(|tokens| Sums::new(&v, tokens, &weights)) {
                for kernels in all_kernels() {
                    for rows in ROWS {
                        check(kernels, &sums, rows);
                    }
                }
            }
        }
    }
}

/// A range of the rows with the weights of that range, as where rows see different tokens.
#[test]
fn ranges_are_added_alone() {
    const DIM: usize = 40;
    let v = Stored::new(&mut Random::new(4), (KvFormat::F16, false), DIM, TOKENS_MAX);
    for kernels in all_kernels() {
        for range in [3..4, 5..21, 20..TOKENS_MAX] {
            let mut out = [0.0; 2 * OUTPUT_PAD];
            kernels.pv(&mut Pv {
                rows: 1,
                weights: &vec![0.5; range.len()],
                weight_stride: WEIGHT_STRIDE,
                v: TileRows::of_run(&v.last(TOKENS_MAX).slice(range.clone())),
                out: &mut out,
                out_stride: 2 * OUTPUT_PAD,
                decoded: &mut vec![0.0; kernels.decoded_len(&v.layout)],
                prefetch: &mut Prefetch::none(),
            });
            for (i, got) in out[..DIM].iter().enumerate() {
                let rows = v.values[range.clone()].iter().map(|row| f64::from(row[i]) * 0.5);
                let near = is_near(*got, rows.sum(), (range.len() as f64, range.len()));
                assert!(near, "{kernels:?} {range:?} {i}");
            }
        }
    }
}

/// A NaN of V reaches its value alone, in every row.
#[test]
fn a_nan_reaches_its_value_alone() {
    const DIM: usize = 72;
    for name in ["f32", "f16", "bf16", "fp8-e4m3", "fp8-e5m2"] {
        for broken in [0, 31, 40, DIM - 1] {
            let mut rows = vec![vec![0.5; DIM]; 5];
            rows[3][broken] = f32::NAN;
            let v = Stored::of(rows, (name.parse().unwrap(), false), 0);
            for kernels in all_kernels() {
                let mut out = [0.0; 3 * 96];
                kernels.pv(&mut Pv {
                    rows: 3,
                    weights: &[1.0; 3 * 16],
                    weight_stride: 16,
                    v: TileRows::of_run(&v.last(5)),
                    out: &mut out,
                    out_stride: 96,
                    decoded: &mut vec![0.0; kernels.decoded_len(&v.layout)],
                    prefetch: &mut Prefetch::none(),
                });
                for row in out.chunks(96) {
                    for (i, x) in row.iter().enumerate() {
                        assert_eq!(x.is_nan(), i == broken, "{kernels:?} {name} {i}");
                    }
                }
            }
        }
    }
}
