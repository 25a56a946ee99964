//! Folders, chunks and children of the tests.
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use kv_testkit::store::{chunk_address, chunk_bytes};
use kv_tier::{BlockStore, ChunkAddress, DiskOptions, DiskStats, DiskStore, Put, StoreErrorKind};
use tempfile::TempDir;

pub(crate) const MIB: u64 = 1 << 20;
/// Bytes of a chunk, if nothing else is said.
pub(crate) const CHUNK: usize = 64 << 10;

/// A folder with a capacity, in bytes.
pub(crate) fn folder(capacity: u64) -> (TempDir, DiskOptions) {
    (tempfile::tempdir().unwrap(), DiskOptions::new(capacity).with_floor(0))
}

/// Opens a store, and waits until it was listed.
pub(crate) fn open(folder: impl AsRef<Path>, options: DiskOptions) -> DiskStore {
    let store = DiskStore::open(folder, options).unwrap();
    assert!(store.wait_listed(soon()), "it is not listed");
    store
}

pub(crate) fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

pub(crate) fn chunk(n: u64) -> ChunkAddress {
    chunk_address(1, n)
}

/// Returns the path of a chunk in a folder.
pub(crate) fn path(folder: &Path, chunk: &ChunkAddress) -> PathBuf {
    let (root, name) = (chunk.root.to_string(), chunk.name.to_string());
    folder.join(root).join(&name[..2]).join(&name[2..4]).join(name)
}

pub(crate) fn put(store: &DiskStore, n: u64) -> Result<Put, StoreErrorKind> {
    let chunk = chunk(n);
    store.put(&chunk, &chunk_bytes(&chunk, CHUNK), soon()).map_err(|error| error.kind())
}

/// Reads a chunk; its bytes must be its own.
pub(crate) fn get(store: &DiskStore, n: u64) -> Result<bool, StoreErrorKind> {
    let (chunk, mut into) = (chunk(n), vec![0; CHUNK]);
    let read = store.get(&chunk, &mut into, soon()).map_err(|error| error.kind())?;
    if let Some(bytes) = read {
        assert!(bytes == CHUNK && into == chunk_bytes(&chunk, CHUNK), "chunk {n}: {bytes} bytes");
    }
    Ok(read.is_some())
}

pub(crate) fn stats(store: &DiskStore) -> DiskStats {
    store.stats(soon())
}

/// Returns every file of a folder that is not the store's own, with its length.
pub(crate) fn files(folder: &Path) -> Vec<(PathBuf, u64)> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(&next).unwrap() {
            let entry = entry.unwrap();
            let Ok(status) = entry.metadata() else { continue };
            let is_own = entry.file_name().to_string_lossy().starts_with("kv-tier");
            if status.is_dir() {
                folders.push(entry.path());
            } else if !is_own || entry.file_name().to_string_lossy().ends_with(".tmp") {
                found.push((entry.path(), status.len()));
            }
        }
    }
    found
}

/// Returns the bytes that all files count for.
pub(crate) fn charged(folder: &Path) -> u64 {
    files(folder).iter().map(|(_, bytes)| bytes.next_multiple_of(4_096)).sum()
}

/// The test `name` of this program, in a process of its own.
pub(crate) fn child(name: &str, folder: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([name, "--exact", "--nocapture"]).env(CHILD, folder);
    command
}

/// Returns the folder if this process is a child.
pub(crate) fn child_folder() -> Option<PathBuf> {
    std::env::var_os(CHILD).map(PathBuf::from)
}

const CHILD: &str = "KV_TIER_TEST_CHILD";

/// A small file system of its own in memory.
pub(crate) struct Tmpfs(pub(crate) TempDir);

impl Tmpfs {
    /// Mounts one; `None` where that is not allowed.
    pub(crate) fn mount(options: &str) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new("mount");
        command.args(["-t", "tmpfs", "-o", options, "kv-tier-test"]).arg(folder.path());
        match command.output() {
            Ok(output) if output.status.success() => Some(Self(folder)),
            failed => {
                println!("skipped: no file system can be mounted: {failed:?}");
                None
            }
        }
    }

    pub(crate) fn remount_read_only(&self) -> bool {
        let mut command = Command::new("mount");
        command.args(["-o", "remount,ro"]).arg(self.0.path());
        command.status().is_ok_and(|status| status.success())
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}
