//! State that all pools of a cache share: events and namespaces.
use crate::events::{Event, EventKind, EventLog, StoredBlock, Tier};
use crate::eviction::Priority;
use crate::ids::GroupId;
use crate::reuse::{BlockKey, Content, NamespaceId, Namespaces};

/// Events and namespaces of all pools of a cache.
#[derive(Debug, Default)]
pub struct Ledger {
    events: EventLog,
    taken: u64,
    namespaces: Namespaces,
}

impl Ledger {
    /// Creates the ledger of a cache with this [encoding
    /// key](crate::scheduling::CacheState::encoding_key), which keeps at most `events` events.
    pub fn new(encoding: u128, events: usize) -> Self {
        let namespaces = Namespaces::new(encoding);
        Self { events: EventLog::new(events), taken: 0, namespaces }
    }

    /// Adds a user to the namespace of a salt and an adapter, and returns its ID and root.
    pub fn join(&mut self, salt: &[u8], adapter: Option<u64>) -> (NamespaceId, BlockKey) {
        self.namespaces.join(salt, adapter)
    }
    /// Removes a user of a namespace.
    pub fn leave(&mut self, id: NamespaceId) {
        self.namespaces.leave(id);
    }
    /// Returns ID and root of the namespace of a salt and an adapter, if it has users.
    pub fn find_namespace(
        &self,
        salt: &[u8],
        adapter: Option<u64>,
    ) -> Option<(NamespaceId, BlockKey)> {
        self.namespaces.find(salt, adapter)
    }

    pub(crate) fn namespaces_mut(&mut self) -> &mut Namespaces {
        &mut self.namespaces
    }

    /// Returns the events since the last call.
    pub fn take_events(&mut self) -> Vec<Event> {
        self.events.take(&mut self.taken)
    }
    /// Returns the number of the next event.
    pub fn next_event(&self) -> u64 {
        self.events.next_id()
    }
    /// Records that nothing can be reused any more.
    pub fn clear(&mut self) {
        self.events.push(EventKind::Cleared);
    }

    pub(super) fn block_stored(
        &mut self,
        group: GroupId,
        content: &Content<'_>,
        priority: Priority,
        is_news: bool,
    ) {
        self.namespaces.enter(content.namespace);
        if is_news && self.events.is_on() {
            self.events.push(EventKind::Stored(StoredBlock {
                group,
                key: content.key,
                parent: content.parent,
                index: content.index,
                tokens: content.tokens.into(),
                tier: Tier::Device,
                priority,
            }));
        }
    }
    pub(super) fn block_removed(
        &mut self,
        group: GroupId,
        namespace: NamespaceId,
        gone: Option<BlockKey>,
    ) {
        self.namespaces.leave(namespace);
        if let Some(key) = gone {
            self.events.push(EventKind::Removed { group, key });
        }
    }
    pub(super) fn block_updated(&mut self, group: GroupId, key: BlockKey, priority: Priority) {
        self.events.push(EventKind::Updated { group, key, tier: Tier::Device, priority });
    }
}
