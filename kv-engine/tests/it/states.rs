//! Recurrent states under the scheduler: each sequence has the state of exactly its tokens after
//! shared prompts, forks, drafts and preemptions, and prompts reuse what the cache kept.
use kv_core::spec::StateFormat;
use kv_core::{DType, GroupId, StartOptions, StepInput};

use super::drafts::{wave, wave_text};
use super::*;

/// The layer with a state, after those with rows.
const LAYER: u16 = LAYERS;
const WIDTH: usize = 2;
/// Integers below it are exact in f32.
const MODULUS: u64 = 1 << 24;

/// Returns the state behind a text.
fn behind(text: &[u32]) -> [f32; WIDTH] {
    text.iter().fold([0.0; WIDTH], |state, token| next_state(state, *token))
}

fn next_state(state: [f32; WIDTH], token: u32) -> [f32; WIDTH] {
    let mut index = 0;
    state.map(|before| {
        index += 1;
        #[expect(clippy::as_conversions, clippy::cast_sign_loss, reason = "small and whole")]
        #[expect(clippy::cast_possible_truncation, reason = "small and whole")]
        let before = before as u64;
        let value = (before * 31 + u64::from(token) * 7 + index) % MODULUS;
        #[expect(clippy::as_conversions, clippy::cast_precision_loss, reason = "exact")]
        {
            value as f32
        }
    })
}

/// Compares the state of every sequence with its text, `before(row, first)` the tokens of the
/// sequence at `row` before row `first`, and writes the states behind the new tokens.
pub(super) fn advance<B: Backend>(
    step: &mut Step<'_, B>,
    batch: &Batch,
    before: &dyn Fn(usize, usize) -> Vec<u32>,
) -> Result<(), CacheError> {
    let dims = [to_u32(batch.chunks.len()), to_u32(WIDTH)];
    let mut out = vec![0.0_f32; batch.chunks.len() * WIDTH];
    step.read_state(LAYER, 0, TensorViewMut::host(&mut out, &dims))?;
    let mut row = 0;
    let mut states = Vec::new();
    for ((chunk, _), state) in batch.iter().zip(out.chunks(WIDTH)) {
        let text = before(row + to_usize(chunk.tokens) - 1, row);
        assert_eq!(state, behind(&text), "the state of {chunk:?}");
        states.push([state[0], state[1]]);
        row += to_usize(chunk.tokens);
    }
    let most = batch.chunks.iter().map(|chunk| chunk.tokens).max().unwrap_or(0);
    for count in 1..=most {
        let mut is_draft_behind = false;
        for ((chunk, tokens), state) in batch.iter().zip(&mut states) {
            if let Some(token) = tokens.get(to_usize(count) - 1) {
                *state = next_state(*state, *token);
            }
            is_draft_behind |= chunk.tokens > count && chunk.tokens - count <= chunk.drafts;
        }
        let all = states.concat();
        let all = TensorView::host(&all, &dims);
        if is_draft_behind {
            step.write_state_after(LAYER, 0, count, all)?;
        }
        if count == most {
            step.write_state(LAYER, 0, all)?;
        }
    }
    Ok(())
}

/// Adds a layer with a state.
pub(super) fn with_states(
    spec: CacheSpecBuilder,
    (slots, drafts, snapshots): (u32, u32, u32),
) -> CacheSpecBuilder {
    spec.layers(LAYERS + 1).states([LAYER], |states| {
        let states = states.part([to_u32(WIDTH)], DType::F32).slots(slots).drafts(drafts);
        states.snapshots(snapshots, StateFormat::Same)
    })
}

fn hybrid(blocks: u32, sizes: (u32, u32, u32)) -> KvCache<CpuBackend> {
    cache_with(4, blocks, |spec| with_states(spec.prefix_reuse(PrefixReuse::Partial), sizes))
}

fn check(generated: &[Generated], prompts: &[Vec<u32>], new: usize) {
    for (generated, prompt) in generated.iter().zip(prompts) {
        assert_eq!(generated.tokens, expected(prompt, new));
    }
}

/// Prompts that begin with `shared` equal tokens.
fn alike(shared: u32, own: u32, count: u32) -> Vec<Vec<u32>> {
    let prompt = |index: u32| {
        let first = (0..shared).map(|at| at * 7 % VOCAB);
        first.chain((0..own).map(move |at| (index * 3 + at + 1) % VOCAB)).collect()
    };
    (0..count).map(prompt).collect()
}

