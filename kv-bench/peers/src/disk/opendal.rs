//! The service `fs` of OpenDAL.
use std::path::Path;

use anyhow::Result;
use bytes::Bytes;
use kv_bench::chunks::Aligned;
use opendal::Operator;
use opendal::services::Fs;
use tokio::runtime::Runtime;

use super::{Checks, Contender, Store, THREADS};

pub(super) const CHECKED: Contender = Contender {
    name: "opendal fs",
    note: "one file a chunk through the page cache, fsync after each write; it has no checksums, \
           so the caller checks header and CRC-64",
    checks: Checks::Caller,
    open,
};

pub(super) const UNCHECKED: Contender = Contender {
    name: "opendal fs, unchecked",
    note: "the same without the caller's check",
    checks: Checks::Nobody,
    open,
};

struct Files {
    operator: Operator,
    runtime: Runtime,
}

fn open(dir: &Path, _: &kv_bench::chunks::Chunks) -> Result<Box<dyn Store>> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(usize::try_from(THREADS)?)
        .enable_all()
        .build()?;
    let root = dir.to_string_lossy();
    let operator = Operator::new(Fs::default().root(&root))?;
    Ok(Box::new(Files { operator, runtime }))
}

impl Store for Files {
    fn put(&self, item: usize, bytes: &[u8]) -> Result<()> {
        let bytes = Bytes::copy_from_slice(bytes);
        self.runtime.block_on(self.operator.write(&path(item), bytes))?;
        Ok(())
    }

    fn get(&self, item: usize, _: &mut Aligned, check: &dyn Fn(&[u8]) -> Result<()>) -> Result<()> {
        let bytes = self.runtime.block_on(self.operator.read(&path(item)))?;
        check(&bytes.to_bytes())
    }
}

fn path(item: usize) -> String {
    format!("{item:08}")
}
