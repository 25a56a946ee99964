//! Shared prefixes of prompts, beams that share a prompt, drafts that are verified in one step.
use serde_json::Value;

use crate::support::{ModelDir, all_tokens, fails, json, kv, number};

/// A common beginning, long enough for several blocks.
const OPENING: &str = "Once upon a time, there was a little girl named Lily. She loved to play \
                       outside in the park with her dog Max. One sunny day, they went to the park \
                       to play with a big red ball.";

fn prompts() -> Vec<String> {
    let ends = ["", " Lily", " Max saw a cat", " The ball was", " Then it began to rain and"];
    ends.iter().map(|end| format!("{OPENING}{end}")).collect()
}

fn generate(prompts: &[String], extra: &[&str]) -> Value {
    let mut args = vec!["generate", "--ignore-eos"];
    args.extend(prompts.iter().flat_map(|prompt| ["--prompt", prompt.as_str()]));
    args.extend(extra);
    if !extra.contains(&"--max-new-tokens") {
        args.extend(["--max-new-tokens", "40"]);
    }
    json(&args)
}

fn count(stats: &Value, field: &str) -> u64 {
    stats[field].as_u64().unwrap_or_else(|| panic!("{field}: {stats}"))
}

#[test]
fn reuse_saves_work_and_changes_no_text() {
    let prompts = prompts();
    let plain = generate(&prompts, &["--no-reuse"]);
    let expected = all_tokens(&plain);
    let none = &plain["stats"];
    assert_eq!(count(none, "reused_tokens") + count(none, "blocks_cached"), 0);
    for (extra, has_part) in [
        (&[][..], false),
        (&["--max-batch", "1"], true),
        (&["--paged", "4,200"], false),
        (&["--paged", "1,600", "--max-step-tokens", "13"], false),
        (&["--paged", "64,16", "--max-batch", "2"], true),
        (&["--contiguous", "--max-batch", "2"], true),
    ] {
        let report = generate(&prompts, extra);
        assert_eq!(all_tokens(&report), expected, "{extra:?}");
        let stats = &report["stats"];
        let reused = count(stats, "reused_tokens");
        assert!(reused > 100, "{extra:?}: {stats}");
        let (full, part) =
            (count(stats, "reused_full_tokens"), count(stats, "reused_partial_tokens"));
        assert_eq!(full + part, reused, "{stats}");
        assert!(!has_part || part > 0, "{extra:?}: {stats}");
        let ratio = number(stats, "hit_ratio") * number(stats, "prompt_tokens");
        assert!((ratio - number(stats, "reused_tokens")).abs() < 1e-6, "{stats}");
        let sequences = report["sequences"].as_array().expect("sequences");
        assert_eq!(sequences[0]["reused_tokens"], 0);
        let each = sequences.iter().map(|sequence| count(sequence, "reused_tokens"));
        assert_eq!(each.sum::<u64>(), reused);
    }
}

/// Rows are encoded one by one, so it does not matter which request wrote a block. Text and blocks
/// are the same each time: blocks may be computed again, and are stored once.
#[test]
fn equal_prompts_are_cached_once() {
    for batch in ["1", "8"] {
        let cached = |times: usize| {
            let prompts = vec![OPENING.to_owned(); times];
            let report = generate(&prompts, &["--max-batch", batch, "--max-new-tokens", "4"]);
            (all_tokens(&report)[0].clone(), count(&report["stats"], "blocks_cached"))
        };
        let (text, once) = cached(1);
        assert_eq!(cached(24), (text, once), "in batches of {batch}");
    }
}

#[test]
fn quantised_blocks_are_shared_as_they_are() {
    let prompts = prompts();
    for format in ["int8", "l4", "f16", "l4,tail=on", "fp8-e4m3,calib=online"] {
        for extra in [&[][..], &["--max-batch", "1"], &["--paged", "8,200"]] {
            // A tail is as long as a block, so the blocks are the same on both sides.
            let extra = [extra, &["--format", format]].concat();
            let alone = generate(&prompts, &[&extra[..], &["--no-reuse"]].concat());
            let report = generate(&prompts, &extra);
            assert_eq!(all_tokens(&report), all_tokens(&alone), "{extra:?}");
            assert!(count(&report["stats"], "reused_tokens") > 100, "{}", report["stats"]);
        }
    }
}

#[test]
fn a_small_pool_preempts_evicts_and_reuses() {
    let prompts = prompts();
    let expected = all_tokens(&generate(&prompts, &["--no-reuse"]));
    let mut counts = [0, 0];
    for paged in ["4,40", "8,21", "16,11", "1,140"] {
        let report = generate(&prompts, &["--paged", paged]);
        assert_eq!(all_tokens(&report), expected, "{paged}");
        counts[0] += count(&report["stats"], "preemptions");
        counts[1] += count(&report["stats"], "evictions");
    }
    assert!(counts[0] > 0 && counts[1] > 0, "{counts:?}");
}

