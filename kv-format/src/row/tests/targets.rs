//! Documented errors of the formats on normal rows, and unbiased inner products.
use super::*;
use crate::quality::{ProductError, RowError};

const HEAD_DIM: usize = 128;

/// Name, given scale, and the largest relative squared error on a million rows.
const TARGETS: [(&str, f32, f64); 16] = [
    ("f16", 1.0, 4.4e-8),
    ("bf16", 1.0, 2.8e-6),
    ("fp8-e4m3", 1.0, 7.1e-4),
    ("fp8-e4m3-row", 1.0, 6.7e-4),
    ("fp8-e5m2", 1.0, 2.82e-3),
    ("fp8-e5m2-row", 1.0, 2.66e-3),
    ("int8", 1.0, 4.2e-5),
    ("l6", 1.0, 5.2e-4),
    ("l6-g32", 1.0, 4.8e-4),
    ("l4", 1.0, 8.0e-3),
    ("l4-g32", 1.0, 6.7e-3),
    // The scale of least error would give 3.17e-2; no unbiased scale gives less than this.
    ("l3", 1.0, 3.3e-2),
    ("l3-g32", 1.0, 2.9e-2),
    ("q8_0", 1.0, 2.9e-5),
    ("q4_0", 1.0, 7.5e-3),
    ("nvfp4", 1.0, 7.7e-3),
];

fn measure(name: &str, given: f32, rows: usize) -> (RowError, ProductError) {
    let (mut error, mut products) = (RowError::default(), ProductError::default());
    let (mut keys, mut queries) = (Normal(29), Normal(31));
    for _ in 0..rows {
        let key = keys.row(HEAD_DIM);
        let decoded = round(format(name), given, &key);
        error.add(&key, &decoded);
        // A bias shows in the component of the query along the key: a query that is half the key
        // shows it with less noise.
        let query = queries.row(HEAD_DIM);
        let query: Vec<f32> = query.iter().zip(&key).map(|(q, k)| q + k).collect();
        products.add(&query, &key, &decoded);
    }
    (error, products)
}

#[test]
fn normal_rows_have_the_documented_error() {
    for (name, given, target) in TARGETS {
        let (error, _) = measure(name, given, 4000);
        let mse = error.relative_mse();
        // 4,000 rows: the sampling error of the mean is below 0.5 %.
        assert!(mse <= target * 1.005, "{name}: {mse:e}, at most {target:e}");
        assert!(mse >= target * 0.9, "{name}: {mse:e} is better than documented, {target:e}");
    }
}

#[test]
fn inner_products_with_searched_rows_are_unbiased() {
    for name in ["l6", "l4", "l3", "l6-g32", "l4-g32", "l3-g32"] {
        let (_, products) = measure(name, 1.0, 4000);
        assert!(products.bias().abs() < 2e-3, "{name}: {:e}", products.bias());
    }
}

#[test]
fn errors_have_no_preferred_direction() {
    // Var<q, k' - k> = |q|^2 |k|^2 D / d for queries independent of the key.
    for name in ["int8", "l6", "l4", "l3", "l4-g32"] {
        let (mut error, mut products) = (RowError::default(), ProductError::default());
        let (mut keys, mut queries) = (Normal(37), Normal(41));
        for _ in 0..6000 {
            let key = keys.row(HEAD_DIM);
            let decoded = round(format(name), 1.0, &key);
            error.add(&key, &decoded);
            for _ in 0..4 {
                products.add(&queries.row(HEAD_DIM), &key, &decoded);
            }
        }
        let variance = products.relative_variance() * 128.0;
        let ratio = variance / error.relative_mse();
        assert!((0.95..=1.05).contains(&ratio), "{name}: {ratio}");
    }
}

#[test]
fn other_head_dims_are_near_the_best_scale_of_each_row() {
    // Within 2 % of a search over 71 scales (16 % for l6, which tries fewer), and sampling error.
    for (head_dim, targets) in [
        (64, [4.65e-4, 7.1e-3, 3.15e-2]),
        (80, [4.8e-4, 7.4e-3, 3.2e-2]),
        (256, [5.5e-4, 8.7e-3, 3.5e-2]),
    ] {
        for (name, target) in ["l6", "l4", "l3"].into_iter().zip(targets) {
            let (mut error, mut keys) = (RowError::default(), Normal(43));
            for _ in 0..2000 {
                let key = keys.row(head_dim);
                error.add(&key, &round(format(name), 1.0, &key));
            }
            let mse = error.relative_mse();
            assert!(mse <= target, "{name}, {head_dim}: {mse:e}");
        }
    }
}
