//! Counts from callers: each is bounded by the cache, or refused before anything is allocated for
//! it.
use super::*;
use crate::KvFormat;
use crate::ids::Plane;
use crate::plan::{BatchEntry, ConvertPlan, Determinism, GatherPlan, GatherRange, PlanBuffers};

/// Maximum tokens of a sequence, in pools of 40.
const MAX: u32 = 24;
/// Tokens of [`SEQ`]`[0]`.
const LEN: u32 = 3;
/// Bytes of tables and plans beyond which a count was trusted unchecked.
const BYTES_MAX: usize = 1 << 20;

fn counted() -> KvCache<NullBackend> {
    let spec = CacheSpec::builder().layers(2).kv_heads(1).head_dim(2).paged(4, 10);
    let spec = spec.max_seq_len(MAX).build().unwrap();
    let mut cache = KvCache::new(NullBackend::new(), spec).unwrap();
    start(&mut cache, SEQ[0]);
    append(&mut cache, &[(SEQ[0], LEN)]).unwrap();
    cache
}

/// The result of a call with a count, with the error's text.
type Answer = Result<(), String>;
type Call = fn(&mut KvCache<NullBackend>, u32) -> Result<(), CacheError>;

fn step(cache: &mut KvCache<NullBackend>, input: StepInput<'_>) -> Result<(), CacheError> {
    let inputs = [input];
    let said = cache.state().blocks_for_step(GroupId(0), &inputs);
    let begun = cache.begin_step(&inputs).map(drop);
    match (said, &begun) {
        (Ok(demand), Ok(())) => assert!(demand.fits(), "{demand:?}"),
        (Ok(demand), Err(CacheError::Exhausted(_))) => assert!(!demand.fits(), "{demand:?}"),
        (Err(said), Err(begun)) => assert_eq!(said.to_string(), begun.to_string()),
        (said, begun) => panic!("{said:?}, {begun:?}"),
    }
    begun
}

fn admit(
    cache: &KvCache<NullBackend>,
    options: StartOptions<'_>,
    admission: &Admission,
) -> Result<(), CacheError> {
    cache.state().check_admission(&[1, 2], options, admission).map(|_| ())
}

/// Every call of a cache with a count: the largest accepted count, whether 0 is accepted, and the
/// error for one more.
const CALLS: [(&str, u32, bool, &str, Call); 12] = [
    (
        "new tokens",
        MAX - LEN,
        false,
        "sequence 0: 3 cached + 22 new tokens exceed the maximum of 24",
        |cache, n| step(cache, StepInput::count(SEQ[0], n)),
    ),
    (
        "queries",
        1 << 16,
        false,
        "queries in a step: 65537 given, at most 65536 are possible",
        |cache, n| step(cache, StepInput::query(SEQ[0], n)),
    ),
    ("drafts", 2, true, "drafts: 3 given, at most 2 are possible", |cache, n| {
        step(cache, StepInput::count(SEQ[0], 2).with_drafts(n))
    }),
    ("drafts of ids", 2, true, "drafts: 3 given, at most 2 are possible", |cache, n| {
        step(cache, StepInput::tokens(SEQ[0], &[5, 6]).with_drafts(n))
    }),
    ("drafts without tokens", 0, true, "drafts: 1 given, at most 0 are possible", |cache, n| {
        step(cache, StepInput::idle(SEQ[0]).with_drafts(n))
    }),
    (
        "lookahead",
        36,
        true,
        "group 0 is out of blocks: 10 needed, 9 free, 0 of them evictable",
        |cache, n| step(cache, StepInput::count(SEQ[0], 1).with_lookahead(n)),
    ),
    (
        "reserve",
        MAX,
        true,
        "sequence 1: 0 cached + 25 new tokens exceed the maximum of 24",
        |cache, n| cache.start(SEQ[1], &[], StartOptions::default().with_reserve(n)).map(drop),
    ),
    (
        "reserve of a prompt that asks",
        MAX,
        true,
        "reserved tokens: 25 given, at most 24 are possible",
        |cache, n| admit(cache, StartOptions::default().with_reserve(n), &Admission::default()),
    ),
    (
        "lookahead of a prompt that asks",
        34,
        true,
        "group 0 is out of blocks: 10 needed, 9 free, 0 of them evictable",
        |cache, n| admit(cache, StartOptions::default(), &Admission::default().with_lookahead(n)),
    ),
    (
        "watermark of a prompt that asks",
        8,
        true,
        "group 0 is out of blocks: 10 needed, 9 free, 0 of them evictable",
        |cache, n| admit(cache, StartOptions::default(), &Admission::default().with_watermark(n)),
    ),
    (
        "tokens at completion",
        MAX,
        true,
        "sequence 0: 3 cached + 22 new tokens exceed the maximum of 24",
        |cache, n| cache.state().blocks_to_completion(GroupId(0), SEQ[0], n).map(drop),
    ),
    ("tokens to keep", LEN, true, "sequence 0 has 3 tokens, 4 were requested", |cache, n| {
        cache.truncate(SEQ[0], n)
    }),
];

