//! Other objects in the place of a chunk's file: each is a miss, and the next write replaces it.
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;

use kv_tier::{BlockStore, Put, StoreErrorKind};
use rustix::fs::{CWD, FileType, Mode, mknodat};

use crate::support::{CHUNK, MIB, charged, chunk, folder, get, open, path, put, soon, stats};

/// Puts something in a chunk's place.
#[derive(Debug, Clone, Copy)]
enum Stranger {
    Folder,
    FullFolder,
    Link,
    DanglingLink,
    LinkToItself,
    LinkToFolder,
    Pipe,
    Socket,
    Unreadable,
    Empty,
}

impl Stranger {
    const ALL: [Self; 10] = [
        Self::Folder,
        Self::FullFolder,
        Self::Link,
        Self::DanglingLink,
        Self::LinkToItself,
        Self::LinkToFolder,
        Self::Pipe,
        Self::Socket,
        Self::Unreadable,
        Self::Empty,
    ];

    fn make(self, at: &Path) {
        let parent = at.parent().unwrap();
        fs::create_dir_all(parent).unwrap();
        match self {
            Self::Folder => fs::create_dir(at).unwrap(),
            Self::FullFolder => {
                fs::create_dir(at).unwrap();
                fs::write(at.join("of somebody"), "text").unwrap();
            }
            Self::Link => {
                fs::write(parent.join("other"), vec![7; CHUNK]).unwrap();
                symlink(parent.join("other"), at).unwrap();
            }
            Self::DanglingLink => symlink(parent.join("nothing"), at).unwrap(),
            Self::LinkToItself => symlink(at, at).unwrap(),
            Self::LinkToFolder => symlink(parent, at).unwrap(),
            Self::Pipe => mknodat(CWD, at, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap(),
            Self::Socket => {
                // A socket's path is short.
                let short = tempfile::tempdir().unwrap();
                drop(UnixListener::bind(short.path().join("s")).unwrap());
                fs::rename(short.path().join("s"), at).unwrap();
            }
            Self::Unreadable => {
                fs::write(at, vec![7; CHUNK - 1]).unwrap();
                fs::set_permissions(at, fs::Permissions::from_mode(0o000)).unwrap();
            }
            Self::Empty => fs::write(at, "").unwrap(),
        }
    }
}

/// Reads what may be anything; a refusal must be that of a chunk, which opens no breaker.
fn is_no_failure(read: Result<Option<usize>, StoreErrorKind>) -> bool {
    matches!(read, Ok(None | Some(_)) | Err(StoreErrorKind::Corrupt))
}

#[test]
fn what_is_no_file_is_replaced_by_the_next_write() {
    for stranger in Stranger::ALL {
        // Whether the store has known the chunk before.
        for is_known in [false, true] {
            let (folder, options) = folder(4 * MIB);
            let store = open(folder.path(), options);
            let at = path(folder.path(), &chunk(1));
            if is_known {
                put(&store, 1).unwrap();
                fs::remove_file(&at).unwrap();
            }
            stranger.make(&at);
            let name = format!("{stranger:?}, {is_known}");
            store.contains(&[chunk(1), chunk(2)], soon()).unwrap();
            let read = store.get(&chunk(1), &mut vec![0; CHUNK], soon());
            assert!(is_no_failure(read.map_err(|error| error.kind())), "{name}");
            assert_eq!(put(&store, 1), Ok(Put::New), "{name}");
            assert_eq!(get(&store, 1), Ok(true), "{name}");
            // What a folder or a link led to is somebody's, and stays.
            store.remove(&[chunk(1)], soon()).unwrap();
            let stays = match stranger {
                Stranger::FullFolder => fs::read_dir(at.parent().unwrap()).unwrap().count(),
                Stranger::Link => usize::from(at.parent().unwrap().join("other").exists()),
                _ => continue,
            };
            assert_eq!(stays, 1, "{name}");
        }
    }
}

#[test]
fn what_is_no_file_is_removed_and_was_never_counted() {
    for stranger in Stranger::ALL {
        let (folder, options) = folder(4 * MIB);
        let store = open(folder.path(), options);
        put(&store, 2).unwrap();
        let held = stats(&store).held_bytes;
        stranger.make(&path(folder.path(), &chunk(1)));
        store.remove(&[chunk(1)], soon()).unwrap();
        let is_file = matches!(stranger, Stranger::Unreadable | Stranger::Empty);
        if !is_file {
            assert_eq!(stats(&store).held_bytes, held, "{stranger:?}");
        }
        assert_eq!(get(&store, 1), Ok(false), "{stranger:?}");
    }
}

/// The folders between the root and its files.
#[test]
fn what_is_no_folder_on_the_way_is_replaced() {
    for stranger in Stranger::ALL {
        let is_folder =
            matches!(stranger, Stranger::Folder | Stranger::FullFolder | Stranger::LinkToFolder);
        for level in 1..=3 {
            if is_folder {
                continue;
            }
            let (folder, options) = folder(4 * MIB);
            let store = open(folder.path(), options);
            let at = path(folder.path(), &chunk(1));
            stranger.make(at.ancestors().nth(level).unwrap());
            let name = format!("{stranger:?} at {level}");
            let found = store.contains(&[chunk(1), chunk(2)], soon());
            assert_eq!(found.unwrap(), [false; 2], "{name}");
            assert_eq!(get(&store, 1), Ok(false), "{name}");
            store.remove(&[chunk(1)], soon()).unwrap();
            assert_eq!(put(&store, 1), Ok(Put::New), "{name}");
            assert_eq!(get(&store, 1), Ok(true), "{name}");
            drop(store);
            let store = open(folder.path(), options);
            assert_eq!(get(&store, 1), Ok(true), "{name}");
            if !matches!(stranger, Stranger::Link) {
                assert_eq!(stats(&store).held_bytes, Some(charged(folder.path())), "{name}");
            }
        }
    }
}
