//! Prefill here, decode there: exports of a sequence's chunks to a store, and prompts that wait for
//! exports of another engine.
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use kv_core::backend::Backend;
use kv_core::eviction::Priority;
use kv_core::invariant::Invariant;
use kv_core::num::{to_u32, to_usize};
use kv_core::reuse::PrefixProbe;
use kv_core::{KvCache, SequenceId, StartOptions};

use super::done::{Done, Report};
use super::links::{Complete, Source};
use super::prefetch::GRACE;
use super::snapshots::device_chunk;
use super::{GROUP, PrefetchId, STORE, Tiers, Wait};
use crate::chain::{Chain, ChunkAt, chunk_of};
use crate::chunk::Verified;
use crate::handoff::{Handoff, HandoffError, HandoffGroup};
use crate::name::ChunkName;
use crate::policy::WritePolicy;
use crate::store::after;

/// Attempts to write one chunk.
const ATTEMPTS: u32 = 3;
/// Pause before a failed attempt is repeated.
const PAUSE: Duration = Duration::from_millis(50);

/// An export of a sequence to a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ExportId(u64);

/// A handoff, and the export of its chunks.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Export {
    /// Names the export for [`TieredCache::export_state`](crate::TieredCache::export_state).
    pub id: ExportId,
    /// The message to the decode engine.
    pub handoff: Handoff,
}

/// The progress of an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExportState {
    /// Chunks are being copied and written.
    OnTheWay {
        /// Chunks that the store does not have yet.
        chunks: u32,
    },
    /// The store has all chunks.
    Written,
    /// A chunk cannot be written: the store fails, or its blocks have left the device. The decode
    /// engine computes what it lacks, and need not be told to wait.
    Failed,
}

/// All exports whose time has not passed.
#[derive(Debug, Default)]
pub(super) struct Exports {
    next: u64,
    all: Vec<Exported>,
}

#[derive(Debug)]
struct Exported {
    id: u64,
    store: usize,
    until: Instant,
    sequence: SequenceId,
    probe: PrefixProbe,
    chains: Vec<Chain>,
    /// Chunks that the store is not known to have.
    left: Vec<Left>,
    has_failed: bool,
}

#[derive(Debug)]
struct Left {
    group: usize,
    chunk: ChunkAt,
    /// Not before this time.
    next: Instant,
    /// Whether the store is being called for it.
    is_sent: bool,
    /// Whether its blocks were queued for a copy.
    is_copied: bool,
    attempts: u32,
}

impl Exports {
    /// Ends the exports of chunks that are forgotten, by the names of root and chunk.
    pub(super) fn forget(&mut self, is_forgotten: impl Fn(&ChunkName, &ChunkName) -> bool) {
        for of in &mut self.all {
            let (chains, probe) = (&of.chains, &of.probe);
            let is_lost = |at: &Left| {
                let chain = chains.get(at.group).invariant(GROUP);
                is_forgotten(&chain.root().name(), &chain.name(probe, at.chunk))
            };
            of.has_failed |= of.left.iter().any(is_lost);
        }
    }
}

impl<B: Backend> Tiers<B> {
    /// Does what [`TieredCache::export_prefill`](crate::TieredCache::export_prefill) does.
    pub(crate) fn export_prefill(
        &mut self,
        cache: &KvCache<B>,
        sequence: SequenceId,
        store: usize,
        time: Duration,
    ) -> Result<Export, HandoffError> {
        let stores = self.stores.len();
        let lane = self.stores.get(store);
        let can_write =
            |lane: &super::StoreLane| lane.store.options().write.policy() != WritePolicy::Never;
        if !lane.is_some_and(can_write) {
            return Err(HandoffError::NoStore { store, stores });
        }
        let text = cache.state().sequence_text(sequence).ok_or(HandoffError::NoSequence)?;
        let options = StartOptions::default().with_salt(text.salt).with_contents(&text.contents);
        let options = text.adapter.map_or(options, |adapter| options.with_adapter(adapter));
        let (probe, chains) = self.whole_chains(cache, &text.tokens, &options)?;
        let end = |chain: &Chain| {
            chain.len().checked_sub(1).map_or(0, |last| chain.spec().span(last).end)
        };
        let has_states = !cache.state().spec().states().is_empty();
        let tokens = if has_states {
            // Rows are of use up to a state.
            cache.state().find_snapshots(&probe, probe.limit()).map_or(0, |(len, _)| len)
        } else {
            probe.hit(chains.iter().map(end).min().unwrap_or(0))
        };
        let groups = chains.iter().map(|chain| {
            let chunks = if has_states { chain.chunks_within(tokens) } else { chain.len() };
            let last = if chain.spec().is_of_states() && tokens > 0 {
                chain.name(&probe, ChunkAt::Upto(tokens))
            } else {
                chain.last_name(chunks)
            };
            HandoffGroup { root: chain.root().name(), chunks, last }
        });
        let (clock, now) = (SystemTime::now(), Instant::now());
        // Waits that no clock reaches are cut off alike.
        let until = after(now, time);
        let time = until.saturating_duration_since(now);
        let handed = clock.checked_add(time).unwrap_or(clock);
        let handoff = Handoff::new(tokens, handed, groups.collect());
        let mut left = Vec::new();
        for (group, chain) in chains.iter().enumerate() {
            let blocks = probe.needed_indices(chain.group(), tokens).into_iter().flatten();
            let blocks = blocks.filter(|_| !chain.spec().is_of_states());
            let chunks = blocks.map(|block| chunk_of(chain.spec(), block));
            let whole = chunks.filter(|chunk| !has_states || *chunk < chain.chunks_within(tokens));
            let whole: BTreeSet<ChunkAt> = whole.map(ChunkAt::Whole).collect();
            let last = chain.last_block(&probe, ChunkAt::Upto(tokens)).filter(|_| has_states);
            let tail = last.filter(|last| !chain.ends_chunk(last));
            let chunks = whole.into_iter().chain(tail.map(|_| ChunkAt::Upto(tokens)));
            left.extend(chunks.map(|chunk| Left {
                group,
                chunk,
                next: now,
                is_sent: false,
                is_copied: false,
                attempts: 0,
            }));
        }
        let id = self.exports.next;
        self.exports.next = id + 1;
        let has_failed = false;
        let of = Exported { id, store, until, sequence, probe, chains, left, has_failed };
        self.exports.all.push(of);
        self.advance_exports();
        Ok(Export { id: ExportId(id), handoff })
    }

