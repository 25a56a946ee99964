//! The requests of all copies of a trace, in the order of their arrival.
//!
//! A copy has users of its own: none of its blocks is one of another copy. Copies are shifted
//! evenly over the time of the trace, and what a shift moves beyond its end comes at the beginning,
//! so that the load is that of the trace, smoothed. Only the trace itself is held in memory.
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::num::NonZeroU32;
use std::time::Duration;

use crate::num::{to_u32, to_u64, to_usize};
use crate::replay::trace::Trace;

/// Upper limit of the time between the first request and the last: 30 years.
pub(super) const SPAN_MAX: Duration = Duration::from_secs(1_000_000_000);

/// A trace that lasts too long.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[error(
    "the requests of the trace are {seconds} seconds apart, at most {} in a fleet",
    SPAN_MAX.as_secs()
)]
pub(super) struct TooLong {
    seconds: f64,
}

/// A block of one copy, and everything before it.
pub(super) type Block = u64;

/// A trace and the number of its copies.
pub(super) struct Workload<'t> {
    trace: &'t Trace,
    copies: u32,
    /// Contents of the blocks of all requests, one request after another: equal numbers stand for
    /// blocks that are equal with everything before them.
    contents: Vec<u32>,
    /// Where the contents of each request begin.
    firsts: Vec<usize>,
    num_contents: u32,
    /// The requests by the time from the first one.
    order: Vec<(Duration, u32)>,
    /// The time after which a copy would begin again: that of the trace, and a mean gap.
    period: Duration,
}

/// One request of one copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Arrival {
    pub(super) at: Duration,
    pub(super) copy: u32,
    /// Its index in the trace.
    pub(super) request: u32,
}

impl<'t> Workload<'t> {
    pub(super) fn new(trace: &'t Trace, copies: u32) -> Result<Self, TooLong> {
        let seconds = || trace.arrivals().iter().map(|arrival| arrival.seconds);
        let first = seconds().reduce(f64::min).unwrap_or(0.0);
        let time = |seconds: f64| {
            let time = Duration::try_from_secs_f64(seconds - first).ok();
            time.filter(|time| *time <= SPAN_MAX).ok_or(TooLong { seconds: seconds - first })
        };
        let mut order = Vec::with_capacity(trace.requests().len());
        for (request, seconds) in seconds().enumerate() {
            order.push((time(seconds)?, to_u32(request)));
        }
        order.sort_by_key(|(at, _)| *at);
        let span = order.last().map_or(Duration::ZERO, |(at, _)| *at);
        let gaps = to_u32(order.len().saturating_sub(1));
        let period = span + span.checked_div(gaps).unwrap_or(Duration::ZERO);
        let (contents, firsts, num_contents) = contents(trace);
        Ok(Self { trace, copies, contents, firsts, num_contents, order, period })
    }

    /// Returns the requests of all copies.
    pub(super) fn num_requests(&self) -> u64 {
        to_u64(self.order.len()).saturating_mul(self.copies.into())
    }

    /// Returns the tokens of the prompts of all copies, refused ones too.
    pub(super) fn total_tokens(&self) -> u64 {
        self.trace.total_tokens.saturating_mul(self.copies.into())
    }

    pub(super) fn period(&self) -> Duration {
        self.period
    }

    pub(super) fn block_size(&self) -> NonZeroU32 {
        self.trace.block_size
    }

    /// Returns tokens and blocks of a request.
    pub(super) fn size(&self, arrival: Arrival) -> (u32, u32) {
        let request = self.trace.requests().get(to_usize(arrival.request));
        request.map_or((0, 0), |request| (request.tokens, request.num_blocks))
    }

    /// Writes the blocks of a request to `out`, in order.
    pub(super) fn blocks(&self, arrival: Arrival, out: &mut Vec<Block>) {
        let first = self.firsts[to_usize(arrival.request)];
        let (_, num_blocks) = self.size(arrival);
        let contents = &self.contents[first..first + to_usize(num_blocks)];
        let base = u64::from(arrival.copy) * u64::from(self.num_contents);
        out.clear();
        out.extend(contents.iter().map(|content| base + u64::from(*content)));
    }

    /// Returns the requests of all copies by their arrival; at the same time, by copy and by their
    /// place in the file.
    pub(super) fn arrivals(&self) -> Arrivals<'_, 't> {
        let cursors = (0..self.copies).map(|copy| {
            let begin = self.wrapped_from(copy);
            (copy, begin)
        });
        let mut arrivals = Arrivals { workload: self, next: BinaryHeap::new() };
        for (copy, begin) in cursors {
            arrivals.push(copy, begin, self.order.len());
        }
        arrivals
    }

    fn shift(&self, copy: u32) -> Duration {
        let shift = self.period * copy;
        shift.checked_div(self.copies).unwrap_or(Duration::ZERO)
    }

    /// Returns the first request in time that the shift of a copy moves to the beginning.
    fn wrapped_from(&self, copy: u32) -> usize {
        let shift = self.shift(copy);
        self.order.partition_point(|(at, _)| *at + shift < self.period || shift.is_zero())
    }
}

/// The arrivals of a workload, of which the next one of each copy is held.
pub(super) struct Arrivals<'w, 't> {
    workload: &'w Workload<'t>,
    /// Time and copy, the place in the order of time, and how many follow with it.
    next: BinaryHeap<Reverse<(Duration, u32, usize, usize)>>,
}

