//! Sequences of random operations: steps, forks, ends; after each, all rows are checked.
use kv_core::backend::Plane;
use kv_core::error::PlanError;
use kv_core::{Axes, CacheError, SequenceId, StepInput, TensorView, TensorViewMut};
use kv_tier::TierError;

use crate::kind::HEADS;
use crate::prompt::rows;
use crate::recurrence::advance;
use crate::world::{Live, World, done};

impl World {
    /// Computes what is left of a prompt, or a few new tokens, in some steps.
    pub(crate) fn compute(&mut self, at: usize) {
        while at < self.live.len() {
            let live = &self.live[at];
            let left = &live.asked.prompt[live.tokens.len().min(live.asked.prompt.len())..];
            if left.is_empty() {
                break;
            }
            let most = 1 + self.rng.pick(&[3, 17, 300]);
            // Most steps end at stops.
            let stop = self.cache.state().next_stop(live.id).filter(|_| !self.rng.one_in(8));
            let most = stop.map_or(most, |stop| most.min(stop as usize - live.tokens.len()));
            let new = left[..left.len().min(most)].to_vec();
            if !self.append(at, &new) {
                break;
            }
            if self.rng.one_in(3) {
                break;
            }
        }
    }

    pub(crate) fn step(&mut self) {
        if self.live.is_empty() {
            return;
        }
        let at = self.rng.below(self.live.len() as u32) as usize;
        if self.live[at].tokens.len() < self.live[at].asked.prompt.len() {
            return self.compute(at);
        }
        let len = self.live[at].tokens.len() as u32;
        let family = self.rng.below(3);
        let new: Vec<_> = (len..len + 1 + self.rng.below(9)).map(|n| n * 10 + family).collect();
        self.append(at, &new);
    }

    /// Appends tokens; `false` if there is no room.
    pub(crate) fn append(&mut self, at: usize, new: &[u32]) -> bool {
        let live = &self.live[at];
        let all = [&live.tokens[..], new].concat();
        let inputs = [StepInput::tokens(live.id, new)];
        let may_fail = self.is_armed;
        let mut step = match self.cache.begin_step(&inputs) {
            Ok(step) => step,
            Err(TierError::Cache(
                CacheError::Exhausted(_) | CacheError::Plan(PlanError::SequenceTooLong { .. }),
            )) => return false,
            Err(error) => {
                done(may_fail, Err::<(), _>(error));
                return false;
            }
        };
        let dims = [new.len() as u32, HEADS, self.kind.dim()];
        let width = self.kind.width();
        let words = live.asked.words(&all);
        let (start, before) = words[..live.tokens.len() + 2].split_at(2);
        let advanced = if self.kind.has_states() {
            advance(&mut step, (start, before, &words[live.tokens.len() + 2..]))
        } else {
            Ok(())
        };
        if let Err(error) = advanced {
            drop(step);
            self.done(Err::<(), _>(error));
            self.check(at);
            return false;
        }
        for layer in self.kind.layers() {
            let [k, v] = [Plane::Key, Plane::Value].map(|plane| {
                let words = live.asked.words(&all);
                rows(&words, (layer, plane), width).split_off(live.tokens.len() * width)
            });
            let (k, v) = (TensorView::host(&k, &dims), TensorView::host(&v, &dims));
            if let Err(error) = step.write(layer, k, v, Axes::Thd) {
                drop(step);
                self.done(Err::<(), _>(error));
                self.check(at);
                return false;
            }
        }
        if self.rng.one_in(10) {
            // Dropped: as if it had not begun.
            drop(step);
            self.check(at);
            return true;
        }
        let committed = step.commit();
        let is_committed = self.done(committed).is_some();
        if is_committed {
            self.live[at].tokens = all;
        }
        self.check(at);
        is_committed
    }

    /// Checks all rows of a sequence that a window has not passed.
    pub(crate) fn check(&mut self, at: usize) {
        self.disarm();
        let live = &self.live[at];
        let len = live.tokens.len() as u32;
        assert_eq!(self.cache.state().seq_len(live.id), Some(len));
        let width = self.kind.width();
        let words = live.asked.words(&live.tokens);
        for layer in self.kind.layers() {
            let ranges = self.kind.rows(layer, len);
            for plane in [Plane::Key, Plane::Value] {
                let expected = rows(&words, (layer, plane), width);
                for (begin, count) in ranges.iter().copied().filter(|(_, count)| *count > 0) {
                    let mut got = vec![0.0_f32; count as usize * width];
                    let out = TensorViewMut::host(&mut got, &[1, count, HEADS, self.kind.dim()]);
                    let range = [(live.id, begin, count)];
                    self.cache.cache_mut().gather(layer, plane, &range, out, Axes::Bshd).unwrap();
                    let expected = &expected[begin as usize * width..];
                    let tolerance = self.kind.tolerance();
                    let wrong =
                        got.iter().zip(expected).position(|(a, b)| (a - b).abs() > tolerance);
                    let wrong = wrong.map(|at| begin as usize + at / width);
                    assert_eq!(wrong, None, "row of layer {layer}, {plane:?}, {:?}", live.asked);
                }
            }
        }
    }

    pub(crate) fn fork(&mut self) {
        if self.live.is_empty() || self.live.len() > 4 {
            return;
        }
        let at = self.rng.below(self.live.len() as u32) as usize;
        let id = SequenceId(self.next);
        self.next += 1;
        let (asked, tokens) = (self.live[at].asked.clone(), self.live[at].tokens.clone());
        let forked = self.cache.cache_mut().fork(self.live[at].id, id);
        if self.done(forked).is_some() {
            self.live.push(Live { id, asked, tokens });
            self.check(self.live.len() - 1);
        }
    }

    pub(crate) fn truncate(&mut self) {
        if self.live.is_empty() {
            return;
        }
        let at = self.rng.below(self.live.len() as u32) as usize;
        let live = &self.live[at];
        let len = self.rng.below(live.tokens.len() as u32 + 1);
        let truncated = self.cache.cache_mut().truncate(live.id, len);
        let is_kept = |error: &PlanError| {
            matches!(error, PlanError::OutOfWindow { .. } | PlanError::StateMissing { .. })
        };
        if matches!(&truncated, Err(CacheError::Plan(error)) if is_kept(error)) {
            return;
        }
        // Blocks that could not be wiped are no reason to keep the tokens.
        self.done(truncated);
        self.live[at].tokens.truncate(len as usize);
    }

    pub(crate) fn end(&mut self) {
        if self.live.is_empty() {
            return;
        }
        let at = self.rng.below(self.live.len() as u32) as usize;
        self.check(at);
        self.arm();
        let live = self.live.remove(at);
        let ended = match self.rng.below(8) {
            0 => {
                self.live.clear();
                self.cache.cache_mut().reset()
            }
            1 => {
                let forgotten = self.cache.cache_mut().forget_sequence(live.id);
                self.done(forgotten);
                self.cache.cache_mut().release(live.id)
            }
            2..5 => self.cache.cache_mut().preempt(live.id),
            _ => self.cache.cache_mut().release(live.id),
        };
        self.done(ended);
        assert!(!self.cache.state().contains(live.id));
    }
}
