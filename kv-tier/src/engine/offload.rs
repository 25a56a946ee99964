//! From the device to host memory.
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kv_core::backend::{Backend, HostPool, PendingChunk, Queue};
use kv_core::events::Tier;
use kv_core::invariant::Invariant;
use kv_core::reuse::BlockHold;
use kv_core::{CacheError, KvCache};

use super::announce::HOST;
use super::done::{Done, Report};
use super::group::{self, Copying};
use super::host::Entry;
use super::links::{Complete, Source};
use super::{ChunkOf, FenceOf, GROUP, TierError, Tiers};
use crate::chunk::{Verified, encode_header, verify, zero_after};
use crate::policy::ChunkEvent;
use crate::record::Record;

impl<B: Backend> Tiers<B> {
    /// Begins to copy complete chunks from the device, as far as host memory has room. Their blocks
    /// are held only here: a step that takes one later waits for its copy, on the device.
    pub(super) fn begin_copies(&mut self, cache: &mut KvCache<B>) -> Result<(), TierError> {
        let mut fence = None;
        for group in 0..self.groups.len() {
            let before = self.groups.get(group).invariant(GROUP).copying.len();
            let mut held = Vec::new();
            let begun = self.begin_copies_of(cache, group, (&mut fence, &mut held));
            let released = self.release(cache, group, (before, held));
            begun.and(released)?;
        }
        Ok(())
    }

    /// Begins the copies of one group. The blocks of those that were recorded are in `held` then,
    /// also after a failure.
    fn begin_copies_of(
        &mut self,
        cache: &mut KvCache<B>,
        group: usize,
        (fence, held): (&mut Option<FenceOf<B>>, &mut Vec<BlockHold>),
    ) -> Result<(), TierError> {
        loop {
            let of = self.groups.get_mut(group).invariant(GROUP);
            let Some(name) = of.waiting.next(&of.links) else { break };
            let is_here = name.is_none_or(|name| of.has_or_copies(&name));
            if is_here {
                of.waiting.take_next();
                let missed = u64::from(name.is_none());
                self.stats.offload_missed += missed;
                continue;
            }
            if of.copying.len() >= of.copying_max {
                break;
            }
            let Some(chunk) = self.take_chunk(group) else { break };
            let of = self.groups.get_mut(group).invariant(GROUP);
            let pool = cache.state().pool(of.spec.group()).invariant(GROUP);
            let complete = of.waiting.take_next().and_then(|next| next.complete(&of.links, pool));
            let begun = held.len();
            let complete = match complete {
                Some(complete) if hold(cache, &complete, held)? => complete,
                _ => {
                    self.stats.offload_missed += 1;
                    continue;
                }
            };
            let blocks = held.iter().skip(begun).map(BlockHold::block).collect::<Vec<_>>();
            let after = match fence {
                Some(fence) => fence,
                None => fence.insert(cache.queue_mut().submit()?),
            };
            let storage = cache.storage(of.spec.group()).invariant(GROUP).view();
            let pending = of.pool.copy_out(after, storage, &blocks, chunk, 0)?;
            let record = Arc::new(complete.record);
            of.encoding.insert(record.name, Arc::clone(&record));
            of.copying.push(Copying { pending, record });
        }
        Ok(())
    }

    /// Releases the blocks of the copies of a group from `first` on: later writes to these blocks
    /// wait for the copies. Without a fence to wait for, the copies are given up.
    fn release(
        &mut self,
        cache: &mut KvCache<B>,
        group: usize,
        (first, held): (usize, Vec<BlockHold>),
    ) -> Result<(), TierError> {
        if held.is_empty() {
            return Ok(());
        }
        let of = self.groups.get_mut(group).invariant(GROUP);
        let copied = of.pool.fence();
        if copied.is_err() {
            for Copying { record, .. } in of.copying.drain(first..) {
                of.encoding.remove(&record.name);
            }
        }
        let released = each(held, |hold| match &copied {
            Ok(copied) => cache.release_hold_after(hold, copied),
            Err(_) => cache.release_hold(hold),
        });
        copied.map(drop)?;
        Ok(released?)
    }

