//! The body of a request: read until its deadline, into the memory that all bodies share.
// Reads requests that may be anything.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::StatusCode;
use hyper::body::{Body as _, Bytes};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

use super::error::ApiError;

/// Longest body of a request, in bytes.
pub(super) const BODY_MAX: usize = 8 << 20;

/// Most bytes of all bodies that are read or wait to be parsed.
const BODIES_MAX: usize = 32 << 20;

/// First bytes of a body, which do not count: however many large bodies there are, a request of
/// usual size has room. Times the number of connections they are bounded too.
const SMALL: usize = 16 << 10;

/// Longest pause while a body is sent.
const PAUSE: Duration = Duration::from_secs(30);

/// The memory of all bodies.
#[derive(Debug)]
pub(super) struct Bodies {
    /// One permit is a KiB.
    room: Arc<Semaphore>,
}

/// A body that was read whole.
#[derive(Debug, Default)]
pub(super) struct Whole {
    bytes: Vec<u8>,
    room: Option<OwnedSemaphorePermit>,
}

impl Whole {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

impl Bodies {
    pub(super) fn new() -> Self {
        Self { room: Arc::new(Semaphore::new(BODIES_MAX >> 10)) }
    }

    /// Reads a body to its end.
    ///
    /// # Errors
    /// 408 if it has not come by the deadline, or pauses for too long; 413 above [`BODY_MAX`]; 503
    /// if other bodies have all memory; 400 if it breaks off.
    pub(super) async fn read(&self, mut body: Body, deadline: Instant) -> Result<Whole, ApiError> {
        let mut whole = Whole::default();
        loop {
            let paused = Instant::now().checked_add(PAUSE).unwrap_or(deadline);
            let frame = poll_fn(|context| Pin::new(&mut body).poll_frame(context));
            let Ok(frame) = timeout_at(deadline.min(paused), frame).await else {
                let error = "the body did not come in time";
                return Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, error).with_code("timeout"));
            };
            match frame {
                None => return Ok(whole),
                Some(Ok(frame)) => {
                    if let Ok(bytes) = frame.into_data() {
                        self.add(&mut whole, &bytes)?;
                    }
                }
                Some(Err(error)) => {
                    let why = crate::failure::chain(&error);
                    return Err(ApiError::bad(format!("the body has no end: {why}")));
                }
            }
        }
    }

    fn add(&self, whole: &mut Whole, bytes: &Bytes) -> Result<(), ApiError> {
        let length = whole.bytes.len().saturating_add(bytes.len());
        if length > BODY_MAX {
            let error = format!("the body is longer than {BODY_MAX} bytes");
            return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, error));
        }
        let held = whole.room.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let wanted = length.saturating_sub(SMALL).div_ceil(1 << 10);
        if let Some(more) = wanted.checked_sub(held).filter(|more| *more > 0) {
            let more = u32::try_from(more).unwrap_or(u32::MAX);
            let Ok(room) = Arc::clone(&self.room).try_acquire_many_owned(more) else {
                let error = "other requests have long bodies: there is no room for this one now";
                return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, error).with_code("busy"));
            };
            match &mut whole.room {
                Some(held) => held.merge(room),
                none => *none = Some(room),
            }
        }
        // A quarter more than there is, so that memory is not twice the body.
        if whole.bytes.capacity() < length {
            let spare = whole.bytes.len().checked_div(4).unwrap_or(0);
            whole.bytes.reserve_exact(bytes.len().max(spare));
        }
        whole.bytes.extend_from_slice(bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use axum::response::IntoResponse as _;
    use futures_util::stream;

    use super::*;

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        let builder = &mut tokio::runtime::Builder::new_current_thread();
        builder.enable_time().build().expect("a runtime").block_on(future)
    }

    fn in_an_hour() -> Instant {
        Instant::now().checked_add(Duration::from_hours(1)).expect("a time")
    }

    fn status(error: ApiError) -> StatusCode {
        error.into_response().status()
    }

    #[test]
    fn a_body_is_read_whole_and_gives_its_room_back() {
        let bodies = Bodies::new();
        let all = bodies.room.available_permits();
        let pieces = vec![vec![b'x'; 5000]; 100];
        let body = Body::from_stream(stream::iter(pieces.into_iter().map(std::io::Result::Ok)));
        let whole = block_on(bodies.read(body, in_an_hour())).expect("a body");
        assert_eq!(whole.bytes(), vec![b'x'; 500_000]);
        assert!(whole.bytes.capacity() < 650_000, "{}", whole.bytes.capacity());
        assert_eq!(all - bodies.room.available_permits(), (500_000 - SMALL).div_ceil(1 << 10));
        drop(whole);
        assert_eq!(bodies.room.available_permits(), all);
    }

    #[test]
    fn long_bodies_share_their_memory_and_short_ones_need_none() {
        let bodies = Bodies::new();
        let read = |length| block_on(bodies.read(Body::from(vec![0; length]), in_an_hour()));
        let held: Vec<_> = (0..4).map(|_| read(BODY_MAX).expect("room for four")).collect();
        let rest = bodies.room.available_permits() << 10;
        assert_eq!(rest, 4 * SMALL);
        assert_eq!(status(read(rest + SMALL + 1).expect_err("full")), 503);
        assert!(read(SMALL).is_ok());
        drop(held);
        assert!(read(BODY_MAX).is_ok());
        assert_eq!(status(read(BODY_MAX + 1).expect_err("too long")), 413);
    }

    #[test]
    fn a_body_that_does_not_come_is_given_up_at_the_deadline() {
        let bodies = Bodies::new();
        let first = stream::iter([std::io::Result::Ok(vec![b'x'; 50_000])]);
        let body = Body::from_stream(futures_util::StreamExt::chain(first, stream::pending()));
        let late = block_on(async { bodies.read(body, Instant::now()).await });
        assert_eq!(status(late.expect_err("no end")), 408);
        assert_eq!(bodies.room.available_permits(), BODIES_MAX >> 10);
    }
}
