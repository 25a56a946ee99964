//! Measured rates: how fast a store gives bytes, and how fast the model computes tokens.
use std::time::Duration;

use kv_core::num::{to_f64, to_u64};

/// Weight of the newest measurement in a moving average.
const WEIGHT: f64 = 0.2;

/// A moving average; `None` before the first measurement.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Average(Option<f64>);

impl Average {
    pub(super) fn note(&mut self, value: f64) {
        if !value.is_finite() {
            return;
        }
        self.0 = Some(self.0.map_or(value, |old| (value - old).mul_add(WEIGHT, old)));
    }
    pub(super) fn get(self) -> Option<f64> {
        self.0
    }
}

/// Moving averages of a store's transfers.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct TransferRates {
    seconds_per_byte: Average,
    lookup_seconds: Average,
}

impl TransferRates {
    /// Notes a read of one chunk by one of several threads.
    pub(super) fn note_read(&mut self, bytes: usize, time: Duration) {
        if bytes > 0 {
            self.seconds_per_byte.note(time.as_secs_f64() / to_f64(to_u64(bytes)));
        }
    }
    pub(super) fn note_lookup(&mut self, time: Duration) {
        self.lookup_seconds.note(time.as_secs_f64());
    }
    /// Returns the time of a lookup; nothing before the first one.
    pub(super) fn latency(&self) -> Duration {
        let seconds = self.lookup_seconds.get().unwrap_or(0.0);
        Duration::try_from_secs_f64(seconds).unwrap_or_default()
    }
    pub(super) fn bytes_per_second(&self) -> Option<f64> {
        self.seconds_per_byte.get().map(f64::recip)
    }
}
