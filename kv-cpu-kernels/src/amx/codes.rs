//! Tables that turn codes of one byte into bf16: FP8 and signed bytes.
//!
//! The bits of nearly every bf16 are those of its code, moved: each byte of the bf16 is a linear
//! function of the code's bits over GF(2), which GF2P8AFFINEQB computes for 64 codes at once. Codes
//! with the smallest exponent (zero and subnormals) and the largest (NaN and infinity) are looked
//! up: at most 32 codes, which another linear function maps to the lowest indices.
//!
//! No linear function exists for integers: all magnitudes are looked up.
#![expect(
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "tables that are computed at compile time"
)]
use kv_format::minifloat;

/// The bf16 of each code of an encoding, by byte.
#[derive(Debug)]
pub(crate) enum Codes {
    /// FP8.
    Floats(&'static Floats),
    /// Signed bytes.
    Integers(&'static Integers),
}

/// Codes whose upper bit is the sign, and below it the exponent.
#[derive(Debug)]
pub(crate) struct Floats {
    /// Lower and upper bytes of the bf16 of most codes.
    pub(crate) low: Linear,
    pub(crate) high: Linear,
    /// Index of a code in an order that begins with the other codes.
    pub(crate) order: Linear,
    /// Number of codes that are looked up, the first in that order: a power of two, at most 64.
    pub(crate) first: u8,
    /// Lower and upper bytes of these codes, in that order.
    pub(crate) first_low: Lines<64>,
    pub(crate) first_high: Lines<64>,
}

/// Signed integers.
#[derive(Debug)]
pub(crate) struct Integers {
    /// Lower and upper bytes of 0 to 127.
    pub(crate) low: Lines<128>,
    pub(crate) high: Lines<128>,
    /// Upper byte of 128; its lower byte is that of zero.
    pub(crate) highest: u8,
}

/// Whole cache lines.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Lines<const N: usize>(pub(crate) [u8; N]);

/// A function of a byte whose bits are sums modulo 2 of bits of the byte, and of a constant.
#[derive(Debug)]
pub(crate) struct Linear {
    /// The matrix of bits, the row of the highest bit first, repeated eight times as GF2P8AFFINEQB
    /// reads it.
    pub(crate) matrices: Lines<64>,
    pub(crate) constant: u8,
}

impl Linear {
    const fn of(&self, byte: u8) -> u8 {
        let (mut bits, mut i) = (self.constant, 0);
        while i < 8 {
            bits ^= ((self.matrices.0[7 - i] & byte).count_ones() as u8 & 1) << i;
            i += 1;
        }
        bits
    }

    /// Returns the function whose value is `at` at `byte`, and `one_bit_other[i]` where bit `i` of
    /// `byte` is flipped.
    const fn through(byte: u8, at: u8, one_bit_other: [u8; 8]) -> Self {
        let (mut matrices, mut i) = ([0; 64], 0);
        while i < 64 {
            let mut bit = 0;
            while bit < 8 {
                matrices[i] |= ((one_bit_other[bit] ^ at) >> (7 - i % 8) & 1) << bit;
                bit += 1;
            }
            i += 1;
        }
        let mut linear = Self { matrices: Lines(matrices), constant: 0 };
        linear.constant = linear.of(byte) ^ at;
        linear
    }
}

pub(crate) static E4M3: Codes = Codes::Floats(&E4M3_HALVES);
pub(crate) static E5M2: Codes = Codes::Floats(&E5M2_HALVES);
pub(crate) static INT8: Codes = Codes::Integers(&INT8_HALVES);

static E4M3_HALVES: Floats = floats(&minifloat::E4M3, 3);
static E5M2_HALVES: Floats = floats(&minifloat::E5M2, 2);
static INT8_HALVES: Integers = {
    let (mut low, mut high) = ([0; 128], [0; 128]);
    let mut i = 0;
    while i < 128 {
        [low[i], high[i]] = halves(i as f32);
        i += 1;
    }
    Integers { low: Lines(low), high: Lines(high), highest: halves(128.0)[1] }
};

/// Returns the bytes of a bf16, the lower one first.
const fn halves(value: f32) -> [u8; 2] {
    let bits = value.to_bits();
    assert!(bits << 16 == 0, "a bf16");
    [(bits >> 16) as u8, (bits >> 24) as u8]
}

const fn floats(values: &[f32; 256], mantissa_bits: u32) -> Floats {
    // Neither its exponent nor one that differs in a single bit is the smallest or the largest.
    const BYTE: u8 = 0b0011_0000;
    let mut others = [[0; 8]; 3];
    let mut bit = 0;
    while bit < 8 {
        let code = BYTE ^ 1 << bit;
        [others[0][bit], others[1][bit]] = halves(values[code as usize]);
        others[2][bit] = place(code, mantissa_bits);
        bit += 1;
    }
    let at = halves(values[BYTE as usize]);
    let [low, high, order] = [
        Linear::through(BYTE, at[0], others[0]),
        Linear::through(BYTE, at[1], others[1]),
        Linear::through(BYTE, place(BYTE, mantissa_bits), others[2]),
    ];
    // Two exponents, with both signs.
    let first = 4 << mantissa_bits;
    let (mut first_low, mut first_high) = ([0; 64], [0; 64]);
    let mut code = 0;
    while code < 256 {
        let [of_low, of_high] = halves(values[code]);
        let place = order.of(code as u8);
        if place < first {
            (first_low[place as usize], first_high[place as usize]) = (of_low, of_high);
        } else {
            assert!(low.of(code as u8) == of_low && high.of(code as u8) == of_high, "not linear");
        }
        code += 1;
    }
    let [first_low, first_high] = [Lines(first_low), Lines(first_high)];
    Floats { low, high, order, first, first_low, first_high }
}

/// Returns the index of a code in an order with the smallest exponent first, then the largest.
const fn place(code: u8, mantissa_bits: u32) -> u8 {
    let magnitude = code & 0x7f;
    let (exponent, mantissa) = (magnitude >> mantissa_bits, magnitude % (1 << mantissa_bits));
    // An exponent of all ones becomes 1.
    let exponent = (exponent ^ exponent << 1) % (1 << (7 - mantissa_bits));
    exponent << (mantissa_bits + 1) | code >> 7 << mantissa_bits | mantissa
}

#[cfg(any(test, feature = "testing"))]
impl Codes {
    /// The bits of the bf16 of a code.
    pub(crate) fn of(&self, code: u8) -> u16 {
        let halves = match self {
            Self::Floats(floats) => {
                let place = usize::from(floats.order.of(code));
                if place < usize::from(floats.first) {
                    [floats.first_low.0[place], floats.first_high.0[place]]
                } else {
                    [&floats.low, &floats.high].map(|half| half.of(code))
                }
            }
            Self::Integers(integers) => {
                let magnitude = usize::from(code.cast_signed().unsigned_abs());
                let low = integers.low.0[magnitude % 128];
                let high = integers.high.0.get(magnitude).unwrap_or(&integers.highest);
                [low, high | code & 0x80]
            }
        };
        u16::from_le_bytes(halves)
    }
}
