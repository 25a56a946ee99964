//! A unit in plain Rust, so that its loops are tested on any CPU.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "tests: blocks of memory, and small integers"
)]
use std::cell::Cell;

use super::super::emulated::Wide;
use super::super::simd::LINE;
use super::codes::Codes;
use super::unit::{Side, Unit, Words, pairs};
use super::{BLOCK, Setting, UPPER, VISIT, WORDS};

/// A unit that works where the thread has entered it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Emulated;

thread_local! {
    /// Columns of scores and rows of sums; zeros before the unit is entered.
    static SIZES: Cell<(u8, u8)> = const { Cell::new((0, 0)) };
}

fn enter() -> Setting {
    let mut before = Setting([0; 64]);
    (before.0[0], before.0[1]) = SIZES.replace((16, 16));
    before
}

fn leave(before: &Setting) {
    let Setting([columns, rows, ..]) = before;
    let (_, entered) = SIZES.replace((*columns, *rows));
    assert!(entered > 0, "a unit was entered");
}

fn narrow(columns: usize, rows: usize) {
    let [columns, rows] = [columns, rows].map(|size| u8::try_from(size).unwrap_or(0));
    assert!(columns.is_multiple_of(4) && (1..=16).contains(&columns), "columns of a block");
    let (_, entered) = SIZES.replace((columns, rows));
    assert!(entered > 0 && (1..=16).contains(&rows), "a unit was entered, and rows of a block");
}

/// Whether the unit is entered, and set up for whole blocks.
fn is_whole() -> bool {
    SIZES.get() == (16, 16)
}

/// Two bf16 of a word; those below the least normal number are zero.
fn values(word: u32) -> [f32; 2] {
    [word << 16, word & UPPER].map(f32::from_bits).map(flush)
}

fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0.0 } else { x }
}

/// `sum + left * right`, both values of a word.
fn add(sum: f32, left: u32, right: u32) -> f32 {
    values(left).iter().zip(values(right)).fold(sum, |sum, (a, b)| flush(a.mul_add(b, sum)))
}

/// The same of integers, four signed bytes of a word.
fn add_bytes(sum: f32, left: u32, right: u32) -> f32 {
    let bytes = |word: u32| word.to_le_bytes().map(|byte| i32::from(byte.cast_signed()));
    let products = bytes(left).into_iter().zip(bytes(right)).map(|(a, b)| a * b);
    f32::from_bits((sum.to_bits().cast_signed() + products.sum::<i32>()).cast_unsigned())
}

impl Unit for Emulated {
    unsafe fn dots(
        self,
        q: *const u32,
        k: *const u32,
        steps: usize,
        (to, stride): (*mut f32, usize),
        more: bool,
    ) {
        assert!(is_whole() && steps > 0, "a unit that was entered");
        for (row, token) in (0..BLOCK).flat_map(|row| (0..VISIT).map(move |token| (row, token))) {
            let to = to.wrapping_add(row * stride + token);
            // SAFETY: a sum.
            let mut sum = if more { unsafe { to.read() } } else { 0.0 };
            for (step, i) in (0..steps).flat_map(|step| (0..BLOCK).map(move |i| (step, i))) {
                // SAFETY: a word of a block of queries.
                let left = unsafe { q.wrapping_add((step * BLOCK + row) * BLOCK + i).read() };
                let block = token / BLOCK * steps + step;
                let at = k.wrapping_add((block * BLOCK + i) * BLOCK + token % BLOCK);
                // SAFETY: a word of a block of K.
                sum = add(sum, left, unsafe { at.read() });
            }
            // SAFETY: as above.
            unsafe { to.write(sum) };
        }
    }

    unsafe fn add<const LEFT: usize, const RIGHT: usize>(
        self,
        weights: *const u32,
        (values, apart): (*const u32, usize),
        columns: usize,
        (to, stride): (*mut f32, usize),
    ) {
        assert!(is_whole() && columns > 0, "a unit that was entered");
        for (row, column) in (0..BLOCK).flat_map(|row| (0..columns * BLOCK).map(move |c| (row, c)))
        {
            let to = to.wrapping_add(row * stride + column);
            // SAFETY: a sum.
            let mut sum = unsafe { to.read() };
            for (half, (left, right)) in
                (0..2).flat_map(|h| pairs(LEFT, RIGHT).iter().map(move |p| (h, *p)))
            {
                for i in 0..BLOCK {
                    let at = (half * LEFT + left) * WORDS + row * BLOCK + i;
                    // SAFETY: a word of a block of weights.
                    let left = unsafe { weights.wrapping_add(at).read() };
                    let block = (half * RIGHT + right) * apart + column / BLOCK * WORDS;
                    let at = values.wrapping_add(block + i * BLOCK + column % BLOCK);
                    // SAFETY: a word of a block of values.
                    sum = add(sum, left, unsafe { at.read() });
                }
            }
            // SAFETY: as above.
            unsafe { to.write(sum) };
        }
    }

    fn stay_awake(self) {}

