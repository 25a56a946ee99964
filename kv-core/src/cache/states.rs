//! Recurrent states of sequences in the open step: reads, writes, and slots for kernels in place.
use crate::backend::{Backend, Queue};
use crate::cache::state::{CacheState, StatePlace};
use crate::cache::state_parts::{Copies, Direction, Part};
use crate::cache::{KvCache, Step};
use crate::error::{CacheError, PlanError};
use crate::ids::{GroupId, LayerId, SequenceId};
use crate::tensor::{TensorView, TensorViewMut};

impl<B: Backend> Step<'_, B> {
    /// Reads a part of a layer's recurrent state of every entry of the batch, as it was before this
    /// step, in the element type of `out`: zeros for a sequence that begins.
    ///
    /// # Shapes
    /// `out` is `[b, ..]` with the extents of the part after `b`, which is at least the number of
    /// entries; further entries are left as they are. The values of an entry lie together.
    ///
    /// # Errors
    /// [`PlanError::NoState`], [`PlanError::UnknownPart`], [`PlanError::UnknownLayer`], and
    /// [`PlanError`] for a tensor that does not fit; the device's errors. The step stays open.
    ///
    /// ```
    /// use kv::backend::NullBackend;
    /// use kv::{CacheSpec, DType, KvCache, SequenceId, StartOptions, StepInput};
    /// use kv::{TensorView, TensorViewMut};
    ///
    /// // One layer whose state is a matrix; no layer attends.
    /// let spec = CacheSpec::builder().layers(1).paged(16, 64);
    /// let spec = spec.states([0], |states| states.part([2, 3], DType::F32).slots(4)).build()?;
    /// let mut cache = KvCache::new(NullBackend::new(), spec)?;
    /// let seq = SequenceId(0);
    /// cache.start(seq, &[7, 8], StartOptions::default())?;
    /// let mut step = cache.begin_step(&[StepInput::tokens(seq, &[7, 8])])?;
    /// let mut before = [0.0_f32; 6]; // zeros on any device: the sequence begins
    /// step.read_state(0, 0, TensorViewMut::host(&mut before, &[1, 2, 3]))?;
    /// let after = before.map(|x| 0.9 * x + 0.5);
    /// step.write_state(0, 0, TensorView::host(&after, &[1, 2, 3]))?;
    /// step.commit()?;
    /// # Ok::<(), kv::CacheError>(())
    /// ```
    pub fn read_state(
        &mut self,
        layer: impl Into<LayerId>,
        part: usize,
        out: TensorViewMut<'_, B::Buffer>,
    ) -> Result<(), CacheError> {
        self.cache_mut().read_state_open(layer.into(), part, out)
    }

    /// Writes a part of a layer's recurrent state of every entry: behind all of its new tokens.
    /// Entries without new tokens are not read. A write may be repeated.
    ///
    /// # Shapes
    /// `state` is `[b, ..]` as for [`Self::read_state`], in f32, f16 or bf16.
    ///
    /// # Errors
    /// Those of [`Self::read_state`].
    pub fn write_state(
        &mut self,
        layer: impl Into<LayerId>,
        part: usize,
        state: TensorView<'_, B::Buffer>,
    ) -> Result<(), CacheError> {
        self.cache_mut().write_state_open(layer.into(), part, None, state)
    }

    /// Writes a part of a layer's recurrent state of the entries behind their first `tokens` new
    /// tokens, for drafts of which [`Self::commit_accepted`] may keep only these. Entries that keep
    /// no state there are not read: with fewer new tokens, or with more tokens that are no drafts.
    ///
    /// # Errors
    /// Those of [`Self::read_state`]; [`PlanError::TooMany`] for more tokens than an entry has, and
    /// [`PlanError::Option`] for 0.
    pub fn write_state_after(
        &mut self,
        layer: impl Into<LayerId>,
        part: usize,
        tokens: u32,
        state: TensorView<'_, B::Buffer>,
    ) -> Result<(), CacheError> {
        self.cache_mut().write_state_open(layer.into(), part, Some(tokens), state)
    }

    /// Returns the slots of a layer's state in this step, for kernels that read and write the
    /// planes of [`KvCache::storage`] themselves, and then [mark](Self::mark_state_written) the
    /// layer.
    ///
    /// # Errors
    /// [`PlanError::NoState`], [`PlanError::UnknownLayer`].
    pub fn state_slots(&self, layer: impl Into<LayerId>) -> Result<StateSlots<'_>, PlanError> {
        let cache = self.cache();
        let place = cache.state.locate_state(layer.into(), 0)?;
        Ok(StateSlots { state: &cache.state, place })
    }

    /// Marks all parts of a layer's state as written, for every slot of this step, by work that the
    /// caller has recorded.
    ///
    /// # Errors
    /// [`PlanError::NoState`], [`PlanError::UnknownLayer`].
    pub fn mark_state_written(&mut self, layer: impl Into<LayerId>) -> Result<(), PlanError> {
        let state = &mut self.cache_mut().state;
        let place = state.locate_state(layer.into(), 0)?;
        state.mark_layer_state(place);
        Ok(())
    }
}

/// The slots of a layer's recurrent state in the open step. A slot is a block of the planes with
/// the roles [`PlaneRole::State`](crate::ids::PlaneRole::State) of the layer.
#[derive(Debug, Clone, Copy)]
pub struct StateSlots<'a> {
    state: &'a CacheState,
    place: StatePlace,
}

