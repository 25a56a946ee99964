//! Captured work: the launches of a step, replayed for later steps.
use std::cell::RefCell;
use std::sync::Arc;

use kv_core::Axes;
use kv_core::backend::TokenRows;
use kv_core::error::DeviceError;

use crate::buffer::CudaBuffer;
use crate::gpu::{Gpu, Graph};
use crate::step::Extent;

/// The captured launches of a step, to be replayed for any later step within the same
/// [`StepLimits`](crate::StepLimits) whose rows the captured tensors have room for. Keeps all
/// memory that they use.
#[derive(Debug)]
pub struct CudaGraph {
    pub(crate) gpu: Arc<dyn Gpu>,
    pub(crate) graph: Box<dyn Graph>,
    /// Identifies the limits under which it was captured.
    pub(crate) epoch: u64,
    /// Memory that its launches use, and how many rows its tensors have.
    held: Captured,
}

impl CudaGraph {
    pub(crate) fn new(
        gpu: &Arc<dyn Gpu>,
        graph: Box<dyn Graph>,
        epoch: u64,
        held: Captured,
    ) -> Self {
        Self { gpu: Arc::clone(gpu), graph, epoch, held }
    }

    /// Returns why a captured tensor has no room for a step, whose launches would then write past
    /// it; `None` if all have room.
    pub(crate) fn lacks_room(&self, step: &Extent) -> Option<String> {
        let Captured { queries, new, .. } = &self.held;
        let queries = queries.lacks("queries", (step.sequences, step.q_len_max, step.total_q));
        queries
            .or_else(|| new.lacks("new tokens", (step.sequences, step.new_len_max, step.total_new)))
    }
}

/// Memory and row limits of captured calls.
#[derive(Debug, Default)]
pub(crate) struct Captured {
    pub(crate) memory: Vec<CudaBuffer>,
    queries: RowRoom,
    new: RowRoom,
}

/// Rows that every one of some tensors has room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RowRoom {
    sequences: u32,
    /// Rows of each sequence.
    longest: u32,
    /// Rows of all sequences.
    total: u32,
}

impl Default for RowRoom {
    /// Returns no limit, as without tensors.
    fn default() -> Self {
        Self { sequences: u32::MAX, longest: u32::MAX, total: u32::MAX }
    }
}

impl RowRoom {
    fn and(&mut self, rows: &TokenRows) {
        if rows.axes() == Axes::Thd {
            self.total = self.total.min(rows.tokens());
        } else {
            self.sequences = self.sequences.min(rows.batch());
            self.longest = self.longest.min(rows.tokens());
        }
    }

    fn lacks(&self, of: &str, (sequences, longest, total): (u32, u32, u32)) -> Option<String> {
        if sequences <= self.sequences && longest <= self.longest && total <= self.total {
            return None;
        }
        let found = [
            (format!("sequences with {of}"), sequences, self.sequences),
            (format!("{of} of a sequence"), longest, self.longest),
            (of.to_owned(), total, self.total),
        ];
        let (what, got, max) = found.into_iter().find(|(_, got, max)| got > max)?;
        Some(format!("{what}: {got}, and a captured tensor has room for {max}"))
    }
}

/// The rows of a step that a tensor has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RowsOf {
    Queries,
    NewTokens,
}

/// Memory that calls use while they are captured.
#[derive(Debug, Default)]
pub(crate) struct Held(RefCell<Option<Captured>>);

impl Held {
    /// Starts to record memory and rows.
    pub(crate) fn begin(&self) {
        *self.0.borrow_mut() = Some(Captured::default());
    }
    /// Stops recording, and returns the recorded memory and rows.
    pub(crate) fn end(&self) -> Captured {
        self.0.borrow_mut().take().unwrap_or_default()
    }
    pub(crate) fn is_on(&self) -> bool {
        self.0.borrow().is_some()
    }
    pub(crate) fn note(&self, buffer: &CudaBuffer) {
        if let Some(held) = self.0.borrow_mut().as_mut() {
            held.memory.push(buffer.clone());
        }
    }
    /// Records how many rows a tensor has.
    pub(crate) fn note_rows(&self, of: RowsOf, rows: &TokenRows) {
        if let Some(held) = self.0.borrow_mut().as_mut() {
            match of {
                RowsOf::Queries => held.queries.and(rows),
                RowsOf::NewTokens => held.new.and(rows),
            }
        }
    }
}

/// Returns the error of a call that needs something it cannot get during a capture.
pub(crate) fn refused(what: &str) -> DeviceError {
    let why = format!("{what} while launches are captured: run one such step before");
    crate::tensors::unsupported("capture", why)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The least rows of all tensors count, those of batches and ragged ones alike.
    #[test]
    fn the_smallest_tensor_decides() {
        let mut room = RowRoom::default();
        assert_eq!(room.lacks("queries", (9, 9, 81)), None);
        room = RowRoom { total: 8, ..room };
        assert_eq!(room.lacks("queries", (9, 9, 8)), None);
        let refused = room.lacks("queries", (9, 1, 9)).unwrap();
        assert_eq!(refused, "queries: 9, and a captured tensor has room for 8");
        room = RowRoom { sequences: 4, longest: 2, ..room };
        let refused = room.lacks("new tokens", (5, 1, 5)).unwrap();
        assert_eq!(refused, "sequences with new tokens: 5, and a captured tensor has room for 4");
        let refused = room.lacks("queries", (2, 3, 6)).unwrap();
        assert_eq!(refused, "queries of a sequence: 3, and a captured tensor has room for 2");
    }
}
