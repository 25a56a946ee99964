//! The tiers of the command line: opens the tiers that `--tier` names, and reports their hits and
//! failures.
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};
use kv::KvCache;
use kv::engine::Stats;
use kv::tier::policy::{WritePolicy, WriteRule};
#[cfg(feature = "seal")]
use kv::tier::{BlockStore, SealedStore};
use kv::tier::{
    Bytes, Identity, ModelDigest, StoreErrorKind, StoreOptions, StoreStats, TierAddress,
    TierOptions, TieredCache, TiersStats, Unwritten,
};
use serde::Serialize;

use crate::args::EngineArgs;
use crate::output;

/// Longest time that the end of a run waits for pending writes.
pub(crate) const FLUSH: Duration = Duration::from_mins(1);

/// Reports the work that the end of a run has left.
pub(crate) fn note_left(left: Unwritten) -> anyhow::Result<()> {
    if !left.is_empty() {
        let Unwritten { copies, writes, .. } = left;
        output::note(&format!(
            "not everything was written to the tiers: {writes} writes and {copies} copies are left"
        ))?;
    }
    Ok(())
}

/// Digests the weights that a model was read from.
pub(crate) fn digest(model: &Path) -> anyhow::Result<ModelDigest> {
    let digest =
        if model.is_dir() { ModelDigest::of(model) } else { ModelDigest::of_files(&[model]) };
    digest.context("digest of the weights, which names what tiers keep")
}

/// Puts the tiers of the command line below a cache.
pub(crate) fn open(
    args: &EngineArgs,
    digest: ModelDigest,
    cache: KvCache,
) -> anyhow::Result<TieredCache> {
    let mut options = TierOptions::new().with_wait(args.wait);
    #[cfg(feature = "seal")]
    let key = args.tier_key.as_deref().map(read_key).transpose()?;
    let mut has_host = false;
    for tier in &args.tier {
        if let TierAddress::Host { bytes } = tier {
            if std::mem::replace(&mut has_host, true) {
                bail!("--tier host=SIZE is given twice");
            }
            options = options.with_host(*bytes);
            continue;
        }
        let store = tier.open().with_context(|| tier.to_string())?;
        let mut of_store = StoreOptions::new(store.tier());
        #[cfg(feature = "seal")]
        let store = seal(store, key);
        if let Some(policy) = args.tier_write {
            of_store = of_store.with_write(WriteRule::new(policy));
        }
        if let Some(Bytes(bytes)) = args.tier_bytes_per_day {
            of_store = of_store.with_bytes_per_day(bytes);
        }
        options = options.with_store_options(store, of_store);
    }
    Ok(TieredCache::new(cache, Identity::new(digest), options)?)
}

/// Lets a store keep sealed chunks if there is a key.
#[cfg(feature = "seal")]
fn seal(store: Box<dyn BlockStore>, key: Option<[u8; 32]>) -> Box<dyn BlockStore> {
    match key {
        Some(key) => Box::new(SealedStore::new(store, &key)),
        None => store,
    }
}

/// Reads a key of 256 bits: 64 hexadecimal digits, or the bytes themselves.
#[cfg(feature = "seal")]
fn read_key(path: &Path) -> anyhow::Result<[u8; 32]> {
    let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
    let key = <[u8; 32]>::try_from(bytes.as_slice()).ok();
    let digits = || {
        let text = std::str::from_utf8(&bytes).ok()?;
        SealedStore::<Box<dyn BlockStore>>::key_from_hex(text.trim_end())
    };
    // The file's bytes are in no message.
    key.or_else(digits)
        .with_context(|| format!("{}: expected 64 hexadecimal digits, or 32 bytes", path.display()))
}

/// The argument of `--tier-write`.
pub(crate) fn policy(text: &str) -> Result<WritePolicy, kv::error::UnknownName> {
    text.parse()
}

/// Traffic from tiers and to them.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// Reused prompt tokens that came from host memory, disk and stores.
    host_tokens: u64,
    disk_tokens: u64,
    store_tokens: u64,
    /// Chunks in host memory at the end, and their bytes.
    host_chunks: u64,
    host_bytes: u64,
    /// Prompts that started before everything had come.
    late: u64,
    /// Tokens that a store had and that were sooner computed than read.
    cheaper_to_compute: u64,
    stores: Vec<Store>,
}

#[derive(Debug, Serialize)]
struct Store {
    tier: String,
    chunks_read: u64,
    bytes_read: u64,
    chunks_written: u64,
    bytes_written: u64,
    /// Chunks that were there already.
    chunks_kept: u64,
    /// Chunks that did not match their name.
    refused: u64,
    failures: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_failure: Option<String>,
    /// Chunks that were not written, because the store was slow or failed.
    dropped: u64,
}

impl Report {
    pub(crate) fn new(args: &EngineArgs, stats: &Stats, tiers: &TiersStats) -> Self {
        let names = args.tier.iter().filter(|tier| !matches!(tier, TierAddress::Host { .. }));
        Self {
            host_tokens: stats.cache.host_hit_tokens,
            disk_tokens: stats.cache.disk_hit_tokens,
            store_tokens: stats.cache.store_hit_tokens,
            host_chunks: tiers.host_chunks,
            host_bytes: tiers.host_bytes,
            late: tiers.late,
            cheaper_to_compute: tiers.cheaper_to_compute,
            stores: names.zip(&tiers.stores).map(|(tier, stats)| Store::new(tier, stats)).collect(),
        }
    }

    /// Returns the reused tokens that came from any tier.
    pub(crate) fn tokens(&self) -> u64 {
        self.host_tokens + self.disk_tokens + self.store_tokens
    }

