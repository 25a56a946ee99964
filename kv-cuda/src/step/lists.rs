//! The lists of one batch, and their maximum sizes.
use kv_core::plan::{KvSplit, PlanBuffers, PlannedSequence};

use super::tables::Change;
use super::{Extent, StepLimits, StepPlan};
use crate::decode;
use crate::params::{Address, Counts, Entry, Plan, Sequence, Split};
use crate::scratch::{At, Pack};
use kv_core::num::{to_u32, to_u64, to_usize};

/// Number of elements that each list has space for.
#[derive(Debug, Clone, Copy)]
struct Room {
    sequences: usize,
    splits: usize,
    slots: usize,
    changes: usize,
}

/// Offsets of a batch's lists in a pack.
pub(super) struct Lists {
    counts: At,
    sequences: At,
    entries: At,
    partial_index: At,
    slots: At,
    changes: Option<At>,
    splits: At,
    extent: Extent,
    room: Extent,
}

impl Lists {
    /// Adds the lists of a batch to an empty pack; with limits, each list is always at the same
    /// offset. Changes of tables are added if they fit.
    pub(super) fn put(
        pack: &mut Pack,
        (batch, actual): (&PlanBuffers, Extent),
        limits: Option<StepLimits>,
        (table, changes): (impl Fn(usize, u32) -> u32, &[Change]),
    ) -> Self {
        pack.clear();
        let most = limits.map_or(actual, |limits| largest(&limits));
        let room = Room {
            sequences: to_usize(most.sequences),
            splits: to_usize(most.splits),
            slots: to_usize(most.total_new),
            changes: if limits.is_some() { to_usize(most.sequences) } else { changes.len() },
        };
        let sequences = batch.sequences();
        let mut partials = 0_u64;
        let partial_index = sequences.iter().map(|sequence| {
            // Past `u32`, their memory is refused.
            let index = u32::try_from(partials).unwrap_or(u32::MAX);
            partials += partials_of(sequence);
            index
        });
        let entries = sequences.iter().map(|s| Entry { start: s.q_start, len: s.q_len });
        let planned = sequences.iter().enumerate();
        let planned = planned.map(|(index, s)| sequence(s, table(index, s.row)));
        let slots = batch.slots().iter().map(|slot| slot.0);
        let (counts, sequences) =
            (pack.push(&[counts_of(&actual)]), pack.push_each(planned, room.sequences));
        let entries = pack.push_each(entries, room.sequences);
        let partial_index = pack.push_each(partial_index, room.sequences);
        let slots = pack.push_each(slots, room.slots);
        let fits = changes.len() <= room.changes;
        let changes = if fits { changes } else { &[] };
        let changes_at = pack.push_each(changes.iter().copied(), room.changes);
        // The list with the most unused space comes last, where that space is not sent.
        let splits_at = pack.push_each(batch.splits().iter().map(split), 0);
        let missing = room.splits.saturating_sub(batch.splits().len());
        if missing > 0 {
            pack.room(to_u64(missing * size_of::<Split>()));
        }
        Self {
            counts,
            sequences,
            entries,
            partial_index,
            slots,
            changes: fits.then_some(changes_at),
            splits: splits_at,
            extent: actual,
            room: most,
        }
    }

    /// Returns the address of the table changes in a pack that lies at `base`, if they were added.
    pub(super) fn changes(&self, base: Address) -> Option<Address> {
        self.changes.map(|at| at.from(base))
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
            partial_index: self.partial_index.from(base),
            extent: self.extent,
            room: self.room,
        }
    }
}

fn sequence(planned: &PlannedSequence, table: u32) -> Sequence {
    Sequence {
        row: planned.row,
        q_start: planned.q_start,
        q_len: planned.q_len,
        new_start: planned.new_start,
        new_len: planned.new_len,
        kv_len: planned.kv_len,
        coded: planned.coded,
        coded_before: planned.coded_before,
        sealed_index: planned.sealed_index,
        split_start: planned.split_start,
        num_splits: planned.num_splits,
        table,
    }
}

fn split(split: &KvSplit) -> Split {
    Split { sequence: split.sequence, begin: split.kv_begin, end: split.kv_end, pad: 0 }
}

fn counts_of(actual: &Extent) -> Counts {
    Counts {
        sequences: actual.sequences,
        splits: actual.splits,
        total_q: actual.total_q,
        total_new: actual.total_new,
        q_len_max: actual.q_len_max,
        new_len_max: actual.new_len_max,
        pad0: 0,
        pad1: 0,
    }
}

/// Returns the number of partial results of one head of a sequence.
fn partials_of(sequence: &PlannedSequence) -> u64 {
    if sequence.num_splits < 2 {
        return 0;
    }
    u64::from(sequence.num_splits) * u64::from(sequence.q_len)
}

/// Returns the extent of a batch.
pub(super) fn extent_of(batch: &PlanBuffers) -> Extent {
    let sequences = batch.sequences();
    let (mut partials, mut kv_len_max, mut decode_q_len_max) = (0_u64, 0, 0);
    for sequence in sequences {
        partials += partials_of(sequence);
        kv_len_max = sequence.kv_len.max(kv_len_max);
        if sequence.q_len <= decode::Q_LEN_MAX {
            decode_q_len_max = sequence.q_len.max(decode_q_len_max);
        }
    }
    Extent {
        sequences: to_u32(sequences.len()),
        splits: to_u32(batch.splits().len()),
        total_q: batch.total_q(),
        total_new: batch.total_new(),
        q_len_max: batch.q_len_max(),
        decode_q_len_max,
        new_len_max: batch.new_len_max(),
        kv_len_max,
        partials,
    }
}

/// Returns the limits as an extent; limits may be any: `u32::MAX` tokens if more.
fn largest(limits: &StepLimits) -> Extent {
    let tokens = limits.sequences.saturating_mul(limits.tokens_per_sequence);
    Extent {
        sequences: limits.sequences,
        splits: limits.splits,
        total_q: tokens,
        total_new: tokens,
        q_len_max: limits.tokens_per_sequence,
        decode_q_len_max: limits.tokens_per_sequence.min(decode::Q_LEN_MAX),
        new_len_max: limits.tokens_per_sequence,
        kv_len_max: limits.max_seq_len,
        partials: u64::from(limits.splits) * u64::from(limits.tokens_per_sequence),
    }
}

/// Describes the extents of a step that exceed the limits.
pub(super) fn within(step: &Extent, limits: &StepLimits) -> Option<String> {
    let largest = largest(limits);
    let found = [
        ("sequences", step.sequences, largest.sequences),
        ("KV splits", step.splits, largest.splits),
        ("queries of one sequence", step.q_len_max, largest.q_len_max),
        ("new tokens of one sequence", step.new_len_max, largest.new_len_max),
        ("tokens of one sequence", step.kv_len_max, largest.kv_len_max),
    ];
    let beyond = found.into_iter().find(|(_, got, max)| got > max);
    beyond.map(|(what, got, max)| format!("{got} {what}, the step limits allow {max}"))
}
