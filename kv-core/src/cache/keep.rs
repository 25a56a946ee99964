//! What is kept although nobody runs on it, what is forgotten, and what is told of either.
use hashbrown::HashMap;

use crate::backend::Backend;
use crate::block::Ledger;
use crate::cache::start::Lookup;
use crate::cache::{KvCache, StartOptions};
use crate::error::{CacheError, PlanError};
use crate::events::{Event, Snapshot, StoredBlock, Tier};
use crate::eviction::{EvictionPolicy, Priority};
use crate::ids::{BlockId, GroupId, SequenceId};
use crate::num::to_u32;

/// Names a pinned prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PinId(u64);

/// A prefix that stays cached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a name and what it names")]
pub struct Pin {
    /// For [`KvCache::unpin`].
    pub id: PinId,
    /// Tokens it keeps, a boundary of blocks: fewer than asked for where fewer are cached.
    pub tokens: u32,
}

/// Blocks held by pins, group by group.
#[derive(Debug, Default)]
pub(super) struct Pins {
    next: u64,
    held: HashMap<PinId, Vec<(usize, BlockId)>>,
}

impl Pins {
    pub(super) fn blocks(&self) -> impl Iterator<Item = (usize, BlockId)> + '_ {
        self.held.values().flatten().copied()
    }
}

impl<B: Backend> KvCache<B> {
    /// Keeps the cached blocks of a prefix, a system prompt say, until [`Self::unpin`]. Of groups
    /// with a window, those that a sequence needs that starts with exactly this prefix.
    pub fn pin_prefix(&mut self, tokens: &[u32], options: StartOptions<'_>) -> Pin {
        self.recover();
        let lookup = self.look_up_whole(tokens, &options);
        let mut blocks = Vec::new();
        for (index, group) in self.groups.iter_mut().enumerate() {
            let map = super::slot_map(group);
            let needed = lookup.found.needed(index, group.window, &map);
            for block in needed.iter(false).flatten() {
                group.pool.reuse(block);
                blocks.push((index, block));
            }
        }
        let id = PinId(self.pins.next);
        self.pins.next = self.pins.next.saturating_add(1);
        self.pins.held.insert(id, blocks);
        self.note_peak();
        Pin { id, tokens: lookup.found.whole }
    }

    /// Lets a pinned prefix go; `false` for one that is not pinned.
    ///
    /// # Errors
    /// A device failure of the wipe, as for [`Self::truncate`].
    pub fn unpin(&mut self, pin: PinId) -> Result<bool, CacheError> {
        self.recover();
        let Some(blocks) = self.pins.held.remove(&pin) else {
            return Ok(false);
        };
        for (index, block) in blocks.into_iter().rev() {
            if let Some(group) = self.groups.get_mut(index) {
                let emptied = group.pool.release(block);
                if emptied && self.spec.wipe_on_release() {
                    self.unwiped.push((index, block));
                }
            }
        }
        self.wipe()?;
        Ok(true)
    }