/// Returns counts with the expected results: 0, 1, the bound, and counts beyond it.
fn cases(max: u32, takes_none: bool, refusal: &str) -> [(u32, Option<Answer>); 5] {
    let refused = || Some(Err(refusal.to_owned()));
    [
        // The error for 0 has other words.
        (0, takes_none.then_some(Ok(()))),
        (1, if max >= 1 { Some(Ok(())) } else { refused() }),
        (max, Some(Ok(()))),
        (max + 1, refused()),
        // The error has another number.
        (u32::MAX, None),
    ]
}

#[test]
fn counts_are_bounded_before_anything_is_allocated() {
    for (name, max, takes_none, refusal, call) in CALLS {
        for (count, expected) in cases(max, takes_none, refusal) {
            let mut cache = counted();
            let before = books(cache.state());
            let got = call(&mut cache, count).map_err(|error| error.to_string());
            match expected {
                Some(expected) => assert_eq!(got, expected, "{name}: {count}"),
                None => assert!(got.is_err(), "{name}: {count}"),
            }
            if got.is_err() {
                assert_eq!(books(cache.state()), before, "{name}: {count}");
            }
            let bytes = cache.plan_bytes();
            assert!(bytes < BYTES_MAX, "{name}: {count} made {bytes} bytes");
            check_invariants(cache.state());
        }
    }
}

#[test]
fn chunks_are_no_longer_than_their_prompt() {
    let mut cache = counted();
    for chunk in [1, MAX, u32::MAX] {
        let admission = Admission::default().with_chunk(chunk).with_must_fit(true);
        admit(&cache, StartOptions::default(), &admission).unwrap();
    }
    let long = vec![7; 25];
    assert!(
        cache.start(SEQ[1], &long, StartOptions::default().with_backoff_blocks(u32::MAX)).is_err()
    );
    cache.start(SEQ[1], &[7; 24], StartOptions::default().with_backoff_blocks(u32::MAX)).unwrap();
}

#[test]
fn queries_of_a_step_are_counted_together() {
    let mut cache = counted();
    start(&mut cache, SEQ[1]);
    start(&mut cache, SEQ[2]);
    let query = |sequence, n| StepInput::query(sequence, n);
    let all = [query(SEQ[0], 65_535), query(SEQ[1], 1), StepInput::count(SEQ[2], 20)];
    let step = cache.begin_step(&all).unwrap();
    assert_eq!(step.positions().len(), 65_556, "queries that bring tokens are bounded by them");
    drop(step);
    let refused = cache.begin_step(&[all[0], query(SEQ[1], 2)]).unwrap_err();
    let words = "queries in a step: 65537 given, at most 65536 are possible";
    assert_eq!(refused.to_string(), words);
    // One after another, too.
    let mut step = cache.begin_step(&[query(SEQ[0], 65_535)]).unwrap();
    assert_eq!(step.add(query(SEQ[1], 2)).unwrap_err().to_string(), words);
    step.add(query(SEQ[1], 1)).unwrap();
    assert_eq!(step.positions().len(), 65_536);
}

