//! Constants exchanged in the middle of a life, on a device that fails at any operation.
use std::collections::BTreeMap;

use kv_core::calibration::{LayerCalibration, PlaneCalibration};
use kv_core::{CacheError, Calibration, GroupId, PlanError};

use super::choose::Bytes;
use super::{Happened, Life};
use crate::case::{At, CaseError, ensure, same};
use crate::device::Device;
use crate::erratic::Failing;

/// Exchanges of a life: each rounds rows once more, and their signs must stay.
const EXCHANGES_MAX: u64 = 2;

impl<B: Device> Life<B> {
    /// Exchanges constants; whole, or nothing changed.
    pub(super) fn exchange(&mut self, bytes: &mut Bytes<'_>) -> Result<(), CaseError> {
        if self.spec.layers_on_demand() || self.lived.count(Happened::Exchanged) >= EXCHANGES_MAX {
            return Ok(());
        }
        if self.has_window() && !self.sequences.is_empty() && bytes.one_in(2) {
            // Far enough that a window may use its blocks again.
            (0..3).try_for_each(|_| self.wander(bytes))?;
        }
        let given = self.calibration(bytes.pick(&[0.5, -0.25, 0.125]));
        let (before, key) = (self.see(), self.cache.encoding_key());
        let (kind, more) = (bytes.next(), u64::from(bytes.next()) % 48);
        let failing = Failing::ALL.get(usize::from(kind % 6)).copied();
        if let Some(failing) = failing {
            self.backend.fail(more, failing);
        }
        self.tell(|| format!("exchange constants, {failing:?} after {more}"));
        let exchanged = self.cache.recalibrate(given);
        let has_failed = self.backend.calm();
        let why = match exchanged {
            Ok(()) => {
                ensure(!has_failed, || "a failure of the device was kept quiet".to_owned())?;
                return self.exchanged().at("constants exchanged");
            }
            Err(CacheError::Device(_)) if has_failed && failing == Some(Failing::Lasting) => {
                Happened::FailedRestore
            }
            Err(CacheError::Device(_)) if has_failed => Happened::FailedExchange,
            Err(CacheError::Plan(PlanError::State { .. })) => {
                let is_cut = self.sequences.iter().any(|sequence| sequence.cut != u32::MAX);
                ensure(is_cut, || "refused without need".to_owned())?;
                Happened::RefusedExchange
            }
            Err(other) => return Err(other.into()),
        };
        self.lived.add(why);
        same("encoding key", self.cache.encoding_key(), key)?;
        self.unchanged(&before).at("an exchange that failed")
    }

    fn exchanged(&mut self) -> Result<(), CaseError> {
        self.count_exchange();
        self.sequences.iter_mut().for_each(|sequence| sequence.offers = false);
        self.nothing_is_found()
    }

    /// A mean of all keys.
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

    /// Counts what an exchange has come through.
    fn count_exchange(&mut self) {
        if self.sequences.iter().any(|sequence| !sequence.names.is_empty()) {
            self.lived.add(Happened::Exchanged);
        }
        for (group, id) in self.spec.groups().iter().zip(0..).map(|(g, id)| (g, GroupId(id))) {
            if !group.layouts()[0].has_constants() {
                continue;
            }
            let mut holders: BTreeMap<_, Vec<_>> = BTreeMap::new();
            let mut left = Vec::new();
            for sequence in &self.sequences {
                let vacant = self.cache.vacant_entries(sequence.id, id).unwrap_or_default();
                let table = self.cache.block_table(sequence.id, id).unwrap_or_default();
                for (block, at) in table.iter().zip(0..) {
                    if vacant.contains(&at) {
                        left.push((*block, sequence.id));
                    } else {
                        holders.entry(*block).or_default().push(sequence.id);
                    }
                }
            }
            let held_by = |(block, _): &(_, _)| holders.get(block).into_iter().flatten();
            let wraps = left.iter().any(|entry| held_by(entry).any(|id| *id == entry.1));
            let taken = left.iter().any(|entry| held_by(entry).any(|id| *id != entry.1));
            let is_shared = holders.values().any(|holders| holders.len() > 1);
            self.lived.add_many(Happened::ExchangedWrapped, u64::from(wraps));
            self.lived.add_many(Happened::ExchangedTakenOver, u64::from(taken));
            self.lived.add_many(Happened::ExchangedShared, u64::from(is_shared));
        }
    }
}
