//! Tiers below a cache against figures worked out by hand.
use super::*;
use crate::replay::policy::Policy;
use crate::replay::run::replay;
use crate::replay::tests::{small, trace_of};

fn option(tier: Tier, blocks: u32) -> TierOption {
    TierOption {
        tier,
        size: TierSize::Blocks(blocks),
        rule: WriteRule::of_tier(tier),
        bytes_per_second: None,
        latency: Duration::ZERO,
    }
}

fn options(tiers: &[TierOption]) -> TierOptions {
    TierOptions {
        tiers: tiers.to_vec(),
        eviction: Eviction::Lru,
        bytes_per_token: None,
        prefill_tokens_per_second: None,
    }
}

fn report(trace: &Arc<Trace>, device_blocks: u32, options: &TierOptions) -> TierReport {
    let capacities = options.capacities(trace).expect("large enough");
    let mut tiers = TierReplay::new(options, &capacities, trace);
    let policy = Policy::Real(Eviction::Lru).build(trace, device_blocks);
    replay(trace, device_blocks, policy, &mut tiers, |_| {});
    tiers.report(trace)
}

/// Returns hit tokens, blocks written and evictions of every tier.
fn figures(report: &TierReport) -> Vec<(u64, u64, u64)> {
    let figures = |tier: &TierLine| (tier.hit_tokens, tier.written_blocks, tier.evictions);
    report.tiers.iter().map(figures).collect()
}

/// The requests are ab, acd, ab, ef, acdg, ab; the device has 2 blocks, host memory 3, the disk 4.
///
/// | request | device before | found | host writes, evicts | disk writes, evicts |
/// |---|---|---|---|---|
/// | ab | | | a b | |
/// | acd | ba | a on the device | c, d for b | b |
/// | ab | ca | a on the device, b on disk | b for d | d |
/// | ef | ba | | e for c, f for b | c |
/// | acdg | fe | a in host memory, c and d on disk | c for f, d for e | f, e for b |
/// | ab | ca | a on the device | b for d | |
///
/// g finds no room in host memory, because acd are held there, and the disk has the b and the d
/// that host memory gives up later.
#[test]
fn a_small_trace_gives_the_figures_worked_out_by_hand() {
    let tiers = [option(Tier::Host, 3), option(Tier::Disk, 4)];
    let got = report(&small(512), 2, &options(&tiers));
    assert_eq!(got.device_hit_tokens, 3 * 512);
    assert_eq!(figures(&got), [(512, 10, 7), (488 + 1024, 5, 1)]);
    assert_eq!(got.hit_tokens, 3560);
    assert!((got.token_hit_ratio - 3560.0 / 7284.0).abs() < 1e-12);
    // The trace takes 4.5 s.
    let per_day: Vec<_> = got.tiers.iter().map(|tier| tier.written_blocks_per_day).collect();
    assert_eq!(per_day, [Some(192_000), Some(96_000)]);
    assert!(got.times.is_none() && got.tiers[0].written_bytes.is_none());
}

#[test]
fn loads_that_take_longer_than_computing_are_counted_apart() {
    let host = TierOption { bytes_per_second: Some(1_024_000), ..option(Tier::Host, 3) };
    let latency = Duration::from_millis(100);
    let disk = TierOption { bytes_per_second: Some(128_000), latency, ..option(Tier::Disk, 4) };
    let given = TierOptions {
        bytes_per_token: Some(100),
        prefill_tokens_per_second: Some(1000),
        ..options(&[host, disk])
    };
    let got = report(&small(512), 2, &given);
    // The same hits and writes.
    assert_eq!(figures(&got), [(512, 10, 7), (488 + 1024, 5, 1)]);
    assert_eq!(got.tiers[1].written_bytes, Some(5 * 51_200));
    assert_eq!(got.tiers[1].written_bytes_per_day, Some(96_000 * 51_200));
    // b takes 0.1 + 0.4 s instead of 0.488 s, cd 0.1 + 0.8 s instead of 1.024 s.
    let [host, disk] = [0, 1].map(|tier: usize| got.tiers[tier].loading.expect("speeds"));
    assert_eq!((host.loaded_tokens, host.slower_tokens), (512, 0));
    assert_eq!((disk.loaded_tokens, disk.slower_tokens), (1024, 488));
    let near = |got: f64, expected: f64| {
        assert!((got - expected).abs() < 1e-6, "{got} is not {expected}");
    };
    near(host.load_seconds, 0.05);
    near(disk.load_seconds, 0.9);
    let times = got.times.expect("speeds");
    near(times.prefill_seconds_saved, 1.536);
    near(times.load_seconds, 0.95);
    near(times.first_token_seconds_saved, 0.586);
    near(host.break_even_bytes_per_second.expect("loads"), 100_000.0);
    // 756 tokens and 1.5 blocks a load: 76,800 bytes in 0.656 s.
    near(disk.break_even_bytes_per_second.expect("loads"), 76_800.0 / 0.656);
}