/// Prompts that need more than the pools have are refused before their positions are listed.
#[test]
fn tokens_beyond_the_pools_cost_nothing() {
    let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(2).paged(4, 10);
    let spec = spec.window_left(3).build().unwrap();
    assert!(spec.max_seq_len() > 1 << 29, "a window takes sequences of any length");
    let mut cache = KvCache::new(NullBackend::new(), spec).unwrap();
    start(&mut cache, SEQ[0]);
    let refused = cache.begin_step(&[StepInput::count(SEQ[0], 1 << 29)]).unwrap_err();
    assert!(matches!(refused, CacheError::Exhausted(_)), "{refused}");
    assert!(cache.plan_bytes() < BYTES_MAX, "{}", cache.plan_bytes());
}

#[test]
fn accepted_tokens_are_bounded_by_new_ones() {
    for (accepted, is_refused) in [(0, false), (1, false), (2, false), (3, true), (u32::MAX, true)]
    {
        let mut cache = counted();
        let mut step = cache.begin_step(&[StepInput::count(SEQ[0], 2)]).unwrap();
        write_all(&mut step).unwrap();
        assert_eq!(step.commit_accepted(&[accepted]).is_err(), is_refused, "{accepted}");
        let more = if is_refused { 0 } else { accepted };
        assert_eq!(cache.state().seq_len(SEQ[0]), Some(LEN + more));
    }
}

#[test]
fn ranges_to_gather_lie_within_the_sequence() {
    for (begin, len, is_refused) in [
        (0, LEN, false),
        (0, LEN + 1, true),
        (LEN, 1, true),
        (0, u32::MAX, true),
        (u32::MAX, u32::MAX, true),
    ] {
        let mut cache = counted();
        let mut rows = [0.0_f32; 2 * 3];
        let out = TensorViewMut::host(&mut rows, &[LEN, 1, 2]);
        let ranges = [(SEQ[0], begin, len)];
        let read = cache.gather(0, Plane::Key, &ranges, out, Axes::Thd);
        assert_eq!(read.is_err(), is_refused, "{begin}, {len}");
    }
}

/// Hand-made plans have no cache: their tables are the bound.
#[test]
fn lengths_in_plans_are_bounded_by_their_tables() {
    let cache = counted();
    let layout = cache.storage(GroupId(0)).unwrap().layouts().first();
    let tables = cache.state.tables(0);
    let mut buffers = PlanBuffers::default();
    let mut plan = |entry| {
        let planned = buffers.plan(layout, tables, &[entry], 4, Determinism::Fast);
        let refused = planned.is_err();
        assert!(buffers.host_bytes() < BYTES_MAX, "{entry:?}");
        refused
    };
    let entry = BatchEntry { row: 0, cached: 0, new_tokens: 4, queries: 4 };
    for n in [5, MAX, u32::MAX] {
        assert!(plan(BatchEntry { new_tokens: n, ..entry }));
        assert!(plan(BatchEntry { cached: n, ..entry }));
        assert!(plan(BatchEntry { row: n, ..entry }));
        let range = GatherRange { row: 0, begin: 0, len: n };
        assert!(GatherPlan::new(layout, tables, &[range]).is_err());
        let range = GatherRange { row: 0, begin: n, len: n };
        assert!(GatherPlan::new(layout, tables, &[range]).is_err());
    }
    // Queries allocate nothing here: tensors with that many rows are required later.
    assert!(!plan(BatchEntry { queries: u32::MAX, ..entry }));
    assert!(ConvertPlan::new(&[u32::MAX, 1]).is_err());
    assert_eq!(ConvertPlan::new(&[u32::MAX]).unwrap().total(), u32::MAX);
}

#[test]
fn slot_maps_take_any_number() {
    let spec = |tail| {
        let spec = CacheSpec::builder()
            .layers(1)
            .kv_heads(1)
            .head_dim(32)
            .full_precision_prefix(3)
            .tail(tail);
        let spec = spec.format(KvFormat::Int8(crate::Scaling::Row)).paged(4, 100);
        *spec.build().unwrap().groups()[0].slot_map()
    };
    for map in [spec(false), spec(true)] {
        for n in [0, 1, u32::MAX - 1, u32::MAX] {
            for other in [0, 3, n] {
                map.place_in(n, other);
                map.blocks_in(n, other);
                map.coded_after(other, n);
                map.coded_truncated(n, other);
            }
            assert!(map.tokens(map.blocks(n)) >= n.min(u32::MAX - 8), "{n}");
            map.blocks_reserved(n);
            map.full_blocks(n);
        }
    }
}
