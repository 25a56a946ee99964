//! Forgetting: removal from the device, from host memory and from stores, without a way back.
use std::collections::HashSet;
use std::time::{Duration, Instant};

use kv_core::backend::Backend;
use kv_core::error::PlanError;
use kv_core::events::Tier;
use kv_core::invariant::Invariant;
use kv_core::num::to_u32;
use kv_core::reuse::{BlockKey, ContentSpan, PrefixProbe};
use kv_core::{CacheError, GroupId, KvCache, SequenceId, StartOptions};

use super::announce::HOST;
use super::group::{self, GroupTier};
use super::guarded::Removal;
use super::owed::Place;
use super::prefetch::Stage;
use super::{GROUP, STORE, TierError, Tiers};
use crate::chain::{Chain, ChunkAt};
use crate::name::ChunkName;
use crate::record::Record;
use crate::store::{Scope, StoreError};

/// Counts of removed content, and stores that may still have some.
#[derive(Debug, Default)]
#[non_exhaustive]
#[must_use = "a store may have refused to forget"]
pub struct Forgotten {
    /// Blocks whose content was removed from the device, in all groups.
    pub blocks: u32,
    /// Chunks that were removed from host memory.
    pub host_chunks: u64,
    /// Stores that have not confirmed the removal.
    pub failures: Vec<ForgetFailure>,
}

impl Forgotten {
    /// Returns whether every store has confirmed.
    pub fn is_complete(&self) -> bool {
        self.failures.is_empty()
    }
}

/// A store that has not confirmed that it has forgotten.
#[derive(Debug, thiserror::Error)]
#[error("store {store} ({})", tier_name(*tier))]
#[non_exhaustive]
pub struct ForgetFailure {
    /// Index of the store in the options.
    pub store: usize,
    /// Its tier.
    pub tier: Tier,
    /// The reason: [`Unsupported`](crate::StoreErrorKind::Unsupported) of a store that cannot list
    /// its content.
    #[source]
    pub error: StoreError,
}

fn tier_name(tier: Tier) -> &'static str {
    match tier {
        Tier::Device => "device",
        Tier::Host => "host",
        Tier::Disk => "disk",
        _ => "store",
    }
}

/// The chunks to forget.
pub(super) enum What {
    Names(HashSet<ChunkName>),
    Roots(Vec<ChunkName>),
    All,
}

impl What {
    fn covers(&self, root: &ChunkName, name: &ChunkName) -> bool {
        match self {
            Self::Names(names) => names.contains(name),
            Self::Roots(roots) => roots.contains(root),
            Self::All => true,
        }
    }
    pub(super) fn has(&self, record: &Record) -> bool {
        self.covers(&record.root.name(), &record.name)
    }
}

/// A text whose chunks are forgotten.
struct Text<'a> {
    tokens: &'a [u32],
    options: StartOptions<'a>,
    /// Tokens at its beginning that are kept.
    keep: u32,
}

/// Longest wait for a thread between two looks at copies of the device.
pub(super) const PAUSE: Duration = Duration::from_millis(1);

impl<B: Backend> Tiers<B> {
    /// Does what [`TieredCache::forget_prefix`](crate::TieredCache::forget_prefix) does.
    pub(crate) fn forget_prefix(
        &mut self,
        cache: &mut KvCache<B>,
        tokens: &[u32],
        options: StartOptions<'_>,
        keep: u32,
        deadline: Instant,
    ) -> Result<Forgotten, TierError> {
        self.forget_text(cache, None, &Text { tokens, options, keep }, deadline)
    }

