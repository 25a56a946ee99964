//! Blocks: pools with holders and content, and block tables.
//!
//! A cache has its own; a simulation of block management alone creates them without a cache.
mod changes;
mod ledger;
mod pool;
mod table;

pub use changes::{BlockChange, BlockChangeKind};
pub use ledger::Ledger;
pub(crate) use pool::Fill;
pub use pool::{BlockPool, PoolStats, Taken};
pub use table::BlockTables;
