//! Prefix reuse: how blocks of K and V are named by the tokens they came from, and found again.
mod index;
mod key;
mod namespace;
#[cfg(test)]
mod tests;

pub(crate) use index::Offered;
pub use index::{Content, IndexedBlock, Inserted, PrefixIndex, Removed};
pub use key::{BlockContent, BlockKey, ContentSpan};
pub use namespace::NamespaceId;
pub(crate) use namespace::{Namespace, Namespaces};
