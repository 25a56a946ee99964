//! The device's part of a step: zeroing and copying blocks, recording writes and attention.
//!
//! A cache has at most one open step. A [`Step`](super::Step) keeps it open for the length of a
//! borrow; a step that is held stays open from call to call.
use crate::backend::{Backend, Queue};
use crate::cache::KvCache;
use crate::cache::state::{Added, StartOptions, StepInput};
use crate::error::{CacheError, OptionProblem, PlanError, StateProblem};
use crate::geometry::Axes;
use crate::ids::Plane;
use crate::ids::{GroupId, LayerId, SequenceId};
use crate::invariant::Invariant;
use crate::plan::{AttendArgs, AttentionOptions, CopyArgs, CopyPlan, WriteArgs};
use crate::spec::Window;
use crate::storage::{KvStorage, PlaneView};
use crate::tensor::{TensorView, TensorViewMut};

/// Layers that the open step has written.
#[derive(Debug, Default)]
pub(super) struct Written {
    layers: Vec<bool>,
    count: usize,
}

impl Written {
    fn clear(&mut self) {
        self.layers.iter_mut().for_each(|written| *written = false);
        self.count = 0;
    }
    pub(super) fn contains(&self, layer: LayerId) -> bool {
        self.layers.get(usize::from(layer.0)).copied().unwrap_or(false)
    }
    fn first(&self) -> Option<LayerId> {
        let index = self.layers.iter().position(|written| *written)?;
        Some(LayerId(u16::try_from(index).invariant("a layer has a number of 16 bits")))
    }
    fn insert(&mut self, layer: LayerId) {
        let index = usize::from(layer.0);
        if self.layers.len() <= index {
            self.layers.resize(index + 1, false);
        }
        if let Some(written) = self.layers.get_mut(index).filter(|written| !**written) {
            *written = true;
            self.count += 1;
        }
    }
}

impl<B: Backend> KvCache<B> {
    /// Rolls back a step that its caller leaked ([`std::mem::forget`]): a [`Step`](super::Step)
    /// borrows the cache, so a call that finds one open that is not held knows that it was leaked.
    pub(super) fn recover(&mut self) {
        if !self.is_held {
            self.roll_back();
        }
    }

    /// Rolls back the open step, if there is one.
    pub(super) fn roll_back(&mut self) {
        self.is_held = false;
        if self.state.is_step_open() {
            self.state.roll_back();
        }
    }

