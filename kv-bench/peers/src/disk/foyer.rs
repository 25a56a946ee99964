//! The hybrid cache of foyer, with memory that keeps nothing.
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use foyer::{
    BlockEngineConfig, DeviceBuilder as _, FsDeviceBuilder, HybridCache, HybridCacheBuilder,
    HybridCachePolicy, PsyncIoEngineConfig, RecoverMode,
};
use kv_bench::chunks::{Aligned, Chunks};
use tokio::runtime::Runtime;

use super::{Checks, Contender, Store, THREADS};

pub(super) const DIRECT: Contender = Contender {
    name: "foyer, direct",
    note: "hybrid cache, block engine: files of 16 MiB that several chunks share, O_DIRECT into \
           memory of its own, and a copy; XXH64 of each chunk is checked",
    checks: Checks::Store,
    open: |dir, chunks| open(dir, chunks, true),
};

pub(super) const BUFFERED: Contender = Contender {
    name: "foyer, buffered",
    note: "the same through the page cache, as foyer does unless told otherwise",
    checks: Checks::Store,
    open: |dir, chunks| open(dir, chunks, false),
};

struct Hybrid {
    cache: HybridCache<u64, Bytes>,
    runtime: Runtime,
    inserted: AtomicUsize,
}

/// Opens a cache that writes inserted chunks at once, and reads every lookup from the disk.
fn open(dir: &Path, chunks: &Chunks, is_direct: bool) -> Result<Box<dyn Store>> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(usize::try_from(THREADS)?)
        .enable_all()
        .build()?;
    // Blocks of 16 MiB hold seven chunks. Nothing is reclaimed while there is room.
    let capacity = (chunks.count().div_ceil(7) + SPARE_BLOCKS) * BLOCK_BYTES;
    let device =
        FsDeviceBuilder::new(dir).with_capacity(capacity).with_direct(is_direct).build()?;
    let cache = runtime.block_on(async {
        // What waits for the disk must fit, or foyer leaves it out.
        let engine = BlockEngineConfig::new(device)
            .with_block_size(BLOCK_BYTES)
            .with_buffer_pool_size(QUEUE_BYTES)
            .with_submit_queue_size_threshold(QUEUE_BYTES);
        HybridCacheBuilder::new()
            .with_policy(HybridCachePolicy::WriteOnInsertion)
            .with_flush_on_close(false)
            .memory(1)
            .with_weighter(|_: &u64, chunk: &Bytes| chunk.len())
            .with_filter(|_: &u64, _: &Bytes| false)
            .storage()
            .with_io_engine_config(PsyncIoEngineConfig::new())
            .with_engine_config(engine)
            .with_recover_mode(RecoverMode::None)
            .build()
            .await
    })?;
    ensure!(cache.is_hybrid(), "the cache has no disk");
    Ok(Box::new(Hybrid { cache, runtime, inserted: AtomicUsize::new(0) }))
}

impl Store for Hybrid {
    fn put(&self, item: usize, bytes: &[u8]) -> Result<()> {
        self.cache.insert(u64::try_from(item)?, Bytes::copy_from_slice(bytes));
        // Its queue drops what is too much, so callers have to wait now and then.
        if self.inserted.fetch_add(1, Ordering::Relaxed) % PUTS_PER_WAIT == PUTS_PER_WAIT - 1 {
            self.finish()?;
        }
        Ok(())
    }

    fn finish(&self) -> Result<()> {
        self.runtime.block_on(self.cache.storage().wait());
        Ok(())
    }

    fn get(&self, item: usize, _: &mut Aligned, check: &dyn Fn(&[u8]) -> Result<()>) -> Result<()> {
        let item = u64::try_from(item)?;
        let entry = self.runtime.block_on(async { self.cache.get(&item).await })?;
        check(entry.with_context(|| format!("chunk {item} is gone"))?.value())
    }
}

impl Drop for Hybrid {
    fn drop(&mut self) {
        // Its tasks end before their folder is removed. A failure shows as a file that stays.
        let _ = self.runtime.block_on(self.cache.close());
    }
}

const BLOCK_BYTES: usize = 16 << 20;
const SPARE_BLOCKS: usize = 8;
const QUEUE_BYTES: usize = 128 << 20;
/// Chunks that are inserted between two waits.
const PUTS_PER_WAIT: usize = 8;
