//! `TieredCache` over a cache on the CPU: rows of every prompt equal those of a cache without
//! tiers.
#![expect(
    clippy::unwrap_used,
    clippy::as_conversions,
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::float_cmp,
    clippy::panic,
    reason = "tests"
)]
mod basic;
mod crash;
mod events;
mod eviction;
mod failures;
mod flush;
mod forget;
mod handoff;
mod hang;
mod indexer;
mod kind;
mod lives;
mod order;
mod pairs;
mod prompt;
mod recurrence;
mod session;
mod snapshots;
mod states;
mod steps;
mod store;
mod support;
mod truth;
mod world;