#[test]
fn a_slow_load_ends_the_reuse() {
    // Each of the first requests evicts the one before from the device, the third also 1 from host
    // memory to disk.
    let trace = |last: &[u64]| trace_of(&[vec![1], vec![2], vec![3], last.to_vec()]);
    let got = |last: &[u64], disk_bytes_per_second| {
        let host = TierOption { bytes_per_second: Some(u64::MAX), ..option(Tier::Host, 2) };
        let disk =
            TierOption { bytes_per_second: Some(disk_bytes_per_second), ..option(Tier::Disk, 9) };
        let given = TierOptions {
            bytes_per_token: Some(1),
            prefill_tokens_per_second: Some(512),
            ..options(&[host, disk])
        };
        let got = report(&trace(last), 1, &given);
        let loaded = |tier: &TierLine| tier.loading.map(|loading| loading.loaded_tokens);
        let loaded: Vec<_> = got.tiers.iter().filter_map(loaded).collect();
        let saved = got.times.expect("speeds").prefill_seconds_saved;
        ([got.tiers[0].hit_tokens, got.tiers[1].hit_tokens], loaded, saved)
    };
    // 1 on disk, then 2 in host memory, or 3 on the device.
    assert_eq!(got(&[1, 2], 10_000), ([512, 512], vec![512, 512], 2.0));
    assert_eq!(got(&[1, 2], 1), ([512, 512], vec![0, 0], 0.0));
    assert_eq!(got(&[1, 3], 10_000), ([0, 512], vec![0, 512], 2.0));
    assert_eq!(got(&[1, 3], 1), ([0, 512], vec![0, 0], 0.0));
    // What the device has at the start is no merit of the tiers.
    assert_eq!(got(&[3, 1], 10_000), ([0, 512], vec![0, 512], 1.0));
}

#[test]
fn right_below_the_device_leave_is_publish() {
    let disk = option(Tier::Disk, 7);
    let got = report(&small(512), 2, &options(&[disk]));
    assert_eq!(got.tiers[0].write, "publish");
    // Everything is found again: 4048 tokens, as a cache that never evicts.
    assert_eq!((got.hit_tokens, got.tiers[0].written_blocks), (4048, 7));
    let never = TierOption { rule: WriteRule::new(WritePolicy::Never), ..disk };
    let got = report(&small(512), 2, &options(&[never]));
    assert_eq!((got.hit_tokens, got.tiers[0].written_blocks), (3 * 512, 0));
}

#[test]
fn a_store_gets_no_short_prompt() {
    let store = option(Tier::Store, 9);
    let longer = TierOption { rule: store.rule.with_prompt_tokens_min(701), ..store };
    let got = |option| report(&small(512), 1, &options(&[option])).tiers[0].written_blocks;
    assert_eq!(got(store), 7);
    assert_eq!(got(longer), 5, "ef has 700 tokens");
}

#[test]
fn sizes_in_bytes_are_whole_blocks() {
    let trace = small(512);
    let sized = |bytes| {
        let option = TierOption { size: TierSize::Bytes(bytes), ..option(Tier::Host, 1) };
        let given = TierOptions { bytes_per_token: Some(10), ..options(&[option]) };
        given.capacities(&trace).map_err(|error| error.to_string())
    };
    assert_eq!(sized(5120), Ok(vec![1]));
    assert_eq!(sized(3 * 5120 - 1), Ok(vec![2]));
    assert_eq!(sized(u64::MAX), Ok(vec![u32::MAX]));
    let error = sized(5119).expect_err("no block");
    assert_eq!(error, "--tier host: 5119 bytes hold no block of 5120");
}
