//! What a user of the stores can rely on.
#![expect(clippy::indexing_slicing, clippy::arithmetic_side_effects, reason = "tests")]
mod suite;
