//! The disk itself: one file, read and written at random places past the page cache.
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{self, Mode, OFlags};
use rustix::io::{self, Errno, retry_on_intr};

use super::error::TierError;
use crate::num::to_u64;

/// A file that is read and written in pieces of one size.
#[derive(Debug)]
pub(super) struct RawFile(OwnedFd);

impl RawFile {
    /// Creates a file.
    pub(super) fn create(path: &Path) -> Result<Self, TierError> {
        let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC | OFlags::DIRECT;
        match fs::open(path, flags, Mode::from_raw_mode(0o600)) {
            Ok(file) => Ok(Self(file)),
            Err(errno @ Errno::INVAL) => {
                let path = path.parent().unwrap_or(path).to_owned();
                Err(TierError::NoDirectIo { path, source: errno.into() })
            }
            Err(errno) => Err(TierError::io("creation of a file to compare with")(errno)),
        }
    }

    /// Reads piece `item`.
    pub(super) fn read(&self, item: usize, into: &mut [u8]) -> Result<(), TierError> {
        let (mut begin, end) = bounds(item, into.len());
        let mut rest = into;
        while !rest.is_empty() {
            let read = retry_on_intr(|| io::pread(&self.0, &mut *rest, begin));
            let read = read.map_err(TierError::io("plain read"))?;
            begin += to_u64(read);
            match rest.split_at_mut_checked(read) {
                Some((_, after)) if read > 0 => rest = after,
                _ => return Err(TierError::other(format!("the file ends before byte {end}"))),
            }
        }
        Ok(())
    }

    /// Writes piece `item`.
    pub(super) fn write(&self, item: usize, bytes: &[u8]) -> Result<(), TierError> {
        let (mut begin, end) = bounds(item, bytes.len());
        let mut rest = bytes;
        while !rest.is_empty() {
            let written = retry_on_intr(|| io::pwrite(&self.0, rest, begin));
            let written = written.map_err(TierError::io("plain write"))?;
            begin += to_u64(written);
            match rest.split_at_checked(written) {
                Some((_, after)) if written > 0 => rest = after,
                _ => return Err(TierError::other(format!("nothing is written before {end}"))),
            }
        }
        Ok(())
    }
}

fn bounds(item: usize, length: usize) -> (u64, u64) {
    let begin = to_u64(item) * to_u64(length);
    (begin, begin + to_u64(length))
}

/// Refuses a folder in memory.
pub(super) fn check_disk(dir: &Path) -> Result<(), TierError> {
    let system = fs::statfs(dir).map_err(TierError::io("look at the folder's file system"))?;
    let kind = u64::try_from(system.f_type).unwrap_or(0) & 0xffff_ffff;
    if matches!(kind, TMPFS | RAMFS) {
        return Err(TierError::InMemory { path: dir.to_owned() });
    }
    Ok(())
}

const TMPFS: u64 = 0x0102_1994;
const RAMFS: u64 = 0x8584_58f6;
