//! A thread that polls events for tasks, which may not block.
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Waker;
use std::thread;
use std::time::Duration;

use kv_core::error::{DeviceError, DeviceErrorKind};

use crate::gpu::Event;

/// An event, and the task to wake when it is done.
type Request = (Arc<dyn Event>, Waker);

/// Interval at which pending events are polled: the maximum delay of a wake-up.
const PERIOD: Duration = Duration::from_micros(50);

/// The thread starts with the first request and ends when this is dropped and no request is
/// pending.
#[derive(Debug, Default)]
pub(crate) struct Waiter {
    requests: Mutex<Option<Sender<Request>>>,
}

impl Waiter {
    /// Wakes `waker` when `event` is done or has failed.
    pub(crate) fn wake(&self, event: &Arc<dyn Event>, waker: &Waker) -> Result<(), DeviceError> {
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        let sender = if let Some(sender) = requests.as_ref() {
            sender
        } else {
            let (sender, receiver) = channel();
            let thread = thread::Builder::new().name("kv-cuda wakes".into());
            let started = thread.spawn(move || run(&receiver));
            started.map_err(|error| {
                DeviceError::new(DeviceErrorKind::Driver, "poll").with_source(error)
            })?;
            requests.insert(sender)
        };
        // The thread outlives this sender, so the send succeeds.
        let _ = sender.send((Arc::clone(event), waker.clone()));
        Ok(())
    }
}

fn run(requests: &Receiver<Request>) {
    let mut waiting: Vec<Request> = Vec::new();
    loop {
        let next = if waiting.is_empty() {
            requests.recv().map_err(|_| RecvTimeoutError::Disconnected)
        } else {
            requests.recv_timeout(PERIOD)
        };
        match next {
            Ok(request) => waiting.push(request),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) if waiting.is_empty() => return,
            // No new requests: sleep instead, so that the loop does not spin.
            Err(RecvTimeoutError::Disconnected) => thread::sleep(PERIOD),
        }
        // A failed event counts as done: the next poll returns its error.
        waiting.retain(|(event, waker)| {
            let is_done = !matches!(event.is_done(), Ok(false));
            if is_done {
                waker.wake_by_ref();
            }
            !is_done
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
    use std::task::Wake;
    use std::time::Instant;

    use super::*;

    /// An event that the test completes, and that counts its polls.
    #[derive(Debug, Default)]
    struct TestEvent {
        is_done: AtomicBool,
        asked: AtomicU32,
    }

    impl Event for TestEvent {
        fn is_done(&self) -> Result<bool, DeviceError> {
            self.asked.fetch_add(1, Ordering::Relaxed);
            Ok(self.is_done.load(Ordering::Relaxed))
        }
        fn wait(&self) -> Result<(), DeviceError> {
            unreachable!("the thread must not block")
        }
    }

    #[derive(Default)]
    struct Woken(AtomicBool);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    #[test]
    fn tasks_are_woken_after_a_drop_without_spinning() {
        let (event, woken) = (Arc::new(TestEvent::default()), Arc::new(Woken::default()));
        let watched: Arc<dyn Event> = Arc::<TestEvent>::clone(&event);
        let waiter = Waiter::default();
        waiter.wake(&watched, &Waker::from(Arc::clone(&woken))).unwrap();
        drop(waiter);
        let begin = Instant::now();
        thread::sleep(Duration::from_millis(20));
        let asked = u128::from(event.asked.load(Ordering::Relaxed));
        let periods = begin.elapsed().as_micros().div_ceil(PERIOD.as_micros());
        assert!(asked <= periods * 2, "asked {asked} times in {periods} periods");
        assert!(!woken.0.load(Ordering::Relaxed));
        event.is_done.store(true, Ordering::Relaxed);
        while !woken.0.load(Ordering::Relaxed) {
            assert!(begin.elapsed() < Duration::from_mins(1), "the task was not woken");
            thread::sleep(PERIOD);
        }
    }
}
