//! State that all pools of a cache share: events, changes and namespaces.
use hashbrown::HashSet;

use crate::block::changes::{BlockChange, BlockChangeKind, Changes};
use crate::block::pool::Fill;
use crate::events::{Event, EventKind, EventLog, StoredBlock, Tier};
use crate::eviction::Priority;
use crate::ids::{BlockId, GroupId};
use crate::invariant::Invariant;
use crate::reuse::{BlockKey, Content, NamespaceId, Namespaces, Removed};

const NAMESPACE: &str = "the namespace of indexed content has users";

/// Events, changes and namespaces of all pools of a cache.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    events: EventLog,
    taken: u64,
    changes: Changes,
    namespaces: Namespaces,
    reads: Reads,
}

/// Blocks whose bytes are read beside the cache's queue.
#[derive(Debug, Default)]
struct Reads {
    blocks: HashSet<(GroupId, BlockId)>,
    /// Blocks that have lost their content since: they may be written.
    outlived: Vec<(GroupId, BlockId)>,
}

impl Ledger {
    /// Creates the ledger of a cache with this [encoding
    /// key](crate::scheduling::CacheState::encoding_key), which keeps at most `events` events.
    pub(crate) fn new(encoding: u128, events: usize) -> Self {
        let namespaces = Namespaces::new(encoding);
        Self { events: EventLog::new(events), namespaces, ..Self::default() }
    }

    /// Also keeps at most `room` [changes](BlockChange) of blocks.
    #[must_use]
    pub(crate) fn with_changes(self, room: usize) -> Self {
        Self { changes: Changes::new(room), ..self }
    }

    /// Adds a user to the namespace of a salt and an adapter, and returns its ID and root.
    pub(crate) fn join(&mut self, salt: &[u8], adapter: Option<u64>) -> (NamespaceId, BlockKey) {
        self.namespaces.join(salt, adapter)
    }
    /// Removes a user of a namespace.
    pub(crate) fn leave(&mut self, id: NamespaceId) {
        self.namespaces.leave(id);
    }
    /// Returns ID and root of the namespace of a salt and an adapter, if it has users.
    pub(crate) fn find_namespace(
        &self,
        salt: &[u8],
        adapter: Option<u64>,
    ) -> Option<(NamespaceId, BlockKey)> {
        self.namespaces.find(salt, adapter)
    }

    /// Returns salt and adapter of a namespace with users.
    pub(crate) fn namespace(&self, id: NamespaceId) -> Option<(&[u8], Option<u64>)> {
        self.namespaces.name(id)
    }

    pub(crate) fn namespaces_mut(&mut self) -> &mut Namespaces {
        &mut self.namespaces
    }

    /// Moves the changes of blocks since the last call to the end of `out`; `false`, and nothing
    /// moved, if any were lost because there were too many.
    pub(crate) fn drain_changes(&mut self, out: &mut Vec<BlockChange>) -> bool {
        self.changes.drain(out)
    }

    /// Returns the events since the last call.
    pub(crate) fn take_events(&mut self) -> Vec<Event> {
        self.events.take(&mut self.taken)
    }
    /// Returns the number of the next event.
    pub(crate) fn next_event(&self) -> u64 {
        self.events.next_id()
    }
    /// Records that no block of the device can be reused any more.
    pub(crate) fn clear(&mut self) {
        self.events.push(EventKind::Cleared { tier: Tier::Device });
    }

    /// Records that a block's bytes are read beside the queue. Without content it may be written at
    /// once.
    pub(crate) fn begin_read(&mut self, place: (GroupId, BlockId), has_content: bool) {
        if has_content {
            self.reads.blocks.insert(place);
        } else {
            self.reads.outlived.push(place);
        }
    }
    /// Records that the reads of a block are done.
    pub(crate) fn end_read(&mut self, place: (GroupId, BlockId)) {
        self.reads.blocks.remove(&place);
    }
    /// Returns the blocks that lost their content while they were read: before they are written,
    /// their reads must be done.
    pub(crate) fn outlived_reads(&self) -> &[(GroupId, BlockId)] {
        &self.reads.outlived
    }
    /// Records that writes wait for the reads of the last of them.
    pub(crate) fn pop_outlived_read(&mut self) {
        self.reads.outlived.pop();
    }

    pub(super) fn block_stored(
        &mut self,
        (group, block): (GroupId, BlockId),
        content: &Content<'_>,
        priority: Priority,
        fill: Fill,
    ) {
        self.namespaces.enter(content.namespace);
        if fill == Fill::Full {
            self.block_written(group, block, content.key);
        }
        if fill != Fill::Partial && self.events.is_on() {
            let (salt, adapter) = self.namespaces.name(content.namespace).invariant(NAMESPACE);
            self.events.push(EventKind::Stored(StoredBlock {
                group,
                key: content.key,
                parent: content.parent,
                index: content.index,
                tokens: content.tokens.into(),
                tier: Tier::Device,
                priority,
                salt: salt.into(),
                adapter,
            }));
        }
    }
    /// Records that a full block that can be reused is written.
    pub(super) fn block_written(&mut self, group: GroupId, block: BlockId, key: BlockKey) {
        self.changes.push(BlockChange { group, block, key, kind: BlockChangeKind::Stored });
    }
    pub(super) fn block_removed(&mut self, group: GroupId, block: BlockId, removed: Removed) {
        self.content_left(group, block, removed);
        if let Some(key) = removed.gone {
            self.events.push(EventKind::Removed { group, key, tier: Tier::Device });
        }
    }
    /// Does what [`Self::block_removed`] does, without an event.
    pub(super) fn content_left(&mut self, group: GroupId, block: BlockId, removed: Removed) {
        self.namespaces.leave(removed.namespace);
        if !self.reads.blocks.is_empty() && self.reads.blocks.remove(&(group, block)) {
            self.reads.outlived.push((group, block));
        }
        if let Some(key) = removed.gone.filter(|_| !removed.is_unwritten) {
            self.changes.push(BlockChange { group, block, key, kind: BlockChangeKind::Removed });
        }
    }
    /// Records an event of a lower tier; `false` for events that are not of one, or are off.
    pub(crate) fn announce(&mut self, kind: EventKind) -> bool {
        let tier = match &kind {
            EventKind::Stored(block) => block.tier,
            EventKind::Removed { tier, .. }
            | EventKind::Updated { tier, .. }
            | EventKind::Cleared { tier } => *tier,
            EventKind::Lost { .. } => return false,
        };
        let is_taken = tier != Tier::Device && self.events.is_on();
        if is_taken {
            self.events.push(kind);
        }
        is_taken
    }
    pub(super) fn block_updated(&mut self, group: GroupId, key: BlockKey, priority: Priority) {
        self.events.push(EventKind::Updated { group, key, tier: Tier::Device, priority });
    }
}
