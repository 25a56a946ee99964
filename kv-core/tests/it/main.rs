//! Integration tests of kv-core, one binary.
#[cfg(test)]
mod erased;
