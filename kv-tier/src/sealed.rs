//! A store that encrypts its chunks: only a holder of the key can read or write them.
//!
//! `docs/formats.md` draws the object: a page that marks it as sealed, then the encrypted chunk.
//!
//! The address of an object is a keyed hash of the chunk's address. It reveals nothing and cannot
//! be guessed, and stores with different keys share a place without collisions. Every chunk has a
//! key of its own, and every write a random nonce.
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use aes_gcm::aead::array::Array;
use aes_gcm::aead::{AeadInOut, KeyInit};
use aes_gcm::{Aes256Gcm, Key};
use kv_core::events::Tier;
use kv_core::invariant::Invariant;

use crate::chunk::{SEALED_PAGE_BYTES, SealedPage};
use crate::hex;
use crate::name::ChunkName;
use crate::store::{BlockStore, ChunkAddress, Put, Scope, StoreError, StoreErrorKind};

/// Encrypts chunks on their way to another store, and decrypts them on their way back.
///
/// Each object is one page of 4,096 bytes longer than its chunk. An object that was changed, cut or
/// put in the place of another is [`StoreErrorKind::Corrupt`]. Without the key, the number of
/// objects, their sizes and times, and reads of them are visible. An object can be removed, and an
/// older one for the same chunk, with the same rows, can be put back.
///
/// The key is worth as much as the prompts: derive it from a secret of the tenant, for example by
/// `blake3::derive_key`, and keep it out of the store.
///
/// ```
/// use std::time::{Duration, Instant};
///
/// use kv::tier::{BlockStore, ChunkAddress, ChunkName, MemoryStore, SealedStore, TierOptions};
///
/// let store = SealedStore::new(MemoryStore::new(1 << 20), &[7; 32]);
/// let chunk = ChunkAddress { root: ChunkName::new([1; 32]), name: ChunkName::new([2; 32]) };
/// let deadline = Instant::now() + Duration::from_secs(1);
/// store.put(&chunk, b"bytes", deadline)?;
/// assert_eq!(store.get_ref().held_bytes(), 4096 + 5);
/// let mut into = [0; 5];
/// assert_eq!(store.get(&chunk, &mut into, deadline)?, Some(5));
/// assert_eq!(&into, b"bytes");
/// let options = TierOptions::new().with_store(Box::new(store));
/// # Ok::<(), kv::tier::StoreError>(())
/// ```
pub struct SealedStore<S> {
    store: S,
    /// Keys the addresses.
    address_key: [u8; 32],
    /// From which the key of each chunk is derived.
    chunk_key: [u8; 32],
    /// Room for objects, which are longer than the chunks of the caller.
    scratch: Mutex<Vec<Vec<u8>>>,
}

impl<S: BlockStore> SealedStore<S> {
    /// Seals with a key of 256 bits.
    pub fn new(store: S, key: &[u8; 32]) -> Self {
        Self {
            store,
            address_key: blake3::derive_key("kv-tier sealed store 1: addresses", key),
            chunk_key: blake3::derive_key("kv-tier sealed store 1: chunks", key),
            scratch: Mutex::default(),
        }
    }

    /// Reads a key from 64 hexadecimal digits; `None` for anything else.
    pub fn key_from_hex(digits: &str) -> Option<[u8; 32]> {
        hex::parse(&digits.to_ascii_lowercase())
    }

    /// Returns the store that keeps the sealed objects.
    pub fn get_ref(&self) -> &S {
        &self.store
    }

    /// Returns the address of the sealed object of a chunk.
    fn address(&self, chunk: &ChunkAddress) -> ChunkAddress {
        ChunkAddress { root: self.hide(&chunk.root), name: self.hide(&chunk.name) }
    }

    fn hide(&self, name: &ChunkName) -> ChunkName {
        ChunkName::new(*blake3::keyed_hash(&self.address_key, name.as_bytes()).as_bytes())
    }

    fn addresses(&self, chunks: &[ChunkAddress]) -> Vec<ChunkAddress> {
        chunks.iter().map(|chunk| self.address(chunk)).collect()
    }

    fn cipher(&self, chunk: &ChunkAddress) -> Aes256Gcm {
        let key = blake3::keyed_hash(&self.chunk_key, &associated(chunk));
        Aes256Gcm::new(&Key::<Aes256Gcm>::from(*key.as_bytes()))
    }

    /// Calls `use_it` with room for an object of `bytes` bytes, which begins where a store can read
    /// to without a copy.
    fn with_scratch<T>(&self, bytes: usize, use_it: impl FnOnce(&mut [u8]) -> T) -> T {
        let lock = || self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let mut scratch = lock().pop().unwrap_or_default();
        scratch.resize(bytes + SEALED_PAGE_BYTES, 0);
        let skipped = scratch.as_ptr().align_offset(SEALED_PAGE_BYTES);
        let skipped = if skipped < SEALED_PAGE_BYTES { skipped } else { 0 };
        let end = skipped + bytes;
        let object = scratch.get_mut(skipped..end).invariant("the room was made above");
        let result = use_it(object);
        lock().push(scratch);
        result
    }
}

