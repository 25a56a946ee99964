//! Seeded random numbers, the same on every machine, so that the seed in a message reproduces the
//! failure.

/// `SplitMix64` (Steele, Lea, Flood 2014): one addition and a mix per number.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// Starts the stream of a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }
    /// Returns the next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
    /// Returns a number below `n`, which must not be 0.
    pub fn below(&mut self, n: u32) -> u32 {
        (self.bits() >> 32).wrapping_mul(u64::from(n)).wrapping_shr(32) as u32
    }
    /// Returns a number in `low..=high`.
    pub fn within(&mut self, low: u32, high: u32) -> u32 {
        low + self.below(high - low + 1)
    }
    /// Returns true once in `n` times on average.
    pub fn one_in(&mut self, n: u32) -> bool {
        self.below(n) == 0
    }
    /// Picks one of the choices.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u32) as usize]
    }
    /// Returns a uniform number in `0..1`.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }
    /// Returns a normally distributed number (Box and Muller).
    pub fn normal(&mut self) -> f32 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        (radius * (std::f64::consts::TAU * self.unit()).cos()) as f32
    }
    /// Returns `n` normally distributed numbers.
    pub fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }
}

/// Returns the value of one element in te-trace files, and wherever a value must show its place: a
/// multiple of 1/64 in -2..2, exact in every stored format.
pub fn mix(place: [u32; 6]) -> f32 {
    f32::from(mix_code(place)) / 64.0
}

/// Returns the code of [`mix`]; `place` is sequence, position, head, dim, 0 for K or 1 for V, and
/// layer counted from 1.
pub fn mix_code([seq, pos, head, dim, kv, layer]: [u32; 6]) -> i8 {
    let mut x = seq
        .wrapping_mul(0x9E37_79B1)
        .wrapping_add(pos.wrapping_mul(0x85EB_CA6B))
        .wrapping_add(head.wrapping_mul(0xC2B2_AE35))
        .wrapping_add(dim.wrapping_mul(0x27D4_EB2F))
        .wrapping_add(kv.wrapping_mul(0x1656_67B1))
        .wrapping_add(layer.wrapping_mul(0xD3A2_646C))
        .wrapping_add(0x5BD1_E995);
    x ^= x >> 16;
    x = x.wrapping_mul(0x7FEB_352D);
    x ^= x >> 15;
    x = x.wrapping_mul(0x846C_A68B);
    x ^= x >> 16;
    ((x >> 24) as i32 - 128) as i8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mix_is_the_published_function() {
        // First values of the golden rotary file, which does not rotate position 0.
        let row: Vec<_> = (0..4).map(|dim| mix([0, 0, 0, dim, 0, 1])).collect();
        assert_eq!(row, [1.65625, -1.546_875, 0.703_125, -1.375]);
    }

    #[test]
    fn numbers_stay_in_their_ranges() {
        let mut rng = Rng::new(1);
        assert!((0..1000).all(|_| (3..=5).contains(&rng.within(3, 5))));
        let mean = (0..1000).map(|_| f64::from(rng.normal())).sum::<f64>() / 1000.0;
        assert!(mean.abs() < 0.2, "{mean}");
    }
}
