//! Recalibration in the middle of a run, on a device that may fail at any operation.
use std::collections::BTreeMap;

use kv_core::calibration::{Calibration, LayerCalibration, PlaneCalibration};
use kv_core::error::PlanError;
use kv_core::{BlockId, CacheError, GroupId, SequenceId};

use super::choices::Choices;
use super::{Behaviour, StatefulTest};
use crate::case::{At, CaseError, ensure, same};
use crate::fault::FaultKind;

/// Recalibrations per run: each one rounds rows once more, and their signs must not change.
const RECALIBRATIONS_MAX: u64 = 2;

type Holders = BTreeMap<BlockId, Vec<SequenceId>>;

impl StatefulTest {
    /// Recalibrates: the whole cache changes, or nothing does.
    pub(super) fn recalibrate(&mut self, choices: &mut Choices<'_>) -> Result<(), CaseError> {
        if self.spec.layers_on_demand()
            || self.coverage.count(Behaviour::Recalibrated) >= RECALIBRATIONS_MAX
        {
            return Ok(());
        }
        let longest = (0..self.sequences.len()).max_by_key(|at| self.sequences[*at].hashes.len());
        if let Some(at) = longest.filter(|_| self.has_window()) {
            // Extend a sequence far enough that its window reuses blocks.
            self.extend_by(at, (8, 3), choices)?;
            self.check().at("before recalibration")?;
        }
        let given = self.calibration(choices.pick(&[0.5, -0.25, 0.125]));
        let (before, key) = (self.visible_state(), self.cache.state().encoding_key());
        let stored = self.stored()?;
        let (kind, more) = (choices.next(), u64::from(choices.next()) % 48);
        let fault = FaultKind::ALL.get(usize::from(kind % 6)).copied();
        if let Some(fault) = fault {
            self.faults.fail(more, fault);
        }
        self.record(|| format!("recalibrate, {fault:?} after {more}"));
        let done = self.cache.recalibrate(given);
        let has_failed = self.faults.clear();
        let why = match done {
            Ok(()) => {
                ensure(!has_failed, || "a device failure was not reported".to_owned())?;
                return self.check_recalibrated(&stored).at("recalibrated");
            }
            Err(CacheError::Device(_)) if has_failed && fault == Some(FaultKind::Persistent) => {
                Behaviour::FailedRestore
            }
            Err(CacheError::Device(_)) if has_failed => Behaviour::FailedRecalibration,
            Err(CacheError::Plan(PlanError::State { .. })) => {
                let is_cut = self.sequences.iter().any(|sequence| sequence.cut != u32::MAX);
                ensure(is_cut, || "refused without a reason".to_owned())?;
                Behaviour::RefusedRecalibration
            }
            Err(other) => return Err(other.into()),
        };
        self.coverage.add(why);
        same("encoding key", self.cache.state().encoding_key(), key)?;
        // Bytes that could not be restored yet are restored before the next call does anything
        // else.
        drop(self.cache.begin_step(&[])?);
        self.check_untouched(&stored, |_| true).at("a failed recalibration")?;
        self.unchanged(&before).at("a failed recalibration")
    }

    /// Reads every byte of the planes, by group.
    fn stored(&mut self) -> Result<Vec<Vec<Vec<u8>>>, CaseError> {
        let groups = 0..self.spec.groups().len() as u8;
        groups.map(|group| crate::suite::bytes(&mut self.cache, GroupId(group))).collect()
    }

    fn check_recalibrated(&mut self, before: &[Vec<Vec<u8>>]) -> Result<(), CaseError> {
        self.count_recalibration();
        let held: Vec<_> = self.groups().map(|(id, _)| self.holders(id).0).collect();
        self.check_untouched(before, |(group, block)| !held[group].contains_key(&block))?;
        self.sequences.iter_mut().for_each(|sequence| sequence.publishes = false);
        self.check_nothing_cached()
    }

    /// Fails unless the blocks that `meant` selects still have the bytes of `before`.
    fn check_untouched(
        &mut self,
        before: &[Vec<Vec<u8>>],
        meant: impl Fn((usize, BlockId)) -> bool,
    ) -> Result<(), CaseError> {
        let (after, wipes) = (self.stored()?, self.spec.wipe_on_release());
        // A pending wipe may have run.
        let is_wiped = |new: &[u8]| wipes && new.iter().all(|byte| *byte == 0);
        for (index, (old, new)) in before.iter().zip(&after).enumerate() {
            let layouts = self.spec.groups()[index].layouts();
            for (plane, (old, new)) in old.iter().zip(new).enumerate() {
                let size = layouts[plane % 2].block_bytes() as usize;
                let blocks = (0..).map(BlockId).zip(old.chunks(size).zip(new.chunks(size)));
                let mut meant = blocks.filter(|(block, _)| meant((index, *block)));
                let touched = meant.find(|(_, (old, new))| old != new && !is_wiped(new));
                same("a block that changed", touched.map(|(block, _)| block), None)?;
            }
        }
        Ok(())
    }

    /// Makes constants with the same mean in all keys.
    fn calibration(&self, mean: f32) -> Calibration {
        let layer = |layer: &u16| {
            let group = self.spec.locate((*layer).into()).map_or(0, |(group, _)| group.0);
            let [k, _] = self.spec.groups()[usize::from(group)].layouts();
            let mean = vec![mean; (k.num_kv_heads() * k.head_dim()) as usize];
            let k = PlaneCalibration { mean, ..Default::default() };
            LayerCalibration { k, ..Default::default() }
        };
        Calibration::new(self.layers.iter().map(layer).collect())
    }

    /// Returns the holders of each block of a group, and the sequences that left a block.
    fn holders(&self, group: GroupId) -> (Holders, Vec<(BlockId, SequenceId)>) {
        let (mut holders, mut left) = (Holders::new(), Vec::new());
        for sequence in &self.sequences {
            let vacant = self.cache.state().vacant_entries(sequence.id, group).unwrap_or_default();
            let table = self.cache.state().block_table(sequence.id, group).unwrap_or_default();
            for (block, at) in table.iter().zip(0..) {
                if vacant.contains(&at) {
                    left.push((*block, sequence.id));
                } else {
                    holders.entry(*block).or_default().push(sequence.id);
                }
            }
        }
        (holders, left)
    }

    /// Counts which kinds of blocks a recalibration handled.
    fn count_recalibration(&mut self) {
        if self.sequences.iter().any(|sequence| !sequence.hashes.is_empty()) {
            self.coverage.add(Behaviour::Recalibrated);
        }
        for (group, id) in self.spec.groups().iter().zip(0..).map(|(g, id)| (g, GroupId(id))) {
            if !group.layouts()[0].has_constants() {
                continue;
            }
            let (holders, left) = self.holders(id);
            let held_by = |(block, _): &(_, _)| holders.get(block).into_iter().flatten();
            let wraps = left.iter().any(|entry| held_by(entry).any(|id| *id == entry.1));
            let taken = left.iter().any(|entry| held_by(entry).any(|id| *id != entry.1));
            let is_shared = holders.values().any(|holders| holders.len() > 1);
            self.coverage.add_many(Behaviour::RecalibratedWrapped, u64::from(wraps));
            self.coverage.add_many(Behaviour::RecalibratedReassigned, u64::from(taken));
            self.coverage.add_many(Behaviour::RecalibratedShared, u64::from(is_shared));
        }
    }
}
