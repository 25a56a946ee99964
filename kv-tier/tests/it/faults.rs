//! Faults of a folder, each with no more effect than it must have.
use std::fs;
use std::fs::OpenOptions;
use std::path::Path;
use std::time::{Duration, Instant};

use kv_testkit::store::chunk_bytes;
use kv_tier::{BlockStore, ChunkAddress, ChunkName, DiskOptions, DiskStore, Put, StoreErrorKind};
use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};

use crate::support::{
    CHUNK, MIB, Tmpfs, charged, chunk, files, folder, get, open, path, put, soon, stats,
};

#[test]
fn a_damaged_file_is_told_by_its_length_and_replaced() {
    let (folder, options) = folder(4 * MIB);
    let store = open(folder.path(), options);
    let path = path(folder.path(), &chunk(1));
    let mut into = vec![0; CHUNK + 10];
    let read = |into: &mut [u8]| store.get(&chunk(1), into, soon()).map_err(|e| e.kind());
    for (text, expected) in [
        (&[1; 100][..], Ok(Some(100))),
        (&[1; 4_096], Ok(Some(4_096))),
        (&[], Err(StoreErrorKind::Corrupt)),
        (&vec![1; CHUNK + 11], Err(StoreErrorKind::Corrupt)),
    ] {
        put(&store, 1).unwrap();
        fs::write(&path, text).unwrap();
        assert_eq!(read(&mut into), expected, "{} bytes", text.len());
        assert_eq!(put(&store, 1), Ok(Put::New), "{} bytes", text.len());
        assert_eq!(get(&store, 1), Ok(true));
        assert_eq!(stats(&store).held_bytes, Some(charged(folder.path())));
    }
    // Of the right length: its reader knows what it wanted.
    fs::write(&path, chunk_bytes(&chunk(2), CHUNK)).unwrap();
    assert_eq!(read(&mut into), Ok(Some(CHUNK)));
    assert_eq!(into[..CHUNK], chunk_bytes(&chunk(2), CHUNK));
    store.remove(&[chunk(1)], soon()).unwrap();
    assert_eq!((get(&store, 1), stats(&store).held_bytes), (Ok(false), Some(0)));
}

#[test]
fn a_deleted_file_is_a_miss() {
    let (folder, options) = folder(4 * MIB);
    let store = open(folder.path(), options);
    put(&store, 1).unwrap();
    fs::remove_file(path(folder.path(), &chunk(1))).unwrap();
    assert_eq!(get(&store, 1), Ok(false));
    assert_eq!(store.contains(&[chunk(1)], soon()).unwrap(), [false]);
    assert_eq!(put(&store, 1), Ok(Put::New));
    assert_eq!(get(&store, 1), Ok(true));
}

/// Returns the kind of the failure that the store has repaired since the last question.
fn repaired(store: &DiskStore) -> Option<StoreErrorKind> {
    store.take_repaired().map(|error| error.kind())
}

#[test]
fn a_removed_folder_has_no_chunks_and_is_made_again() {
    let remove_all = |folder: &Path| fs::remove_dir_all(folder).unwrap();
    let empty = |folder: &Path| {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }.unwrap();
        }
    };
    let only_locks = |folder: &Path| fs::remove_file(folder.join("kv-tier.usage")).unwrap();
    for (remove, is_kept) in
        [(&remove_all as &dyn Fn(&Path), false), (&empty, false), (&only_locks, true)]
    {
        let (parent, options) = folder(4 * MIB);
        let folder = parent.path().join("in/cache");
        let store = open(&folder, options);
        (0..3).for_each(|n| _ = put(&store, n).unwrap());
        for round in 1..3 {
            assert_eq!(repaired(&store), None);
            remove(&folder);
            // Known before any write.
            assert_eq!(store.contains(&[chunk(1), chunk(9)], soon()).unwrap(), [false; 2]);
            assert_eq!(repaired(&store), Some(StoreErrorKind::Removed));
            assert_eq!(get(&store, 1), Ok(is_kept));
            store.remove(&[chunk(2)], soon()).unwrap();
            assert_eq!(repaired(&store), None, "once");
            assert_eq!(
                put(&store, 3),
                Ok(if is_kept && round > 1 { Put::WasThere } else { Put::New })
            );
            assert_eq!((get(&store, 3), get(&store, 1)), (Ok(true), Ok(is_kept)));
            assert!(store.wait_listed(soon()));
            assert_eq!(stats(&store).held_bytes, Some(charged(&folder)));
            assert!(stats(&store).is_evictor);
        }
        drop(store);
        assert_eq!(get(&open(&folder, options), 3), Ok(true));
    }
}

