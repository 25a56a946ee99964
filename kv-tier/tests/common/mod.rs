//! Chunks and deadlines for the tests of stores on real servers.
use std::time::{Duration, Instant};

use kv_tier::{ChunkAddress, ChunkName, StoreError, StoreErrorKind};

pub(crate) fn chunk(number: u8) -> ChunkAddress {
    ChunkAddress { root: ChunkName::new([1; 32]), name: ChunkName::new([number; 32]) }
}

/// Returns bytes that differ from place to place and from chunk to chunk.
pub(crate) fn bytes(number: u8, length: usize) -> Vec<u8> {
    (0..length).map(|at| (at / 251 + at * 7) as u8 ^ number).collect()
}

/// Returns a deadline that no healthy call reaches.
pub(crate) fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

#[track_caller]
pub(crate) fn assert_kind<T: std::fmt::Debug>(result: Result<T, StoreError>, kind: StoreErrorKind) {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), kind, "{error}: {:?}", std::error::Error::source(&error));
}

/// Checks that a call without an answer ends with a timeout, at most 50 ms late. A busy machine may
/// be late once or twice; a call without a limit is late every time.
#[track_caller]
pub(crate) fn assert_timeout<T: std::fmt::Debug>(call: impl Fn(Instant) -> Result<T, StoreError>) {
    let limit = Duration::from_millis(60);
    let mut late = Duration::MAX;
    for _ in 0..5 {
        let start = Instant::now();
        assert_kind(call(start + limit), StoreErrorKind::Timeout);
        late = late.min(start.elapsed().saturating_sub(limit));
        if late <= Duration::from_millis(50) {
            return;
        }
    }
    panic!("a deadline was exceeded by {late:?}");
}
