//! Tiers below a cache against figures worked out by hand.
use std::sync::Arc;

use kv::eviction::Eviction;
use kv::tier::WritePolicy;

use super::*;
use crate::replay::hints::Hints;
use crate::replay::policy::Policy;
use crate::replay::run::replay;
use crate::replay::tests::small;

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
    let tiers = tiers.to_vec();
    TierOptions { tiers, bytes_per_token: None, prefill_tokens_per_second: None }
}

/// Replays the small trace with 4 blocks on the device.
fn report(options: &TierOptions) -> TierReport {
    let trace: Arc<Trace> = small(512);
    let capacities = options.capacities(&trace).expect("large enough");
    let case = (Policy::Real(Eviction::Lru), Some(4));
    let outcome = replay(&trace, case, (Some((options, &capacities)), &Hints::default()), |_| {})
        .expect("a replay");
    let report = outcome.tiers.expect("tiers");
    assert_eq!(outcome.hit_tokens, report.device_hit_tokens);
    report
}

/// Returns hit tokens, blocks written and evictions of host memory and of every store.
fn figures(report: &TierReport) -> Vec<(u64, u64, u64)> {
    let figures = |tier: &TierLine| (tier.hit_tokens, tier.written_blocks, tier.evictions);
    report.tiers.iter().map(figures).collect()
}

/// The requests are ab, acd, ab, ef, acdg, ab; the device has 4 blocks, host memory 3, the disk 4.
/// b and f are parts of blocks, which stay on the device. Host memory evicts what nothing there
/// follows.
///
/// | request | device before | found | host memory gets, evicts | disk gets |
/// |---|---|---|---|---|
/// | ab | | | a | |
/// | acd | ab | a on the device | c, d | |
/// | ab | abcd | ab on the device | | |
/// | ef | abc | | e for d | d |
/// | acdg | abef | a on the device, c in host memory, d on disk | d, read, for e; g for d | e |
/// | ab | acdg | a on the device | | |
#[test]
fn a_small_trace_gives_the_figures_worked_out_by_hand() {
    let got = report(&options(&[option(Tier::Host, 3), option(Tier::Disk, 4)]));
    assert_eq!(got.device_hit_tokens, 512 + 999 + 512 + 512);
    assert_eq!(figures(&got), [(512, 5, 3), (512, 2, 0)]);
    assert_eq!(got.hit_tokens, 3559);
    assert!((got.token_hit_ratio - 3559.0 / 7284.0).abs() < 1e-12);
    // The trace takes 4.5 s.
    let per_day: Vec<_> = got.tiers.iter().map(|tier| tier.written_blocks_per_day).collect();
    assert_eq!(per_day, [Some(96_000), Some(38_400)]);
    assert!(got.times.is_none() && got.tiers[0].written_bytes.is_none());
}

/// Returns 100 bytes a token, 1000 tokens a second, and a disk of this speed.
fn timed(disk_bytes_per_second: u64) -> TierOptions {
    let host = TierOption { bytes_per_second: Some(1_024_000), ..option(Tier::Host, 3) };
    let latency = Duration::from_millis(100);
    let bytes_per_second = Some(disk_bytes_per_second);
    let disk = TierOption { bytes_per_second, latency, ..option(Tier::Disk, 4) };
    TierOptions {
        bytes_per_token: Some(100),
        prefill_tokens_per_second: Some(1000),
        ..options(&[host, disk])
    }
}

fn near(got: f64, expected: f64) {
    assert!((got - expected).abs() < 1e-6, "{got} is not {expected}");
}