    /// Lets the encoder complete the chunks that were copied.
    pub(super) fn finish_copies(&mut self) -> Result<(), TierError> {
        let mut context = Context::from_waker(Waker::noop());
        let mut failure = None;
        for group in &mut self.groups {
            let mut at = 0;
            while let Some(copying) = group.copying.get_mut(at) {
                let Poll::Ready(copied) = copying.pending.poll(&mut context) else {
                    at += 1;
                    continue;
                };
                let Copying { record, .. } = group.copying.swap_remove(at);
                match copied {
                    Ok(chunk) => {
                        let none = Done::Encoded { record: Arc::clone(&record), chunk: None };
                        let mut report = Report::new(&self.sender, none);
                        self.encoder.push_urgent(Duration::MAX, move || {
                            let chunk = encode::<B>(&record, chunk);
                            report.set(Done::Encoded { record, chunk });
                        });
                    }
                    Err(error) => {
                        group.encoding.remove(&record.name);
                        failure = failure.or(Some(error));
                    }
                }
            }
        }
        failure.map_or(Ok(()), |error| Err(error.into()))
    }

    pub(super) fn note_encoded(
        &mut self,
        record: &Arc<Record>,
        chunk: Option<Verified<Arc<ChunkOf<B>>>>,
    ) {
        let of = group::of_mut(&mut self.groups, record.group());
        of.encoding.remove(&record.name);
        if record.is_forgotten() {
            return;
        }
        let Some(chunk) = chunk else {
            self.stats.unnamed_blocks += 1;
            return;
        };
        self.stats.offloaded += 1;
        if of.host.insert(chunk, Arc::clone(record), (0, self.prompted.hint(&record.name))) {
            self.announcements.has(Tier::Host, record, HOST);
        }
        self.decide_writes(record, ChunkEvent::Published);
        if !self.keeps_host {
            self.decide_writes(record, ChunkEvent::Left);
        }
        if self.is_flushing {
            self.decide_writes(record, ChunkEvent::Flush);
        }
    }

    /// Takes an unused chunk of host memory, or makes room for one. `None` if there is none now: it
    /// may have to be written first.
    pub(super) fn take_chunk(&mut self, group: usize) -> Option<ChunkOf<B>> {
        let of = self.groups.get_mut(group).invariant(GROUP);
        if let Some(chunk) = of.pool.take() {
            return Some(chunk);
        }
        // Room is on its way.
        if of.is_leaving() {
            return None;
        }
        let is_unused = |entry: &Entry<_>| Arc::strong_count(entry.chunk.get_ref()) == 1;
        let stores = &self.stores;
        let entry = if self.is_flushing {
            let must_stay = |entry: &Entry<_>| Self::must_stay(stores, &entry.record);
            of.host.remove_any(|entry| is_unused(entry) && !must_stay(entry))?
        } else {
            of.host.evict(is_unused)?
        };
        self.stats.host_evictions += 1;
        self.announcements.lacks(Tier::Host, &entry.record.name, HOST);
        self.write_left(&entry);
        drop(entry);
        self.groups.get_mut(group).invariant(GROUP).pool.take()
    }
}

/// Adds the blocks of a chunk to the holds; `false`, and none added, if one has left the device.
fn hold<B: Backend>(
    cache: &mut KvCache<B>,
    complete: &Complete,
    held: &mut Vec<BlockHold>,
) -> Result<bool, CacheError> {
    let (group, before) = (complete.record.group(), held.len());
    for source in &complete.blocks {
        let block = match *source {
            Source::Cached(block, key) => cache.hold_block(group, block, key)?,
            // It may have ended since.
            Source::OfSequence(sequence, _) if !cache.state().contains(sequence) => None,
            Source::OfSequence(sequence, index) => cache.hold_entry(sequence, group, index)?,
        };
        match block {
            Some(block) => held.push(block),
            None => {
                return each(held.drain(before..), |hold| cache.release_hold(hold)).map(|()| false);
            }
        }
    }
    Ok(true)
}

/// Calls `release` with every hold, also after a failure.
fn each(
    holds: impl IntoIterator<Item = BlockHold>,
    mut release: impl FnMut(BlockHold) -> Result<(), CacheError>,
) -> Result<(), CacheError> {
    let mut result = Ok(());
    for hold in holds {
        let released = release(hold);
        result = result.and(released);
    }
    result
}

/// Completes a chunk that was copied; `None` if it has more contents of placeholder tokens than a
/// header has room for.
fn encode<B: Backend>(record: &Record, mut chunk: ChunkOf<B>) -> Option<Verified<Arc<ChunkOf<B>>>> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    if record.is_tail() {
        zero_after(record.root.spec(), chunk.as_mut(), record.index, record.end);
    }
    encode_header(chunk.as_mut(), &record.expectation(), now).ok()?;
    verify(Arc::new(chunk), &record.expectation()).ok()
}
