//! A hidden tokio runtime: its one thread drives sockets and timers. The caller's thread polls its
//! own future and is parked in between. A future that computes for long within one poll runs on a
//! thread of the runtime's pool.
use std::io;
use std::panic;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Instant;

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

/// A runtime, which ends with this value.
#[derive(Debug)]
pub(super) struct Runtime {
    handle: Handle,
    /// Ends the thread when it is dropped.
    _running: oneshot::Sender<()>,
}

impl Runtime {
    /// Starts the thread.
    pub(super) fn start() -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (running, ended) = oneshot::channel::<()>();
        thread::Builder::new().name("kv-tier object".to_owned()).spawn(move || {
            // An error: the sender is gone.
            let _ = runtime.block_on(ended);
            // Without waiting for a look-up of a name, which may take long.
            runtime.shutdown_background();
        })?;
        Ok(Self { handle, _running: running })
    }

    /// Runs a future on this thread until it is done or the deadline has passed. It may borrow from
    /// the caller, as it is dropped before this returns.
    ///
    /// The deadline is checked between polls: a future that computes for long in one belongs in
    /// [`Self::run_apart`].
    pub(super) fn run<F: Future>(&self, deadline: Instant, future: F) -> Option<F::Output> {
        run_on(&self.handle, deadline, future)
    }

    /// Runs a future on a thread of the pool until it is done or the deadline has passed. Returns
    /// at the deadline even within a poll, after which the future is dropped.
    ///
    /// # Panics
    /// If the future panics.
    pub(super) fn run_apart<F>(&self, deadline: Instant, future: F) -> Option<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        let handle = self.handle.clone();
        let task = self.handle.spawn_blocking(move || run_on(&handle, deadline, future));
        match self.run(deadline, task)? {
            Ok(output) => output,
            Err(error) => panic::resume_unwind(error.into_panic()),
        }
    }
}

fn run_on<F: Future>(handle: &Handle, deadline: Instant, future: F) -> Option<F::Output> {
    let _context = handle.enter();
    let waker = Waker::from(Arc::new(Parked(thread::current())));
    let mut context = Context::from_waker(&waker);
    // The thread may belong to another runtime, in whose task this call is one long poll: its
    // budget would never be filled up.
    let mut future = pin!(tokio::task::unconstrained(future));
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return Some(output);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return None;
        }
        thread::park_timeout(left);
    }
}

/// A thread that waits for its future.
struct Parked(Thread);

impl Wake for Parked {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}
