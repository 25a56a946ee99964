//! Sixteen lanes in plain Rust, so that the loops of wide vectors are tested on any CPU. Primitives
//! are not inlined: that would take longer to compile than all instruction sets together.
#![expect(
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    clippy::unwrap_used,
    reason = "tests: exponents and codes are small integers"
)]
use half::{bf16, f16};

use crate::decode::{E4m3, E5m2, Fp8, Fp8Table, LookUp, LookedUp};
use crate::layout::Encoding;
use crate::pv::{self, Pv};
use crate::qk::{self, Bf16Rows, Bf16Words, DotBf16, Floats, Qk};
use crate::simd::Simd;
use crate::table::{PvFn, QkFn};

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
    fn div(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        each(|i| a[i] / b[i])
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

crate::table::table! { [] Wide, Wide }

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

/// Returns the bits of codes as bf16.
unsafe fn look_up<const N: usize>(table: &Fp8Table, from: *const u8) -> [u32; N] {
    // SAFETY: `N` codes are readable, by the condition of `LookUp`.
    let bytes = unsafe { from.cast::<[u8; N]>().read() };
    bytes.map(|code| {
        let [lower, upper] = [&table.lower, &table.upper].map(|halves| halves.as_flattened());
        let at = usize::from(code & 0x7f);
        u32::from_le_bytes([lower[at], upper[at] | code & 0x80, 0, 0])
    })
}

impl LookUp for Wide {
    type S = Self;

    fn simd(self) -> Self {
        self
    }
    unsafe fn words(self, table: &'static Fp8Table, from: *const u8) -> [[u32; 16]; 2] {
        // SAFETY: condition 1.
        let bits = unsafe { look_up::<64>(table, from) };
        [0, 32].map(|first| {
            std::array::from_fn(|i| bits[first + 2 * i] | bits[first + 2 * i + 1] << 16)
        })
    }
    unsafe fn floats(self, table: &'static Fp8Table, from: *const u8) -> [[f32; 16]; 4] {
        // SAFETY: condition 1.
        let bits = unsafe { look_up::<64>(table, from) };
        [0, 16, 32, 48].map(|first| each(|i| f32::from_bits(bits[first + i] << 16)))
    }
    unsafe fn half(self, table: &'static Fp8Table, from: *const u8) -> [[f32; 16]; 2] {
        // SAFETY: condition 1.
        let bits = unsafe { look_up::<32>(table, from) };
        [0, 16].map(|first| each(|i| f32::from_bits(bits[first + i] << 16)))
    }
}

/// As `avx512::lookups`.
pub(crate) fn lookups(encoding: Encoding) -> Option<([QkFn; 4], [PvFn; 4])> {
    fn of<E: Fp8>() -> ([QkFn; 4], [PvFn; 4]) {
        let qk: [QkFn; 4] = [qk::<E, 1, 8>, qk::<E, 2, 8>, qk::<E, 4, 4>, qk::<E, 8, 2>];
        (qk, [pv::<E, 1, 4>, pv::<E, 2, 4>, pv::<E, 4, 2>, pv::<E, 8, 1>])
    }
    fn qk<E: Fp8, const R: usize, const T: usize>(x: &mut Qk<'_, '_>) {
        qk::qk::<_, R, T>(Floats::<_, 2>(LookedUp::<_, E>::new(Wide)), x);
    }
    fn pv<E: Fp8, const R: usize, const P: usize>(x: &mut Pv<'_, '_>) {
        pv::pv::<_, R, P>(LookedUp::<_, E>::new(Wide), x);
    }
    match encoding {
        Encoding::E4m3 => Some(of::<E4m3>()),
        Encoding::E5m2 => Some(of::<E5m2>()),
        _ => None,
    }
}

/// As `avx512::qk_words`.
pub(crate) fn qk_words(encoding: Encoding) -> Option<[QkFn; 4]> {
    fn of<E: Fp8>() -> [QkFn; 4] {
        [fp8::<E, 1, 8>, fp8::<E, 2, 8>, fp8::<E, 4, 4>, fp8::<E, 8, 2>]
    }
    fn bf16<const R: usize, const T: usize>(x: &mut Qk<'_, '_>) {
        qk::qk::<_, R, T>(Bf16Words(Wide, Bf16Rows(Wide)), x);
    }
    fn fp8<E: Fp8, const R: usize, const T: usize>(x: &mut Qk<'_, '_>) {
        qk::qk::<_, R, T>(Bf16Words(Wide, LookedUp::<_, E>::new(Wide)), x);
    }
    match encoding {
        Encoding::Bf16Pairs => Some([bf16::<1, 8>, bf16::<2, 8>, bf16::<4, 4>, bf16::<8, 2>]),
        Encoding::E4m3 => Some(of::<E4m3>()),
        Encoding::E5m2 => Some(of::<E5m2>()),
        _ => None,
    }
}
