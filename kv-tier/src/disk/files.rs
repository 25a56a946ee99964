//! Files of a folder: each is read in one piece and appears in one piece.
//!
//! All paths are below the descriptor of the folder that was opened, so a folder that is moved goes
//! on, and one that is deleted has no files.
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use kv_core::num::to_u64;
use rustix::fs::{
    Advice, AtFlags, CWD, FileType, FlockOperation, Mode, OFlags, RenameFlags, Stat, Timespec,
    Timestamps, UTIME_NOW,
};
use rustix::io::{Errno, retry_on_intr};
use rustix::{fs, io};

use super::error::{failed, refused};
use super::options::DirectIo;
use super::path;
use crate::store::check_deadline;
use crate::{Put, StoreError, StoreErrorKind};

/// The result of `stat` on a path.
#[derive(Debug, Clone, Copy)]
pub(super) struct Status {
    /// Whether it is a regular file.
    pub(super) is_file: bool,
    /// Bytes.
    pub(super) length: u64,
    /// Time of the last change, in microseconds.
    pub(super) modified: u64,
}

impl Status {
    /// Returns the bytes that it counts for: only files are counted.
    pub(super) fn charge(self) -> u64 {
        if self.is_file { charge(self.length) } else { 0 }
    }
}

/// The part of a file that is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// All of it; there must be room.
    Whole,
    /// As much as there is room for.
    Front,
}

#[derive(Debug)]
pub(super) struct Files {
    root: OwnedFd,
    /// Whether files without a name can be made and get one later.
    nameless: bool,
    direct: AtomicBool,
}

impl Files {
    /// Takes a folder that is only read.
    pub(super) fn read_only(root: OwnedFd, direct: DirectIo) -> Self {
        Self { root, nameless: false, direct: AtomicBool::new(direct == DirectIo::Auto) }
    }

    /// Takes a folder, and probes the abilities of its file system.
    pub(super) fn probe(root: OwnedFd, direct: DirectIo, rename: bool) -> Self {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let file = fs::openat(&root, ".", flags, MODE);
        let nameless = !rename && file.as_ref().is_ok_and(|file| can_be_named(&root, file));
        let file = file.ok().or_else(|| {
            let (file, name) = create_temporary(&root, path::OWN).ok()?;
            fs::unlinkat(&root, name, AtFlags::empty()).ok()?;
            Some(file)
        });
        let direct = direct == DirectIo::Auto && file.is_some_and(|file| writes_directly(&file));
        Self { root, nameless, direct: AtomicBool::new(direct) }
    }

    pub(super) fn root(&self) -> &OwnedFd {
        &self.root
    }

    /// Returns whether the page cache is bypassed.
    pub(super) fn is_direct(&self) -> bool {
        self.direct.load(Ordering::Relaxed)
    }

