//! Something that happens once, and a thread that lets it happen.
//!
//! A device runs its callbacks only while somebody polls it. Who blocks polls himself; for tasks
//! that may not block, [`Waiter`] has a thread that does.
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::thread;

use kv_core::{DeviceError, DeviceErrorKind};

/// Set once, by a callback of the device.
#[derive(Debug, Default)]
pub(crate) struct Signal(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    done: Option<Result<(), String>>,
    wakers: Vec<Waker>,
}

impl Signal {
    /// Sets it and wakes who waits.
    pub(crate) fn set(&self, how: Result<(), String>) {
        let wakers = {
            let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            state.done.get_or_insert(how);
            std::mem::take(&mut state.wakers)
        };
        wakers.into_iter().for_each(Waker::wake);
    }

    /// What it was set to.
    pub(crate) fn get(&self) -> Option<Result<(), String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).done.clone()
    }

    /// The same; whoever asks too early is woken when it is set.
    pub(crate) fn poll(&self, cx: &mut Context<'_>) -> Poll<Result<(), String>> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(done) = &state.done {
            return Poll::Ready(done.clone());
        }
        if !state.wakers.iter().any(|waker| waker.will_wake(cx.waker())) {
            state.wakers.push(cx.waker().clone());
        }
        Poll::Pending
    }
}

/// A thread that polls the device while tasks wait. Starts with the first of them and ends when
/// this is dropped.
#[derive(Debug)]
pub(crate) struct Waiter {
    device: wgpu::Device,
    wishes: Mutex<Option<Sender<Arc<Signal>>>>,
}

impl Waiter {
    pub(crate) fn new(device: &wgpu::Device) -> Self {
        Self { device: device.clone(), wishes: Mutex::new(None) }
    }

    /// Sees to it that `signal` is set once the work submitted so far is done.
    ///
    /// # Errors
    /// `Driver` where the thread cannot be started.
    pub(crate) fn wish(
        &self,
        signal: &Arc<Signal>,
        operation: &'static str,
    ) -> Result<(), DeviceError> {
        let mut wishes = self.wishes.lock().unwrap_or_else(PoisonError::into_inner);
        let sender = if let Some(sender) = wishes.as_ref() {
            sender
        } else {
            let (sender, receiver) = channel();
            let device = self.device.clone();
            let thread = thread::Builder::new().name("kv-wgpu polls".into());
            let started = thread.spawn(move || run(&device, &receiver));
            started.map_err(|error| {
                DeviceError::new(DeviceErrorKind::Driver, operation).with_source(error)
            })?;
            wishes.insert(sender)
        };
        // The thread ends only after this sender is gone.
        let _ = sender.send(Arc::clone(signal));
        Ok(())
    }
}

fn run(device: &wgpu::Device, wishes: &Receiver<Arc<Signal>>) {
    while let Ok(signal) = wishes.recv() {
        if signal.get().is_some() {
            continue;
        }
        let polled = device.poll(wgpu::PollType::wait_indefinitely());
        // All submitted work is done, or none ever will be: a callback that has not come by now
        // will not come.
        let outcome = polled.map(drop).map_err(|error| error.to_string());
        signal.set(outcome);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_is_set_once() {
        let signal = Signal::default();
        let mut cx = Context::from_waker(Waker::noop());
        assert!(signal.poll(&mut cx).is_pending() && signal.get().is_none());
        signal.set(Ok(()));
        signal.set(Err("later".to_owned()));
        assert_eq!(signal.get(), Some(Ok(())));
        assert_eq!(signal.poll(&mut cx), Poll::Ready(Ok(())));
    }
}
