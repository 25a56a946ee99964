//! Chunks for measurements of stores: of an 8-billion-parameter model in bf16, each with its own
//! header. Also the threads that move them in random order.
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

use kv::reuse::BlockKey;
use kv::tier::chunk::{encode_header, verify};
use kv::tier::{ChunkAddress, ChunkRoot, ChunkSpec, Expectation, Identity, ModelDigest};
use kv::{CacheSpec, GroupId, KvFormat};

use crate::measure::TierError;
use crate::num::{to_offset, to_u32, to_u64};

/// Chunks that differ in their headers.
#[derive(Debug)]
pub struct Chunks {
    root: ChunkRoot,
    payload: Aligned,
    list: Vec<Chunk>,
}

#[derive(Debug)]
struct Chunk {
    address: ChunkAddress,
    tokens: Vec<u32>,
    header: Vec<u8>,
}

impl Chunks {
    /// Makes chunks of `bytes` together, at least 8. Their root is new in every run, so that
    /// nothing of theirs is in a store before.
    ///
    /// # Errors
    /// [`TierError::Other`] for a number of bytes that no run can move.
    pub fn new(bytes: u64) -> Result<Self, TierError> {
        let spec = CacheSpec::builder().layers(32).kv_heads(8).head_dim(128);
        let spec = spec.format(KvFormat::Bf16).paged(16, 64).build().map_err(TierError::other)?;
        let spec = ChunkSpec::new(&spec, GroupId(0)).map_err(TierError::other)?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let run = format!("{} {}", now.as_nanos(), std::process::id());
        let identity = Identity::new(ModelDigest::of_bytes(run.as_bytes()));
        let root = identity.root(&spec, 0, b"", None).map_err(TierError::other)?;
        let mut payload = Aligned::new(spec.chunk_bytes());
        fill(payload.bytes_mut());
        let count = bytes.div_euclid(to_u64(spec.chunk_bytes())).max(CHUNKS_MIN);
        let mut made = Self { root, payload, list: Vec::new() };
        for number in 0..u32::try_from(count).map_err(TierError::other)? {
            let chunk = made.make(number, now.as_secs())?;
            made.list.push(chunk);
        }
        Ok(made)
    }

    fn make(&mut self, number: u32, written_at: u64) -> Result<Chunk, TierError> {
        let (root, spec) = (&self.root, self.root.spec());
        let tokens: Vec<_> = spec.span(0).map(|at| at.wrapping_add(number << 8)).collect();
        let name = root.chunk_name(0, &root.name(), &tokens, &[]);
        let says = expectation(root, name, &tokens);
        let bytes = self.payload.bytes_mut();
        encode_header(bytes, &says, written_at).map_err(TierError::other)?;
        let header = bytes[..spec.header_bytes()].to_vec();
        Ok(Chunk { address: ChunkAddress { root: root.name(), name }, tokens, header })
    }

    /// Returns the number of chunks.
    pub fn count(&self) -> usize {
        self.list.len()
    }

    /// Returns the number of chunks that a store gets that is not a folder.
    pub fn count_of_store(&self) -> usize {
        let most = to_u64(STORE_BYTES).checked_div(self.chunk_bytes()).unwrap_or(1);
        self.count().min(to_offset(most))
    }

    /// Returns the bytes of one chunk.
    pub fn chunk_bytes(&self) -> u64 {
        to_u64(self.payload.len)
    }

    /// Returns memory for a chunk, with the payload of all chunks in it.
    pub fn buffer(&self) -> Aligned {
        let mut buffer = Aligned::new(self.payload.len);
        buffer.bytes_mut().copy_from_slice(self.payload.bytes());
        buffer
    }

    /// Returns several of [`Self::buffer`].
    pub fn buffers(&self, count: u32) -> Vec<Aligned> {
        (0..count).map(|_| self.buffer()).collect()
    }

    /// Returns the address of chunk `item`.
    ///
    /// # Errors
    /// [`TierError::Other`] if there is no such chunk.
    pub fn address(&self, item: usize) -> Result<ChunkAddress, TierError> {
        self.get(item).map(|chunk| chunk.address)
    }

    /// Returns the addresses of the first `count` chunks.
    pub fn addresses(&self, count: usize) -> Vec<ChunkAddress> {
        self.list.iter().take(count).map(|chunk| chunk.address).collect()
    }

    /// Turns the content of a [`Self::buffer`] into chunk `item`.
    ///
    /// # Errors
    /// [`TierError::Other`] if there is no such chunk.
    pub fn complete(&self, item: usize, buffer: &mut Aligned) -> Result<(), TierError> {
        let header = &self.get(item)?.header;
        for (to, from) in buffer.bytes_mut().iter_mut().zip(header) {
            *to = *from;
        }
        Ok(())
    }

