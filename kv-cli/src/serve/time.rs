//! The time of day, and the time by which a request is answered.
use std::time::{SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

/// The time by which a request must have been answered; a part of every request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Deadline(pub(super) Instant);

/// Returns the seconds since 1970.
pub(super) fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
