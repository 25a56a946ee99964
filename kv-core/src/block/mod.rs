//! Blocks: pools with holders and content, and block tables.
//!
//! A cache changes its own, and others read them. A simulation of block management is a cache on
//! [`NullBackend`](crate::backend::NullBackend).
mod changes;
mod ledger;
mod pool;
mod table;

pub use changes::{BlockChange, BlockChangeKind};
pub(crate) use ledger::Ledger;
pub(crate) use pool::Fill;
pub use pool::{BlockPool, PoolStats};
pub use table::BlockTables;
