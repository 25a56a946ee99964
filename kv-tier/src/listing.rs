//! Listing of a store's content, for tools that show, check and repair it. Caches never list.
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use kv_core::num::to_u64;

#[cfg(any(feature = "redis", feature = "object"))]
use crate::store::after;
use crate::store::{BlockStore, ChunkAddress, Scope, StoreError, check_deadline};

/// Lists a store, and reads the beginnings of its chunks.
///
/// A listing is not a snapshot: chunks that are written or removed meanwhile may be in it or not.
/// The memory of a listing is bounded, whatever the store's size.
pub trait ListChunks: BlockStore {
    /// Calls `visit` with everything at the store's place, in no order, until it breaks. `limit`
    /// bounds each exchange with the store; the time that `visit` takes is not part of it. `visit`
    /// may read and remove chunks. Redis may name a chunk twice.
    ///
    /// # Errors
    /// [`Timeout`](crate::StoreErrorKind::Timeout) for an exchange longer than `limit`, and the
    /// failures of the store. A part may have been visited.
    fn list(
        &self,
        limit: Duration,
        visit: &mut dyn FnMut(Listed) -> ControlFlow<()>,
    ) -> Result<(), StoreError>;

    /// Reads the beginning of a chunk: as many bytes as both it and `into` have. Returns their
    /// number; `None` if there is no such chunk.
    ///
    /// # Errors
    /// [`Corrupt`](crate::StoreErrorKind::Corrupt) for an empty chunk,
    /// [`Timeout`](crate::StoreErrorKind::Timeout) past the deadline, and the failures of the
    /// store.
    fn get_front(
        &self,
        chunk: &ChunkAddress,
        into: &mut [u8],
        deadline: Instant,
    ) -> Result<Option<usize>, StoreError>;
}

/// Removes the chunks of a scope by listing them: [`BlockStore::remove_all`] of stores that list.
pub(crate) fn remove_listed(
    store: &impl ListChunks,
    scope: &Scope,
    deadline: Instant,
) -> Result<u64, StoreError> {
    const BATCH: usize = 256;
    let (mut removed, mut failure, mut batch) = (0_u64, None, Vec::new());
    let mut remove = |batch: &mut Vec<ChunkAddress>| {
        store.remove(batch, deadline)?;
        removed += to_u64(batch.len());
        batch.clear();
        Ok::<(), StoreError>(())
    };
    let limit = deadline.saturating_duration_since(Instant::now());
    store.list(limit, &mut |listed| {
        let Listed::Chunk(ListedChunk { address, .. }) = listed else {
            return ControlFlow::Continue(());
        };
        let checked = check_deadline(deadline, "removal").and_then(|()| {
            let is_in = scope.has(&address, |into| store.get_front(&address, into, deadline))?;
            batch.extend(is_in.then_some(address));
            if batch.len() < BATCH { Ok(()) } else { remove(&mut batch) }
        });
        match checked {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                failure = Some(error);
                ControlFlow::Break(())
            }
        }
    })?;
    if let Some(error) = failure {
        return Err(error);
    }
    if !batch.is_empty() {
        remove(&mut batch)?;
    }
    Ok(removed)
}

/// Something at a store's place.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "the name of a chunk, or another")]
pub enum Listed {
    /// Something under the name of a chunk. Its bytes may be any.
    Chunk(ListedChunk),
    /// Something under another name, which no cache reads or removes.
    Other {
        /// Its path or key.
        path: String,
    },
}

/// Something under the name of a chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "what every store tells")]
pub struct ListedChunk {
    /// The address for calls of this store. Redis and S3 keep 8 bytes of a root in the path, and
    /// the others are zeroes here; the chunk's header has the whole root.
    pub address: ChunkAddress,
    /// Number of bytes.
    pub bytes: u64,
}

/// Returns the deadline of an exchange that begins now.
#[cfg(any(feature = "redis", feature = "object"))]
pub(crate) fn deadline(limit: Duration) -> Instant {
    after(Instant::now(), limit)
}
