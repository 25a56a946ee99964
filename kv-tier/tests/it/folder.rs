//! A folder in the hands of a tool: everything in it is named, and repairs keep the count right.
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Duration;
use std::{fs, thread};

use kv_testkit::store::{chunk_address, chunk_bytes};
use kv_tier::{
    BlockStore, ChunkAddress, DiskFolder, DiskOpenError, ListChunks, Listed, StoreErrorKind,
};

use crate::support::{CHUNK, chunk, folder, get, open, path, put, soon, stats};

const LIMIT: Duration = Duration::from_secs(20);

/// Returns the chunks with their bytes, and the paths of everything else.
fn list(store: &dyn ListChunks) -> (BTreeMap<ChunkAddress, u64>, Vec<String>) {
    let (mut chunks, mut others) = (BTreeMap::new(), Vec::new());
    let listed = store.list(LIMIT, &mut |listed| {
        match listed {
            Listed::Chunk(chunk) => _ = chunks.insert(chunk.address, chunk.bytes),
            Listed::Other { path } => others.push(path),
        }
        ControlFlow::Continue(())
    });
    listed.unwrap();
    others.sort();
    (chunks, others)
}

#[test]
fn chunks_and_everything_else_are_listed() {
    let (folder, options) = folder(64 << 20);
    let store = open(folder.path(), options);
    let two_roots = [chunk_address(1, 1), chunk_address(1, 2), chunk_address(2, 3)];
    for chunk in &two_roots {
        store.put(chunk, &chunk_bytes(chunk, CHUNK), soon()).unwrap();
    }
    let root = folder.path().join(chunk(1).root.to_string());
    fs::write(folder.path().join("notes.txt"), "mine").unwrap();
    fs::write(folder.path().join(chunk_address(9, 9).root.to_string()), "a file").unwrap();
    fs::write(root.join("readme"), "").unwrap();
    fs::write(root.join("zz"), "").unwrap();
    fs::write(path(folder.path(), &two_roots[0]).with_file_name("half.tmp"), "").unwrap();
    let empty = path(folder.path(), &chunk(7));
    fs::create_dir_all(empty.parent().unwrap()).unwrap();
    fs::write(&empty, "").unwrap();
    let link = path(folder.path(), &chunk(8));
    fs::create_dir_all(link.parent().unwrap()).unwrap();
    symlink(path(folder.path(), &two_roots[0]), &link).unwrap();

    let (chunks, others) = list(&DiskFolder::open(folder.path()).unwrap());
    let expected = two_roots.map(|chunk| (chunk, CHUNK as u64)).into_iter();
    assert_eq!(chunks, expected.chain([(chunk(7), 0)]).collect());
    let below = |path: &Path| path.strip_prefix(folder.path()).unwrap().display().to_string();
    let mut expected = vec![
        "notes.txt".to_owned(),
        chunk_address(9, 9).root.to_string(),
        below(&root.join("readme")),
        below(&root.join("zz")),
        below(&path(folder.path(), &two_roots[0]).with_file_name("half.tmp")),
        below(&link),
    ];
    expected.sort();
    assert_eq!(others, expected);
}

#[test]
fn a_listing_ends_where_its_caller_wants() {
    let (folder, options) = folder(64 << 20);
    let store = open(folder.path(), options);
    (1..=5).for_each(|n| _ = put(&store, n).unwrap());
    let mut seen = 0;
    let tool = DiskFolder::open(folder.path()).unwrap();
    tool.list(LIMIT, &mut |_| {
        seen += 1;
        if seen == 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })
    .unwrap();
    assert_eq!(seen, 2);
}

