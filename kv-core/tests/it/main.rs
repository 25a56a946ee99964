//! Integration tests of kv-core, one binary.
mod front;
