//! The lists of one batch, and how large they may get.
use kv_core::plan::PlanBuffers;

use super::{Extent, StepLimits, StepPlan};
use crate::num::{to_u32, to_u64, to_usize};
use crate::params::{Address, Counts, Entry, Plan, Sequence, Split};
use crate::scratch::{At, Pack};

/// How many elements each list has room for.
#[derive(Debug, Clone, Copy)]
struct Room {
    sequences: usize,
    splits: usize,
    slots: usize,
}

/// Where the lists of a batch are in a pack.
pub(super) struct Lists {
    counts: At,
    sequences: At,
    entries: At,
    part_index: At,
    splits: At,
    slots: At,
    extent: Extent,
    room: Extent,
}

impl Lists {
    /// Adds the lists of a batch to an empty pack; with limits, each at the same place every time.
    pub(super) fn put(
        pack: &mut Pack,
        batch: &PlanBuffers,
        limits: Option<StepLimits>,
        (table, sequences): (impl Fn(usize, u32) -> u32, &mut Vec<Sequence>),
    ) -> Self {
        pack.clear();
        sequences.clear();
        let (mut entries, mut part_index) = (Vec::new(), Vec::new());
        let mut parts = 0_u64;
        for (index, sequence) in batch.sequences().iter().enumerate() {
            part_index.push(u32::try_from(parts).unwrap_or(u32::MAX));
            if sequence.num_splits > 1 {
                let own = u64::from(sequence.num_splits).saturating_mul(sequence.q_len.into());
                parts = parts.saturating_add(own);
            }
            entries.push(Entry { start: sequence.q_start, len: sequence.q_len });
            sequences.push(Sequence {
                row: sequence.row,
                q_start: sequence.q_start,
                q_len: sequence.q_len,
                new_start: sequence.new_start,
                new_len: sequence.new_len,
                kv_len: sequence.kv_len,
                coded: sequence.coded,
                coded_before: sequence.coded_before,
                sealed_index: sequence.sealed_index,
                split_start: sequence.split_start,
                num_splits: sequence.num_splits,
                table: table(index, sequence.row),
            });
        }
        let split = |split: &kv_core::plan::KvSplit| Split {
            sequence: split.sequence,
            begin: split.kv_begin,
            end: split.kv_end,
            pad: 0,
        };
        let splits: Vec<_> = batch.splits().iter().map(split).collect();
        let slots: Vec<u32> = batch.slots().iter().map(|slot| slot.0).collect();
        let actual = extent_of(batch);
        let largest = limits.map_or(actual, |limits| largest(&limits));
        let counts = Counts {
            sequences: actual.sequences,
            splits: actual.splits,
            total_q: actual.total_q,
            total_new: actual.total_new,
            q_len_max: actual.q_len_max,
            new_len_max: actual.new_len_max,
            pad0: 0,
            pad1: 0,
        };
        let room = Room {
            sequences: to_usize(largest.sequences),
            splits: to_usize(largest.splits),
            slots: to_usize(largest.total_new),
        };
        Self {
            counts: pack.push(&[counts]),
            sequences: pack.push_in(sequences, room.sequences),
            entries: pack.push_in(&entries, room.sequences),
            part_index: pack.push_in(&part_index, room.sequences),
            splits: pack.push_in(&splits, room.splits),
            slots: pack.push_in(&slots, room.slots),
            extent: actual,
            room: largest,
        }
    }

    pub(super) fn at(&self, base: Address, tables: Address) -> StepPlan {
        StepPlan {
            plan: Plan {
                counts: self.counts.from(base),
                sequences: self.sequences.from(base),
                splits: self.splits.from(base),
                slots: self.slots.from(base),
                tables,
            },
            queries: self.entries.from(base),
            part_index: self.part_index.from(base),
            extent: self.extent,
            room: self.room,
        }
    }
}

/// The numbers of a batch.
pub(super) fn extent_of(batch: &PlanBuffers) -> Extent {
    let sequences = batch.sequences();
    let parts = sequences.iter().filter(|sequence| sequence.num_splits > 1);
    let parts = parts.map(|s| u64::from(s.num_splits).saturating_mul(s.q_len.into()));
    Extent {
        sequences: to_u32(sequences.len()),
        splits: to_u32(batch.splits().len()),
        total_q: batch.total_q(),
        total_new: batch.total_new(),
        q_len_max: batch.q_len_max(),
        new_len_max: batch.new_len_max(),
        kv_len_max: sequences.iter().map(|s| s.kv_len).max().unwrap_or(0),
        parts: parts.fold(0, u64::saturating_add),
    }
}

/// The limits as an extent.
fn largest(limits: &StepLimits) -> Extent {
    let tokens = limits.sequences.saturating_mul(limits.tokens_per_sequence);
    Extent {
        sequences: limits.sequences,
        splits: limits.splits,
        total_q: tokens,
        total_new: tokens,
        q_len_max: limits.tokens_per_sequence,
        new_len_max: limits.tokens_per_sequence,
        kv_len_max: limits.max_seq_len,
        parts: u64::from(limits.splits).saturating_mul(limits.tokens_per_sequence.into()),
    }
}

/// What of a step is beyond the limits.
pub(super) fn within(step: &Extent, limits: &StepLimits) -> Option<String> {
    let largest = largest(limits);
    let found = [
        ("sequences", step.sequences, largest.sequences),
        ("parts of contexts", step.splits, largest.splits),
        ("queries of one sequence", step.q_len_max, largest.q_len_max),
        ("new tokens of one sequence", step.new_len_max, largest.new_len_max),
        ("tokens of one sequence", step.kv_len_max, largest.kv_len_max),
    ];
    let beyond = found.into_iter().find(|(_, got, max)| got > max);
    beyond.map(|(what, got, max)| format!("{got} {what}, and the limits of steps allow {max}"))
}

impl Pack {
    /// As [`Self::push`], with room for `room` values at least, so that what comes behind does not
    /// move.
    fn push_in<T: bytemuck::NoUninit>(&mut self, values: &[T], room: usize) -> At {
        let at = self.push(values);
        let missing = room.saturating_sub(values.len()).saturating_mul(size_of::<T>());
        self.skip(to_u64(missing));
        at
    }
}
