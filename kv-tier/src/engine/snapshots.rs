//! Recurrent states: which snapshots to copy to host memory, and which to look for.
//!
//! A snapshot is of use only with all rows before it. Those of whole chunks are copied as they are
//! published; the others go with the snapshot, in a *tail* of each group of rows: a chunk that ends
//! where the snapshot does. While a sequence writes to the block in which the snapshot ends, the
//! block cannot be read: the snapshot waits until the block is full or the sequence ends.
use std::collections::BTreeSet;

use kv_core::backend::Backend;
use kv_core::eviction::Priority;
use kv_core::invariant::Invariant;
use kv_core::num::{to_u32, to_usize};
use kv_core::reuse::{BlockKey, PrefixProbe};
use kv_core::{BlockId, GroupId, KvCache, SequenceId, StartOptions};

use super::links::{Complete, Source};
use super::prefetch::Prefetch;
use super::search::StateSearch;
use super::{ChunkOf, GROUP, Tiers};
use crate::chain::{Chain, ChunkAt, with_state};
use crate::record::Record;

/// The snapshots on the device that wait for their copy to host memory. They leave with the
/// device's, so that their number is bounded.
#[derive(Debug, Default)]
pub(super) struct Snapshots {
    waiting: Vec<Waiting>,
    /// Whether one could be copied now and waits for others.
    is_behind: bool,
}

/// A snapshot that waits for its copy.
#[derive(Debug)]
struct Waiting {
    group: GroupId,
    block: BlockId,
    key: BlockKey,
    /// The text behind which it is, once it was looked at.
    text: Option<(PrefixProbe, u32)>,
}

impl Snapshots {
    pub(super) fn push(&mut self, group: GroupId, block: BlockId, key: BlockKey) {
        if !self.waiting.iter().any(|of| (of.group, of.key) == (group, key)) {
            self.waiting.push(Waiting { group, block, key, text: None });
        }
    }

    /// Takes out a snapshot that has left the device; returns whether it waited.
    pub(super) fn remove(&mut self, group: GroupId, key: BlockKey) -> bool {
        let before = self.waiting.len();
        self.waiting.retain(|of| (of.group, of.key) != (group, key));
        self.waiting.len() < before
    }

    pub(super) fn is_behind(&self) -> bool {
        self.is_behind
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}

/// The progress of a snapshot that waits.
enum Progress {
    /// It goes to host memory, or is there.
    Done,
    /// Its copy, or one before, waits for room.
    Behind,
    /// The sequence that has it still writes to the block before it.
    Waits,
    /// Rows before it have left the device.
    Missed,
    /// Its chunk has no name.
    Unnamed,
}

/// Chunks of a group that are queued for a copy before more snapshots are looked at.
const QUEUED: usize = 16;

impl<B: Backend> Tiers<B> {
    /// Queues the copies of snapshots whose rows can be read.
    pub(super) fn follow_snapshots(&mut self, cache: &KvCache<B>) {
        let mut waiting = std::mem::take(&mut self.snapshots.waiting);
        self.snapshots.is_behind = false;
        waiting.retain_mut(|of| match self.follow_snapshot(cache, of) {
            Progress::Done => false,
            Progress::Waits => true,
            Progress::Behind => {
                self.snapshots.is_behind = true;
                true
            }
            Progress::Missed => {
                self.stats.offload_missed += 1;
                false
            }
            Progress::Unnamed => {
                self.stats.unnamed_blocks += 1;
                false
            }
        });
        self.snapshots.waiting = waiting;
    }

