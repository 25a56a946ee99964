//! Sixteen lanes in plain Rust, so that the loops of a wide vector are tested on any CPU. Calls
//! stay calls: inlined, they take longer to compile than all instruction sets together.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "tests: exponents and codes are small integers"
)]
use std::sync::LazyLock;

use half::{bf16, f16};

use super::piece::{
    self, Bytes, Coded, Codes, DotBf16, DotWords, Fp8, LookUp, Loops, Meeting, Paired, Piece,
    Plain, Words,
};
use super::simd::Simd;
use super::stored::{E4m3, E5m2};
use crate::encoding::Encoding;

/// Sixteen lanes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wide;

fn each<const N: usize>(mut lane: impl FnMut(usize) -> f32) -> [f32; N] {
    std::array::from_fn(&mut lane)
}

impl Simd for Wide {
    type F = [f32; 16];
    type I = [u32; 16];
    const LANES: usize = 16;
    const SUMS: usize = 16;
    const TOKENS: usize = 64;
    #[inline(never)]
    fn splat(self, x: f32) -> [f32; 16] {
        [x; 16]
    }
    #[inline(never)]
    fn add(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        each(|i| a[i] + b[i])
    }
    #[inline(never)]
    fn mul(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        each(|i| a[i] * b[i])
    }
    #[inline(never)]
    fn fma(self, a: [f32; 16], b: [f32; 16], c: [f32; 16]) -> [f32; 16] {
        each(|i| a[i].mul_add(b[i], c[i]))
    }
    #[inline(never)]
    fn max(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        each(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(never)]
    fn pow2(self, n: [f32; 16]) -> [f32; 16] {
        n.map(|n| f32::from_bits(((n as i32).wrapping_add(127) as u32) << 23))
    }
    #[inline(never)]
    fn zero_below(self, x: [f32; 16], limit: f32, value: [f32; 16]) -> [f32; 16] {
        each(|i| if x[i] < limit { 0.0 } else { value[i] })
    }
    #[inline(never)]
    fn reduce_add(self, v: [f32; 16]) -> f32 {
        v.iter().sum()
    }
    #[inline(never)]
    fn reduce_max(self, v: [f32; 16]) -> f32 {
        v.into_iter().reduce(|a, b| if a > b { a } else { b }).unwrap()
    }
    #[inline(never)]
    unsafe fn load(self, from: *const f32, at: usize) -> [f32; 16] {
        // SAFETY: condition 1 of `Simd::load`.
        unsafe { from.wrapping_add(at).cast::<[f32; 16]>().read_unaligned() }
    }
    #[inline(never)]
    unsafe fn store(self, to: *mut f32, at: usize, v: [f32; 16]) {
        // SAFETY: condition 1 of `Simd::store`.
        unsafe { to.wrapping_add(at).cast::<[f32; 16]>().write_unaligned(v) }
    }
    #[inline(never)]
    unsafe fn load_f16(self, from: *const u16, at: usize) -> [f32; 16] {
        // SAFETY: condition 1 of `Simd::load`.
        let bits = unsafe { from.wrapping_add(at).cast::<[u16; 16]>().read_unaligned() };
        bits.map(|bits| f16::from_bits(bits).to_f32())
    }
    #[inline(never)]
    unsafe fn load_bf16(self, from: *const u16, at: usize) -> [f32; 16] {
        // SAFETY: condition 1 of `Simd::load`.
        let bits = unsafe { from.wrapping_add(at).cast::<[u16; 16]>().read_unaligned() };
        bits.map(|bits| bf16::from_bits(bits).to_f32())
    }
    #[inline(never)]
    unsafe fn load_bf16_pairs(self, from: *const u16, at: usize) -> [[f32; 16]; 2] {
        // SAFETY: condition 1 of `Simd::load_bf16_pairs`.
        let bits = unsafe { from.wrapping_add(at).cast::<[[u16; 2]; 16]>().read_unaligned() };
        [0, 1].map(|half| bits.map(|pair| bf16::from_bits(pair[half]).to_f32()))
    }
    #[inline(never)]
    unsafe fn store_f16(self, to: *mut u16, at: usize, v: [f32; 16]) {
        let bits = v.map(|v| f16::from_f32(v).to_bits());
        // SAFETY: condition 1 of `Simd::store`.
        unsafe { to.wrapping_add(at).cast::<[u16; 16]>().write_unaligned(bits) }
    }
    #[inline(never)]
    unsafe fn store_bf16(self, to: *mut u16, at: usize, v: [f32; 16]) {
        let bits = v.map(|v| bf16::from_f32(v).to_bits());
        // SAFETY: condition 1 of `Simd::store`.
        unsafe { to.wrapping_add(at).cast::<[u16; 16]>().write_unaligned(bits) }
    }
    #[inline(never)]
    fn splat_bits(self, word: u32) -> [u32; 16] {
        [word; 16]
    }
    #[inline(never)]
    fn shl(self, x: [u32; 16], bits: u32) -> [u32; 16] {
        x.map(|x| x << bits)
    }
    #[inline(never)]
    fn shr(self, x: [u32; 16], bits: u32) -> [u32; 16] {
        x.map(|x| x >> bits)
    }
    #[inline(never)]
    fn shl_each(self, x: [u32; 16], bits: [u32; 16]) -> [u32; 16] {
        std::array::from_fn(|i| x[i] << bits[i])
    }
    #[inline(never)]
    fn shr_each(self, x: [u32; 16], bits: [u32; 16]) -> [u32; 16] {
        std::array::from_fn(|i| x[i] >> bits[i])
    }
    #[inline(never)]
    fn nibble(self, x: [u32; 16]) -> [f32; 16] {
        x.map(|x| (x % 16) as f32)
    }
    #[inline(never)]
    fn flip(self, x: [f32; 16], signs: [u32; 16]) -> [f32; 16] {
        each(|i| if signs[i] >> 31 == 1 { -x[i] } else { x[i] })
    }
    #[inline(never)]
    fn lookup4(self, table: &[f32; 4], code: [u32; 16]) -> [f32; 16] {
        code.map(|code| table[code as usize % 4])
    }
    #[inline(never)]
    fn lookup32(self, table: &[f32; 32], low: [u32; 16], high: [u32; 16]) -> [f32; 16] {
        each(|i| table[(low[i] % 16 + high[i] % 2 * 16) as usize])
    }
    #[inline(never)]
    fn symmetric16(self, magnitudes: &[f32; 8], code: [u32; 16]) -> [f32; 16] {
        self.flip(code.map(|code| magnitudes[code as usize % 8]), code.map(|code| code << 28))
    }
    #[inline(never)]
    unsafe fn load_bits(self, from: *const u32, at: usize) -> [u32; 16] {
        // SAFETY: condition 1 of `Simd::load`.
        unsafe { from.wrapping_add(at).cast::<[u32; 16]>().read_unaligned() }
    }
    #[inline(never)]
    unsafe fn load_bytes(self, from: *const u8, at: usize) -> [u32; 16] {
        // SAFETY: condition 1 of `Simd::load`.
        let bytes = unsafe { from.wrapping_add(at).cast::<[u8; 16]>().read() };
        bytes.map(u32::from)
    }
    #[inline(never)]
    unsafe fn load_of_8(self, from: *const u8, _at: usize) -> [u32; 16] {
        // SAFETY: condition 1 of `Simd::load_of_8`.
        let bytes = unsafe { from.cast::<[u8; 8]>().read() };
        std::array::from_fn(|i| u32::from(bytes[i % 8]))
    }
    #[inline(never)]
    unsafe fn load_nibbles(self, from: *const u8, at: usize) -> [u32; 16] {
        // SAFETY: condition 1 of `Simd::load_nibbles`.
        let bytes = unsafe { from.wrapping_add(at / 2).cast::<[u8; 8]>().read() };
        std::array::from_fn(|i| u32::from(bytes[i / 2]) >> (i % 2 * 4))
    }
    #[inline(never)]
    unsafe fn load_i8(self, from: *const i8, at: usize) -> [f32; 16] {
        // SAFETY: condition 1 of `Simd::load`.
        let bytes = unsafe { from.wrapping_add(at).cast::<[i8; 16]>().read() };
        bytes.map(f32::from)
    }
}

super::table! { [] Wide }
super::stream::table! { [] Wide }
super::piece::table! { [] Wide }

impl DotBf16 for Wide {
    type S = Self;

