//! Opening of a folder: whether it is one of this library's, and of which version.
use std::fs as std_fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{self, AtFlags, Dir, Mode, OFlags};
use rustix::io::Errno;
use serde_json::{Value, json};

use super::error::DiskOpenError;
use super::files::{BLOCK, Files, create_temporary, rename};
use super::ledger::Ledger;
use super::options::{DirectIo, DiskOptions};
use super::path;

/// A folder that was found to be a store, or made one.
pub(super) struct Opened {
    pub(super) files: Files,
    /// `None` if the folder is only read.
    pub(super) ledger: Option<Ledger>,
    pub(super) is_evictor: bool,
    pub(super) capacity: u64,
}

/// Opens a folder, and creates it unless it is only read.
pub(super) fn open(root: &Path, options: &DiskOptions) -> Result<Opened, DiskOpenError> {
    if options.capacity() < BLOCK {
        return Err(DiskOpenError::Capacity { given: options.capacity(), least: BLOCK });
    }
    if !options.read_only() {
        // A folder that is there on a disk that is only read is no failure yet.
        let created = std_fs::create_dir_all(root);
        created.or_else(|error| if root.is_dir() { Ok(()) } else { Err(error) }).map_err(
            |source| DiskOpenError::Io {
                path: root.into(),
                operation: "create the folder",
                source,
            },
        )?;
    }
    let folder = open_folder(root)?;
    let marker = read_marker(root, &folder)?;
    if marker.is_none() {
        check_empty(root, &folder)?;
    }
    let ledger = if options.read_only() { Err(Errno::ROFS) } else { Ledger::open(&folder) };
    let ledger = match ledger {
        Ok(ledger) => ledger,
        // Chunks are read, and writes denied.
        Err(Errno::ROFS | Errno::ACCESS | Errno::PERM) if marker.is_some() => {
            let (files, capacity) =
                (Files::read_only(folder, options.direct()), options.capacity());
            return Ok(Opened { files, ledger: None, is_evictor: false, capacity });
        }
        Err(Errno::ROFS) if options.read_only() => {
            return Err(not_a_store(root, "no kv-tier.json"));
        }
        Err(errno) => return Err(failed(root, "lock files")(errno)),
    };
    let is_evictor = ledger.try_evict();
    let capacity = agree(root, &folder, &ledger, marker, is_evictor, options.capacity())?;
    let files = Files::probe(folder, options.direct(), options.rename());
    Ok(Opened { files, ledger: Some(ledger), is_evictor, capacity })
}

/// Opens a folder that is a store already, and changes nothing. The ledger is `None` if the folder
/// is only read.
pub(super) fn existing(root: &Path) -> Result<(Files, Option<Ledger>), DiskOpenError> {
    let folder = open_folder(root)?;
    if read_marker(root, &folder)?.is_none() {
        return Err(not_a_store(root, "no kv-tier.json"));
    }
    let ledger = match Ledger::open(&folder) {
        Ok(ledger) => Some(ledger),
        Err(Errno::ROFS | Errno::ACCESS | Errno::PERM) => None,
        Err(errno) => return Err(failed(root, "lock files")(errno)),
    };
    Ok((Files::read_only(folder, DirectIo::Auto), ledger))
}

fn open_folder(root: &Path) -> Result<OwnedFd, DiskOpenError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    match fs::open(root, flags, Mode::empty()) {
        Err(Errno::NOTDIR) => Err(not_a_store(root, "not a folder")),
        folder => folder.map_err(failed(root, "open the folder")),
    }
}

/// Returns the capacity of the folder: that of the process that evicts.
fn agree(
    root: &Path,
    folder: &OwnedFd,
    ledger: &Ledger,
    marker: Option<u64>,
    is_evictor: bool,
    capacity: u64,
) -> Result<u64, DiskOpenError> {
    match marker {
        None => {
            let now = Instant::now();
            let counted = ledger.start(now.checked_add(PATIENCE).unwrap_or(now));
            counted.map_err(|error| DiskOpenError::Io {
                path: root.into(),
                operation: "count bytes",
                source: io::Error::other(error),
            })?;
            write_marker(folder, capacity, false).map_err(failed(root, "write kv-tier.json"))?;
            // Another process may have been first.
            let agreed = read_marker(root, folder)?;
            Ok(agreed.filter(|_| !is_evictor).unwrap_or(capacity))
        }
        Some(agreed) if is_evictor && agreed != capacity => {
            write_marker(folder, capacity, true).map_err(failed(root, "write kv-tier.json"))?;
            Ok(capacity)
        }
        Some(agreed) => Ok(agreed),
    }
}

