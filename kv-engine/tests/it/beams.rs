//! Beam search against a search without a cache and without forks.
use super::search::{Text, brute_force};
use super::*;
use kv_engine::OutputError;

/// Like [`rough`], with few likely tokens, one of which may end the text.
fn narrow(history: &[u32]) -> Vec<f32> {
    let row = rough(history);
    row.iter().enumerate().map(|(i, x)| if i < 6 { x * 2.0 } else { x / 4.0 - 3.0 }).collect()
}

fn with_beams(prompts: &[Vec<u32>], new: u32, width: u32, length_penalty: f64) -> Vec<Request> {
    let mut requests = requests(prompts, new);
    for request in &mut requests {
        request.beams = Some(BeamOptions { width, length_penalty });
    }
    requests
}

fn finish(text: &Text) -> Finish {
    if text.has_stopped { Finish::Stop } else { Finish::Length }
}

fn check(generated: &Generated, expected: &[Text], what: &str) {
    let texts = generated.hypotheses.iter().map(|h| (h.tokens.clone(), h.finish));
    let expected_texts = expected.iter().map(|text| (text.tokens.clone(), finish(text)));
    assert_eq!(texts.collect::<Vec<_>>(), expected_texts.collect::<Vec<_>>(), "{what}");
    for (hypothesis, text) in generated.hypotheses.iter().zip(expected) {
        assert!((hypothesis.score - text.score).abs() < 1e-9, "{what}");
    }
    assert_eq!(generated.tokens, expected[0].tokens, "{what}");
    assert_eq!(generated.finish, finish(&expected[0]), "{what}");
}

#[test]
fn every_cache_finds_what_brute_force_finds() {
    let prompts = prompts(4);
    let rules: [(Rule, _); 3] = [(rough, vec![]), (narrow, vec![3]), (narrow, vec![1, 4])];
    for (rule, stop) in rules {
        for (width, penalty) in [(1, 1.0), (2, 0.0), (3, 1.0), (5, 2.0)] {
            let search = (to_usize(width), penalty);
            let expected: Vec<_> = prompts
                .iter()
                .map(|prompt| brute_force(&rule, prompt, 12, &stop, search))
                .collect();
            for (block_size, num_blocks, reuse) in [
                (1, 600, PrefixReuse::Partial),
                (4, 200, PrefixReuse::Partial),
                (4, 36, PrefixReuse::Partial),
                (4, 36, PrefixReuse::Off),
                (16, 100, PrefixReuse::FullBlocks),
                (128, 12, PrefixReuse::Partial),
            ] {
                for (max_batch, max_step_tokens) in [(1, 1000), (12, 1000), (12, 7)] {
                    let limits = limits(max_batch, max_step_tokens);
                    let limits = Limits { stop: stop.clone(), ..limits };
                    let requests = with_beams(&prompts, 12, width, penalty);
                    let cache = cache_with(block_size, num_blocks, |spec| spec.prefix_reuse(reuse));
                    let (generated, ..) = run_rule(rule, cache, requests, limits).expect("runs");
                    for (generated, expected) in generated.iter().zip(&expected) {
                        let what = format!("{width} {block_size} {max_batch} {max_step_tokens}");
                        check(generated, expected, &what);
                    }
                }
            }
        }
    }
}

#[test]
fn one_beam_is_the_greedy_text() {
    let prompts = prompts(4);
    let greedy = run_rule(rough, cache(4, 100), requests(&prompts, 20), limits(4, 1000));
    let (greedy, ..) = greedy.expect("runs");
    let requests = with_beams(&prompts, 20, 1, 1.0);
    let (beam, ..) = run_rule(rough, cache(4, 100), requests, limits(4, 1000)).expect("runs");
    for (beam, greedy) in beam.iter().zip(&greedy) {
        assert_eq!(beam.tokens, greedy.tokens);
    }
}

#[test]
fn preempted_beams_come_back_as_forks() {
    let prompts = vec![vec![5; 40], vec![6; 40]];
    let expected: Vec<_> =
        prompts.iter().map(|prompt| brute_force(&rough, prompt, 30, &[], (4, 1.0))).collect();
    for reuse in [PrefixReuse::Off, PrefixReuse::Partial] {
        for max_step_tokens in [1000, 6] {
            // One search of 40 + 29 tokens needs 10 blocks for its prompt and at most 8 per beam.
            let cache = cache_with(4, 42, |spec| spec.prefix_reuse(reuse));
            let requests = with_beams(&prompts, 30, 4, 1.0);
            let limits = limits(8, max_step_tokens);
            let (generated, stats, _) = run_rule(rough, cache, requests, limits).expect("runs");
            for (generated, expected) in generated.iter().zip(&expected) {
                check(generated, expected, "after a preemption");
            }
            // With short steps the second request is admitted too late to compete.
            assert!(stats.preemptions > 0 || max_step_tokens < 1000);
        }
    }
}

#[test]
fn beams_share_the_blocks_of_their_prompt() {
    let prompts = vec![(0..100).map(|i| i % VOCAB).collect::<Vec<_>>()];
    let peak = |width| {
        let requests = with_beams(&prompts, 16, width, 1.0);
        let (_, stats, _) =
            run_rule(rough, cache(4, 100), requests, limits(8, 1000)).expect("runs");
        stats.blocks_peak
    };
    let (one, four) = (peak(1), peak(4));
    assert_eq!(one, 29);
    assert!(f64::from(four) < 1.5 * f64::from(one), "{four}");
}

#[test]
fn beams_that_can_never_fit_are_refused() {
    let prompts = vec![vec![5; 40]];
    let run = |num_blocks, max_sequences| {
        let cache = cache_with(4, num_blocks, |spec| spec.max_sequences(max_sequences));
        run_rule(rough, cache, with_beams(&prompts, 30, 4, 1.0), limits(1, 1000))
    };
    let error = run(41, 8).err().expect("refused");
    assert!(error.to_string().contains("needs 42 blocks, the cache has 41"), "{error}");
    let error = run(42, 3).err().expect("refused");
    assert!(error.to_string().contains("needs 4 sequences at once"), "{error}");
    run(42, 4).expect("runs");
}

#[test]
fn unusable_logits_fail_the_search() {
    let broken: Rule = |_| vec![f32::NAN; 50];
    let requests = with_beams(&prompts(1), 5, 2, 1.0);
    let error = run_rule(broken, cache(4, 50), requests, limits(2, 10)).err().expect("fails");
    assert!(matches!(error, EngineError::Output(OutputError::NotFinite { request: 0 })), "{error}");
}