    /// Does what [`TieredCache::forget_sequence`](crate::TieredCache::forget_sequence) does.
    pub(crate) fn forget_sequence(
        &mut self,
        cache: &mut KvCache<B>,
        sequence: SequenceId,
        deadline: Instant,
    ) -> Result<Forgotten, TierError> {
        if cache.state().is_step_open() {
            return Err(TierError::StepOpen);
        }
        if !cache.state().contains(sequence) {
            return Err(CacheError::from(PlanError::UnknownSequence { sequence }).into());
        }
        let Some(text) = cache.state().sequence_text(sequence) else {
            let blocks = cache.forget_sequence(sequence)?;
            return Ok(Forgotten { blocks, ..Forgotten::default() });
        };
        let (tokens, salt) = (text.tokens, text.salt.to_vec());
        let contents: Vec<ContentSpan> = text.contents.to_vec();
        let options = StartOptions::default().with_salt(&salt).with_contents(&contents);
        let options = text.adapter.map_or(options, |adapter| options.with_adapter(adapter));
        let text = Text { tokens: &tokens, options, keep: 0 };
        self.forget_text(cache, Some(sequence), &text, deadline)
    }

    /// Does what [`TieredCache::forget_salt`](crate::TieredCache::forget_salt) does.
    pub(crate) fn forget_salt(
        &mut self,
        cache: &mut KvCache<B>,
        salt: &[u8],
        deadline: Instant,
    ) -> Result<Forgotten, TierError> {
        let adapters: Vec<_> = self.identity.adapters().map(Some).chain([None]).collect();
        let mut roots = Vec::new();
        for group in &self.groups {
            for adapter in &adapters {
                let root =
                    self.identity.root(&group.spec, cache.state().encoding_key(), salt, *adapter);
                // Adapters without a digest are not in the list.
                roots.extend(root.map(|root| root.name()));
            }
        }
        let what = What::Roots(roots.clone());
        self.end_copies(cache, &what)?;
        let blocks = cache.forget_salt(salt)?;
        let host_chunks = self.purge(&what);
        let removal = Removal::Scope(Scope::Roots(roots));
        self.remove(
            cache,
            &what,
            &removal,
            deadline,
            Forgotten { blocks, host_chunks, ..Forgotten::default() },
        )
    }

    /// Does what [`TieredCache::forget_all`](crate::TieredCache::forget_all) does.
    pub(crate) fn forget_all(
        &mut self,
        cache: &mut KvCache<B>,
        deadline: Instant,
    ) -> Result<Forgotten, TierError> {
        let waiting = self.end_copies(cache, &What::All)?;
        let groups: Vec<_> = self.groups.iter().map(|group| group.spec.group()).collect();
        let stored = |group: &GroupId| cache.state().stored_blocks(*group).count();
        let blocks = to_u32(groups.iter().map(stored).sum());
        if !cache.reset_prefixes()? {
            self.wait_again(waiting, |_| true);
            return Err(TierError::Held);
        }
        let host_chunks = self.purge(&What::All);
        let removal = Removal::Scope(Scope::Model(self.identity.model()));
        self.remove(
            cache,
            &What::All,
            &removal,
            deadline,
            Forgotten { blocks, host_chunks, ..Forgotten::default() },
        )
    }

