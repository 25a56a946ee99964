//! Queries and weights of 16 bits.
use super::*;

/// Queries of bf16 against keys of bf16 and FP8, which some CPUs multiply as they are.
#[test]
fn queries_of_bf16_come_to_attention() {
    let mut random = Random::new(48);
    let fp8 = ["fp8-e4m3", "fp8-e5m2"].map(|name| (name.parse().unwrap(), false));
    let formats = [(KvFormat::Bf16, true), fp8[0], fp8[1]];
    let dims = [32, 64, 96, 128, 256];
    for (index, (format, dim)) in formats.iter().flat_map(|f| dims.map(|d| (*f, d))).enumerate() {
        let mut pieces = Vec::new();
        for tokens in [PIECE, 3 + index % 5] {
            let mut plane = |()| Plane::new(&mut random, format, (dim, tokens, 32));
            pieces.push([(); 2].map(&mut plane));
        }
        let first = [&pieces[0][0], &pieces[0][1]];
        for (name, kernels, exact) in with_both_exponentials() {
            for count in COUNTS.into_iter().filter(|_| has_pieces(kernels, first)) {
                let mut rows = Rows::new(&mut random, (1, count), first);
                rows.q.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
                for [k, v] in &pieces {
                    rows.meet((kernels, exact), [k, v]);
                }
                let what = format!("{name} {} {dim} {count}", format.0);
                rows.are_attention(&what, exact, &pieces);
            }
        }
    }
}

/// The greatest sums that bytes come to in fixed point, by codes that no quantisation makes.
#[test]
fn bytes_of_any_value_come_to_attention() {
    const DIM: usize = 512;
    let format: KvFormat = "int8".parse().unwrap();
    let mut random = Random::new(49);
    let [mut k, mut v] =
        [(); 2].map(|()| Plane::new(&mut random, (format, false), (DIM, PIECE, 0)));
    for plane in [&mut k, &mut v] {
        let rows = plane.bytes.chunks_mut(plane.stride).zip(&mut plane.values);
        for (token, (row, values)) in rows.enumerate().filter(|(token, _)| token % 2 == 0) {
            row[..DIM].fill(i8::MIN.cast_unsigned());
            let scale = f16::from_f32(0.01 + token as f32 / 4096.0);
            row[plane.layout.scales()..][..2].copy_from_slice(&scale.to_bits().to_le_bytes());
            values.fill(-128.0 * scale.to_f32());
        }
    }
    for (name, kernels, exact) in with_both_exponentials() {
        for count in COUNTS.into_iter().filter(|_| has_pieces(kernels, [&k, &v])) {
            let mut rows = Rows::new(&mut random, (1, count), [&k, &v]);
            for (index, q) in rows.q.chunks_mut(rows.q_stride).enumerate() {
                q.fill(if index % 2 == 0 { 0.004 } else { -0.003 });
            }
            rows.meet((kernels, exact), [&k, &v]);
            let sum = rows.lanes[0].running(0, count).sum;
            assert!(sum > 1.0, "{name} {count}: {sum}");
            // Values of V are up to 1.8.
            rows.are_within(&format!("{name} {count}"), 2e-4, &[[k.clone(), v.clone()]]);
        }
    }
}

/// Queries that fixed point cannot hold, and scales that make weights such, come to what they come
/// to by `f32`.
#[test]
fn what_fits_no_fixed_point_is_met_as_it_is() {
    const DIM: usize = 64;
    let format: KvFormat = "int8".parse().unwrap();
    let mut random = Random::new(50);
    let [k, mut v] = [(); 2].map(|()| Plane::new(&mut random, (format, false), (DIM, PIECE, 0)));
    let weighs = |kernels: Kernels, count: usize, q: f32, v: &Plane| {
        let mut rows = Rows::new(&mut Random::new(51), (1, count), [&k, v]);
        // The first row has nothing else.
        let (first, _) = rows.q.split_at_mut(rows.q_stride);
        first.fill(0.0);
        first[0] = q;
        rows.meet((kernels, false), [&k, v]);
        rows.out
    };
    let others = Kernels::emulated_matrix();
    for (name, kernels, _) in with_both_exponentials().filter(|(_, _, exact)| !exact) {
        for count in COUNTS.into_iter().filter(|_| has_pieces(kernels, [&k, &v])) {
            for q in [0.0, f32::NAN, f32::INFINITY, f32::MAX, 1e-40] {
                let [came, wanted] = [kernels, others].map(|of| weighs(of, count, q, &v));
                are_alike(&format!("{name} {count} {q}"), &came, &wanted);
            }
        }
    }
    for scale in [f16::INFINITY, f16::NAN] {
        let at = 5 * v.stride + v.layout.scales();
        v.bytes[at..][..2].copy_from_slice(&scale.to_bits().to_le_bytes());
        for (name, kernels) in all() {
            for count in COUNTS.into_iter().filter(|_| has_pieces(kernels, [&k, &v])) {
                let [came, wanted] = [kernels, others].map(|of| weighs(of, count, 0.5, &v));
                assert!(wanted.iter().any(|x| !x.is_finite()), "{name} {count}: {scale}");
                are_alike(&format!("{name} {count} {scale}"), &came, &wanted);
            }
        }
    }
}

