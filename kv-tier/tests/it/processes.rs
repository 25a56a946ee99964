//! Several processes on one folder, and processes that are killed.
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Lines};
use std::path::Path;
use std::process::{Child, ChildStdout, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use kv_testkit::rng::Rng;
use kv_testkit::store::{chunk_address, chunk_bytes};
use kv_tier::{BlockStore, ChunkAddress, DirectIo, DiskOptions, DiskStore, Put, StoreErrorKind};

use crate::support::{charged, child, child_folder, files, folder, open, soon, stats};

/// Writes, reads and removes until it is killed; ends by itself after a while.
#[test]
fn the_child() {
    let Some(folder) = child_folder() else { return };
    let seed = u64::from(std::process::id());
    let store = DiskStore::open(&folder, options(seed)).unwrap();
    println!("ready");
    let end = Instant::now() + Duration::from_secs(20);
    thread::scope(|scope| {
        for thread in 0..2 {
            let store = &store;
            scope.spawn(move || {
                let mut rng = Rng::new(seed * 2 + thread);
                while Instant::now() < end {
                    work(store, &mut rng);
                    println!("worked");
                }
            });
        }
    });
}

#[test]
fn a_killed_process_leaves_whole_files_and_a_right_count() {
    let runs = std::env::var("KV_TIER_CRASH_RUNS").map_or(30, |runs| runs.parse().unwrap());
    let (folder, _) = folder(CAPACITY);
    let chunks = (0..CHUNKS).map(|n| (pick(n).0.name.to_string(), pick(n)));
    let chunks: HashMap<_, _> = chunks.collect();
    let mut rng = Rng::new(1);
    let (mut read, mut evicting) = (0, 0);
    for run in 0..runs {
        let (mut child, lines) = start(folder.path());
        // So far, and some part of an operation.
        let worked = rng.below(40);
        assert_eq!(lines.take(worked as usize).count(), worked as usize, "run {run}");
        thread::sleep(Duration::from_micros(rng.below(2_000).into()));
        child.kill().unwrap();
        child.wait().unwrap();
        let store = open(folder.path(), options(run));
        let stats = stats(&store);
        assert_eq!(stats.held_bytes, Some(charged(folder.path())), "run {run}: {stats:?}");
        assert_eq!(stats.known_bytes, charged(folder.path()), "run {run}: {stats:?}");
        assert!(stats.known_bytes <= CAPACITY && stats.is_evictor, "run {run}: {stats:?}");
        for (path, _) in files(folder.path()) {
            let name = path.file_name().unwrap().to_str().unwrap();
            let (chunk, length) = chunks.get(name).unwrap_or_else(|| panic!("run {run}: {name}"));
            assert!(is_right(&store, chunk, *length), "run {run}: {name} is absent");
            read += 1;
        }
        evicting += u64::from(stats.known_bytes > CAPACITY / 2);
        let new = chunk_address(2, run);
        assert_eq!(store.put(&new, &[1; 4_096], soon()).unwrap(), Put::New, "run {run}");
        store.remove(&[new], soon()).unwrap();
    }
    assert!(read > runs && evicting > 0, "{read} files in {runs} runs, {evicting} nearly full");
}

#[test]
fn two_processes_share_a_folder_within_its_bound() {
    let (folder, _) = folder(CAPACITY);
    let store = open(folder.path(), options(0));
    let (mut child, _lines) = start(folder.path());
    let changes = File::open(folder.path().join("kv-tier.changes")).unwrap();
    let mut rng = Rng::new(3);
    for _ in 0..CHECKS {
        (0..8).for_each(|_| work(&store, &mut rng));
        // Nobody changes a file while this is locked.
        changes.lock().unwrap();
        assert!(charged(folder.path()) <= CAPACITY);
        changes.unlock().unwrap();
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let held = stats(&store).held_bytes.unwrap();
    assert!(held >= charged(folder.path()) && held <= CAPACITY, "{held}");
    assert!(stats(&store).is_evictor);
    drop(store);
    let store = open(folder.path(), options(0));
    assert_eq!(stats(&store).held_bytes, Some(charged(folder.path())));
}

/// Starts the child, and waits until it has opened the folder; it writes a line for each operation.
fn start(folder: &Path) -> (Child, Lines<BufReader<ChildStdout>>) {
    let mut child = child("processes::the_child", folder);
    let mut child = child.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    // On the line of the test's name.
    assert!(lines.any(|line| line.unwrap().contains("ready")), "the child has not started");
    (child, lines)
}

fn options(seed: u64) -> DiskOptions {
    let direct = if seed.is_multiple_of(3) { DirectIo::Off } else { DirectIo::Auto };
    let options = DiskOptions::new(CAPACITY).with_floor(0).with_direct(direct);
    options.with_rename(seed.is_multiple_of(2))
}

/// Returns a chunk and its length.
fn pick(n: u32) -> (ChunkAddress, usize) {
    let length =
        if n.is_multiple_of(2) { 4_096 * (1 + n as usize % 9) } else { 1 + 997 * n as usize };
    (chunk_address(1, n.into()), length)
}

/// Does one thing that may be refused for want of room, and nothing else.
fn work(store: &DiskStore, rng: &mut Rng) {
    let (chunk, length) = pick(rng.below(CHUNKS));
    match rng.below(10) {
        0 => store.remove(&[chunk], soon()).unwrap(),
        1..4 => _ = is_right(store, &chunk, length),
        _ => {
            let put = store.put(&chunk, &chunk_bytes(&chunk, length), soon());
            let kind = put.err().map(|error| error.kind());
            assert!(matches!(kind, None | Some(StoreErrorKind::Full)), "{kind:?}");
        }
    }
}

/// Reads a chunk, whose bytes must be its own; returns whether it is there.
fn is_right(store: &DiskStore, chunk: &ChunkAddress, length: usize) -> bool {
    let mut into = vec![0; length];
    let Some(bytes) = store.get(chunk, &mut into, soon()).unwrap() else { return false };
    assert!(bytes == length && into == chunk_bytes(chunk, length), "{bytes} bytes of {length}");
    true
}

const CAPACITY: u64 = 512 << 10;
const CHUNKS: u32 = 100;
const CHECKS: u32 = 40;
