//! Rows that are difficult for the formats.

/// `SplitMix64`.
#[derive(Debug)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, end: u32) -> u32 {
        (self.next() % u64::from(end)) as u32
    }

    /// Returns an approximately normal number: the sum of twelve uniform ones.
    pub(crate) fn normal(&mut self) -> f32 {
        let uniform = |random: &mut Self| (random.next() >> 40) as f32 / (1 << 24) as f32;
        (0..12).map(|_| uniform(self)).sum::<f32>() - 6.0
    }

    /// Returns a row of one of several kinds.
    pub(crate) fn row(&mut self, dim: usize) -> Vec<f32> {
        let kind = self.below(16);
        let magnitude = f32::exp2(self.below(40) as f32 - 20.0);
        let mut row: Vec<f32> = (0..dim).map(|_| self.normal()).collect();
        let at = self.below(dim as u32) as usize;
        match kind {
            0 => row.fill(0.0),
            1 => row[at] = f32::NAN,
            2 => row[at] = f32::INFINITY,
            3 => row[at] = f32::NEG_INFINITY,
            // Subnormal in f32, and in f16.
            4 => row.iter_mut().for_each(|value| *value *= 1e-39),
            5 => row.iter_mut().for_each(|value| *value *= 3e-8),
            6 => row.iter_mut().for_each(|value| *value *= 1e30),
            7 => row[at] *= 1000.0,
            8 => {
                row.fill(-0.0);
                row[at] = 3.5;
            }
            // Ties of the integer and minifloat formats.
            9 => row.iter_mut().for_each(|value| *value = (*value * 8.0).round() / 2.0),
            10 => row.iter_mut().for_each(|value| *value = value.signum()),
            11 => row.iter_mut().for_each(|value| *value *= magnitude),
            // Any bits, including NaN and infinities.
            12 => row.iter_mut().for_each(|value| *value = f32::from_bits(self.next() as u32)),
            13 => {
                let every = 1 + self.below(40) as usize;
                row.iter_mut().skip(at).step_by(every).for_each(|value| *value *= magnitude);
            }
            _ => {}
        }
        row
    }
}