    /// Returns the status of a path; `None` for an absent one, or one below a non-folder.
    pub(super) fn status(&self, path: &str) -> Result<Option<Status>, StoreError> {
        match fs::statat(&self.root, path, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(status(&stat))),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(None),
            Err(errno) => Err(failed("stat of", path, errno)),
        }
    }

    /// Reads a file to the beginning of `into`; returns the bytes read, and the file's status.
    pub(super) fn read(
        &self,
        path: &str,
        into: &mut [u8],
        part: Part,
        deadline: Instant,
    ) -> Result<Option<(usize, Status)>, StoreError> {
        const READ: &str = "read of";
        // A pipe in the file's place would block the open otherwise.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let file = match fs::openat(&self.root, path, flags, Mode::empty()) {
            Ok(file) => file,
            // A link, a socket, a device, or not for this user; its folder can be searched.
            Err(Errno::LOOP | Errno::NXIO | Errno::NODEV | Errno::ACCESS | Errno::PERM)
                if matches!(self.status(path), Ok(Some(_))) =>
            {
                return Err(refused(StoreErrorKind::Corrupt, READ, path));
            }
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(None),
            Err(errno) => return Err(failed(READ, path, errno)),
        };
        let status = status(&fs::fstat(&file).map_err(|errno| failed(READ, path, errno))?);
        // A length that no memory has is refused below.
        let mut length = usize::try_from(status.length).unwrap_or(usize::MAX);
        if part == Part::Front {
            length = length.min(into.len());
        }
        let corrupt = || refused(StoreErrorKind::Corrupt, READ, path);
        let wanted = into.get_mut(..length).filter(|wanted| status.is_file && !wanted.is_empty());
        let wanted = wanted.ok_or_else(corrupt)?;
        let mut is_direct = self.set_direct(&file, wanted);
        let mut read = 0_usize;
        while let Some(rest) = wanted.get_mut(read..).filter(|rest| !rest.is_empty()) {
            check_deadline(deadline, READ)?;
            let piece = rest.len().min(PIECE);
            let rest = &mut rest[..piece];
            match retry_on_intr(|| io::pread(&file, &mut *rest, to_u64(read))) {
                // Another process cut the file off while it was read.
                Ok(0) => break,
                Ok(bytes) => read += bytes,
                Err(Errno::INVAL) if is_direct => is_direct = self.give_up_direct(&file),
                Err(errno) => return Err(failed(READ, path, errno)),
            }
            if is_direct && !read.is_multiple_of(ALIGNMENT) {
                is_direct = stop_direct(&file);
            }
        }
        if !is_direct {
            // Another read is unlikely: the reader keeps the chunk in memory.
            let _ = fs::fadvise(&file, 0, None, Advice::DontNeed);
        }
        if read == 0 { Err(corrupt()) } else { Ok(Some((read, status))) }
    }

    /// Writes a file that appears whole, or not at all.
    pub(super) fn write(
        &self,
        path: &str,
        bytes: &[u8],
        deadline: Instant,
    ) -> Result<Put, StoreError> {
        if self.nameless {
            let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
            let folder = path::folder(path);
            let file = self.with_folder(path, || fs::openat(&self.root, folder, flags, MODE))?;
            self.fill(&file, path, bytes, deadline)?;
            return match name(&file, &self.root, path) {
                Ok(()) => Ok(Put::New),
                Err(Errno::EXIST) => Ok(Put::WasThere),
                Err(errno) => Err(failed(WRITE, path, errno)),
            };
        }
        let (file, temporary) = self.with_folder(path, || create_temporary(&self.root, path))?;
        let put = self.fill(&file, path, bytes, deadline).and_then(|()| {
            rename(&self.root, &temporary, path).map_err(|errno| failed(WRITE, path, errno))
        });
        if !matches!(put, Ok(Put::New)) {
            let _ = fs::unlinkat(&self.root, &temporary, AtFlags::empty());
        }
        put
    }

    /// Removes whatever is at a path; returns whether there was something. A folder with content is
    /// renamed, because its content belongs to others.
    pub(super) fn remove(&self, path: &str) -> Result<bool, StoreError> {
        let removed = match fs::unlinkat(&self.root, path, AtFlags::empty()) {
            Err(Errno::ISDIR) => match fs::unlinkat(&self.root, path, AtFlags::REMOVEDIR) {
                Err(Errno::NOTEMPTY | Errno::EXIST) => self.set_aside(path),
                removed => removed,
            },
            removed => removed,
        };
        match removed {
            Ok(()) => Ok(true),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(false),
            Err(errno) => Err(failed("removal of", path, errno)),
        }
    }

    /// Gives a folder in a chunk's place another name.
    fn set_aside(&self, path: &str) -> io::Result<()> {
        let mut last = Errno::EXIST;
        for number in 0..CREATIONS {
            let aside = format!("{path}.{number}.not-a-chunk");
            // An empty folder of this name is replaced where `NOREPLACE` is not known.
            match rename(&self.root, path, &aside) {
                Ok(Put::New) => return Ok(()),
                Ok(Put::WasThere) => {}
                Err(errno) => last = errno,
            }
        }
        Err(last)
    }

    /// Removes a folder; returns whether it was there and empty.
    pub(super) fn remove_empty(&self, folder: &str) -> bool {
        fs::unlinkat(&self.root, folder, AtFlags::REMOVEDIR).is_ok()
    }

    /// Sets the time of a file to now: it was used. A failure only makes the file look older.
    pub(super) fn stamp(&self, path: &str) {
        let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
        let times = Timestamps { last_access: now, last_modification: now };
        let _ = fs::utimensat(&self.root, path, &times, AtFlags::SYMLINK_NOFOLLOW);
    }

    /// Returns the bytes that are free for this user, and the size of the file system.
    pub(super) fn space(&self) -> Option<(u64, u64)> {
        let space = fs::fstatvfs(&self.root).ok()?;
        // A file system may report anything.
        let bytes = |blocks: u64| blocks.saturating_mul(space.f_frsize);
        Some((bytes(space.f_bavail), bytes(space.f_blocks)))
    }

    /// Runs `create` again with the folders of `path` made, if it finds none.
    fn with_folder<T>(
        &self,
        path: &str,
        create: impl Fn() -> io::Result<T>,
    ) -> Result<T, StoreError> {
        let created = match create() {
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {
                for (end, _) in path.match_indices('/') {
                    let folder = path.get(..end).unwrap_or(path);
                    let made = self.make_folder(folder);
                    made.map_err(|errno| failed("creation of", folder, errno))?;
                }
                create()
            }
            created => created,
        };
        created.map_err(|errno| failed(WRITE, path, errno))
    }

    /// Makes a folder on the way to chunks, in place of a non-folder.
    fn make_folder(&self, folder: &str) -> io::Result<()> {
        let made = fs::mkdirat(&self.root, folder, FOLDER_MODE);
        if made != Err(Errno::EXIST) {
            return made;
        }
        let is_folder = |stat: Stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        match fs::statat(&self.root, folder, AtFlags::empty()) {
            Ok(stat) if is_folder(stat) => Ok(()),
            Ok(_) | Err(Errno::NOENT | Errno::LOOP) => {
                fs::unlinkat(&self.root, folder, AtFlags::empty())?;
                fs::mkdirat(&self.root, folder, FOLDER_MODE)
            }
            Err(errno) => Err(errno),
        }
    }

    fn fill(
        &self,
        file: &OwnedFd,
        path: &str,
        bytes: &[u8],
        deadline: Instant,
    ) -> Result<(), StoreError> {
        let mut is_direct = self.set_direct(file, bytes);
        let mut written = 0_usize;
        while let Some(rest) = bytes.get(written..).filter(|rest| !rest.is_empty()) {
            check_deadline(deadline, WRITE)?;
            let piece = rest.get(..PIECE).unwrap_or(rest);
            match retry_on_intr(|| io::pwrite(file, piece, to_u64(written))) {
                Ok(0) => return Err(failed(WRITE, path, Errno::IO)),
                Ok(bytes) => written += bytes,
                Err(Errno::INVAL) if is_direct => is_direct = self.give_up_direct(file),
                Err(errno) => return Err(failed(WRITE, path, errno)),
            }
            if is_direct && !written.is_multiple_of(ALIGNMENT) {
                is_direct = stop_direct(file);
            }
        }
        if !is_direct {
            let _ = fs::fadvise(file, 0, None, Advice::DontNeed);
        }
        // The file is not visible yet: a caller that gave up finds no trace of the write.
        check_deadline(deadline, WRITE)
    }

    /// Makes the transfers of a file bypass the page cache, if they and the bytes can.
    fn set_direct(&self, file: &OwnedFd, bytes: &[u8]) -> bool {
        let is_aligned = bytes.as_ptr().addr().is_multiple_of(ALIGNMENT)
            && bytes.len().is_multiple_of(ALIGNMENT);
        self.is_direct() && is_aligned && fs::fcntl_setfl(file, OFlags::DIRECT).is_ok()
    }

    fn give_up_direct(&self, file: &OwnedFd) -> bool {
        self.direct.store(false, Ordering::Relaxed);
        stop_direct(file)
    }
}