    fn simd(self) -> Self {
        self
    }
    fn dot(self, a: [u32; 16], b: [u32; 16], sums: [f32; 16]) -> [f32; 16] {
        let value =
            |word: u32, odd: bool| f32::from_bits(if odd { word >> 16 } else { word } << 16);
        let products = |i: usize| [false, true].map(|odd| value(a[i], odd) * value(b[i], odd));
        each(|i| sums[i] + products(i).iter().sum::<f32>())
    }
}

/// The bits of codes as bf16.
unsafe fn look_up<const N: usize>(codes: &Codes, from: *const u8) -> [u32; N] {
    // SAFETY: `LookUp` has so many readable.
    let bytes = unsafe { from.cast::<[u8; N]>().read() };
    bytes.map(|code| {
        let [lower, upper] = [&codes.lower, &codes.upper].map(|halves| halves.as_flattened());
        let at = usize::from(code & 0x7f);
        u32::from_le_bytes([lower[at], upper[at] | code & 0x80, 0, 0])
    })
}

impl LookUp for Wide {
    type S = Self;

    fn simd(self) -> Self {
        self
    }
    unsafe fn words(self, codes: &'static Codes, from: *const u8) -> [[u32; 16]; 2] {
        // SAFETY: condition 1.
        let bits = unsafe { look_up::<64>(codes, from) };
        [0, 32].map(|first| {
            std::array::from_fn(|i| bits[first + 2 * i] | bits[first + 2 * i + 1] << 16)
        })
    }
    unsafe fn floats(self, codes: &'static Codes, from: *const u8) -> [[f32; 16]; 4] {
        // SAFETY: condition 1.
        let bits = unsafe { look_up::<64>(codes, from) };
        [0, 16, 32, 48].map(|first| each(|i| f32::from_bits(bits[first + i] << 16)))
    }
    unsafe fn half(self, codes: &'static Codes, from: *const u8) -> [[f32; 16]; 2] {
        // SAFETY: condition 1.
        let bits = unsafe { look_up::<32>(codes, from) };
        [0, 16].map(|first| each(|i| f32::from_bits(bits[first + i] << 16)))
    }
}

/// Both halves of a word.
fn halves(word: u32) -> [i32; 2] {
    [word, word >> 16].map(|word| i32::from((word as u16).cast_signed()))
}

impl DotWords for Wide {
    type S = Self;