#[test]
fn a_window_keeps_visible_blocks_only() {
    let model = ModelDir::copy();
    model.set("model_type", Some("mistral".into()));
    model.set("sliding_window", Some(24.into()));
    let prompts = prompts();
    let with = |extra: &[&str]| generate(&prompts, &[&["--model", model.path()], extra].concat());
    let expected = all_tokens(&with(&["--no-cache", "--max-new-tokens", "90"]));
    for extra in [&[][..], &["--paged", "4,300"], &["--contiguous"], &["--max-step-tokens", "9"]] {
        let report = with(&[extra, &["--max-new-tokens", "90"]].concat());
        assert_eq!(all_tokens(&report), expected, "{extra:?}");
    }
    // A text of at least 150 tokens in blocks for the window and a chunk.
    let report = with(&[
        "--paged",
        "4,16",
        "--max-step-tokens",
        "16",
        "--max-batch",
        "1",
        "--max-new-tokens",
        "90",
    ]);
    assert_eq!(all_tokens(&report), expected);
    assert!(count(&report["stats"], "blocks_peak") <= 12, "{}", report["stats"]);
}

#[test]
fn a_window_runs_in_the_blocks_of_its_peak() {
    let model = ModelDir::copy();
    model.set("model_type", Some("mistral".into()));
    model.set("sliding_window", Some(16.into()));
    let base = ["generate", "--ignore-eos", "--max-new-tokens", "300", "--model", model.path()];
    let with = |extra: &[&str]| json(&[&base[..], extra].concat());
    let expected = all_tokens(&with(&["--paged", "4,76"]));
    for blocks in ["4,40", "4,5"] {
        let report = with(&["--paged", blocks]);
        assert_eq!(all_tokens(&report), expected);
        assert_eq!(count(&report["stats"], "blocks_peak"), 5);
    }
    let refused = [&base[..], &["--json", "--paged", "4,4"]].concat();
    fails(&refused, 1, "needs 5 blocks, the cache has 4: --paged 4,5, or fewer --max-new-tokens");
    // A prompt of about sixty tokens at once, or in steps that fit.
    let refused = [&base[..], &["--json", "--paged", "4,9", "--prompt", OPENING]].concat();
    fails(&refused, 1, "the cache has 9: --max-step-tokens ");
    with(&["--paged", "4,9", "--prompt", OPENING, "--max-step-tokens", "8"]);
}

/// The last bits of a projection depend on the number of rows in a step, whether they are drafts or
/// other sequences. Eight bits hide that; with four a close call may turn out differently, with and
/// without drafts.
#[test]
fn drafts_change_the_steps_and_not_the_text() {
    let prompts = prompts();
    for base in [&[][..], &["--format", "int8"], &["--temperature", "0.7"]] {
        let plain = generate(&prompts, &[base, &["--max-new-tokens", "120"]].concat());
        for extra in [
            &["--draft-tokens", "4"][..],
            &["--draft-tokens", "7", "--paged", "7,400"],
            &["--draft-tokens", "3", "--paged", "5,400", "--max-batch", "2"],
            &["--draft-tokens", "5", "--contiguous"],
            &["--draft-tokens", "2", "--paged", "16,22"],
        ] {
            let extra = [base, extra, &["--max-new-tokens", "120"]].concat();
            let report = generate(&prompts, &extra);
            assert_eq!(all_tokens(&report), all_tokens(&plain), "{extra:?}");
            let stats = &report["stats"];
            assert!(count(stats, "accepted_tokens") > 0, "{stats}");
            assert!(count(stats, "drafted_tokens") > count(stats, "accepted_tokens"), "{stats}");
        }
    }
}

#[test]
fn drafts_save_steps_in_a_repeating_text() {
    let prompt = [OPENING.to_owned()];
    let steps = |extra: &[&str]| {
        let report = generate(&prompt, &[extra, &["--max-new-tokens", "300"]].concat());
        (count(&report["stats"], "steps"), number(&report["stats"], "tokens_per_step"))
    };
    let (plain, drafted) = (steps(&[]), steps(&["--draft-tokens", "4"]));
    assert_eq!(plain.0, 300);
    assert!(drafted.0 < plain.0 && drafted.1 > 1.05, "{drafted:?}");
}

