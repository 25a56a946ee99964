//! The waiting and running requests, oldest first.
use std::collections::VecDeque;

use kv_core::invariant::Invariant;
use kv_core::scheduling::CacheState;
use kv_core::{CacheError, CacheSpec, GroupId, SequenceId};

use crate::request::Limits;
use crate::task::Task;

/// Requests by age: a request keeps its place, however often it is preempted.
#[derive(Debug, Default)]
pub(crate) struct Queues {
    waiting: VecDeque<Task>,
    running: Vec<Task>,
}

impl Queues {
    pub(crate) fn waiting(&self) -> &VecDeque<Task> {
        &self.waiting
    }

    pub(crate) fn waiting_mut(&mut self) -> &mut VecDeque<Task> {
        &mut self.waiting
    }

    pub(crate) fn running(&self) -> &[Task] {
        &self.running
    }

    pub(crate) fn running_mut(&mut self) -> &mut [Task] {
        &mut self.running
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// Returns the texts that wait, and those that run.
    pub(crate) fn count(&self) -> (usize, usize) {
        let waiting = self.waiting.iter().map(Task::texts).sum();
        (waiting, self.running.iter().map(Task::texts).sum())
    }

    /// Lets a request wait at the place of its age.
    pub(crate) fn wait(&mut self, task: Task) {
        let at = self.waiting.partition_point(|other| other.index < task.index);
        self.waiting.insert(at, task);
    }

    /// Lets a request run, and returns its place.
    pub(crate) fn run(&mut self, task: Task) -> usize {
        let at = self.running.partition_point(|other| other.index < task.index);
        self.running.insert(at, task);
        at
    }

    /// Removes a waiting request.
    pub(crate) fn take_waiting(&mut self, at: usize) -> Task {
        self.waiting.remove(at).invariant("a request that is admitted waits")
    }

    /// Counts that a younger request was admitted before those that wait and are older.
    pub(crate) fn note_overtaken(&mut self, by: usize) {
        for task in self.waiting.iter_mut().take_while(|task| task.index < by) {
            task.overtaken += 1;
        }
    }

    /// Removes a running request.
    pub(crate) fn take_running(&mut self, at: usize) -> Task {
        self.running.remove(at)
    }

    /// Removes the youngest running request.
    pub(crate) fn take_youngest(&mut self) -> Option<Task> {
        self.running.pop()
    }

    /// Removes a request by its number, wherever it is.
    pub(crate) fn remove(&mut self, index: usize) -> Option<Task> {
        if let Some(at) = self.waiting.iter().position(|task| task.index == index) {
            return self.waiting.remove(at);
        }
        let at = self.running.iter().position(|task| task.index == index)?;
        Some(self.running.remove(at))
    }

    /// Returns all requests.
    pub(crate) fn all_mut(&mut self) -> impl Iterator<Item = &mut Task> {
        self.waiting.iter_mut().chain(self.running.iter_mut())
    }

    /// Returns to their places the running requests of which the cache knows no sequence, because
    /// the step that started them was rolled back.
    pub(crate) fn wait_again(&mut self, cache: &CacheState) {
        let (running, unstarted): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.running).into_iter().partition(|task| task.is_live(cache));
        self.running = running;
        for mut task in unstarted {
            if !task.was_preempted {
                (task.reused, task.admitted) = (None, None);
            }
            self.wait(task);
        }
    }

    /// Removes all requests.
    pub(crate) fn take_all(&mut self) -> Vec<Task> {
        let Self { waiting, running } = std::mem::take(self);
        waiting.into_iter().chain(running).collect()
    }

    /// Returns how many more sequences may run.
    pub(crate) fn room(&self, limits: &Limits, spec: &CacheSpec) -> u32 {
        let running: u32 = self.running.iter().map(Task::width).sum();
        spec.max_sequences_in_step().min(limits.max_batch.max(1)).saturating_sub(running)
    }

    /// Returns the place of the running request of this sequence.
    pub(crate) fn position(&self, id: SequenceId) -> Option<usize> {
        self.running.iter().position(|task| task.sequences.iter().any(|s| s.id == id))
    }

    /// Returns the blocks that present tokens will need in the group that needs most: those of
    /// everything that runs, and of further beams of the new request.
    pub(crate) fn promised(&self, cache: &CacheState, next: &Task) -> Result<u32, CacheError> {
        let mut most = 0;
        for (group, id) in cache.spec().groups().iter().zip((0..).map(GroupId)) {
            let mut blocks = next.blocks_of_forks(cache, group);
            for task in &self.running {
                blocks += task.blocks_of_forks(cache, group);
                for sequence in task.sequences.iter().filter(|s| cache.contains(s.id)) {
                    blocks += cache.blocks_to_completion(id, sequence.id, sequence.len())?;
                }
            }
            most = most.max(blocks);
        }
        Ok(most)
    }
}

/// Number of requests that may still be admitted before those that were passed over.
#[derive(Debug)]
pub(crate) struct Overtakes {
    left: u32,
}

impl Overtakes {
    pub(crate) fn new() -> Self {
        Self { left: u32::MAX }
    }

    /// Returns whether another request may be admitted.
    pub(crate) fn are_left(&self) -> bool {
        self.left > 0
    }

    /// Counts a request that is admitted.
    pub(crate) fn note_admitted(&mut self) {
        self.left -= 1;
    }

    /// Counts a request that is not admitted now.
    pub(crate) fn note_passed_over(&mut self, task: &Task, limits: &Limits) {
        self.left = self.left.min(limits.max_overtakes.saturating_sub(task.overtaken));
    }
}
