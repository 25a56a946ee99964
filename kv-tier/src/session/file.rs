//! The file of a session: written whole or not at all, and read block by block.
// Reads bytes that may be anything.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use kv_core::num::to_u64;

use super::{PREFIX_BYTES, Prefix, SessionError, SessionHeader};

/// Writes a file beside `to`, and renames it once all of it is on the disk: readers find either the
/// earlier file or the new one.
pub(super) fn save(
    to: &Path,
    write: impl FnOnce(&mut File) -> Result<(), SessionError>,
) -> Result<(), SessionError> {
    let folder = match to.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    remove_stale(folder, to);
    let (mut file, temporary) = create(folder, to)?;
    let written = write(&mut file).and_then(|()| {
        file.sync_all().map_err(|source| failed("sync", &temporary, source))?;
        fs::rename(&temporary, to).map_err(|source| failed("write", to, source))
    });
    if written.is_err() {
        // It is stale then, and removed next time, if this fails too.
        let _ = fs::remove_file(&temporary);
        return written;
    }
    sync_folder(folder).map_err(|source| failed("sync", folder, source))
}

/// Creates and locks a file that no other process writes.
fn create(folder: &Path, to: &Path) -> Result<(File, PathBuf), SessionError> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let (begin, end) = temporary_name(to);
    loop {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let mut name = begin.clone();
        name.push(format!("{}-{number}", std::process::id()));
        name.push(end);
        let path = folder.join(name);
        let file = match OpenOptions::new().write(true).create_new(true).open(&path) {
            Ok(file) => file,
            // Of a process that had the same number.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
            Err(source) => return Err(failed("create", &path, source)),
        };
        // Before the lock, another process may have removed the file as stale.
        match file.try_lock() {
            Ok(()) if path.exists() => return Ok((file, path)),
            Ok(()) | Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(source)) => return Err(failed("lock", &path, source)),
        }
    }
}

/// Removes unfinished versions of this file that killed processes have left.
fn remove_stale(folder: &Path, to: &Path) {
    let (begin, end) = temporary_name(to);
    // A folder that cannot be read is found when the file is created.
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let bytes = name.as_encoded_bytes();
        let is_temporary =
            bytes.starts_with(begin.as_encoded_bytes()) && bytes.ends_with(end.as_bytes());
        let file = is_temporary.then(|| File::open(entry.path()).ok()).flatten();
        let Some(file) = file.filter(|file| file.try_lock().is_ok()) else { continue };
        // Space that stays taken if this fails; the dump can succeed all the same.
        let _ = fs::remove_file(entry.path());
        // Unlocked only now: a process that has just created the file could lock it in between.
        drop(file);
    }
}

/// Returns how names of temporary files of a session begin and end.
fn temporary_name(to: &Path) -> (OsString, &'static str) {
    let mut begin = OsString::from(".");
    begin.push(to.file_name().unwrap_or_default());
    begin.push(".");
    (begin, ".tmp")
}

/// Makes a renamed file survive a loss of power.
fn sync_folder(folder: &Path) -> io::Result<()> {
    if cfg!(unix) { File::open(folder)?.sync_all() } else { Ok(()) }
}

pub(super) fn failed(operation: &'static str, path: &Path, source: io::Error) -> SessionError {
    SessionError::Io { operation, path: path.to_owned(), source }
}

impl SessionHeader {
    /// Reads the header of a session file and checks it; blocks are neither read nor verified.
    ///
    /// # Errors
    /// [`SessionError::Io`], [`SessionError::NotASession`], [`SessionError::Version`],
    /// [`SessionError::Length`], [`SessionError::HeaderCrc`] or [`SessionError::Malformed`].
    pub fn read(from: &Path) -> Result<Self, SessionError> {
        Ok(SessionFile::open(from)?.header)
    }
}

/// An open session file, whose header was checked.
#[derive(Debug)]
pub(super) struct SessionFile {
    file: File,
    path: PathBuf,
    pub(super) header: SessionHeader,
    header_bytes: u64,
}

impl SessionFile {
    pub(super) fn open(path: &Path) -> Result<Self, SessionError> {
        let failed = |source| failed("read", path, source);
        let mut file = File::open(path).map_err(failed)?;
        let got = file.metadata().map_err(failed)?.len();
        let mut bytes = Vec::new();
        let mut read_to = |bytes: &mut Vec<u8>, end: u64| {
            let more = end.saturating_sub(to_u64(bytes.len()));
            (&mut file).take(more).read_to_end(bytes).map_err(failed)
        };
        read_to(&mut bytes, to_u64(PREFIX_BYTES))?;
        let prefix = Prefix::read(&bytes)?;
        if prefix.file_bytes != got {
            return Err(SessionError::Length { expected: prefix.file_bytes, got });
        }
        // Not longer than the file.
        read_to(&mut bytes, prefix.header_bytes)?;
        let header = SessionHeader::from_bytes(&bytes)?;
        Ok(Self { file, path: path.to_owned(), header, header_bytes: prefix.header_bytes })
    }

    /// Returns whether the file has a block.
    pub(super) fn has(&self, group: usize, block: u32) -> bool {
        self.header.groups.get(group).is_some_and(|group| group.place(block).is_some())
    }

    /// Reads the chunk of a block that the file has.
    pub(super) fn read(
        &mut self,
        group: usize,
        block: u32,
        into: &mut [u8],
    ) -> Result<(), SessionError> {
        let place = self.header.groups.get(group).and_then(|group| group.place(block));
        let place = place.ok_or(SessionError::Malformed { field: "ranges of blocks" })?;
        let before = self.header.groups.iter().take(group);
        let before = before.map(|group| group.num_blocks().saturating_mul(group.chunk_bytes));
        let at = before.fold(self.header_bytes, u64::saturating_add);
        let at = at.saturating_add(place.saturating_mul(to_u64(into.len())));
        let read = self.file.seek(SeekFrom::Start(at)).and_then(|_| self.file.read_exact(into));
        read.map_err(|source| failed("read", &self.path, source))
    }
}
