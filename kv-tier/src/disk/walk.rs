//! A walk through the folders of a store. No file is read.
use std::ffi::CStr;
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;

use rustix::fs::{self, Dir, Mode, OFlags};
use rustix::io::Errno;

use super::path;
use crate::ChunkAddress;

/// Something in the folders of a store that is not one of those on the way to chunks.
pub(super) struct Entry<'a> {
    /// Names of the folders from the store's to the entry's.
    pub(super) parents: &'a [&'a CStr],
    /// The folder that it is in.
    pub(super) folder: &'a OwnedFd,
    pub(super) name: &'a CStr,
}

impl Entry<'_> {
    /// Returns the chunk of this name at this place.
    pub(super) fn chunk(&self) -> Option<ChunkAddress> {
        let [root, _, _] = self.parents else { return None };
        let (root, name) = (path::parse(root.to_bytes())?, path::parse(self.name.to_bytes())?);
        Some(ChunkAddress { root, name })
    }

    /// Returns the path below the store's folder.
    pub(super) fn path(&self) -> String {
        let names = self.parents.iter().chain([&self.name]);
        let names: Vec<_> = names.map(|name| name.to_string_lossy()).collect();
        names.join("/")
    }
}

/// The end of a walk.
#[derive(Debug, Default)]
pub(super) struct Walked {
    /// Whether the walk was stopped before its end.
    pub(super) is_stopped: bool,
    /// The error of the first folder that could not be listed.
    pub(super) failure: Option<Errno>,
}

/// Visits everything in a store's folder. A folder that cannot be listed is left out. `is_wanted`
/// is called for each entry, those on the way to chunks included; `false` stops the walk.
pub(super) fn walk(
    root: &OwnedFd,
    is_wanted: &dyn Fn() -> bool,
    visit: &mut dyn FnMut(&Entry<'_>) -> ControlFlow<()>,
) -> Walked {
    let mut walk = Walk { is_wanted, visit, failure: None };
    let flow = walk.each(root, &[]);
    Walked { is_stopped: flow.is_break(), failure: walk.failure }
}

struct Walk<'a> {
    is_wanted: &'a dyn Fn() -> bool,
    visit: &'a mut dyn FnMut(&Entry<'_>) -> ControlFlow<()>,
    failure: Option<Errno>,
}

impl Walk<'_> {
    fn each(&mut self, folder: &OwnedFd, parents: &[&CStr]) -> ControlFlow<()> {
        let mut entries = match Dir::read_from(folder) {
            Ok(entries) => entries,
            Err(errno) => return self.note(errno),
        };
        while let Some(entry) = entries.read() {
            let entry = match entry {
                Ok(entry) => entry,
                Err(errno) => return self.note(errno),
            };
            if !(self.is_wanted)() {
                return ControlFlow::Break(());
            }
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            if !is_on_the_way(parents, name) {
                (self.visit)(&Entry { parents, folder, name })?;
                continue;
            }
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            match fs::openat(folder, name, flags, Mode::empty()) {
                Ok(inner) => self.each(&inner, &[parents, &[name]].concat())?,
                // Removed meanwhile.
                Err(Errno::NOENT) => {}
                Err(Errno::NOTDIR | Errno::LOOP) => {
                    (self.visit)(&Entry { parents, folder, name })?;
                }
                Err(errno) => self.note(errno)?,
            }
        }
        ControlFlow::Continue(())
    }

    /// Remembers the first failure.
    fn note(&mut self, errno: Errno) -> ControlFlow<()> {
        self.failure.get_or_insert(errno);
        ControlFlow::Continue(())
    }
}

/// Returns whether this is the name of a folder on the way to chunks: a root, or one of two levels.
fn is_on_the_way(parents: &[&CStr], name: &CStr) -> bool {
    match parents {
        [] => path::parse(name.to_bytes()).is_some(),
        [_] | [_, _] => path::is_level(name.to_bytes()),
        _ => false,
    }
}
