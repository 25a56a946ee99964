//! Parts of recurrent states in their slots: conversions to and from tensors and snapshots.
use kv_format::KvFormat;

use crate::backend::Queue;
use crate::cache::state::{CacheState, StatePlace};
use crate::error::{CacheError, PlanError};
use crate::geometry::Axes;
use crate::ids::{BlockId, PlaneRole};
use crate::invariant::Invariant;
use crate::num::to_u32;
use crate::plan::{ConvertArgs, ConvertPlan};
use crate::spec::{SnapshotsSpec, StatePart, StatesSpec};
use crate::storage::KvStorage;
use crate::tensor::{EntryShape, TensorView, TensorViewMut};

/// The direction of a copy between slots and snapshots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    /// From a slot to a snapshot.
    Keep,
    /// From a snapshot to a slot.
    Restore,
}

/// Slots and snapshots of one group of states.
pub(super) struct Copies<'a, Buf> {
    spec: &'a StatesSpec,
    kept: &'a SnapshotsSpec,
    slots: &'a KvStorage<Buf>,
    snapshots: &'a KvStorage<Buf>,
    group: usize,
}

/// The storages of all groups of states, and of their snapshots.
pub(super) type Storages<'a, Buf> =
    (&'a CacheState, &'a [KvStorage<Buf>], &'a [Option<KvStorage<Buf>>]);

impl<'a, Buf: 'static> Copies<'a, Buf> {
    pub(super) fn of((state, states, snapshots): Storages<'a, Buf>, group: usize) -> Self {
        let spec = state.spec().states().get(group).invariant(super::STORAGE);
        let kept = spec.snapshots().invariant(super::STORAGE);
        let slots = states.get(group).invariant(super::STORAGE);
        let snapshots = snapshots.get(group).and_then(Option::as_ref).invariant(super::STORAGE);
        Self { spec, kept, slots, snapshots, group }
    }

    /// Records the copy of a state between a slot and a snapshot, part by part in every layer.
    pub(super) fn record<Q: Queue<Buffer = Buf>>(
        &self,
        queue: &mut Q,
        (slot, block): (u32, BlockId),
        direction: Direction,
    ) -> Result<(), CacheError> {
        for (part, (own, kept)) in self.spec.parts().iter().zip(self.kept.parts()).enumerate() {
            for layer in 0..self.spec.layers().len() {
                let place = StatePlace { group: self.group, layer, part };
                // In the rows of the snapshot, which may have blocks with scales.
                let row = kept.row();
                let own = Part::new((own, row), self.slots, place);
                let kept = Part::new((kept, row), self.snapshots, place);
                let args = match direction {
                    Direction::Keep => kept.store(own.slot(slot), block.0),
                    Direction::Restore => kept.load(block.0, own.slot_mut(slot)),
                }?;
                queue.convert(&kept.plan, args)?;
            }
        }
        Ok(())
    }
}

/// A part of a layer's state, the plane that has its slots, and the rows that it is converted as.
pub(super) struct Part<'a, Buf> {
    spec: &'a StatePart,
    row: u32,
    storage: &'a KvStorage<Buf>,
    place: StatePlace,
    pub(super) plan: ConvertPlan,
}

impl<'a, Buf: 'static> Part<'a, Buf> {
    pub(super) fn of(
        state: &'a CacheState,
        states: &'a [KvStorage<Buf>],
        place: StatePlace,
    ) -> Self {
        let spec = state.spec().states().get(place.group).invariant(super::STORAGE);
        let spec = spec.parts().get(place.part).invariant(super::STORAGE);
        let storage = states.get(place.group).invariant(super::STORAGE);
        Self::new((spec, spec.row()), storage, place)
    }

    fn new(
        (spec, row): (&'a StatePart, u32),
        storage: &'a KvStorage<Buf>,
        place: StatePlace,
    ) -> Self {
        // Values lie together: any rows that they divide into are the same bytes.
        let plan = ConvertPlan::new(&[spec.values() / row]);
        let plan = plan.invariant("the values of a part are counted in 32 bits");
        Self { spec, row, storage, place, plan }
    }

    pub(super) fn shape(&self, entries: usize) -> EntryShape {
        EntryShape::new(to_u32(entries), self.spec.shape(), self.spec.values(), self.row)
    }

    /// Returns buffer and offset of a slot.
    fn locate(&self, slot: u32) -> (&'a Buf, u64) {
        let role = u8::try_from(self.place.part).invariant("a state has few parts");
        let plane = self.storage.plane(self.place.layer, PlaneRole::State(role));
        let plane = plane.invariant("states have memory from the beginning");
        let (segment, offset) = plane.layout().locate(slot);
        (plane.segment(segment).invariant("a slot lies in a segment"), offset)
    }
    fn dims(&self) -> [u32; 3] {
        [self.spec.values() / self.row, 1, self.row]
    }
    /// Returns a slot of an unquantised part.
    fn slot(&self, slot: u32) -> TensorView<'a, Buf> {
        let (buffer, offset) = self.locate(slot);
        TensorView::device(self.spec.dtype(), buffer, offset, &self.dims())
    }
    /// Returns a slot of an unquantised part, for writing.
    fn slot_mut(&self, slot: u32) -> TensorViewMut<'a, Buf> {
        let (buffer, offset) = self.locate(slot);
        TensorViewMut::device(self.spec.dtype(), buffer, offset, &self.dims())
    }
    /// Returns a quantised slot: its format, buffer and offset.
    fn stored(&self, slot: u32) -> Option<(KvFormat, &'a Buf, u64)> {
        let format = self.spec.format();
        let (buffer, offset) = self.locate(slot);
        format.is_quantised().then_some((format, buffer, offset))
    }

    /// Returns the conversion of values to a slot.
    pub(super) fn store<'v>(
        &self,
        values: TensorView<'v, Buf>,
        slot: u32,
    ) -> Result<ConvertArgs<'v, Buf>, PlanError>
    where
        'a: 'v,
    {
        let (plan, values) = (&self.plan, (values, Axes::Thd));
        match self.stored(slot) {
            Some(stored) => ConvertArgs::encode(plan, values, stored),
            None => ConvertArgs::new(plan, values, (self.slot_mut(slot), Axes::Thd)),
        }
    }
    /// Returns the conversion of a slot to values.
    pub(super) fn load<'v>(
        &self,
        slot: u32,
        out: TensorViewMut<'v, Buf>,
    ) -> Result<ConvertArgs<'v, Buf>, PlanError>
    where
        'a: 'v,
    {
        let (plan, out) = (&self.plan, (out, Axes::Thd));
        match self.stored(slot) {
            Some(stored) => ConvertArgs::decode(plan, stored, out),
            None => ConvertArgs::new(plan, (self.slot(slot), Axes::Thd), out),
        }
    }
}
