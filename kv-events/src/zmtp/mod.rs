//! ZMTP, the protocol of ZeroMQ, as far as a server of events needs it: versions 3.0 and 3.1 with
//! the mechanism `NULL`.
//!
//! [`Parser`] reads what peers send, without any input or output of its own: it is public for tools
//! that choose bytes, as fuzzers do.
pub(crate) mod frame;
mod parser;

pub use parser::{Fault, Input, Parser};
