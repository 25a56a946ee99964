//! Facts that the system knows about files and this process.
use std::fs::{self, File};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};
use rustix::fs::{Advice, fadvise, syncfs};
use rustix::time::{ClockId, clock_gettime};

/// Writes everything of the file system to its disk.
pub(super) fn sync(dir: &Path) -> Result<()> {
    Ok(syncfs(File::open(dir)?)?)
}

/// Removes the files of a folder from the page cache, with `POSIX_FADV_DONTNEED`. They have been
/// synced.
pub(super) fn forget(dir: &Path) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            forget(&entry.path())?;
        } else {
            fadvise(File::open(entry.path())?, 0, None, Advice::DontNeed)?;
        }
    }
    Ok(())
}

/// Returns the bytes that this process has read from disks.
pub(super) fn bytes_read() -> Result<u64> {
    let text = fs::read_to_string("/proc/self/io")?;
    let line = text.lines().find_map(|line| line.strip_prefix("read_bytes: "));
    Ok(line.context("/proc/self/io has no read_bytes")?.parse()?)
}

/// Returns the CPU time of all threads of the process.
pub(super) fn cpu_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap_or_default()
}
