//! Drafts change the number of steps, never the text.
use super::*;

/// Counts up and jumps now and then: drafts are right for a while, then wrong.
pub(crate) fn wave(history: &[u32]) -> Vec<f32> {
    let last = history.last().copied().unwrap_or(0);
    let jumps = hash(history).is_multiple_of(9);
    let token = if jumps { hash(history) % 12 } else { (last + 1) % 12 };
    let mut row = certain(token);
    row[to_usize((token + 5) % VOCAB)] = 0.7;
    row
}

/// Returns the token that follows by [`wave`].
pub(crate) fn wave_token(history: &[u32]) -> u32 {
    let row = wave(history);
    (0..VOCAB).max_by(|a, b| row[to_usize(*a)].total_cmp(&row[to_usize(*b)])).expect("tokens")
}

/// Returns the expected text, from [`wave`] alone.
pub(crate) fn wave_text(prompt: &[u32], new: usize) -> Vec<u32> {
    let mut history = prompt.to_vec();
    for _ in 0..new {
        history.push(wave_token(&history));
    }
    history.split_off(prompt.len())
}

pub(crate) fn cases() -> Vec<Vec<u32>> {
    (0..6).map(|i| (0..4 + 9 * i).map(|j| (i + j) % 12).collect()).collect()
}

fn texts(generated: &[Generated]) -> Vec<(Vec<u32>, Finish)> {
    generated.iter().map(|generated| (generated.tokens.clone(), generated.finish)).collect()
}

fn sampled(temperature: f64, new: u32) -> Vec<Request> {
    let mut requests = requests(&cases(), new);
    for (index, request) in requests.iter_mut().enumerate() {
        request.sampler = Sampler::new(temperature, 5, index);
    }
    requests
}

#[test]
fn the_text_is_the_same_with_and_without_drafts() {
    for temperature in [0.0, 0.4] {
        let plain = run_rule(wave, cache(16, 100), sampled(temperature, 40), limits(8, 1000));
        let (plain, stats, _) = plain.expect("runs");
        assert_eq!(stats.drafted_tokens, 0);
        for (block_size, num_blocks) in [(1, 600), (2, 300), (3, 40), (16, 100), (16, 8), (128, 8)]
        {
            for (draft_tokens, max_batch, max_step_tokens) in
                [(1, 8, 1000), (4, 8, 1000), (4, 3, 9), (30, 2, 1000)]
            {
                let limits = Limits { draft_tokens, ..limits(max_batch, max_step_tokens) };
                let requests = sampled(temperature, 40);
                let (generated, stats, model) =
                    run_rule(wave, cache(block_size, num_blocks), requests, limits).expect("runs");
                assert_eq!(texts(&generated), texts(&plain), "{block_size} {draft_tokens}");
                assert!(stats.drafted_tokens > stats.accepted_tokens && stats.accepted_tokens > 0);
                let batches = &model.batches;
                let size = |batch: &Vec<Chunk>| batch.iter().map(|c| c.tokens).sum::<u32>();
                assert!(batches.iter().all(|batch| size(batch) <= max_step_tokens));
            }
        }
    }
}

#[test]
fn repetitions_take_few_steps() {
    let count_up: Rule = |history| certain((history.last().copied().unwrap_or(0) + 1) % 12);
    let prompts = vec![(0..24).map(|i| i % 12).collect::<Vec<_>>()];
    let limits = Limits { draft_tokens: 4, ..limits(1, 1000) };
    let (generated, stats, _) =
        run_rule(count_up, cache(8, 50), requests(&prompts, 41), limits).expect("runs");
    assert_eq!(generated[0].tokens, (0..41).map(|i| i % 12).collect::<Vec<_>>());
    // One step for the prompt, which gives the first token; then five tokens per step.
    assert_eq!(stats.steps, 1 + 8);
    assert_eq!((stats.drafted_tokens, stats.accepted_tokens), (32, 32));
    assert!((stats.acceptance_ratio() - 1.0).abs() < 1e-12);
}

#[test]
fn a_stop_token_among_drafts_ends_the_text() {
    let count_up: Rule = |history| certain((history.last().copied().unwrap_or(0) + 1) % 12);
    let prompts = vec![(0..15).map(|i| i % 12).collect::<Vec<_>>()];
    let limits = Limits { draft_tokens: 9, stop: vec![8], ..limits(1, 1000) };
    let (generated, ..) =
        run_rule(count_up, cache(4, 50), requests(&prompts, 40), limits).expect("runs");
    assert_eq!(generated[0].tokens, [3, 4, 5, 6, 7, 8]);
    assert_eq!(generated[0].finish, Finish::Stop);
}

#[test]
fn drafts_never_exceed_the_context_or_the_blocks() {
    let constant: Rule = |_| certain(3);
    let prompts = vec![vec![3; 100]];
    for draft_tokens in [1, 5, 100] {
        let limits = Limits { draft_tokens, ..limits(1, 1000) };
        let (generated, ..) =
            run_rule(constant, cache(1, 127), requests(&prompts, 100), limits).expect("runs");
        assert_eq!(generated[0].tokens, vec![3; 28]);
        assert_eq!(generated[0].finish, Finish::Context);
    }
}

#[test]
fn drafts_are_left_out_before_a_preemption() {
    // Both need 8 blocks at the end and fit; their drafts do not.
    let constant: Rule = |_| certain(3);
    let prompts = vec![vec![3; 30], vec![4; 30]];
    let limits = Limits { draft_tokens: 20, ..limits(2, 1000) };
    let (generated, stats, _) =
        run_rule(constant, cache(4, 16), requests(&prompts, 3), limits).expect("runs");
    assert!(generated.iter().all(|generated| generated.tokens == [3; 3]));
    assert_eq!(stats.preemptions, 0);
}

/// A rejected draft that was published would be reused by a prompt that contains it.
#[test]
fn no_prompt_reuses_a_rejected_draft() {
    let prompts = cases();
    let first = run_rule(wave, cache(1, 600), requests(&prompts, 30), limits(8, 1000));
    let (first, ..) = first.expect("runs");
    // Prompts that continue as drafts of the others would have: each is the text, one more step of
    // the count where the text jumps, and the count from there.
    let mut turns = prompts.clone();
    for (prompt, generated) in prompts.iter().zip(&first) {
        let text: Vec<_> = prompt.iter().chain(&generated.tokens).copied().collect();
        for at in prompt.len()..text.len() {
            if text[at] != (text[at - 1] + 1) % 12 {
                let wrong = (1..6).map(|i| (text[at - 1] + i) % 12);
                turns.push(text[..at].iter().copied().chain(wrong).collect());
            }
        }
    }
    assert!(turns.len() > prompts.len() + 6);
    for block_size in [1, 2, 4] {
        let texts_of = |draft_tokens, reuse| {
            let limits = Limits { draft_tokens, ..limits(3, 1000) };
            let cache = cache_with(block_size, 900, |spec| spec.prefix_reuse(reuse));
            let run = run_rule(wave, cache, requests(&turns, 30), limits);
            texts(&run.expect("runs").0)
        };
        assert_eq!(texts_of(5, PrefixReuse::Partial), texts_of(0, PrefixReuse::Off));
    }
}
