//! The suite that every store of chunks must pass, and a store that fails on purpose.
//!
//! A store's own test makes a fixture and calls [`check_store`]; [`STORE_CASES`] has the cases for
//! a runner that shows each of them. [`FaultStore`] wraps any store.
mod cases;
mod fault;

pub use self::cases::{STORE_CASES, StoreCase};
pub use self::fault::{Fault, FaultCounts, FaultSchedule, FaultStore};

use std::time::{Duration, Instant};

use kv_tier::{BlockStore, ChunkAddress, ChunkName, StoreError};

use crate::case::{CaseError, Outcome};
use crate::rng::Rng;

/// A store to check. Each case opens it empty, or with chunks of earlier cases, which use roots of
/// their own.
pub trait StoreFixture {
    /// Opens the store. Several may be open at a time: one store with several handles, or several
    /// processes that share it.
    ///
    /// # Errors
    /// The failures of the store.
    fn open(&self) -> Result<Box<dyn BlockStore>, StoreError>;

    /// Returns whether a store that is opened later finds earlier writes.
    fn keeps(&self) -> bool {
        true
    }

    /// Returns the largest chunk to write, in bytes. The store has room for 40 of them.
    fn chunk_bytes_max(&self) -> usize {
        1 << 20
    }
}

/// Runs every case; the message of the panic names those that failed.
///
/// # Panics
/// If a case fails.
pub fn check_store(fixture: &dyn StoreFixture) {
    let failed: Vec<_> = STORE_CASES
        .iter()
        .filter_map(|case| match (case.run)(fixture) {
            Ok(Outcome::Holds | Outcome::Unsupported(_)) => None,
            Err(error) => Some(format!("{}: {error}", case.name)),
        })
        .collect();
    assert!(failed.is_empty(), "{} cases failed:\n{}", failed.len(), failed.join("\n"));
}

impl From<StoreError> for CaseError {
    fn from(error: StoreError) -> Self {
        let cause = std::error::Error::source(&error).map(|cause| format!(" ({cause})"));
        Self::Broken(format!("unexpected error: {error}{}", cause.unwrap_or_default()))
    }
}

/// Returns a name made from a seed.
pub fn chunk_name(seed: u64) -> ChunkName {
    let mut rng = Rng::new(seed);
    let mut name = [0; 32];
    for bytes in name.as_chunks_mut::<8>().0 {
        *bytes = rng.bits().to_le_bytes();
    }
    ChunkName::new(name)
}

/// Returns the address of chunk `name` of root `root`, both made from their numbers.
pub fn chunk_address(root: u64, name: u64) -> ChunkAddress {
    ChunkAddress { root: chunk_name(root), name: chunk_name(name) }
}

/// Returns `length` bytes that depend on every byte of the address, so that a chunk in the place of
/// another, or one that is shifted, is seen.
pub fn chunk_bytes(chunk: &ChunkAddress, length: usize) -> Vec<u8> {
    let seed = chunk.root.as_bytes().iter().chain(chunk.name.as_bytes());
    let seed = seed.fold(0_u64, |sum, &byte| sum.wrapping_mul(0x100_0000_01B3) ^ u64::from(byte));
    let mut rng = Rng::new(seed);
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        bytes.extend(rng.bits().to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// A deadline that a working store keeps.
pub(crate) fn soon() -> Instant {
    Instant::now() + Duration::from_secs(10)
}
