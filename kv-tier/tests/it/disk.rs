//! A folder in order: what is kept, counted, evicted and refused.
use std::fs;
use std::fs::FileTimes;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use kv_testkit::store::chunk_bytes;
use kv_tier::{BlockStore, DirectIo, DiskOpenError, DiskOptions, DiskStore, Put, StoreErrorKind};

use crate::support::{
    CHUNK, MIB, charged, chunk, files, folder, get, open, path, put, soon, stats,
};

#[test]
fn a_restart_finds_and_counts_everything() {
    let (folder, options) = folder(4 * MIB);
    let store = open(folder.path(), options);
    for n in 0..10 {
        assert_eq!(put(&store, n), Ok(Put::New));
    }
    store.put(&chunk(10), &[1; 100], soon()).unwrap();
    store.remove(&[chunk(3)], soon()).unwrap();
    let expected = 9 * CHUNK as u64 + 4_096;
    let before = stats(&store);
    assert_eq!((before.held_bytes, before.known_bytes), (Some(expected), expected));
    drop(store);
    let store = open(folder.path(), options);
    let after = stats(&store);
    assert_eq!(
        (after.held_bytes, after.known_bytes, after.known_files),
        (Some(expected), expected, 10)
    );
    assert_eq!(charged(folder.path()), expected);
    assert!(after.is_evictor && after.is_listed && !after.is_read_only);
    for n in 0..10 {
        assert_eq!(get(&store, n), Ok(n != 3));
    }
}

#[test]
fn a_file_is_at_its_path_and_has_the_bytes_alone() {
    for rename in [false, true] {
        let (folder, options) = folder(MIB);
        let store = open(folder.path(), options.with_rename(rename));
        put(&store, 1).unwrap();
        let path = path(folder.path(), &chunk(1));
        assert_eq!(fs::read(&path).unwrap(), chunk_bytes(&chunk(1), CHUNK), "rename: {rename}");
        assert_eq!(files(folder.path()), [(path, CHUNK as u64)]);
        assert_eq!(put(&store, 1), Ok(Put::WasThere));
    }
}

#[test]
fn the_bound_is_kept_and_the_least_recently_used_go_first() {
    let capacity = 9 * CHUNK as u64;
    let (folder, options) = folder(capacity);
    let store = open(folder.path(), options);
    for n in 0..9 {
        assert_eq!(put(&store, n), Ok(Put::New));
    }
    assert_eq!(stats(&store).evictions, 0);
    // A chain is looked up: its head goes after its tail.
    let chain = [chunk(0), chunk(1), chunk(20)];
    assert_eq!(store.contains(&chain, soon()).unwrap(), [true, true, false]);
    // Two go at a time, down to the low mark.
    for n in 9..16 {
        assert_eq!(put(&store, n), Ok(Put::New));
        assert!(charged(folder.path()) <= capacity);
    }
    let left: Vec<_> = (0..16).filter(|n| get(&store, *n) == Ok(true)).collect();
    assert_eq!(left, [0, 9, 10, 11, 12, 13, 14, 15]);
    let stats = stats(&store);
    assert_eq!((stats.evictions, stats.held_bytes), (8, Some(8 * CHUNK as u64)));
}

#[test]
fn a_chunk_that_never_fits_evicts_nothing() {
    let (folder, options) = folder(4 * CHUNK as u64);
    let store = open(folder.path(), options);
    put(&store, 1).unwrap();
    let full = store.put(&chunk(2), &vec![1; 4 * CHUNK + 1], soon()).unwrap_err();
    assert_eq!((full.kind(), get(&store, 1)), (StoreErrorKind::Full, Ok(true)));
}

