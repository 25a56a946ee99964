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

/// A cursor over the cache lines of rows that a later call reads.
#[derive(Debug, Clone, Copy)]
pub struct Prefetch<'a> {
    /// The next line.
    at: *const u8,
    /// Lines left of the current row; rows that follow each other without a gap count as one.
    left: usize,
    /// Rows left after it, lines of each, and bytes from the end of one to the next.
    rows: usize,
    lines: usize,
    gap: usize,
    /// Runs of rows after those.
    later: &'a [KeyRows<'a>],
    /// Runs that are prefetched again, each together with the run of `later` at the same index.
    again: &'a [KeyRows<'a>],
    /// Bytes from a line to the one that is prefetched again with it, or 0.
    offset: usize,
    /// Lines that the current kernel may still issue.
    budget: usize,
}

impl<'a> Prefetch<'a> {
    /// Creates a cursor without lines.
    pub fn none() -> Self {
        Self {
            at: std::ptr::null(),
            left: 0,
            rows: 0,
            lines: 0,
            gap: 0,
            later: &[],
            again: &[],
            offset: 0,
            budget: 0,
        }
    }

    /// Creates a cursor over all lines of `far`, for one kernel to issue; for
    /// [`PrefetchTarget::L2Twice`], each with a line of `near`, which is read earlier.
    pub fn new(target: PrefetchTarget, far: &'a [KeyRows<'a>], near: &'a [KeyRows<'a>]) -> Self {
        let (later, again): (_, &[_]) = match target {
            PrefetchTarget::None => return Self::none(),
            PrefetchTarget::L2 => (far, &[]),
            // After the last tile only `near` is left.
            PrefetchTarget::L2Twice if far.is_empty() => (near, &[]),
            PrefetchTarget::L2Twice => (far, near),
        };
        let mut cursor = Self { later, again, budget: Self::lines_of(later), ..Self::none() };
        cursor.next_run();
        cursor
    }

    /// Sets how many lines the next kernel issues.
    pub(crate) fn allow(&mut self, lines: usize) {
        self.budget = lines;
    }

    /// Lines that the next kernel may issue.
    pub(crate) fn budget(&self) -> usize {
        self.budget
    }
    /// Lets a kernel that takes `rows` of `all` rows, from `row` on, issue its share of a budget.
    pub(crate) fn allow_share(&mut self, budget: usize, (row, rows, all): (usize, usize, usize)) {
        let all = all.max(1);
        self.allow(budget * (row + rows) / all - budget * row / all);
    }

    /// Returns the number of lines of some runs.
    fn lines_of(runs: &[KeyRows<'_>]) -> usize {
        let mut cursor = Prefetch::none();
        let lines = runs.iter().map(|rows| {
            cursor.enter(rows);
            cursor.left + cursor.rows * cursor.lines
        });
        lines.sum()
    }

    #[inline]
    fn enter(&mut self, rows: &KeyRows<'_>) {
        let (bytes, stride, count) = (rows.layout().bytes(), rows.stride(), rows.len());
        let (count, bytes) =
            if bytes == stride { (count.min(1), count * bytes) } else { (count, bytes) };
        let first = rows.at(0);
        let lines = ((first.addr() & (LINE - 1)) + bytes).div_ceil(LINE);
        self.at = first;
        self.lines = if count > 0 { lines } else { 0 };
        (self.left, self.rows) = (self.lines, count.saturating_sub(1));
        self.gap = stride.wrapping_sub(lines * LINE);
    }

    fn next_run(&mut self) {
        while self.left == 0
            && let Some((rows, later)) = self.later.split_first()
        {
            self.later = later;
            self.enter(rows);
            self.offset = 0;
            if let Some((again, rest)) = self.again.split_first() {
                self.again = rest;
                self.offset = again.at(0).addr().wrapping_sub(rows.at(0).addr());
            }
        }
    }

    /// Lines that each of `steps` steps issues, so that they spread the budget evenly.
    #[inline(always)]
    pub(crate) fn pace(&self, steps: usize) -> usize {
        self.budget.div_ceil(steps.max(1))
    }

    /// Issues up to `lines` lines within the budget. Kernels call it on a local copy of the cursor,
    /// which stays in registers.
    #[inline(always)]
    pub(crate) fn step<S: Simd>(&mut self, s: S, lines: usize) {
        if lines <= self.left.min(self.budget) {
            self.issue(s, lines);
            self.budget -= lines;
            self.left -= lines;
        } else {
            self.step_over_rows(s, lines);
        }
    }

    /// Issues the next lines of a row.
    #[inline(always)]
    fn issue<S: Simd>(&mut self, s: S, lines: usize) {
        let end = self.at.wrapping_add(lines * LINE);
        if self.offset == 0 {
            while self.at != end {
                s.prefetch_l2(self.at);
                self.at = self.at.wrapping_add(LINE);
            }
        } else {
            while self.at != end {
                s.prefetch_l2(self.at);
                s.prefetch_l2(self.at.wrapping_add(self.offset));
                self.at = self.at.wrapping_add(LINE);
            }
        }
    }

    /// Does what [`Self::step`] does where a row, a run or the budget ends.
    #[inline(always)]
    fn step_over_rows<S: Simd>(&mut self, s: S, lines: usize) {
        let mut lines = lines.min(self.budget);
        self.budget -= lines;
        while lines > 0 && self.find_line() {
            let some = lines.min(self.left);
            self.issue(s, some);
            self.left -= some;
            lines -= some;
        }
    }

    /// Advances to the next row or run when the current one has no line left. Returns whether a
    /// line is left.
    #[inline(always)]
    fn find_line(&mut self) -> bool {
        if self.left == 0 {
            if self.rows > 0 {
                self.at = self.at.wrapping_add(self.gap);
                (self.left, self.rows) = (self.lines, self.rows - 1);
            } else {
                self.next_run();
            }
        }
        self.left > 0
    }

    /// Issues the rest of the budget.
    #[inline(always)]
    pub(crate) fn finish<S: Simd>(&mut self, s: S) {
        self.step(s, self.budget);
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

    /// Returns the lines that a cursor issues, one at a time.
    fn issued(mut cursor: Prefetch<'_>) -> Vec<usize> {
        let mut lines = Vec::new();
        while cursor.budget > 0 && cursor.find_line() {
            lines.push(cursor.at.addr() / LINE);
            cursor.step(Scalar, 1);
        }
        lines
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
            let runs =
                [rows.slice(0..count / 2), KeyRows::empty(&layout), rows.slice(count / 2..count)];
            let next = issued(Prefetch::new(PrefetchTarget::L2, &runs, &[]));
            for [far, near] in [[&runs[..], &runs[..2]], [&[], &runs[..]]] {
                let twice = Prefetch::new(PrefetchTarget::L2Twice, far, near);
                assert_eq!(issued(twice), next, "{dim} {gap} {count}");
            }
            for row in 0..count {
                let first = rows.at(row).addr();
                for line in first / LINE..=(first + layout.bytes() - 1) / LINE {
                    let times = next.iter().filter(|issued| **issued == line).count();
                    assert!((1..=2).contains(&times), "{dim} {gap} {count}: {times}");
                }
            }
        }
    }

    #[test]
    fn a_budget_is_spent_over_steps_and_runs() {
        let memory = vec![0_u8; 1 << 14];
        let layout = RowLayout::plain(Element::F32, 64);
        let run = |begin: usize| KeyRows::new(&memory[begin..], 256, 4, &layout);
        let runs = [run(0), KeyRows::empty(&layout), run(8192)];
        let mut cursor = Prefetch::new(PrefetchTarget::L2, &runs, &[]);
        let lines = Prefetch::lines_of(&runs);
        cursor.allow(lines);
        for steps in [1, 3, 7] {
            assert!(cursor.pace(steps) * steps >= lines);
        }
        for _ in 0..5 {
            cursor.step(Scalar, lines / 5 + 1);
        }
        assert_eq!((cursor.budget, cursor.left, cursor.later.len()), (0, 0, 0));
        cursor.allow(10);
        cursor.finish(Scalar);
        assert_eq!(cursor.budget, 0, "what is after the last run is dropped");
        assert_eq!(Prefetch::new(PrefetchTarget::None, &runs, &runs).budget, 0);
    }
}
