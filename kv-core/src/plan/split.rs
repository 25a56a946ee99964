//! KV splits: long contexts are split into ranges that run in parallel.
//!
//! Each split computes an unnormalised output with its own maximum and sum, and a merge combines
//! the splits exactly (Dao et al., "Flash-Decoding for long-context inference", 2023). Only the
//! order of rounding depends on the splits; [`Determinism`] controls that.
use crate::geometry::PlaneLayout;
use crate::num::{list_bytes, recycle, to_u32};
use crate::plan::batch::{PlannedSequence, SplitPolicy};

/// The inputs of KV splits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Determinism {
    /// On the batch and the number of workers: fastest. Repeating a step gives equal bits.
    #[default]
    Fast,
    /// On positions alone: the bits of a sequence's output do not depend on the rest of the batch.
    BatchInvariant,
}

/// One range of a sequence's context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct KvSplit {
    /// Index of the sequence in the batch.
    pub sequence: u32,
    /// First position.
    pub kv_begin: u32,
    /// One past the last position; always after `kv_begin`.
    pub kv_end: u32,
}

/// Contexts are split up to this number of queries: more queries keep all workers busy without.
const Q_LEN_SPLIT_MAX: u32 = 8;
/// Merging shorter splits costs more than they gain.
const SPLIT_TOKENS_MIN: u32 = 256;
/// Length of a split if splits may not depend on the batch.
const SPLIT_TOKENS_INVARIANT: u32 = 1024;
/// Splits per worker, so that a late one does not delay the others.
const SPLITS_PER_WORKER: u64 = 4;
/// Lengths of a split between one power of two and the next.
const STEPS_PER_OCTAVE: u32 = 8;

/// The splits of a batch that grows.
///
/// Their length follows from the tokens of the whole batch, in steps of an eighth: entries that are
/// added are split alone until the length takes its next step.
#[derive(Debug, Clone, Default)]
pub(crate) struct Splits {
    list: Vec<KvSplit>,
    /// Tokens of the contexts that may be split.
    tokens: u64,
    /// Tokens of a split.
    length: u32,
}

impl Splits {
    pub(crate) fn list(&self) -> &[KvSplit] {
        &self.list
    }

    /// Drops the splits. The memory stays for the next batch.
    pub(crate) fn clear(&mut self) {
        recycle(&mut self.list);
        (self.tokens, self.length) = (0, 0);
    }

    /// Splits the sequences from `first` on, and records the splits in them; those before too if
    /// the batch has longer splits now.
    pub(crate) fn extend(
        &mut self,
        (sequences, first): (&mut [PlannedSequence], usize),
        layout: &PlaneLayout,
        policy: SplitPolicy,
    ) {
        for sequence in sequences.iter().skip(first).filter(|sequence| sequence.may_be_split()) {
            self.tokens += u64::from(sequence.kv_len);
        }
        let length = match policy.determinism {
            Determinism::BatchInvariant => SPLIT_TOKENS_INVARIANT,
            Determinism::Fast => fast_length(self.tokens, layout, policy.workers),
        };
        // Whole blocks, so that a split begins at a block's start; past `u32`, one split.
        let length = length.checked_next_multiple_of(layout.block_size()).unwrap_or(u32::MAX);
        let first = if length == self.length { first } else { 0 };
        if first == 0 {
            self.list.clear();
        }
        self.length = length;
        for (sequence, index) in sequences.iter_mut().zip(0..).skip(first) {
            self.push(sequence, index);
        }
    }

    fn push(&mut self, sequence: &mut PlannedSequence, index: u32) {
        sequence.split_start = to_u32(self.list.len());
        sequence.num_splits = 0;
        if sequence.q_len == 0 || sequence.kv_len == 0 {
            return;
        }
        let mut kv_begin = 0;
        while kv_begin < sequence.kv_len {
            let kv_end = match kv_begin.checked_add(self.length) {
                Some(end) if sequence.may_be_split() => end.min(sequence.kv_len),
                _ => sequence.kv_len,
            };
            self.list.push(KvSplit { sequence: index, kv_begin, kv_end });
            kv_begin = kv_end;
        }
        sequence.num_splits = to_u32(self.list.len()) - sequence.split_start;
    }

    /// Returns the bytes of host memory of the list.
    pub(crate) fn host_bytes(&self) -> usize {
        list_bytes(&self.list)
    }
}

impl PlannedSequence {
    /// Returns whether the context is split if it is long.
    fn may_be_split(&self) -> bool {
        (1..=Q_LEN_SPLIT_MAX).contains(&self.q_len)
    }
}