#[test]
fn the_order_of_use_survives_a_restart() {
    let (folder, options) = folder(4 * CHUNK as u64);
    let store = open(folder.path(), options);
    for n in 0..4 {
        put(&store, n).unwrap();
    }
    drop(store);
    for (n, age) in [(0, 500), (1, 900), (2, 700), (3, 600)] {
        let file = fs::File::options().write(true).open(path(folder.path(), &chunk(n))).unwrap();
        let used = SystemTime::now() - Duration::from_secs(age);
        file.set_times(FileTimes::new().set_modified(used)).unwrap();
    }
    let store = open(folder.path(), options);
    // Its time is set by the use, for whoever opens the folder next.
    assert_eq!(get(&store, 1), Ok(true));
    let used = fs::metadata(path(folder.path(), &chunk(1))).unwrap().modified().unwrap();
    assert!(used.elapsed().unwrap() < Duration::from_mins(1));
    drop(store);
    let store = open(folder.path(), options);
    put(&store, 4).unwrap();
    let left: Vec<_> = (0..5).filter(|n| get(&store, *n) == Ok(true)).collect();
    assert_eq!(left, [0, 1, 4]);
}

#[test]
fn a_smaller_capacity_evicts_at_the_next_start() {
    let (folder, options) = folder(8 * CHUNK as u64);
    let store = open(folder.path(), options);
    (0..8).for_each(|n| _ = put(&store, n).unwrap());
    drop(store);
    let smaller = DiskOptions::new(3 * CHUNK as u64).with_floor(0);
    let store = open(folder.path(), smaller);
    assert!(charged(folder.path()) <= 3 * CHUNK as u64);
    assert_eq!((get(&store, 7), get(&store, 0)), (Ok(true), Ok(false)));
}

#[test]
fn a_floor_of_free_space_is_a_bound() {
    let (folder, options) = folder(8 * CHUNK as u64);
    let store = open(folder.path(), options);
    put(&store, 1).unwrap();
    drop(store);
    // Nothing is that free: the folder has to be empty, and has no room.
    let store = open(folder.path(), options.with_floor(u64::MAX));
    assert_eq!(put(&store, 2), Err(StoreErrorKind::Full));
    assert_eq!((stats(&store).limit_bytes, charged(folder.path())), (0, 0));
}

#[test]
fn direct_transfers_need_memory_on_pages() {
    #[repr(align(4096))]
    struct Pages([u8; 8_192]);
    for direct in [DirectIo::Auto, DirectIo::Off] {
        let (folder, options) = folder(MIB);
        let store = open(folder.path(), options.with_direct(direct));
        assert!(direct == DirectIo::Auto || !stats(&store).is_direct);
        let mut pages = Pages([7; 8_192]);
        for (n, range) in [(1, 0..8_192), (2, 0..4_096), (3, 1..4_097), (4, 0..4_095)] {
            let bytes = &mut pages.0[range.clone()];
            bytes.copy_from_slice(&chunk_bytes(&chunk(n), bytes.len()));
            assert_eq!(store.put(&chunk(n), bytes, soon()).unwrap(), Put::New);
            bytes.fill(0);
            assert_eq!(store.get(&chunk(n), bytes, soon()).unwrap(), Some(bytes.len()));
            assert_eq!(bytes, chunk_bytes(&chunk(n), range.len()), "{range:?}, {direct:?}");
        }
    }
}