impl Arrivals<'_, '_> {
    /// Adds the request of a copy at a place in the order of time, after whose end the beginning
    /// follows. `left` counts it and those after it.
    fn push(&mut self, copy: u32, place: usize, left: usize) {
        let Workload { order, period, .. } = self.workload;
        let place = place % order.len().max(1);
        // As many follow as there are to the end, or fewer than have been there.
        let is_wrapped = left + place > order.len();
        if let (Some((at, _)), true) = (order.get(place), left > 0) {
            let shifted = *at + self.workload.shift(copy);
            assert!(!is_wrapped || shifted >= *period, "what is moved is past the trace's end");
            let at = if is_wrapped { shifted.saturating_sub(*period) } else { shifted };
            self.next.push(Reverse((at, copy, place, left)));
        }
    }
}

impl Iterator for Arrivals<'_, '_> {
    type Item = Arrival;

    fn next(&mut self) -> Option<Arrival> {
        let Reverse((at, copy, place, left)) = self.next.pop()?;
        let (_, request) = *self.workload.order.get(place)?;
        self.push(copy, place + 1, left - 1);
        Some(Arrival { at, copy, request })
    }
}

/// Numbers the blocks of all requests by their content. Returns the numbers, where each request
/// begins, and the upper limit of the numbers.
fn contents(trace: &Trace) -> (Vec<u32>, Vec<usize>, u32) {
    const ROOT: u32 = u32::MAX;
    let has_ids = trace.all_ids().is_some();
    let (mut contents, mut firsts, mut numbers) = (Vec::new(), Vec::new(), Vec::new());
    let mut known = HashMap::new();
    for request in trace.requests() {
        firsts.push(contents.len());
        trace.blocks(request, &mut numbers);
        if !has_ids {
            contents.extend(&numbers);
            continue;
        }
        let mut parent = ROOT;
        for number in &numbers {
            let next = to_u32(known.len());
            parent = *known.entry((parent, *number)).or_insert(next);
            contents.push(parent);
        }
    }
    let limit = if has_ids { to_u32(known.len()) } else { trace.num_blocks() };
    (contents, firsts, limit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::source::tests::lines;
    use crate::replay::trace::Sizes;

    fn trace(seconds: &[f64]) -> Trace {
        let line = |(id, seconds): (usize, &f64)| {
            let at = seconds * 1000.0;
            let lengths = r#""input_length": 9, "output_length": 1"#;
            format!(r#"{{"timestamp": {at}, {lengths}, "hash_ids": [{id}]}}"#)
        };
        let text: Vec<_> = seconds.iter().enumerate().map(line).collect();
        Trace::from_lines(lines(text.join("\n")), None, Sizes::default()).expect("a trace")
    }

    fn arrivals(seconds: &[f64], copies: u32) -> Vec<(u128, u32, u32)> {
        let trace = trace(seconds);
        let workload = Workload::new(&trace, copies).expect("a workload");
        let arrivals = workload.arrivals();
        arrivals.map(|of| (of.at.as_millis(), of.copy, of.request)).collect()
    }

    #[test]
    fn one_copy_is_the_trace_from_its_first_request() {
        assert_eq!(
            arrivals(&[5.0, 3.0, 5.0, 4.0], 1),
            [(0, 0, 1), (1000, 0, 3), (2000, 0, 0), (2000, 0, 2)]
        );
        assert_eq!(arrivals(&[7.0], 3), [(0, 0, 0), (0, 1, 0), (0, 2, 0)], "no time to shift over");
    }

    #[test]
    fn copies_are_shifted_evenly_and_wrap_around() {
        // Three requests in 8 s: with a mean gap of 4 s, a copy begins again after 12 s.
        assert_eq!(
            arrivals(&[0.0, 1.0, 8.0], 3),
            [
                (0, 0, 0),
                (0, 1, 2),
                (1000, 0, 1),
                (4000, 1, 0),
                (4000, 2, 2),
                (5000, 1, 1),
                (8000, 0, 2),
                (8000, 2, 0),
                (9000, 2, 1),
            ]
        );
    }

    #[test]
    fn copies_share_no_block_and_prefixes_are_parts_of_contents() {
        let request = |ids: &str, tokens: u32| {
            let lengths = format!(r#""input_length": {tokens}, "output_length": 1"#);
            format!(r#"{{"timestamp": 0, {lengths}, "hash_ids": {ids}}}"#)
        };
        let text = [request("[1, 2]", 600), request("[2]", 512), request("[1, 2]", 600)];
        let trace = Trace::from_lines(lines(text.join("\n")), None, Sizes::default());
        let trace = trace.expect("a trace");
        let workload = Workload::new(&trace, 2).expect("a workload");
        let blocks = |copy, request| {
            let mut blocks = Vec::new();
            workload.blocks(Arrival { at: Duration::ZERO, copy, request }, &mut blocks);
            blocks
        };
        assert_eq!((blocks(0, 0), blocks(0, 1)), (vec![0, 1], vec![2]), "2 alone is another block");
        assert_eq!((blocks(0, 2), blocks(1, 2)), (vec![0, 1], vec![3, 4]));
        assert_eq!((workload.num_requests(), workload.total_tokens()), (6, 3424));
    }

    #[test]
    fn times_without_bounds_are_refused() {
        let error = Workload::new(&trace(&[0.0, 2e9]), 1).err().expect("refused");
        let text = error.to_string();
        assert!(text.contains("2000000000 seconds apart, at most 1000000000"), "{text}");
    }
}
