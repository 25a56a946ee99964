//! Rotary position embedding.

/// Parameters of the rotary embedding.
#[derive(Debug, Clone, Copy)]
pub struct Rope {
    /// Frequencies are `base^(-2i / rotated dims)`.
    pub base: f64,
    /// First part of the row that is rotated, 1 for all.
    pub rotary_percent: f64,
    /// Pairs `(2i, 2i + 1)` instead of `(i, i + half)`.
    pub interleaved: bool,
    /// Positions are divided by this.
    pub interpolation: f64,
}

impl Rope {
    /// Returns the angle of pair `pair` of `half` at `position`.
    pub fn angle(&self, position: u32, pair: usize, half: usize) -> f64 {
        let frequency = self.base.powf(-(pair as f64) / half as f64);
        f64::from(position) / self.interpolation * frequency
    }

    /// Rotates one row of one head.
    pub fn rotate(&self, row: &[f32], position: u32) -> Vec<f64> {
        let mut out: Vec<f64> = row.iter().map(|x| f64::from(*x)).collect();
        let half = ((row.len() as f64 * self.rotary_percent) as usize) / 2;
        for pair in 0..half {
            let (a, b) =
                if self.interleaved { (2 * pair, 2 * pair + 1) } else { (pair, pair + half) };
            let (sin, cos) = self.angle(position, pair, half).sin_cos();
            let (x, y) = (out[a], out[b]);
            out[a] = x * cos - y * sin;
            out[b] = y * cos + x * sin;
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rotation_by_hand() {
        let rope = Rope { base: 1.0, rotary_percent: 1.0, interleaved: false, interpolation: 2.0 };
        // Base 1 rotates every pair by position / 2 radians.
        let turned = rope.rotate(&[1.0, 0.0, 0.0, 2.0], 2);
        let (sin, cos) = 1_f64.sin_cos();
        assert_eq!(turned, [cos, -2.0 * sin, sin, 2.0 * cos]);
        let pairs = Rope { interleaved: true, rotary_percent: 0.5, ..rope };
        assert_eq!(pairs.rotate(&[1.0, 0.0, 5.0, 2.0], 2), [cos, sin, 5.0, 2.0]);
    }
}