/// Removes a file that was being written when a process ended. A file that is still being written
/// is locked, and stays.
pub(super) fn sweep(folder: &OwnedFd, name: &std::ffi::CStr) {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let Ok(file) = fs::openat(folder, name, flags, Mode::empty()) else { return };
    if fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
        let _ = fs::unlinkat(folder, name, AtFlags::empty());
    }
}

/// Creates a file `path.N.tmp`, locked while it is open, so that no sweep takes it.
pub(super) fn create_temporary(root: &OwnedFd, path: &str) -> io::Result<(OwnedFd, String)> {
    static SERIAL: AtomicU64 = AtomicU64::new(0);
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
    let mut last = Errno::EXIST;
    for _ in 0..CREATIONS {
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let name = format!("{path}.{}-{serial}{}", std::process::id(), path::TEMPORARY);
        let file = match fs::openat(root, name.as_str(), flags, MODE) {
            Ok(file) => file,
            Err(Errno::EXIST) => continue,
            Err(errno) => return Err(errno),
        };
        // A sweep may have taken the lock first: its file is gone, or will be.
        let locked = fs::flock(&file, FlockOperation::NonBlockingLockExclusive);
        let is_ours = locked.is_ok() && fs::fstat(&file).is_ok_and(|stat| stat.st_nlink > 0);
        if is_ours {
            return Ok((file, name));
        }
        last = Errno::AGAIN;
    }
    Err(last)
}

