//! Times of requests, and prompts with common prefixes.
use std::fs;

use tempfile::TempDir;

use super::*;

const VOCAB: Vocabulary = Vocabulary { first: 3, tokens: 256, seed: 7 };

const MADE: Synthetic = Synthetic {
    rate: 50.0,
    arrivals: Arrivals::Poisson,
    requests: 1000,
    prompt_tokens: 64,
    shared_prefix_tokens: 48,
    max_new_tokens: 8,
    turns: NonZeroU32::MIN,
};

const OPTIONS: TraceOptions = TraceOptions {
    speed: 1.0,
    tokens: 1.0,
    limit: None,
    max_prompt_tokens: None,
    max_new_tokens: None,
    tokens_per_id: None,
};

const MOONCAKE: &str = "\
{\"timestamp\": 4000, \"input_length\": 1024, \"output_length\": 9, \"hash_ids\": [1, 2]}
{\"timestamp\": 1000, \"input_length\": 1100, \"output_length\": 500, \"hash_ids\": [1, 3, 4]}
{\"timestamp\": 2000, \"input_length\": 700, \"output_length\": 0, \"hash_ids\": [1, 3]}
";

fn synthetic(made: &Synthetic) -> Workload {
    Workload::synthetic(made, VOCAB).expect("a workload")
}

fn of_trace(name: &str, text: &str, options: &TraceOptions) -> Workload {
    let dir = TempDir::new().expect("a folder");
    let path = dir.path().join(name);
    fs::write(&path, text).expect("a trace");
    Workload::of_trace(&path, options, VOCAB).expect("a workload")
}

fn prompts(workload: &Workload) -> Vec<Vec<u32>> {
    workload.planned().iter().map(|planned| workload.prompt(planned)).collect()
}

fn common(one: &[u32], other: &[u32]) -> usize {
    one.iter().zip(other).take_while(|(one, other)| one == other).count()
}

fn dues(workload: &Workload) -> Vec<f64> {
    workload.planned().iter().map(|planned| planned.due.as_secs_f64()).collect()
}

#[test]
fn arrivals_have_the_rate_and_the_spread_of_a_poisson_process() {
    let dues = dues(&synthetic(&Synthetic { requests: 20_001, ..MADE }));
    assert!(dues.is_sorted() && dues[0] == 0.0);
    let gaps: Vec<_> = dues.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let mean = gaps.iter().sum::<f64>() / 20_000.0;
    assert!((mean * MADE.rate - 1.0).abs() < 0.03, "{mean}");
    // The standard deviation of an exponential distribution is its mean.
    let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / 20_000.0;
    assert!((variance.sqrt() / mean - 1.0).abs() < 0.05, "{variance}");
}

#[test]
fn arrivals_depend_on_the_seed_alone() {
    let with = |seed| {
        let workload = Workload::synthetic(&MADE, Vocabulary { seed, ..VOCAB });
        dues(&workload.expect("a workload"))
    };
    assert_eq!(with(7), dues(&synthetic(&MADE)));
    assert_ne!(with(8), with(7));
}

#[test]
fn constant_arrivals_have_one_distance() {
    let made = Synthetic { arrivals: Arrivals::Constant, requests: 4, rate: 8.0, ..MADE };
    assert_eq!(dues(&synthetic(&made)), [0.0, 0.125, 0.25, 0.375]);
}

#[test]
fn made_prompts_share_their_prefix_and_nothing_else() {
    let prompts = prompts(&synthetic(&Synthetic { requests: 20, ..MADE }));
    for (index, one) in prompts.iter().enumerate() {
        assert_eq!(one.len(), 64);
        assert!(one.iter().all(|token| (3..256).contains(token)), "{one:?}");
        for other in &prompts[..index] {
            // The first tokens after the prefix may be equal by chance.
            assert!((48..52).contains(&common(one, other)), "{one:?} {other:?}");
        }
    }
}

#[test]
fn a_turn_goes_on_where_the_one_before_it_ended() {
    let turns = NonZeroU32::new(3).expect("three");
    let workload = synthetic(&Synthetic { requests: 12, turns, ..MADE });
    let prompts = prompts(&workload);
    for conversation in 0..4 {
        let turns = [0, 4, 8].map(|first| &prompts[first + conversation]);
        assert_eq!(turns.map(Vec::len), [64, 64 + 24, 64 + 48]);
        assert!(turns[1].starts_with(turns[0]) && turns[2].starts_with(turns[1]));
    }
    assert_ne!(prompts[0], prompts[1]);
}

#[test]
fn equal_ids_of_a_trace_are_equal_tokens() {
    let workload = of_trace("a.jsonl", MOONCAKE, &OPTIONS);
    assert_eq!(dues(&workload), [0.0, 1.0, 3.0], "by time");
    let planned = workload.planned().iter();
    let lengths: Vec<_> = planned.map(|p| (p.prompt_tokens, p.max_new_tokens)).collect();
    assert_eq!(lengths, [(1100, 500), (700, 1), (1024, 9)]);
    let prompts = prompts(&workload);
    assert_eq!(common(&prompts[0], &prompts[1]), 700);
    assert!((512..516).contains(&common(&prompts[0], &prompts[2])));
}

#[test]
fn a_scaled_trace_shares_as_much() {
    let options = TraceOptions { speed: 2.0, tokens: 0.1, limit: Some(2), ..OPTIONS };
    let workload = of_trace("a.jsonl", MOONCAKE, &options);
    assert_eq!(dues(&workload), [0.0, 1.5]);
    let prompts = prompts(&workload);
    assert_eq!((prompts[0].len(), prompts[1].len()), (110, 102));
    // A tenth of the first id's 512 tokens, rounded up.
    assert!((52..56).contains(&common(&prompts[0], &prompts[1])));
    let shortest = TraceOptions { tokens: 1e-9, ..OPTIONS };
    let workload = of_trace("a.jsonl", MOONCAKE, &shortest);
    assert!(workload.planned().iter().all(|p| (p.prompt_tokens, p.max_new_tokens) == (1, 1)));
}

#[test]
fn long_prompts_and_answers_of_a_trace_are_cut() {
    let (most, new) = (Some(600), Some(20));
    let options = TraceOptions { max_prompt_tokens: most, max_new_tokens: new, ..OPTIONS };
    let cut = of_trace("a.jsonl", MOONCAKE, &options);
    let whole = of_trace("a.jsonl", MOONCAKE, &OPTIONS);
    let answers: Vec<_> = cut.planned().iter().map(|planned| planned.max_new_tokens).collect();
    assert_eq!(answers, [20, 1, 9]);
    for (cut, whole) in prompts(&cut).iter().zip(prompts(&whole)) {
        assert_eq!(cut[..], whole[..600]);
    }
}

#[test]
fn requests_of_a_trace_without_ids_share_nothing() {
    let text = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,a,100,7,107,b
6.5,a,100,8,108,b
7,a,0,8,8,b
";
    let workload = of_trace("a.csv", text, &OPTIONS);
    assert_eq!(dues(&workload), [0.0, 1.5, 2.0]);
    let prompts = prompts(&workload);
    assert_eq!(prompts.iter().map(Vec::len).collect::<Vec<_>>(), [100, 100, 1]);
    assert!(common(&prompts[0], &prompts[1]) < 4);
}

#[test]
fn impossible_workloads_are_refused() {
    let error = |made: &Synthetic, vocab| {
        Workload::synthetic(made, vocab).expect_err("refused").to_string()
    };
    let made = Synthetic { shared_prefix_tokens: 65, ..MADE };
    assert!(error(&made, VOCAB).contains("a prompt has 64 tokens"));
    let turns = NonZeroU32::new(1_000_000).expect("many");
    assert!(error(&Synthetic { turns, ..MADE }, VOCAB).contains("the prompt of turn 1000000"));
    let vocab = Vocabulary { first: 256, ..VOCAB };
    assert!(error(&MADE, vocab).contains("--first-token 256"));
    let slow = Synthetic { rate: 1e-300, ..MADE };
    assert!(error(&slow, VOCAB).contains("at most 31 days are possible: see --rate"));
    let missing = Workload::of_trace(Path::new("no.jsonl"), &OPTIONS, VOCAB);
    assert!(missing.expect_err("no file").to_string().contains("no.jsonl"));
}

#[test]
fn a_trace_that_nobody_would_wait_for_is_refused() {
    let dir = TempDir::new().expect("a folder");
    let path = dir.path().join("a.jsonl");
    let error = |timestamp: &str, speed| {
        let line = |timestamp| {
            format!(
                "{{\"timestamp\": {timestamp}, \"input_length\": 10, \"output_length\": 1, \
                \"hash_ids\": [1]}}\n"
            )
        };
        fs::write(&path, line("1000") + &line(timestamp)).expect("a trace");
        let options = TraceOptions { speed, ..OPTIONS };
        Workload::of_trace(&path, &options, VOCAB).map_err(|error| error.to_string())
    };
    for timestamp in ["1e308", "1e300", "3e9", "18446744073709551615"] {
        let error = error(timestamp, 1.0).expect_err("refused");
        assert!(error.contains("request 2 would be sent"), "{timestamp}: {error}");
        assert!(error.contains("see --scale"), "{timestamp}: {error}");
    }
    assert!(error("3e9", 2.0).is_ok());
    assert!(error("2e9", 1.0).is_ok());
}
