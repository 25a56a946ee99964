//! Encodings with a code of one byte for every value, as the bf16 that the codes are.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::indexing_slicing,
    reason = "tables that are computed at compile time"
)]
use kv_quant::minifloat;

/// What the codes of an encoding are, by half: bf16, the upper bit of a code the sign.
#[derive(Debug)]
pub(super) struct Codes {
    /// The lower bytes of codes 0 to 127, and the upper ones.
    pub(super) low: Halves,
    pub(super) high: Halves,
    /// Codes from 128 on are negative integers, not others with a sign.
    pub(super) are_integers: bool,
}

/// One byte of each.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Halves(pub(super) [u8; 128]);

pub(super) static E4M3: Codes = of_floats(&minifloat::E4M3);
pub(super) static E5M2: Codes = of_floats(&minifloat::E5M2);
pub(super) static INT8: Codes = {
    let (mut values, mut i) = ([0.0; 256], 0);
    while i < 128 {
        values[i] = i as f32;
        i += 1;
    }
    Codes { are_integers: true, ..of_floats(&values) }
};

const fn of_floats(values: &[f32; 256]) -> Codes {
    let (mut low, mut high) = ([0; 128], [0; 128]);
    let mut i = 0;
    while i < 128 {
        let bits = values[i].to_bits();
        assert!(bits << 16 == 0, "a bf16");
        (low[i], high[i]) = ((bits >> 16) as u8, (bits >> 24) as u8);
        i += 1;
    }
    Codes { low: Halves(low), high: Halves(high), are_integers: false }
}

#[cfg(test)]
impl Codes {
    /// What a code is.
    pub(super) fn of(&self, code: u8) -> u16 {
        let index = if self.are_integers { code.cast_signed().unsigned_abs() } else { code & 0x7f };
        if index == 128 {
            return half::bf16::from_f32(-128.0).to_bits();
        }
        let [low, high] = [&self.low, &self.high].map(|table| table.0[usize::from(index)]);
        u16::from_le_bytes([low, high | code & 0x80])
    }
}
