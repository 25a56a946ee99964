//! Settings of a folder.

/// Settings of a [`DiskStore`](super::DiskStore).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskOptions {
    capacity: u64,
    floor: Option<u64>,
    read_only: bool,
    direct: DirectIo,
    rename: bool,
}

impl DiskOptions {
    /// Bounds the files of chunks to `capacity` bytes, each counted in whole blocks of 4,096.
    /// Folders are not counted: up to 65,536 of them for each root, 4 KiB each on most file
    /// systems.
    pub const fn new(capacity: u64) -> Self {
        Self { capacity, floor: None, read_only: false, direct: DirectIo::Auto, rename: false }
    }

    /// Keeps `bytes` of the file system free, for others; by default 5 % of its size. Below the
    /// floor, chunks are evicted before one is written.
    #[must_use]
    pub const fn with_floor(mut self, bytes: u64) -> Self {
        self.floor = Some(bytes);
        self
    }

    /// Makes the store read-only: nothing in the folder changes, neither lock files nor times.
    #[must_use]
    pub const fn with_read_only(mut self, read_only: bool) -> Self {
        self.read_only = read_only;
        self
    }

    /// Sets whether the page cache is bypassed.
    #[must_use]
    pub const fn with_direct(mut self, direct: DirectIo) -> Self {
        self.direct = direct;
        self
    }

    /// Writes under a temporary name and renames, as on a file system without `O_TMPFILE`: for
    /// tests on one that has it.
    #[doc(hidden)]
    #[must_use]
    pub const fn with_rename(mut self, rename: bool) -> Self {
        self.rename = rename;
        self
    }

    /// Returns the capacity in bytes.
    pub const fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Returns the bytes to keep free, `None` for 5 % of the file system.
    pub const fn floor(&self) -> Option<u64> {
        self.floor
    }

    /// Returns whether the store only reads.
    pub const fn read_only(&self) -> bool {
        self.read_only
    }

    pub(super) const fn rename(&self) -> bool {
        self.rename
    }

    /// Returns whether the page cache is bypassed.
    pub const fn direct(&self) -> DirectIo {
        self.direct
    }
}

/// The use of direct I/O (`O_DIRECT`), which bypasses the page cache, in reads and writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum DirectIo {
    /// Direct where the file system can, for buffers on a multiple of 4,096 bytes.
    #[default]
    Auto,
    /// Never.
    Off,
}
