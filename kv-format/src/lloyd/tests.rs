//! Proof of the levels: the fixed point of Lloyd's iteration, which has only one, is the optimum.
use super::*;

/// Integrates the normal density `p` and `x p` over `[from, to]` by Simpson's rule.
fn moments(from: f64, to: f64) -> (f64, f64) {
    // Steps of at most 1/128: the error is of fourth order.
    let steps = 2 * (16..600).find(|n| f64::from(*n) / 64.0 > to - from).unwrap();
    let width = (to - from) / f64::from(steps);
    let density = |x: f64| (-0.5 * x * x).exp();
    let (mut mass, mut first) = (0.0, 0.0);
    for step in 0..=steps {
        let x = from + width * f64::from(step);
        let weight = match step {
            end if end == 0 || end == steps => 1.0,
            odd if odd % 2 == 1 => 4.0,
            _ => 2.0,
        };
        mass += weight * density(x);
        first += weight * density(x) * x;
    }
    (mass * width / 3.0, first * width / 3.0)
}

/// Runs Lloyd's iteration to its fixed point, from the magnitudes of one half.
fn iterate(mut levels: Vec<f64>) -> Vec<f64> {
    loop {
        let mut bounds = vec![0.0];
        bounds.extend(levels.windows(2).map(|pair| f64::midpoint(pair[0], pair[1])));
        // The mass beyond 9 is 1e-19.
        bounds.push(9.0);
        let next: Vec<f64> = bounds
            .windows(2)
            .map(|cell| {
                let (mass, first) = moments(cell[0], cell[1]);
                first / mass
            })
            .collect();
        let moved = next.iter().zip(&levels).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        levels = next;
        if moved < 1e-12 {
            return levels;
        }
    }
}

#[test]
fn magnitudes_are_the_fixed_point_of_lloyds_iteration() {
    for bits in [3, 4, 6] {
        let stored = magnitudes(bits).unwrap();
        assert_eq!(stored.len(), 1 << (bits - 1));
        // Start 1 % off, so that stopping near the start would show.
        let found = iterate(stored.iter().map(|level| f64::from(*level) * 1.01).collect());
        for (stored, found) in stored.iter().zip(found) {
            assert!((f64::from(*stored) - found).abs() < 5e-7, "{bits} bits: {stored} {found}");
        }
    }
    assert!([0, 1, 2, 5, 7, 8, 32].iter().all(|bits| magnitudes(*bits).is_none()));
}

#[test]
fn thresholds_lie_halfway() {
    for bits in [3, 4, 6] {
        let (levels, bounds) = (magnitudes(bits).unwrap(), thresholds(bits).unwrap());
        assert_eq!(bounds.len() + 1, levels.len());
        for (pair, bound) in levels.windows(2).zip(bounds) {
            assert!(pair[0] < *bound && *bound < pair[1]);
            assert_eq!(bound.to_bits(), f32::midpoint(pair[0], pair[1]).to_bits());
        }
    }
    assert!(thresholds(5).is_none());
}

/// Compares the index of every value near a threshold or a cell's border with each codebook's
/// method.
fn check<B: Codebook>() {
    let (levels, bounds) = (magnitudes(B::BITS).unwrap(), thresholds(B::BITS).unwrap());
    let mut values = vec![0.0, 1e-30, 100.0, 1e30, f32::MAX, f32::INFINITY];
    for bound in bounds {
        values.extend([bound.next_down(), *bound, bound.next_up()]);
    }
    for border in 0..200_u8 {
        let border = f32::from(border) / 32.0;
        values.extend([border.next_down().abs(), border, border.next_up()]);
    }
    for value in values {
        let expected = bounds.iter().filter(|bound| value > **bound).count();
        assert_eq!(usize::from(B::index(value)), expected, "{} bits, {value}", B::BITS);
        assert_eq!(B::nearest(value).to_bits(), levels[expected].to_bits());
        assert_eq!(B::magnitude(B::index(value)).to_bits(), levels[expected].to_bits());
    }
}

#[test]
fn a_value_takes_the_nearest_magnitude() {
    check::<Book3>();
    check::<Book4>();
    check::<Book6>();
}
