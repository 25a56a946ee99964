//! Software prefetch: the target cache, and a cursor that issues prefetches evenly.
//!
//! A core has few line-fill buffers, and a burst of prefetches that exceeds them stalls loads or is
//! dropped. So a kernel issues a few with each step of its work, for rows that the next call reads.
//! Prefetches change no result.
#![expect(
    clippy::inline_always,
    reason = "kernel code: addresses and counts of cache lines, which must inline into the \
              `#[target_feature]` caller"
)]
use std::str::FromStr;

use kv_format::UnknownName;

use crate::rows::KeyRows;
use crate::simd::{LINE, Simd};

/// The cache that lines are prefetched into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PrefetchTarget {
    /// L2.
    L2,
    /// L2, each line twice: a tile ahead, and again half a tile ahead. A core that has no line-fill
    /// buffer left drops a prefetch.
    L2Twice,
    /// No software prefetch, only the hardware prefetchers.
    None,
}

impl PrefetchTarget {
    /// Returns the target measured as best on this CPU; `docs/performance.md` lists the CPUs.
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        return Self::of_x86(&x86::vendor(), x86::family());
        #[cfg(not(target_arch = "x86_64"))]
        return Self::L2;
    }

    /// Returns the target for an x86 vendor and family.
    #[cfg(any(target_arch = "x86_64", test))]
    fn of_x86(vendor: &[u8; 12], family: u32) -> Self {
        /// Zen 3 and Zen 4.
        const AMD_19: u32 = 0x19;
        match (vendor, family) {
            (b"AuthenticAMD", AMD_19) => Self::L2Twice,
            _ => Self::L2,
        }
    }
}

impl FromStr for PrefetchTarget {
    type Err = UnknownName;
    fn from_str(name: &str) -> Result<Self, UnknownName> {
        match name {
            "l2" => Ok(Self::L2),
            "l2-twice" => Ok(Self::L2Twice),
            "none" => Ok(Self::None),
            _ => Err(UnknownName::new("prefetch target", name, "l2, l2-twice, none")),
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::__cpuid;

    /// The vendor string of leaf 0.
    pub(super) fn vendor() -> [u8; 12] {
        let leaf = __cpuid(0);
        let mut vendor = [0; 12];
        for (to, word) in vendor.chunks_exact_mut(4).zip([leaf.ebx, leaf.edx, leaf.ecx]) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        vendor
    }

    /// The family of leaf 1, with the extended family that later CPUs add.
    pub(super) fn family() -> u32 {
        let version = __cpuid(1).eax;
        let (family, extended) = (version >> 8 & 0xf, version >> 20 & 0xff);
        if family == 0xf { family.saturating_add(extended) } else { family }
    }
}

/// Places that lines are prefetched from together: DRAM serves several pages faster than one.
const STREAMS: usize = 4;
/// Parts of a burst in which the share of a step is counted.
const UNIT: usize = 1 << 16;

/// A cursor over the cache lines of rows that a later call reads.
///
/// It issues bursts of four lines. Where the runs are alike and their number is a multiple of four,
/// a fourth of them is a stream, and a burst has a line of each stream. Otherwise it has the next
/// lines of one run after another.
#[derive(Debug, Clone, Copy)]
pub struct Prefetch<'a> {
    /// The first line of each burst of the current rows, and those that are prefetched again.
    lines: [*const u8; STREAMS],
    again: Option<[*const u8; STREAMS]>,
    /// Bytes from those to the lines of the next burst, and of the first burst that is not whole.
    next: usize,
    whole: usize,
    /// Bytes from a burst to the next, and of all lines of a row.
    burst: usize,
    row: usize,
    /// Rows left in the current runs, and bytes from one to the next; rows that follow each other
    /// without a gap count as one.
    left: usize,
    stride: usize,
    /// Runs of rows, stream by stream, the number of each stream, and the next one of the first.
    runs: &'a [KeyRows<'a>],
    runs_each: usize,
    run: usize,
    /// Runs that are prefetched again, each together with the run at the same index, where they are
    /// as many.
    runs_again: &'a [KeyRows<'a>],
    /// Bursts that the current kernel may still issue, and what is due in parts of [`UNIT`].
    budget: usize,
    due: usize,
}

