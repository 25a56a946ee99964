//! Blocks: who holds them, and which sequence they belong to.
mod pool;
mod table;

pub use pool::BlockPool;
pub use table::BlockTables;
