//! The parts of a session that need no cache.
mod file;
mod header;
