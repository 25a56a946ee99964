//! The lengths of a prompt behind which stores are asked for recurrent states.
use std::collections::HashSet;

use kv_core::KvCache;
use kv_core::backend::Backend;
use kv_core::reuse::PrefixProbe;

/// The lengths of a prompt behind which stores are asked for states.
#[derive(Debug)]
pub(super) struct StateSearch {
    /// The likeliest first.
    lengths: Vec<u32>,
    asked: usize,
    batch: usize,
    /// Lengths whose tails were asked for.
    pub(super) tails: HashSet<u32>,
}

/// Lengths of the first question; each one after it asks for four times as many.
const FIRST_BATCH: usize = 64;
/// Lengths before a stop that are asked for first: a text ended a few tokens before the end of its
/// message, which the template of the next prompt completes.
const NEAR: u32 = 16;

impl StateSearch {
    /// Lists at most `most` lengths of a prompt; `None` in a cache without states.
    pub(super) fn new<B: Backend>(
        cache: &KvCache<B>,
        probe: &PrefixProbe,
        (stops, most): (&[u32], usize),
    ) -> Option<Self> {
        if cache.state().spec().states().is_empty() {
            return None;
        }
        let (shortest, longest) = (probe.reused() + 1, probe.limit());
        let mut near: Vec<_> = stops.iter().copied().filter(|stop| *stop <= longest).collect();
        near.push(longest);
        near.sort_unstable_by(|a, b| b.cmp(a));
        let before = |stop: &u32| (stop.saturating_sub(NEAR)..=*stop).rev();
        let all = near.iter().flat_map(before).chain((shortest..=longest).rev());
        let is_kept = |len: &u32| {
            *len >= shortest && cache.state().kept_length(*len) == *len && probe.reaches(*len)
        };
        let mut seen = HashSet::new();
        let lengths = all.filter(is_kept).filter(|len| seen.insert(*len)).take(most).collect();
        Some(Self { lengths, asked: 0, batch: FIRST_BATCH, tails: HashSet::new() })
    }

    /// Lets everything be asked again.
    pub(super) fn begin_again(&mut self) {
        (self.asked, self.batch) = (0, FIRST_BATCH);
        self.tails.clear();
    }

    /// Returns the next lengths to ask for, and how many were asked for before; `None` after the
    /// last.
    pub(super) fn next_batch(&mut self) -> Option<(usize, Vec<u32>)> {
        let before = self.asked;
        let batch: Vec<_> = self.lengths.iter().copied().skip(before).take(self.batch).collect();
        self.asked += batch.len();
        self.batch = self.batch.saturating_mul(4);
        (!batch.is_empty()).then_some((before, batch))
    }
}
