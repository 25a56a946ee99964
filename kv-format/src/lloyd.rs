//! Codebooks of the Lloyd-Max formats.
//!
//! Owns the levels and the choice of the level for a value. A Lloyd-Max quantiser has the smallest
//! mean squared error of all scalar quantisers with the same number of levels for one distribution,
//! here the standard normal: a value goes to the nearest level, and a level is the mean of the
//! values that go to it. Rows after signs and a Hadamard rotation are close to normal, whatever
//! they were before.
//!
//! Levels are symmetric, so half of them are listed here: a code is a sign and the index of a
//! magnitude. No level is zero.
//!
//! # Source
//! S. P. Lloyd, "Least squares quantization in PCM", 1982; J. Max, "Quantizing for minimum
//! distortion", 1960. The numbers are the fixed point of Lloyd's iteration in f64, rounded once; a
//! test repeats it.
#![expect(
    clippy::inline_always,
    reason = "encoders are inlined into callers that enable target features"
)]
#![expect(
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "tables of known length, indices masked to it"
)]

#[cfg(test)]
mod tests;

/// Magnitudes of the 8 levels of `l3`, ascending.
pub static L3: [f32; 4] = [0.245_094_18, 0.756_005_3, 1.343_909_3, 2.151_945_6];

/// Magnitudes of the 16 levels of `l4`, ascending.
pub static L4: [f32; 8] = [
    0.128_395_04,
    0.388_048_3,
    0.656_759_14,
    0.942_340_43,
    1.256_231_2,
    1.618_046_4,
    2.069_017_2,
    2.732_589_5,
];

/// Magnitudes of the 64 levels of `l6`, ascending.
pub static L6: [f32; 32] = [
    0.033_409_506,
    0.100_278_29,
    0.167_296_9,
    0.234_566_99,
    0.302_192_84,
    0.370_282_65,
    0.438_949_67,
    0.508_313_8,
    0.578_503,
    0.649_655_6,
    0.721_921_9,
    0.795_467_7,
    0.870_476_6,
    0.947_154_94,
    1.025_736_3,
    1.106_488_2,
    1.189_720_2,
    1.275_794_5,
    1.365_141,
    1.458_276_4,
    1.555_831_2,
    1.658_588_9,
    1.767_541_9,
    1.883_977_3,
    2.009_611,
    2.146_810_3,
    2.298_981_2,
    2.471_305,
    2.672_273_9,
    2.917_406_8,
    3.240_437,
    3.744_101_3,
];

/// Thresholds between the magnitudes of `l3`: midpoints of neighbours. A value on a threshold takes
/// the smaller magnitude.
pub static L3_THRESHOLDS: [f32; 3] = between(&L3);
/// Thresholds between the magnitudes of `l4`.
pub static L4_THRESHOLDS: [f32; 7] = between(&L4);
/// Thresholds between the magnitudes of `l6`.
pub static L6_THRESHOLDS: [f32; 31] = between(&L6);

/// Returns the magnitudes of `2^bits` Lloyd-Max levels of the standard normal distribution,
/// ascending; `None` unless `bits` is 3, 4 or 6.
pub fn magnitudes(bits: u32) -> Option<&'static [f32]> {
    match bits {
        3 => Some(&L3),
        4 => Some(&L4),
        6 => Some(&L6),
        _ => None,
    }
}

/// Returns the thresholds between the [`magnitudes`], one fewer; a value on a threshold takes the
/// smaller magnitude.
pub fn thresholds(bits: u32) -> Option<&'static [f32]> {
    match bits {
        3 => Some(&L3_THRESHOLDS),
        4 => Some(&L4_THRESHOLDS),
        6 => Some(&L6_THRESHOLDS),
        _ => None,
    }
}

/// A codebook, with the constants of its encoder.
pub(crate) trait Codebook {
    /// Bits of a code, including the sign.
    const BITS: u32;
    /// The best scale of a row is near `NEAR_SCALE[0] * rms + NEAR_SCALE[1] * amax`. Fitted by
    /// least squares to the best of 61 scales of 20,000 normal rows of 128: the largest value says
    /// much about where the outer levels should lie.
    const NEAR_SCALE: [f32; 2];
    /// The same for a group of 32, by squared error, fitted to the best of 41 scales.
    const NEAR_GROUP_SCALE: [f32; 2];
    /// Scales to try around it, as multiples of it.
    const TRIED: &'static [f32];
    /// Weight of the bias against the squared error if the scale is coarse; see the encoder.
    const BIAS_WEIGHT: f32;

    /// Returns the index of the magnitude nearest to `value`, which is not negative.
    fn index(value: f32) -> u8;
    /// Returns the magnitude nearest to `value`, which is not negative.
    fn nearest(value: f32) -> f32;
    /// Returns the magnitude of an index; bits above the code are ignored.
    fn magnitude(index: u8) -> f32;
}

/// Codebook of `l3`.
#[derive(Debug)]
pub(crate) enum Book3 {}
/// Codebook of `l4`.
#[derive(Debug)]
pub(crate) enum Book4 {}
/// Codebook of `l6`.
#[derive(Debug)]
pub(crate) enum Book6 {}