/// Gives a temporary file its name unless that exists.
pub(super) fn rename(root: &OwnedFd, temporary: &str, path: &str) -> io::Result<Put> {
    match fs::renameat_with(root, temporary, root, path, RenameFlags::NOREPLACE) {
        Ok(()) => Ok(Put::New),
        Err(Errno::EXIST) => Ok(Put::WasThere),
        // The file system cannot refuse to replace: both files have the same bytes.
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
            fs::renameat(root, temporary, root, path).map(|()| Put::New)
        }
        Err(errno) => Err(errno),
    }
}

/// Counts a file in whole blocks; `u64::MAX` if more.
pub(super) fn charge(length: u64) -> u64 {
    length.checked_next_multiple_of(BLOCK).unwrap_or(u64::MAX)
}

pub(super) fn status(stat: &Stat) -> Status {
    // Times of files may be anything.
    let seconds = u64::try_from(stat.st_mtime).unwrap_or(0);
    let micros = u64::from(u32::try_from(stat.st_mtime_nsec).unwrap_or(0) / 1_000);
    Status {
        is_file: FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile,
        length: u64::try_from(stat.st_size).unwrap_or(0),
        modified: seconds.saturating_mul(1_000_000).saturating_add(micros),
    }
}

/// Gives a file without a name a name, unless that exists.
fn name(file: &OwnedFd, root: &OwnedFd, path: &str) -> io::Result<()> {
    let from = format!("/proc/self/fd/{}", file.as_raw_fd());
    fs::linkat(CWD, from.as_str(), root, path, AtFlags::SYMLINK_FOLLOW)
}

fn can_be_named(root: &OwnedFd, file: &OwnedFd) -> bool {
    let probe = format!("{}.probe-{}{}", path::OWN, std::process::id(), path::TEMPORARY);
    let named = name(file, root, &probe);
    let removed = fs::unlinkat(root, probe.as_str(), AtFlags::empty());
    matches!(named, Ok(()) | Err(Errno::EXIST)) && matches!(removed, Ok(()) | Err(Errno::NOENT))
}

fn writes_directly(file: &OwnedFd) -> bool {
    let can = fs::fcntl_setfl(file, OFlags::DIRECT).is_ok();
    can && !matches!(io::pwrite(file, &PAGE.0, 0), Err(Errno::INVAL | Errno::OPNOTSUPP))
}

fn stop_direct(file: &OwnedFd) -> bool {
    let _ = fs::fcntl_setfl(file, OFlags::empty());
    false
}

#[repr(align(4096))]
struct Page([u8; ALIGNMENT]);

static PAGE: Page = Page([0; ALIGNMENT]);

const WRITE: &str = "write of";
/// Alignment of memory, lengths and offsets of direct transfers.
const ALIGNMENT: usize = 4_096;
/// Unit of capacity.
pub(super) const BLOCK: u64 = 4_096;
/// Largest transfer between two looks at the clock.
const PIECE: usize = 16 << 20;
/// Attempts to find a name for a temporary file.
const CREATIONS: u32 = 16;
/// Less the umask.
const MODE: Mode = Mode::from_raw_mode(0o666);
const FOLDER_MODE: Mode = Mode::from_raw_mode(0o777);
