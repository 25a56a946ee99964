//! The oracles: the expected results, computed in f64 and in the most obvious way.
pub mod attention;
pub mod gaussian;
pub mod rope;
pub mod round;
pub mod stored;
pub mod tail;
pub mod transforms;

pub use attention::{Attention, AttentionResult, Order, Real};
pub use rope::Rope;
pub use round::{round, ulp};
pub use stored::Stored;
pub use tail::Tail;
pub use transforms::Transforms;
