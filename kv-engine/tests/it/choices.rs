//! Several texts after one prompt against the same texts alone.
use super::*;

fn sampler(index: usize) -> Sampler {
    Sampler::new(1.0, 3, index)
}

fn request(prompt: &[u32], max_new_tokens: u32, index: usize) -> Request {
    Request { sampler: sampler(index), ..Request::new(prompt.to_vec(), max_new_tokens) }
}

/// Runs requests for `n` texts each; returns them all, by their numbers.
fn run_choices(
    cache: KvCache<CpuBackend>,
    prompts: &[Vec<u32>],
    (n, new): (usize, u32),
    limits: Limits,
) -> (Vec<Generated>, Stats, usize) {
    let mut model = Echo::new(rough);
    let mut engine = Engine::new(cache, limits);
    for (at, prompt) in prompts.iter().enumerate() {
        let first = at * n;
        let others = (first + 1..first + n).map(sampler).collect();
        let numbers = engine.submit_choices(request(prompt, new, first), others).expect("fits");
        assert_eq!(numbers, first..first + n);
    }
    let mut done: Vec<_> = (0..prompts.len() * n).map(|_| None).collect();
    let mut streamed = vec![Vec::new(); done.len()];
    while engine.has_work() {
        for event in engine.step(&mut model).expect("runs") {
            match event {
                Event::Token { index, token } => streamed[index].push(token),
                Event::Finished { index, generated } => {
                    assert_eq!(generated.tokens, streamed[index], "text {index}");
                    assert!(done[index].replace(generated).is_none(), "text {index} ended twice");
                }
                _ => unreachable!("there are no other events"),
            }
        }
    }
    assert_eq!((engine.queued(), engine.cache().state().usage().blocks_used), ((0, 0), 0));
    let computed = model.batches.iter().flatten().map(|chunk| to_usize(chunk.tokens)).sum();
    (done.into_iter().map(|one| one.expect("ended")).collect(), engine.stats(), computed)
}

#[test]
fn each_of_several_texts_reads_as_it_does_alone() {
    let prompts = prompts(3);
    let (n, new) = (5, 12);
    let alone: Vec<_> = (0..prompts.len() * n)
        .map(|index| {
            let one = vec![request(&prompts[index / n], new, index)];
            run_rule(rough, cache(4, 100), one, limits(1, 1000)).expect("runs").0.remove(0).tokens
        })
        .collect();
    assert_ne!(alone[0], alone[1], "the texts differ");
    // The last text's third token ends some of them early.
    let stop = alone[alone.len() - 1][2];
    for (block_size, num_blocks) in [(4, 200), (4, 12), (16, 40), (1, 60)] {
        for (max_batch, max_step_tokens) in [(16, 1000), (3, 5), (1, 7)] {
            for (reuse, forget, stop) in [
                (PrefixReuse::Partial, false, None),
                (PrefixReuse::Off, false, Some(stop)),
                (PrefixReuse::FullBlocks, true, Some(stop)),
            ] {
                let stop: Vec<u32> = stop.into_iter().collect();
                let cache = cache_with(block_size, num_blocks, |spec| spec.prefix_reuse(reuse));
                let limits =
                    Limits { forget, stop: stop.clone(), ..limits(max_batch, max_step_tokens) };
                let (texts, ..) = run_choices(cache, &prompts, (n, new), limits);
                for (index, (got, alone)) in texts.iter().zip(&alone).enumerate() {
                    let end = alone.iter().position(|token| stop.contains(token));
                    let expected = &alone[..end.map_or(alone.len(), |end| end + 1)];
                    assert_eq!(got.tokens, expected, "text {index}, {block_size} {max_batch}");
                }
            }
        }
    }
}

#[test]
fn a_prompt_of_several_texts_is_computed_once() {
    let prompt: Vec<u32> = (0..40).collect();
    let cache = cache_with(4, 100, |spec| spec.prefix_reuse(PrefixReuse::Off));
    let (texts, stats, computed) = run_choices(cache, &[prompt], (6, 5), limits(8, 1000));
    // The last token of a text is never computed.
    assert_eq!((texts.len(), computed), (6, 40 + 6 * 4));
    assert_eq!((stats.generated_tokens, stats.preemptions), (6 * 5, 0));
}

#[test]
fn a_salt_hides_a_prompt_from_others() {
    let prompt: Vec<u32> = (0..20).collect();
    let mut model = Echo::certain();
    let mut engine = Engine::new(cache(4, 100), limits(4, 1000));
    let mut reused = Vec::new();
    for salt in ["a", "", "b", "a", "b", ""] {
        let request = Request { salt: salt.into(), ..Request::new(prompt.clone(), 3) };
        engine.submit(request).expect("fits");
        while engine.has_work() {
            for event in engine.step(&mut model).expect("runs") {
                if let Event::Finished { generated, .. } = event {
                    assert_eq!(generated.tokens, expected(&prompt, 3));
                    reused.push(generated.reused);
                }
            }
        }
    }
    assert_eq!(reused[..3], [0, 0, 0]);
    assert!(reused[3..].iter().all(|tokens| *tokens >= 16), "{reused:?}");
}

#[test]
fn a_text_may_go_on_after_a_stop_token() {
    let prompts = prompts(2);
    let stop = vec![expected(&prompts[0], 2)[1]];
    let mut requests = requests(&prompts[..1], 10);
    requests.push(Request { ignore_stop: true, ..requests[0].clone() });
    let limits = Limits { stop, ..limits(2, 1000) };
    let (generated, ..) = run(cache(4, 100), requests, limits).expect("runs");
    assert_eq!((generated[0].tokens.len(), generated[0].finish), (2, Finish::Stop));
    assert_eq!((generated[1].tokens.len(), generated[1].finish), (10, Finish::Length));
}

#[test]
fn beams_and_choices_are_one_or_the_other() {
    let mut engine = Engine::new(cache(4, 100), limits(4, 1000));
    let beams = Some(BeamOptions { width: 2, length_penalty: 1.0 });
    let request = Request { beams, ..Request::new(vec![1], 3) };
    let refused = engine.submit_choices(request.clone(), vec![sampler(1)]);
    assert_eq!(refused, Err(RequestError::BeamsOrChoices { index: 0 }));
    assert!(!engine.has_work());
    assert_eq!(engine.submit_choices(request, Vec::new()), Ok(0..1));
}
