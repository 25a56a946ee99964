//! Families with recurrent states, against logits of transformers: in steps of any size, in forks,
//! after accepted drafts, after a step that was rolled back, after hits of every length, and after
//! a restart. The same with candle's own Mamba 2 over the cache, against the logits that it has
//! with its own state.
//!
//! # Tolerance
//! Twice that of the other families: a state carries the rounding of every token before, and ours
//! is computed token by token where transformers computes prompts in chunks. The largest
//! differences from f64 arithmetic that were seen, beside those of transformers in f32:
//!
//! | family | here | transformers | largest logit |
//! |---|---|---|---|
//! | Mamba 2 | 1.7e-5 | 1.6e-5 | 5.8 |
//! | Bamba | 2.3e-5 | 1.3e-5 | 5.9 |
//! | Falcon-H1 | 2.1e-5 | 1.4e-5 | 12.4 |
//! | Nemotron-H | 1.4e-5 | 6.4e-6 | 6.2 |
//! | Kimi Linear | 2.2e-5 | 2.5e-5 | 5.4 |
use candle_core::{Device, Result, Tensor};
use kv_candle::kv::spec::{PrefixReuse, StateFormat};
use kv_candle::kv::tier::{Identity, ModelDigest, session};
use kv_candle::kv::{CacheSpec, DType, KvFormat, SequenceId, StartOptions, StepInput};
use kv_candle::{CandleCache, CandleStep};

use crate::recorded::{Recorded, Sequence};
use crate::{assert_recorded, differences, largest, run};
use crate::{bamba, candle_mamba2, falcon_h1, kimi_linear, mamba2, nemotron_h};

/// A family of models with recurrent states.
pub(crate) struct Family {
    pub(crate) name: &'static str,
    /// The layers of the cache with a state, and those with rows.
    pub(crate) states: &'static [u16],
    pub(crate) rows: &'static [u16],
    /// Returns the shapes of the parts of a state.
    pub(crate) shapes: fn(&Recorded) -> Vec<Vec<u32>>,
    /// Returns the heads of K and V, the values of a head of K, and those of a head of V, of a
    /// family with rows.
    pub(crate) heads: fn(&Recorded) -> Option<[u32; 3]>,
    /// Computes the logits after every token of a step, `[t, vocabulary]`.
    pub(crate) logits: fn(&Recorded, &[u32], &CandleStep<'_>) -> Result<Tensor>,
}

const FAMILIES: [Family; 5] =
    [mamba2::FAMILY, bamba::FAMILY, falcon_h1::FAMILY, nemotron_h::FAMILY, kimi_linear::FAMILY];

const ONE: SequenceId = SequenceId(1);
const TWO: SequenceId = SequenceId(2);

/// Calls `check` with every family and what is recorded of it.
fn for_all(check: impl Fn(&Family, &Recorded)) {
    for family in &FAMILIES {
        let recorded = Recorded::read(family.name);
        // See above.
        check(family, &Recorded { tolerance: 2.0 * recorded.tolerance, ..recorded });
    }
    check(&candle_mamba2::FAMILY, &candle_mamba2::recorded());
}

impl Family {
    pub(crate) fn cache(&self, recorded: &Recorded) -> CandleCache {
        let layers = self.states.iter().chain(self.rows).max().unwrap() + 1;
        let spec = CacheSpec::builder().layers(layers).format(KvFormat::F32);
        let spec = spec.paged(2, 64).prefix_reuse(PrefixReuse::Partial);
        let spec = spec.states(self.states.iter().copied(), |states| {
            let parts = (self.shapes)(recorded);
            let states = parts.iter().fold(states, |all, shape| all.part(shape, DType::F32));
            states.slots(16).drafts(3).snapshots(32, StateFormat::Same)
        });
        let spec = match (self.heads)(recorded) {
            Some([heads, k_dim, v_dim]) => spec.group(self.rows.iter().copied(), |group| {
                group.kv_heads(heads).head_dims(k_dim, v_dim)
            }),
            None => spec,
        };
        CandleCache::new(&Device::Cpu, spec.build().unwrap()).unwrap()
    }

