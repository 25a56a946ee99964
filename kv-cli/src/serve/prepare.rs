//! From the body of a request to the tokens of its prompts: work that takes time, done on threads
//! of its own while the others answer.
use std::sync::Arc;

use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};

use super::Server;
use super::answer::too_late;
use super::body::Whole;
use super::engine::{Place, Refused};
use super::error::{ApiError, internal};
use super::request::Wanted;

/// Requests that are parsed and tokenised at once.
const AT_ONCE: u32 = 2;

/// A body above this many bytes is parsed alone: its parsed form may be several times as long.
const ALONE: usize = 1 << 20;

/// Reads a request, such as into the tokens of its prompts; gives up at the deadline.
pub(super) type Read<T> = fn(&Server, &[u8], Instant) -> Result<T, ApiError>;

/// Makes the places of requests that are prepared at once.
pub(super) fn places() -> Arc<Semaphore> {
    Arc::new(Semaphore::new(crate::num::to_usize(AT_ONCE)))
}

impl Server {
    /// Parses and tokenises a request. The deadline ends the wait, and the work at its next step.
    pub(super) async fn prepare<T: Send + 'static>(
        self: &Arc<Self>,
        read: Read<T>,
        body: Whole,
        deadline: Instant,
    ) -> Result<T, ApiError> {
        let places = if body.bytes().len() > ALONE { AT_ONCE } else { 1 };
        let place = Arc::clone(&self.preparing).acquire_many_owned(places);
        let place = timeout_at(deadline, place).await.map_err(|_| too_late())?;
        let place = place.map_err(|error| internal(&error.to_string()))?;
        let server = Arc::clone(self);
        let work = tokio::task::spawn_blocking(move || {
            let prepared = read(&server, body.bytes(), deadline);
            drop((body, place));
            prepared
        });
        let done = timeout_at(deadline, work).await.map_err(|_| too_late())?;
        done.map_err(|error| internal(&error.to_string()))?
    }

    /// Takes room in the queue for the texts of a request, before its prompts cost anything.
    pub(super) fn reserve(&self, prompts: usize, wanted: &Wanted) -> Result<Place, ApiError> {
        // A request may ask for any number of texts.
        Ok(self.engine.reserve(prompts.saturating_mul(wanted.n))?)
    }

    /// Returns the tokens of a text. One whose length proves that it does not fit into the model's
    /// context is refused before: tokens of it would be many times as large.
    pub(super) fn encode(
        &self,
        text: &str,
        field: &'static str,
        deadline: Instant,
    ) -> Result<Vec<u32>, ApiError> {
        let (bytes, context) = (text.len(), self.config.context());
        let tokens = self.tokenizer.tokens_at_least(bytes);
        if tokens >= crate::num::to_usize(context) {
            let refused = self.engine.refuse(Refused::TooManyBytes { bytes, tokens, context });
            return Err(ApiError::from(refused).about(field));
        }
        if Instant::now() >= deadline {
            return Err(too_late());
        }
        match self.tokenizer.encode(text, &self.config) {
            Ok(encoded) => Ok(encoded.tokens),
            Err(error) => Err(ApiError::bad(format!("{field}: {error}")).about(field)),
        }
    }
}
