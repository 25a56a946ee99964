//! Namespaces: the prompts that may share blocks.
use hashbrown::HashMap;

use crate::invariant::Invariant;
use crate::num::{to_u32, to_usize};
use crate::reuse::BlockKey;

/// A number for a salt and an adapter; equal numbers mean equal ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct NamespaceId(pub(crate) u32);

impl NamespaceId {
    /// The namespace of no prompt.
    pub(crate) const NONE: Self = Self(u32::MAX);
}

const USED: &str = "a namespace has users as long as its ID is used";

/// ID and root of a namespace.
pub(crate) type Namespace = (NamespaceId, BlockKey);

/// Salt and adapter.
type Name = (Box<[u8]>, Option<u64>);

#[derive(Debug)]
struct Entry {
    name: Name,
    root: BlockKey,
    /// Number of sequences and blocks in the namespace.
    users: u64,
}

/// The namespaces in use. An ID is reused only when it has no user any more.
#[derive(Debug, Default)]
pub(crate) struct Namespaces {
    encoding: u128,
    numbers: HashMap<Name, u32>,
    spaces: Vec<Option<Entry>>,
    unused: Vec<u32>,
}

impl Namespaces {
    /// Creates the namespaces of a cache with this encoding key.
    pub(crate) fn new(encoding: u128) -> Self {
        Self { encoding, ..Self::default() }
    }

    /// Replaces the encoding key; no namespace may have a user.
    pub(crate) fn set_encoding(&mut self, encoding: u128) {
        debug_assert!(self.numbers.is_empty(), "roots hash the encoding");
        self.encoding = encoding;
    }

    /// Returns ID and root of a namespace with users.
    pub(crate) fn find(
        &self,
        salt: &[u8],
        adapter: Option<u64>,
    ) -> Option<(NamespaceId, BlockKey)> {
        // The lookup needs an owned name; only prompts with a salt pay for it.
        let number = *self.numbers.get(&(salt.into(), adapter))?;
        Some((NamespaceId(number), self.root(NamespaceId(number))))
    }

    /// Adds a user, and the namespace if it is new.
    pub(crate) fn join(&mut self, salt: &[u8], adapter: Option<u64>) -> (NamespaceId, BlockKey) {
        let number = match self.find(salt, adapter) {
            Some((id, _)) => id.0,
            None => self.add((salt.into(), adapter)),
        };
        self.enter(NamespaceId(number));
        (NamespaceId(number), self.root(NamespaceId(number)))
    }

    /// Adds a user of an existing namespace.
    pub(crate) fn enter(&mut self, id: NamespaceId) {
        self.get_mut(id).users += 1;
    }

    /// Removes a user.
    pub(crate) fn leave(&mut self, id: NamespaceId) {
        let space = self.get_mut(id);
        space.users -= 1;
        if space.users == 0
            && let Some(gone) = self.spaces[to_usize(id.0)].take()
        {
            self.numbers.remove(&gone.name);
            self.unused.push(id.0);
        }
    }

    /// Returns the key before the first block of a prompt.
    pub(crate) fn root(&self, id: NamespaceId) -> BlockKey {
        self.spaces[to_usize(id.0)].as_ref().invariant(USED).root
    }

    /// Returns salt and adapter of a namespace with users.
    pub(crate) fn name(&self, id: NamespaceId) -> Option<(&[u8], Option<u64>)> {
        let space = self.spaces.get(to_usize(id.0)).and_then(Option::as_ref)?;
        let (salt, adapter) = &space.name;
        Some((salt, *adapter))
    }

    fn get_mut(&mut self, id: NamespaceId) -> &mut Entry {
        self.spaces.get_mut(to_usize(id.0)).and_then(Option::as_mut).invariant(USED)
    }

    fn add(&mut self, name: Name) -> u32 {
        let root = BlockKey::root(self.encoding, &name.0, name.1);
        let number = self.unused.pop().unwrap_or_else(|| {
            self.spaces.push(None);
            to_u32(self.spaces.len() - 1)
        });
        self.numbers.insert(name.clone(), number);
        self.spaces[to_usize(number)] = Some(Entry { name, root, users: 0 });
        number
    }
}
