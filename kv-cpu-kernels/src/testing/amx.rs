//! AMX in plain Rust, so that its kernels are tested on any CPU.
use std::cell::Cell;

use super::wide::Wide;
use crate::amx::codes::Codes;
use crate::amx::table::TileConfig;
use crate::amx::unit::{Operand, Unit, Words, pairs};
use crate::amx::{BLOCK, BLOCK_WORDS, GEMM_TOKENS, UPPER};

/// A unit that works between `enter` and `leave`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Emulated;

thread_local! {
    /// Columns of scores and rows of sums; zeros outside of `enter` and `leave`.
    static SIZES: Cell<(u8, u8)> = const { Cell::new((0, 0)) };
}

fn enter() -> TileConfig {
    let mut before = TileConfig([0; 64]);
    (before.0[0], before.0[1]) = SIZES.replace((16, 16));
    before
}

fn leave(before: &TileConfig) {
    let TileConfig([columns, rows, ..]) = before;
    let (_, entered) = SIZES.replace((*columns, *rows));
    assert!(entered > 0, "between `enter` and `leave`");
}

fn narrow(columns: usize, rows: usize) {
    let [columns, rows] = [columns, rows].map(|size| u8::try_from(size).unwrap_or(0));
    assert!(columns.is_multiple_of(4) && (1..=16).contains(&columns), "columns of a block");
    let (_, entered) = SIZES.replace((columns, rows));
    assert!(
        entered > 0 && (1..=16).contains(&rows),
        "a unit that is configured, and rows of a block"
    );
}

/// Returns whether the unit is configured for whole blocks.
fn is_whole() -> bool {
    SIZES.get() == (16, 16)
}

/// Returns the two bf16 of a word; values below the least normal number become zero.
fn values(word: u32) -> [f32; 2] {
    [word << 16, word & UPPER].map(f32::from_bits).map(flush)
}

fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0.0 } else { x }
}

/// Adds the products of both values of two words.
fn add(sum: f32, left: u32, right: u32) -> f32 {
    values(left).iter().zip(values(right)).fold(sum, |sum, (a, b)| flush(a.mul_add(b, sum)))
}

impl Unit for Emulated {
    unsafe fn gemm_scores(
        self,
        q: *const u32,
        k: *const u32,
        steps: usize,
        (to, stride): (*mut f32, usize),
        more: bool,
    ) {
        assert!(is_whole() && steps > 0, "a unit that is configured");
        for (row, token) in
            (0..BLOCK).flat_map(|row| (0..GEMM_TOKENS).map(move |token| (row, token)))
        {
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

    unsafe fn gemm_sums<const LEFT: usize, const RIGHT: usize>(
        self,
        weights: *const u32,
        (values, apart): (*const u32, usize),
        columns: usize,
        (to, stride): (*mut f32, usize),
    ) {
        assert!(is_whole() && columns > 0, "a unit that is configured");
        for (row, column) in (0..BLOCK).flat_map(|row| (0..columns * BLOCK).map(move |c| (row, c)))
        {
            let to = to.wrapping_add(row * stride + column);
            // SAFETY: a sum.
            let mut sum = unsafe { to.read() };
            for (half, (left, right)) in
                (0..2).flat_map(|h| pairs(LEFT, RIGHT).iter().map(move |p| (h, *p)))
            {
                for i in 0..BLOCK {
                    let at = (half * LEFT + left) * BLOCK_WORDS + row * BLOCK + i;
                    // SAFETY: a word of a block of weights.
                    let left = unsafe { weights.wrapping_add(at).read() };
                    let block = (half * RIGHT + right) * apart + column / BLOCK * BLOCK_WORDS;
                    let at = values.wrapping_add(block + i * BLOCK + column % BLOCK);
                    // SAFETY: a word of a block of values.
                    sum = add(sum, left, unsafe { at.read() });
                }
            }
            // SAFETY: as above.
            unsafe { to.write(sum) };
        }
    }

    fn keep_powered(self) {}

    unsafe fn multiply<const SCORES: bool>(
        self,
        left: Operand,
        right: Operand,
        steps: usize,
        (to, more): (*mut [f32; BLOCK_WORDS], bool),
    ) {
        let (columns, rows) = SIZES.get();
        let (rows, columns) = if SCORES { (16, columns) } else { (rows, 16) };
        assert!(rows > 0 && columns > 0 && steps > 0, "a unit that is configured");
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
                sum = add(sum, left, right);
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

/// Writes a row of words, each of one code of both groups.
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
    fn truncate(self, v: [f32; 16]) -> [f32; 16] {
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
    unsafe fn transpose(
        self,
        from: *const u32,
        (to, stride): (*mut u32, usize),
        column_count: usize,
    ) {
        let column_count = column_count.next_multiple_of(4);
        for (row, column) in (0..BLOCK).flat_map(|row| (0..column_count).map(move |c| (row, c))) {
            // SAFETY: a word of the block, by condition 1.
            let word = unsafe { from.wrapping_add(row * BLOCK + column).read() };
            // SAFETY: as above.
            unsafe { to.wrapping_add(column * stride + row).write(word) };
        }
    }
}

crate::amx::table::table! { [] Wide, Emulated, enter, leave, narrow }