#[test]
fn a_folder_in_whose_place_something_else_is_takes_no_chunks() {
    let (parent, options) = folder(4 * MIB);
    let folder = parent.path().join("cache");
    let store = open(&folder, options);
    put(&store, 1).unwrap();
    fs::remove_dir_all(&folder).unwrap();
    fs::write(&folder, "mine").unwrap();
    for _ in 0..2 {
        let error = store.put(&chunk(2), &[1; 4_096], soon()).unwrap_err();
        assert!(error.to_string().contains("creation of the folder"), "{error}");
    }
    assert_eq!(fs::read(&folder).unwrap(), b"mine");
    fs::remove_file(&folder).unwrap();
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("notes"), "mine").unwrap();
    assert_eq!(put(&store, 2), Err(StoreErrorKind::Denied));
    fs::remove_file(folder.join("notes")).unwrap();
    assert_eq!(put(&store, 2), Ok(Put::New));
    assert_eq!((get(&store, 1), get(&store, 2)), (Ok(false), Ok(true)));
}

#[test]
fn a_folder_that_another_process_made_again_is_shared() {
    let (parent, options) = folder(4 * MIB);
    let folder = parent.path().join("cache");
    let [one, other] = [(); 2].map(|()| open(&folder, options));
    put(&one, 1).unwrap();
    fs::remove_dir_all(&folder).unwrap();
    assert_eq!((put(&other, 2), put(&one, 3)), (Ok(Put::New), Ok(Put::New)));
    for store in [&one, &other] {
        assert_eq!(store.contains(&[1, 2, 3].map(chunk), soon()).unwrap(), [false, true, true]);
    }
    assert_eq!([stats(&one).is_evictor, stats(&other).is_evictor], [false, true]);
    assert_eq!(stats(&one).held_bytes, Some(charged(&folder)));
}

#[test]
fn a_moved_folder_goes_on() {
    let (parent, options) = folder(4 * MIB);
    let folder = parent.path().join("cache");
    let store = open(&folder, options);
    put(&store, 1).unwrap();
    fs::rename(&folder, parent.path().join("elsewhere")).unwrap();
    assert_eq!((get(&store, 1), put(&store, 2)), (Ok(true), Ok(Put::New)));
    assert_eq!((get(&store, 2), repaired(&store)), (Ok(true), None));
    assert!(!folder.exists());
}

#[test]
fn what_cannot_be_removed_stops_no_eviction() {
    let (folder, options) = folder(4 * CHUNK as u64);
    let store = open(folder.path(), options);
    (0..4).for_each(|n| _ = put(&store, n).unwrap());
    // A folder in the place of the oldest file.
    let stranger = path(folder.path(), &chunk(0));
    fs::remove_file(&stranger).unwrap();
    fs::create_dir(&stranger).unwrap();
    // And a file that the file system protects, where it can and this user may.
    let guarded = fs::File::open(path(folder.path(), &chunk(1))).unwrap();
    let flags = ioctl_getflags(&guarded);
    let is_guarded =
        flags.and_then(|flags| ioctl_setflags(&guarded, flags | IFlags::IMMUTABLE)).is_ok();
    let outcome: Vec<_> = (4..8).map(|n| put(&store, n)).collect();
    let read = get(&store, 1);
    // The others of a list are removed for all that.
    let removed = store.remove(&[chunk(1), chunk(7)], soon());
    if is_guarded {
        ioctl_setflags(&guarded, flags.unwrap()).unwrap();
    }
    assert_eq!(outcome, [Ok(Put::New); 4]);
    assert!(stats(&store).skipped_removals >= u64::from(is_guarded), "{:?}", stats(&store));
    assert_eq!((read, removed.is_err()), (Ok(is_guarded), is_guarded));
    assert_eq!(get(&store, 7), Ok(false));
    assert_eq!(put(&store, 0), Ok(Put::New));
}

#[test]
fn a_folder_that_is_only_read_is_not_changed() {
    let (folder, options) = folder(4 * MIB);
    let store = open(folder.path(), options);
    put(&store, 1).unwrap();
    drop(store);
    let old = path(folder.path(), &chunk(1)).with_extension("1-1.tmp");
    fs::write(&old, "half").unwrap();
    let before = fs::metadata(path(folder.path(), &chunk(1))).unwrap().modified().unwrap();
    check_read_only(&open(folder.path(), options.with_read_only(true)));
    let after = fs::metadata(path(folder.path(), &chunk(1))).unwrap().modified().unwrap();
    assert_eq!((before, files(folder.path()).len()), (after, 2));
}

#[test]
fn a_file_system_that_is_only_read_is_read() {
    let Some(tmpfs) = Tmpfs::mount("size=16m") else { return };
    let options = DiskOptions::new(MIB).with_floor(0);
    let store = open(tmpfs.0.path(), options);
    put(&store, 1).unwrap();
    drop(store);
    assert!(tmpfs.remount_read_only());
    check_read_only(&open(tmpfs.0.path(), options));
}

