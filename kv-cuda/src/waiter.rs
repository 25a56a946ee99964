//! A thread that waits for events on behalf of tasks that may not block.
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
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
        let next = if waiting.is_empty() {
            wishes.recv().map_err(|_| RecvTimeoutError::Disconnected)
        } else {
            wishes.recv_timeout(PERIOD)
        };
        match next {
            Ok(wish) => waiting.push(wish),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) if waiting.is_empty() => return,
            // Nobody can wish any more, and nothing else keeps the thread from asking all the time.
            Err(RecvTimeoutError::Disconnected) => thread::sleep(PERIOD),
        }
        // One that failed is done too: whoever polls again learns why.
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

    /// Done when it is told so; counts who asks.
    #[derive(Debug, Default)]
    struct Told {
        is_done: AtomicBool,
        asked: AtomicU32,
    }

    impl Event for Told {
        fn is_done(&self) -> Result<bool, DeviceError> {
            self.asked.fetch_add(1, Ordering::Relaxed);
            Ok(self.is_done.load(Ordering::Relaxed))
        }
        fn wait(&self) -> Result<(), DeviceError> {
            unreachable!("it may not block")
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
    fn who_waits_is_woken_after_the_device_is_gone_and_nothing_spins() {
        let (told, woken) = (Arc::new(Told::default()), Arc::new(Woken::default()));
        let event: Arc<dyn Event> = Arc::<Told>::clone(&told);
        let waiter = Waiter::default();
        waiter.wake(&event, &Waker::from(Arc::clone(&woken))).unwrap();
        drop(waiter);
        let begin = Instant::now();
        thread::sleep(Duration::from_millis(20));
        let asked = u128::from(told.asked.load(Ordering::Relaxed));
        let periods = begin.elapsed().as_micros().div_ceil(PERIOD.as_micros());
        assert!(asked <= periods.saturating_mul(2), "asked {asked} times in {periods} periods");
        assert!(!woken.0.load(Ordering::Relaxed));
        told.is_done.store(true, Ordering::Relaxed);
        while !woken.0.load(Ordering::Relaxed) {
            assert!(begin.elapsed() < Duration::from_mins(1), "nobody wakes it");
            thread::sleep(PERIOD);
        }
    }
}