#[test]
fn loads_take_latency_and_bytes() {
    let got = report(&timed(128_000));
    // The same hits and writes.
    assert_eq!(figures(&got), [(512, 5, 3), (512, 2, 0)]);
    assert_eq!(got.tiers[1].written_bytes, Some(2 * 51_200));
    assert_eq!(got.tiers[1].written_bytes_per_day, Some(38_400 * 51_200));
    // c takes 0.05 s and d 0.1 + 0.4 s, instead of 1.024 s for both.
    let [host, disk] = [0, 1].map(|tier: usize| got.tiers[tier].loading.expect("speeds"));
    near(host.load_seconds, 0.05);
    near(disk.load_seconds, 0.5);
    let times = got.times.expect("speeds");
    near(times.prefill_seconds_saved, 1.024);
    near(times.load_seconds, 0.55);
    near(times.first_token_seconds_saved, 0.474);
    assert_eq!(times.slower_tokens, 0);
    // 512 tokens and a block a load, in 0.512 s and in 0.412 s.
    near(host.break_even_bytes_per_second.expect("loads"), 100_000.0);
    near(disk.break_even_bytes_per_second.expect("loads"), 51_200.0 / 0.412);
}

#[test]
fn what_takes_longer_to_load_is_computed() {
    // c and d take 1.024 s to compute, and d takes 0.1 s and its bytes from disk.
    let just = report(&timed(55_500));
    assert_eq!((just.tiers[1].hit_tokens, just.times.expect("speeds").slower_tokens), (512, 0));
    let slow = report(&timed(55_300));
    assert_eq!((slow.tiers[0].hit_tokens, slow.tiers[1].hit_tokens), (512, 0));
    // The disk was asked for d, behind c in host memory.
    assert_eq!(slow.times.expect("speeds").slower_tokens, 1024);
    near(slow.times.expect("speeds").prefill_seconds_saved, 0.512);
    assert_eq!(slow.tiers[1].loading.expect("speeds").break_even_bytes_per_second, None);
}

#[test]
fn without_a_host_tier_blocks_pass_through() {
    let disk = option(Tier::Disk, 7);
    let got = report(&options(&[disk]));
    assert!(got.tiers[0].is_passage() && !got.tiers[1].is_passage());
    // The four blocks of the longest request pass at a time: acdg finds c and d there.
    assert_eq!((got.tiers[0].capacity_blocks, got.tiers[0].hit_tokens), (4, 1024));
    assert_eq!((got.hit_tokens, got.tiers[1].written_blocks), (3559, 5), "a, c, d, e and g");
    let never = TierOption { rule: WriteRule::new(WritePolicy::Never), ..disk };
    let got = report(&options(&[never]));
    assert_eq!((got.hit_tokens, got.tiers[1].written_blocks), (3559, 0));
    // Two blocks pass at a time where more than 32 MiB are one: c has left for d, and a for e.
    let given = TierOptions { bytes_per_token: Some(100_000), ..options(&[disk]) };
    let got = report(&given);
    assert_eq!(got.tiers[0].capacity_blocks, 2);
    assert_eq!((got.tiers[0].hit_tokens, got.tiers[1].hit_tokens), (512, 512));
}

#[test]
fn a_store_gets_no_short_prompt() {
    let store = option(Tier::Store, 9);
    let longer = TierOption { rule: store.rule.with_prompt_tokens_min(701), ..store };
    let got = |option| report(&options(&[option])).tiers[1].written_blocks;
    // a, c, d and e. No prompt can reuse the last token of g, so that it is no block of a prompt.
    assert_eq!(got(store), 4);
    assert_eq!(got(longer), 3, "ef has 700 tokens");
}

#[test]
fn sizes_in_bytes_are_whole_blocks() {
    let trace = small(512);
    let sized = |tier, bytes| {
        let option = TierOption { size: TierSize::Bytes(bytes), ..option(tier, 1) };
        let given = TierOptions { bytes_per_token: Some(10), ..options(&[option]) };
        given.capacities(&trace).map_err(|error| error.to_string())
    };
    assert_eq!(sized(Tier::Disk, 5120), Ok(vec![1]));
    assert_eq!(sized(Tier::Host, 3 * 5120 - 1), Ok(vec![2]));
    assert_eq!(sized(Tier::Host, u64::MAX), Ok(vec![u32::MAX]));
    let error = sized(Tier::Disk, 5119).expect_err("no block");
    assert_eq!(error, "--tier disk: 5119 bytes hold no block of 5120");
    let error = sized(Tier::Host, 5120).expect_err("one block");
    assert_eq!(error, "--tier host: 1 block, host memory has at least 2");
}