    /// Computes tokens of one sequence; returns the logits after each.
    pub(crate) fn read(
        &self,
        recorded: &Recorded,
        cache: &mut CandleCache,
        id: SequenceId,
        tokens: &[u32],
    ) -> Vec<Vec<f32>> {
        let step = cache.step(&[StepInput::tokens(id, tokens)]).unwrap();
        let logits = (self.logits)(recorded, tokens, &step).unwrap().to_vec2().unwrap();
        step.commit().unwrap();
        logits
    }
}

/// Checks the logits after the tokens from `first` on.
#[track_caller]
fn check(recorded: &Recorded, of: &Sequence, first: usize, got: &[Vec<f32>], case: &str) {
    let worst = largest(differences(got, &of.logits[first..first + got.len()]));
    let Recorded { name, tolerance, .. } = recorded;
    assert!(worst <= *tolerance, "{name}, {case}: {worst} apart, {tolerance} allowed");
}

#[test]
fn states_in_steps_of_any_size_have_the_logits_of_transformers() {
    for_all(|family, recorded| {
        let sequences: Vec<_> = recorded.sequences.iter().collect();
        for chunk in [usize::MAX, 7, 1] {
            let mut cache = family.cache(recorded);
            let logits = run(&mut cache, &sequences, chunk, |tokens, step, _| {
                (family.logits)(recorded, tokens, step)
            });
            for (sequence, logits) in sequences.iter().zip(&logits) {
                assert_recorded(recorded, sequence, logits, &format!("prompts by {chunk}"));
            }
        }
        for sequence in sequences {
            let mut cache = family.cache(recorded);
            cache.kv_mut().start(ONE, &[], StartOptions::default()).unwrap();
            let logits = family.read(recorded, &mut cache, ONE, &sequence.tokens);
            assert_recorded(recorded, sequence, &logits, "one step");
        }
    });
}

#[test]
fn a_fork_goes_on_from_the_state_it_was_made_at() {
    for_all(|family, recorded| {
        for sequence in &recorded.sequences {
            for at in [1, sequence.prompt_len, sequence.tokens.len() - 1] {
                let mut cache = family.cache(recorded);
                let (begin, rest) = sequence.tokens.split_at(at);
                cache.kv_mut().start(ONE, &[], StartOptions::default()).unwrap();
                family.read(recorded, &mut cache, ONE, begin);
                cache.kv_mut().fork(ONE, TWO).unwrap();
                // Another text there.
                family.read(recorded, &mut cache, ONE, &[40, 41, 42]);
                let logits = family.read(recorded, &mut cache, TWO, rest);
                check(recorded, sequence, at, &logits, &format!("a fork at {at}"));
            }
        }
    });
}

#[test]
fn accepted_drafts_leave_the_state_behind_the_last_of_them() {
    for_all(|family, recorded| {
        for sequence in &recorded.sequences {
            let (tokens, begin) = (&sequence.tokens, sequence.prompt_len);
            for (kept, accepted) in (1..=4).zip(1..) {
                let mut cache = family.cache(recorded);
                cache.kv_mut().start(ONE, &[], StartOptions::default()).unwrap();
                family.read(recorded, &mut cache, ONE, &tokens[..begin]);
                // A token and three drafts, of which those behind the accepted ones are wrong.
                let wrong = tokens[begin + kept..begin + 4].iter().map(|token| (token + 1) % 97);
                let mut drafts = tokens[begin..begin + kept].to_vec();
                drafts.extend(wrong);
                let step = cache.step(&[StepInput::tokens(ONE, &drafts).with_drafts(3)]).unwrap();
                let logits = (family.logits)(recorded, &drafts, &step).unwrap();
                step.commit_accepted(&[accepted]).unwrap();
                let logits: Vec<_> = logits.to_vec2().unwrap();
                let case = format!("{kept} of 4 tokens kept");
                check(recorded, sequence, begin, &logits[..kept], &case);
                let logits = family.read(recorded, &mut cache, ONE, &tokens[begin + kept..]);
                check(recorded, sequence, begin + kept, &logits, &case);
            }
        }
    });
}

#[test]
fn a_step_that_was_rolled_back_and_a_text_that_was_cut_leave_the_state_before() {
    for_all(|family, recorded| {
        for sequence in &recorded.sequences {
            for at in [1, sequence.prompt_len, sequence.tokens.len() - 1] {
                let (begin, rest) = sequence.tokens.split_at(at);
                let mut cache = family.cache(recorded);
                cache.kv_mut().start(ONE, &[], StartOptions::default()).unwrap();
                family.read(recorded, &mut cache, ONE, begin);
                cache.kv_mut().keep_state(ONE).unwrap();
                let wrong = [40, 41, 42];
                let step = cache.step(&[StepInput::tokens(ONE, &wrong)]).unwrap();
                (family.logits)(recorded, &wrong, &step).unwrap();
                drop(step);
                let logits = family.read(recorded, &mut cache, ONE, rest);
                check(recorded, sequence, at, &logits, &format!("rolled back to {at}"));
                cache.kv_mut().truncate(ONE, at.try_into().unwrap()).unwrap();
                let logits = family.read(recorded, &mut cache, ONE, rest);
                check(recorded, sequence, at, &logits, &format!("cut to {at}"));
            }
        }
    });
}

#[test]
fn a_hit_of_every_length_goes_on_from_its_snapshot() {
    for_all(|family, recorded| {
        let sequence = &recorded.sequences[0];
        let (tokens, count) = (&sequence.tokens, u32::try_from(sequence.tokens.len()).unwrap());
        let mut cache = family.cache(recorded);
        let stops: Vec<_> = (1..count).collect();
        let options = StartOptions::default().with_stops(&stops);
        cache.kv_mut().start(ONE, tokens, options).unwrap();
        for token in tokens {
            family.read(recorded, &mut cache, ONE, &[*token]);
        }
        cache.kv_mut().release(ONE).unwrap();
        for (at, hit) in (1..tokens.len()).zip(1..) {
            // Another prompt with the first tokens of this one.
            let prompt = [&tokens[..at], &[(tokens[at] + 1) % 97]].concat();
            let reused = cache.kv_mut().start(TWO, &prompt, StartOptions::default()).unwrap();
            assert_eq!(reused, hit, "{}", family.name);
            let logits = family.read(recorded, &mut cache, TWO, &tokens[at..]);
            check(recorded, sequence, at, &logits, &format!("a hit of {at}"));
            cache.kv_mut().release(TWO).unwrap();
        }
    });
}

#[test]
fn a_session_goes_on_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("text.kvs");
    let identity = |family: &Family| Identity::new(ModelDigest::of_bytes(family.name.as_bytes()));
    for_all(|family, recorded| {
        for sequence in &recorded.sequences {
            for at in [1, sequence.prompt_len, sequence.prompt_len + 5] {
                let (begin, rest) = sequence.tokens.split_at(at);
                let (options, identity) = (StartOptions::default(), identity(family));
                let mut before = family.cache(recorded);
                before.kv_mut().start(ONE, begin, options).unwrap();
                family.read(recorded, &mut before, ONE, begin);
                let info = session::dump(before.kv_mut(), &identity, ONE, b"", &path).unwrap();
                assert!(info.is_whole, "{}", family.name);
                drop(before);

                let mut after = family.cache(recorded);
                let loaded = session::load(after.kv_mut(), &identity, &path, &options).unwrap();
                assert_eq!(loaded.tokens, begin, "{}", family.name);
                let reused = after.kv_mut().start(TWO, &sequence.tokens, options).unwrap();
                assert_eq!(usize::try_from(reused), Ok(at), "{}", family.name);
                let logits = family.read(recorded, &mut after, TWO, rest);
                check(recorded, sequence, at, &logits, &format!("a restart behind {at}"));
            }
        }
    });
}

