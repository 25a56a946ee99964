//! Blocks: pools with holders and content, and block tables.
//!
//! A cache has its own; a simulation of block management alone creates them without a cache.
mod ledger;
mod pool;
mod table;

pub use ledger::Ledger;
pub use pool::{BlockPool, PoolStats, Taken};
pub use table::BlockTables;
