//! Changes of cached blocks, for a copy of them in other memory.
use crate::ids::{BlockId, GroupId};
use crate::reuse::BlockKey;

/// A full block, or a snapshot of recurrent states, that became reusable, or whose content is gone.
///
/// Unlike [events](crate::events), changes name the block, and omit blocks that must not be copied:
/// partial blocks, and blocks that the open step has yet to write. Replaying them in order gives
/// the blocks that [`CacheState::stored_blocks`](crate::scheduling::CacheState::stored_blocks)
/// lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_structs, reason = "consumers build them in their own tests")]
pub struct BlockChange {
    /// The group whose pool has the block; for a snapshot one of
    /// [`CacheSpec::snapshot_groups`](crate::CacheSpec::snapshot_groups).
    pub group: GroupId,
    /// The block.
    pub block: BlockId,
    /// Its content.
    pub key: BlockKey,
    /// Kind of the change.
    pub kind: BlockChangeKind,
}

/// The kind of a change to the content of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_enums, reason = "content is there or it is not")]
pub enum BlockChangeKind {
    /// It is written and can be reused.
    Stored,
    /// It was evicted or removed otherwise: the block may hold anything by now.
    Removed,
}

/// A bounded list of changes. With a bound of 0 it costs nothing and records nothing.
///
/// Invariant: the list is empty while changes are lost, so that half of them are never replayed.
#[derive(Debug, Default)]
pub(super) struct Changes {
    room: usize,
    is_lost: bool,
    list: Vec<BlockChange>,
}

impl Changes {
    /// Creates a list that keeps at most `room` changes.
    pub(super) fn new(room: usize) -> Self {
        Self { room, ..Self::default() }
    }

    /// Appends a change. If the list is full, all of it is lost.
    #[inline]
    pub(super) fn push(&mut self, change: BlockChange) {
        if self.room == 0 || self.is_lost {
            return;
        }
        if self.list.len() < self.room {
            self.list.push(change);
        } else {
            self.list.clear();
            self.is_lost = true;
        }
    }

    /// Moves the changes to the end of `out`; `false`, and nothing moved, if any were lost.
    pub(super) fn drain(&mut self, out: &mut Vec<BlockChange>) -> bool {
        out.append(&mut self.list);
        !std::mem::take(&mut self.is_lost)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(n: u32) -> BlockChange {
        let (group, key) = (GroupId(0), BlockKey(u128::from(n)));
        BlockChange { group, block: BlockId(n), key, kind: BlockChangeKind::Stored }
    }

    #[test]
    fn one_change_too_many_loses_all_until_the_next_call() {
        let (mut changes, mut out) = (Changes::new(2), Vec::new());
        (0..2).for_each(|n| changes.push(change(n)));
        assert!(changes.drain(&mut out));
        assert_eq!(out, [change(0), change(1)]);
        (2..6).for_each(|n| changes.push(change(n)));
        assert!(!changes.drain(&mut out));
        assert_eq!(out.len(), 2, "half of the changes are of no use");
        changes.push(change(6));
        assert!(changes.drain(&mut out));
        assert_eq!(out.last(), Some(&change(6)));
    }

    #[test]
    fn without_room_nothing_is_kept_and_nothing_lost() {
        let (mut changes, mut out) = (Changes::new(0), Vec::new());
        changes.push(change(0));
        assert!(changes.drain(&mut out) && out.is_empty());
    }
}