/// The checks above see every part of every state: without one, the next token has other logits.
#[test]
fn a_lost_part_of_a_state_is_far_from_the_recorded_logits() {
    for_all(|family, recorded| {
        let sequence = &recorded.sequences[0];
        let (begin, rest) = sequence.tokens.split_at(sequence.prompt_len);
        let parts = (family.shapes)(recorded).len();
        let lost = family.states.iter().copied().map(usize::from);
        for (layer, part) in lost.flat_map(|layer| (0..parts).map(move |part| (layer, part))) {
            let mut cache = family.cache(recorded);
            cache.kv_mut().start(ONE, &[], StartOptions::default()).unwrap();
            let step = cache.step(&[StepInput::tokens(ONE, begin)]).unwrap();
            (family.logits)(recorded, begin, &step).unwrap();
            let lost = step.state(layer, part).unwrap().zeros_like().unwrap();
            step.set_state(layer, part, &lost).unwrap();
            step.commit().unwrap();
            let logits = family.read(recorded, &mut cache, ONE, rest);
            let apart = differences(&logits, &sequence.logits[begin.len()..]);
            let far = 1000.0 * recorded.tolerance;
            assert!(apart[0] > far, "{}, layer {layer}, part {part}: {apart:?}", family.name);
        }
    });
}
