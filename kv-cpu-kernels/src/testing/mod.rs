//! Instruction sets in plain Rust, so that any CPU tests the loops of those it lacks.
pub(crate) mod amx;
pub(crate) mod wide;