    pub(super) fn begin(&mut self, inputs: &[StepInput<'_>]) -> Result<(), CacheError> {
        self.recover();
        if self.state.is_step_open() {
            let problem = StateProblem::StepOpen;
            return Err(PlanError::State { operation: "begin step", problem }.into());
        }
        self.wipe_released()?;
        let added = self.state.reserve_batch(inputs)?;
        self.written.clear();
        let carried_out = self.carry_out(&added);
        if carried_out.is_err() {
            self.state.roll_back();
        }
        carried_out
    }

    /// Adds one more sequence to the open step, or changes nothing.
    pub(super) fn add_open(&mut self, input: StepInput<'_>) -> Result<(), CacheError> {
        self.state.check_open("add")?;
        if let Some(layer) = self.written.first() {
            let problem = StateProblem::LayerWritten { layer };
            return Err(PlanError::State { operation: "add", problem }.into());
        }
        let added = self.state.reserve_more(input)?;
        let carried_out = self.carry_out(&added);
        if carried_out.is_err() {
            self.state.take_back(&added);
            // Drops the failed entry's part of the plans; the others fit as before.
            self.plan(&added)?;
        }
        carried_out
    }

    /// Starts a sequence that goes away with the open step if it is rolled back.
    pub(super) fn start_open(
        &mut self,
        sequence: SequenceId,
        prompt: &[u32],
        options: StartOptions<'_>,
    ) -> Result<u32, CacheError> {
        self.state.check_open("start")?;
        self.state.check_start(sequence, prompt, &options)?;
        self.wipe_released()?;
        self.state.start_in_step_checked(sequence, prompt, options)
    }

    /// Prepares the device for the entries `added`, whose blocks are allocated.
    fn carry_out(&mut self, added: &Added) -> Result<(), CacheError> {
        self.wipe_released()?;
        self.plan(added)?;
        // Entries that are added one after another are sent to the device together.
        if added.first == 0 {
            self.prepare()?;
        }
        self.copy(added)?;
        self.restore_states(added.first)?;
        self.state.publish_early(added);
        Ok(())
    }

    fn plan(&mut self, added: &Added) -> Result<(), CacheError> {
        let Self { backend, state, .. } = self;
        let capabilities = backend.capabilities();
        self.is_unprepared = true;
        state.plan(added, |heads| capabilities.workers_of_heads(heads))
    }

    /// Sends the plans of the open step to the device unless it has them.
    fn prepare(&mut self) -> Result<(), CacheError> {
        if !self.is_unprepared {
            return Ok(());
        }
        let Self { queue, state, .. } = self;
        for index in 0..self.storages.len() {
            let (write, attend) = (state.write_plan(index), state.attention_plan(index));
            let group = u8::try_from(index).invariant("a spec has at most 255 groups");
            queue.prepare(GroupId(group), &write, &attend)?;
        }
        self.is_unprepared = false;
        Ok(())
    }

    /// Sends the plans of the open step before the caller uses the queue, in a capture for example.
    /// If the device fails, the next call of the step tries again.
    pub(super) fn prepare_for_caller(&mut self) {
        if self.state.is_step_open() {
            let _: Result<(), CacheError> = self.prepare();
        }
    }

    fn copy(&mut self, added: &Added) -> Result<(), CacheError> {
        for (index, storage) in self.storages.iter().enumerate() {
            let copies = self.state.copies_added(index, added);
            if copies.is_empty() {
                continue;
            }
            let plan = CopyPlan::new(storage.layouts().first(), copies)?;
            let args = CopyArgs::new(&plan, storage.view())?;
            self.queue.copy_blocks(&plan, args)?;
        }
        Ok(())
    }

    pub(super) fn write_open(
        &mut self,
        layer: LayerId,
        [k, v]: [TensorView<'_, B::Buffer>; 2],
        axes: Axes,
    ) -> Result<(), CacheError> {
        self.state.check_open("write")?;
        self.prepare()?;
        let (index, in_group) = self.state.locate(layer)?;
        let Self { queue, state, storages, .. } = self;
        let storage = storages.get(index).invariant(super::STORAGE);
        let [k_plane, v_plane] = planes(storage, layer, in_group)?;
        let plan = state.write_plan(index);
        let args = WriteArgs::new(&plan, k, v, axes, k_plane, v_plane)?;
        queue.write_kv(&plan, args)?;
        self.written.insert(layer);
        Ok(())
    }

    pub(super) fn attend_open(
        &mut self,
        layer: LayerId,
        q: TensorView<'_, B::Buffer>,
        (out, lse): (TensorViewMut<'_, B::Buffer>, Option<TensorViewMut<'_, B::Buffer>>),
        options: &AttentionOptions<'_>,
    ) -> Result<(), CacheError> {
        self.state.check_open("attend")?;
        self.prepare()?;
        let (index, in_group) = self.state.locate(layer)?;
        self.state.check_written_in(layer, options)?;
        let Self { queue, state, storages, .. } = self;
        let storage = storages.get(index).invariant(super::STORAGE);
        let layer_planes = planes(storage, layer, in_group)?;
        if state.brings_tokens() && !self.written.contains(layer) {
            return Err(PlanError::AttendBeforeWrite { layer }.into());
        }
        check_window(state.window(index), options)?;
        let plan = state.attention_plan(index);
        let args = AttendArgs::new(&plan, q, out, lse, layer_planes, *options)?;
        Ok(queue.attend(&plan, args)?)
    }

    /// Ends the open step; on an error it is rolled back. `accepted` is how many new tokens of each
    /// entry stay; all if `None`.
    pub(super) fn commit_open(&mut self, accepted: Option<&[u32]>) -> Result<(), CacheError> {
        self.state.check_open("commit")?;
        let flushed = accepted
            .map_or(Ok(()), |accepted| self.state.check_accepted(accepted))
            .and_then(|()| self.check_all_written(accepted))
            .map_err(CacheError::from)
            .and_then(|()| self.take_snapshots(accepted))
            .and_then(|()| Ok(self.queue.flush()?));
        if flushed.is_err() {
            self.state.drop_snapshots(&mut self.taken);
            self.state.roll_back();
            return flushed;
        }
        self.state.commit_checked(accepted);
        self.state.publish_snapshots(&mut self.taken);
        Ok(())
    }

    /// Marks every layer as written by work that the caller has submitted.
    pub(super) fn mark_all_written(&mut self) {
        let allocated = self.num_allocated();
        for layer in (0..self.state.spec().num_layers()).map(LayerId) {
            if self.written.count == allocated {
                break;
            }
            if self.has_memory(layer) {
                self.written.insert(layer);
            }
        }
        self.state.mark_all_states();
    }

    /// Checks that every layer with memory was written, unless the step has no new tokens, and
    /// every state that a commit of `accepted` tokens keeps.
    pub(super) fn check_all_written(&self, accepted: Option<&[u32]>) -> Result<(), PlanError> {
        self.check_layers_written()?;
        self.state.check_states(accepted)
    }

    fn check_layers_written(&self) -> Result<(), PlanError> {
        let allocated = self.num_allocated();
        if !self.state.brings_tokens() || self.written.count == allocated {
            return Ok(());
        }
        let first = (0..self.state.spec().num_layers())
            .map(LayerId)
            .find(|layer| self.has_memory(*layer) && !self.written.contains(*layer));
        let others = allocated - self.written.count - 1;
        let layer = first.invariant("fewer layers are written than have memory");
        Err(PlanError::LayersUnwritten { layer, others })
    }

    fn has_memory(&self, layer: LayerId) -> bool {
        let place = self.state.locate(layer);
        place.is_ok_and(|(group, index)| self.storage_at(group).is_allocated(index))
    }

    fn num_allocated(&self) -> usize {
        self.storages.iter().map(KvStorage::num_allocated).sum()
    }
}

/// Checks that attention sees no more than a group keeps.
fn check_window(window: Option<Window>, options: &AttentionOptions<'_>) -> Result<(), PlanError> {
    let Some(window) = window else {
        return Ok(());
    };
    let (got, kept) = (options.window_left(), window.left);
    if got.is_none_or(|left| left > kept) {
        let problem = OptionProblem::NotKept { got, kept };
        return Err(PlanError::Option { option: "window_left", problem });
    }
    let (got, kept) = (options.sink_tokens(), window.sink_tokens);
    if got > kept {
        let problem = OptionProblem::NotKept { got: Some(got), kept };
        return Err(PlanError::Option { option: "sink_tokens", problem });
    }
    Ok(())
}

pub(super) fn planes<Buf: 'static>(
    storage: &KvStorage<Buf>,
    layer: LayerId,
    index: usize,
) -> Result<[PlaneView<'_, Buf>; 2], PlanError> {
    let k = storage.plane(index, Plane::Key);
    let v = storage.plane(index, Plane::Value);
    let (k, v) = k.zip(v).ok_or(PlanError::LayerUnallocated { layer })?;
    Ok([k, v])
}
