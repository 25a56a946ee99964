//! Processes with tiers over a folder, killed at random points.
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use kv_core::StartOptions;
use kv_core::events::Tier;
use kv_testkit::rng::Rng;
use kv_tier::policy::{WritePolicy, WriteRule};
use kv_tier::{DiskOptions, DiskStore, StoreOptions, TierOptions};

use crate::support::{Engine, identity, spec, text};

const CHILD: &str = "KV_TIER_TEST_CHILD";
const CAPACITY: u64 = 2 << 20;

fn disk(folder: &Path) -> DiskStore {
    let disk = DiskStore::open(folder, DiskOptions::new(CAPACITY).with_floor(0)).unwrap();
    assert!(disk.wait_listed(Instant::now() + Duration::from_secs(20)), "it is not listed");
    disk
}

fn open(folder: &Path) -> Engine {
    let rule = WriteRule::new(WritePolicy::OnPublish);
    let lane = StoreOptions::new(Tier::Disk).with_write(rule).with_lookup_deadline(LONG);
    let lane = lane.with_read_deadline(LONG).with_write_deadline(LONG);
    let options = TierOptions::new().with_store_options(Box::new(disk(folder)), lane);
    Engine::new(spec(1024), identity(), options)
}

/// Computes prompts and flushes until it is killed; ends by itself after a while.
#[test]
fn the_child() {
    let Some(folder) = std::env::var_os(CHILD) else { return };
    let mut engine = open(Path::new(&folder));
    println!("ready");
    let mut rng = Rng::new(u64::from(std::process::id()));
    let end = Instant::now() + Duration::from_secs(20);
    while Instant::now() < end {
        engine.run(&prompt(rng.below(PROMPTS)), StartOptions::default());
        if rng.one_in(3) {
            engine.flush();
        }
        engine.forget();
        println!("worked");
    }
}

#[test]
fn the_next_process_counts_right_and_has_right_rows() {
    let runs = std::env::var("KV_TIER_CRASH_RUNS").map_or(30, |runs| runs.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let mut rng = Rng::new(1);
    let mut reused = 0;
    for run in 0..runs {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["crash::the_child", "--exact", "--nocapture"]).env(CHILD, folder.path());
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().contains("ready")), "run {run}");
        let worked = rng.below(12) as usize;
        assert_eq!(lines.take(worked).count(), worked, "run {run}");
        thread::sleep(Duration::from_micros(rng.below(4_000).into()));
        child.kill().unwrap();
        child.wait().unwrap();
        let stats = disk(folder.path()).stats(Instant::now() + Duration::from_secs(20));
        let charged = charged(folder.path());
        assert_eq!(stats.held_bytes, Some(charged), "run {run}: {stats:?}");
        assert_eq!(stats.known_bytes, charged, "run {run}: {stats:?}");
        assert!(charged <= CAPACITY, "run {run}: {stats:?}");
        let mut engine = open(folder.path());
        for _ in 0..3 {
            // Checks every row.
            let tokens = engine.run(&prompt(rng.below(PROMPTS)), StartOptions::default()).1;
            reused += u64::from(tokens > 8);
            engine.forget();
        }
        let stats = engine.cache.stats();
        assert!(stats.stores[0].refused.is_empty(), "run {run}: {stats:?}");
        engine.flush();
        engine.assert_nothing_held();
    }
    assert!(reused > runs, "{reused} prompts were reused in {runs} runs");
}

/// Returns a prompt whose beginning it shares with others.
fn prompt(number: u32) -> Vec<u32> {
    let (family, len) = (number % 6, 300 + 250 * (number / 6));
    text(family, len)
}

/// Returns the bytes that all chunks count for.
fn charged(folder: &Path) -> u64 {
    let mut bytes = 0;
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(&next).unwrap() {
            let entry = entry.unwrap();
            let status = entry.metadata().unwrap();
            if status.is_dir() {
                folders.push(entry.path());
            } else if !entry.file_name().to_string_lossy().starts_with("kv-tier") {
                bytes += status.len().next_multiple_of(4_096);
            }
        }
    }
    bytes
}

const PROMPTS: u32 = 24;
const LONG: Duration = Duration::from_secs(10);
