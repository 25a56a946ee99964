//! The parts of a session that need no cache.
#![expect(clippy::arithmetic_side_effects, reason = "tests may overflow, and fail then")]
mod file;
mod header;
