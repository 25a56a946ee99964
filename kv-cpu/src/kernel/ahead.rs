//! Lines of memory that are wanted soon.
//!
//! A core has few lines under way at a time, and what asks for more waits. So kernels ask for the
//! next tile all through the one at hand, a few lines a step: in the order in which they lie, since
//! the memory's own fetching follows such runs, and not only where rows are read, since a pause is
//! time in which nothing comes.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::inline_always,
    reason = "kernel code: addresses and counts of lines, which the rows bound"
)]
use super::TILE;
use super::simd::Simd;

const LINE_BITS: u32 = 6;
const LINE: usize = 1 << LINE_BITS;

/// Runs of memory: at most one a row of K and of V of a tile.
#[derive(Debug)]
pub(crate) struct Runs<'a> {
    list: [&'a [u8]; 2 * TILE],
    len: usize,
    lines: usize,
}

impl<'a> Runs<'a> {
    pub(crate) const fn new() -> Self {
        Self { list: [&[]; 2 * TILE], len: 0, lines: 0 }
    }

    pub(crate) fn clear(&mut self) {
        (self.len, self.lines) = (0, 0);
    }

    /// One more; more than there is room for are not asked for.
    pub(crate) fn push(&mut self, run: &'a [u8]) {
        if let Some(next) = self.list.get_mut(self.len) {
            *next = run;
            self.len += 1;
            self.lines += lines(run);
        }
    }
}

/// Lines that a run touches.
#[inline(always)]
fn lines(run: &[u8]) -> usize {
    ((run.as_ptr().addr() & (LINE - 1)) + run.len()).div_ceil(LINE)
}

/// What of some runs has not been asked for.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Ahead<'a> {
    /// Runs that are asked for at once, a line of each by turns.
    streams: [&'a [u8]; STREAMS],
    /// From where the streams begin to their next lines.
    at: usize,
    /// Lines of the longest stream that are left.
    left: usize,
    later: &'a [&'a [u8]],
    /// Lines of all runs.
    lines: usize,
    /// Parts of a turn that are due, of [`TURN`].
    due: usize,
}

const STREAMS: usize = 4;
const TURN: usize = 1 << 10;

/// The part of a tile's lines that a kernel asks for, of [`PARTS`]: as much as its part of the
/// time.
pub(super) mod part {
    pub(in super::super) const SCORES: usize = 6;
    pub(in super::super) const SOFTMAX: usize = 4;
    pub(in super::super) const SUMS: usize = 6;
}
const PARTS: usize = part::SCORES + part::SOFTMAX + part::SUMS;

impl<'a> Ahead<'a> {
    pub(crate) fn of(runs: &'a Runs<'_>) -> Self {
        let later = runs.list.get(..runs.len).unwrap_or_default();
        let mut ahead = Self { later, lines: runs.lines, ..Self::default() };
        ahead.next_streams();
        ahead
    }

    /// How much a step of a kernel fetches that has so many of them.
    #[inline(always)]
    pub(super) fn pace(&self, part: usize, steps: usize) -> usize {
        (self.lines * part * TURN).div_ceil(PARTS * STREAMS * steps.max(1))
    }

    /// Asks for what is due after a step.
    #[inline(always)]
    pub(super) fn fetch<S: Simd>(&mut self, s: S, pace: usize) {
        self.due += pace;
        while self.due >= TURN {
            self.due -= TURN;
            let Some(lines) = self.turn() else {
                return;
            };
            for line in lines {
                s.prefetch(line);
            }
        }
    }

    /// A line of each stream; none once all have come.
    #[inline(always)]
    fn turn(&mut self) -> Option<[*const u8; STREAMS]> {
        let streams = self.streams;
        let at = self.at;
        self.left = self.left.checked_sub(1)?;
        self.at += LINE;
        if self.left == 0 {
            self.next_streams();
        }
        Some(streams.map(|stream| stream.as_ptr().wrapping_add(at)))
    }

    #[inline(always)]
    fn next_streams(&mut self) {
        let halves = |run: &'a [u8]| run.split_at(run.len() / 2 / LINE * LINE);
        let (now, later) = self.later.split_at(self.later.len().min(STREAMS));
        self.later = later;
        self.streams = match *now {
            [a, b, c, d] => [a, b, c, d],
            [a, b, c] => [a, b, c, c],
            [a, b] => {
                let ((a, b), (c, d)) = (halves(a), halves(b));
                [a, b, c, d]
            }
            [a] => {
                let (a, b) = halves(a);
                [a, b, b, b]
            }
            _ => return,
        };
        self.left = self.streams.iter().map(|stream| lines(stream)).max().unwrap_or(0);
        self.at = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every line of every run is asked for, and none far from all of them.
    #[test]
    fn lines_come_by_turns_and_none_is_missed() {
        let memory = vec![0_u8; 1 << 15];
        let few = [(0, 0, 0), (1, 1, 0), (1, 4096, 0), (2, 4096, 64), (3, 130, 30)];
        for (count, len, gap) in few.into_iter().chain([(4, 2080, 0), (64, 66, 400)]) {
            let mut runs = Runs::new();
            for i in 0..count {
                runs.push(&memory[i * (len + gap)..][..len]);
            }
            let wanted = |line: usize| {
                runs.list[..runs.len].iter().any(|run| {
                    let begin = run.as_ptr().addr();
                    (begin >> LINE_BITS..=(begin + len - 1) >> LINE_BITS).contains(&line)
                })
            };
            let mut ahead = Ahead::of(&runs);
            let mut came = Vec::new();
            while let Some(lines) = ahead.turn() {
                came.extend(lines.map(|line| line.addr() >> LINE_BITS));
            }
            let first = memory.as_ptr().addr() >> LINE_BITS;
            for line in first..=first + memory.len() / LINE {
                assert!(!wanted(line) || came.contains(&line), "{count} of {len}: line {line}");
            }
            assert!(came.iter().all(|line| wanted(*line) || wanted(line - 1)), "{count} of {len}");
            assert_eq!(runs.lines > 0, count > 0);
        }
    }

    /// All lines have come at the end of a tile, in about as many as each kernel is to ask for.
    #[test]
    fn kernels_ask_for_everything_together() {
        let memory = vec![0_u8; 4 * 4096];
        let mut runs = Runs::new();
        memory.chunks(4096).for_each(|run| runs.push(run));
        for steps in [1, 3, 8, 64, 1000] {
            let mut ahead = Ahead::of(&runs);
            for part in [part::SCORES, part::SOFTMAX, part::SUMS] {
                let pace = ahead.pace(part, steps);
                (0..steps).for_each(|_| ahead.fetch(crate::kernel::scalar::Scalar, pace));
            }
            assert_eq!(ahead.left, 0, "{steps} steps");
        }
    }
}
