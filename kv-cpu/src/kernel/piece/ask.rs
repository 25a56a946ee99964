//! Lines of a piece that is wanted soon, some with each step of a loop over another one.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::inline_always,
    reason = "kernel code: addresses of lines, which are hints, and their counts"
)]
use super::super::simd::{LINE, Simd};
use super::{Meeting, Piece};
use crate::read_ahead::Fetch;

/// What has not been asked for of K or V of a piece, and whether it is asked for `TWICE`. A core
/// has few reads under way, and drops what is asked for too fast, so lines are asked for evenly.
pub(super) struct Ask<const TWICE: bool> {
    /// The next line.
    at: *const u8,
    /// How many are left; fewer than none where a step has asked for some behind the last one.
    left: isize,
    /// Lines that are left of the row at hand, lines of a row, and bytes from the end of one to the
    /// next; of rows that follow each other that is 0, and they are one.
    of_row: usize,
    lines: usize,
    gap: usize,
    to: Fetch,
    /// Bytes from a line to the one that is asked for once more with it.
    again: usize,
}

impl<const TWICE: bool> Ask<TWICE> {
    /// All of K or V of what is wanted soon, which has as many tokens as pieces have, and once more
    /// of what is wanted sooner.
    #[inline(always)]
    pub(super) fn new(args: &Meeting<'_>, piece: &Piece, plane: usize) -> Self {
        let rows = &args.strip.planes[plane];
        let [soon, sooner] = [piece.soon[plane], piece.sooner[plane]];
        let again = sooner.addr().wrapping_sub(soon.addr());
        Self { again, ..Self::of(soon, (rows.bytes, rows.stride, piece.length), piece.fetch) }
    }

    /// So many rows, `stride` bytes apart.
    #[inline(always)]
    fn of(at: *const u8, (bytes, stride, rows): (usize, usize, usize), to: Fetch) -> Self {
        let (rows, bytes) = if bytes == stride { (1, rows * bytes) } else { (rows, bytes) };
        let lines = ((at.addr() & (LINE - 1)) + bytes).div_ceil(LINE);
        let gap = if rows > 1 { stride.wrapping_sub(lines * LINE) } else { 0 };
        let left = (rows * lines).cast_signed();
        Self { at, left, of_row: lines, lines, gap, to, again: 0 }
    }

    /// How many lines a step takes where so many take them all.
    #[inline(always)]
    pub(super) fn pace(&self, steps: usize) -> usize {
        let steps = steps.max(1);
        (self.left.unsigned_abs() + steps / 2) / steps
    }

    /// Asks for what falls to a visit with each token, the `nth` of `of` visits of which each meets
    /// so many lines of it, of `f32` or not.
    ///
    /// The first visits wait for lines themselves, and what is asked for meanwhile is dropped more
    /// often. `f32` has so many lines that it is better to ask for all of them in the later visits.
    #[inline(always)]
    pub(super) fn visit<S: Simd>(
        &mut self,
        s: S,
        (lines, is_f32): (usize, bool),
        (nth, of): (usize, usize),
    ) {
        if !TWICE || !is_f32 || of == 1 {
            self.step(s, lines / of);
        } else if 2 * nth >= of {
            self.step(s, 2 * lines / of);
        }
    }

    /// Asks for so many lines, and for some behind the last one where they do not end with it. That
    /// is a few instructions where the number is known when this is compiled.
    #[inline(always)]
    pub(super) fn step<S: Simd>(&mut self, s: S, lines: usize) {
        self.left -= lines.cast_signed();
        if self.gap == 0 {
            for line in 0..lines {
                self.line(s, self.at.wrapping_add(line * LINE));
            }
            self.at = self.at.wrapping_add(lines * LINE);
            return;
        }
        for _ in 0..lines {
            self.line(s, self.at);
            self.at = self.at.wrapping_add(LINE);
            self.of_row -= 1;
            if self.of_row == 0 {
                (self.at, self.of_row) = (self.at.wrapping_add(self.gap), self.lines);
            }
        }
    }

    #[inline(always)]
    fn line<S: Simd>(&self, s: S, at: *const u8) {
        if TWICE {
            s.prefetch_second(at);
            s.prefetch_second(at.wrapping_add(self.again));
        } else {
            self.to.ask(s, at);
        }
    }

    /// Asks for what is left.
    #[inline(always)]
    pub(super) fn finish<S: Simd>(&mut self, s: S) {
        while self.left > 0 {
            self.step(s, 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::PIECE;
    use super::*;
    use crate::kernel::scalar::Scalar;

    /// Every line of every row is asked for once or, where rows share one, twice.
    #[test]
    fn no_line_is_missed() {
        let memory = vec![0_u8; 1 << 14];
        for (begin, bytes, gap, rows) in
            [(0, 256, 0, 16), (2, 130, 0, 16), (64, 128, 1024, 7), (30, 100, 156, 3), (0, 32, 0, 1)]
        {
            let (first, stride) = (memory[begin..].as_ptr(), bytes + gap);
            let (mut ask, mut asked) =
                (Ask::<false>::of(first, (bytes, stride, rows), Fetch::First), vec![]);
            while ask.left > 0 {
                asked.push(ask.at.addr() / LINE);
                ask.step(Scalar, 1);
            }
            for row in 0..rows {
                let first = first.addr() + row * stride;
                for line in first / LINE..=(first + bytes - 1) / LINE {
                    let count = asked.iter().filter(|asked| **asked == line).count();
                    assert!((1..=2).contains(&count), "{bytes} {gap} {rows}: {count}");
                }
            }
        }
    }

    /// Visits to rows that begin with a line leave none to the end, whichever of them ask.
    #[test]
    fn visits_take_all() {
        let (memory, lines, rows) = (vec![0_u8; 1 << 14], 8, 8);
        let first = memory[memory.as_ptr().align_offset(LINE)..].as_ptr();
        let (bytes, s) = (lines * LINE, Scalar);
        for (of, is_f32) in [1, 2, 4].into_iter().flat_map(|of| [(of, false), (of, true)]) {
            let run = (bytes, bytes, rows);
            let mut once = Ask::<false>::of(first, run, Fetch::First);
            let mut twice = Ask::<true>::of(first, run, Fetch::Twice);
            for visit in (0..of).map(|nth| (nth, of)) {
                (0..rows).for_each(|_| once.visit(s, (lines, is_f32), visit));
                (0..rows).for_each(|_| twice.visit(s, (lines, is_f32), visit));
            }
            assert_eq!([once.left, twice.left], [0, 0], "{of} {is_f32}");
        }
    }

    /// Steps of a pace leave few lines or take few too many, and what is left is asked for.
    #[test]
    fn steps_take_all() {
        let memory = vec![0_u8; 1 << 14];
        for (bytes, stride, steps) in [(256, 256, 32), (130, 130, 16), (64, 192, 5), (32, 32, 64)] {
            let mut ask = Ask::<false>::of(memory.as_ptr(), (bytes, stride, PIECE), Fetch::First);
            let pace = ask.pace(steps);
            (0..steps).for_each(|_| ask.step(Scalar, pace));
            assert!(ask.left.unsigned_abs() <= steps / 2, "{bytes} {stride}: {}", ask.left);
            ask.finish(Scalar);
            assert!(ask.left <= 0);
        }
    }
}
