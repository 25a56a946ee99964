//! Prefix reuse: keys of blocks, computed from their tokens, and the index that finds them.
mod index;
mod key;
mod namespace;
#[cfg(test)]
mod tests;

pub use crate::cache::{Pin, PinId};
pub(crate) use index::Offered;
pub use index::{Content, IndexedBlock, Inserted, PrefixIndex, Removed};
pub use key::{BlockContent, BlockKey, ContentSpan};
pub use namespace::NamespaceId;
pub(crate) use namespace::{Namespace, Namespaces};