#[test]
fn beams_find_texts_at_least_as_likely() {
    let prompts = &prompts()[1..3];
    let report = |extra: &[&str]| {
        let mut args = vec!["generate"];
        args.extend(prompts.iter().flat_map(|prompt| ["--prompt", prompt.as_str()]));
        json(&[&args, extra, &["--max-new-tokens", "30"]].concat())
    };
    let greedy = report(&[]);
    assert_eq!(all_tokens(&report(&["--beams", "1"])), all_tokens(&greedy));
    let beams = report(&["--beams", "4"]);
    for sequence in beams["sequences"].as_array().expect("sequences") {
        let texts = sequence["hypotheses"].as_array().expect("hypotheses");
        assert_eq!(texts.len(), 4);
        assert_eq!(texts[0]["tokens"], sequence["tokens"]);
        assert!(texts.windows(2).all(|two| number(&two[0], "score") >= number(&two[1], "score")));
        let length = sequence["tokens"].as_array().expect("tokens").len();
        let per_token = number(&texts[0], "log_prob") / f64::from(u32::try_from(length).unwrap());
        assert!((per_token - number(&texts[0], "score")).abs() < 1e-12);
    }
    // Recomputed for every token, and in a pool that is too small for both.
    let expected = all_tokens(&beams);
    for extra in [
        &["--beams", "4", "--no-cache"][..],
        &["--beams", "4", "--no-reuse", "--max-step-tokens", "5"],
        &["--beams", "4", "--paged", "4,62"],
        &["--beams", "4", "--contiguous"],
    ] {
        assert_eq!(all_tokens(&report(extra)), expected, "{extra:?}");
    }
    let long = all_tokens(&report(&["--beams", "4", "--length-penalty", "-3"]));
    let short = long.iter().map(Vec::len).sum::<usize>();
    assert!(short <= expected.iter().map(Vec::len).sum::<usize>());
}

#[test]
fn four_beams_take_little_more_than_one() {
    let model = ModelDir::copy();
    model.set("max_position_embeddings", Some(1024.into()));
    let long = [OPENING; 9].join(" ");
    let peak = |beams| {
        let extra = ["--model", model.path(), "--beams", beams, "--max-new-tokens", "64"];
        let report = generate(std::slice::from_ref(&long), &extra);
        assert!(report["sequences"][0]["prompt_tokens"].as_array().map(Vec::len) >= Some(512));
        number(&report["stats"], "blocks_peak")
    };
    let (one, four) = (peak("1"), peak("4"));
    assert!(four > one && four < 1.5 * one, "{one} {four}");
}

#[test]
fn beams_stream_their_best_text_and_report_reuse() {
    let output = kv(&["generate", "--beams", "3", "--max-new-tokens", "12", "--prompt", "Tom"]);
    assert_eq!((output.code, output.stderr.as_str()), (0, ""));
    let best = json(&["generate", "--beams", "3", "--max-new-tokens", "12", "--prompt", "Tom"]);
    let text = best["sequences"][0]["text"].as_str().expect("text");
    assert!(output.stdout.starts_with("Tom") && output.stdout.contains(text), "{}", output.stdout);
    assert!(output.stdout.contains("prompt tokens reused"), "{}", output.stdout);
}

#[test]
fn options_that_exclude_each_other_are_refused() {
    for args in [
        &["--beams", "2", "--temperature", "0.5"][..],
        &["--beams", "2", "--draft-tokens", "3"],
        &["--beams", "2", "--compare"],
        &["--draft-tokens", "2", "--compare"],
        &["--draft-tokens", "2", "--no-cache"],
        &["--no-reuse", "--compare"],
    ] {
        fails(&[&["generate"], args].concat(), 2, "cannot be used with");
    }
    fails(&["generate", "--beams", "0"], 2, "at least 1");
    fails(&["generate", "--length-penalty", "inf"], 2, "finite");
    fails(&["generate", "--draft-tokens", "-1"], 2, "--draft-tokens");
    fails(&["generate", "--beams", "9", "--paged", "16,20"], 1, "the cache has 20");
    // The same values, where the options do not exclude each other.
    assert_eq!(kv(&["generate", "--beams", "1", "--temperature", "0.5", "--json"]).code, 0);
}

#[test]
fn compare_prints_the_savings_of_reuse() {
    let report = json(&["generate", "--compare", "--max-new-tokens", "4"]);
    let reuse = &report["reuse"];
    assert_eq!(reuse["system_tokens"], 500);
    let [without, with] = [0, 1].map(|at| &reuse["lines"][at]);
    assert_eq!((count(without, "reused_tokens"), count(with, "reused_tokens")), (0, 500));
    let prompt = count(with, "prompt_tokens");
    assert_eq!(count(without, "computed_tokens"), prompt);
    assert_eq!(count(with, "computed_tokens"), prompt - 500);
    assert_eq!(with["same_token"], true);
    assert!(number(with, "ttft_ms") < number(without, "ttft_ms"), "{reuse}");
}