    unsafe fn multiply<const SCORES: bool, const BYTES: bool>(
        self,
        left: Side,
        right: Side,
        steps: usize,
        (to, more): (*mut [f32; WORDS], bool),
    ) {
        let (columns, rows) = SIZES.get();
        let (rows, columns) = if SCORES { (16, columns) } else { (rows, 16) };
        assert!(rows > 0 && columns > 0 && steps > 0, "a unit that was entered");
        for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |c| (row, c))) {
            let [row, column] = [row, column].map(usize::from);
            let to = to.cast::<f32>().wrapping_add(row * BLOCK + column);
            // SAFETY: a sum, by condition 1.
            let mut sum = if more { unsafe { to.read() } } else { 0.0 };
            for (step, i) in (0..steps).flat_map(|step| (0..BLOCK).map(move |i| (step, i))) {
                let from = left.at.wrapping_byte_add(step * left.step + row * left.stride);
                // SAFETY: a word of the left, by condition 1.
                let left = unsafe { from.wrapping_add(i).read_unaligned() };
                let from = right.at.wrapping_byte_add(step * right.step + i * right.stride);
                // SAFETY: a word of the right.
                let right = unsafe { from.wrapping_add(column).read() };
                sum = if BYTES { add_bytes(sum, left, right) } else { add(sum, left, right) };
            }
            // SAFETY: a sum, by condition 1.
            unsafe { to.write(sum) };
        }
    }

    unsafe fn code_words(self, codes: &Codes, from: [*const u8; 4], to: [*mut u32; 4]) {
        for (from, to) in from.into_iter().zip(to) {
            // SAFETY: condition 1.
            unsafe { code_row(codes, [from, from.wrapping_add(BLOCK)], to) };
        }
    }

    unsafe fn code_line(self, codes: &Codes, from: *const u8, to: [*mut u32; 2]) {
        for (i, row) in (0..BLOCK).flat_map(|i| (0..2).map(move |row| (i, row))) {
            let pair = [4 * i + row, 4 * i + row + 2];
            // SAFETY: condition 1.
            let [low, high] = pair.map(|at| codes.of(unsafe { from.wrapping_add(at).read() }));
            // SAFETY: condition 1.
            unsafe { to[row].wrapping_add(i).write(u32::from(low) | u32::from(high) << 16) };
        }
    }

    unsafe fn code_pairs(self, codes: &Codes, [a, b, c, d]: [*const u8; 4], to: [*mut u32; 4]) {
        let second = |from: *const u8| from.wrapping_add(BLOCK);
        let from = [[a, b], [second(a), second(b)], [c, d], [second(c), second(d)]];
        for (from, to) in from.into_iter().zip(to) {
            // SAFETY: condition 1.
            unsafe { code_row(codes, from, to) };
        }
    }
}

/// A row of words, of as many codes from both places on.
///
/// # Safety
/// 1. They are readable, and the words are writable.
unsafe fn code_row(codes: &Codes, from: [*const u8; 2], to: *mut u32) {
    for i in 0..BLOCK {
        // SAFETY: condition 1.
        let [low, high] = from.map(|from| codes.of(unsafe { from.wrapping_add(i).read() }));
        // SAFETY: condition 1.
        unsafe { to.wrapping_add(i).write(u32::from(low) | u32::from(high) << 16) };
    }
}

impl Words for Wide {
    fn cut(self, v: [f32; 16]) -> [f32; 16] {
        v.map(|v| f32::from_bits(v.to_bits() & UPPER))
    }
    unsafe fn store_words(self, to: *mut u32, low: [f32; 16], high: [f32; 16]) {
        let words: [u32; 16] =
            std::array::from_fn(|i| low[i].to_bits() >> 16 | high[i].to_bits() & UPPER);
        // SAFETY: condition 1.
        unsafe { to.cast::<[u32; 16]>().write_unaligned(words) };
    }
    unsafe fn store_halves(self, to: [*mut u32; 2], low: [u32; 16], high: [u32; 16]) {
        let lower = std::array::from_fn(|i| low[i] & !UPPER | high[i] << 16);
        let upper = std::array::from_fn(|i| low[i] >> 16 | high[i] & UPPER);
        for (to, words) in to.into_iter().zip([lower, upper]) {
            // SAFETY: condition 1.
            unsafe { to.cast::<[u32; 16]>().write_unaligned(words) };
        }
    }
    unsafe fn store_digits(self, to: *mut u8, numbers: [[f32; 16]; 4], scale: f32) {
        let numbers = numbers.map(|some| some.map(|x| (x * scale).round_ties_even() as i64));
        for (digit, at) in (0..4).flat_map(|digit| (0..LINE).map(move |at| (digit, at))) {
            let (word, byte) = (at / 4, at % 4);
            let mut rest = numbers[word % 4][word / 4 * 4 + byte];
            let mut last = 0;
            for _ in 0..=digit {
                last = (rest + 128).rem_euclid(256) - 128;
                rest = (rest - last) / 256;
            }
            // SAFETY: condition 1.
            unsafe { to.wrapping_add(digit * LINE + at).write((last as i8).cast_unsigned()) };
        }
    }
    fn integers(self, words: [u32; 16]) -> [f32; 16] {
        words.map(|word| word.cast_signed() as f32)
    }
    unsafe fn turn(self, from: *const u32, (to, stride): (*mut u32, usize), wanted: usize) {
        let wanted = wanted.next_multiple_of(4);
        for (row, column) in (0..BLOCK).flat_map(|row| (0..wanted).map(move |c| (row, c))) {
            // SAFETY: a word of the block, by condition 1.
            let word = unsafe { from.wrapping_add(row * BLOCK + column).read() };
            // SAFETY: as above.
            unsafe { to.wrapping_add(column * stride + row).write(word) };
        }
    }
}

super::table::table! { [] Wide, Emulated, enter, leave, narrow }
