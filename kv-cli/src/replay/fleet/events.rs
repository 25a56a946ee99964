//! Events: what instances stored and evicted, on its way to the router.
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::num::NonZeroU32;
use std::time::Duration;

use super::workload::Block;
use crate::num::to_u64;

/// Bytes of a message without its blocks: names and short fields of an event in msgpack, time, rank
/// and the frames around them.
const MESSAGE_BYTES: u64 = 150;
/// Bytes of a block's hash in msgpack.
const HASH_BYTES: u64 = 9;
/// Bytes of a token id in msgpack: 3 below 65,536 and 5 above, the mean of a vocabulary of about
/// 128,000.
const TOKEN_BYTES: u64 = 4;

/// What happened to the cache of an instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Event {
    /// A prompt was computed: what it stored, and what was evicted for it.
    Changed { stored: Vec<Block>, evicted: Vec<Block> },
    /// The instance restarted. These are the blocks of which the router may know.
    Cleared { lost: Vec<Block> },
}

impl Event {
    /// Returns the messages of an event and their bytes.
    fn cost(&self, block_size: NonZeroU32) -> (u64, u64) {
        let per_stored = HASH_BYTES + TOKEN_BYTES * u64::from(block_size.get());
        let message = |blocks: &[Block], each: u64| match to_u64(blocks.len()) {
            0 => (0, 0),
            count => (1, MESSAGE_BYTES + count * each),
        };
        match self {
            Self::Changed { stored, evicted } => {
                let (stored, evicted) = (message(stored, per_stored), message(evicted, HASH_BYTES));
                (stored.0 + evicted.0, stored.1 + evicted.1)
            }
            Self::Cleared { .. } => (1, MESSAGE_BYTES),
        }
    }
}

/// An event that the router has not read.
#[derive(Debug)]
struct Pending {
    number: u64,
    /// When the instance publishes it.
    at: Duration,
    event: Event,
}

/// Events by the time at which they reach the router. Those of one instance keep their order.
#[derive(Debug)]
pub(super) struct EventQueue {
    lag: Duration,
    block_size: NonZeroU32,
    /// When an event is read, its number and its instance. The event may be gone.
    due: BinaryHeap<Reverse<(Duration, u64, usize)>>,
    /// Events of each instance, in order.
    pending: Vec<VecDeque<Pending>>,
    next_number: u64,
    messages: u64,
    bytes: u64,
}

impl EventQueue {
    pub(super) fn new(instances: usize, lag: Duration, block_size: NonZeroU32) -> Self {
        Self {
            lag,
            block_size,
            due: BinaryHeap::new(),
            pending: (0..instances).map(|_| VecDeque::new()).collect(),
            next_number: 0,
            messages: 0,
            bytes: 0,
        }
    }

    /// Adds what an instance publishes when it has computed a prompt.
    pub(super) fn publish(
        &mut self,
        instance: usize,
        at: Duration,
        stored: Vec<Block>,
        evicted: Vec<Block>,
    ) {
        if !(stored.is_empty() && evicted.is_empty()) {
            self.push(instance, at, Event::Changed { stored, evicted });
        }
    }

    /// Adds the restart of an instance that had these blocks. What it would have published later is
    /// gone.
    pub(super) fn clear(&mut self, instance: usize, at: Duration, mut lost: Vec<Block>) {
        while let Some(last) = self.pending[instance].pop_back_if(|pending| pending.at > at) {
            if let Event::Changed { evicted, .. } = last.event {
                lost.extend(evicted);
            }
        }
        self.push(instance, at, Event::Cleared { lost });
    }

    fn push(&mut self, instance: usize, at: Duration, event: Event) {
        let number = self.next_number;
        self.next_number += 1;
        self.due.push(Reverse((at + self.lag, number, instance)));
        self.pending[instance].push_back(Pending { number, at, event });
    }

    /// Takes the next event that has reached the router, and its instance.
    pub(super) fn next_until(&mut self, now: Duration) -> Option<(usize, Event)> {
        while self.due.peek().is_some_and(|Reverse((at, ..))| *at <= now) {
            let Some(Reverse((_, number, instance))) = self.due.pop() else { break };
            let is_there = |pending: &mut Pending| pending.number == number;
            if let Some(Pending { event, .. }) = self.pending[instance].pop_front_if(is_there) {
                self.count(&event);
                return Some((instance, event));
            }
        }
        None
    }

    fn count(&mut self, event: &Event) {
        let (messages, bytes) = event.cost(self.block_size);
        self.messages += messages;
        self.bytes += bytes;
    }

    /// Returns the messages of all events and their bytes, those too that nobody has read.
    pub(super) fn into_totals(mut self) -> (u64, u64) {
        for pending in std::mem::take(&mut self.pending).into_iter().flatten() {
            self.count(&pending.event);
        }
        (self.messages, self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(lag: u64) -> EventQueue {
        let block_size = NonZeroU32::new(16).expect("16");
        EventQueue::new(2, Duration::from_secs(lag), block_size)
    }

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn changed(stored: &[Block], evicted: &[Block]) -> Event {
        Event::Changed { stored: stored.to_vec(), evicted: evicted.to_vec() }
    }

    #[test]
    fn events_arrive_after_the_lag_in_the_order_of_time() {
        let mut queue = queue(2);
        queue.publish(0, at(5), vec![1], vec![]);
        queue.publish(1, at(3), vec![2], vec![3]);
        queue.publish(1, at(4), vec![], vec![]);
        queue.publish(0, at(5), vec![4], vec![]);
        assert_eq!(queue.next_until(at(4)), None);
        assert_eq!(queue.next_until(at(9)), Some((1, changed(&[2], &[3]))));
        assert_eq!(queue.next_until(at(9)), Some((0, changed(&[1], &[]))));
        assert_eq!(queue.next_until(at(9)), Some((0, changed(&[4], &[]))));
        assert_eq!(queue.next_until(at(9)), None);
        // Stored three times and evicted once.
        assert_eq!(queue.into_totals(), (4, 4 * 150 + 3 * (9 + 4 * 16) + 9));
    }

    #[test]
    fn a_restart_ends_what_was_to_be_published_later() {
        let mut queue = queue(10);
        queue.publish(0, at(1), vec![1, 2], vec![]);
        queue.publish(0, at(8), vec![3], vec![1]);
        queue.publish(1, at(8), vec![1], vec![]);
        queue.clear(0, at(5), vec![2, 3]);
        queue.publish(0, at(9), vec![7], vec![]);
        assert_eq!(queue.next_until(at(30)), Some((0, changed(&[1, 2], &[]))));
        let lost = vec![2, 3, 1];
        assert_eq!(queue.next_until(at(30)), Some((0, Event::Cleared { lost })));
        assert_eq!(queue.next_until(at(30)), Some((1, changed(&[1], &[]))));
        assert_eq!(queue.next_until(at(18)), None);
        // The last one is not read.
        assert_eq!(queue.into_totals(), (4, 4 * 150 + 4 * (9 + 4 * 16)));
    }
}
