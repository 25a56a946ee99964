//! Windows, soft cap, sink logits and recurrent states against logits of Hugging Face transformers.
//!
//! # Tolerance
//! The recorded logits are those of f64 arithmetic, with weights and frequencies that f32 can hold:
//! what is left is the rounding of our f32 model. The recording has the error of the same model in
//! f32 as transformers computes it, the largest of 4365 logits. Ours adds the same products in
//! another order, so that its largest error is about as large; twice as much is allowed, and the
//! rounding of a logit to f32 (`Recorded::tolerance`). That is 1.1e-5 to 2.4e-5 for logits up to
//! 39, and no difference is more than 0.54 of it, whichever kernels of the CPU are chosen. Each
//! fault below changes logits by 0.08 or more.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]
mod bamba;
mod candle_mamba2;
mod decoder;
mod falcon_h1;
mod hybrids;
mod kimi_linear;
mod layers;
mod mamba2;
mod nemotron_h;
mod recorded;
mod recurrence;
mod ssm;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::mistral;
use kv_candle::kv::{CacheSpec, KvFormat, SequenceId, StartOptions, StepInput};
use kv_candle::{CandleCache, CandleStep};

use serde::de::DeserializeOwned;

use decoder::{Decoder, Reading};
use recorded::{Recorded, Sequence};

const MODELS: [&str; 3] = ["mistral", "gemma2", "gpt_oss"];

/// Makes a cache for a model, which frees the blocks that left a window or keeps everything.
fn cache(recorded: &Recorded, frees_blocks: bool) -> CandleCache {
    let mut spec = CacheSpec::builder().layers(recorded.layers()).format(KvFormat::F32);
    spec = spec.kv_heads(recorded.field("num_key_value_heads"));
    spec = spec.head_dim(recorded.field("head_dim")).paged(2, 32);
    if frees_blocks {
        let layers = (0..recorded.layers()).filter(|layer| recorded.window_left(*layer).is_some());
        let left = recorded.field::<u32>("sliding_window") - 1;
        spec = spec.group(layers, |group| group.window_left(left));
    }
    CandleCache::new(&Device::Cpu, spec.build().unwrap()).unwrap()
}

