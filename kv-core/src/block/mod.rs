//! Blocks: pools with holders and content, and block tables.
mod changes;
mod ledger;
mod pool;
mod table;

pub use changes::{BlockChange, BlockChangeKind};
pub use ledger::Ledger;
pub(crate) use pool::Fill;
pub use pool::{BlockPool, PoolStats, Taken};
pub use table::BlockTables;
