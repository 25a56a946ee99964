//! This library's folder of chunks.
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kv::tier::{BlockStore, ChunkAddress, DiskOptions, DiskStore};
use kv_bench::chunks::Aligned;

use super::{Checks, Contender, Store};

pub(super) const CONTENDER: Contender = Contender {
    name: "kv",
    note: "DiskStore: one file a chunk, O_DIRECT into the caller's memory; header and CRC-64 of \
           each chunk are checked",
    checks: Checks::Caller,
    open: |dir, chunks| {
        let bytes = chunks.chunk_bytes() * u64::try_from(chunks.count())?;
        let options = DiskOptions::new(bytes * 2).with_floor(0);
        let store = DiskStore::open(dir.join("chunks"), options)?;
        ensure!(store.wait_listed(soon()), "an empty folder is not listed");
        ensure!(store.stats(soon()).is_direct, "the file system has no direct I/O");
        let addresses = chunks.addresses(chunks.count());
        Ok(Box::new(Folder { store, addresses }))
    },
};

struct Folder {
    store: DiskStore,
    addresses: Vec<ChunkAddress>,
}

impl Folder {
    fn address(&self, item: usize) -> Result<&ChunkAddress> {
        self.addresses.get(item).with_context(|| format!("there is no chunk {item}"))
    }
}

impl Store for Folder {
    fn put(&self, item: usize, bytes: &[u8]) -> Result<()> {
        self.store.put(self.address(item)?, bytes, soon())?;
        Ok(())
    }

    fn get(
        &self,
        item: usize,
        buffer: &mut Aligned,
        check: &dyn Fn(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let into = buffer.bytes_mut();
        let read = self.store.get(self.address(item)?, into, soon())?;
        let read = read.with_context(|| format!("chunk {item} is gone"))?;
        check(into.get(..read).unwrap_or_default())
    }
}

/// Returns a deadline that only a store that hangs reaches.
fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}