/// Feeds the recorded tokens of some sequences, all in one batch: prompts in chunks, then one token
/// a step. The model is told whether a prompt is among them. Returns the logits of each sequence:
/// after every token, or after the last one of every step if the model has only these.
fn run(
    cache: &mut CandleCache,
    sequences: &[&Sequence],
    chunk: usize,
    model: impl Fn(&[u32], &CandleStep<'_>, bool) -> Result<Tensor>,
) -> Vec<Vec<Vec<f32>>> {
    let id = |at: usize| SequenceId(at.try_into().unwrap());
    for at in 0..sequences.len() {
        cache.kv_mut().start(id(at), &[], StartOptions::default()).unwrap();
    }
    let mut logits: Vec<Vec<Vec<f32>>> = sequences.iter().map(|_| Vec::new()).collect();
    loop {
        let next = |(at, sequence): (usize, &&'_ Sequence)| {
            let done = usize::try_from(cache.kv().state().seq_len(id(at)).unwrap()).unwrap();
            let left = sequence.prompt_len.saturating_sub(done);
            let new = sequence.tokens.get(done..done + left.min(chunk).max(1))?;
            Some((at, new.to_vec(), left > 0))
        };
        let batch: Vec<_> = sequences.iter().enumerate().filter_map(next).collect();
        if batch.is_empty() {
            return logits;
        }
        let inputs = batch.iter().map(|(at, new, _)| StepInput::tokens(id(*at), new));
        let inputs: Vec<_> = inputs.collect();
        let step = cache.step(&inputs).unwrap();
        let tokens: Vec<u32> = batch.iter().flat_map(|(_, new, _)| new.clone()).collect();
        let is_prompt = batch.iter().any(|(_, _, is_prompt)| *is_prompt);
        let out = model(&tokens, &step, is_prompt).unwrap().to_vec2().unwrap();
        assert_eq!(step.copies(), 0);
        step.commit().unwrap();
        let has_all = out.len() == tokens.len();
        let mut out = out.into_iter();
        for (at, new, _) in batch {
            logits[at].extend(out.by_ref().take(if has_all { new.len() } else { 1 }));
        }
    }
}

/// Does what [`run`] does with the decoder of these tests.
fn decode(
    recorded: &Recorded,
    cache: &mut CandleCache,
    sequences: &[&Sequence],
    chunk: usize,
    reading: impl Fn(bool) -> Reading,
) -> Vec<Vec<Vec<f32>>> {
    let decoder = Decoder::new(recorded).unwrap();
    run(cache, sequences, chunk, |tokens, step, is_prompt| {
        decoder.logits(tokens, step, reading(is_prompt))
    })
}

/// Returns the largest difference after every token.
fn differences(got: &[Vec<f32>], expected: &[Vec<f64>]) -> Vec<f64> {
    assert_eq!(got.len(), expected.len());
    let of_token = |(got, expected): (&Vec<f32>, &Vec<f64>)| {
        assert_eq!(got.len(), expected.len());
        let apart = got.iter().zip(expected);
        largest(apart.map(|(got, expected)| (f64::from(*got) - expected).abs()))
    };
    got.iter().zip(expected).map(of_token).collect()
}

/// Returns the largest number, or NaN if there is one.
fn largest(numbers: impl IntoIterator<Item = f64>) -> f64 {
    numbers.into_iter().max_by(f64::total_cmp).unwrap()
}

/// Returns the index of the largest logit, and how far the next one is below it.
fn top(logits: &[f64]) -> (usize, f64) {
    let mut order: Vec<_> = logits.iter().copied().enumerate().collect();
    order.sort_by(|(_, one), (_, other)| other.total_cmp(one));
    (order[0].0, order[0].1 - order[1].1)
}

#[track_caller]
fn assert_recorded(recorded: &Recorded, sequence: &Sequence, got: &[Vec<f32>], case: &str) {
    let worst = largest(differences(got, &sequence.logits));
    let Recorded { name, tolerance, .. } = recorded;
    assert!(worst <= *tolerance, "{name}, {case}: {worst} apart, {tolerance} allowed");
    for (at, (got, expected)) in got.iter().zip(&sequence.logits).enumerate() {
        let (token, margin) = top(expected);
        let got: Vec<_> = got.iter().copied().map(f64::from).collect();
        if margin > 2.0 * tolerance {
            assert_eq!(top(&got).0, token, "{name}, {case}: token {at}");
        }
        // The prompt's last token and those after it decide what is decoded.
        if at + 1 >= sequence.prompt_len {
            assert!(margin > 2.0 * tolerance, "{name}: nothing decides token {at}");
            assert!(
                sequence.tokens.get(at + 1).is_none_or(|next| usize::try_from(*next) == Ok(token))
            );
        }
    }
}

#[test]
fn ragged_batches_chunks_and_single_sequences_have_the_logits_of_transformers() {
    for recorded in MODELS.map(Recorded::read) {
        let sequences: Vec<_> = recorded.sequences.iter().collect();
        assert_eq!(
            sequences.iter().map(|sequence| sequence.prompt_len).collect::<Vec<_>>(),
            [11, 3, 7]
        );
        for (chunk, case) in [(usize::MAX, "whole prompts"), (2, "chunks of 2")] {
            let mut cache = cache(&recorded, false);
            let logits = decode(&recorded, &mut cache, &sequences, chunk, |_| Reading::Right);
            for (sequence, logits) in sequences.iter().zip(&logits) {
                assert_recorded(&recorded, sequence, logits, case);
            }
        }
        for sequence in sequences {
            let logits =
                decode(&recorded, &mut cache(&recorded, false), &[sequence], usize::MAX, |_| {
                    Reading::Right
                });
            assert_recorded(&recorded, sequence, &logits[0], "alone");
        }
    }
}

/// A cache that knows the windows frees the blocks that no query will see, and refuses to attend to
/// more than it keeps.
#[test]
fn blocks_that_left_a_window_are_not_missed() {
    for recorded in MODELS.map(Recorded::read) {
        let sequences: Vec<_> = recorded.sequences.iter().collect();
        for chunk in [usize::MAX, 2] {
            let mut cache = cache(&recorded, true);
            let logits = decode(&recorded, &mut cache, &sequences, chunk, |_| Reading::Right);
            for (sequence, logits) in sequences.iter().zip(&logits) {
                assert_recorded(&recorded, sequence, logits, "freed blocks");
            }
            // Of 19, 11 and 15 tokens in blocks of two, the last six lie in four blocks each.
            let has_full_layers = recorded.name != "mistral";
            let used = cache.kv().state().usage().blocks_used;
            assert_eq!(used, 3 * 4 + if has_full_layers { 10 + 6 + 8 } else { 0 });
            let decoder = Decoder::new(&recorded).unwrap();
            for reading in [Reading::WiderWindow, Reading::NoWindow] {
                let step = cache.step(&[StepInput::count(SequenceId(0), 1)]).unwrap();
                let error = decoder.logits(&[1], &step, reading).unwrap_err().to_string();
                assert!(error.contains("the group of the layer keeps 5"), "{error}");
            }
        }
    }
}

/// The checks above find each of these faults, after the first token that it concerns and all
/// later ones.
#[test]
fn a_wider_window_no_cap_and_no_sink_logits_are_far_from_the_recorded_logits() {
    for (name, reading, first) in [
        ("mistral", Reading::WiderWindow, 6),
        ("mistral", Reading::NoWindow, 6),
        ("gemma2", Reading::WiderWindow, 6),
        ("gemma2", Reading::NoWindow, 6),
        // With one key its score does not matter.
        ("gemma2", Reading::NoSoftCap, 1),
        ("gpt_oss", Reading::WiderWindow, 6),
        ("gpt_oss", Reading::NoWindow, 6),
        ("gpt_oss", Reading::NoSinkLogits, 0),
    ] {
        let recorded = Recorded::read(name);
        let sequences: Vec<_> = recorded.sequences.iter().collect();
        let logits =
            decode(&recorded, &mut cache(&recorded, false), &sequences, usize::MAX, |_| reading);
        for (sequence, logits) in sequences.iter().zip(&logits) {
            let apart = differences(logits, &sequence.logits);
            let (same, other) = apart.split_at(first);
            assert!(same.iter().all(|apart| *apart <= recorded.tolerance), "{name}: {apart:?}");
            let far = 1000.0 * recorded.tolerance;
            assert!(other.iter().all(|apart| *apart > far), "{name} {reading:?}: {apart:?}");
        }
    }
}

/// candle's own Mistral, whose window is another one: a prompt sees one key more, and decoding sees
/// all keys. So it is no reference for windows; this test says when that has changed.
#[test]
fn candles_own_mistral_has_another_window() {
    let recorded = Recorded::read("mistral");
    for sequence in &recorded.sequences {
        let theirs = of_candle(&recorded, sequence).unwrap();
        let from = sequence.prompt_len - 1;
        let apart = differences(&theirs, &sequence.logits[from..]);
        for (at, apart) in (from..).zip(apart) {
            let far = 1000.0 * recorded.tolerance;
            assert_eq!(apart > far, at >= 6, "token {at}: {apart}");
            assert!(at >= 6 || apart <= recorded.tolerance, "token {at}: {apart}");
        }
        // With that reading the cache has candle's logits: nothing else differs.
        let reading = |is_prompt| if is_prompt { Reading::WiderWindow } else { Reading::NoWindow };
        let ours =
            decode(&recorded, &mut cache(&recorded, false), &[sequence], usize::MAX, reading);
        let theirs: Vec<Vec<_>> =
            theirs.iter().map(|logits| logits.iter().copied().map(f64::from).collect()).collect();
        let worst = largest(differences(&ours[0][from..], &theirs));
        // Both have an error of their own.
        assert!(worst <= 2.0 * recorded.tolerance, "{worst} apart");
    }
}

/// Returns the logits after the prompt and every later token as candle's own model has them.
fn of_candle(recorded: &Recorded, sequence: &Sequence) -> Result<Vec<Vec<f32>>> {
    let mut model = mistral::Model::new(&config(recorded), weights(recorded))?;
    let (prompt, rest) = sequence.tokens.split_at(sequence.prompt_len);
    let mut feed = |tokens: &[u32], at: usize| {
        let logits = model.forward(&Tensor::new(tokens, &Device::Cpu)?.unsqueeze(0)?, at)?;
        logits.flatten_all()?.to_vec1()
    };
    let mut logits = vec![feed(prompt, 0)?];
    for (at, token) in (sequence.prompt_len..).zip(rest) {
        logits.push(feed(&[*token], at)?);
    }
    Ok(logits)
}

/// Returns the configuration as candle reads it.
fn config<T: DeserializeOwned>(recorded: &Recorded) -> T {
    let mut config = recorded.config.clone();
    let angles = config["rope_parameters"].clone();
    config["rope_theta"] = angles["rope_theta"].clone();
    serde_json::from_value(config).unwrap()
}

fn weights(recorded: &Recorded) -> VarBuilder<'static> {
    VarBuilder::from_tensors(recorded.weights.clone(), DType::F32, &Device::Cpu)
}