    /// Blocks of a group that pins hold; one that several hold comes as often.
    pub fn pinned_blocks(&self, group: GroupId) -> impl Iterator<Item = BlockId> + '_ {
        let index = usize::from(group.0);
        self.pins.blocks().filter(move |(of, _)| *of == index).map(|(_, block)| block)
    }

    /// Ends a sequence whose blocks others need more; it comes back with
    /// [`StartOptions::resumed`], and finds what nobody needed.
    ///
    /// # Errors
    /// As [`Self::release`].
    pub fn preempt(&mut self, sequence: SequenceId) -> Result<(), CacheError> {
        self.recover();
        self.sequences.row(sequence)?;
        self.stats.preemptions = self.stats.preemptions.saturating_add(1);
        self.release(sequence)
    }

    /// Makes what this sequence alone has cached unfindable: its blocks, last first, up to the
    /// first that another one holds or continues. The sequence goes on, and offers nothing more.
    /// Returns how many blocks that were, in all groups.
    ///
    /// # Errors
    /// [`PlanError::UnknownSequence`]; [`PlanError::State`] while a step is open.
    pub fn forget_sequence(&mut self, sequence: SequenceId) -> Result<u32, CacheError> {
        self.recover();
        self.check_closed("forget")?;
        let row = self.sequences.row(sequence)?;
        let mut forgotten = 0_u32;
        for group in &mut self.groups {
            let vacant = group.vacant(row);
            for index in (0..group.tables.row(row).len()).rev() {
                let block = group.tables.row(row).get(index).copied();
                let Some(block) = block.filter(|_| !vacant.contains(&to_u32(index))) else {
                    continue;
                };
                let Some(content) = group.pool.content(block) else {
                    continue;
                };
                let is_shared = group.pool.holders(block) > 1;
                if is_shared
                    || (!content.is_partial && group.pool.index().has_children(content.key))
                {
                    break;
                }
                group.pool.forget(block, &mut self.ledger);
                forgotten = forgotten.saturating_add(1);
            }
        }
        if let Some((_, history)) = self.sequences.both_mut(row) {
            history.end(&mut self.ledger);
        }
        Ok(forgotten)
    }

    /// Gives up the cached blocks of a prompt behind its first `keep` tokens, last first, up to the
    /// first that somebody holds or that another prompt continues. Returns how many blocks that
    /// were, in all groups.
    ///
    /// # Errors
    /// [`PlanError::State`] while a step is open; a device failure of the wipe, as for
    /// [`Self::truncate`].
    pub fn forget_prefix(
        &mut self,
        tokens: &[u32],
        options: StartOptions<'_>,
        keep: u32,
    ) -> Result<u32, CacheError> {
        self.recover();
        self.check_closed("forget")?;
        let lookup = self.look_up_whole(tokens, &options);
        let mut forgotten = 0_u32;
        for (index, group) in self.groups.iter_mut().enumerate() {
            let map = super::slot_map(group);
            let found = lookup.found.groups.get(index);
            let blocks = found.map(|found| found.blocks.as_slice()).unwrap_or_default();
            for (at, block) in blocks.iter().enumerate().rev() {
                let Some((block, content)) =
                    block.and_then(|block| Some((block, group.pool.content(block)?)))
                else {
                    continue;
                };
                let is_kept = map.tokens(to_u32(at)) < keep;
                let is_needed = !group.pool.is_idle(block);
                if is_kept || is_needed || group.pool.index().has_children(content.key) {
                    break;
                }
                let emptied = group.pool.forget(block, &mut self.ledger);
                if emptied && self.spec.wipe_on_release() {
                    self.unwiped.push((index, block));
                }
                forgotten = forgotten.saturating_add(1);
            }
        }
        self.wipe()?;
        Ok(forgotten)
    }

    /// Gives up everything cached; `false`, and no change, while a sequence or a pin holds a block.
    ///
    /// # Errors
    /// [`PlanError::State`] while a step is open; a device failure of the wipe, as for
    /// [`Self::truncate`].
    pub fn reset_prefixes(&mut self) -> Result<bool, CacheError> {
        self.recover();
        self.check_closed("reset")?;
        if self.groups.iter().any(|group| group.pool.num_used() > 0) {
            return Ok(false);
        }
        self.clear_index();
        self.wipe()?;
        Ok(true)
    }

    /// Makes every content unfindable; those who hold blocks keep them.
    pub(super) fn clear_index(&mut self) {
        let wipes = self.spec.wipe_on_release();
        for (index, group) in self.groups.iter_mut().enumerate() {
            for block in group.pool.clear(&mut self.ledger) {
                if wipes {
                    self.unwiped.push((index, block));
                }
            }
        }
        self.ledger.clear();
    }

    /// Live sequences take no part in reuse from here on, and what is cached is void: the encoding
    /// changed.
    pub(super) fn restart_reuse(&mut self) {
        self.clear_index();
        for row in 0..to_u32(self.sequences.num_rows()) {
            if let Some((_, history)) = self.sequences.both_mut(row) {
                history.end(&mut self.ledger);
            }
        }
        self.ledger.set_encoding(self.constants.key());
    }

    /// Exchanges what decides which cached block of a group goes first, for a policy of the
    /// caller's own or for another clock. It must be made for the group's number of blocks.
    /// `false`, and no change, for an unknown group or one that has anything cached.
    pub fn set_policy(&mut self, group: GroupId, policy: Box<dyn EvictionPolicy>) -> bool {
        self.recover();
        let group = self.groups.get_mut(usize::from(group.0));
        group.is_some_and(|group| group.pool.set_policy(policy))
    }

    /// Sets the priority of the cached blocks of a prompt. Returns how many tokens that are.
    pub fn prioritise_prefix(
        &mut self,
        tokens: &[u32],
        options: StartOptions<'_>,
        priority: Priority,
    ) -> u32 {
        self.recover();
        let lookup = self.look_up_whole(tokens, &options);
        for (index, group) in self.groups.iter_mut().enumerate() {
            let found = lookup.found.groups.get(index);
            let blocks = found.map(|found| found.blocks.as_slice()).unwrap_or_default();
            for block in blocks.iter().flatten() {
                group.pool.set_priority(*block, priority, &mut self.ledger);
            }
        }
        lookup.found.whole
    }

    /// Hands out the [events](crate::events) since the last call; none unless
    /// [`CacheSpecBuilder::events`](crate::CacheSpecBuilder::events) made room for them.
    pub fn take_events(&mut self) -> Vec<Event> {
        self.recover();
        self.ledger.take_events()
    }

    /// Everything that can be reused now, for those who have lost events or come later. Apply it,
    /// then the events from [`Snapshot::next_id`] on.
    pub fn snapshot(&self) -> Snapshot {
        let mut blocks = Vec::new();
        for (group, id) in self.groups.iter().zip(0..) {
            let full = group.pool.index().iter().filter(|block| !block.is_partial);
            blocks.extend(full.map(|block| StoredBlock {
                group: GroupId(id),
                key: block.key,
                parent: block.parent,
                index: block.index,
                tokens: block.tokens.into(),
                tier: Tier::Device,
                priority: block.priority,
            }));
        }
        Snapshot { next_id: self.ledger.next_event(), blocks }
    }

    /// Looks up all of a prompt, its last token too.
    fn look_up_whole(&self, tokens: &[u32], options: &StartOptions<'_>) -> Lookup {
        let mut lookup = Lookup::default();
        let space = self.ledger.find_namespace(options.salt, options.adapter);
        self.look_up_to(&mut lookup, (space, to_u32(tokens.len())), tokens, options);
        lookup
    }

    fn check_closed(&self, operation: &'static str) -> Result<(), PlanError> {
        if self.is_step_open() {
            return Err(PlanError::State { operation, problem: "a step is open" });
        }
        Ok(())
    }
}

impl Ledger {
    fn set_encoding(&mut self, encoding: u128) {
        self.namespaces_mut().set_encoding(encoding);
    }
}
