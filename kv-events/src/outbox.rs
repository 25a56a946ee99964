//! What waits to be written to one peer.
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use kv_core::invariant::Invariant;

/// A whole message, or a command: bytes of its own, and bytes that peers share.
#[derive(Debug, Clone)]
pub(crate) struct Outgoing {
    pub(crate) head: Vec<u8>,
    pub(crate) body: Arc<[u8]>,
}

impl Outgoing {
    /// Bytes that no other peer gets.
    pub(crate) fn own(head: Vec<u8>) -> Self {
        Self { head, body: Arc::from([]) }
    }

    fn len(&self) -> usize {
        self.head.len() + self.body.len()
    }
}

/// Messages in order, bounded in bytes. A message counts until it is written.
#[derive(Debug)]
pub(crate) struct Outbox {
    state: Mutex<State>,
    changed: Condvar,
    room: usize,
}

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<Outgoing>,
    bytes: usize,
    is_closed: bool,
}

impl Outbox {
    pub(crate) fn new(room: usize) -> Self {
        Self { state: Mutex::default(), changed: Condvar::new(), room }
    }

    /// Appends a message if there is room. Returns whether it will be written.
    pub(crate) fn offer(&self, message: Outgoing) -> bool {
        let mut state = self.lock();
        let is_taken = !state.is_closed && state.bytes + message.len() <= self.room;
        if is_taken {
            self.append(&mut state, message);
        }
        is_taken
    }

    /// Appends a message as soon as there is room, and any message when nothing waits. Returns
    /// whether it will be written: not after the peer is gone.
    pub(crate) fn wait_and_append(&self, message: Outgoing) -> bool {
        let mut state = self.lock();
        while !state.is_closed && state.bytes > 0 && state.bytes + message.len() > self.room {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if !state.is_closed {
            self.append(&mut state, message);
        }
        !state.is_closed
    }

    /// Waits for the next message; `None` after the end.
    pub(crate) fn take(&self) -> Option<Outgoing> {
        let mut state = self.lock();
        loop {
            if state.is_closed {
                return None;
            }
            if let Some(message) = state.waiting.pop_front() {
                return Some(message);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Frees the room of a message that is written.
    pub(crate) fn written(&self, message: &Outgoing) {
        let mut state = self.lock();
        let rest = state.bytes.checked_sub(message.len());
        state.bytes = rest.invariant("a message counts until it is written");
        self.changed.notify_all();
    }

    /// Ends it: what waits is dropped.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.is_closed = true;
        state.waiting = VecDeque::new();
        self.changed.notify_all();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.lock().is_closed
    }

    fn append(&self, state: &mut State, message: Outgoing) {
        state.bytes += message.len();
        state.waiting.push_back(message);
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_messages_are_dropped_beyond_the_room() {
        let outbox = Outbox::new(10);
        let message = |len| Outgoing { head: vec![1; len], body: Arc::from([2; 2]) };
        assert!(outbox.offer(message(6)) && !outbox.offer(message(1)) && outbox.offer(message(0)));
        let first = outbox.take().unwrap();
        assert!(!outbox.offer(message(0)), "what is being written counts");
        outbox.written(&first);
        assert!(outbox.offer(message(0)));
        outbox.close();
        assert!(outbox.is_closed() && outbox.take().is_none() && !outbox.offer(message(0)));
        assert!(!outbox.wait_and_append(message(0)));
    }

    #[test]
    fn a_patient_message_waits_for_room() {
        let outbox = Outbox::new(3);
        assert!(outbox.wait_and_append(Outgoing::own(vec![0; 9])), "alone it always fits");
        std::thread::scope(|scope| {
            let patient = scope.spawn(|| outbox.wait_and_append(Outgoing::own(vec![1])));
            let long = outbox.take().unwrap();
            outbox.written(&long);
            assert!(patient.join().unwrap());
        });
        assert_eq!(outbox.take().unwrap().head, [1]);
    }
}
