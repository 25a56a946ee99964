//! Prefix reuse, which finds cached blocks by their content: keys computed from the tokens of
//! blocks, the index, pins, and content that is not text.
mod index;
mod key;
mod namespace;
mod spans;
#[cfg(test)]
mod tests;

pub use crate::cache::{
    BlockHold, Import, ImportBlock, Pin, PinId, PrefixProbe, ProbedBlock, SequenceText,
};
pub(crate) use index::{Content, Offered, Removed};
pub use index::{IndexedBlock, PrefixIndex};
pub use key::{BlockContent, BlockKey, ContentSpan};
pub use namespace::NamespaceId;
pub(crate) use namespace::{Namespace, Namespaces};
pub(crate) use spans::ContentSpans;
