//! A bounded map that keeps chunks: for tests, and where a map is enough.
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use kv_core::events::Tier;
use kv_core::num::to_u64;

use crate::store::check_deadline;
use crate::{BlockStore, ChunkAddress, Put, Scope, StoreError, StoreErrorKind};

/// Keeps chunks in memory. The least recently used ones are evicted before the bound would be
/// passed.
///
/// ```
/// use std::time::{Duration, Instant};
///
/// use kv::tier::{BlockStore, ChunkAddress, ChunkName, MemoryStore, Put};
///
/// let store = MemoryStore::new(1 << 20);
/// let chunk = ChunkAddress { root: ChunkName::new([1; 32]), name: ChunkName::new([2; 32]) };
/// let deadline = Instant::now() + Duration::from_secs(1);
/// assert_eq!(store.put(&chunk, b"bytes", deadline)?, Put::New);
/// let mut into = [0; 8];
/// assert_eq!(store.get(&chunk, &mut into, deadline)?, Some(5));
/// assert_eq!(&into, b"bytes\0\0\0");
/// # Ok::<(), kv::tier::StoreError>(())
/// ```
pub struct MemoryStore {
    capacity: usize,
    chunks: Mutex<Chunks>,
}

impl MemoryStore {
    /// Creates an empty store of at most `capacity` bytes of chunks.
    pub fn new(capacity: usize) -> Self {
        Self { capacity, chunks: Mutex::default() }
    }

    /// Returns the bytes of all chunks.
    pub fn held_bytes(&self) -> usize {
        self.lock().held
    }

    fn lock(&self) -> MutexGuard<'_, Chunks> {
        self.chunks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BlockStore for MemoryStore {
    fn tier(&self) -> Tier {
        Tier::Host
    }

    fn contains(
        &self,
        chunks: &[ChunkAddress],
        deadline: Instant,
    ) -> Result<Vec<bool>, StoreError> {
        check_deadline(deadline, "lookup in memory")?;
        let kept = self.lock();
        Ok(chunks.iter().map(|chunk| kept.by_address.contains_key(chunk)).collect())
    }

    fn get(
        &self,
        chunk: &ChunkAddress,
        into: &mut [u8],
        deadline: Instant,
    ) -> Result<Option<usize>, StoreError> {
        check_deadline(deadline, "read from memory")?;
        let mut kept = self.lock();
        let kept = &mut *kept;
        let Some((used, bytes)) = kept.by_address.get_mut(chunk) else { return Ok(None) };
        let Some(into) = into.get_mut(..bytes.len()) else {
            return Err(StoreError::new(
                StoreErrorKind::Corrupt,
                format!("read of {}", chunk.name),
            ));
        };
        into.copy_from_slice(bytes);
        kept.by_use.remove(used);
        *used = kept.next;
        kept.by_use.insert(kept.next, *chunk);
        kept.next += 1;
        Ok(Some(into.len()))
    }

    fn put(
        &self,
        chunk: &ChunkAddress,
        bytes: &[u8],
        deadline: Instant,
    ) -> Result<Put, StoreError> {
        check_deadline(deadline, "write to memory")?;
        let failed = |kind| StoreError::new(kind, format!("write of {}", chunk.name));
        if bytes.is_empty() {
            return Err(failed(StoreErrorKind::Corrupt));
        }
        let mut kept = self.lock();
        if kept.by_address.contains_key(chunk) {
            return Ok(Put::WasThere);
        }
        let Some(room) = self.capacity.checked_sub(bytes.len()) else {
            return Err(failed(StoreErrorKind::Full));
        };
        while kept.held > room {
            let Some((_, oldest)) = kept.by_use.pop_first() else { break };
            kept.take(&oldest);
        }
        let used = kept.next;
        kept.next = used + 1;
        kept.held += bytes.len();
        kept.by_use.insert(used, *chunk);
        kept.by_address.insert(*chunk, (used, bytes.into()));
        Ok(Put::New)
    }

    fn remove(&self, chunks: &[ChunkAddress], deadline: Instant) -> Result<(), StoreError> {
        check_deadline(deadline, "removal from memory")?;
        let mut kept = self.lock();
        for chunk in chunks {
            if let Some(used) = kept.take(chunk) {
                kept.by_use.remove(&used);
            }
        }
        Ok(())
    }

    fn remove_all(&self, scope: &Scope, deadline: Instant) -> Result<u64, StoreError> {
        check_deadline(deadline, "removal from memory")?;
        let kept = self.lock();
        let mut chunks = Vec::new();
        for (chunk, (_, bytes)) in &kept.by_address {
            let front = |into: &mut [u8]| {
                let read = bytes.len().min(into.len());
                into.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
                Ok(Some(read))
            };
            chunks.extend(scope.has(chunk, front)?.then_some(*chunk));
        }
        drop(kept);
        self.remove(&chunks, deadline)?;
        Ok(to_u64(chunks.len()))
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kept = self.lock();
        f.debug_struct("MemoryStore")
            .field("capacity", &self.capacity)
            .field("held", &kept.held)
            .field("chunks", &kept.by_address.len())
            .finish()
    }
}

#[derive(Default)]
struct Chunks {
    by_address: HashMap<ChunkAddress, (u64, Box<[u8]>)>,
    /// Least recently used first.
    by_use: BTreeMap<u64, ChunkAddress>,
    next: u64,
    held: usize,
}

impl Chunks {
    /// Removes a chunk, and returns its place in the order of use, which the caller removes.
    fn take(&mut self, chunk: &ChunkAddress) -> Option<u64> {
        let (used, bytes) = self.by_address.remove(chunk)?;
        self.held -= bytes.len();
        Some(used)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::ChunkName;

    fn chunk(n: u8) -> ChunkAddress {
        ChunkAddress { root: ChunkName::new([0; 32]), name: ChunkName::new([n; 32]) }
    }

    #[test]
    fn the_least_recently_used_chunk_makes_room() {
        let (store, soon) = (MemoryStore::new(10), Instant::now() + Duration::from_secs(5));
        for n in 0..3 {
            assert_eq!(store.put(&chunk(n), &[n; 3], soon).unwrap(), Put::New);
        }
        assert_eq!(store.get(&chunk(0), &mut [0; 3], soon).unwrap(), Some(3));
        assert_eq!(store.put(&chunk(3), &[3; 4], soon).unwrap(), Put::New);
        let all = [0, 1, 2, 3].map(chunk);
        assert_eq!(store.contains(&all, soon).unwrap(), [true, false, true, true]);
        assert_eq!(store.held_bytes(), 10);
        let full = store.put(&chunk(4), &[4; 11], soon).unwrap_err();
        assert_eq!((full.kind(), store.held_bytes()), (StoreErrorKind::Full, 10));
        store.remove(&all, soon).unwrap();
        assert_eq!(store.held_bytes(), 0);
        assert!(store.lock().by_use.is_empty());
    }
}
