//! Logits of tiny models of every architecture against those of transformers.
//!
//! A logit is a sum of 48 products after three or four layers, each with a few sums of at most 80
//! products of values around 1: rounding to f32 costs about 1e-6 of the largest logit, 18. The
//! angles in transformers are f32 products of a position below 64 and an f32 frequency, with errors
//! up to 8e-6 radians, which change scores of up to 10 by 8e-5 and logits by as much. The largest
//! difference seen is 7.4e-5, and the rounding of the recorded logits is 5e-6 of it.
use std::path::Path;

use candle_core::{Device, Tensor};
use kv::cpu::{CpuBackend, CpuOptions};
use kv::quant::Stored;
use kv::spec::{Determinism, PrefixReuse, StateFormat};
use kv::{KvCache, KvFormat, SequenceId, StartOptions, StepInput};
use kv_candle::CandleStep;
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use super::Decoder;
use super::recorded::{Recorded, recorded};
use crate::cache::StateOptions;
use crate::config::ModelConfig;
use crate::num::{to_u32, to_usize};
use crate::text::Tokenizer;
use crate::weights::Weights;

const TOLERANCE: f64 = 1e-4;

#[test]
fn prompts_have_the_tokens_of_the_bundled_tokenizer() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/stories260K");
    let text = Tokenizer::read(&dir.join("tokenizer.json")).expect("its tokenizer");
    let model = ModelConfig::read(&dir).expect("its configuration");
    for case in &recorded() {
        let ids = text.encode(&case.prompt, &model).expect("tokens");
        assert_eq!(ids.tokens, case.prompt_ids, "{}", case.name);
    }
}

/// Reads the model from files.
pub(super) fn model(case: &Recorded) -> Decoder {
    changed(case, "")
}

/// Reads the model from files, with the values of a tensor halved.
pub(super) fn changed(case: &Recorded, tensor: &str) -> Decoder {
    let bytes = case.weights().map(|(name, shape, values)| {
        let factor = if name == tensor { 0.5 } else { 1.0 };
        let bytes = values.iter().flat_map(|x| (x * factor).to_le_bytes());
        (name, shape, bytes.collect::<Vec<_>>())
    });
    let bytes: Vec<_> = bytes.collect();
    let views = bytes.iter().map(|(name, shape, bytes)| {
        let view = TensorView::new(Dtype::F32, shape.to_vec(), bytes).expect("a tensor");
        (*name, view)
    });
    let file = safetensors::serialize(views, None).expect("a file");
    let mut weights = Weights::default();
    weights.read_bytes(&file).expect("weights");
    let config = ModelConfig::parse(&case.config.to_string()).expect(&case.name);
    Decoder::build(config, weights).expect(&case.name)
}

/// A cache for four sequences with up to three drafts, and for a snapshot behind every token.
pub(super) fn cache(model: &Decoder) -> KvCache<CpuBackend> {
    cache_with(model, StateFormat::Same)
}

/// Does what [`cache`] does, with snapshots in a format.
pub(super) fn cache_with(model: &Decoder, format: StateFormat) -> KvCache<CpuBackend> {
    let backend = CpuBackend::open(CpuOptions::default().with_threads(1)).expect("the CPU");
    let states = StateOptions { snapshots: 64, format, ..StateOptions::for_sequences(4, 3) };
    let spec = model.config().spec_with(&Stored::plain(KvFormat::F32), &states, |spec| {
        let spec = spec.paged(4, 64).prefix_reuse(PrefixReuse::Partial);
        spec.determinism(Determinism::BatchInvariant)
    });
    KvCache::new(backend, spec.expect("a cache")).expect("memory")
}

