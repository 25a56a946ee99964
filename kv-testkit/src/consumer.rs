//! A consumer of a cache's events, as an external router is.
use std::collections::BTreeMap;

use kv_core::events::{Event, EventKind, Snapshot, StoredBlock, Tier};
use kv_core::reuse::BlockKey;
use kv_core::{BlockId, GroupId};

use crate::case::{CaseError, ensure, same};

/// The blocks that the consumer knows, by group, key and tier.
#[derive(Debug, Default)]
pub struct Consumer {
    blocks: BTreeMap<(u8, BlockKey, u8), StoredBlock>,
    next_id: u64,
    is_lost: bool,
}

impl Consumer {
    /// Replaces the consumer's state by a snapshot.
    pub fn resync(&mut self, snapshot: &Snapshot) {
        let entry =
            |block: &StoredBlock| (place_of(block.group, block.key, block.tier), block.clone());
        self.blocks = snapshot.blocks.iter().map(entry).collect();
        (self.next_id, self.is_lost) = (snapshot.next_id, false);
    }

    /// Returns whether events were lost, so that a snapshot is needed.
    pub fn is_lost(&self) -> bool {
        self.is_lost
    }

    /// Applies events without a gap. After lost events, only a snapshot followed by later events is
    /// valid.
    ///
    /// # Errors
    /// The first event that contradicts what the consumer knows.
    pub fn apply(&mut self, events: &[Event]) -> Result<(), CaseError> {
        for event in events {
            if let EventKind::Lost { from, to } = event.kind {
                same("first event lost", from, self.next_id)?;
                ensure(to > from, || format!("events {from}..{to} lost"))?;
                (self.next_id, self.is_lost) = (to, true);
                continue;
            }
            same("number of an event", event.id, self.next_id)?;
            self.next_id += 1;
            if !self.is_lost {
                self.change(&event.kind)?;
            }
        }
        Ok(())
    }

    fn change(&mut self, kind: &EventKind) -> Result<(), CaseError> {
        match kind {
            EventKind::Stored(block) => {
                let place = place_of(block.group, block.key, block.tier);
                let old = self.blocks.insert(place, block.clone());
                ensure(old.is_none(), || {
                    format!("{} was stored twice in {:?}", block.key, block.tier)
                })
            }
            EventKind::Removed { group, key, tier } => {
                let old = self.blocks.remove(&place_of(*group, *key, *tier));
                ensure(old.is_some(), || {
                    format!("{key} was removed from {tier:?} and never stored there")
                })
            }
            EventKind::Updated { group, key, tier, priority } => {
                let block = self.blocks.get_mut(&place_of(*group, *key, *tier));
                let block = block.ok_or_else(|| format!("{key} was changed and never stored"))?;
                block.priority = *priority;
                Ok(())
            }
            EventKind::Cleared { tier } => {
                self.blocks.retain(|_, block| block.tier != *tier);
                Ok(())
            }
            other => Err(CaseError::from(format!("an unknown event {other:?}"))),
        }
    }

    /// Returns whether the consumer knows that a tier has some content.
    pub fn knows(&self, group: GroupId, key: BlockKey, tier: Tier) -> bool {
        self.blocks.contains_key(&place_of(group, key, tier))
    }
    /// Returns the number of contents that a tier has.
    pub fn len_of(&self, tier: Tier) -> usize {
        self.blocks.values().filter(|block| block.tier == tier).count()
    }

    /// Fails unless a snapshot taken now has the same content.
    ///
    /// # Errors
    /// The first difference.
    pub fn check(&self, snapshot: &Snapshot) -> Result<(), CaseError> {
        same("number of the next event", snapshot.next_id, self.next_id)?;
        let mut known: Vec<_> = self.blocks.values().collect();
        let mut there: Vec<_> = snapshot.blocks.iter().collect();
        known.sort_unstable_by_key(|block| place_of(block.group, block.key, block.tier));
        there.sort_unstable_by_key(|block| place_of(block.group, block.key, block.tier));
        // Several blocks with the same content: the snapshot shows the priority of one of them.
        let fact = |block: &&StoredBlock| {
            (block.group, block.key, block.parent, block.index, block.tokens.clone(), block.tier)
        };
        let (known, there): (Vec<_>, Vec<_>) =
            (known.iter().map(fact).collect(), there.iter().map(fact).collect());
        ensure(known == there, || {
            let first = known.iter().zip(&there).find(|(a, b)| a != b);
            let (known, there) = (known.len(), there.len());
            format!("by events {known} contents, in the snapshot {there}, first {first:?}")
        })
    }
}

fn place_of(group: GroupId, key: BlockKey, tier: Tier) -> (u8, BlockKey, u8) {
    let tier = match tier {
        Tier::Device => 0,
        Tier::Host => 1,
        Tier::Disk => 2,
        _ => 3,
    };
    (group.0, key, tier)
}

/// Formats a block of a group for messages.
pub(crate) fn place(group: usize, block: BlockId) -> String {
    format!("block {block} of group {group}")
}
