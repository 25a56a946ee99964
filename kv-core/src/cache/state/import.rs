//! Imports: blocks whose content comes from a lower tier instead of being computed.
//!
//! An import reserves empty blocks, which are held and which no prompt can find. The caller writes
//! their bytes; then they are published like computed blocks. An import also holds the blocks that
//! are cached already, so that a sequence that starts before the import ends reuses all of it.
use std::sync::Arc;

use hashbrown::HashMap;

#[cfg(doc)]
use crate::KvCache;
use crate::block::{Fill, Ledger};
use crate::cache::state::input::bounded;
use crate::cache::state::probe::{PrefixProbe, Probed, ProbedBlock};
use crate::cache::state::snapshots::snapshots_of;
use crate::cache::state::start::exhausted;
use crate::cache::state::states::StateGroup;
use crate::cache::state::{CacheState, Group, group_id, unique};
use crate::error::{BlocksExhausted, CacheError, PlanError, StateProblem};
use crate::events::Tier;
use crate::ids::{BlockId, GroupId};
use crate::invariant::Invariant;
use crate::num::to_u32;
use crate::reuse::{BlockKey, NamespaceId, Offered};

/// Blocks for content of one prompt that the caller writes.
///
/// [`KvCache::reserve_import`] takes the blocks, [`KvCache::publish_import`] makes those reusable
/// whose bytes have come, and [`KvCache::finish_import`] releases all of them. The cache keeps a
/// list of all imports: the blocks of one that is dropped stay held until
/// [`KvCache::finish_imports`].
#[derive(Debug)]
#[must_use = "the blocks stay held until the import is finished"]
pub struct Import {
    id: u64,
    probed: Arc<Probed>,
    upto: u32,
    hit: u32,
    blocks: Vec<ImportBlock>,
}

/// A block whose bytes an import has yet to bring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ImportBlock {
    /// The group whose pool has it.
    pub group: GroupId,
    /// The block to write.
    pub block: BlockId,
    /// Index of the block in the prompt.
    pub index: u32,
    /// Key of the content.
    pub key: BlockKey,
    /// One past the position of its last token: it is published up to here. The tokens behind which
    /// a snapshot of recurrent states is.
    pub end: u32,
    /// Place in the list of held blocks.
    place: usize,
}

impl Import {
    /// Returns the tokens up to which blocks were reserved.
    pub fn upto(&self) -> u32 {
        self.upto
    }
    /// Returns the tokens that a sequence reuses, at least, once all blocks are published.
    pub fn hit(&self) -> u32 {
        self.hit
    }
    /// Returns the blocks that were not published yet, group by group, in the order of the prompt.
    /// Blocks that were cached already are not among them.
    pub fn blocks(&self) -> &[ImportBlock] {
        &self.blocks
    }
}

/// All unfinished imports.
#[derive(Debug, Default)]
pub(super) struct Imports {
    unfinished: HashMap<u64, Held>,
}

/// The blocks that an import holds.
#[derive(Debug)]
struct Held {
    /// `None` once everything cached became invalid.
    namespace: Option<NamespaceId>,
    /// Group by group, in the order of the prompt.
    blocks: Vec<(usize, BlockId)>,
}

impl Imports {
    pub(super) fn blocks(&self) -> impl Iterator<Item = (usize, BlockId)> + '_ {
        self.unfinished.values().flat_map(|held| held.blocks.iter().copied())
    }

    /// Makes every import leave its namespace.
    pub(super) fn leave_namespaces(&mut self, ledger: &mut Ledger) {
        let namespaces = self.unfinished.values_mut().filter_map(|held| held.namespace.take());
        namespaces.for_each(|namespace| ledger.leave(namespace));
    }
}

/// The blocks that an import takes besides full ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum With {
    FullBlocks,
    Part,
    PartAndState,
}

const SNAPSHOTS: &str = "a cache whose prompts reuse others has snapshots of all states";
const IMPORT: &str = "the list of an import has a place for each of its blocks";

impl CacheState {
    /// Takes blocks for content that the caller brings: see
    /// [`KvCache::reserve_import`](crate::KvCache::reserve_import).
    pub(in crate::cache) fn reserve_import(
        &mut self,
        probe: &PrefixProbe,
        upto: u32,
    ) -> Result<Import, CacheError> {
        self.take_import(probe, upto, With::FullBlocks)
    }

    /// Does what [`Self::reserve_import`] does, with the block of [`PrefixProbe::part`].
    pub(in crate::cache) fn reserve_import_with_part(
        &mut self,
        probe: &PrefixProbe,
        upto: u32,
    ) -> Result<Import, CacheError> {
        self.take_import(probe, upto, With::Part)
    }

    /// Does what [`Self::reserve_import_with_part`] does, with the snapshots behind these tokens.
    pub(in crate::cache) fn reserve_import_with_state(
        &mut self,
        probe: &PrefixProbe,
        upto: u32,
    ) -> Result<Import, CacheError> {
        self.take_import(probe, upto, With::PartAndState)
    }

