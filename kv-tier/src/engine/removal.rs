//! Removal of forgotten chunks from stores.
use std::sync::Arc;
use std::time::Instant;

use kv_core::KvCache;
use kv_core::backend::Backend;
use kv_core::invariant::Invariant;

use super::done::{Done, Report};
use super::forget::{ForgetFailure, Forgotten, PAUSE, What};
use super::guarded::Removal;
use super::prefetch::GRACE;
use super::write::bit;
use super::{STORE, TierError, Tiers};
use crate::store::{StoreError, StoreErrorKind};

/// The removals of one call.
#[derive(Debug, Default)]
pub(super) struct Removals {
    /// Number of the call: answers to others are too late.
    call: u64,
    answers: Vec<(usize, Result<(), StoreError>)>,
}

impl<B: Backend> Tiers<B> {
    /// Removes chunks from all stores; a write that had begun is waited for, and removed too.
    pub(super) fn remove(
        &mut self,
        cache: &mut KvCache<B>,
        what: &What,
        removal: &Removal,
        deadline: Instant,
        mut forgotten: Forgotten,
    ) -> Result<Forgotten, TierError> {
        let call = self.removals.call + 1;
        self.removals = Removals { call, answers: Vec::new() };
        // Chunks that are being written to a store are removed once more when the write has ended.
        let mut again: Vec<_> =
            (0..self.stores.len()).filter(|store| self.is_under_way(what, Some(*store))).collect();
        let mut asked = self.stores.len();
        (0..asked).for_each(|store| self.ask(store, removal, deadline));
        loop {
            self.poll(cache)?;
            let ended: Vec<_> =
                again.extract_if(.., |store| !self.is_under_way(what, Some(*store))).collect();
            for store in ended {
                asked += 1;
                self.ask(store, removal, deadline);
            }
            let is_done = self.removals.answers.len() == asked && again.is_empty();
            if is_done && !self.is_under_way(what, None) {
                break;
            }
            let Some(left) = deadline.checked_duration_since(Instant::now()) else { break };
            if let Ok(done) = self.done.recv_timeout(left.min(PAUSE)) {
                self.take_result(done);
            }
        }
        let answers = std::mem::take(&mut self.removals.answers);
        self.removals.call = call + 1;
        let late = |operation| StoreError::new(StoreErrorKind::Timeout, operation);
        for (store, lane) in self.stores.iter().enumerate() {
            let tier = lane.store.tier();
            let of_store = |store: usize| move |answer: &(usize, _)| answer.0 == store;
            let failed = |error| ForgetFailure { store, tier, error };
            if again.contains(&store) {
                forgotten.failures.push(failed(late("write that has not returned".to_owned())));
            } else if !answers.iter().any(of_store(store)) {
                forgotten.failures.push(failed(late(removal.to_string())));
            }
        }
        for (store, answer) in answers {
            let tier = self.stores.get(store).invariant(STORE).store.tier();
            if answer.is_ok() {
                self.announcements.lacks_all(tier, bit(store).into(), |record| what.has(record));
            }
            let failure = answer.err().map(|error| ForgetFailure { store, tier, error });
            forgotten.failures.extend(failure);
        }
        forgotten.failures.sort_by_key(|failure| failure.store);
        Ok(forgotten)
    }

    fn ask(&self, store: usize, removal: &Removal, deadline: Instant) {
        let call = self.removals.call;
        let removed = move |removed| Done::Removed { call, store, removed };
        let unasked = StoreError::new(StoreErrorKind::Unavailable, removal.to_string());
        let mut report = Report::new(&self.sender, removed(Err(unasked)));
        let lane = self.stores.get(store).invariant(STORE);
        let (asked, removal) = (Arc::clone(&lane.store), removal.clone());
        // Deadlines may be any times.
        let limit = deadline.saturating_duration_since(Instant::now()).saturating_add(GRACE);
        lane.lane.push_urgent(limit, move || report.set(removed(asked.remove(&removal, deadline))));
    }

    pub(super) fn note_removed(
        &mut self,
        call: u64,
        store: usize,
        removed: Result<(), StoreError>,
    ) {
        if call == self.removals.call {
            self.removals.answers.push((store, removed));
        }
    }
}
