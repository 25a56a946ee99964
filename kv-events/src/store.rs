//! The last batches, by number, for replay.
use std::collections::VecDeque;
use std::sync::Arc;

/// Batches as they were sent, contiguous up to the last one.
#[derive(Debug)]
pub(crate) struct Store {
    next: u64,
    batches: VecDeque<Arc<[u8]>>,
    bytes: usize,
    batches_max: usize,
    bytes_max: usize,
}

impl Store {
    /// Begins at a number.
    pub(crate) fn new(next: u64, batches_max: usize, bytes_max: usize) -> Self {
        Self { next, batches: VecDeque::new(), bytes: 0, batches_max, bytes_max }
    }

    /// Returns the number of the next batch.
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    /// Returns the first number that is kept; the next one if none is.
    pub(crate) fn first(&self) -> u64 {
        self.next - u64::try_from(self.batches.len()).unwrap_or(self.next)
    }

    /// Keeps the next batch, and drops the oldest ones that are too many.
    pub(crate) fn push(&mut self, batch: Arc<[u8]>) {
        self.next += 1;
        self.bytes += batch.len();
        self.batches.push_back(batch);
        while self.batches.len() > self.batches_max || self.bytes > self.bytes_max {
            let Some(oldest) = self.batches.pop_front() else { break };
            self.bytes -= oldest.len();
        }
    }

    /// Returns a batch; `None` if it is not kept.
    pub(crate) fn get(&self, number: u64) -> Option<Arc<[u8]>> {
        let index = usize::try_from(number.checked_sub(self.first())?).ok()?;
        self.batches.get(index).map(Arc::clone)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_batches_within_both_bounds_are_kept() {
        let mut store = Store::new(10, 3, 8);
        assert_eq!((store.first(), store.next(), store.get(10)), (10, 10, None));
        for number in 10_u8..15 {
            store.push(Arc::from([number]));
        }
        assert_eq!((store.first(), store.next()), (12, 15));
        assert_eq!((store.get(11), store.get(15)), (None, None));
        for number in 12_u8..15 {
            assert_eq!(store.get(number.into()), Some(Arc::from([number])));
        }
        store.push(Arc::from([0; 7]));
        assert_eq!((store.first(), store.next()), (14, 16), "bytes");
        store.push(Arc::from([0; 9]));
        assert_eq!((store.first(), store.next()), (17, 17), "more than the bound alone");
    }
}