impl StateSlots<'_> {
    /// Returns the group of the planes, for [`KvCache::storage`].
    pub fn group(&self) -> GroupId {
        self.state.state_group(self.place.group)
    }
    /// Returns the index of the layer in the planes of the group.
    pub fn layer(&self) -> usize {
        self.place.layer
    }
    /// Returns the slot with the state of an entry before the step. It must not be written.
    ///
    /// # Panics
    /// If the batch has no such entry.
    pub fn read(&self, entry: usize) -> u32 {
        self.state.read_slot(self.place.group, entry)
    }
    /// Returns the slot for the state of an entry behind all of its new tokens; `None` without new
    /// tokens.
    ///
    /// # Panics
    /// If the batch has no such entry.
    pub fn write(&self, entry: usize) -> Option<u32> {
        self.state.write_slot(self.place.group, entry, None)
    }
    /// Returns the slot for the state of an entry behind the first `tokens` of its new tokens;
    /// `None` if the step keeps none there.
    ///
    /// # Panics
    /// If the batch has no such entry.
    pub fn write_after(&self, entry: usize, tokens: u32) -> Option<u32> {
        self.state.write_slot(self.place.group, entry, Some(tokens))
    }
}

impl<B: Backend> KvCache<B> {
    fn read_state_open(
        &mut self,
        layer: LayerId,
        part: usize,
        mut out: TensorViewMut<'_, B::Buffer>,
    ) -> Result<(), CacheError> {
        self.state.check_open("read state")?;
        let place = self.state.locate_state(layer, part)?;
        let Self { queue, state, states, .. } = self;
        let of = Part::of(state, states, place);
        let entries = state.batch().len();
        let shape = of.shape(entries);
        out.check_entries(&shape)?;
        for entry in 0..entries {
            let slot = state.read_slot(place.group, entry);
            queue.convert(&of.plan, of.load(slot, out.entry(&shape, entry))?)?;
        }
        Ok(())
    }

    fn write_state_open(
        &mut self,
        layer: LayerId,
        part: usize,
        tokens: Option<u32>,
        values: TensorView<'_, B::Buffer>,
    ) -> Result<(), CacheError> {
        self.state.check_open("write state")?;
        let place = self.state.locate_state(layer, part)?;
        self.state.check_state_tokens(tokens)?;
        let Self { queue, state, states, .. } = self;
        let of = Part::of(state, states, place);
        let entries = state.batch().len();
        let shape = of.shape(entries);
        values.check_entries(&shape)?;
        for entry in 0..entries {
            let Some(slot) = state.write_slot(place.group, entry, tokens) else {
                continue;
            };
            queue.convert(&of.plan, of.store(values.entry(&shape, entry), slot)?)?;
        }
        state.mark_state(place, tokens);
        Ok(())
    }
}

impl<B: Backend> KvCache<B> {
    /// Copies the snapshots that the entries of the open step from `first` on begin with to slots.
    pub(super) fn restore_states(&mut self, first: usize) -> Result<(), CacheError> {
        let Self { queue, state, states, snapshots, .. } = self;
        for (group, block, slot) in state.restored(first) {
            let copies = Copies::of((state, states, snapshots), group);
            copies.record(queue, (slot, block), Direction::Restore)?;
        }
        Ok(())
    }

    /// Records the copies of the snapshots that the commit of the open step keeps.
    pub(super) fn take_snapshots(&mut self, accepted: Option<&[u32]>) -> Result<(), CacheError> {
        self.taken.clear();
        if self.state.spec().states().is_empty() {
            return Ok(());
        }
        self.wipe_released()?;
        self.state.take_snapshots(accepted, &mut self.taken);
        self.copy_taken()
    }

    fn copy_taken(&mut self) -> Result<(), CacheError> {
        // A snapshot that was evicted for a new one may be read still.
        self.wait_for_reads()?;
        let Self { queue, state, states, snapshots, taken, .. } = self;
        for of in &*taken {
            let copies = Copies::of((state, states, snapshots), of.group);
            copies.record(queue, (of.slot, of.block), Direction::Keep)?;
        }
        Ok(())
    }

    /// Keeps the recurrent states of a sequence as they are, for other prompts, as the end of the
    /// sequence would. Nothing is kept without room, at a length off the grid, behind drafts, and
    /// where prompts reuse nothing: [`CacheState::find_snapshots`] says what there is.
    ///
    /// # Errors
    /// [`PlanError::UnknownSequence`]; [`PlanError::State`] while a step is held; a failure of the
    /// device, and nothing is kept.
    pub fn keep_state(&mut self, sequence: SequenceId) -> Result<(), CacheError> {
        self.recover();
        self.state.check_closed("keep state")?;
        if !self.state.contains(sequence) {
            return Err(PlanError::UnknownSequence { sequence }.into());
        }
        if self.state.spec().states().is_empty() {
            return Ok(());
        }
        self.taken.clear();
        let wiped = self.wipe_released().map_err(CacheError::from);
        let kept = wiped.and_then(|()| {
            self.state.take_last(sequence, &mut self.taken);
            self.copy_taken()
        });
        match kept {
            Ok(()) => self.state.publish_snapshots(&mut self.taken),
            Err(_) => self.state.drop_snapshots(&mut self.taken),
        }
        kept
    }

    /// Keeps the states of a sequence that ends, if it does.
    pub(super) fn keep_last_state(&mut self, sequence: SequenceId) {
        // The sequence ends all the same; other prompts compute its tokens again.
        let _ = self.keep_state(sequence);
    }
}
