//! Blocks: who holds them, what can be reused, and which sequence they belong to.
mod ledger;
mod pool;
mod table;

pub use ledger::Ledger;
pub use pool::{BlockPool, PoolStats, Taken};
pub use table::BlockTables;
