//! Blocks that a request needs in groups with windows: exactly those held at its peak.
use kv_core::spec::GroupSpec;

use super::*;

/// One layer without a window and one with a window, with blocks for each.
fn mixed((left, sink_tokens): (u32, u32), block_size: u32, blocks: &[u32]) -> CacheSpec {
    let spec = CacheSpec::builder().layers(LAYERS).kv_heads(1).head_dim(1);
    let spec = spec.paged(block_size, blocks[0]).publish_at(PublishAt::Begin);
    let spec = spec.group([1], |group| {
        group.window_left(left).sink_tokens(sink_tokens).paged(block_size, blocks[1])
    });
    spec.build().expect("spec")
}

fn window_only(left: u32, sink_tokens: u32, block_size: u32, blocks: u32) -> CacheSpec {
    let spec = CacheSpec::builder().layers(LAYERS).kv_heads(1).head_dim(1).max_seq_len(CONTEXT);
    let spec = spec.window_left(left).sink_tokens(sink_tokens).publish_at(PublishAt::Begin);
    spec.paged(block_size, blocks).build().expect("spec")
}

fn run_blind(
    spec: CacheSpec,
    requests: Vec<Request>,
    limits: Limits,
) -> Result<(Vec<Generated>, Stats), EngineError> {
    let cache = KvCache::new(NullBackend::new(), spec).expect("cache");
    Engine::new(cache, limits).run(Blind::default(), requests)
}

/// Returns the shortage of a refused request.
fn shortage(error: EngineError) -> Shortage {
    match error {
        EngineError::Request(RequestError::DoesNotFit { shortage, .. }) => shortage,
        other => panic!("{other}"),
    }
}

fn prompt(len: u32) -> Vec<u32> {
    (0..len).map(|i| 1 + i * 7 % 40).collect()
}

#[test]
fn a_window_runs_in_the_blocks_of_its_peak() {
    // A window of 16 tokens in blocks of 4: five blocks when it begins inside a block.
    let requests = || requests(&[prompt(5)], 100);
    let (generated, stats) = run_blind(window_only(15, 0, 4, 5), requests(), limits(1, 512))
        .expect("five blocks are enough");
    assert_eq!((generated[0].tokens.len(), stats.blocks_peak), (100, 5));
    let error = run_blind(window_only(15, 0, 4, 4), requests(), limits(1, 512));
    let short = shortage(error.expect_err("one too few"));
    assert_eq!((short.needed, short.available), (5, 4));
    assert_eq!((short.advice.chunk, short.advice.has_beams), (None, false));
    assert_eq!(short.advice.paged, Some((4, 5)));
}

#[test]
fn a_refusal_names_the_step_size_that_fits() {
    let run = |max_step_tokens, blocks| {
        let requests = requests(&[prompt(100)], 10);
        run_blind(window_only(15, 0, 4, blocks), requests, limits(1, max_step_tokens))
    };
    let short = shortage(run(512, 10).expect_err("25 blocks at once"));
    assert_eq!((short.needed, short.available), (25, 10));
    assert_eq!((short.advice.chunk, short.advice.has_beams), (Some(12), false));
    assert_eq!(short.advice.paged, Some((4, 25)));
    run(12, 10).expect("as the message says");
    run(512, 25).expect("as the message says");
}

/// Makes a random request with everything that changes its number of blocks.
fn random_request(random: &mut Random) -> (Request, Limits, RequestSize) {
    let (len, new) = (1 + random.below(60), 2 + random.below(60));
    let width = if random.below(3) == 0 { 1 + random.below(4) } else { 1 };
    let steps = [1, 2, 5, 16, 512][to_usize(random.below(5))];
    let draft_tokens = if width == 1 { random.below(4) } else { 0 };
    let forget = draft_tokens == 0 && random.below(6) == 0;
    let mut request = requests(&[prompt(len)], new).remove(0);
    let options = BeamOptions { width, length_penalty: 1.0 };
    request.beams = (width > 1).then_some(options);
    let tokens = len + new - 1;
    let chunk = steps.min(if forget { tokens } else { len });
    let size = RequestSize { prompt: len, chunk, tokens, width, forget };
    let limits = Limits { forget, draft_tokens, ..limits(4, steps) };
    (request, limits, size)
}

#[test]
fn a_predicted_fit_runs_and_one_block_less_is_refused() {
    let mut random = Random(0x5EED_CAFE);
    let mut exact = 0;
    for round in 0..150 {
        let (request, limits, size) = random_request(&mut random);
        let (left, sink_tokens) = (random.below(40), random.below(3) * random.below(9));
        let block_size = 1 + random.below(9);
        let group = |spec: &CacheSpec, at: usize| size.blocks(&spec.groups()[at]);
        let about = format!("round {round}: {size:?} {left} {sink_tokens} {block_size}");
        // Only layers with a window.
        let needed = group(&window_only(left, sink_tokens, block_size, 1), 0);
        let spec = |blocks| window_only(left, sink_tokens, block_size, blocks);
        let (_, stats) = run_blind(spec(needed), vec![request.clone()], limits.clone())
            .unwrap_or_else(|error| panic!("{about}: {needed} blocks: {error}"));
        exact += u32::from(stats.blocks_peak == needed);
        if needed > 1 {
            run_blind(spec(needed - 1), vec![request.clone()], limits.clone()).expect_err(&about);
        }
        // A layer without a window besides.
        let both = mixed((left, sink_tokens), block_size, &[1, 1]);
        let needed: Vec<_> = (0..2).map(|at| group(&both, at)).collect();
        let both = |blocks: &[u32]| mixed((left, sink_tokens), block_size, blocks);
        run_blind(both(&needed), vec![request.clone()], limits.clone())
            .unwrap_or_else(|error| panic!("{about}: {needed:?} blocks: {error}"));
        for at in 0..2 {
            let mut fewer = needed.clone();
            fewer[at] -= 1;
            if fewer[at] > 0 {
                let error = run_blind(both(&fewer), vec![request.clone()], limits.clone());
                let error = error.expect_err(&about).to_string();
                assert!(error.contains(&format!("blocks of layer group {at}")), "{error}");
            }
        }
    }
    assert!(exact > 75, "the bound is loose: {exact} of 150 reach it");
}

#[test]
fn requests_that_fit_alone_run_together_with_preemptions() {
    let mut random = Random(77);
    let mut preemptions = 0;
    for round in 0..100 {
        let (left, block_size) = (random.below(30), 1 + random.below(6));
        let mut all = Vec::new();
        let (_, limits, _) = random_request(&mut random);
        let mut blocks = 1;
        for _ in 0..2 + random.below(4) {
            let (request, _, size) = random_request(&mut random);
            let steps = limits.max_step_tokens;
            let chunk = steps.min(if limits.forget { size.tokens } else { size.prompt });
            let size = RequestSize { chunk, forget: limits.forget, ..size };
            let of = |group: &GroupSpec| size.blocks(group);
            blocks = blocks.max(of(&window_only(left, 0, block_size, 1).groups()[0]));
            all.push(request);
        }
        let limits = Limits { draft_tokens: 0, ..limits };
        let spec = window_only(left, 0, block_size, blocks);
        let (generated, stats) = run_blind(spec, all.clone(), limits)
            .unwrap_or_else(|error| panic!("round {round}: {blocks} blocks: {error}"));
        assert_eq!(generated.len(), all.len());
        preemptions += stats.preemptions;
    }
    assert!(preemptions > 10, "hardly anything gave way: {preemptions}");
}