    /// Does what [`TieredCache::export_state`](crate::TieredCache::export_state) does.
    pub(crate) fn export_state(&self, export: ExportId) -> Option<ExportState> {
        let of = self.exports.all.iter().find(|of| of.id == export.0)?;
        if of.has_failed {
            return Some(ExportState::Failed);
        }
        let chunks = to_u32(of.left.len());
        Some(if chunks == 0 { ExportState::Written } else { ExportState::OnTheWay { chunks } })
    }

    /// Does what [`TieredCache::import_prefill`](crate::TieredCache::import_prefill) does.
    pub(crate) fn import_prefill(
        &mut self,
        cache: &KvCache<B>,
        handoff: &Handoff,
        prompt: &[u32],
        options: &StartOptions<'_>,
    ) -> Result<PrefetchId, HandoffError> {
        let (probe, chains) = self.whole_chains(cache, prompt, options)?;
        let (expected, got) = (chains.len(), handoff.groups().len());
        if expected != got {
            return Err(HandoffError::Groups { expected, got });
        }
        for (chain, of) in chains.iter().zip(handoff.groups()) {
            let (group, expected, got) = (chain.group(), chain.root().name(), of.root);
            if expected != got {
                return Err(HandoffError::Root { group, expected, got });
            }
        }
        let tokens = handoff.tokens();
        let has_prompt = |(chain, of): (&Chain, &HandoffGroup)| {
            let of_state = chain.spec().is_of_states() && tokens > 0;
            let state = Some(ChunkAt::Upto(tokens)).filter(|_| of_state);
            let state = state.filter(|at| chain.last_block(&probe, *at).is_some());
            let name =
                state.map_or_else(|| chain.last_name(of.chunks), |at| chain.name(&probe, at));
            of.chunks <= chain.len() && name == of.last
        };
        let is_shorter = prompt.len() < to_usize(handoff.tokens());
        if is_shorter || !chains.iter().zip(handoff.groups()).all(has_prompt) {
            return Err(HandoffError::Prompt);
        }
        let time = handoff.until().duration_since(SystemTime::now()).unwrap_or_default();
        if time.is_zero() {
            return Ok(self.prefetch_within(cache, prompt, options, Wait::None));
        }
        let prefetch = self.prefetch_within(cache, prompt, options, Wait::For(time));
        self.look_until(prefetch, after(Instant::now(), time), handoff.tokens());
        Ok(prefetch)
    }

    /// Names the whole chunks of a text, all of whose tokens count.
    fn whole_chains(
        &mut self,
        cache: &KvCache<B>,
        tokens: &[u32],
        options: &StartOptions<'_>,
    ) -> Result<(PrefixProbe, Vec<Chain>), HandoffError> {
        // The last token of a prompt is in none of its blocks.
        let mut prompt = tokens.to_vec();
        prompt.push(0);
        let options = options.with_backoff_blocks(0).with_reuse(true);
        let probe = cache.state().probe_keys(&prompt, &options);
        self.identity.adapter_digest(options.adapter())?;
        let chains = self.chains(cache, &probe, options.hint());
        Ok((probe, chains))
    }

    /// Goes on with the exports: sends chunks of host memory to their store, and queues others for
    /// a copy from the device.
    pub(super) fn advance_exports(&mut self) {
        if self.exports.all.is_empty() {
            return;
        }
        let now = Instant::now();
        self.exports.all.retain(|of| now < of.until);
        let mut exports = std::mem::take(&mut self.exports.all);
        for of in exports.iter_mut().filter(|of| !of.has_failed && !of.left.is_empty()) {
            self.advance_export(of, now);
        }
        self.exports.all = exports;
    }

