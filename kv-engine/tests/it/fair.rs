//! Shares of a step: no prompt keeps the others waiting, and none is forgotten.
use std::collections::HashMap;

use super::*;

/// Makes an engine over a cache without memory, for texts of up to 8,192 tokens.
fn engine(num_blocks: u32, limits: Limits) -> Engine<NullBackend> {
    let spec = CacheSpec::builder().layers(LAYERS).kv_heads(1).head_dim(1).max_seq_len(8192);
    let spec = spec.publish_at(PublishAt::Begin).paged(16, num_blocks).build().expect("spec");
    Engine::new(KvCache::new(NullBackend::new(), spec).expect("cache"), limits)
}

fn long_limits(max_batch: u32, max_step_tokens: u32) -> Limits {
    Limits { max_batch, max_step_tokens, ..Limits::new(8192) }
}

/// A prompt of its own: no other one begins with its first block.
fn prompt(number: u32, len: u32) -> Vec<u32> {
    (0..len).map(|at| (number * 977 + at) % 50_000).collect()
}

/// Runs a step; returns the requests that have their first token, and those that have ended.
fn step(
    engine: &mut Engine<NullBackend>,
    model: &mut Blind,
    seen: &mut HashMap<usize, bool>,
) -> Vec<usize> {
    let mut first = Vec::new();
    for event in engine.step(&mut *model).expect("runs") {
        match event {
            Event::Token { index, .. } if seen.insert(index, false).is_none() => first.push(index),
            Event::Finished { index, .. } => {
                seen.insert(index, true);
            }
            _ => {}
        }
    }
    first
}

#[test]
fn a_short_prompt_beside_a_long_one_is_read_at_once() {
    let mut engine = engine(1000, long_limits(8, 512));
    let (mut model, mut seen) = (Blind::default(), HashMap::new());
    engine.submit(Request::new(prompt(0, 6000), 4)).expect("fits");
    assert!(step(&mut engine, &mut model, &mut seen).is_empty());
    assert_eq!(model.batches[0][0].tokens, 512, "alone it gets all");
    for number in 1..4 {
        engine.submit(Request::new(prompt(number, 20), 30)).expect("fits");
    }
    assert_eq!(step(&mut engine, &mut model, &mut seen), [1, 2, 3]);
    let tokens: Vec<_> = model.batches[1].iter().map(|chunk| chunk.tokens).collect();
    assert_eq!(tokens, [512 - 3 * 20, 20, 20, 20], "the long one gets what they leave");
    step(&mut engine, &mut model, &mut seen);
    let tokens: Vec<_> = model.batches[2].iter().map(|chunk| chunk.tokens).collect();
    assert_eq!(tokens, [1, 1, 1, 512 - 3], "those that decode come first");
}

#[test]
fn long_prompts_share_a_step() {
    let mut engine = engine(2000, long_limits(8, 512));
    let (mut model, mut seen) = (Blind::default(), HashMap::new());
    for (number, len) in (0..).zip([6000, 6000, 100, 6000]) {
        engine.submit(Request::new(prompt(number, len), 4)).expect("fits");
    }
    assert_eq!(step(&mut engine, &mut model, &mut seen), [2]);
    let shares: Vec<_> =
        model.batches[0].iter().map(|chunk| (chunk.request, chunk.tokens)).collect();
    assert_eq!(shares, [(0, 138), (1, 137), (2, 100), (3, 137)]);
}

#[test]
fn drafts_leave_half_of_a_step_to_prompts() {
    let limits = Limits { draft_tokens: 30, ..long_limits(8, 40) };
    let mut engine = engine(1000, limits);
    let (mut model, mut seen) = (Blind::default(), HashMap::new());
    for _ in 0..4 {
        // Zeros repeat, and the model goes on with zeros.
        engine.submit(Request::new(vec![0; 9], 200)).expect("fits");
    }
    while seen.len() < 4 {
        step(&mut engine, &mut model, &mut seen);
    }
    step(&mut engine, &mut model, &mut seen);
    let drafts = |batch: &[Chunk]| batch.iter().map(|chunk| chunk.drafts).sum::<u32>();
    assert_eq!(drafts(model.batches.last().expect("a step")), 36, "all that is left");
    engine.submit(Request::new(prompt(7, 100), 1)).expect("fits");
    step(&mut engine, &mut model, &mut seen);
    let batch = model.batches.last().expect("a step");
    assert_eq!((drafts(batch), batch.last().map(|chunk| chunk.tokens)), (18, Some(18)));
}

/// Observations of a request from outside.
struct Watched {
    prompt: u32,
    computed: u32,
    steps: u32,
    /// Least share of its steps so far.
    least: u32,
}

