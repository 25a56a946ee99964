//! The results of jobs that ran on threads.
use std::sync::Arc;
use std::sync::mpsc::Sender;

use super::guarded::{NotWritten, Read};
use crate::chain::ChunkAt;
use crate::chunk::Verified;
use crate::record::Record;
use crate::store::{Put, StoreError};

/// Sends the result of a job when the job ends, also if the job was discarded.
#[derive(Debug)]
pub(super) struct Report<C> {
    sender: Sender<Done<C>>,
    /// The result of a discarded job, until the job sets its own.
    done: Option<Done<C>>,
}

impl<C> Report<C> {
    pub(super) fn new(sender: &Sender<Done<C>>, done: Done<C>) -> Self {
        Self { sender: sender.clone(), done: Some(done) }
    }
    pub(super) fn set(&mut self, done: Done<C>) {
        self.done = Some(done);
    }
}

impl<C> Drop for Report<C> {
    fn drop(&mut self) {
        // Nobody listens once the tiers are gone.
        let _ = self.done.take().map(|done| self.sender.send(done));
    }
}

/// The result of a job.
#[derive(Debug)]
pub(super) enum Done<C> {
    Encoded {
        record: Arc<Record>,
        chunk: Option<Verified<Arc<C>>>,
    },
    Found {
        prefetch: u64,
        store: usize,
        group: usize,
        chunks: Vec<ChunkAt>,
        found: Vec<bool>,
    },
    Read {
        record: Arc<Record>,
        store: usize,
        read: Read<C>,
    },
    Written {
        record: Arc<Record>,
        store: usize,
        number: u64,
        put: Result<Put, NotWritten>,
        left: bool,
    },
    Removed {
        call: u64,
        store: usize,
        removed: Result<(), StoreError>,
    },
    Exported {
        export: u64,
        store: usize,
        number: u64,
        at: (usize, ChunkAt),
        is_written: bool,
    },
}