    fn follow_snapshot(&mut self, cache: &KvCache<B>, of: &mut Waiting) -> Progress {
        if self.groups.iter().any(|group| group.waiting.num_exported() >= QUEUED) {
            return Progress::Behind;
        }
        let content = cache.state().pool(of.group).and_then(|pool| pool.content(of.block));
        let Some(content) = content.filter(|content| content.key == of.key) else {
            return Progress::Missed;
        };
        // The caller wants these evicted first: they are not worth a copy.
        if content.priority.level == 0 {
            return Progress::Done;
        }
        if let Some((probe, len)) = &of.text {
            let has_part = |group: GroupId| {
                let state = cache.state();
                probe.part(group, *len).is_none() || state.find_part(probe, group, *len).is_some()
            };
            let mut rows = self.groups.iter().map(|of| &of.spec).filter(|of| !of.is_of_states());
            if !rows.all(|spec| has_part(spec.group())) {
                return Progress::Waits;
            }
        }
        let Some((probe, len)) = text_of(cache, of) else { return Progress::Missed };
        let chains = self.name_chains(cache, &probe);
        if chains.is_empty() {
            return Progress::Unnamed;
        }
        of.text = Some((probe.clone(), len));
        let mut chunks = Vec::new();
        for (group, chain) in chains.iter().enumerate() {
            let is_of_states = chain.spec().is_of_states();
            if is_of_states && chain.group() != of.group {
                continue;
            }
            let Some(last) = chain.last_block(&probe, ChunkAt::Upto(len)) else {
                return Progress::Missed;
            };
            if !is_of_states && chain.ends_chunk(&last) {
                continue; // All rows are in whole chunks.
            }
            let name = chain.name(&probe, ChunkAt::Upto(len));
            let tier = self.groups.get_mut(group).invariant(GROUP);
            tier.host.touch(&name, self.prompted.hint(&name));
            if tier.has_or_copies(&name) || tier.waiting.is_exported(&name) {
                continue;
            }
            let at = ChunkAt::Upto(len);
            match device_chunk(cache, (&probe, chain), at, (None, content.priority)) {
                Some(chunk) => chunks.push((group, chunk)),
                None if cache.state().find_part(&probe, chain.group(), len).is_none() => {
                    return Progress::Waits;
                }
                None => return Progress::Missed,
            }
        }
        for (group, chunk) in chunks {
            self.groups.get_mut(group).invariant(GROUP).waiting.export(chunk);
        }
        Progress::Done
    }

    /// Returns the lengths of a prompt behind which states are on the device, in host memory or in
    /// a store, more than the prompt would reuse now, the longest first.
    fn lengths(&self, of: &Prefetch<ChunkOf<B>>) -> Vec<u32> {
        let states = of.chains.iter().enumerate().filter(|(_, chain)| chain.spec().is_of_states());
        let states: Vec<_> = states.map(|(group, _)| group).collect();
        let found = of.found.keys().chain(of.held.keys()).filter_map(|(group, at)| match at {
            ChunkAt::Upto(len) if states.contains(group) => Some(*len),
            _ => None,
        });
        let mut lengths: BTreeSet<u32> = found.chain(of.probe.states().iter().copied()).collect();
        if let Some(group) = states.first() {
            lengths.extend(self.lengths_in_host(of, *group));
        }
        let reused = of.probe.reused();
        lengths.into_iter().rev().take_while(|len| *len > reused).collect()
    }

    /// Returns the lengths of a prompt behind which host memory has states of a group.
    fn lengths_in_host(&self, of: &Prefetch<ChunkOf<B>>, group: usize) -> Vec<u32> {
        let chain = of.chains.get(group).invariant(GROUP);
        let host = &self.groups.get(group).invariant(GROUP).host;
        let blocks = of.probe.blocks(chain.spec().named_by());
        let mut lengths = Vec::new();
        let mut begin = 0;
        let ends = blocks.map(|block| block.end).chain([of.probe.limit()]);
        for (index, end) in (0..).zip(ends) {
            // Nearly every block ends without a state in it.
            if host.has_children(&chain.link_before(index)) {
                let all = begin + 1..=end;
                let at = ChunkAt::Upto;
                lengths.extend(all.filter(|len| host.contains(&chain.name(&of.probe, at(*len)))));
            }
            begin = end;
        }
        lengths
    }

