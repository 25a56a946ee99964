//! Lines of memory that are wanted soon.
//!
//! A core has few lines under way at a time, and what asks for more waits. So kernels ask for the
//! next tile all through the one at hand, a few lines a step, and not only where rows are read, as
//! nothing comes in a pause. They ask in four places by turns, a quarter of the tile's lines from
//! each on: loops that only read got 10 to 40 % more that way than from one place
//! (`docs/performance.md`).
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::inline_always,
    reason = "kernel code: addresses and counts of lines, which the runs bound"
)]
use super::TILE;
use super::simd::{LINE, Simd};
use crate::read_ahead::Fetch;

impl Fetch {
    /// Asks for the line at `at`, if this is how to.
    #[inline(always)]
    pub(super) fn ask<S: Simd>(self, s: S, at: *const u8) {
        match self {
            Self::First => s.prefetch_once(at),
            Self::Second | Self::Near | Self::Twice => s.prefetch_second(at),
            Self::Nothing => {}
        }
    }
}

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

/// A place among the lines of some runs, and those behind it.
#[derive(Debug, Clone, Copy, Default)]
struct Stream<'a> {
    run: &'a [u8],
    /// From where the run begins to the next line.
    at: usize,
    /// Lines of the run that are left.
    left: usize,
    later: &'a [&'a [u8]],
}

impl<'a> Stream<'a> {
    fn of(runs: &'a [&'a [u8]]) -> Self {
        let mut stream = Self { later: runs, ..Self::default() };
        stream.next_run();
        stream
    }

    fn next_run(&mut self) {
        if let Some((run, later)) = self.later.split_first() {
            let begin = run.as_ptr().addr();
            (self.run, self.later, self.left) = (run, later, lines(run));
            self.at = 0_usize.wrapping_sub(begin & (LINE - 1));
        }
    }

    /// The same behind so many lines; it stays at the last run's end.
    fn behind(mut self, mut lines: usize) -> Self {
        while lines >= self.left && !self.later.is_empty() {
            lines -= self.left;
            self.next_run();
        }
        let lines = lines.min(self.left);
        self.at = self.at.wrapping_add(lines * LINE);
        self.left -= lines;
        self
    }
}

/// What of some runs has not been asked for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ahead<'a> {
    /// A line of each by turns: memory that is asked for in several places comes faster.
    streams: [Stream<'a>; STREAMS],
    /// Where the streams began, bytes that each has gone from there, and bytes after which one of
    /// them is at the end of a run.
    from: [*const u8; STREAMS],
    gone: usize,
    until: usize,
    /// Turns that are left behind those.
    left: usize,
    /// Lines of all runs.
    lines: usize,
    /// Parts of a turn that are due, of [`TURN`].
    due: usize,
}

const STREAMS: usize = 4;
/// Most runs besides the first whose pages are found in advance; where there are more, many share
/// one.
const PAGES: usize = 16;
const TURN: usize = 1 << 10;

/// The part of a tile's lines that a kernel asks for, of [`PARTS`]: about that of its time, so that
/// lines are asked for as evenly as they come. Many at once keep products waiting, and memory has
/// nothing to do afterwards.
pub(super) mod part {
    pub(in super::super) const SCORES: usize = 7;
    pub(in super::super) const SOFTMAX: usize = 2;
    pub(in super::super) const SUMS: usize = 6;
    /// At the end of a tile, for the time in which the next one is found.
    pub(in super::super) const END: usize = 1;
    /// What K's products leave, where only V's ask besides.
    pub(in super::super) const BEHIND_SCORES: usize = SOFTMAX + SUMS + END;
}
const PARTS: usize = part::SCORES + part::BEHIND_SCORES;

/// Nothing to ask for.
impl Default for Ahead<'_> {
    fn default() -> Self {
        Self {
            streams: [Stream::default(); STREAMS],
            from: [std::ptr::null(); STREAMS],
            gone: 0,
            until: 0,
            left: 0,
            lines: 0,
            due: 0,
        }
    }
}

impl<'a> Ahead<'a> {
    pub(crate) fn of(runs: &'a Runs<'_>) -> Self {
        let list = runs.list.get(..runs.len).unwrap_or_default();
        let left = runs.lines.div_ceil(STREAMS);
        let mut streams = [Stream::of(list); STREAMS];
        for i in 1..STREAMS {
            streams[i] = streams[i - 1].behind(left);
        }
        Self { streams, left, lines: runs.lines, ..Self::default() }
    }

    /// Asks for a line of each run before the others, as each may lie in a page of its own, and
    /// finding that takes as long as a line: streams would come to as many pages at once.
    #[inline(always)]
    pub(super) fn find_pages<S: Simd>(&self, s: S) {
        let [stream, ..] = &self.streams;
        s.prefetch(stream.run.as_ptr());
        for run in stream.later.iter().take(PAGES) {
            s.prefetch(run.as_ptr());
        }
    }

    /// How much a step of a kernel fetches that has so many of them.
    #[inline(always)]
    pub(super) fn pace(&self, part: usize, steps: usize) -> usize {
        (self.lines * part * TURN).div_ceil(PARTS * STREAMS * steps.max(1))
    }