#[test]
fn every_batch_and_chunk_gives_the_same_tokens() {
    let prompts = prompts(7);
    for (slots, snapshots) in [(2, 0), (3, 4), (16, 40)] {
        for (max_batch, max_step_tokens) in [(1, 1000), (3, 5), (16, 1000)] {
            for forget in [false, true] {
                let new = if forget { 4 } else { 20 };
                let limits = Limits { forget, ..limits(max_batch, max_step_tokens) };
                let cache = hybrid(100, (slots, 0, snapshots));
                let (generated, ..) = run(cache, requests(&prompts, new), limits).expect("runs");
                assert_eq!(generated.len(), prompts.len());
                check(&generated, &prompts, to_usize(new));
            }
        }
    }
}

#[test]
fn the_same_prompt_again_computes_one_token() {
    for len in 2..40 {
        let prompt: Vec<u32> = (0..len).map(|at| at * 5 % VOCAB).collect();
        let mut engine = Engine::new(hybrid(60, (4, 0, 20)), limits(2, 1000));
        let mut model = Echo::certain();
        for turn in 0..2 {
            engine.submit(Request::new(prompt.clone(), 3)).expect("fits");
            let generated = finish(&mut engine, &mut model);
            assert_eq!(generated.tokens, expected(&prompt, 3));
            let reused = if turn == 0 { 0 } else { prompt.len() - 1 };
            assert_eq!(generated.reused, reused, "turn {turn} of {len} tokens");
        }
    }
}

#[test]
fn the_next_turn_of_a_chat_computes_its_own_tokens() {
    let mut engine = Engine::new(hybrid(60, (4, 0, 20)), limits(2, 7));
    let mut model = Echo::certain();
    let mut text: Vec<u32> = (0..19).map(|at| at * 5 % VOCAB).collect();
    let mut known = 0;
    for turn in 0..5 {
        engine.submit(Request::new(text.clone(), 6)).expect("fits");
        let generated = finish(&mut engine, &mut model);
        assert_eq!(generated.reused, known, "turn {turn}");
        text.extend(&generated.tokens);
        // The last token was never computed.
        known = text.len() - 1;
        text.extend([turn, turn + 1, turn + 2]);
    }
}

#[test]
fn prompts_that_arrive_together_compute_their_beginning_once() {
    for shared in [16, 30, 41] {
        for max_step_tokens in [6, 1000] {
            let prompts = alike(shared, 9, 4);
            let cache = hybrid(100, (12, 0, 40));
            let limits = limits(6, max_step_tokens);
            let (generated, _, model) = run(cache, requests(&prompts, 5), limits).expect("runs");
            check(&generated, &prompts, 5);
            let kept = to_usize(shared - shared % 4);
            assert_eq!(generated[0].reused, 0);
            assert!(generated[1..].iter().all(|g| g.reused == kept), "{shared}: {generated:?}");
            let computed: u32 = model.batches.iter().flatten().map(|chunk| chunk.tokens).sum();
            let own = (shared + 9) * 4 - 3 * to_u32(kept);
            assert_eq!(computed, own + 4 * 4);
        }
    }
}

#[test]
fn a_running_prompt_keeps_what_a_later_one_needs() {
    let prompts = alike(40, 9, 2);
    let mut engine = Engine::new(hybrid(100, (12, 0, 40)), limits(6, 8));
    let mut model = Echo::certain();
    engine.submit(Request::new(prompts[0].clone(), 3)).expect("fits");
    engine.step(&mut model).expect("runs");
    engine.submit(Request::new(prompts[1].clone(), 3)).expect("fits");
    let mut reused = Vec::new();
    while engine.has_work() {
        for event in engine.step(&mut model).expect("runs") {
            if let Event::Finished { index, generated } = event {
                assert_eq!(generated.tokens, expected(&prompts[index], 3));
                reused.push(generated.reused);
            }
        }
    }
    assert_eq!(reused, [0, 40]);
}

#[test]
fn stops_of_a_request_serve_prompts_with_another_end() {
    let text: Vec<u32> = (0..30).map(|at| at * 5 % VOCAB).collect();
    let mut engine = Engine::new(hybrid(60, (4, 0, 20)), limits(2, 1000));
    let mut model = Echo::certain();
    // A template adds three tokens that the next turn does not repeat.
    let request =
        Request { stops: vec![11, 30], ..Request::new([&text[..], &[1, 2, 3]].concat(), 2) };
    engine.submit(request).expect("fits");
    finish(&mut engine, &mut model);
    for (kept, len) in [(30, 30), (11, 20)] {
        engine.submit(Request::new([&text[..len], &[4, 4, 4]].concat(), 2)).expect("fits");
        assert_eq!(finish(&mut engine, &mut model).reused, kept);
    }
    for (stops, before, stop) in [(vec![0], 0, 0), (vec![5, 5], 5, 5), (vec![3, 31], 3, 31)] {
        let refused = engine.submit(Request { stops, ..Request::new(text.clone(), 2) });
        let error = refused.expect_err("a stop that is none");
        let tokens = 30;
        assert_eq!(error, RequestError::Stop { index: 3, before, stop, tokens }, "{error}");
    }
}

