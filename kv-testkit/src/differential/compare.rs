//! Comparison of both devices after every operation.
use std::collections::BTreeMap;

use kv_core::backend::Plane;
use kv_core::{GroupId, SequenceId};

use super::{DevicePair, bytes};
use crate::case::{At, CaseError, ensure, same};
use crate::fixture::seq;

impl DevicePair {
    /// Compares the devices with each other, and each with its model.
    pub(super) fn compare(&mut self) -> Result<(), CaseError> {
        same("usage of the second device", self.two.state(), self.one.state())?;
        self.compare_tables()?;
        self.one.check().at("the first device")?;
        self.two.check().at("the second device")?;
        let ids: Vec<_> = self.sequences.iter().map(|sequence| seq(sequence.id)).collect();
        for layer in 0..self.shapes.len() {
            for (plane, index) in [Plane::Key, Plane::Value].into_iter().zip(0..) {
                if self.shapes[layer].stored[index].constants().is_none() {
                    self.compare_bytes(layer, (plane, index), &ids)?;
                }
            }
        }
        Ok(())
    }

    /// Compares how blocks are shared: block tables must be equal up to a renaming of blocks,
    /// because block numbers depend on the order in which a cache freed them.
    fn compare_tables(&self) -> Result<(), CaseError> {
        let (mut there, mut back) = (BTreeMap::new(), BTreeMap::new());
        for sequence in &self.sequences {
            let one = self
                .one
                .cache
                .state()
                .block_table(seq(sequence.id), GroupId(0))
                .unwrap_or_default();
            let two = self
                .two
                .cache
                .state()
                .block_table(seq(sequence.id), GroupId(0))
                .unwrap_or_default();
            let place = || format!("sequence {}: {one:?} and {two:?}", sequence.id);
            same("blocks on the second device", two.len(), one.len()).at(place())?;
            for (one, two) in one.iter().zip(two) {
                let is_same = there.insert(*one, *two).is_none_or(|old| old == *two)
                    && back.insert(*two, *one).is_none_or(|old| old == *one);
                ensure(is_same, || format!("{one} and {two} are not shared alike")).at(place())?;
            }
        }
        Ok(())
    }

    fn compare_bytes(
        &mut self,
        layer: usize,
        (plane, index): (Plane, usize),
        ids: &[SequenceId],
    ) -> Result<(), CaseError> {
        let one = bytes::stored(&mut self.one, layer, plane, ids)?;
        let two = bytes::stored(&mut self.two, layer, plane, ids)?;
        let width = self.shapes[layer].width(index);
        for ((id, one), two) in ids.iter().zip(one).zip(two) {
            let kept = [&self.one.model, &self.two.model].map(|model| model.layer(*id, layer));
            let [kept_one, kept_two] = kept.each_ref().map(|kept| kept[index].chunks(width));
            let rows = one.iter().zip(&two).zip(kept_one.zip(kept_two));
            for (((one, two), (kept_one, kept_two)), position) in rows.zip(0..) {
                if kept_one != kept_two {
                    self.coverage.rows_rounded += 1;
                    continue;
                }
                ensure(one == two, || {
                    format!(
                        "{plane:?} of layer {layer}, sequence {id}, position {position}: the \
                         first device stores {one:02x?}, the second one {two:02x?}"
                    )
                })?;
                self.coverage.rows_equal += 1;
            }
        }
        Ok(())
    }
}
