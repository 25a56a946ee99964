//! Pseudo-random values that are the same in every run.

/// An endless sequence of values between -1 and 1, from a linear congruential generator.
#[derive(Debug, Clone)]
pub(crate) struct Random {
    state: u32,
}

impl Random {
    pub(crate) fn new(seed: u32) -> Self {
        Self { state: seed }
    }
}

impl Iterator for Random {
    type Item = f32;

    fn next(&mut self) -> Option<f32> {
        self.state = self.state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let [_, _, low, high] = self.state.to_le_bytes();
        Some(f32::from(i16::from_le_bytes([low, high])) / 32768.0)
    }
}
