//! Two caches with tiers over the same stores at the same time: rows of each equal those of a cache
//! without tiers.
use std::path::Path;
use std::sync::Arc;
use std::thread;

use kv_testkit::rng::Rng;
use kv_tier::{BlockStore, DiskOptions, DiskStore, MemoryStore};

use crate::kind::Kind;
use crate::world::World;

/// Runs of each pair, one after the other.
const LIVES: u64 = 3;

/// Runs two operation sequences at a time; returns the tokens that each side loaded.
fn run(number: u64, kind: Kind, store: impl Fn() -> Arc<dyn BlockStore> + Sync) -> [u64; 2] {
    // Room for little, so that both sides evict what the other one reads.
    let small: Arc<dyn BlockStore> = Arc::new(MemoryStore::new(200 << 10));
    let side = |side: u64| {
        let store = store();
        let mut loaded = 0;
        for life in 0..LIVES {
            let seed = 1000 * number + 2 * life + side;
            // Of one geometry, so that both have the same names.
            let spec = kind.spec(&mut Rng::new(number));
            let stores = [Arc::clone(&store), Arc::clone(&small)];
            let mut world = World::over(Rng::new(seed), seed, (kind, spec), stores);
            (0..100).for_each(|_| world.act());
            loaded += world.finish();
        }
        loaded
    };
    thread::scope(|scope| {
        let sides = [0, 1].map(|number| scope.spawn(move || side(number)));
        sides.map(|side| side.join().unwrap())
    })
}

fn run_all(store: impl Fn() -> Arc<dyn BlockStore> + Sync) {
    let mut loaded = [0; 2];
    for (kind, number) in Kind::ALL.into_iter().zip(1..) {
        let more = run(number, kind, &store);
        loaded = [0, 1].map(|side| loaded[side] + more[side]);
    }
    assert!(loaded.iter().all(|tokens| *tokens > 0), "{loaded:?}");
}

#[test]
fn two_caches_share_a_store_in_memory() {
    let store: Arc<dyn BlockStore> = Arc::new(MemoryStore::new(64 << 20));
    run_all(|| Arc::clone(&store));
}

#[test]
fn two_caches_share_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    run_all(|| Arc::new(open(folder.path())));
}

fn open(folder: &Path) -> DiskStore {
    DiskStore::open(folder, DiskOptions::new(8 << 20).with_floor(0)).unwrap()
}
