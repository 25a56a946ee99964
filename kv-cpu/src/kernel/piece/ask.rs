//! Lines of a piece that is wanted soon, some with each step of a loop over another one.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::inline_always,
    reason = "kernel code: addresses and counts of lines, which parts bound"
)]
use super::super::Part;
use super::super::simd::{LINE, Simd};

/// What of a part has not been asked for.
pub(super) struct Ask {
    /// The next line.
    at: *const u8,
    /// Lines that are left of the row at hand, lines of a row, and bytes from the end of one to the
    /// next; of rows that follow each other that is 0, and they are one.
    of_row: usize,
    lines: usize,
    gap: usize,
    /// Lines to ask for with a step, and all that are left.
    pace: usize,
    left: usize,
}

impl Ask {
    /// All of a part, by so many steps.
    #[inline(always)]
    pub(super) fn new(part: Part<'_>, steps: usize) -> Self {
        let at = part.rows.as_ptr();
        let of = |bytes: usize| ((at.addr() & (LINE - 1)) + bytes).div_ceil(LINE);
        let (rows, lines) = if part.rows.is_empty() {
            (0, 0)
        } else if part.stride == part.bytes {
            (1, of(part.rows.len()))
        } else {
            (part.rows.len().div_ceil(part.stride), of(part.bytes))
        };
        let left = rows * lines;
        let gap = if rows > 1 { part.stride.wrapping_sub(lines * LINE) } else { 0 };
        Self { at, of_row: lines, lines, gap, pace: left / steps.max(1), left }
    }

    /// Asks for a step's lines.
    #[inline(always)]
    pub(super) fn step<S: Simd>(&mut self, s: S) {
        self.ask(s, self.pace);
    }

    /// Asks for what is left.
    #[inline(always)]
    pub(super) fn finish<S: Simd>(&mut self, s: S) {
        self.ask(s, self.left);
    }

    #[inline(always)]
    fn ask<S: Simd>(&mut self, s: S, lines: usize) {
        let lines = lines.min(self.left);
        self.left -= lines;
        if self.gap == 0 {
            for _ in 0..lines {
                s.prefetch(self.at);
                self.at = self.at.wrapping_add(LINE);
            }
            return;
        }
        for _ in 0..lines {
            s.prefetch(self.at);
            self.at = self.at.wrapping_add(LINE);
            self.of_row -= 1;
            if self.of_row == 0 {
                (self.at, self.of_row) = (self.at.wrapping_add(self.gap), self.lines);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::scalar::Scalar;

    /// Every line of every row is asked for once or, where rows share one, twice.
    #[test]
    fn no_line_is_missed() {
        let memory = vec![0_u8; 1 << 14];
        for (begin, bytes, gap, tokens) in
            [(0, 256, 0, 16), (2, 130, 0, 16), (64, 128, 1024, 7), (30, 100, 156, 3), (0, 32, 0, 1)]
        {
            let stride = bytes + gap;
            let rows = &memory[begin..][..(tokens - 1) * stride + bytes];
            for steps in [1, 2, 16, 64, 500] {
                let (mut ask, mut asked) = (Ask::new(Part { rows, stride, bytes }, steps), vec![]);
                let all = ask.left;
                while ask.left > 0 {
                    asked.push(ask.at.addr() / LINE);
                    ask.ask(Scalar, 1);
                }
                for row in 0..tokens {
                    let first = rows.as_ptr().addr() + row * stride;
                    for line in first / LINE..=(first + bytes - 1) / LINE {
                        let count = asked.iter().filter(|asked| **asked == line).count();
                        assert!((1..=2).contains(&count), "{bytes} {gap} {tokens}: {count}");
                    }
                }
                let mut ask = Ask::new(Part { rows, stride, bytes }, steps);
                (0..steps).for_each(|_| ask.step(Scalar));
                assert!(ask.left < steps, "{steps} steps leave {} of {all}", ask.left);
                ask.finish(Scalar);
                assert_eq!(ask.left, 0);
            }
        }
        let mut nothing = Ask::new(Part::default(), 3);
        nothing.step(Scalar);
        assert_eq!((nothing.pace, nothing.left), (0, 0), "nothing to ask for");
    }
}