    /// Asks for nothing until [`Self::resume`] is given what this returns.
    pub(crate) fn pause(&mut self) -> usize {
        std::mem::take(&mut self.lines)
    }
    pub(crate) fn resume(&mut self, lines: usize) {
        self.lines = lines;
    }

    /// Asks for what is due after a step.
    #[inline(always)]
    pub(super) fn fetch<S: Simd>(&mut self, s: S, pace: usize) {
        self.due += pace;
        while self.due >= TURN {
            if self.gone == self.until && !self.go_on() {
                return;
            }
            self.ask(s);
        }
    }

    /// The same inside a step, where sums are in registers. At the end of a run nothing is asked
    /// for until the next [`Self::fetch`]: a call would take their registers from the sums, and so
    /// would addresses that are kept.
    #[inline(always)]
    pub(super) fn fetch_inside<S: Simd>(&mut self, s: S, pace: usize) {
        self.due += pace;
        while self.due >= TURN && self.gone < self.until {
            for from in self.from {
                s.prefetch(from.wrapping_add(self.gone));
            }
            self.gone += LINE;
            self.due -= TURN;
        }
    }

    /// Asks for what is due up to where a run ends.
    #[inline(always)]
    fn ask<S: Simd>(&mut self, s: S) {
        let (mut lines, turns) = self.take(self.due / TURN);
        self.due -= turns * TURN;
        for _ in 0..turns {
            for line in lines {
                s.prefetch(line);
            }
            lines = lines.map(|line| line.wrapping_add(LINE));
        }
    }

    /// A line of each stream, and for how many turns, up to so many, the lines behind them are
    /// next.
    #[inline(always)]
    fn take(&mut self, turns: usize) -> ([*const u8; STREAMS], usize) {
        let lines = self.from.map(|from| from.wrapping_add(self.gone));
        let turns = turns.min((self.until - self.gone) / LINE);
        self.gone += turns * LINE;
        (lines, turns)
    }

    /// Turns that are left, of how many.
    #[cfg(test)]
    pub(super) fn turns(&self) -> (usize, usize) {
        (self.left + (self.until - self.gone) / LINE, self.lines.div_ceil(STREAMS))
    }

    /// Brings the streams to where the turns are. Whether there are turns left.
    #[inline(never)]
    fn go_on(&mut self) -> bool {
        if self.left == 0 {
            self.due = 0;
            return false;
        }
        self.streams = self.streams.map(|stream| stream.behind(self.gone / LINE));
        self.from = self.streams.map(|stream| stream.run.as_ptr().wrapping_add(stream.at));
        // Those that are at their end go on behind it.
        let left = self.streams.iter().map(|stream| stream.left).filter(|left| *left > 0);
        let turns = left.min().unwrap_or(usize::MAX).min(self.left);
        self.left -= turns;
        (self.gone, self.until) = (0, turns * LINE);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every line of every run is asked for, and hardly any twice.
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
                    (begin / LINE..=(begin + len - 1) / LINE).contains(&line)
                })
            };
            let mut ahead = Ahead::of(&runs);
            let mut came = Vec::new();
            while ahead.gone < ahead.until || ahead.go_on() {
                let (lines, turns) = ahead.take(3);
                for line in lines {
                    came.extend((0..turns).map(|turn| line.addr() / LINE + turn));
                }
            }
            let first = memory.as_ptr().addr() / LINE;
            for line in first..=first + memory.len() / LINE {
                assert!(!wanted(line) || came.contains(&line), "{count} of {len}: line {line}");
            }
            assert!(
                came.len() < runs.lines + 2 * STREAMS,
                "{count} of {len}: {} lines",
                came.len()
            );
            assert_eq!(runs.lines > 0, count > 0);
        }
    }

    /// All lines have been asked for at the end of a tile, some inside of steps and some behind
    /// them, in about as many as each kernel is to ask for.
    #[test]
    fn kernels_ask_for_everything_together() {
        let memory = vec![0_u8; 4 * 4096];
        let mut runs = Runs::new();
        memory.chunks(4096).for_each(|run| runs.push(run));
        for (steps, inside) in [1, 3, 8, 64, 1000].into_iter().flat_map(|n| [(n, 0), (n, 4)]) {
            let (mut ahead, s) = (Ahead::of(&runs), crate::kernel::scalar::Scalar);
            let mut asked = Vec::new();
            for part in [part::SCORES, part::SOFTMAX, part::SUMS + part::END] {
                let pace = ahead.pace(part, steps);
                for _ in 0..steps {
                    if inside == 0 {
                        ahead.fetch(s, pace);
                    } else {
                        ahead.fetch(s, 0);
                        (0..inside).for_each(|_| ahead.fetch_inside(s, pace.div_ceil(inside)));
                    }
                }
                ahead.fetch(s, 0);
                asked.push(ahead.left + (ahead.until - ahead.gone) / LINE);
            }
            assert_eq!(asked.last(), Some(&0), "{steps} steps, {inside} inside: turns left");
            let all = runs.lines.div_ceil(STREAMS);
            let first = all - all * part::SCORES / PARTS;
            assert!(steps > 64 || asked[0].abs_diff(first) <= 1, "{steps}: {asked:?} of {all}");
        }
    }
}