    /// Checks everything about chunk `item` after it was read: its header, and the CRC-64 of its
    /// payload.
    ///
    /// # Errors
    /// [`TierError::Other`] for what is wrong with it, or if there is no such chunk.
    pub fn verify(&self, item: usize, bytes: &[u8]) -> Result<(), TierError> {
        let chunk = self.get(item)?;
        let expected = expectation(&self.root, chunk.address.name, &chunk.tokens);
        verify(bytes, &expected).map(drop).map_err(TierError::other)
    }

    fn get(&self, item: usize) -> Result<&Chunk, TierError> {
        self.list.get(item).ok_or_else(|| TierError::other(format!("there is no chunk {item}")))
    }
}

fn expectation<'a>(
    root: &'a ChunkRoot,
    name: kv::tier::ChunkName,
    tokens: &'a [u32],
) -> Expectation<'a> {
    let (parent, last_key) = (root.name(), BlockKey(u128::from(to_u32(tokens.len()))));
    Expectation { root, index: 0, parent, name, last_key, tokens, contents: &[] }
}

/// Calls `run` for each of `items`, on one thread for each of `states`. The first failure ends it.
///
/// # Errors
/// The first failure.
pub fn on_threads<S: Send, E: Send>(
    states: &mut [S],
    items: &[usize],
    run: impl Fn(&mut S, usize) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let (next, failure) = (AtomicUsize::new(0), Mutex::new(None));
    thread::scope(|scope| {
        for state in states {
            scope.spawn(|| {
                while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(error) = run(state, *item) {
                        next.store(items.len(), Ordering::Relaxed);
                        *failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                        return;
                    }
                }
            });
        }
    });
    let failure = failure.into_inner().unwrap_or_else(PoisonError::into_inner);
    failure.map_or(Ok(()), Err)
}

/// Returns `0..count` in an order that depends on `seed`.
pub fn shuffled(count: usize, seed: u64) -> Vec<usize> {
    let mut order: Vec<_> = (0..count).collect();
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    for end in (1..count).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let at = state % (to_u64(end) + 1);
        order.swap(end, usize::try_from(at).unwrap_or(0));
    }
    order
}

/// Fills memory with bytes that nothing can compress.
fn fill(bytes: &mut [u8]) {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    for word in bytes.as_chunks_mut::<8>().0 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        *word = state.to_le_bytes();
    }
}

/// Memory on a multiple of 4,096, as direct I/O needs it.
pub struct Aligned {
    memory: Vec<u8>,
    begin: usize,
    len: usize,
}

impl Aligned {
    /// Returns `len` zeroes.
    pub fn new(len: usize) -> Self {
        let memory = vec![0; len + PAGE];
        let begin = memory.as_ptr().align_offset(PAGE).min(PAGE);
        Self { memory, begin, len }
    }

    /// Returns the bytes.
    pub fn bytes(&self) -> &[u8] {
        let end = self.begin + self.len;
        &self.memory[self.begin..end]
    }

    /// Returns the bytes, to change them.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let end = self.begin + self.len;
        &mut self.memory[self.begin..end]
    }
}

impl fmt::Debug for Aligned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Aligned").field("len", &self.len).finish_non_exhaustive()
    }
}

const PAGE: usize = 4_096;
const CHUNKS_MIN: u64 = 8;
/// Bytes that a store gets that is not a folder.
const STORE_BYTES: usize = 128 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_has_every_index_once_and_depends_on_the_seed() {
        let (a, b) = (shuffled(100, 1), shuffled(100, 2));
        assert_ne!(a, b);
        assert_ne!(a, (0..100).collect::<Vec<_>>());
        for mut order in [a, b] {
            order.sort_unstable();
            assert_eq!(order, (0..100).collect::<Vec<_>>());
        }
        assert_eq!((shuffled(0, 1), shuffled(1, 1)), (vec![], vec![0]));
    }

    #[test]
    fn every_item_runs_once_and_the_first_failure_ends_the_pass() {
        let mut states = vec![0_usize; 4];
        on_threads(&mut states, &shuffled(50, 3), |sum, item| {
            *sum += item + 1;
            Ok::<(), TierError>(())
        })
        .unwrap();
        assert_eq!(states.iter().sum::<usize>(), 50 * 51 / 2);
        let failed = on_threads(&mut states, &[1, 2, 3], |_, _| Err(TierError::NotHere));
        assert!(matches!(failed, Err(TierError::NotHere)));
    }
}