    /// Returns the longest length of a prompt whose states and rows are on the
    /// device or in chunks that `has` says, and these chunks. All of them fit host memory at a
    /// time.
    fn best_state(
        &self,
        of: &Prefetch<ChunkOf<B>>,
        has: impl Fn((usize, ChunkAt)) -> bool,
    ) -> Option<(u32, Vec<(usize, ChunkAt)>)> {
        let mut lengths = self.lengths(of);
        loop {
            let has = |group, at| has((group, at));
            let all = lengths.iter().copied();
            let (len, chunks) = with_state(&of.probe, &of.chains, all, has)?;
            let mut numbered = self.groups.iter().enumerate();
            let count = |group| chunks.iter().filter(|(of, _)| *of == group).count();
            if numbered.all(|(group, tier)| count(group) <= tier.capacity) {
                return Some((len, chunks));
            }
            lengths.retain(|other| *other < len);
        }
    }

    /// Returns the longest length of a prompt whose states and rows can come, and their chunks.
    pub(super) fn state_to_come(
        &self,
        of: &Prefetch<ChunkOf<B>>,
    ) -> Option<(u32, Vec<(usize, ChunkAt)>)> {
        self.best_state(of, |at| of.found.contains_key(&at) || self.is_here(of, at))
    }

    fn is_here(&self, of: &Prefetch<ChunkOf<B>>, at: (usize, ChunkAt)) -> bool {
        of.held.contains_key(&at) || self.is_in_host(of, at)
    }

    /// Holds the chunks of the longest states whose chunks are in host memory.
    pub(super) fn hold_states(&self, of: &mut Prefetch<ChunkOf<B>>) {
        if of.search.is_none() {
            return;
        }
        let best = self.best_state(of, |at| self.is_here(of, at));
        for at in best.map_or_else(Vec::new, |(_, chunks)| chunks) {
            self.hold(of, at);
        }
    }

    /// Asks the stores for states of a prompt, or for the tails of those that they have; returns
    /// the number of answers to come, 0 once there is nothing left to ask.
    pub(super) fn look_up_states(&self, id: u64, of: &mut Prefetch<ChunkOf<B>>) -> usize {
        let Some(mut search) = of.search.take() else { return 0 };
        let best = self.state_to_come(of).map_or(of.probe.reused(), |(len, _)| len);
        let mut questions = self.ask_for_tails(id, of, &mut search, best);
        while questions == 0
            && let Some((before, batch)) = search.next_batch()
        {
            questions = self.ask_for_states(id, of, (before, &batch, best));
        }
        of.search = Some(search);
        questions
    }

    /// Asks for the tails of states that stores have, longer than `best`.
    fn ask_for_tails(
        &self,
        id: u64,
        of: &Prefetch<ChunkOf<B>>,
        search: &mut StateSearch,
        best: u32,
    ) -> usize {
        let mut lengths = self.lengths(of);
        lengths.retain(|len| *len > best && search.tails.insert(*len));
        let mut questions = 0;
        for (group, chain) in of.chains.iter().enumerate() {
            if chain.spec().is_of_states() {
                continue;
            }
            let is_asked = |len: &u32| {
                let last = chain.last_block(&of.probe, ChunkAt::Upto(*len));
                last.is_some_and(|last| !chain.ends_chunk(&last))
                    && !self.is_in_host(of, (group, ChunkAt::Upto(*len)))
            };
            let asked = lengths.iter().copied().filter(is_asked).map(ChunkAt::Upto);
            let asked: Vec<_> = asked.collect();
            for store in 0..self.stores.len() {
                questions += self.ask_for(id, of, (store, group), (&asked, false));
            }
        }
        questions
    }

    /// Asks for states behind some lengths, more than `best`; `before` were asked for already.
    fn ask_for_states(
        &self,
        id: u64,
        of: &Prefetch<ChunkOf<B>>,
        (before, lengths, best): (usize, &[u32], u32),
    ) -> usize {
        let mut questions = 0;
        for (store, lane) in self.stores.iter().enumerate() {
            let most = lane.store.options().state_lookups.saturating_sub(before);
            let lengths = lengths.iter().copied().take(most).filter(|len| *len > best);
            let lengths: Vec<_> = lengths.map(ChunkAt::Upto).collect();
            for (group, chain) in of.chains.iter().enumerate() {
                if chain.spec().is_of_states() {
                    let asked = lengths.iter().copied();
                    let asked = asked.filter(|at| !self.is_in_host(of, (group, *at)));
                    let asked: Vec<_> = asked.collect();
                    questions += self.ask_for(id, of, (store, group), (&asked, false));
                }
            }
        }
        questions
    }