/// A query value that is great where keys are zero does not make the others too coarse.
#[test]
fn few_great_queries_spoil_no_scores() {
    const DIM: usize = 128;
    let mut random = Random::new(52);
    let format = ("int8".parse().unwrap(), false);
    let k = (0..PIECE).map(|_| [vec![0.0; 2], random.units(DIM - 2)].concat()).collect();
    let k = Plane::of(k, format, 0);
    let v = Plane::new(&mut random, format, (DIM, PIECE, 0));
    for (name, kernels, exact) in with_both_exponentials() {
        for count in COUNTS.into_iter().filter(|_| has_pieces(kernels, [&k, &v])) {
            let mut rows = Rows::new(&mut random, (1, count), [&k, &v]);
            rows.q.chunks_mut(rows.q_stride).for_each(|q| q[1] = 1e4);
            rows.meet((kernels, exact), [&k, &v]);
            rows.are_within(&format!("{name} {count}"), 3e-5, &[[k.clone(), v.clone()]]);
        }
    }
}

/// Small weights count where the values of the great ones are zero.
#[test]
fn small_weights_count_where_great_ones_add_nothing() {
    const DIM: usize = 64;
    let mut random = Random::new(53);
    let format = ("int8".parse().unwrap(), false);
    let k = (0..PIECE).map(|token| vec![if token == 0 { 1.0 } else { 0.1 }; DIM]).collect();
    let mut v: Vec<_> = (0..PIECE).map(|_| random.units(DIM)).collect();
    v[0].fill(0.0);
    let [k, v] = [k, v].map(|rows| Plane::of(rows, format, 0));
    for (name, kernels, exact) in with_both_exponentials() {
        for count in COUNTS.into_iter().filter(|_| has_pieces(kernels, [&k, &v])) {
            let mut rows = Rows::new(&mut random, (1, count), [&k, &v]);
            rows.q.fill(1.0);
            rows.meet((kernels, exact), [&k, &v]);
            let of_first = f64::from(rows.lanes[0].running(0, count).sum);
            assert!(of_first > 0.99, "{name} {count}: {of_first}");
            // All others weigh the same.
            let dot = |k: &Vec<f32>| k.iter().map(|k| f64::from(*k)).sum::<f64>();
            let off = f64::from(SCALE) * (dot(&k.values[1]) - dot(&k.values[0]));
            for (d, came) in rows.out[..DIM].iter().enumerate() {
                let wanted: f64 = v.values.iter().map(|v| f64::from(v[d]) * off.exp()).sum();
                let all: f64 = v.values.iter().map(|v| f64::from(v[d]).abs() * off.exp()).sum();
                assert!((f64::from(*came) - wanted).abs() < 1e-3 * all, "{name} {count}: {d}");
            }
        }
    }
}

/// Near each other, or NaN or infinite alike.
fn are_alike(what: &str, came: &[f32], wanted: &[f32]) {
    for (came, wanted) in came.iter().zip(wanted) {
        let is_near = (came - wanted).abs() <= 1e-3 * wanted.abs().max(1.0);
        let is_same = came == wanted || came.is_nan() && wanted.is_nan();
        assert!(is_near || is_same, "{what}: {came} {wanted}");
    }
}