    fn forget_text(
        &mut self,
        cache: &mut KvCache<B>,
        sequence: Option<SequenceId>,
        text: &Text<'_>,
        deadline: Instant,
    ) -> Result<Forgotten, TierError> {
        if cache.state().is_step_open() {
            return Err(TierError::StepOpen);
        }
        let probe = whole_probe(cache, text);
        let chains = self.name_chains(cache, &probe);
        let ends = ends_of(cache, &probe, text.keep);
        let whole = |chain: &Chain| (0..chain.len()).map(ChunkAt::Whole).collect::<Vec<_>>();
        let of_chain = |chain| ends_in(chain, &probe, &ends).into_iter().chain(whole(chain));
        let names = |chain| of_chain(chain).map(|at| chain.name(&probe, at)).collect::<Vec<_>>();
        let all = chains.iter().flat_map(names).collect();
        let waiting = self.end_copies(cache, &What::Names(all))?;
        let mut blocks = 0;
        if let Some(sequence) = sequence {
            blocks = cache.forget_sequence(sequence)?;
        }
        let of_prefix = cache.forget_prefix(text.tokens, text.options, text.keep)?;
        let blocks = blocks + of_prefix;
        let probe = whole_probe(cache, text);
        let (mut names, mut addresses) = (HashSet::new(), Vec::new());
        let mut host_chunks = 0_u64;
        let own_ends = chains.iter().flat_map(|chain| {
            ends_in(chain, &probe, &ends).into_iter().map(|at| chain.name(&probe, at))
        });
        let own_ends: HashSet<_> = own_ends.collect();
        // Tokens at the beginning of which some rows stay.
        let mut kept = 0;
        for chain in &chains {
            for chunk in (0..chain.len()).rev() {
                let at = ChunkAt::Whole(chunk);
                let (name, end) = (chain.name(&probe, at), chain.spec().span(chunk).end);
                let last = chain.last_block(&probe, at);
                let is_on_device = last.is_some_and(|last| last.cached.is_some());
                if end <= text.keep
                    || is_on_device
                    || self.is_continued(chain, &name, (&names, &own_ends))
                {
                    kept = kept.max(end);
                    break;
                }
                names.insert(name);
                addresses.push(chain.address(&probe, at));
                host_chunks += u64::from(self.drop_host(chain.group(), &name));
            }
        }
        // States go with the rows before them.
        let gone = |len: &&u32| **len > kept && !probe.states().contains(len);
        let ends: Vec<u32> = ends.iter().filter(gone).copied().collect();
        for chain in &chains {
            for at in ends_in(chain, &probe, &ends) {
                let name = chain.name(&probe, at);
                names.insert(name);
                addresses.push(chain.address(&probe, at));
                host_chunks += u64::from(self.drop_host(chain.group(), &name));
            }
        }
        self.wait_again(waiting, |name| !names.contains(name));
        let what = What::Names(names);
        let more = self.purge(&what);
        let host_chunks = host_chunks + more;
        let forgotten = Forgotten { blocks, host_chunks, ..Forgotten::default() };
        if addresses.is_empty() {
            return Ok(forgotten);
        }
        self.remove(cache, &what, &Removal::Chunks(addresses), deadline, forgotten)
    }

    /// Returns whether a chunk follows one, in host memory or on its way there, that is not
    /// forgotten (`gone`) and is no tail of the same text (`ends`).
    fn is_continued(
        &self,
        chain: &Chain,
        name: &ChunkName,
        (gone, ends): (&HashSet<ChunkName>, &HashSet<ChunkName>),
    ) -> bool {
        let of = group::of(&self.groups, chain.group());
        let stays = |name: &ChunkName| !gone.contains(name) && !ends.contains(name);
        let follows = |record: &Record| record.parent == *name && stays(&record.name);
        of.host.children(name).any(|entry| follows(&entry.record))
            || of.encoding.values().any(|record| follows(record))
            || of.reading.values().any(|reading| follows(&reading.record))
    }

    /// Waits until no chunk that may be forgotten is being copied from the device, so that none
    /// arrives later. Returns those that wait for their copy no longer.
    fn end_copies(
        &mut self,
        cache: &mut KvCache<B>,
        what: &What,
    ) -> Result<Vec<(usize, u32, BlockKey)>, TierError> {
        if cache.state().is_step_open() {
            return Err(TierError::StepOpen);
        }
        self.poll(cache)?;
        let mut waiting = Vec::new();
        for (number, of) in self.groups.iter_mut().enumerate() {
            let gone = of.waiting.extract(&of.links, |root, name| what.covers(root, name));
            waiting.extend(gone.into_iter().map(|(index, key)| (number, index, key)));
        }
        let is_copied = |of: &GroupTier<B::HostPool>| {
            !of.copying.iter().any(|copying| what.has(&copying.record))
        };
        while !self.groups.iter().all(is_copied) {
            self.poll(cache)?;
            if let Ok(done) = self.done.recv_timeout(PAUSE) {
                self.take_result(done);
            }
        }
        Ok(waiting)
    }

    /// Lets chunks wait for their copy that have been kept.
    fn wait_again(
        &mut self,
        waiting: Vec<(usize, u32, BlockKey)>,
        is_kept: impl Fn(&ChunkName) -> bool,
    ) {
        for (group, index, key) in waiting {
            let of = self.groups.get_mut(group).invariant(GROUP);
            if of.links.names(key).is_some_and(|(_, name)| is_kept(&name)) {
                of.waiting.insert(index, key);
            }
        }
    }

