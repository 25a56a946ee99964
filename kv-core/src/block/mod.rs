//! Blocks: pools with holders and content, and block tables.
mod ledger;
mod pool;
mod table;

pub use ledger::Ledger;
pub use pool::{BlockPool, PoolStats, Taken};
pub use table::BlockTables;
