//! Measures lower tiers: each store beside the disk, the server or a plain client in the same
//! rounds, and decode steps of a cache with tiers beside those of one without.
//!
//! A pass moves all chunks once. Passes of a store and of its peer are interleaved, the first round
//! is not counted, and figures are medians.
#[cfg(target_os = "linux")]
mod engine;
mod error;
#[cfg(target_os = "linux")]
mod fio;
#[cfg(target_os = "linux")]
mod folder;
#[cfg(all(target_os = "linux", feature = "object"))]
mod object;
#[cfg(target_os = "linux")]
mod pass;
#[cfg(target_os = "linux")]
mod raw;
#[cfg(all(target_os = "linux", feature = "redis"))]
mod redis;
mod report;

use std::path::PathBuf;

use super::Progress;
#[cfg(target_os = "linux")]
use crate::chunks::Chunks;
pub use error::TierError;
pub use report::{TierLine, TierReport};

/// Options of a measurement of stores.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a literal names each field")]
pub struct TierOptions {
    /// An existing folder on the disk to measure. Files written there are removed at the end.
    pub dir: PathBuf,
    /// A server, as `redis://HOST[:PORT]`.
    pub redis: Option<String>,
    /// A bucket, as `s3://BUCKET[/PREFIX][?..]`.
    pub s3: Option<String>,
    /// Bytes of all chunks together, in a folder; stores get at most 128 MiB of them.
    pub bytes: u64,
    /// Rounds after the warm-up.
    pub rounds: u32,
}

impl TierOptions {
    /// Default bytes of all chunks together.
    pub const BYTES: u64 = 512 << 20;
    /// Default number of rounds.
    pub const ROUNDS: u32 = 7;
}

/// Measures a folder, and the stores that are given.
///
/// # Errors
/// [`TierError`]: a folder in memory or without direct I/O, a store that fails or was not built in.
#[cfg(target_os = "linux")]
pub fn measure_tiers(
    options: &TierOptions,
    progress: &mut dyn Progress,
) -> Result<TierReport, TierError> {
    #[cfg(not(feature = "redis"))]
    if options.redis.is_some() {
        return Err(TierError::NotBuilt { store: "Redis", feature: "redis" });
    }
    #[cfg(not(feature = "object"))]
    if options.s3.is_some() {
        return Err(TierError::NotBuilt { store: "S3", feature: "object" });
    }
    raw::check_disk(&options.dir)?;
    let chunks = Chunks::new(options.bytes)?;
    let servers = u64::from(options.redis.is_some()) * 4;
    let servers = servers + u64::from(options.s3.is_some()) * 2;
    let per_round = folder::PASSES + servers;
    let rounds = u64::from(options.rounds) + 1;
    progress.begin(per_round * rounds + u64::from(engine::steps(options)));
    // Servers first: a wrong address, or a server that is away, is refused before the rest takes
    // its minutes.
    let mut of_servers: Vec<TierLine> = Vec::new();
    #[cfg(feature = "redis")]
    if let Some(url) = &options.redis {
        of_servers.extend(redis::measure(url, options.rounds, &chunks, progress)?);
    }
    #[cfg(feature = "object")]
    if let Some(url) = &options.s3 {
        of_servers.extend(object::measure(url, options.rounds, &chunks, progress)?);
    }
    let mut lines = folder::measure(options, &chunks, progress)?;
    lines.extend(engine::measure(options, progress)?);
    lines.append(&mut of_servers);
    Ok(TierReport::new(options, chunks.chunk_bytes(), lines))
}

/// Measures nothing: folders of chunks need Linux.
///
/// # Errors
/// [`TierError::NotHere`].
#[cfg(not(target_os = "linux"))]
pub fn measure_tiers(_: &TierOptions, _: &mut dyn Progress) -> Result<TierReport, TierError> {
    Err(TierError::NotHere)
}
