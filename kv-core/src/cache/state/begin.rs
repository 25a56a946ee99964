//! The beginning of a step: read inputs, reserve blocks, plan the batch.
//!
//! The device works between these parts: it zeroes blocks before they are handed out, and copies
//! blocks once the step is planned.
use crate::cache::state::input::check_queries;
use crate::cache::state::undo::Undo;
use crate::cache::state::{Added, CacheState, GROUP, StartOptions, StepInput};
use crate::error::{CacheError, PlanError, StateProblem};
use crate::ids::SequenceId;
use crate::invariant::Invariant;
use crate::plan::{BatchEntry, SplitPolicy};
use crate::spec::PublishAt;

impl CacheState {
    /// Starts a sequence in the open step, after [`Self::check_start`]. The start finds blocks that
    /// the step publishes with [`PublishAt::Begin`], and is undone if the step is rolled back.
    pub(in crate::cache) fn start_in_step_checked(
        &mut self,
        sequence: SequenceId,
        prompt: &[u32],
        options: StartOptions<'_>,
    ) -> Result<u32, CacheError> {
        let started = self.start_checked(sequence, prompt, options)?;
        self.open.undo.push(Undo::Started { sequence });
        Ok(started)
    }

    /// Opens a step and allocates the blocks of its batch; a refusal changes nothing.
    pub(in crate::cache) fn reserve_batch(
        &mut self,
        inputs: &[StepInput<'_>],
    ) -> Result<Added, CacheError> {
        if self.open.is_open {
            let problem = StateProblem::StepOpen;
            return Err(PlanError::State { operation: "begin step", problem }.into());
        }
        self.open.begin();
        self.read_inputs(inputs)?;
        self.open.is_open = true;
        let reserved = self.reserve_states(0).and_then(|()| self.reserve(0));
        if let Err(refused) = reserved {
            self.roll_back();
            return Err(refused);
        }
        // No list of copies: beginning a step does not allocate memory.
        Ok(Added::default())
    }

    /// Allocates the blocks of one more sequence; a refusal changes nothing.
    pub(in crate::cache) fn reserve_more(
        &mut self,
        input: StepInput<'_>,
    ) -> Result<Added, CacheError> {
        self.check_open("add")?;
        let added = self.open.end();
        self.open.growing.clear();
        let reserved = self.read_inputs(&[input]).map_err(CacheError::from);
        let reserved = reserved.and_then(|()| self.reserve_states(added.first));
        let reserved = reserved.and_then(|()| self.reserve(added.first));
        if let Err(refused) = reserved {
            self.take_back(&added);
            // A second mention is refused, the first one stays.
            if !matches!(refused, CacheError::Plan(PlanError::DuplicateSequence { .. })) {
                self.sequences.unmark(input.sequence);
            }
            return Err(refused);
        }
        Ok(added)
    }

    /// Removes the entries from `added` on from the open step. Its plans are those before, or must
    /// be made again.
    pub(in crate::cache) fn take_back(&mut self, added: &Added) {
        self.undo_to(added.undo);
        self.take_back_states(added.first);
        for at in added.first..self.open.batch.len() {
            let (entry, _) = self.open.entry(at);
            self.sequences.unmark_row(entry.row);
        }
        self.open.batch.truncate(added.first);
        self.open.entries.truncate(added.first);
        self.open.positions.truncate(added.positions);
        self.open.total_q = added.total_q;
        self.open.growing.clear();
        for (copies, before) in self.open.copies.iter_mut().zip(&added.copies) {
            copies.truncate(*before);
        }
    }

    /// Checks inputs and adds them to the batch; changes no table.
    fn read_inputs(&mut self, inputs: &[StepInput<'_>]) -> Result<(), PlanError> {
        let max = self.spec.max_seq_len();
        self.open.batch.reserve(inputs.len());
        self.open.entries.reserve(inputs.len());
        let mut only_asks = false;
        for input in inputs {
            let sequence = input.sequence;
            // Batches follow each other in the same order, mostly.
            let place = self.open.batch.len();
            let guess = self.open.rows.get(place).copied().unwrap_or(0);
            let (row, state) = self.sequences.mark(sequence, guess, self.open.number)?;
            let (len, own_end) = (state.len, state.own_end);
            let (new_tokens, queries) = input.counts(len, max)?;
            let details = input.details();
            if new_tokens > 0 {
                // Tokens of a step that is rolled back do no harm: the next ones replace them.
                self.sequences.note(row, len, input.ids(len), &self.chains);
                // Lookahead may be any number.
                let end = (len + new_tokens).saturating_add(details.lookahead);
                if end > own_end {
                    self.open.growing.push(place);
                }
            } else {
                only_asks |= queries > 0;
            }
            self.open.batch.push(BatchEntry { row, cached: len, new_tokens, queries });
            self.open.entries.push(details);
            self.open.total_q += u64::from(queries);
            match self.open.rows.get_mut(place) {
                Some(known) => *known = row,
                None => self.open.rows.push(row),
            }
            if self.has_windows && queries > new_tokens {
                let first = (len + new_tokens).saturating_sub(queries);
                self.check_in_windows(sequence, row, (first, len))?;
            }
        }
        if only_asks { check_queries(&self.open.batch, &self.spec) } else { Ok(()) }
    }

    /// Plans the whole batch, and lists the positions of the entries `added`.
    pub(in crate::cache) fn plan(
        &mut self,
        added: &Added,
        workers: impl Fn(u32) -> u32,
    ) -> Result<(), CacheError> {
        let determinism = self.spec.determinism();
        for (group, plans) in self.groups.iter().zip(&mut self.open.plans) {
            let layout = group.layout();
            let policy = SplitPolicy { workers: workers(layout.num_kv_heads()), determinism };
            let batch = (self.open.batch.as_slice(), added.first);
            plans.extend_private(layout, &group.tables, batch, policy)?;
        }
        self.open.list_positions(added.first);
        Ok(())
    }

    /// Returns the copies of one group that the entries `added` need.
    pub(in crate::cache) fn copies_added(
        &self,
        index: usize,
        added: &Added,
    ) -> &[crate::plan::BlockCopy] {
        let copies = self.open.copies.get(index).invariant(GROUP);
        let before = added.copies.get(index).copied().unwrap_or(0);
        copies.get(before..).invariant("copies are only added while a step is open")
    }

    /// Publishes the blocks that the entries `added` are about to fill, if the spec says so.
    pub(in crate::cache) fn publish_early(&mut self, added: &Added) {
        if self.spec.publish_at() != PublishAt::Begin {
            return;
        }
        for number in added.first..self.open.batch.len() {
            let (BatchEntry { row, cached, new_tokens, .. }, details) = self.open.entry(number);
            let len = cached + new_tokens;
            let certain = len - details.drafts;
            if new_tokens > 0 && certain >= self.sequences.at(row).store_at {
                self.publish_full(row, (certain, len), true);
            }
        }
    }
}