/// Returns the length of splits with which all workers finish together, rounded up to its next step
/// of at most an eighth.
fn fast_length(tokens: u64, layout: &PlaneLayout, workers: u32) -> u32 {
    if workers <= 1 {
        return u32::MAX;
    }
    let parts = u64::from(workers) * SPLITS_PER_WORKER;
    let heads = u64::from(layout.num_kv_heads());
    // A share past `u32` is one split, whatever its length.
    let share = tokens.saturating_mul(heads) / parts;
    let share = u32::try_from(share).unwrap_or(u32::MAX).max(SPLIT_TOKENS_MIN);
    // A power of two divided by the steps of its octave.
    let step = share.checked_ilog2().and_then(|log| 1_u32.checked_shl(log));
    let step = step.unwrap_or(1).div_ceil(STEPS_PER_OCTAVE);
    share.checked_next_multiple_of(step).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Capabilities;
    use crate::geometry::{BlockOrder, PlaneShape};
    use kv_format::KvFormat;

    fn layout() -> PlaneLayout {
        PlaneLayout::new(PlaneShape {
            num_blocks: 10_000,
            block_size: 16,
            num_kv_heads: 2,
            head_dim: 64,
            order: BlockOrder::Hnd,
            format: KvFormat::F32,
        })
        .unwrap()
    }

    fn sequence(q_len: u32, kv_len: u32) -> PlannedSequence {
        let (row, q_start, new_start, new_len) = (0, 0, 0, 0);
        PlannedSequence {
            row,
            q_start,
            q_len,
            new_start,
            new_len,
            kv_len,
            coded: kv_len,
            coded_before: kv_len,
            sealed_index: 0,
            split_start: 0,
            num_splits: 0,
        }
    }

    fn cut(mut sequences: Vec<PlannedSequence>, policy: SplitPolicy) -> Vec<(u32, u32, u32)> {
        let mut splits = Splits::default();
        splits.extend((&mut sequences, 0), &layout(), policy);
        splits.list().iter().map(|s| (s.sequence, s.kv_begin, s.kv_end)).collect()
    }

    /// A growing batch is split like a whole one, nearly always by its new entries alone.
    #[test]
    fn entries_that_are_added_are_split_alone() {
        let policy = SplitPolicy { workers: 4, determinism: Determinism::Fast };
        let lens = (0..4000_u32).map(|n| sequence(1 + n % 10, 1 + n * 7919 % 3000));
        let (mut sequences, mut splits) = (Vec::new(), Splits::default());
        let (mut lengths, mut moved) = (0, 0);
        for added in lens {
            let before = (splits.length, sequences.len());
            sequences.push(added);
            splits.extend((&mut sequences, before.1), &layout(), policy);
            lengths += usize::from(splits.length != before.0);
            moved += if splits.length == before.0 { 1 } else { sequences.len() };
            if sequences.len().is_multiple_of(97) {
                let mut whole = Splits::default();
                let mut copy = sequences.clone();
                whole.extend((&mut copy, 0), &layout(), policy);
                assert_eq!((whole.list(), &copy), (splits.list(), &sequences));
            }
        }
        assert!((20..100).contains(&lengths), "{lengths} lengths");
        assert!(moved < 15 * sequences.len(), "{moved} splits for {} entries", sequences.len());
    }

    #[test]
    fn lengths_grow_in_steps_of_an_eighth() {
        let length = |tokens| fast_length(tokens * 16, &layout(), 8);
        assert_eq!([1, 256, 257, 288, 289].map(length), [256, 256, 288, 288, 320]);
        assert_eq!([8192, 8193, 16383, 16385].map(length), [8192, 9216, 16384, 18432]);
        assert_eq!(length(u64::MAX / 16), u32::MAX);
    }

    #[test]
    fn one_worker_splits_nothing() {
        let policy = SplitPolicy { workers: 1, determinism: Determinism::Fast };
        assert_eq!(cut(vec![sequence(1, 100_000)], policy), [(0, 0, 100_000)]);
    }

    #[test]
    fn workers_of_all_heads_need_more_splits() {
        let sized = |workers| {
            let policy = SplitPolicy { workers, determinism: Determinism::Fast };
            let parts = cut(vec![sequence(1, 32_768)], policy);
            (parts.len(), parts.iter().map(|p| p.2 - p.1).max())
        };
        let heads = layout().num_kv_heads();
        let alone = Capabilities::minimal().with_workers(2);
        assert_eq!(sized(alone.workers_of_heads(heads)), (4, Some(8192)));
        let together = alone.with_heads_together();
        assert_eq!(sized(together.workers_of_heads(heads)), (8, Some(4096)));
        let one = together.with_workers(1);
        assert_eq!(sized(one.workers_of_heads(heads)), (1, Some(32_768)), "nothing to share");
    }

    #[test]
    fn splits_cover_the_context_in_order() {
        let policy = SplitPolicy { workers: 8, determinism: Determinism::Fast };
        let parts = cut(vec![sequence(1, 5000), sequence(0, 7), sequence(1, 16)], policy);
        let long: Vec<_> = parts.iter().filter(|p| p.0 == 0).collect();
        assert!(long.len() > 4, "{parts:?}");
        assert_eq!((long[0].1, long[long.len() - 1].2), (0, 5000));
        assert!(long.windows(2).all(|w| w[0].2 == w[1].1 && w[0].1 < w[0].2));
        assert!(parts.iter().all(|p| p.0 != 1), "no queries, no splits");
        assert!(parts.contains(&(2, 0, 16)));
    }

    #[test]
    fn invariant_splits_ignore_the_batch() {
        let policy = SplitPolicy { workers: 8, determinism: Determinism::BatchInvariant };
        let alone = cut(vec![sequence(1, 3000)], policy);
        let crowd = cut(vec![sequence(1, 3000), sequence(1, 90_000), sequence(4, 2)], policy);
        assert_eq!(alone, [(0, 0, 1024), (0, 1024, 2048), (0, 2048, 3000)]);
        assert_eq!(crowd[..3], alone);
    }

    #[test]
    fn prefill_is_not_split() {
        let policy = SplitPolicy { workers: 64, determinism: Determinism::BatchInvariant };
        assert_eq!(cut(vec![sequence(9, 4096)], policy), [(0, 0, 4096)]);
    }
}
