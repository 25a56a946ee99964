//! Rows in 16 bits, and the mean of a block.
//!
//! Formats with a tail keep rows in 16 bits until their block is full, and round every row to 16
//! bits first. The codes of a block therefore depend on its tokens alone, and not on how steps
//! split them. Formats with block means subtract the mean of these rounded rows, in the transformed
//! domain, before rows are encoded.
use half::f16;

/// Rounds a value as a 16-bit row stores it: to the nearest f16, ties to even, saturated at 65504;
/// NaN stays NaN.
pub fn round_wide(value: f32) -> f32 {
    wide(value).to_f32()
}

/// Writes a row in 16 bits, each value rounded as by [`round_wide`].
///
/// # Panics
/// If `row` does not have two bytes per value.
pub fn encode_wide(values: &[f32], row: &mut [u8]) {
    let (places, rest) = row.as_chunks_mut::<2>();
    assert!(rest.is_empty() && places.len() == values.len(), "two bytes per value");
    for (place, value) in places.iter_mut().zip(values) {
        *place = wide(*value).to_le_bytes();
    }
}

/// Reads a row in 16 bits.
///
/// # Panics
/// If `row` does not have two bytes per value.
pub fn decode_wide(row: &[u8], values: &mut [f32]) {
    let (places, rest) = row.as_chunks::<2>();
    assert!(rest.is_empty() && places.len() == values.len(), "two bytes per value");
    for (value, place) in values.iter_mut().zip(places) {
        *value = f16::from_le_bytes(*place).to_f32();
    }
}

fn wide(value: f32) -> f16 {
    // `clamp` keeps NaN.
    f16::from_f32(value.clamp(f16::MIN.to_f32(), f16::MAX.to_f32()))
}

/// Computes the mean of the rows of a block, summed in the order in which they are added.
///
/// A row with a value that is not finite or that saturated does not count: one broken token must
/// not break the others.
#[derive(Debug, Clone, Default)]
pub struct BlockMean {
    sums: Vec<f32>,
    rows: u16,
}

impl BlockMean {
    /// Starts a block of rows of `head_dim` values; keeps the allocation.
    pub fn reset(&mut self, head_dim: usize) {
        self.sums.clear();
        self.sums.resize(head_dim, 0.0);
        self.rows = 0;
    }

    /// Adds a row as it is stored in 16 bits ([`round_wide`]).
    ///
    /// # Panics
    /// If the row does not have the length given to [`Self::reset`].
    pub fn add(&mut self, row: &[f32]) {
        assert_eq!(row.len(), self.sums.len(), "the row has another length than `reset` was given");
        // Rows past 65535 of a block are ignored.
        let Some(rows) = self.rows.checked_add(1) else {
            return;
        };
        // Not `>=`, which a NaN would pass.
        if row.iter().all(|value| value.abs() < f16::MAX.to_f32()) {
            self.rows = rows;
            for (sum, value) in self.sums.iter_mut().zip(row) {
                *sum += value;
            }
        }
    }

    /// Sets the mean to one that a block stores.
    pub fn restore(&mut self, mean: &[f32]) -> &[f32] {
        self.sums.clear();
        self.sums.extend_from_slice(mean);
        &self.sums
    }

    /// Returns the mean as blocks store it, each value an f16. Zero if no row counted.
    pub fn finish(&mut self) -> &[f32] {
        let factor = f32::from(self.rows.max(1)).recip();
        for sum in &mut self.sums {
            *sum = round_wide(*sum * factor);
        }
        &self.sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wide_rows_saturate_and_keep_nan() {
        let values = [1.0, -0.1, 1e6, f32::NEG_INFINITY, f32::NAN, 65520.0];
        let mut row = [0; 12];
        encode_wide(&values, &mut row);
        let mut read = [0.0; 6];
        decode_wide(&row, &mut read);
        let expected = [1.0, f16::from_f32(-0.1).to_f32(), 65504.0, -65504.0, f32::NAN, 65504.0];
        for ((got, expected), value) in read.iter().zip(expected).zip(values) {
            assert!(got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan());
            assert!(got.to_bits() == round_wide(value).to_bits() || value.is_nan());
        }
    }

    #[test]
    #[should_panic(expected = "two bytes per value")]
    fn a_row_of_another_length_is_refused() {
        encode_wide(&[1.0], &mut [0; 3]);
    }

    #[test]
    fn a_broken_row_does_not_count() {
        let mut mean = BlockMean::default();
        mean.reset(2);
        mean.add(&[1.0, 8.0]);
        mean.add(&[f32::NAN, 1.0]);
        mean.add(&[round_wide(f32::INFINITY), 1.0]);
        mean.add(&[3.0, -4.0]);
        assert_eq!(mean.finish(), [2.0, 2.0]);
        mean.reset(1);
        mean.add(&[f32::NAN]);
        assert_eq!(mean.finish(), [0.0]);
        assert_eq!(mean.restore(&[0.5, 2.0]), [0.5, 2.0]);
    }

    #[test]
    fn the_mean_is_an_f16_within_range() {
        let mut mean = BlockMean::default();
        mean.reset(1);
        for value in [0.1, 0.2, 0.4] {
            mean.add(&[value]);
        }
        let third = mean.finish()[0];
        assert_eq!(third.to_bits(), round_wide(third).to_bits());
        assert!((third - 0.7 / 3.0).abs() < 2e-4);
    }
}
