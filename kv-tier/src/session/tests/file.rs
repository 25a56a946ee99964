//! Files that are written whole or not at all, without a cache.
use std::fs;
use std::io::{self, Write};

use crate::session::SessionError;
use crate::session::blocks::ranges;
use crate::session::file::{failed, save};

fn names(folder: &std::path::Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap().flatten();
    let mut names: Vec<_> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn a_file_that_cannot_be_written_leaves_the_one_before() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("chat.kvs");
    let write = |bytes: &'static [u8]| {
        save(&path, |file| file.write_all(bytes).map_err(|error| failed("write", &path, error)))
    };
    write(b"first").unwrap();
    // A disk that is full in the middle.
    let full = save(&path, |file| {
        file.write_all(b"seco").unwrap();
        Err(failed("write", &path, io::ErrorKind::StorageFull.into()))
    });
    let full = full.unwrap_err();
    assert!(matches!(&full, SessionError::Io { operation: "write", .. }), "{full}");
    assert_eq!(
        (fs::read(&path).unwrap(), names(folder.path())),
        (b"first".to_vec(), vec!["chat.kvs".to_owned()])
    );
    write(b"third").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"third");
    let absent = folder.path().join("absent/chat.kvs");
    assert!(matches!(save(&absent, |_| Ok(())), Err(SessionError::Io { operation: "create", .. })));
    assert_eq!(names(folder.path()), ["chat.kvs"]);
}

#[test]
fn what_a_killed_process_left_is_removed_and_what_another_writes_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("chat.kvs");
    fs::write(folder.path().join(".chat.kvs.1-0.tmp"), b"left").unwrap();
    fs::write(folder.path().join(".other.kvs.1-0.tmp"), b"of another session").unwrap();
    let written = fs::File::create(folder.path().join(".chat.kvs.2-0.tmp")).unwrap();
    written.lock().unwrap();
    save(&path, |_| Ok(())).unwrap();
    assert_eq!(names(folder.path()), [".chat.kvs.2-0.tmp", ".other.kvs.1-0.tmp", "chat.kvs"]);
}

#[test]
fn two_writers_of_one_name_do_not_mix() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("chat.kvs");
    std::thread::scope(|scope| {
        for number in 0..4_u8 {
            let path = &path;
            scope.spawn(move || {
                for _ in 0..100 {
                    let write = |file: &mut fs::File| {
                        file.write_all(&[number; 1000])
                            .and_then(|()| file.write_all(&[number; 1000]))
                    };
                    save(path, |file| write(file).map_err(|error| failed("write", path, error)))
                        .unwrap();
                    let read = fs::read(path).unwrap();
                    assert!(read.len() == 2000 && read.iter().all(|byte| *byte == read[0]));
                }
            });
        }
    });
    assert_eq!(names(folder.path()), ["chat.kvs"]);
}

#[test]
fn numbers_are_joined_to_ranges() {
    assert_eq!(ranges([0, 1, 3, 5, 6, 7].into_iter()), [0..2, 3..4, 5..8]);
    assert_eq!(ranges(std::iter::empty()), []);
}