impl Codebook for Book3 {
    const BITS: u32 = 3;
    const NEAR_SCALE: [f32; 2] = [0.462, 0.190];
    const NEAR_GROUP_SCALE: [f32; 2] = [0.057, 0.390];
    const TRIED: &'static [f32] = &[0.9, 0.95, 1.05, 1.1];
    const BIAS_WEIGHT: f32 = 24.0;

    #[inline(always)]
    fn index(value: f32) -> u8 {
        count(value, &L3_THRESHOLDS)
    }
    #[inline(always)]
    fn nearest(value: f32) -> f32 {
        choose(value, &L3, &L3_THRESHOLDS)
    }
    #[inline]
    fn magnitude(index: u8) -> f32 {
        L3[usize::from(index & 3)]
    }
}

impl Codebook for Book4 {
    const BITS: u32 = 4;
    const NEAR_SCALE: [f32; 2] = [0.086, 0.310];
    const NEAR_GROUP_SCALE: [f32; 2] = [0.064, 0.337];
    const TRIED: &'static [f32] = &[0.9, 0.95, 1.05, 1.1];
    const BIAS_WEIGHT: f32 = 4.0;

    #[inline(always)]
    fn index(value: f32) -> u8 {
        count(value, &L4_THRESHOLDS)
    }
    #[inline(always)]
    fn nearest(value: f32) -> f32 {
        choose(value, &L4, &L4_THRESHOLDS)
    }
    #[inline]
    fn magnitude(index: u8) -> f32 {
        L4[usize::from(index & 7)]
    }
}

impl Codebook for Book6 {
    const BITS: u32 = 6;
    const NEAR_SCALE: [f32; 2] = [0.515, 0.124];
    const NEAR_GROUP_SCALE: [f32; 2] = [0.535, 0.111];
    const TRIED: &'static [f32] = &[0.94, 1.06];
    const BIAS_WEIGHT: f32 = 4.0;

    #[inline(always)]
    fn index(value: f32) -> u8 {
        L6_CELLS.index(value)
    }
    #[inline(always)]
    fn nearest(value: f32) -> f32 {
        Self::magnitude(Self::index(value))
    }
    #[inline]
    fn magnitude(index: u8) -> f32 {
        L6[usize::from(index & 31)]
    }
}

/// Counts the thresholds below `value`; vectorises when inlined into a loop.
#[inline(always)]
fn count<const N: usize>(value: f32, thresholds: &[f32; N]) -> u8 {
    let below = thresholds.iter().map(|threshold| u32::from(value > *threshold));
    below.sum::<u32>() as u8
}

/// Returns the magnitude of the index without a table lookup: sums the differences of magnitudes,
/// as integers of their bits, over the thresholds below `value`.
#[inline(always)]
fn choose<const N: usize, const M: usize>(
    value: f32,
    magnitudes: &[f32; N],
    thresholds: &[f32; M],
) -> f32 {
    let mut bits = magnitudes[0].to_bits();
    for (threshold, pair) in thresholds.iter().zip(magnitudes.array_windows::<2>()) {
        let [lower, upper] = pair.map(f32::to_bits);
        // A mask, because the compiler may turn a choice into branches.
        bits += u32::from(value > *threshold).wrapping_neg() & (upper - lower);
    }
    f32::from_bits(bits)
}

/// The thresholds of `l6` by cell: cells of 1/16 around every multiple of 1/16, none of which
/// contains two thresholds.
struct Cells {
    /// Number of thresholds below each cell.
    below: [u8; Self::COUNT],
    /// The threshold inside each cell; infinity without one.
    inside: [f32; Self::COUNT],
}

static L6_CELLS: Cells = Cells::new();

impl Cells {
    const COUNT: usize = 64;
    const PER_ONE: f32 = 16.0;

    const fn new() -> Self {
        let mut cells = Self { below: [0; Self::COUNT], inside: [f32::INFINITY; Self::COUNT] };
        let mut cell = 0;
        while cell < Self::COUNT {
            let begin = (cell as f32 - 0.5) / Self::PER_ONE;
            let end = (cell as f32 + 0.5) / Self::PER_ONE;
            let mut at = 0;
            while at < L6_THRESHOLDS.len() {
                if L6_THRESHOLDS[at] < begin {
                    cells.below[cell] += 1;
                } else if L6_THRESHOLDS[at] <= end {
                    assert!(cells.inside[cell].is_infinite(), "two thresholds in one cell");
                    cells.inside[cell] = L6_THRESHOLDS[at];
                }
                at += 1;
            }
            cell += 1;
        }
        cells
    }

    #[inline(always)]
    fn index(&self, value: f32) -> u8 {
        // The last bit of a float from 2^23 on is worth 1: adding it rounds to the nearest cell.
        const ROUNDER: f32 = 8_388_608.0;
        let scaled = value * Self::PER_ONE;
        let last = (Self::COUNT - 1) as f32;
        let scaled = if scaled < last { scaled } else { last };
        let cell = (scaled + ROUNDER).to_bits() as usize % Self::COUNT;
        self.below[cell] + u8::from(value > self.inside[cell])
    }
}

const fn between<const N: usize, const M: usize>(magnitudes: &[f32; N]) -> [f32; M] {
    assert!(M + 1 == N, "one threshold fewer than magnitudes");
    let mut thresholds = [0.0; M];
    let mut at = 0;
    while at < M {
        thresholds[at] = f32::midpoint(magnitudes[at], magnitudes[at + 1]);
        at += 1;
    }
    thresholds
}
