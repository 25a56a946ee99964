//! A bounded map that keeps chunks: for tests, and where a map is enough.
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use kv_core::events::Tier;
use kv_core::num::to_u64;

use crate::store::check_deadline;
use crate::{BlockStore, ChunkAddress, Put, Scope, StoreError, StoreErrorKind};

/// Keeps chunks in memory. The least recently used ones are evicted before a bound would be passed.
///
/// A lookup is a use of what it finds, of the last chunk first, so that the end of a prompt is
/// evicted before its beginning: the order of a folder.
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
    bytes_max: usize,
    chunks_max: usize,
    chunks: Mutex<Chunks>,
}

impl MemoryStore {
    /// Creates an empty store of at most `bytes` bytes of chunks.
    pub fn new(bytes: usize) -> Self {
        Self { bytes_max: bytes, chunks_max: usize::MAX, chunks: Mutex::default() }
    }

    /// Limits the number of chunks too.
    #[must_use]
    pub fn with_chunks_max(self, chunks: usize) -> Self {
        Self { chunks_max: chunks, ..self }
    }

    /// Returns the bytes of all chunks.
    pub fn held_bytes(&self) -> usize {
        self.lock().held
    }

    /// Returns how many chunks were evicted so far.
    pub fn evictions(&self) -> u64 {
        self.lock().evictions
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
        let mut kept = self.lock();
        for chunk in chunks.iter().rev() {
            kept.renew(chunk);
        }
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
        let Some((used, bytes)) = kept.by_address.get(chunk) else { return Ok(None) };
        let Some(into) = into.get_mut(..bytes.len()) else {
            return Err(StoreError::new(
                StoreErrorKind::Corrupt,
                format!("read of {}", chunk.name),
            ));
        };
        into.copy_from_slice(bytes);
        // Reads after a lookup, first chunk first, keep the order that the lookup has made.
        let is_old = *used + to_u64(kept.by_address.len() / 4) + 1 < kept.next;
        if is_old {
            kept.renew(chunk);
        }
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
        let room = self.bytes_max.checked_sub(bytes.len()).zip(self.chunks_max.checked_sub(1));
        let Some((bytes_before, chunks_before)) = room else {
            return Err(failed(StoreErrorKind::Full));
        };
        while kept.held > bytes_before || kept.by_address.len() > chunks_before {
            let Some((_, oldest)) = kept.by_use.pop_first() else { break };
            kept.take(&oldest);
            kept.evictions += 1;
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
            .field("bytes_max", &self.bytes_max)
            .field("chunks_max", &self.chunks_max)
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
    evictions: u64,
}

impl Chunks {
    /// Makes a chunk the most recently used one, if it is there.
    fn renew(&mut self, chunk: &ChunkAddress) {
        let Some((used, _)) = self.by_address.get_mut(chunk) else { return };
        self.by_use.remove(used);
        *used = self.next;
        self.by_use.insert(self.next, *chunk);
        self.next += 1;
    }

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

    #[test]
    fn a_number_of_chunks_is_a_bound_too() {
        let store = MemoryStore::new(100).with_chunks_max(2);
        let soon = Instant::now() + Duration::from_secs(5);
        for n in 0..5 {
            assert_eq!(store.put(&chunk(n), &[n; 3], soon).unwrap(), Put::New);
        }
        let all = [0, 1, 2, 3, 4].map(chunk);
        let found = store.contains(&all, soon).unwrap();
        assert_eq!(found, [false, false, false, true, true]);
        assert_eq!((store.evictions(), store.held_bytes()), (3, 6));
        let none = MemoryStore::new(100).with_chunks_max(0);
        let full = none.put(&chunk(0), &[0], soon).unwrap_err();
        assert_eq!(full.kind(), StoreErrorKind::Full);
    }

    #[test]
    fn the_end_of_a_prompt_is_evicted_before_its_beginning() {
        let store = MemoryStore::new(100).with_chunks_max(20);
        let soon = Instant::now() + Duration::from_secs(5);
        for n in 0..20 {
            store.put(&chunk(n), &[n], soon).unwrap();
        }
        // A prompt of four chunks is found and read, first chunk first.
        let prompt = [0, 1, 2, 3].map(chunk);
        store.contains(&prompt, soon).unwrap();
        for one in &prompt {
            assert_eq!(store.get(one, &mut [0], soon).unwrap(), Some(1));
        }
        // Everything else is evicted, then its last chunk.
        for n in 20..37 {
            store.put(&chunk(n), &[n], soon).unwrap();
        }
        let found = store.contains(&prompt, soon).unwrap();
        assert_eq!(found, [true, true, true, false]);
    }
}
