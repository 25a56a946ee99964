//! Random operation sequences with faults: rows equal those of a cache without tiers.
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crate::kind::Kind;
use crate::world::World;

/// Seeds after which a kind that loads nothing is a fault.
const SEEDS_MAX: u64 = 1000;

/// Each run has its own cache, stores and schedule of faults. `KV_TIER_FAULTS` sets the number of
/// faults to reach, `KV_TIER_SEED` the first seed.
#[test]
fn rows_equal_those_without_tiers_whatever_goes_wrong() {
    let number = |name: &str, default| {
        std::env::var(name).map_or(default, |text| text.parse::<u64>().unwrap())
    };
    let (wanted, first) = (number("KV_TIER_FAULTS", 400), number("KV_TIER_SEED", 1));
    let (mut faults, mut of_devices, mut loaded) = (0, 0, 0);
    let mut kinds = BTreeMap::<String, u64>::new();
    for seed in first.. {
        let mut world = World::new(seed);
        let lived = catch_unwind(AssertUnwindSafe(|| (0..150).for_each(|_| world.act())));
        if let Err(panic) = lived {
            println!("seed {seed}, {}: {}", world.kind(), world.log.join(", "));
            resume_unwind(panic);
        }
        let (of_stores, of_device) = world.faults();
        faults += of_stores + of_device;
        of_devices += of_device;
        if seed.is_multiple_of(100) {
            println!("seed {seed}: {faults} faults");
        }
        let kind = world.kind();
        let ended = catch_unwind(AssertUnwindSafe(|| world.finish()));
        let more = ended.unwrap_or_else(|panic| {
            println!("seed {seed}, {kind}: at the end");
            resume_unwind(panic)
        });
        *kinds.entry(kind).or_default() += more;
        loaded += more;
        // What comes in time depends on the machine: a kind that nothing was loaded for goes on.
        let has_all = kinds.len() == Kind::ALL.len() && kinds.values().all(|loaded| *loaded > 0);
        if faults >= wanted && (has_all || seed >= first + SEEDS_MAX) {
            break;
        }
    }
    println!("{faults} faults, {of_devices} of devices, {loaded} tokens loaded: {kinds:?}");
    assert!(of_devices > wanted / 50, "{of_devices}");
    assert!(loaded > wanted / 5, "{loaded}");
    assert!(kinds.values().all(|loaded| *loaded > 0), "{kinds:?}");
}