    fn take_import(
        &mut self,
        probe: &PrefixProbe,
        upto: u32,
        with: With,
    ) -> Result<Import, CacheError> {
        const OPERATION: &str = "reserve import";
        self.check_closed(OPERATION)?;
        let probed = &probe.probed;
        self.check_epoch(OPERATION, probed)?;
        bounded("imported tokens", upto, probed.limit)?;
        let space = self.ledger.find_namespace(&probed.salt, probed.adapter);
        let namespace = space.map(|(id, _)| id);
        let with_part = with != With::FullBlocks;
        let groups = self.groups.iter();
        let needed =
            groups.map(|group| Needed::find((group, probed), namespace, (upto, with_part)));
        let needed = needed.collect::<Result<Vec<_>, BlocksExhausted>>()?;
        let state = probed.state(upto).filter(|_| with == With::PartAndState);
        let states = state.map(|of| self.find_states(&of, (probed, namespace))).transpose()?;
        let (namespace, _) = self.ledger.join(&probed.salt, probed.adapter);
        let hit = if with_part { probed.hit_with_part(upto) } else { probed.hit(upto) };
        let (id, probed) = (unique(), Arc::clone(probed));
        let mut import = Import { id, probed, upto, hit, blocks: Vec::new() };
        let mut held = Vec::new();
        let Self { groups, states: all, ledger, unwiped, .. } = self;
        for (group, needed) in groups.iter_mut().zip(&needed) {
            // Allocation must not evict the found blocks.
            for block in needed.blocks.iter().filter_map(|(_, found)| *found) {
                group.hold(block);
            }
            for (of, found) in &needed.blocks {
                let block = found.unwrap_or_else(|| {
                    let block = group.take(ledger, unwiped);
                    import.blocks.push(ImportBlock {
                        group: group_id(group.id),
                        block,
                        index: of.index,
                        key: of.key,
                        end: of.end,
                        place: held.len(),
                    });
                    block
                });
                held.push((group.id, block));
            }
        }
        for (group, (of, found)) in all.iter_mut().zip(states.into_iter().flatten()) {
            let snapshots = group.snapshots.as_mut().invariant(SNAPSHOTS);
            let block = match found {
                Some(block) => {
                    assert!(snapshots.pool.hold(block), "snapshot {block} was found and has none");
                    block
                }
                None => snapshots.take(ledger).invariant("snapshots are counted before"),
            };
            let (group, place) = (snapshots.group(), held.len());
            if found.is_none() {
                let ProbedBlock { index, key, end, .. } = of;
                import.blocks.push(ImportBlock { group, block, index, key, end, place });
            }
            held.push((usize::from(group.0), block));
        }
        let held = Held { namespace: Some(namespace), blocks: held };
        self.imports.unfinished.insert(import.id, held);
        self.note_peak();
        Ok(import)
    }

    /// Makes blocks of an import reusable: see
    /// [`KvCache::publish_import`](crate::KvCache::publish_import).
    pub(in crate::cache) fn publish_import(
        &mut self,
        import: &mut Import,
        upto: u32,
        tier: Tier,
    ) -> Result<(), PlanError> {
        const OPERATION: &str = "publish import";
        self.check_closed(OPERATION)?;
        self.check_epoch(OPERATION, &import.probed)?;
        bounded("imported tokens", upto, import.upto)?;
        let Self { groups, states, ledger, imports, unwiped, .. } = self;
        let Some(held) = imports.unfinished.get_mut(&import.id) else {
            return Err(PlanError::State { operation: OPERATION, problem: StateProblem::Ended });
        };
        let namespace = held.namespace.invariant("an import of this epoch is in its namespace");
        let mut parts = Vec::new();
        let Import { probed, blocks, .. } = import;
        for of in blocks.extract_if(.., |of| of.end <= upto) {
            if let Some(snapshots) = snapshots_of(states, of.group) {
                let block = probed.state(of.end).invariant("a snapshot is behind some tokens");
                let priority = probed.priority(of.end - 1);
                let content = probed.content(&block, namespace, &mut parts);
                match snapshots.pool.offer(of.block, &content, (priority, Fill::Full), ledger) {
                    Offered::New => snapshots.pool.set_imported(of.block, tier),
                    Offered::Known(known) => {
                        assert!(snapshots.pool.hold(known), "snapshot {known} was just found");
                        let id = usize::from(of.group.0);
                        *held.blocks.get_mut(of.place).invariant(IMPORT) = (id, known);
                        snapshots.release(of.block, unwiped);
                    }
                    // Other content has its key: the block stays without content.
                    Offered::Refused => {}
                }
                continue;
            }
            let group = groups.at_mut(usize::from(of.group.0));
            let block = probed.block_to(group.id, of.index, of.end);
            let is_full = probed.is_full(group.id, of.index, of.end);
            let fill = if is_full { Fill::Full } else { Fill::Partial };
            let priority = probed.priority(block.begin);
            let content = probed.content(&block, namespace, &mut parts);
            match group.pool.offer(of.block, &content, (priority, fill), ledger) {
                Offered::New => {
                    group.drop_prefixes(of.block, ledger, unwiped);
                    group.pool.set_imported(of.block, tier);
                }
                Offered::Known(known) => {
                    group.hold(known);
                    if !is_full {
                        group.pool.note_duplicate(known);
                    }
                    *held.blocks.get_mut(of.place).invariant(IMPORT) = (group.id, known);
                    group.release_holder(of.block, unwiped);
                }
                // Other content has its key: the block stays without content.
                Offered::Refused => {}
            }
        }
        Ok(())
    }

