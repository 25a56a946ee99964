//! Number conversions of this crate, each in one place.
use std::time::Duration;

pub(crate) use kv_core::num::{to_f64, to_u32, to_u64, to_usize};

/// Returns `count / seconds`, zero if no time passed.
pub(crate) fn per_second(count: u64, seconds: f64) -> f64 {
    if seconds > 0.0 { to_f64(count) / seconds } else { 0.0 }
}

/// Converts a time to milliseconds.
pub(crate) fn to_ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
