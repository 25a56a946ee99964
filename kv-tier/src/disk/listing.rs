//! The listing of a folder, on a thread: it rebuilds the index, corrects the count that processes
//! share, and sweeps half-written files of killed processes. No file is read. The thread also makes
//! room for processes that may not evict.
// Reads bytes that may be anything.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
use std::ops::ControlFlow;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::fs::{self, AtFlags};

use super::files::{charge, sweep};
use super::ledger::Ledger;
use super::walk::{self, Entry};
use super::{Inner, path};
use crate::ChunkAddress;

/// The progress of the listing of a folder.
#[derive(Debug, Default)]
pub(super) struct State {
    is_wanted: bool,
    /// Whether a listing has come to its end.
    pub(super) is_complete: bool,
    is_stopped: bool,
}

impl Inner {
    /// Asks the thread for a listing.
    pub(super) fn request_listing(&self) {
        self.listing_state().is_wanted = true;
        self.listing_changed.notify_all();
    }

    /// Ends the thread after the folder that it lists.
    pub(super) fn stop_listing(&self) {
        self.is_stopping.store(true, Ordering::Relaxed);
        self.listing_state().is_stopped = true;
        self.listing_changed.notify_all();
    }

    /// Waits until the folder was listed; returns whether it was.
    pub(super) fn wait_listed(&self, deadline: Instant) -> bool {
        let mut state = self.listing_state();
        while !state.is_complete {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else { return false };
            let waited = self.listing_changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

/// Starts the thread, with a first listing.
pub(super) fn start(inner: &Arc<Inner>) -> std::io::Result<JoinHandle<()>> {
    inner.request_listing();
    let inner = Arc::clone(inner);
    thread::Builder::new().name("kv-tier-list".into()).spawn(move || run(&inner))
}

fn run(inner: &Inner) {
    let mut listed = None::<Instant>;
    loop {
        // Requests come with every refused write while the folder is full.
        let may_list = listed.is_none_or(|listed| listed.elapsed() >= PAUSE);
        let mut state = inner.listing_state();
        if state.is_stopped {
            return;
        }
        if may_list && state.is_wanted {
            state.is_wanted = false;
            drop(state);
            list(inner);
            listed = Some(Instant::now());
            inner.listing_state().is_complete = !inner.is_stopping.load(Ordering::Relaxed);
            inner.listing_changed.notify_all();
            continue;
        }
        let waited = inner.listing_changed.wait_timeout(state, TICK);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
        if let Some(ledger) = &inner.ledger {
            let _ = inner.serve(ledger, soon());
        }
    }
}

fn list(inner: &Inner) {
    let before = inner.ledger.as_ref().and_then(|ledger| finished(inner, ledger));
    inner.index().begin_listing();
    if !walk(inner) {
        // Unseen files may exist: neither the index nor the count is corrected.
        return;
    }
    let Some(ledger) = &inner.ledger else {
        inner.index().end_listing();
        return;
    };
    let deadline = soon();
    if let (Some(before), Ok(_excluded)) = (before, ledger.exclude(deadline)) {
        // No process writes or removes now. Files that others finished since the beginning may have
        // been missed; they are counted again where they were not.
        let _ = ledger.change(deadline, |usage| {
            let mut index = inner.index();
            index.end_listing();
            let own = inner.finished.load(Ordering::Relaxed);
            let others = usage.finished.wrapping_sub(before.0);
            let others = others.saturating_sub(own.wrapping_sub(before.1));
            usage.held = Some(index.charged().saturating_add(others));
        });
    }
    let _ = inner.trim(ledger, soon());
}

/// Returns the bytes that were finished, by all and by this process.
fn finished(inner: &Inner, ledger: &Ledger) -> Option<(u64, u64)> {
    let finished =
        |usage: &mut super::ledger::Usage| (usage.finished, inner.finished.load(Ordering::Relaxed));
    ledger.change(soon(), finished).ok()
}

/// Lists all files; returns whether every folder could be listed.
fn walk(inner: &Inner) -> bool {
    let is_wanted = || !inner.is_stopping.load(Ordering::Relaxed);
    let walked = walk::walk(inner.files.root(), &is_wanted, &mut |entry| {
        match entry.chunk() {
            Some(chunk) => file(inner, chunk, entry),
            None => sweep_temporary(inner, entry),
        }
        ControlFlow::Continue(())
    });
    !walked.is_stopped && walked.failure.is_none()
}

fn file(inner: &Inner, chunk: ChunkAddress, entry: &Entry<'_>) {
    // Under the lock, so that a file which is removed meanwhile is not added after that.
    let mut index = inner.index();
    let Ok(stat) = fs::statat(entry.folder, entry.name, AtFlags::SYMLINK_NOFOLLOW) else { return };
    let status = super::files::status(&stat);
    if status.is_file {
        index.insert_listed(chunk, charge(status.length), status.modified);
    }
}

fn sweep_temporary(inner: &Inner, entry: &Entry<'_>) {
    let name = entry.name.to_bytes();
    let is_own = match entry.parents {
        [] => name.starts_with(path::OWN.as_bytes()),
        [_, _, _] => true,
        _ => false,
    };
    if is_own && name.ends_with(path::TEMPORARY.as_bytes()) && inner.ledger.is_some() {
        sweep(entry.folder, entry.name);
    }
}

fn soon() -> Instant {
    let now = Instant::now();
    now.checked_add(PATIENCE).unwrap_or(now)
}

/// Interval at which the requests of other processes are checked.
const TICK: Duration = Duration::from_millis(100);
/// Pause between two listings.
const PAUSE: Duration = Duration::from_secs(1);
/// Longest time that a listing waits for locks.
const PATIENCE: Duration = Duration::from_secs(2);