    fn simd(self) -> Self {
        self
    }
    unsafe fn load(self, from: *const u8) -> [u32; 16] {
        // SAFETY: condition 1 of `DotWords::load`.
        let bytes = unsafe { from.cast::<[i8; 32]>().read() };
        let word = |i: usize| u32::from(i16::from(bytes[i]).cast_unsigned());
        std::array::from_fn(|i| word(2 * i) | word(2 * i + 1) << 16)
    }
    fn dot(self, a: [u32; 16], b: [u32; 16], sums: [u32; 16]) -> [u32; 16] {
        std::array::from_fn(|i| {
            let ([a, x], [b, y]) = (halves(a[i]), halves(b[i]));
            (sums[i].cast_signed() + a * b + x * y).cast_unsigned()
        })
    }
    fn add(self, a: [u32; 16], b: [u32; 16]) -> [u32; 16] {
        std::array::from_fn(|i| a[i].wrapping_add(b[i]))
    }
    fn fold(self, bit: u32, a: [u32; 16], b: [u32; 16]) -> [u32; 16] {
        let of = 1 << bit;
        std::array::from_fn(|i| {
            let from = if i & of == 0 { a } else { b };
            from[i & !of].wrapping_add(from[i | of])
        })
    }
    fn floats(self, sums: [u32; 16]) -> [f32; 16] {
        sums.map(|sum| sum.cast_signed() as f32)
    }
}

/// All loops over pieces that any CPU has.
pub(super) static LOOPS: LazyLock<Loops> = LazyLock::new(|| {
    unsafe fn weigh_bf16(args: &mut Meeting<'_>, piece: &Piece) {
        // SAFETY: the condition is passed on, here and below.
        unsafe { piece::weigh_words(Paired(Wide, Plain(Wide)), args, piece) };
    }
    unsafe fn weigh_codes<E: Fp8>(args: &mut Meeting<'_>, piece: &Piece) {
        // SAFETY: as above.
        unsafe { piece::weigh(Coded::<_, E>::new(Wide), args, piece) };
    }
    unsafe fn sum_codes<E: Fp8>(args: &mut Meeting<'_>, piece: &Piece) {
        // SAFETY: as above.
        unsafe { piece::sum(Coded::<_, E>::new(Wide), args, piece) };
    }
    unsafe fn weigh_codes_bf16<E: Fp8>(args: &mut Meeting<'_>, piece: &Piece) {
        // SAFETY: as above.
        unsafe { piece::weigh_words(Paired(Wide, Coded::<_, E>::new(Wide)), args, piece) };
    }
    unsafe fn weigh_bytes(args: &mut Meeting<'_>, piece: &Piece) {
        // SAFETY: as above.
        unsafe { piece::weigh_words(Bytes(Wide), args, piece) };
    }
    let mut loops = PIECES.clone();
    loops.set_weigh_words(Encoding::Bf16Pairs, Words::Bf16, weigh_bf16);
    loops.set(Encoding::E4m3, weigh_codes::<E4m3>, sum_codes::<E4m3>);
    loops.set(Encoding::E5m2, weigh_codes::<E5m2>, sum_codes::<E5m2>);
    loops.set_weigh_words(Encoding::E4m3, Words::Bf16, weigh_codes_bf16::<E4m3>);
    loops.set_weigh_words(Encoding::E5m2, Words::Bf16, weigh_codes_bf16::<E5m2>);
    loops.set_weigh_words(Encoding::Int8, Words::Fixed, weigh_bytes);
    loops
});
