//! A thread that waits for events on behalf of tasks that may not block.
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Waker;
use std::thread;
use std::time::Duration;

use kv_core::{DeviceError, DeviceErrorKind};

use crate::gpu::Event;

/// An event, and whom to wake when it is done.
type Wish = (Arc<dyn Event>, Waker);

/// How long the thread waits for a new wish while it has some: what a wake-up may come too late.
const PERIOD: Duration = Duration::from_micros(50);

/// Starts its thread with the first wish; the thread ends when this is dropped and nobody waits.
#[derive(Debug, Default)]
pub(crate) struct Waiter {
    wishes: Mutex<Option<Sender<Wish>>>,
}

impl Waiter {
    /// Wakes `waker` when `event` is done or has failed.
    pub(crate) fn wake(&self, event: &Arc<dyn Event>, waker: &Waker) -> Result<(), DeviceError> {
        let mut wishes = self.wishes.lock().unwrap_or_else(PoisonError::into_inner);
        let sender = if let Some(sender) = wishes.as_ref() {
            sender
        } else {
            let (sender, receiver) = channel();
            let thread = thread::Builder::new().name("kv-cuda wakes".into());
            let started = thread.spawn(move || run(&receiver));
            started.map_err(|error| {
                DeviceError::new(DeviceErrorKind::Driver, "poll").with_source(error)
            })?;
            wishes.insert(sender)
        };
        // The thread ends only after this sender is gone.
        let _ = sender.send((Arc::clone(event), waker.clone()));
        Ok(())
    }
}

fn run(wishes: &Receiver<Wish>) {
    let mut waiting: Vec<Wish> = Vec::new();
    loop {
        let next =
            if waiting.is_empty() { wishes.recv().ok() } else { wishes.recv_timeout(PERIOD).ok() };
        let is_over = next.is_none() && waiting.is_empty();
        waiting.extend(next);
        // One that failed is done too: whoever polls again learns why.
        waiting.retain(|(event, waker)| {
            let is_done = !matches!(event.is_done(), Ok(false));
            if is_done {
                waker.wake_by_ref();
            }
            !is_done
        });
        if is_over {
            return;
        }
    }
}
