//! Probes: the cached blocks of a prompt, and the content that its missing blocks would have.
use std::ops::Range;
use std::sync::Arc;

use crate::cache::state::history::History;
use crate::cache::state::lookup::{first_live, sink_blocks};
use crate::cache::state::snapshots::{Snapshots, longest_of_all};
use crate::cache::state::start::Lookup;
use crate::cache::state::{CacheState, StartOptions};
use crate::eviction::{Priority, Retention};
use crate::ids::{BlockId, GroupId};
use crate::invariant::Invariant;
use crate::num::{to_u32, to_usize};
use crate::reuse::{BlockContent, BlockKey, Content, ContentSpan, ContentSpans, NamespaceId};
use crate::slot_map::SlotMap;
use crate::spec::{PrefixReuse, Window};

/// The cached tokens of a prompt, and the content of every full block that it may reuse.
///
/// A lower tier finds copies of the missing blocks by this content, and brings them with
/// [`KvCache::reserve_import`](crate::KvCache::reserve_import). The probe is a snapshot and holds
/// no block; the import looks again.
///
/// Counts of tokens, *up to* which blocks are there, may be any number; blocks that end later are
/// not included.
#[derive(Debug, Clone)]
pub struct PrefixProbe {
    pub(super) probed: Arc<Probed>,
}

/// One full block of a probed prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProbedBlock {
    /// Index of the block in the prompt.
    pub index: u32,
    /// Key of its content.
    pub key: BlockKey,
    /// Key of the block before, the root for the first.
    pub parent: BlockKey,
    /// Position of its first token, and one past its last.
    pub begin: u32,
    /// One past the position of its last token.
    pub end: u32,
    /// The block that had this content when the prompt was probed.
    pub cached: Option<BlockId>,
}

/// The prompt of a probe, which its imports share.
#[derive(Debug)]
pub(super) struct Probed {
    /// [`CacheState::epoch`] at that time.
    pub(super) epoch: u64,
    prompt: Box<[u32]>,
    pub(super) salt: Box<[u8]>,
    pub(super) adapter: Option<u64>,
    root: BlockKey,
    spans: ContentSpans,
    retention: Option<Retention>,
    backoff: u32,
    /// Most tokens that may be reused; 0 without reuse.
    pub(super) limit: u32,
    /// Reused tokens of whole blocks if a sequence had started then.
    cached: u32,
    /// All reused tokens.
    reused: u32,
    /// Lengths behind which every group of states had a snapshot, the longest first.
    states: Box<[u32]>,
    /// Whether a sequence may reuse a part of the block after the full ones.
    has_parts: bool,
    chains: Vec<Chain>,
    groups: Vec<ProbedGroup>,
}

/// Keys of full blocks that end at the same tokens in all groups of the chain.
#[derive(Debug)]
struct Chain {
    map: SlotMap,
    keys: Vec<BlockKey>,
}

#[derive(Debug)]
struct ProbedGroup {
    chain: usize,
    window: Option<Window>,
    cached: Vec<Option<BlockId>>,
}

const BLOCK: &str = "a probe lists the full blocks of its groups";

impl PrefixProbe {
    /// Returns the whole prompt.
    pub fn prompt(&self) -> &[u32] {
        &self.probed.prompt
    }
    /// Returns the salt of the prompt's namespace; empty without one.
    pub fn salt(&self) -> &[u8] {
        &self.probed.salt
    }
    /// Returns the adapter of the prompt's namespace.
    pub fn adapter(&self) -> Option<u64> {
        self.probed.adapter
    }
    /// Returns the contents of the placeholder tokens of the prompt.
    pub fn content_spans(&self) -> &[ContentSpan] {
        self.probed.spans.list()
    }
    /// Returns the key before the first block.
    pub fn root(&self) -> BlockKey {
        self.probed.root
    }
    /// Returns how many tokens a sequence would have reused in whole blocks that had started then.
    pub fn cached(&self) -> u32 {
        self.probed.cached
    }
    /// Returns how many tokens a sequence would have reused that had started then.
    pub fn reused(&self) -> u32 {
        self.probed.reused
    }
    /// Returns the lengths of the prompt behind which every group of recurrent states had a
    /// snapshot, the longest first.
    pub fn states(&self) -> &[u32] {
        &self.probed.states
    }
    /// Returns the most tokens that a sequence may reuse: all but the last of the prompt, whose
    /// logits are needed; 0 if nothing is reused by the settings of cache or prompt.
    pub fn limit(&self) -> u32 {
        self.probed.limit
    }
    /// Returns how many tokens a sequence reuses, at least, if all blocks are cached that are
    /// [needed](Self::needed) up to `upto` tokens: the last end of a block at or before `upto` that
    /// is one in every group, without the blocks that
    /// [backoff](StartOptions::with_backoff_blocks) computes anew.
    pub fn hit(&self, upto: u32) -> u32 {
        self.probed.hit(upto)
    }

