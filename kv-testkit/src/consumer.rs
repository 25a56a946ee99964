//! A consumer of a cache's events, as an external router is.
use std::collections::BTreeMap;

use kv_core::BlockId;
use kv_core::events::{Event, EventKind, Snapshot, StoredBlock};
use kv_core::reuse::BlockKey;

use crate::case::{CaseError, ensure, same};

/// The indexed blocks that the consumer knows, by group and key.
#[derive(Debug, Default)]
pub(crate) struct Consumer {
    blocks: BTreeMap<(u8, BlockKey), StoredBlock>,
    next_id: u64,
    is_lost: bool,
}

impl Consumer {
    /// Replaces the consumer's state by a snapshot.
    pub(crate) fn resync(&mut self, snapshot: &Snapshot) {
        let entry = |block: &StoredBlock| ((block.group.0, block.key), block.clone());
        self.blocks = snapshot.blocks.iter().map(entry).collect();
        (self.next_id, self.is_lost) = (snapshot.next_id, false);
    }

    /// Returns whether events were lost, so that a snapshot is needed.
    pub(crate) fn is_lost(&self) -> bool {
        self.is_lost
    }

    /// Applies events without a gap. After lost events, only a snapshot followed by later events is
    /// valid.
    pub(crate) fn apply(&mut self, events: &[Event]) -> Result<(), CaseError> {
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
                let old = self.blocks.insert((block.group.0, block.key), block.clone());
                ensure(old.is_none(), || format!("{} was stored twice", block.key))
            }
            EventKind::Removed { group, key, tier } => {
                let old = self.blocks.remove(&(group.0, *key));
                ensure(old.is_some_and(|old| old.tier == *tier), || {
                    format!("{key} was removed from {tier:?} and never stored there")
                })
            }
            EventKind::Updated { group, key, tier, priority } => {
                let block = self.blocks.get_mut(&(group.0, *key));
                let block = block.ok_or_else(|| format!("{key} was changed and never stored"))?;
                (block.tier, block.priority) = (*tier, *priority);
                Ok(())
            }
            EventKind::Cleared => {
                self.blocks.clear();
                Ok(())
            }
            other => Err(CaseError::from(format!("an unknown event {other:?}"))),
        }
    }

    /// Fails unless a snapshot taken now has the same content.
    pub(crate) fn check(&self, snapshot: &Snapshot) -> Result<(), CaseError> {
        same("number of the next event", snapshot.next_id, self.next_id)?;
        let mut known: Vec<_> = self.blocks.values().collect();
        let mut there: Vec<_> = snapshot.blocks.iter().collect();
        known.sort_unstable_by_key(|block| (block.group.0, block.key));
        there.sort_unstable_by_key(|block| (block.group.0, block.key));
        // Several blocks with the same content: the snapshot shows the priority of one of them.
        let fact = |block: &&StoredBlock| {
            (block.group, block.key, block.parent, block.index, block.tokens.clone(), block.tier)
        };
        let (known, there): (Vec<_>, Vec<_>) =
            (known.iter().map(fact).collect(), there.iter().map(fact).collect());
        ensure(known == there, || {
            format!("by events {} contents, in the snapshot {}", known.len(), there.len())
        })
    }
}

/// Formats a block of a group for messages.
pub(crate) fn place(group: usize, block: BlockId) -> String {
    format!("block {block} of group {group}")
}