/// Arrivals of any length, at any time: each prompt gets its share in each step, and is computed in
/// as many steps as the documentation says.
#[test]
fn every_prompt_is_computed_within_the_bound() {
    let (mut bounds_met, mut shared) = (0, 0);
    for seed in 1..60_u64 {
        let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let (max_batch, budget) = (1 + random.below(12), 24 + random.below(200));
        let mut engine = engine(8000, long_limits(max_batch, budget));
        let mut model = Blind::default();
        let mut watched: HashMap<usize, Watched> = HashMap::new();
        let mut submitted = 0;
        while submitted < 40 || engine.has_work() {
            if submitted < 40 && random.below(3) == 0 {
                let len = if random.below(4) == 0 {
                    500 + random.below(1500)
                } else {
                    1 + random.below(60)
                };
                let request = Request::new(prompt(submitted, len), 1 + random.below(20));
                let index = engine.submit(request).expect("fits");
                let of = Watched { prompt: len, computed: 0, steps: 0, least: u32::MAX };
                watched.insert(index, of);
                submitted += 1;
            }
            engine.step(&mut model).expect("runs");
            let Some(batch) = model.batches.pop() else { continue };
            let total: u32 = batch.iter().map(|chunk| chunk.tokens).sum();
            assert!(total <= budget, "seed {seed}");
            let is_prompt = |chunk: &&Chunk| {
                let of = &watched[&chunk.request];
                of.prompt - of.computed.min(of.prompt) > 1
            };
            let prompts: Vec<_> = batch.iter().filter(is_prompt).copied().collect();
            let decoding = to_u32(batch.len() - prompts.len());
            let share = (budget - decoding) / to_u32(prompts.len().max(1));
            shared = shared.max(prompts.len());
            for chunk in prompts {
                let of = watched.get_mut(&chunk.request).expect("submitted");
                let rest = of.prompt - of.computed;
                assert!(chunk.tokens >= share.min(rest), "seed {seed}: {chunk:?} of {share}");
                (of.steps, of.least) = (of.steps + 1, of.least.min(share));
                of.computed += chunk.tokens;
                if of.computed >= of.prompt {
                    let bound = of.prompt.div_ceil(of.least);
                    assert!(
                        of.steps <= bound,
                        "seed {seed}: {} steps, {bound} are promised",
                        of.steps
                    );
                    bounds_met += u32::from(bound > 1);
                }
            }
        }
        assert_eq!(engine.cache().state().usage().blocks_used, 0, "seed {seed}");
    }
    assert!(bounds_met > 100 && shared > 6, "{bounds_met} {shared}");
}

/// Submits a request that leaves 6 blocks, one that needs 7, and short ones.
fn with_a_large_one(max_overtakes: u32) -> (Engine<NullBackend>, Blind) {
    let mut engine = engine(16, Limits { max_overtakes, ..long_limits(4, 512) });
    let mut model = Blind::default();
    engine.submit(Request::new(prompt(0, 159), 2)).expect("fits");
    engine.step(&mut model).expect("runs");
    engine.submit(Request::new(prompt(1, 110), 1)).expect("fits alone");
    for number in 2..8 {
        engine.submit(Request::new(prompt(number, 10), 1)).expect("fits");
    }
    (engine, model)
}

#[test]
fn short_requests_overtake_one_that_lacks_blocks() {
    let (mut engine, mut model) = with_a_large_one(16);
    let mut seen = HashMap::new();
    assert_eq!(step(&mut engine, &mut model, &mut seen), [0, 2, 3, 4]);
}

#[test]
fn overtakes_are_bounded() {
    let (mut engine, mut model) = with_a_large_one(2);
    let mut seen = HashMap::new();
    let mut order = Vec::new();
    while engine.has_work() {
        order.extend(step(&mut engine, &mut model, &mut seen));
    }
    let place = order.iter().position(|index| *index == 1).expect("it runs");
    assert_eq!(place, 3, "the first and two that overtake it: {order:?}");

    let (mut engine, mut model) = with_a_large_one(0);
    let mut seen = HashMap::new();
    step(&mut engine, &mut model, &mut seen);
    assert_eq!(engine.queued(), (7, 0), "nothing is admitted before it");
    assert_eq!(step(&mut engine, &mut model, &mut seen)[0], 1);
}

/// A flood of short requests never keeps a large one out.
#[test]
fn a_large_request_runs_beside_a_stream_of_short_ones() {
    let (mut engine, mut model) = with_a_large_one(4);
    let mut seen = HashMap::new();
    for number in 0..60 {
        engine.submit(Request::new(prompt(100 + number, 30), 6)).expect("fits");
        step(&mut engine, &mut model, &mut seen);
        if seen.contains_key(&1) {
            return;
        }
    }
    panic!("it waits for ever");
}

#[test]
fn a_follower_waits_for_its_leader_and_nobody_else_does() {
    let mut engine = engine(1000, long_limits(8, 100));
    let (mut model, mut seen) = (Blind::default(), HashMap::new());
    let system = prompt(0, 480);
    let with = |number| [system.clone(), prompt(number, 5)].concat();
    engine.submit(Request::new(with(1), 2)).expect("fits");
    engine.submit(Request::new(with(2), 2)).expect("fits");
    engine.submit(Request::new(prompt(3, 30), 2)).expect("fits");
    assert_eq!(step(&mut engine, &mut model, &mut seen), [2], "the short one goes on");
    assert_eq!(engine.queued(), (1, 2));
    while engine.has_work() {
        step(&mut engine, &mut model, &mut seen);
    }
    let of = |request| {
        let chunks = model.batches.iter().flatten().filter(move |chunk| chunk.request == request);
        chunks.map(|chunk| chunk.tokens).sum::<u32>()
    };
    // The last token is never computed.
    assert_eq!((of(0), of(1), of(2)), (485 + 1, 5 + 1, 30 + 1));
}