#[test]
fn other_folders_are_refused_and_left_alone() {
    let options = DiskOptions::new(MIB);
    let refused = |entries: &[(&str, &str)]| {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in entries {
            fs::write(folder.path().join(name), text).unwrap();
        }
        let error = DiskStore::open(folder.path(), options).unwrap_err();
        let left: Vec<_> = fs::read_dir(folder.path()).unwrap().collect();
        assert_eq!(left.len(), entries.len(), "{error}");
        error
    };
    let marker = "kv-tier.json";
    for entries in [
        &[("photo.jpg", "")][..],
        &[(marker, "")],
        &[(marker, "[1]")],
        &[(marker, r#"{"format":"other","version":1,"capacity":8192}"#)],
        &[(marker, r#"{"format":"kv-tier","version":1,"capacity":-1}"#)],
        &[(marker, r#"{"format":"kv-tier","capacity":8192}"#)],
    ] {
        assert!(matches!(refused(entries), DiskOpenError::NotAStore { .. }), "{entries:?}");
    }
    let newer = refused(&[(marker, r#"{"format":"kv-tier","version":9,"capacity":8192}"#)]);
    assert!(matches!(newer, DiskOpenError::Version { found: 9, known: 1, .. }), "{newer:?}");
    let file = tempfile::NamedTempFile::new().unwrap();
    let error = DiskStore::open(file.path(), options).unwrap_err();
    assert!(
        matches!(error, DiskOpenError::Io { .. } | DiskOpenError::NotAStore { .. }),
        "{error:?}"
    );
    let error = DiskStore::open(file.path(), DiskOptions::new(4_095)).unwrap_err();
    assert!(matches!(error, DiskOpenError::Capacity { given: 4_095, least: 4_096 }), "{error:?}");
    let absent = tempfile::tempdir().unwrap();
    let error = DiskStore::open(absent.path(), options.with_read_only(true)).unwrap_err();
    assert!(matches!(error, DiskOpenError::NotAStore { .. }), "{error:?}");
}

#[test]
fn the_second_process_takes_over_when_the_first_ends() {
    let (folder, options) = folder(4 * CHUNK as u64);
    let first = open(folder.path(), options);
    // The capacity is that of the process that evicts.
    let second = open(folder.path(), DiskOptions::new(1 << 40).with_floor(0));
    assert_eq!(stats(&second).limit_bytes, 4 * CHUNK as u64);
    (0..4).for_each(|n| _ = put(&first, n).unwrap());
    assert_eq!((get(&second, 0), put(&second, 9)), (Ok(true), Err(StoreErrorKind::Full)));
    drop(first);
    for n in 9..15 {
        assert_eq!(put(&second, n), Ok(Put::New));
    }
    assert!(stats(&second).is_evictor && stats(&second).evictions > 0);
    assert!(charged(folder.path()) <= 4 * CHUNK as u64);
}

#[test]
fn an_idle_process_that_evicts_makes_room_for_others() {
    let (folder, options) = folder(4 * CHUNK as u64);
    let (first, second) = (open(folder.path(), options), open(folder.path(), options));
    // It has to learn of these first.
    (0..4).for_each(|n| _ = put(&second, n).unwrap());
    assert_eq!(put(&second, 9), Err(StoreErrorKind::Full));
    let patience = soon();
    while put(&second, 9) != Ok(Put::New) {
        assert!(Instant::now() < patience, "{:?}", stats(&first));
        thread::sleep(Duration::from_millis(5));
    }
    assert!(stats(&first).evictions > 0 && !stats(&second).is_evictor);
    assert!(charged(folder.path()) <= 4 * CHUNK as u64);
}

#[test]
fn what_a_killed_process_was_writing_is_swept() {
    let (folder, options) = folder(MIB);
    let store = open(folder.path(), options);
    put(&store, 1).unwrap();
    drop(store);
    let beside = path(folder.path(), &chunk(1));
    let old = [beside.with_extension("7-1.tmp"), folder.path().join("kv-tier.json.7-2.tmp")];
    for old in &old {
        fs::write(old, "half").unwrap();
    }
    // Another process is writing this one.
    let live = beside.with_extension("8-1.tmp");
    let file = fs::File::create(&live).unwrap();
    file.lock().unwrap();
    let store = open(folder.path(), options);
    assert_eq!(old.map(|old| old.exists()), [false; 2]);
    assert!(live.exists() && get(&store, 1) == Ok(true));
    assert_eq!(stats(&store).held_bytes, Some(CHUNK as u64));
}

#[test]
fn a_lost_count_is_made_again() {
    let (folder, options) = folder(4 * CHUNK as u64);
    let store = open(folder.path(), options);
    (0..4).for_each(|n| _ = put(&store, n).unwrap());
    drop(store);
    for text in [&b""[..], b"KVUSAGE1garbage", &[0xFF; 32]] {
        fs::write(folder.path().join("kv-tier.usage"), text).unwrap();
        // Not waited for: the write does.
        let store = DiskStore::open(folder.path(), options).unwrap();
        assert_eq!(put(&store, 9), Ok(Put::New), "{text:?}");
        assert_eq!(stats(&store).held_bytes, Some(charged(folder.path())));
        assert!(charged(folder.path()) <= 4 * CHUNK as u64);
        store.remove(&[chunk(9)], soon()).unwrap();
    }
}