#[test]
fn drafts_keep_the_states_behind_accepted_tokens() {
    let prompts: Vec<Vec<u32>> = (0..4).map(|i| (0..12 + i).map(|at| at % 12).collect()).collect();
    // The cache keeps states behind fewer drafts than the limits allow, or behind none.
    for (slots, drafts) in [(12, 3), (4, 2), (20, 8), (12, 0)] {
        let cache = hybrid(100, (slots, drafts, 20));
        let limits = Limits { draft_tokens: 5, ..limits(3, 1000) };
        let (generated, stats, model) =
            run_rule(wave, cache, requests(&prompts, 30), limits).expect("runs");
        for (generated, prompt) in generated.iter().zip(&prompts) {
            assert_eq!(generated.tokens, wave_text(prompt, 30));
        }
        assert_eq!(stats.accepted_tokens > 0, drafts > 0, "{stats:?}");
        assert!(model.batches.iter().flatten().all(|chunk| chunk.drafts <= drafts));
    }
}

#[test]
fn beams_and_choices_share_states_and_part() {
    let prompt: Vec<u32> = (0..15).map(|at| at * 5 % VOCAB).collect();
    let texts = |cache: KvCache<CpuBackend>| {
        let mut engine = Engine::new(cache, limits(6, 1000));
        let mut model = Echo::new(rough);
        let beams = Some(BeamOptions { width: 3, length_penalty: 1.0 });
        engine.submit(Request { beams, ..Request::new(prompt.clone(), 8) }).expect("fits");
        let samplers = vec![Sampler::new(0.5, 1, 1), Sampler::new(0.5, 1, 2)];
        engine.submit_choices(Request::new(prompt.clone(), 8), samplers).expect("fits");
        let mut texts = vec![Vec::new(); 4];
        while engine.has_work() {
            for event in engine.step(&mut model).expect("runs") {
                if let Event::Finished { index, generated } = event {
                    texts[index] = generated.tokens;
                }
            }
        }
        texts
    };
    let rows_alone = texts(cache(4, 200));
    assert!(rows_alone.iter().all(|text| text.len() == 8));
    for slots in [6, 7, 12] {
        assert_eq!(texts(hybrid(200, (slots, 0, 20))), rows_alone, "{slots} slots");
    }
    let mut engine = Engine::new(hybrid(200, (5, 0, 20)), limits(6, 1000));
    let beams = Some(BeamOptions { width: 3, length_penalty: 1.0 });
    let refused = engine.submit(Request { beams, ..Request::new(prompt.clone(), 8) });
    let expected = RequestError::TooManyBeams { index: 0, needed: 3, available: 2 };
    assert_eq!(refused.expect_err("five slots are for two sequences"), expected);
}

#[test]
fn a_preempted_request_goes_on_from_its_state() {
    let prompts = vec![vec![1; 30], vec![2; 30]];
    let (generated, stats, _) =
        run(hybrid(24, (6, 0, 20)), requests(&prompts, 30), limits(2, 1000)).expect("runs");
    check(&generated, &prompts, 30);
    assert!(stats.preemptions > 0 && stats.cache.resumed_hit_tokens > 0, "{stats:?}");
}

#[test]
fn steps_that_fail_leave_states_alone() {
    let mut engine = Engine::new(hybrid(60, (4, 0, 20)), limits(2, 7));
    let mut model = Echo::certain();
    let prompt: Vec<u32> = (0..19).map(|at| at * 5 % VOCAB).collect();
    engine.submit(Request::new(prompt.clone(), 6)).expect("fits");
    let mut generated = None;
    while engine.has_work() {
        engine.begin_step().expect("begins").expect("work");
        let step = |step: &mut Step<'_, CpuBackend>, batch: &Batch| model.forward(step, batch);
        engine.with_step(step).expect("held").expect("runs");
        engine.roll_back();
        for event in engine.step(&mut model).expect("runs") {
            if let Event::Finished { generated: of, .. } = event {
                generated = Some(of);
            }
        }
    }
    assert_eq!(generated.expect("it ends").tokens, expected(&prompt, 6));
    let (mut cache, id) = (engine.into_cache(), SequenceId(99));
    cache.start(id, &[1], StartOptions::default()).expect("room");
    let slots = cache.state().blocks_for_step(GroupId(1), &[StepInput::count(id, 1)]);
    assert_eq!(slots.expect("counts").free, 4, "a slot is lost");
}

fn finish(engine: &mut Engine<CpuBackend>, model: &mut Echo) -> Generated {
    while engine.has_work() {
        for event in engine.step(&mut *model).expect("runs") {
            if let Event::Finished { generated, .. } = event {
                return generated;
            }
        }
    }
    panic!("a request ends");
}