    /// Ends an import: see [`KvCache::finish_import`](crate::KvCache::finish_import).
    #[expect(clippy::needless_pass_by_value, reason = "an import ends with this call")]
    pub(in crate::cache) fn finish_import(&mut self, import: Import) -> Result<(), PlanError> {
        const OPERATION: &str = "finish import";
        self.check_closed(OPERATION)?;
        let Some(held) = self.imports.unfinished.remove(&import.id) else {
            return Err(PlanError::State { operation: OPERATION, problem: StateProblem::Ended });
        };
        self.release_import(held);
        Ok(())
    }

    /// Ends every import: see [`KvCache::finish_imports`](crate::KvCache::finish_imports).
    pub(in crate::cache) fn finish_imports(&mut self) -> Result<u32, PlanError> {
        self.check_closed("finish imports")?;
        let unfinished = std::mem::take(&mut self.imports.unfinished);
        let count = to_u32(unfinished.len());
        unfinished.into_values().for_each(|held| self.release_import(held));
        Ok(count)
    }

    /// Returns the number of imports that were not finished.
    pub fn num_imports(&self) -> u32 {
        to_u32(self.imports.unfinished.len())
    }

    /// Releases the blocks that an import held, tails before heads.
    fn release_import(&mut self, held: Held) {
        for (index, block) in held.blocks.into_iter().rev() {
            self.end_hold(index, block);
        }
        if let Some(namespace) = held.namespace {
            self.ledger.leave(namespace);
        }
    }

    /// Looks up the snapshots of all groups of states with a content; refuses more missing ones
    /// than can be taken.
    fn find_states(
        &self,
        of: &ProbedBlock,
        (probed, namespace): (&Probed, Option<NamespaceId>),
    ) -> Result<Vec<(ProbedBlock, Option<BlockId>)>, BlocksExhausted> {
        let mut parts = Vec::new();
        let find = |group: &StateGroup| {
            let Some(snapshots) = &group.snapshots else {
                return Ok(None);
            };
            let pool = &snapshots.pool;
            let content = namespace.map(|space| probed.content(of, space, &mut parts));
            let found = content.and_then(|content| pool.find(&content));
            if found.is_none() && pool.num_free() == 0 {
                let group = snapshots.group();
                return Err(BlocksExhausted { group, needed: 1, free: 0, evictable: 0 });
            }
            Ok(Some((*of, found)))
        };
        let found = self.states.iter().map(find).collect::<Result<Vec<_>, _>>()?;
        Ok(found.into_iter().flatten().collect())
    }

    /// Refuses a probe from before everything cached became invalid, or of another cache.
    fn check_epoch(&self, operation: &'static str, probed: &Probed) -> Result<(), PlanError> {
        if probed.epoch == self.epoch {
            return Ok(());
        }
        Err(PlanError::State { operation, problem: StateProblem::Outdated })
    }
}

/// The blocks of one group that an import needs.
#[derive(Debug)]
struct Needed {
    /// Each with the block that has the content.
    blocks: Vec<(ProbedBlock, Option<BlockId>)>,
}

impl Needed {
    /// Looks the blocks up; refuses more missing ones than can be taken.
    fn find(
        (group, probed): (&Group, &Probed),
        namespace: Option<NamespaceId>,
        (upto, with_part): (u32, bool),
    ) -> Result<Self, BlocksExhausted> {
        let mut parts = Vec::new();
        let full = probed.needed(group.id, upto).into_iter().flatten();
        let full = full.map(|index| probed.block(group.id, index));
        let part = probed.part(group.id, upto).filter(|_| with_part);
        let part = part.map(|(index, end)| probed.block_to(group.id, index, end));
        let mut find = |of: &ProbedBlock| {
            let content = probed.content(of, namespace?, &mut parts);
            if probed.is_full(group.id, of.index, of.end) {
                return group.pool.find(&content);
            }
            let tokens = (content.tokens, content.contents);
            let found = group.pool.longest_beginning(of.parent, content.namespace, tokens);
            let len = of.end - of.begin;
            found.filter(|(_, common)| *common == len).map(|(block, _)| block)
        };
        let blocks: Vec<_> = full.chain(part).map(|of| (of, find(&of))).collect();
        let found = || blocks.iter().filter_map(|(_, block)| *block);
        let idle = to_u32(found().filter(|block| group.pool.is_idle(*block)).count());
        let missing = to_u32(blocks.len() - found().count());
        let free = group.pool.num_free() - idle;
        if missing > free {
            let evictable = group.pool.num_idle() - idle;
            return Err(exhausted(group, missing, (free, evictable)));
        }
        Ok(Self { blocks })
    }
}