/// The lines of a run: rows, the bytes of the lines of each, and bytes from a row to the next.
#[derive(Clone, Copy, PartialEq, Eq)]
struct RunLines {
    rows: usize,
    row: usize,
    stride: usize,
}

impl RunLines {
    #[inline]
    fn of(rows: &KeyRows<'_>) -> Self {
        let (bytes, stride, count) = (rows.layout().bytes(), rows.stride(), rows.len());
        let (count, bytes) =
            if bytes == stride { (count.min(1), count * bytes) } else { (count, bytes) };
        let row = ((rows.at(0).addr() & (LINE - 1)) + bytes).next_multiple_of(LINE);
        Self { rows: count, row, stride }
    }
}

impl<'a> Prefetch<'a> {
    /// Creates a cursor without lines.
    pub fn none() -> Self {
        Self {
            lines: [std::ptr::null(); STREAMS],
            again: None,
            next: 0,
            whole: 0,
            burst: STREAMS * LINE,
            row: 0,
            left: 0,
            stride: 0,
            runs: &[],
            runs_each: 0,
            run: 0,
            runs_again: &[],
            budget: 0,
            due: 0,
        }
    }

    /// Creates a cursor over all lines of `far`, for one kernel to issue; for
    /// [`PrefetchTarget::L2Twice`], each with a line of `near`, which is read earlier.
    pub fn new(target: PrefetchTarget, far: &'a [KeyRows<'a>], near: &'a [KeyRows<'a>]) -> Self {
        let (runs, runs_again): (_, &[_]) = match target {
            PrefetchTarget::None => return Self::none(),
            PrefetchTarget::L2 => (far, &[]),
            // After the last tile only `near` is left.
            PrefetchTarget::L2Twice if far.is_empty() => (near, &[]),
            PrefetchTarget::L2Twice => (far, near),
        };
        let mut cursor = Self { runs, runs_again, runs_each: runs.len(), ..Self::none() };
        let Some(first) = runs.first().map(RunLines::of) else { return cursor };
        if runs.len().is_multiple_of(STREAMS) && runs.iter().all(|run| RunLines::of(run) == first) {
            (cursor.runs_each, cursor.burst) = (runs.len() / STREAMS, LINE);
        }
        for run in &runs[..cursor.runs_each] {
            let RunLines { rows, row, .. } = RunLines::of(run);
            cursor.budget += rows * row.div_ceil(cursor.burst);
        }
        cursor.find_rows();
        cursor
    }

    /// Sets how many bursts the next kernel issues.
    pub(crate) fn allow(&mut self, bursts: usize) {
        self.budget = bursts;
    }

    /// Returns the number of bursts that the next kernel may issue.
    pub(crate) fn budget(&self) -> usize {
        self.budget
    }
    /// Lets a kernel that takes `rows` of `all` rows, from `row` on, issue its share of a budget.
    pub(crate) fn allow_share(&mut self, budget: usize, (row, rows, all): (usize, usize, usize)) {
        let all = all.max(1);
        self.allow(budget * (row + rows) / all - budget * row / all);
    }

    /// Returns the share of each of `steps` steps that spread the budget evenly.
    #[inline(always)]
    pub(crate) fn pace(&self, steps: usize) -> usize {
        (self.budget * UNIT).div_ceil(steps.max(1))
    }

    /// Issues the bursts that are due after a step, up to the end of the current rows. Kernels call
    /// it on a local copy of the cursor while their sums are in registers, so it calls nothing.
    #[inline(always)]
    pub(crate) fn step<S: Simd>(&mut self, s: S, pace: usize) {
        self.due += pace;
        while self.due >= UNIT && self.next < self.whole && self.budget > 0 {
            self.due -= UNIT;
            self.budget -= 1;
            for line in self.lines {
                s.prefetch_l2(line.wrapping_add(self.next));
            }
            if let Some(again) = self.again {
                for line in again {
                    s.prefetch_l2(line.wrapping_add(self.next));
                }
            }
            self.next += self.burst;
        }
    }

    /// Issues the bursts that [`Self::step`] left.
    #[inline]
    pub(crate) fn catch_up<S: Simd>(&mut self, s: S) {
        if self.due >= UNIT && self.budget > 0 {
            self.issue(s, self.due / UNIT);
            self.due %= UNIT;
        }
    }

    /// Issues the rest of the budget.
    #[inline]
    pub(crate) fn finish<S: Simd>(&mut self, s: S) {
        self.due = 0;
        if self.budget > 0 {
            self.issue(s, self.budget);
        }
    }

    /// Issues bursts within the budget, and finds the rows that they lie in.
    #[inline(never)]
    fn issue<S: Simd>(&mut self, s: S, bursts: usize) {
        let bursts = bursts.min(self.budget);
        self.budget -= bursts;
        for _ in 0..bursts {
            if self.next >= self.row && !self.find_rows() {
                return;
            }
            for stream in (0..STREAMS).filter(|stream| self.has_line(*stream)) {
                s.prefetch_l2(self.lines[stream].wrapping_add(self.next));
                if let Some(again) = self.again {
                    s.prefetch_l2(again[stream].wrapping_add(self.next));
                }
            }
            self.next += self.burst;
        }
    }

    /// Returns whether the next burst has a line of a stream: the lines of one run follow each
    /// other, and its last burst may have fewer.
    fn has_line(&self, stream: usize) -> bool {
        let line = if self.burst == LINE { 0 } else { stream * LINE };
        self.next + line < self.row
    }

    /// Finds the next rows. Returns whether there are any.
    fn find_rows(&mut self) -> bool {
        self.next = 0;
        self.left = self.left.saturating_sub(1);
        if self.left > 0 {
            for line in self.lines.iter_mut().chain(self.again.iter_mut().flatten()) {
                *line = line.wrapping_add(self.stride);
            }
            return true;
        }
        self.row = 0;
        while self.left == 0 && self.run < self.runs_each {
            let at = self.run;
            let RunLines { rows, row, stride } = RunLines::of(&self.runs[at]);
            (self.left, self.row, self.stride) = (rows, row, stride);
            self.lines = self.burst_of(self.runs, at);
            let has_again = self.runs_again.len() == self.runs.len();
            self.again = has_again.then(|| self.burst_of(self.runs_again, at));
            self.run += 1;
        }
        self.row = if self.left > 0 { self.row } else { 0 };
        self.whole = (self.row + LINE).saturating_sub(self.burst);
        self.row > 0
    }

    /// Returns the first burst of the runs of all streams.
    fn burst_of(&self, runs: &[KeyRows<'_>], run: usize) -> [*const u8; STREAMS] {
        let mut lines = [runs[run].at(0); STREAMS];
        for stream in 1..STREAMS {
            lines[stream] = if self.burst == LINE {
                runs[run + stream * self.runs_each].at(0)
            } else {
                lines[0].wrapping_add(stream * LINE)
            };
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{Element, RowLayout};
    use crate::scalar::Scalar;

    #[test]
    fn targets_depend_on_vendor_and_family() {
        assert_eq!(PrefetchTarget::of_x86(b"AuthenticAMD", 0x19), PrefetchTarget::L2Twice);
        assert_eq!(PrefetchTarget::of_x86(b"AuthenticAMD", 0x1a), PrefetchTarget::L2);
        assert_eq!(PrefetchTarget::of_x86(b"GenuineIntel", 6), PrefetchTarget::L2);
        assert_eq!(PrefetchTarget::of_x86(b"HygonGenuine", 0x18), PrefetchTarget::L2);
        assert_eq!("l2".parse(), Ok(PrefetchTarget::L2));
        let unknown = "l3".parse::<PrefetchTarget>().unwrap_err();
        assert!(unknown.to_string().contains("l2-twice"), "{unknown}");
    }

    /// Returns the lines that a cursor issues, and after how many bursts it has none left.
    fn issued(mut cursor: Prefetch<'_>) -> (Vec<usize>, usize) {
        let (mut lines, mut bursts) = (Vec::new(), 0);
        while cursor.budget > 0 {
            if cursor.next >= cursor.row && !cursor.find_rows() {
                break;
            }
            let streams = (0..STREAMS).filter(|stream| cursor.has_line(*stream));
            lines.extend(streams.map(|i| (cursor.lines[i].addr() + cursor.next) / LINE));
            // Half of the bursts by the step that does not leave the current rows.
            cursor.step(Scalar, if bursts % 2 == 0 { UNIT } else { 0 });
            cursor.catch_up(Scalar);
            if bursts % 2 == 1 {
                cursor.issue(Scalar, 1);
            }
            bursts += 1;
        }
        (lines, bursts)
    }

    /// Every line of every row is issued, and lines that two rows share at most twice.
    #[test]
    fn no_line_is_missed() {
        let memory = vec![0_u8; 1 << 14];
        for (begin, dim, gap, count) in
            [(0, 64, 0, 16), (2, 33, 0, 16), (64, 32, 1024, 7), (30, 25, 156, 3), (0, 8, 0, 1)]
        {
            let layout = RowLayout::plain(Element::F32, dim);
            let stride = layout.bytes() + gap;
            let rows = KeyRows::new(&memory[begin..], stride, count, &layout);
            for cuts in
                [vec![0, count], vec![0, count / 2, count / 2, count], (0..=count).collect()]
            {
                let runs: Vec<_> = cuts.windows(2).map(|cut| rows.slice(cut[0]..cut[1])).collect();
                let cursor = Prefetch::new(PrefetchTarget::L2, &runs, &[]);
                let (next, bursts) = issued(cursor);
                assert_eq!(bursts, cursor.budget, "{dim} {gap} {count} {cuts:?}");
                for [far, near] in [[&runs[..], &runs[..runs.len() - 1]], [&[], &runs[..]]] {
                    let twice = Prefetch::new(PrefetchTarget::L2Twice, far, near);
                    assert_eq!(issued(twice).0, next, "{dim} {gap} {count} {cuts:?}");
                }
                for row in 0..count {
                    let first = rows.at(row).addr();
                    for line in first / LINE..=(first + layout.bytes() - 1) / LINE {
                        let times = next.iter().filter(|issued| **issued == line).count();
                        assert!((1..=2).contains(&times), "{dim} {gap} {count} {cuts:?}: {times}");
                    }
                }
            }
        }
    }

    /// Runs that are alike are issued a line of each at a time; others one after the other.
    #[test]
    fn runs_of_equal_size_are_streams() {
        let memory = vec![0_u8; 1 << 14];
        let layout = RowLayout::plain(Element::F32, 64);
        let run = |begin: usize, rows| KeyRows::new(&memory[begin..], 256, rows, &layout);
        let first = memory.as_ptr().addr() / LINE;
        let lines = |runs: &[KeyRows<'_>]| {
            let lines = issued(Prefetch::new(PrefetchTarget::L2, runs, &[])).0;
            lines.iter().map(|line| line - first).take(6).collect::<Vec<_>>()
        };
        let alike = [0, 2048, 4096, 8192].map(|begin| run(begin, 4));
        assert_eq!(lines(&alike), [0, 32, 64, 128, 1, 33]);
        assert_eq!(lines(&alike[..3]), [0, 1, 2, 3, 4, 5]);
        let unlike = [run(0, 4), run(2048, 4), run(4096, 4), run(8192, 3)];
        assert_eq!(lines(&unlike), [0, 1, 2, 3, 4, 5]);
    }

    #[test]
    fn a_budget_is_spent_over_steps_and_runs() {
        let memory = vec![0_u8; 1 << 14];
        let layout = RowLayout::plain(Element::F32, 64);
        let run = |begin: usize| KeyRows::new(&memory[begin..], 256, 4, &layout);
        let runs = [run(0), KeyRows::empty(&layout), run(8192)];
        let mut cursor = Prefetch::new(PrefetchTarget::L2, &runs, &[]);
        let bursts = cursor.budget;
        for steps in [1, 3, 7] {
            assert!(cursor.pace(steps) * steps >= bursts * UNIT);
        }
        let pace = cursor.pace(5);
        for _ in 0..5 {
            cursor.step(Scalar, pace);
            cursor.catch_up(Scalar);
        }
        assert_eq!((cursor.budget, cursor.run), (0, 3));
        assert!(cursor.next >= cursor.row, "no line is left");
        cursor.allow(10);
        cursor.finish(Scalar);
        assert_eq!(cursor.budget, 0, "what is after the last run is dropped");
        assert_eq!(Prefetch::new(PrefetchTarget::None, &runs, &runs).budget, 0);
    }
}