/// Returns the capacity that the marker tells, `None` without one.
fn read_marker(root: &Path, folder: &OwnedFd) -> Result<Option<u64>, DiskOpenError> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = match fs::openat(folder, MARKER, flags, Mode::empty()) {
        Ok(file) => file,
        Err(Errno::NOENT) => return Ok(None),
        Err(errno) => return Err(failed(root, "open kv-tier.json")(errno)),
    };
    let mut text = [0; MARKER_BYTES_MAX];
    let bytes =
        rustix::io::pread(&file, &mut text, 0).map_err(failed(root, "read kv-tier.json"))?;
    let text = text.get(..bytes).unwrap_or(&[]);
    let marker: Value = serde_json::from_slice(text)
        .map_err(|error| not_a_store(root, format!("kv-tier.json is no JSON: {error}")))?;
    if marker.get("format").and_then(Value::as_str) != Some(FORMAT) {
        return Err(not_a_store(root, "kv-tier.json is of another format"));
    }
    let number = |name| marker.get(name).and_then(Value::as_u64);
    match number("version") {
        Some(VERSION) => {}
        Some(found) => {
            return Err(DiskOpenError::Version { path: root.into(), found, known: VERSION });
        }
        None => return Err(not_a_store(root, "kv-tier.json has no version")),
    }
    match number("capacity").filter(|capacity| *capacity >= BLOCK) {
        Some(capacity) => Ok(Some(capacity)),
        None => Err(not_a_store(root, "kv-tier.json has no capacity")),
    }
}

fn write_marker(folder: &OwnedFd, capacity: u64, replace: bool) -> rustix::io::Result<()> {
    let marker = json!({ "format": FORMAT, "version": VERSION, "capacity": capacity });
    let text = format!("{marker}\n");
    let (file, temporary) = create_temporary(folder, MARKER)?;
    let written = match rustix::io::pwrite(&file, text.as_bytes(), 0)? {
        bytes if bytes == text.len() => {
            if replace {
                fs::renameat(folder, temporary.as_str(), folder, MARKER)
            } else {
                rename(folder, &temporary, MARKER).map(drop)
            }
        }
        _ => Err(Errno::NOSPC),
    };
    // Gone if it was renamed.
    let _ = fs::unlinkat(folder, temporary.as_str(), AtFlags::empty());
    written
}

/// Refuses a folder that has something else in it.
fn check_empty(root: &Path, folder: &OwnedFd) -> Result<(), DiskOpenError> {
    let entries = Dir::read_from(folder).map_err(failed(root, "list the folder"))?;
    for entry in entries {
        let entry = entry.map_err(failed(root, "list the folder"))?;
        let name = entry.file_name().to_string_lossy();
        // Of a process that is opening it too, or was killed while it did; of a new file system.
        let is_fine = name.starts_with(path::OWN) || matches!(&*name, "." | ".." | "lost+found");
        if !is_fine {
            return Err(not_a_store(root, format!("no kv-tier.json, but {name}")));
        }
    }
    Ok(())
}

fn not_a_store(path: &Path, found: impl Into<String>) -> DiskOpenError {
    DiskOpenError::NotAStore { path: path.into(), found: found.into() }
}

fn failed(path: &Path, operation: &'static str) -> impl Fn(Errno) -> DiskOpenError {
    move |errno| DiskOpenError::Io { path: path.into(), operation, source: errno.into() }
}

const MARKER: &str = "kv-tier.json";
const FORMAT: &str = "kv-tier";
const VERSION: u64 = 1;
const MARKER_BYTES_MAX: usize = 4_096;
const PATIENCE: Duration = Duration::from_secs(2);
