//! Operations besides attention.
pub(crate) mod convert;
pub(crate) mod copy;
pub(crate) mod gather;
pub(crate) mod write;
mod write_tail;