#[test]
fn fronts_and_chunks_are_read_and_none_is_written() {
    let (folder, options) = folder(64 << 20);
    let store = open(folder.path(), options);
    put(&store, 1).unwrap();
    let tool = DiskFolder::open(folder.path()).unwrap();
    let (whole, mut into) = (chunk_bytes(&chunk(1), CHUNK), vec![0; CHUNK + 5]);
    for room in [1, 100, 4_096, CHUNK, CHUNK + 5] {
        let read = tool.get_front(&chunk(1), &mut into[..room], soon()).unwrap().unwrap();
        assert_eq!(read, room.min(CHUNK));
        assert!(into[..read] == whole[..read], "the first {room} bytes");
    }
    assert_eq!(tool.get(&chunk(1), &mut into, soon()).unwrap(), Some(CHUNK));
    assert_eq!(tool.get_front(&chunk(2), &mut into, soon()).unwrap(), None);
    assert_eq!(tool.contains(&[chunk(1), chunk(2)], soon()).unwrap(), [true, false]);
    let denied = tool.put(&chunk(2), b"x", soon()).unwrap_err();
    assert_eq!(denied.kind(), StoreErrorKind::Denied);
    fs::write(path(folder.path(), &chunk(1)), "").unwrap();
    let empty = tool.get_front(&chunk(1), &mut into, soon()).unwrap_err();
    assert_eq!(empty.kind(), StoreErrorKind::Corrupt);
}

#[test]
fn removal_is_counted_for_the_process_that_writes() {
    let (folder, options) = folder(64 << 20);
    let store = open(folder.path(), options);
    (1..=4).for_each(|n| _ = put(&store, n).unwrap());
    assert_eq!(stats(&store).held_bytes, Some(4 * CHUNK as u64));
    let tool = DiskFolder::open(folder.path()).unwrap();
    tool.remove(&[1, 2, 9].map(chunk), soon()).unwrap();
    assert_eq!(stats(&store).held_bytes, Some(2 * CHUNK as u64));
    assert_eq!([1, 2, 3, 4].map(|n| get(&store, n).unwrap()), [false, false, true, true]);
    tool.remove(&[3, 4].map(chunk), soon()).unwrap();
    assert!(!folder.path().join(chunk(1).root.to_string()).exists(), "empty folders stay");
    assert_eq!(stats(&store).held_bytes, Some(0));
    // The root's folder is made again.
    put(&store, 5).unwrap();
    assert!(get(&store, 5).unwrap());
}

#[test]
fn a_writer_and_a_tool_that_removes_do_not_stop_each_other() {
    let (folder, options) = folder(64 << 20);
    let store = open(folder.path(), options);
    let tool = DiskFolder::open(folder.path()).unwrap();
    thread::scope(|scope| {
        let writer = scope.spawn(|| {
            // A folder may be gone between its creation and the file's, which fails once.
            (0..200).filter(|n| put(&store, *n).is_ok()).count()
        });
        while !writer.is_finished() {
            let (chunks, _) = list(&tool);
            tool.remove(&chunks.into_keys().collect::<Vec<_>>(), soon()).unwrap();
        }
        let written = writer.join().unwrap();
        assert!(written >= 100, "{written} of 200 were written");
    });
    let (chunks, others) = list(&tool);
    tool.remove(&chunks.into_keys().collect::<Vec<_>>(), soon()).unwrap();
    assert_eq!((others, stats(&store).held_bytes), (vec![], Some(0)));
}

#[test]
fn only_a_store_is_opened_and_nothing_is_made() {
    let folder = tempfile::tempdir().unwrap();
    let absent = folder.path().join("absent");
    assert!(matches!(DiskFolder::open(&absent).unwrap_err(), DiskOpenError::Io { .. }));
    assert!(!absent.exists());
    let refused = DiskFolder::open(folder.path()).unwrap_err();
    assert!(matches!(refused, DiskOpenError::NotAStore { .. }), "{refused}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    let marker = r#"{"format":"kv-tier","version":9,"capacity":8192}"#;
    fs::write(folder.path().join("kv-tier.json"), marker).unwrap();
    let newer = DiskFolder::open(folder.path()).unwrap_err();
    assert!(matches!(newer, DiskOpenError::Version { found: 9, .. }), "{newer}");
}