fn check_read_only(store: &DiskStore) {
    assert!(stats(store).is_read_only);
    assert_eq!((get(store, 1), get(store, 2)), (Ok(true), Ok(false)));
    assert_eq!(store.contains(&[chunk(1), chunk(2)], soon()).unwrap(), [true, false]);
    assert_eq!(put(store, 2), Err(StoreErrorKind::Denied));
    let removed = store.remove(&[chunk(1)], soon()).unwrap_err();
    assert_eq!((removed.kind(), get(store, 1)), (StoreErrorKind::Denied, Ok(true)));
}

#[test]
fn a_full_disk_is_a_smaller_capacity() {
    let Some(tmpfs) = Tmpfs::mount("size=16m") else { return };
    let folder = tmpfs.0.path().join("cache");
    let store = open(&folder, DiskOptions::new(1 << 40).with_floor(0));
    let mebibyte = |n| vec![n; 1 << 20];
    for n in 0..40 {
        let put = store.put(&chunk(n), &mebibyte(n as u8), soon());
        assert_eq!(put.unwrap(), Put::New, "chunk {n}: {:?}", stats(&store));
    }
    assert!(stats(&store).evictions >= 24 && charged(&folder) <= 16 * MIB);
    // Somebody else takes half of it, then all.
    let mut into = mebibyte(0);
    fs::remove_dir_all(folder.join(chunk(0).root.to_string())).unwrap();
    fs::write(tmpfs.0.path().join("other"), vec![0; 15 << 20]).unwrap();
    let first = store.put(&chunk(50), &mebibyte(50), soon());
    assert!(first.is_ok() || first.is_err_and(|e| e.kind() == StoreErrorKind::Full));
    let _ = fs::write(tmpfs.0.path().join("rest"), vec![0; 2 << 20]);
    for n in 51..60 {
        match store.put(&chunk(n), &mebibyte(n as u8), soon()) {
            Ok(_) => {
                assert_eq!(store.get(&chunk(n), &mut into, soon()).unwrap(), Some(1 << 20));
                assert_eq!(into, mebibyte(n as u8));
            }
            Err(error) => assert_eq!(error.kind(), StoreErrorKind::Full),
        }
    }
    assert!(files(&folder).iter().all(|(_, bytes)| *bytes == MIB));
}

#[test]
fn a_write_that_finds_no_room_leaves_nothing() {
    // The free space does not tell that no further file can be made.
    let Some(tmpfs) = Tmpfs::mount("size=16m,nr_inodes=24") else { return };
    let store = open(tmpfs.0.path(), DiskOptions::new(1 << 40).with_floor(0));
    // All in one folder, so that a file is all that a write needs.
    let chunk = |n| {
        let mut name = [0; 32];
        name[31] = n;
        ChunkAddress { root: ChunkName::new([1; 32]), name: ChunkName::new(name) }
    };
    let bytes = |n| chunk_bytes(&chunk(n), CHUNK);
    let puts: Vec<_> = (0..40).map(|n| store.put(&chunk(n), &bytes(n), soon())).collect();
    let refused = puts.iter().position(Result::is_err).expect("24 files are too many");
    assert_eq!(puts[refused].as_ref().unwrap_err().kind(), StoreErrorKind::Full);
    // The capacity is what was there: later ones take the places of the oldest.
    let (later, stats) = (&puts[refused + 1..], stats(&store));
    assert!(later.iter().all(Result::is_ok), "{later:?}");
    assert_eq!(
        (stats.limit_bytes, stats.held_bytes),
        ((refused * CHUNK) as u64, Some(charged(tmpfs.0.path())))
    );
    let mut into = vec![0; CHUNK];
    assert_eq!(store.get(&chunk(39), &mut into, soon()).unwrap(), Some(CHUNK));
    assert_eq!(into, bytes(39));
    assert_eq!(store.get(&chunk(refused as u8), &mut into, soon()).unwrap(), None);
}

#[test]
fn a_stopped_process_holds_nobody_beyond_the_deadline() {
    let (folder, options) = folder(4 * MIB);
    let store = open(folder.path(), options);
    put(&store, 1).unwrap();
    for lock in ["kv-tier.usage", "kv-tier.changes"] {
        let held = OpenOptions::new().read(true).open(folder.path().join(lock)).unwrap();
        held.lock().unwrap();
        let begin = Instant::now();
        let deadline = begin + Duration::from_millis(30);
        let late = store.put(&chunk(2), &[1; 4_096], deadline).unwrap_err();
        assert_eq!(late.kind(), StoreErrorKind::Timeout, "{lock}");
        assert!(begin.elapsed() < Duration::from_millis(500), "{lock}: {:?}", begin.elapsed());
        // Reading takes no lock.
        assert_eq!(get(&store, 1), Ok(true), "{lock}");
        drop(held);
        assert_eq!(store.contains(&[chunk(2)], soon()).unwrap(), [false], "{lock}");
    }
    assert_eq!(put(&store, 2), Ok(Put::New));
}
