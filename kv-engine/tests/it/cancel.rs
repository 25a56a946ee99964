//! Requests that end before their text does.
use super::*;

#[test]
fn blocks_are_free_as_soon_as_a_request_is_cancelled() {
    let (mut model, prompts) = (Echo::certain(), prompts(4));
    let mut engine = Engine::new(cache(4, 100), limits(3, 1000));
    for request in requests(&prompts, 20) {
        engine.submit(request).expect("fits");
    }
    engine.begin_step().expect("begins").expect("work");
    assert_eq!(engine.queued(), (1, 3), "said before the model runs");
    engine.forward(&mut model).expect("runs");
    engine.step(&mut model).expect("runs");
    assert_eq!(engine.queued(), (1, 3));
    let used = engine.cache().state().usage().blocks_used;
    let ended = engine.cancel(1).expect("it ran");
    assert_eq!((ended.tokens, ended.finish), (expected(&prompts[1], 2), Finish::Cancelled));
    assert!(engine.cache().state().usage().blocks_used < used);
    // One that waits.
    let ended = engine.cancel(3).expect("it waited");
    assert_eq!((ended.tokens.len(), engine.queued()), (0, (0, 2)));
    for index in [1, 3, 4, 99] {
        assert_eq!(engine.cancel(index), None, "request {index}");
    }
    let mut done = Vec::new();
    while engine.has_work() {
        for event in engine.step(&mut model).expect("runs") {
            if let Event::Finished { index, generated } = event {
                assert_eq!(generated.tokens, expected(&prompts[index], 20));
                done.push(index);
            }
        }
    }
    assert_eq!((done, engine.cache().state().usage().blocks_used), (vec![0, 2], 0));
}

/// Every text that is not cancelled reads as it does alone, whatever happens beside it, and no
/// block is lost.
#[test]
fn cancelling_at_random_changes_no_other_text() {
    let prompts = prompts(9);
    for seed in 0..60_u32 {
        let mut model = Echo::certain();
        let mut random = seed.wrapping_mul(0x9E37_79B9);
        let mut draw = |below: u32| {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (random >> 16) % below
        };
        let limits = limits(1 + draw(6), 3 + draw(40));
        let mut engine = Engine::new(cache(4, 14 + draw(30)), limits);
        let (mut texts, mut cancelled, mut ended) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..120 {
            match draw(4) {
                0 if texts.len() < 30 => {
                    let prompt = to_usize(draw(9));
                    let request = Request::new(prompts[prompt].clone(), 1 + draw(20));
                    let others = vec![Sampler::greedy(); to_usize(draw(4))];
                    let new = request.max_new_tokens;
                    let numbers = engine.submit_choices(request, others).expect("fits");
                    assert_eq!(numbers.start, texts.len());
                    texts.resize(numbers.end, (prompt, to_usize(new)));
                }
                1 if !texts.is_empty() => {
                    let index = to_usize(draw(to_u32(texts.len())));
                    let was = ended.contains(&index) || cancelled.contains(&index);
                    let got = engine.cancel(index);
                    assert_eq!(got.is_none(), was, "seed {seed}, text {index}");
                    if let Some(got) = got {
                        let (prompt, new) = texts[index];
                        let all = expected(&prompts[prompt], new);
                        assert!(all.starts_with(&got.tokens), "seed {seed}, text {index}");
                        cancelled.push(index);
                    }
                }
                _ => finish(engine.step(&mut model).expect("runs"), &texts, &mut ended, &prompts),
            }
        }
        while engine.has_work() {
            finish(engine.step(&mut model).expect("runs"), &texts, &mut ended, &prompts);
        }
        assert_eq!(ended.len() + cancelled.len(), texts.len(), "seed {seed}");
        let usage = engine.cache().state().usage();
        assert_eq!((usage.sequences, usage.blocks_used), (0, 0), "seed {seed}");
    }
}

fn finish(
    events: Vec<Event>,
    texts: &[(usize, usize)],
    ended: &mut Vec<usize>,
    prompts: &[Vec<u32>],
) {
    for event in events {
        if let Event::Finished { index, generated } = event {
            let (prompt, new) = texts[index];
            assert_eq!(generated.tokens, expected(&prompts[prompt], new), "text {index}");
            assert!(!ended.contains(&index));
            ended.push(index);
        }
    }
}
