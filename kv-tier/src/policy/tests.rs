//! Every row of the decisions' tables.
use super::*;

fn reuse(uses: u32) -> WritePolicy {
    WritePolicy::OnReuse(NonZeroU32::new(uses).expect("from 1"))
}

/// Returns the decisions at the publication, a second use, the leaving and a flush.
fn decisions(rule: WriteRule, facts: ChunkFacts) -> [WriteDecision; 4] {
    [
        (ChunkEvent::Published, 1),
        (ChunkEvent::Reused, 2),
        (ChunkEvent::Left, 2),
        (ChunkEvent::Flush, 2),
    ]
    .map(|(event, uses)| rule.decide(event, &ChunkFacts { uses, ..facts }))
}

#[test]
fn every_policy_writes_at_its_events_alone() {
    let (yes, no) = (WriteDecision::Write, WriteDecision::Skip);
    for (policy, expected) in [
        (WritePolicy::OnPublish, [yes, yes, no, yes]),
        (WritePolicy::OnLeave, [no, no, yes, yes]),
        (reuse(1), [yes, yes, no, yes]),
        (reuse(2), [no, yes, no, yes]),
        (reuse(3), [no, no, no, no]),
        (WritePolicy::Never, [no; 4]),
    ] {
        let got = decisions(WriteRule::new(policy), ChunkFacts::default());
        assert_eq!(got, expected, "{policy}");
    }
    // Content that returns after it has left everywhere is published again.
    let returned = ChunkFacts { uses: 3, ..ChunkFacts::default() };
    assert_eq!(WriteRule::new(reuse(3)).decide(ChunkEvent::Published, &returned), yes);
}

#[test]
fn every_row_of_the_table_decides_before_the_rows_below() {
    let pinned = ChunkFacts {
        is_present: false,
        uses: 1,
        prompt_tokens: 255,
        is_generated: true,
        is_pinned: true,
        level: 1,
    };
    let store = WriteRule::of_tier(Tier::Store);
    let (write, skip) = (WriteDecision::Write, WriteDecision::Skip);
    assert_eq!(decisions(store, pinned), [write; 4]);
    assert_eq!(decisions(store.with_policy(WritePolicy::Never), pinned), [skip; 4]);
    assert_eq!(decisions(store, ChunkFacts { is_present: true, ..pinned }), [skip; 4]);
    assert_eq!(decisions(store, ChunkFacts { level: 0, ..pinned }), [skip; 4]);
    let long = ChunkFacts { is_pinned: false, prompt_tokens: 256, ..pinned };
    let accepting = store.with_generated(true);
    assert_eq!(decisions(store, long), [skip; 4]);
    assert_eq!(decisions(accepting, long), [write, write, skip, write]);
    let short = ChunkFacts { prompt_tokens: 255, ..long };
    assert_eq!(decisions(accepting, short), [skip; 4]);
    let given = ChunkFacts { is_generated: false, ..long };
    assert_eq!(decisions(store, given), [write, write, skip, write]);
}

#[test]
fn defaults_are_those_of_the_table() {
    let of = |tier| WriteRule::of_tier(tier);
    assert_eq!(of(Tier::Device).policy(), WritePolicy::Never);
    assert_eq!(of(Tier::Host).policy(), WritePolicy::OnPublish);
    assert_eq!(of(Tier::Disk).policy(), WritePolicy::OnLeave);
    assert_eq!(of(Tier::Store).policy(), WritePolicy::OnPublish);
    let short = ChunkFacts { prompt_tokens: 1, is_generated: true, ..ChunkFacts::default() };
    let published = |tier| of(tier).decide(ChunkEvent::Published, &short);
    assert_eq!(published(Tier::Host), WriteDecision::Write);
    assert_eq!(of(Tier::Disk).decide(ChunkEvent::Left, &short), WriteDecision::Write);
    assert_eq!(published(Tier::Store), WriteDecision::Skip);
}

#[test]
fn policies_are_read_as_they_are_shown() {
    for policy in [WritePolicy::OnPublish, WritePolicy::OnLeave, reuse(2), WritePolicy::Never] {
        assert_eq!(policy.to_string().parse(), Ok(policy));
    }
    for text in ["", "reuse", "reuse:", "reuse:0", "reuse:-1", "reuse:x", "Leave", "leave "] {
        let error = text.parse::<WritePolicy>().expect_err(text).to_string();
        assert!(error.contains("publish, leave, reuse:N"), "{text}: {error}");
    }
}

const LOAD: LoadOrCompute = LoadOrCompute {
    tokens: 2000,
    bytes: 1_000_000,
    latency: Duration::from_millis(250),
    bytes_per_second: Some(1e6),
    prefill_tokens_per_second: Some(1000.0),
};

#[test]
fn what_comes_sooner_is_loaded() {
    assert_eq!(LOAD.load_time(), Some(Duration::from_millis(1250)));
    assert_eq!(LOAD.compute_time(), Some(Duration::from_secs(2)));
    let (load, compute) = (LoadDecision::Load, LoadDecision::Compute);
    let with = |bytes_per_second, prefill_tokens_per_second| {
        LoadOrCompute { bytes_per_second, prefill_tokens_per_second, ..LOAD }.decide()
    };
    for (bandwidth, prefill, expected) in [
        (Some(1e6), Some(1000.0), load),
        // 2 s of both: no gain.
        (Some(1e6), Some(1600.0), compute),
        (Some(1e6), Some(1599.0), load),
        (Some(1e6), None, load),
        (None, None, load),
        (None, Some(1000.0), load),
        (None, Some(8000.0), compute),
        (Some(f64::INFINITY), Some(8000.0), compute),
        (Some(f64::INFINITY), Some(1000.0), load),
        (Some(0.0), Some(1000.0), compute),
        (Some(f64::NAN), Some(1000.0), compute),
        (Some(-1.0), Some(1000.0), compute),
        (Some(1e6), Some(0.0), load),
        (Some(0.0), Some(0.0), compute),
    ] {
        assert_eq!(with(bandwidth, prefill), expected, "{bandwidth:?}, {prefill:?}");
    }
    let nothing = LoadOrCompute { tokens: 0, bytes: 0, latency: Duration::ZERO, ..LOAD };
    assert_eq!(nothing.decide(), compute);
}

#[test]
fn the_break_even_bandwidth_separates_the_decisions() {
    let even = LOAD.break_even_bandwidth().expect("latency is shorter");
    assert!((even - 1e6 / 1.75).abs() < 1e-6, "{even}");
    let at = |factor: f64| LoadOrCompute { bytes_per_second: Some(even * factor), ..LOAD }.decide();
    assert_eq!(at(1.001), LoadDecision::Load);
    assert_eq!(at(0.999), LoadDecision::Compute);
    let slow = LoadOrCompute { latency: Duration::from_secs(2), ..LOAD };
    assert_eq!(slow.break_even_bandwidth(), None);
    let unknown = LoadOrCompute { prefill_tokens_per_second: None, ..LOAD };
    assert_eq!(unknown.break_even_bandwidth(), None);
    // An 8B model on an H100: 2.9 GB/s in bf16, 0.75 GB/s in 4 bits.
    for (token_bytes, expected) in [(131_072, 2.9e9), (33_792, 0.75e9)] {
        let load = LoadOrCompute {
            tokens: 2048,
            bytes: 2048 * token_bytes,
            latency: Duration::ZERO,
            bytes_per_second: Some(1.3e9),
            prefill_tokens_per_second: Some(22_000.0),
        };
        let even = load.break_even_bandwidth().expect("no latency");
        assert!((even / expected - 1.0).abs() < 0.01, "{even}");
    }
}
