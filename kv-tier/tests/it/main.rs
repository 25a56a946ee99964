//! Guarantees for users of the stores.
#![expect(
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    clippy::panic,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "tests"
)]
#[cfg(target_os = "linux")]
mod disk;
#[cfg(target_os = "linux")]
mod faults;
#[cfg(target_os = "linux")]
mod folder;
#[cfg(target_os = "linux")]
mod processes;
#[cfg(feature = "seal")]
mod sealed;
#[cfg(target_os = "linux")]
mod strangers;
mod suite;
#[cfg(target_os = "linux")]
mod support;