/// Computes tokens of one sequence; returns a row of logits for each.
pub(super) fn read(
    model: &Decoder,
    cache: &mut KvCache<CpuBackend>,
    id: SequenceId,
    tokens: &[u32],
) -> Vec<Vec<f32>> {
    let step = cache.begin_step(&[StepInput::tokens(id, tokens)]).expect("a step");
    let step = CandleStep::over(step, &Device::Cpu).expect("positions");
    let hidden: Tensor = model.hidden(&step, tokens, &mut |_| Ok(())).expect("runs");
    step.commit().expect("commits");
    model.logits(&hidden).and_then(|logits| logits.to_vec2()).expect("logits")
}

/// Returns prompt and continuation.
pub(super) fn text(case: &Recorded) -> Vec<u32> {
    [case.prompt_ids.as_slice(), &case.output_ids].concat()
}

/// Checks the logits after the tokens from `first` on.
pub(super) fn check(case: &Recorded, first: usize, rows: &[Vec<f32>], mode: &str) {
    let name = &case.name;
    let ids = text(case);
    for (at, row) in (first..).zip(rows) {
        for (id, expected) in case.kept.iter().zip(&case.logits[at]) {
            let off = (f64::from(row[*id]) - expected).abs();
            assert!(
                off <= TOLERANCE,
                "{name}, {mode}: logit {id} after token {at} is off by {off}"
            );
        }
    }
    // After the last token of the prompt, the continuation begins.
    let next = case.prompt_ids.len()..ids.len();
    for (at, row) in (first.saturating_add(1)..).zip(rows).filter(|(at, _)| next.contains(at)) {
        let best = (0_u32..).zip(row).max_by(|a, b| a.1.total_cmp(b.1)).expect("a row");
        assert_eq!(best.0, ids[at], "{name}, {mode}: token {at}");
    }
}

#[test]
fn a_text_in_one_step_or_in_many_has_the_logits_of_transformers() {
    for case in &recorded() {
        let (model, ids) = (model(case), text(case));
        for chunk in [ids.len(), 7, 1] {
            let mut cache = cache(&model);
            let id = SequenceId(1);
            cache.start(id, &[], StartOptions::default()).expect("starts");
            for (first, tokens) in (0..).step_by(chunk).zip(ids.chunks(chunk)) {
                let rows = read(&model, &mut cache, id, tokens);
                check(case, first, &rows, &format!("in steps of {chunk}"));
            }
        }
    }
}

#[test]
fn a_fork_and_a_cached_prefix_have_the_logits_of_transformers() {
    for case in &recorded() {
        let (model, ids) = (model(case), text(case));
        let mut cache = cache(&model);
        let [first, second, fork] = [1, 2, 3].map(SequenceId);
        // Another text after the same prompt, then the recorded one in the fork.
        let (prompt, rest) = ids.split_at(case.prompt_ids.len());
        let stops = [to_u32(prompt.len())];
        let options = StartOptions::default().with_stops(&stops);
        cache.start(first, &ids, options).expect("starts");
        read(&model, &mut cache, first, prompt);
        cache.fork(first, fork).expect("forks");
        read(&model, &mut cache, first, &[5, 6, 7, 8, 9]);
        let rows = read(&model, &mut cache, fork, rest);
        check(case, prompt.len(), &rows, "in a fork");
        for id in [first, fork] {
            cache.release(id).expect("releases");
        }
        let reused = cache.start(second, &ids, StartOptions::default()).expect("starts");
        let reused = to_usize(reused);
        assert!(reused >= prompt.len(), "{}: {reused} tokens reused", case.name);
        let rows = read(&model, &mut cache, second, &ids[reused..]);
        check(case, reused, &rows, "after a cached prefix");
        cache.release(second).expect("releases");
        if model.config.recurrence.is_some() {
            continue; // No step ended there.
        }
        // A prefix that ends inside the prompt and inside a block.
        let reused = cache.start(second, &[&ids[..21], &[3]].concat(), StartOptions::default());
        let reused = to_usize(reused.expect("starts"));
        assert!(reused > 0 && reused <= 21, "{}: {reused} tokens reused", case.name);
        let rows = read(&model, &mut cache, second, &ids[reused..]);
        check(case, reused, &rows, "after a part of it");
    }
}
