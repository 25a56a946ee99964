//! Hybrid models in steps that only their states can get wrong: prompts that go on from a snapshot,
//! drafts of which some are accepted, sequences that share a step.
use candle_core::Device;
use kv::backend::AnyBackend;
use kv::cpu::{CpuBackend, CpuOptions};
use kv::quant::calibrate::Calibrator;
use kv::{SequenceId, StartOptions, StepInput};
use kv_candle::CandleStep;

use super::recorded::{Recorded, recorded};
use super::recorded_tests::{cache, changed, check, model, read, text};
use crate::calibrate;
use crate::num::{to_u32, to_usize};

const ONE: SequenceId = SequenceId(1);
const TWO: SequenceId = SequenceId(2);

pub(super) fn hybrids() -> Vec<Recorded> {
    let all = recorded().into_iter();
    let hybrids = all.filter(|case| model(case).config.recurrence.is_some()).collect::<Vec<_>>();
    assert_eq!(hybrids.len(), 11, "two of lfm2, three of each other");
    hybrids
}

#[test]
fn a_prompt_that_begins_with_a_hit_of_any_length_has_the_logits_of_transformers() {
    for case in &hybrids() {
        let (model, ids) = (model(case), text(case));
        let mut cache = cache(&model);
        let stops: Vec<_> = (1..to_u32(ids.len())).collect();
        cache.start(ONE, &ids, StartOptions::default().with_stops(&stops)).expect("starts");
        for id in &ids {
            read(&model, &mut cache, ONE, &[*id]);
        }
        cache.release(ONE).expect("releases");
        for at in 1..ids.len() {
            // Another prompt with the first tokens of this one.
            let other = (ids[at] + 1) % model.config.vocab;
            let prompt = [&ids[..at], &[other]].concat();
            let reused = cache.start(TWO, &prompt, StartOptions::default()).expect("starts");
            assert_eq!(to_usize(reused), at, "{}", case.name);
            let rest = &ids[at..ids.len().min(at + 9)];
            let rows = read(&model, &mut cache, TWO, rest);
            check(case, at, &rows, &format!("after a hit of {at}"));
            cache.release(TWO).expect("releases");
        }
    }
}

#[test]
fn accepted_drafts_leave_the_states_that_their_tokens_have() {
    for case in &hybrids() {
        let (model, ids) = (model(case), text(case));
        for accepted in 1..=4 {
            let mut cache = cache(&model);
            for id in [ONE, TWO] {
                cache.start(id, &[], StartOptions::default()).expect("starts");
            }
            read(&model, &mut cache, ONE, &ids[..5]);
            // The drafts behind the accepted ones are wrong. The other sequence has none.
            let right = 5 + accepted;
            let mut drafts = ids[5..right].to_vec();
            drafts.extend((right..9).map(|at| (ids[at] + 1) % model.config.vocab));
            let inputs =
                [StepInput::tokens(TWO, &ids[..7]), StepInput::tokens(ONE, &drafts).with_drafts(3)];
            let step = cache.begin_step(&inputs).expect("a step");
            let step = CandleStep::over(step, &Device::Cpu).expect("positions");
            let tokens = [&ids[..7], &drafts].concat();
            let hidden = model.hidden(&step, &tokens, &mut |_| Ok(())).expect("runs");
            step.commit_accepted(&[7, to_u32(accepted)]).expect("commits");
            let rows = model.logits(&hidden).and_then(|rows| rows.to_vec2()).expect("logits");
            let mode = format!("with {accepted} of 4 tokens kept");
            check(case, 0, &rows[..7], &mode);
            check(case, 5, &rows[7..7 + accepted], &mode);
            for (id, len) in [(ONE, right), (TWO, 7)] {
                let rows = read(&model, &mut cache, id, &ids[len..len + 9]);
                check(case, len, &rows, &mode);
            }
        }
    }
}

#[test]
fn the_weights_of_every_mixer_change_the_fingerprint() {
    for case in hybrids().iter().filter(|case| !case.name.contains('-')) {
        let expected = model(case).fingerprint();
        assert_eq!(model(case).fingerprint(), expected, "{}", case.name);
        let of_mixer = |name: &&String| {
            let is_of = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
            // Layers of both kinds. What follows attention reaches the cache in the next layer.
            is_of(&["layers.0.", "layers.1."])
                && is_of(&["linear_attn.", "self_attn.", "mamba.", ".conv."])
                && !is_of(&["self_attn.o"])
        };
        let mut count = 0;
        for tensor in case.tensors.keys().filter(of_mixer) {
            assert_ne!(changed(case, tensor).fingerprint(), expected, "{} {tensor}", case.name);
            count += 1;
        }
        assert!(count > 6, "{}: {count} tensors", case.name);
    }
}

#[test]
fn calibrations_have_constants_for_the_layers_that_attend() {
    let case = hybrids().into_iter().find(|case| case.name == "qwen3_5").expect("a case");
    let (model, ids) = (model(&case), text(&case));
    let backend = CpuBackend::open(CpuOptions::default().with_threads(1)).expect("the CPU");
    let backend = AnyBackend::new(backend);
    let seen = calibrate::observe(&model, &backend, &ids, &[0], &mut |_| ()).expect("runs");
    assert_eq!(seen.iter().map(Calibrator::num_tokens).collect::<Vec<_>>(), [to_u32(ids.len())]);
    let made = calibrate::finish(&seen[0], &model).expect("constants");
    let means: Vec<_> = made.layers().iter().map(|layer| layer.k.mean.len()).collect();
    assert_eq!(means, [0, 32, 0, 32]);
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("calib.safetensors");
    std::fs::write(&path, calibrate::to_file(&seen[0], &model).expect("a file")).expect("written");
    assert_eq!(calibrate::load(&path, &model).expect("the file"), made);
    let online = calibrate::online(&model, &backend, &ids, 0).expect("constants");
    assert_eq!(online.layers().len(), 4);
}