/// Returns the associated data of the tag: the chunk whose object it is.
fn associated(chunk: &ChunkAddress) -> [u8; 64] {
    let mut bytes = [0; 64];
    let (root, name) = bytes.split_at_mut(32);
    root.copy_from_slice(chunk.root.as_bytes());
    name.copy_from_slice(chunk.name.as_bytes());
    bytes
}

impl<S: BlockStore> BlockStore for SealedStore<S> {
    fn tier(&self) -> Tier {
        self.store.tier()
    }

    fn contains(
        &self,
        chunks: &[ChunkAddress],
        deadline: Instant,
    ) -> Result<Vec<bool>, StoreError> {
        self.store.contains(&self.addresses(chunks), deadline)
    }

    fn get(
        &self,
        chunk: &ChunkAddress,
        into: &mut [u8],
        deadline: Instant,
    ) -> Result<Option<usize>, StoreError> {
        let most = into.len() + SEALED_PAGE_BYTES;
        self.with_scratch(most, |object| {
            let Some(read) = self.store.get(&self.address(chunk), object, deadline)? else {
                return Ok(None);
            };
            let corrupt = || {
                let operation = format!("unsealing of {}", chunk.name);
                StoreError::new(StoreErrorKind::Corrupt, operation)
            };
            let object = object.get_mut(..read).ok_or_else(corrupt)?;
            let (page, bytes) =
                object.split_at_mut_checked(SEALED_PAGE_BYTES).ok_or_else(corrupt)?;
            let page = SealedPage::read(page).map_err(|error| corrupt().with_source(error))?;
            let into = into.get_mut(..bytes.len()).filter(|into| !into.is_empty());
            let into = into.ok_or_else(corrupt)?;
            let (nonce, tag) = (Array::from(page.nonce), Array::from(page.tag));
            let opened = self.cipher(chunk).decrypt_inout_detached(
                &nonce,
                &associated(chunk),
                bytes.into(),
                &tag,
            );
            opened.map_err(|_| corrupt())?;
            into.copy_from_slice(bytes);
            Ok(Some(into.len()))
        })
    }

    fn put(
        &self,
        chunk: &ChunkAddress,
        bytes: &[u8],
        deadline: Instant,
    ) -> Result<Put, StoreError> {
        let failed = |kind| StoreError::new(kind, format!("sealing of {}", chunk.name));
        if bytes.is_empty() {
            return Err(failed(StoreErrorKind::Corrupt));
        }
        let mut nonce = [0; 12];
        getrandom::fill(&mut nonce)
            .map_err(|error| failed(StoreErrorKind::Other).with_source(error))?;
        let length = bytes.len() + SEALED_PAGE_BYTES;
        self.with_scratch(length, |object| {
            let halves = object.split_at_mut_checked(SEALED_PAGE_BYTES);
            let (page, sealed) = halves.invariant("an object has a page");
            sealed.copy_from_slice(bytes);
            let tag = self.cipher(chunk).encrypt_inout_detached(
                &Array::from(nonce),
                &associated(chunk),
                (&mut *sealed).into(),
            );
            // Only for more than 64 GiB.
            let tag = tag.map_err(|_| failed(StoreErrorKind::Other))?;
            SealedPage { nonce, tag: tag.into() }.write(page);
            self.store.put(&self.address(chunk), object, deadline)
        })
    }

    fn remove(&self, chunks: &[ChunkAddress], deadline: Instant) -> Result<(), StoreError> {
        self.store.remove(&self.addresses(chunks), deadline)
    }

    /// Removes the objects of some roots, if the inner store lists its content. Objects do not
    /// reveal their model, so [`Scope::Model`] is refused.
    fn remove_all(&self, scope: &Scope, deadline: Instant) -> Result<u64, StoreError> {
        match scope {
            Scope::Roots(roots) => {
                let roots = roots.iter().map(|root| self.hide(root)).collect();
                self.store.remove_all(&Scope::Roots(roots), deadline)
            }
            Scope::Model(_) => {
                let operation = format!("removal of {scope} from sealed objects");
                Err(StoreError::new(StoreErrorKind::Unsupported, operation))
            }
        }
    }

    fn take_repaired(&self) -> Option<StoreError> {
        self.store.take_repaired()
    }
}

/// Leaves out the keys.
impl<S: fmt::Debug> fmt::Debug for SealedStore<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SealedStore").field("store", &self.store).finish_non_exhaustive()
    }
}