    /// Returns the most lengths that a store is asked for.
    pub(super) fn state_lookups(&self) -> usize {
        let each = self.stores.iter().map(|lane| lane.store.options().state_lookups);
        each.max().unwrap_or(0)
    }
}

impl<C> Prefetch<C> {
    /// Returns the longest length whose states and rows are on the device or held, more than the
    /// prompt would reuse now, and the chunks to bring.
    pub(super) fn held_state(&self) -> Option<(u32, Vec<(usize, ChunkAt)>)> {
        let held = self.held.keys().filter_map(|(_, at)| match at {
            ChunkAt::Upto(len) => Some(*len),
            ChunkAt::Whole(_) => None,
        });
        let lengths: BTreeSet<u32> = held.chain(self.probe.states().iter().copied()).collect();
        let reused = self.probe.reused();
        let longer = lengths.into_iter().rev().take_while(|len| *len > reused);
        let has = |group, at| self.held.contains_key(&(group, at));
        with_state(&self.probe, &self.chains, longer, has)
    }
}

/// Probes the text behind which a snapshot is, all of whose tokens count; returns their number.
fn text_of<B: Backend>(cache: &KvCache<B>, of: &Waiting) -> Option<(PrefixProbe, u32)> {
    let (mut text, key) = cache.state().snapshot_text(of.group, of.block)?;
    let len = to_u32(text.tokens.len());
    // The last token of a prompt is in none of its blocks.
    text.tokens.push(0);
    let options = StartOptions::default().with_salt(text.salt).with_contents(&text.contents);
    let options = text.adapter.map_or(options, |adapter| options.with_adapter(adapter));
    let probe = cache.state().probe_keys(&text.tokens, &options);
    // Contents that overlap cannot be told from their parts.
    (probe.state(len)?.key == key).then_some((probe, len))
}

/// Returns a chunk that ends behind some tokens, if all of its blocks are on the device. The block
/// in which it ends may be that of a sequence which still writes to it.
pub(super) fn device_chunk<B: Backend>(
    cache: &KvCache<B>,
    (probe, chain): (&PrefixProbe, &Chain),
    at: ChunkAt,
    (sequence, priority): (Option<SequenceId>, Priority),
) -> Option<Complete> {
    let (group, ChunkAt::Upto(len)) = (chain.group(), at) else { return None };
    let mut blocks = Vec::new();
    if chain.spec().is_of_states() {
        let (_, snapshots) = cache.state().find_snapshots(probe, len).filter(|of| of.0 == len)?;
        let (_, block) = snapshots.into_iter().find(|(of, _)| *of == group)?;
        blocks.push(Source::Cached(block, probe.state(len)?.key));
    } else {
        for of in chain.blocks(probe, at) {
            let part = || {
                let found = cache.state().find_part(probe, group, len);
                let found = found.map(|(block, key)| Source::Cached(block, key));
                found.or_else(|| {
                    let sequence = sequence.filter(|of| is_text(cache, *of, (probe, len)))?;
                    Some(Source::OfSequence(sequence, of.index))
                })
            };
            let full = probe.block(group, of.index).filter(|full| full.end == of.end);
            let cached = |block: BlockId| Source::Cached(block, of.key);
            blocks.push(full.map_or_else(part, |full| full.cached.map(cached))?);
        }
    }
    let record = Record { priority, ..chain.record(probe, at) };
    Some(Complete { record, blocks: blocks.into() })
}

/// Returns whether a sequence begins with the first `len` tokens of a probed text.
fn is_text<B: Backend>(
    cache: &KvCache<B>,
    sequence: SequenceId,
    (probe, len): (&PrefixProbe, u32),
) -> bool {
    let Some(text) = cache.state().sequence_text(sequence) else { return false };
    let first = probe.prompt().get(..to_usize(len));
    first.is_some_and(|first| text.tokens.starts_with(first))
        && (text.salt, text.adapter) == (probe.salt(), probe.adapter())
        && *text.contents == *probe.content_spans()
}
