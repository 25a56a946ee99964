//! A unit in plain Rust, so that its loops are tested on any CPU.
#![expect(clippy::arithmetic_side_effects, reason = "tests: blocks of memory")]
use std::cell::Cell;

use super::super::TILE;
use super::super::emulated::Wide;
use super::unit::{Unit, Words, pairs};
use super::{BLOCK, Setting, UPPER, WORDS};

/// A unit that works where the thread has entered it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Emulated;

thread_local! {
    static ENTERED: Cell<bool> = const { Cell::new(false) };
}

fn enter() -> Setting {
    Setting([u8::from(ENTERED.replace(true)); 64])
}

fn leave(before: &Setting) {
    let Setting([was_entered, ..]) = before;
    assert!(ENTERED.replace(*was_entered != 0), "a unit was entered");
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

impl Unit for Emulated {
    unsafe fn dots(
        self,
        q: *const u32,
        k: *const u32,
        steps: usize,
        (to, stride): (*mut f32, usize),
        more: bool,
    ) {
        assert!(ENTERED.get() && steps > 0, "a unit that was entered");
        for (row, token) in (0..BLOCK).flat_map(|row| (0..TILE).map(move |token| (row, token))) {
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
        assert!(ENTERED.get() && columns > 0, "a unit that was entered");
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
    unsafe fn turn(self, from: *const u32, to: *mut u32) {
        for (row, column) in (0..BLOCK).flat_map(|row| (0..BLOCK).map(move |c| (row, c))) {
            // SAFETY: a word of the block, by condition 1.
            let word = unsafe { from.wrapping_add(row * BLOCK + column).read() };
            // SAFETY: as above.
            unsafe { to.wrapping_add(column * BLOCK + row).write(word) };
        }
    }
}

super::table! { [] Wide, Emulated, enter, leave }