    /// Iterates over the full blocks of the prompt in one group, in order; none for an unknown
    /// group.
    pub fn blocks(&self, group: GroupId) -> impl Iterator<Item = ProbedBlock> + '_ {
        let group = self.probed.find_group(group);
        let blocks = group.map_or(0, |(_, group)| to_u32(group.cached.len()));
        (0..blocks).map(move |index| self.probed.block(group.map_or(0, |(at, _)| at), index))
    }

    /// Returns one full block of the prompt; `None` for an unknown group, and past the last.
    pub fn block(&self, group: GroupId, index: u32) -> Option<ProbedBlock> {
        let (at, of) = self.probed.find_group(group)?;
        (to_usize(index) < of.cached.len()).then(|| self.probed.block(at, index))
    }

    /// Returns the indices of the blocks of one group, cached ones included, that a sequence needs
    /// to reuse [`hit(upto)`](Self::hit) tokens: those of sink tokens, and the others. Empty ranges
    /// for an unknown group.
    pub fn needed_indices(&self, group: GroupId, upto: u32) -> [Range<u32>; 2] {
        let group = self.probed.find_group(group).map(|(at, _)| at);
        group.map_or([0..0, 0..0], |group| self.probed.needed(group, upto))
    }
    /// Iterates over the blocks of one group, cached or not, that a sequence needs to reuse
    /// [`hit(upto)`](Self::hit) tokens: with a window, its blocks and those of the sink tokens.
    pub fn needed(&self, group: GroupId, upto: u32) -> impl Iterator<Item = ProbedBlock> + '_ {
        let blocks = self.needed_indices(group, upto).into_iter().flatten();
        blocks.map(move |index| self.probed.block(usize::from(group.0), index))
    }

    /// Returns the block of one group that a sequence needs besides, to reuse more than
    /// [`hit(upto)`](Self::hit) tokens: the one that begins where the hit ends, up to its end or to
    /// `upto`. `None` if the hit ends at `upto`, and where full blocks only are reused: by the
    /// settings of the cache, with a backoff, and with a
    /// [tail](crate::spec::GroupBuilder::tail). Whether it is cached is not looked up.
    pub fn part(&self, group: GroupId, upto: u32) -> Option<ProbedBlock> {
        let (group, _) = self.probed.find_group(group)?;
        let (index, end) = self.probed.part(group, upto)?;
        Some(self.probed.block_to(group, index, end))
    }

    /// Returns whether a sequence can reuse exactly `len` tokens if their blocks are cached: not
    /// inside a block where full blocks only are reused, and not with a backoff. A sequence goes on
    /// from recurrent states at such lengths alone.
    pub fn reaches(&self, len: u32) -> bool {
        self.probed.hit_with_part(len) == len
    }

    /// Returns the content of the snapshots of recurrent states behind `len` tokens: the block of
    /// the last of these tokens, up to it. `None` for no tokens, and for more than
    /// [`Self::limit`]. Whether snapshots are cached is not looked up.
    pub fn state(&self, len: u32) -> Option<ProbedBlock> {
        self.probed.state(len)
    }

    /// Returns the tokens of a block of this probe; none for one of a longer prompt.
    pub fn tokens(&self, block: &ProbedBlock) -> &[u32] {
        let range = to_usize(block.begin)..to_usize(block.end);
        self.probed.prompt.get(range).unwrap_or_default()
    }
    /// Writes the contents of the placeholder tokens of a block to `out`.
    pub fn contents(&self, block: &ProbedBlock, out: &mut Vec<BlockContent>) {
        self.probed.spans.cut((block.begin, block.end), out);
    }
}

impl Probed {
    fn find_group(&self, group: GroupId) -> Option<(usize, &ProbedGroup)> {
        let index = usize::from(group.0);
        Some((index, self.groups.get(index)?))
    }
    fn group(&self, group: usize) -> (&ProbedGroup, &Chain) {
        let group = self.groups.get(group).invariant(BLOCK);
        (group, self.chains.get(group.chain).invariant(BLOCK))
    }

    /// Returns one full block.
    pub(super) fn block(&self, group: usize, index: u32) -> ProbedBlock {
        let (group, chain) = self.group(group);
        let (begin, end) = chain.range(index);
        let (parent, key) = chain.keys_of(self.root, index);
        let cached = group.cached.get(to_usize(index)).copied().flatten();
        ProbedBlock { index, key, parent, begin, end, cached }
    }