    /// Removes a chunk from host memory; returns whether it was there.
    fn drop_host(&mut self, group: GroupId, name: &ChunkName) -> bool {
        let of = group::of_mut(&mut self.groups, group);
        let Some(entry) = of.host.remove(name) else { return false };
        let place = Place::of(&entry.record);
        for lane in &mut self.stores {
            lane.owed.remove(&place);
        }
        self.announcements.lacks(Tier::Host, name, HOST);
        true
    }

    /// Removes chunks from host memory, and from everything that is on its way there, to a store or
    /// to a prompt. Returns the number that was in host memory.
    fn purge(&mut self, what: &What) -> u64 {
        let mut dropped = Vec::new();
        for of in &mut self.groups {
            let on_their_way = of.encoding.values().chain(of.reading.values().map(|at| &at.record));
            let on_their_way = on_their_way.chain(&of.late);
            on_their_way.filter(|record| what.has(record)).for_each(|record| record.forget());
            let there = of.host.iter().map(|entry| &entry.record);
            let there = there.filter(|record| what.has(record));
            dropped.extend(there.map(|record| (record.group(), record.name)));
        }
        let mut chunks = 0_u64;
        for (group, name) in dropped {
            chunks += u64::from(self.drop_host(group, &name));
        }
        for lane in &self.stores {
            let waiting = lane.writing.values().flatten();
            waiting.filter(|record| what.has(record)).for_each(|record| record.forget());
        }
        for of in self.prefetches.values_mut() {
            let (chains, probe) = (&of.chains, &of.probe);
            let is_kept = |(group, at): &(usize, ChunkAt)| {
                let chain = chains.get(*group).invariant(GROUP);
                !what.covers(&chain.root().name(), &chain.name(probe, *at))
            };
            of.held.retain(|at, _| is_kept(at));
            of.found.retain(|at, _| is_kept(at));
            if let Stage::Reading { queue, .. } = &mut of.stage {
                queue.retain(is_kept);
            }
        }
        self.exports.forget(|root, name| what.covers(root, name));
        chunks
    }

    /// Returns whether a chunk that is forgotten is on its way still: to host memory, or to a
    /// store.
    pub(super) fn is_under_way(&self, what: &What, store: Option<usize>) -> bool {
        let Some(store) = store else {
            return self.groups.iter().any(|of| {
                let reading = of.reading.values().map(|reading| &reading.record);
                let mut records = of.encoding.values().chain(reading).chain(&of.late);
                records.any(|record| record.is_forgotten())
            });
        };
        let writing = &self.stores.get(store).invariant(STORE).writing;
        writing.values().flatten().any(|record| record.is_forgotten() && what.has(record))
    }
}

/// Returns the lengths of a text behind which there may be states, more than `keep`; none in a
/// cache without states.
fn ends_of<B: Backend>(cache: &KvCache<B>, probe: &PrefixProbe, keep: u32) -> Vec<u32> {
    if cache.state().spec().states().is_empty() {
        return Vec::new();
    }
    let is_kept = |len: &u32| cache.state().kept_length(*len) == *len;
    (keep.saturating_add(1)..=probe.limit()).filter(is_kept).collect()
}

/// Returns the states or tails of a group that may end behind some tokens.
fn ends_in(chain: &Chain, probe: &PrefixProbe, ends: &[u32]) -> Vec<ChunkAt> {
    let has_end = |at: &ChunkAt| {
        let last = chain.last_block(probe, *at);
        last.is_some_and(|last| !chain.ends_chunk(&last))
    };
    ends.iter().copied().map(ChunkAt::Upto).filter(has_end).collect()
}

/// Probes all tokens of a text.
fn whole_probe<B: Backend>(cache: &KvCache<B>, text: &Text<'_>) -> PrefixProbe {
    // The last token of a prompt is in none of its blocks.
    let prompt = [text.tokens, &[0]].concat();
    let options = text.options.with_backoff_blocks(0).with_reuse(true);
    cache.state().probe_keys(&prompt, &options)
}