    /// Queues the copies of exported states and of the rows before them that no whole chunk has.
    pub(super) fn copy_exported_states(&mut self, cache: &KvCache<B>) {
        for of in self.exports.all.iter_mut().filter(|of| !of.has_failed) {
            let Exported { sequence, probe, chains, left, .. } = of;
            for at in left.iter_mut().filter(|at| !at.is_sent && !at.is_copied) {
                let ChunkAt::Upto(_) = at.chunk else { continue };
                let chain = chains.get(at.group).invariant(GROUP);
                let tier = self.groups.get_mut(at.group).invariant(GROUP);
                let name = chain.name(probe, at.chunk);
                if tier.has_or_copies(&name) || tier.waiting.is_exported(&name) {
                    continue;
                }
                at.is_copied = true;
                let of_sequence = (Some(*sequence), Priority::default());
                let chunk = device_chunk(cache, (probe, chain), at.chunk, of_sequence);
                if let Some(chunk) = chunk {
                    tier.waiting.export(chunk);
                }
            }
        }
    }

    fn advance_export(&mut self, of: &mut Exported, now: Instant) {
        let Exported { id, store, probe, chains, left, .. } = of;
        for at in left.iter_mut().filter(|at| !at.is_sent && now >= at.next) {
            let chain = chains.get(at.group).invariant(GROUP);
            let name = chain.name(probe, at.chunk);
            let tier = self.groups.get_mut(at.group).invariant(GROUP);
            let entry = tier.host.get(&name);
            let record = entry.map(|entry| Arc::clone(&entry.record));
            let chunk = entry.map(|entry| entry.chunk.clone());
            if chunk.is_none() {
                let last = chain.last_block(probe, at.chunk);
                let is_waiting =
                    last.is_some_and(|last| tier.waiting.contains(last.index, last.key));
                if is_waiting
                    || tier.encoding.contains_key(&name)
                    || tier.waiting.is_exported(&name)
                {
                    continue;
                }
                if !at.is_copied
                    && let ChunkAt::Upto(_) = at.chunk
                {
                    continue; // It is copied between steps.
                }
                let blocks = device_blocks(probe, chain, at.chunk).filter(|_| !at.is_copied);
                if let Some(blocks) = blocks {
                    at.is_copied = true;
                    let record = chain.record(probe, at.chunk);
                    tier.waiting.export(Complete { record, blocks });
                    continue;
                }
            }
            let lane = self.stores.get_mut(*store).invariant("the store of an export is there");
            if !lane.has_room() {
                break;
            }
            let written = lane.begin(record.clone());
            at.is_sent = true;
            let asked = Arc::clone(&lane.store);
            let address = chain.address(probe, at.chunk);
            let (export, store, group, number) = (*id, *store, at.group, at.chunk);
            let exported = move |is_written| Done::Exported {
                export,
                store,
                number: written,
                at: (group, number),
                is_written,
            };
            let options = lane.store.options();
            // Deadlines may be any times.
            let limit = options.lookup_deadline.saturating_add(options.write_deadline);
            let mut report = Report::new(&self.sender, exported(false));
            lane.lane.push(limit.saturating_add(GRACE), move || {
                // It may have been written by its store's rule, or by another engine.
                let found = asked.begin_lookup();
                let found = found.map(|permit| asked.lookup(permit, &[address], true));
                let is_there = found.is_some_and(|found| found.contains(&true));
                let write = |chunk: &Verified<_>| {
                    let permit = asked.begin_write();
                    permit
                        .is_some_and(|permit| asked.write(permit, &address, chunk.bytes()).is_ok())
                };
                let is_kept = |_: &&Verified<_>| !record.is_some_and(|of| of.is_forgotten());
                let is_written = is_there || chunk.as_ref().filter(is_kept).is_some_and(write);
                // Its memory is free before the tiers look for room.
                drop(chunk);
                report.set(exported(is_written));
            });
        }
    }

    pub(super) fn note_exported(
        &mut self,
        export: u64,
        (store, number): (usize, u64),
        (group, chunk): (usize, ChunkAt),
        is_written: bool,
    ) {
        self.stores.get_mut(store).invariant(STORE).end(number);
        let Some(of) = self.exports.all.iter_mut().find(|of| of.id == export) else { return };
        let place = of.left.iter().position(|at| (at.group, at.chunk) == (group, chunk));
        let Some(place) = place else { return };
        if is_written {
            of.left.swap_remove(place);
            return;
        }
        let at = of.left.get_mut(place).invariant("the place was found");
        (at.is_sent, at.is_copied) = (false, false);
        at.next = after(Instant::now(), PAUSE);
        at.attempts += 1;
        of.has_failed |= at.attempts >= ATTEMPTS;
    }
}

/// Returns the blocks of a whole chunk, if all are on the device.
fn device_blocks(probe: &PrefixProbe, chain: &Chain, chunk: ChunkAt) -> Option<Box<[Source]>> {
    let blocks = chain.blocks(probe, chunk);
    blocks.map(|block| Some(Source::Cached(block.cached?, block.key))).collect()
}
