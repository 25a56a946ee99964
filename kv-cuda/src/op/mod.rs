//! The operations: what each kernel is given and how it is started.
pub(crate) mod attend;
pub(crate) mod convert;
pub(crate) mod copy;
pub(crate) mod gather;
mod pad;
pub(crate) mod write;