    /// Returns the block at `index` with the tokens up to `end`, its own or an earlier one.
    pub(super) fn block_to(&self, group: usize, index: u32, end: u32) -> ProbedBlock {
        let (_, chain) = self.group(group);
        let (begin, own_end) = chain.range(index);
        if end == own_end {
            return self.block(group, index);
        }
        let parent = chain.parent_of(self.root, index);
        let mut parts = Vec::new();
        self.spans.cut((begin, end), &mut parts);
        let key = parent.child(self.tokens(begin, end), &parts);
        ProbedBlock { index, key, parent, begin, end, cached: None }
    }

    /// Returns the content of the snapshots behind `len` tokens.
    pub(super) fn state(&self, len: u32) -> Option<ProbedBlock> {
        let (_, chain) = self.group(0);
        let last = len.checked_sub(1).filter(|_| len <= self.limit)?;
        Some(self.block_to(0, chain.map.place(last).index, len))
    }

    /// Returns the content of a block; `parts` is memory for its contents.
    pub(super) fn content<'a>(
        &'a self,
        block: &ProbedBlock,
        namespace: NamespaceId,
        parts: &'a mut Vec<BlockContent>,
    ) -> Content<'a> {
        let &ProbedBlock { index, key, parent, begin, end, .. } = block;
        self.spans.cut((begin, end), parts);
        let tokens = self.tokens(begin, end);
        Content { key, parent, namespace, index, tokens, contents: parts }
    }

    fn tokens(&self, begin: u32, end: u32) -> &[u32] {
        self.prompt.get(to_usize(begin)..to_usize(end)).invariant(BLOCK)
    }

    /// Returns whether a block with the tokens up to `end` is full.
    pub(super) fn is_full(&self, group: usize, index: u32, end: u32) -> bool {
        let (_, chain) = self.group(group);
        chain.range(index).1 == end
    }

    /// Returns the priority of the block that begins at `position`.
    pub(super) fn priority(&self, position: u32) -> Priority {
        let len = to_u32(self.prompt.len());
        self.retention.as_ref().map_or_else(Priority::default, |all| all.priority_at(position, len))
    }

    /// Does what [`PrefixProbe::hit`] does.
    pub(super) fn hit(&self, upto: u32) -> u32 {
        let upto = upto.min(self.limit);
        let mut len = upto;
        loop {
            let before = len;
            for group in &self.groups {
                let map = &self.chains.get(group.chain).invariant(BLOCK).map;
                let known = map.full_blocks(upto).saturating_sub(self.backoff);
                len = map.tokens(map.full_blocks(len).min(known));
            }
            if len == before {
                return len;
            }
        }
    }

    /// Returns index and end of the block that [`PrefixProbe::part`] returns.
    pub(super) fn part(&self, group: usize, upto: u32) -> Option<(u32, u32)> {
        let upto = upto.min(self.limit);
        let hit = self.hit(upto);
        if !self.has_parts || hit == upto {
            return None;
        }
        let (_, Chain { map, .. }) = self.group(group);
        // A hit ends at the end of a block in every group.
        let index = map.full_blocks(hit);
        Some((index, map.tokens(index + 1).min(upto)))
    }

    /// Returns how many tokens a sequence reuses if the blocks of [`Self::part`] are cached too.
    pub(super) fn hit_with_part(&self, upto: u32) -> u32 {
        let parts = (0..self.groups.len()).map(|group| self.part(group, upto));
        let ends = parts.map(|part| part.map(|(_, end)| end)).collect::<Option<Vec<_>>>();
        ends.and_then(|ends| ends.into_iter().min()).unwrap_or_else(|| self.hit(upto))
    }

    /// Returns the blocks of a group that a hit of [`Self::hit`] needs: those of the sink tokens,
    /// and the others.
    pub(super) fn needed(&self, group: usize, upto: u32) -> [Range<u32>; 2] {
        let hit = self.hit(upto);
        if hit == 0 {
            return [0..0, 0..0];
        }
        let (group, Chain { map, .. }) = self.group(group);
        let blocks = map.full_blocks(hit);
        let end = blocks + self.backoff;
        let Some(window) = group.window else {
            return [0..0, 0..end];
        };
        // As a lookup has it: a window of only the query itself needs no block; still something
        // must be cached.
        let live = first_live(map, window, hit).min(end - 1);
        let sinks = sink_blocks(Some(window), map).min(blocks).min(live);
        [0..sinks, live..end]
    }
}

impl Chain {
    fn range(&self, index: u32) -> (u32, u32) {
        (self.map.tokens(index), self.map.tokens(index + 1))
    }
    /// Returns the keys of the block before and of block `index`.
    fn keys_of(&self, root: BlockKey, index: u32) -> (BlockKey, BlockKey) {
        (self.parent_of(root, index), self.key(index))
    }
    /// Returns the key of the block before block `index`.
    fn parent_of(&self, root: BlockKey, index: u32) -> BlockKey {
        index.checked_sub(1).map_or(root, |before| self.key(before))
    }
    fn key(&self, index: u32) -> BlockKey {
        *self.keys.get(to_usize(index)).invariant(BLOCK)
    }
}