    pub(crate) fn show(&self) -> String {
        let all = format!(
            "{} of the reused tokens from tiers: {} from host memory, {} from disk, {} from \
             stores\n",
            self.tokens(),
            self.host_tokens,
            self.disk_tokens,
            self.store_tokens,
        );
        std::iter::once(all).chain(self.stores.iter().map(Store::show)).collect()
    }
}

impl Store {
    fn show(&self) -> String {
        format!(
            "{}: chunks read {} ({}), written {} ({})\n",
            self.tier,
            self.chunks_read,
            Bytes(self.bytes_read),
            self.chunks_written,
            Bytes(self.bytes_written),
        )
    }

    fn new(tier: &TierAddress, stats: &StoreStats) -> Self {
        let dropped = [stats.dropped_by_queue, stats.dropped_by_breaker, stats.dropped_by_budget];
        Self {
            tier: tier.to_string(),
            chunks_read: stats.reads,
            bytes_read: stats.read_bytes,
            chunks_written: stats.writes,
            bytes_written: stats.written_bytes,
            chunks_kept: stats.were_there,
            refused: stats.refused.values().sum(),
            failures: stats.failures,
            last_failure: stats.last_failure.clone(),
            dropped: dropped.into_iter().sum(),
        }
    }
}

/// Returns the names of the stores, in the order of their statistics.
pub(crate) fn store_names(args: &EngineArgs) -> Vec<String> {
    let names = args.tier.iter().filter(|tier| !matches!(tier, TierAddress::Host { .. }));
    names.map(TierAddress::to_string).collect()
}

/// Prints one line for each store that failed.
pub(crate) fn warn(names: &[String], stats: &TiersStats) -> anyhow::Result<()> {
    for (tier, stats) in names.iter().zip(&stats.stores) {
        let causes: Vec<_> = causes(stats).iter().filter_map(Cause::describe).collect();
        if !causes.is_empty() {
            output::note(&format!("{tier}: {}; {CONSEQUENCE}", causes.join("; ")))?;
        }
    }
    Ok(())
}

/// The consequence of every failure of a store.
pub(crate) const CONSEQUENCE: &str = "what was missing was computed";

/// The cause of a store's failures, and their number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cause {
    /// One word for metrics.
    pub(crate) label: &'static str,
    pub(crate) count: u64,
    kind: CauseKind,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum CauseKind {
    /// Calls that failed, with the last message.
    Calls { last: String },
    /// Chunks that differ from the written ones.
    Damaged,
    /// Chunks of another version or model.
    Foreign,
    /// Writes for which too many others were waiting.
    Queue,
}

impl Cause {
    /// Describes the failures so far; `None` without any.
    fn describe(&self) -> Option<String> {
        (self.count > 0).then(|| self.describe_since(0))
    }

    /// Describes the failures since the count was this.
    pub(crate) fn describe_since(&self, before: u64) -> String {
        let count = self.count.saturating_sub(before);
        let (one, were) = if count == 1 { ("", "was") } else { ("s", "were") };
        match &self.kind {
            CauseKind::Calls { last } => {
                format!("{count} call{one} failed, the last one: {last}")
            }
            CauseKind::Damaged => format!("{count} chunk{one} {were} damaged"),
            CauseKind::Foreign => {
                format!("{count} chunk{one} {were} of another version or model")
            }
            CauseKind::Queue => {
                format!("{count} write{one} {were} dropped, because too many waited")
            }
        }
    }
}

/// Returns the possible failures of a store, with their counts.
pub(crate) fn causes(stats: &StoreStats) -> Vec<Cause> {
    const CALLS: [StoreErrorKind; 6] = [
        StoreErrorKind::Unavailable,
        StoreErrorKind::Timeout,
        StoreErrorKind::Full,
        StoreErrorKind::Denied,
        StoreErrorKind::Removed,
        StoreErrorKind::Other,
    ];
    let of_calls = CALLS.into_iter().map(|kind| {
        let failures = stats.failures_by_kind.get(&kind).cloned().unwrap_or_default();
        let label = kind.label();
        Cause { label, count: failures.count, kind: CauseKind::Calls { last: failures.last } }
    });
    let refused = |is_foreign: bool| {
        let of_kind = stats.refused.iter().filter(move |(kind, _)| kind.is_foreign() == is_foreign);
        of_kind.map(|(_, count)| *count).sum()
    };
    let others = [
        Cause { label: "damaged", count: refused(false), kind: CauseKind::Damaged },
        Cause { label: "foreign", count: refused(true), kind: CauseKind::Foreign },
        Cause { label: "queue", count: stats.dropped_by_queue, kind: CauseKind::Queue },
    ];
    of_calls.chain(others).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(feature = "seal")]
    #[test]
    fn keys_are_digits_or_bytes() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("key");
        let read = |bytes: &[u8]| {
            std::fs::write(&path, bytes).expect("a file");
            read_key(&path)
        };
        assert_eq!(read(&[200; 32]).expect("bytes"), [200; 32]);
        let digits = "0aF1".repeat(16);
        let expected = [[0x0a, 0xf1]; 16].concat();
        assert_eq!(read(digits.as_bytes()).expect("digits")[..], expected);
        assert_eq!(read(format!("{digits}\r\n").as_bytes()).expect("a line")[..], expected);
        for bytes in [&digits.as_bytes()[1..], &[200; 31], b"", "+1".repeat(32).as_bytes()] {
            let error = read(bytes).expect_err("no key").to_string();
            assert!(error.ends_with("expected 64 hexadecimal digits, or 32 bytes"), "{error}");
        }
    }
}
