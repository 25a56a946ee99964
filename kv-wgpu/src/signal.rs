//! One-time signals, and a thread that polls the device for tasks.
//!
//! A device runs its callbacks only while some thread polls it. A thread that blocks on a signal
//! polls the device itself; [`Poller`] has a thread that does so for tasks, which may not block.
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::thread;

use kv_core::error::{DeviceError, DeviceErrorKind};

/// A one-time event that a callback of the device sets.
#[derive(Debug, Default)]
pub(crate) struct Signal(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    done: Option<Result<(), String>>,
    wakers: Vec<Waker>,
}

impl Signal {
    /// Sets it and wakes the waiting tasks.
    pub(crate) fn set(&self, how: Result<(), String>) {
        let wakers = {
            let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            state.done.get_or_insert(how);
            std::mem::take(&mut state.wakers)
        };
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Returns the outcome, if it is set.
    pub(crate) fn get(&self) -> Option<Result<(), String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).done.clone()
    }

    /// Returns the outcome, or registers the task to be woken when it is set.
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

/// A thread that polls the device while tasks wait. It starts with the first request and ends when
/// this is dropped.
#[derive(Debug)]
pub(crate) struct Poller {
    device: wgpu::Device,
    requests: Mutex<Option<Sender<Arc<Signal>>>>,
}

impl Poller {
    pub(crate) fn new(device: &wgpu::Device) -> Self {
        Self { device: device.clone(), requests: Mutex::new(None) }
    }

    /// Makes the thread set `signal` once the work submitted so far is done.
    ///
    /// # Errors
    /// `Driver` where the thread cannot be started.
    pub(crate) fn request(
        &self,
        signal: &Arc<Signal>,
        operation: &'static str,
    ) -> Result<(), DeviceError> {
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        let sender = if let Some(sender) = requests.as_ref() {
            sender
        } else {
            let (sender, receiver) = channel();
            let device = self.device.clone();
            let thread = thread::Builder::new().name("kv-wgpu polls".into());
            let started = thread.spawn(move || run(&device, &receiver));
            started.map_err(|error| {
                DeviceError::new(DeviceErrorKind::Driver, operation).with_source(error)
            })?;
            requests.insert(sender)
        };
        // The thread outlives this sender, so the send succeeds.
        let _ = sender.send(Arc::clone(signal));
        Ok(())
    }
}

fn run(device: &wgpu::Device, requests: &Receiver<Arc<Signal>>) {
    while let Ok(signal) = requests.recv() {
        if signal.get().is_some() {
            continue;
        }
        let polled = device.poll(wgpu::PollType::wait_indefinitely());
        // All submitted work is done now, or will never be: a callback that has not run by now will
        // not run.
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