impl CacheState {
    /// Returns the longest length up to `limit` of a probed prompt behind which every group of
    /// recurrent states has a snapshot, and the blocks of these, group by group; `None` without
    /// any. The cache's rows up to there are not looked up.
    pub fn find_snapshots(
        &self,
        probe: &PrefixProbe,
        limit: u32,
    ) -> Option<(u32, Vec<(GroupId, BlockId)>)> {
        let probed = &probe.probed;
        let mut history = self.history_of(probed)?;
        let limit = limit.min(probed.limit);
        let (blocks, len) = longest_of_all(&self.states, &mut history, &self.names(), limit)?;
        let groups = self.states.iter().filter_map(|of| of.snapshots.as_ref());
        let groups = groups.map(Snapshots::group);
        Some((len, groups.zip(blocks).collect()))
    }

    /// Returns the lengths of a prompt behind which every group of states has a snapshot, the
    /// longest first.
    fn all_snapshots(&self, probed: &Probed) -> Box<[u32]> {
        let Some(mut history) = self.history_of(probed) else { return Box::default() };
        let names = self.names();
        let mut next = |limit: Option<u32>| {
            longest_of_all(&self.states, &mut history, &names, limit?).map(|(_, len)| len)
        };
        let first = next(Some(probed.limit));
        std::iter::successors(first, |len| next(len.checked_sub(1))).collect()
    }

    /// Returns the history of a probed prompt; `None` where no snapshot can be found.
    fn history_of(&self, probed: &Probed) -> Option<History> {
        let space = self.ledger.find_namespace(&probed.salt, probed.adapter);
        if space.is_none() || self.states.is_empty() {
            return None;
        }
        let options = StartOptions::default().with_contents(probed.spans.list());
        let mut history = History::default();
        let sizes = (self.chains.len(), self.groups.len());
        history.begin(space, (&probed.prompt, &options), sizes);
        Some(history)
    }

    /// Says how far a prompt is cached, and lists the content of all its full blocks, so that a
    /// lower tier can look for those that are missing. Changes nothing: neither the age of blocks
    /// nor the counters. While a step is open, blocks that it is about to fill may count as cached.
    pub fn probe_keys(&self, prompt: &[u32], options: &StartOptions<'_>) -> PrefixProbe {
        let is_off = !options.reuse || self.spec.prefix_reuse() == PrefixReuse::Off;
        let most = to_u32(prompt.len()).saturating_sub(1).min(self.spec.max_seq_len());
        let limit = if is_off { 0 } else { most };
        let root = BlockKey::root(self.encoding_key, options.salt, options.adapter);
        let mut lookup = Lookup::default();
        self.look_up_unnamed(&mut lookup, prompt, options);
        let mut probed = Probed {
            epoch: self.epoch,
            prompt: prompt.into(),
            salt: options.salt.into(),
            adapter: options.adapter,
            root,
            spans: ContentSpans::new(options.contents),
            retention: options.retention.cloned(),
            backoff: options.backoff_blocks,
            limit,
            cached: lookup.found.whole,
            reused: lookup.found.tokens(),
            states: Box::default(),
            has_parts: self.spec.prefix_reuse() == PrefixReuse::Partial
                && options.backoff_blocks == 0
                && !self.groups.have_tail(),
            chains: self.chains.iter().map(|map| Chain { map: *map, keys: Vec::new() }).collect(),
            groups: Vec::with_capacity(self.groups.len()),
        };
        let mut parts = Vec::new();
        for chain in &mut probed.chains {
            let mut key = root;
            for index in 0..chain.map.full_blocks(limit) {
                let (begin, end) = chain.range(index);
                probed.spans.cut((begin, end), &mut parts);
                let tokens = prompt.get(to_usize(begin)..to_usize(end)).invariant(BLOCK);
                key = key.child(tokens, &parts);
                chain.keys.push(key);
            }
        }
        let space = self.ledger.find_namespace(options.salt, options.adapter);
        for (at, group) in self.groups.iter().enumerate() {
            let (chain, window) = (group.chain, group.window);
            probed.groups.push(ProbedGroup { chain, window, cached: Vec::new() });
            let blocks = group.slot_map().full_blocks(limit);
            let cached = (0..blocks).map(|index| {
                let (namespace, _) = space?;
                group.pool.find(&probed.content(&probed.block(at, index), namespace, &mut parts))
            });
            let cached: Vec<_> = cached.collect();
            probed.groups.get_mut(at).invariant(BLOCK).cached = cached;
        }
        probed.states = self.all_snapshots(&probed);
        PrefixProbe { probed: Arc::new(probed) }
    }
}
