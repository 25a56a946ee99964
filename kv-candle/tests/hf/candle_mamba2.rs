//! The Mamba 2 of candle, whose states are in the cache instead of its own: the tests of
//! `hybrids.rs` compare the logits with those of candle's model alone, over the weights of our
//! recording.
//!
//! They are other logits than those of transformers: candle ties the last projection to the
//! embeddings, and normalises all channels together where transformers does so by groups. A prompt
//! in parts is read by `Model::forward`, since `Model::forward_prefill` has no window of a
//! convolution from the part before.
use std::collections::HashMap;
use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::mamba2::{Config, Model, State};
use kv_candle::CandleStep;

use crate::hybrids::Family;
use crate::mamba2::{self, Reading};
use crate::recorded::{Recorded, Sequence};
use crate::{differences, largest, run, top};

pub(crate) const FAMILY: Family = Family {
    name: "mamba2 of candle",
    shapes: |recorded| {
        let mut shapes = (mamba2::FAMILY.shapes)(recorded);
        // The window of candle has the newest token too.
        shapes[CONV][1] += 1;
        shapes
    },
    logits,
    ..mamba2::FAMILY
};

/// The parts of a state.
const CONV: usize = 0;
const SSM: usize = 1;

fn config(recorded: &Recorded) -> Config {
    let mut config = recorded.config.clone();
    config["pad_vocab_size_multiple"] = 1.into();
    serde_json::from_value(config).unwrap()
}

fn model(recorded: &Recorded) -> Result<Model> {
    let weights = VarBuilder::from_tensors(recorded.weights.clone(), DType::F32, &Device::Cpu);
    Model::new(&config(recorded), weights.pp("backbone"))
}

fn forward(model: &Model, token: u32, state: &mut State) -> Result<Tensor> {
    model.forward(&Tensor::new(&[token], &Device::Cpu)?, state)
}

/// Records what candle's model computes with its own state: the prompts of the recording, and what
/// follows them greedily.
pub(crate) fn recorded() -> Recorded {
    let of = Recorded::read("mamba2");
    let (model, config) = (model(&of).unwrap(), config(&of));
    let sequences = of.sequences.iter().map(|sequence| {
        let mut state = State::new(1, &config, DType::F32, &Device::Cpu).unwrap();
        let mut tokens = sequence.tokens[..sequence.prompt_len].to_vec();
        let mut logits: Vec<Vec<f64>> = Vec::new();
        for at in 0..sequence.tokens.len() {
            let row = forward(&model, tokens[at], &mut state).unwrap();
            let row: Vec<f32> = row.squeeze(0).unwrap().to_vec1().unwrap();
            logits.push(row.into_iter().map(f64::from).collect());
            if at + 1 == tokens.len() && at + 1 < sequence.tokens.len() {
                tokens.push(top(&logits[at]).0.try_into().unwrap());
            }
        }
        Sequence { tokens, prompt_len: sequence.prompt_len, logits }
    });
    let sequences: Vec<_> = sequences.collect();
    let logits = sequences.iter().flat_map(|sequence| sequence.logits.iter().flatten());
    let largest = largest(logits.map(|logit| logit.abs()));
    // The same operations in the same order.
    let tolerance = largest * f64::from(f32::EPSILON);
    Recorded { name: FAMILY.name, sequences, tolerance, ..of }
}

/// Computes the tokens of a step with candle's model, whose states are those of the cache.
fn logits(recorded: &Recorded, tokens: &[u32], step: &CandleStep<'_>) -> Result<Tensor> {
    let model = model(recorded)?;
    let layers = 0..usize::from(recorded.layers());
    let entries = step.entries();
    let of = |part: usize, entry: usize| {
        let of_layer = |layer| step.state(layer, part)?.narrow(0, entry, 1);
        layers.clone().map(of_layer).collect::<Result<Vec<_>>>()
    };
    let mut states = Vec::new();
    for entry in 0..entries.len() {
        states.push(State { hs: of(SSM, entry)?, conv_states: of(CONV, entry)?, pos: 0 });
    }
    let mut rows = HashMap::new();
    let most = entries.iter().map(Range::len).max().unwrap_or(0);
    for count in 1..=most {
        let mut is_kept = false;
        for (entry, range) in entries.iter().enumerate() {
            let Some(row) = range.clone().nth(count - 1) else { continue };
            rows.insert(row, forward(&model, tokens[row], &mut states[entry])?);
            is_kept |= count < range.len() && step.keeps_state_after(0, entry, count)?;
        }
        for layer in layers.clone() {
            let convs: Vec<_> = states.iter().map(|of| &of.conv_states[layer]).collect();
            let ssms: Vec<_> = states.iter().map(|of| &of.hs[layer]).collect();
            for (part, of_entries) in [(CONV, convs), (SSM, ssms)] {
                let state = Tensor::cat(&of_entries, 0)?;
                if is_kept {
                    step.set_state_after(layer, part, count, &state)?;
                }
                if count == most {
                    step.set_state(layer, part, &state)?;
                }
            }
        }
    }
    let rows: Vec<_> = (0..tokens.len()).map(|row| &rows[&row]).collect();
    Tensor::cat(&rows, 0)
}

#[test]
fn our_recurrence_has_the_logits_of_candles_model() {
    let recorded = recorded();
    let sequences: Vec<_> = recorded.sequences.iter().collect();
    for chunk in [usize::MAX, 3, 1] {
        let mut cache = mamba2::FAMILY.cache(&recorded);
        let logits = run(&mut cache, &sequences, chunk, |tokens, step, _| {
            mamba2::logits(&recorded, tokens, step, Reading::Candle)
        });
        for (sequence, logits) in sequences.iter().zip(&logits) {
            let apart = largest(differences(logits, &sequence.logits));
            assert!(apart <= 1e-4, "{apart} apart");
        }
    }
}

/// Candle's model is no reference for weights with several groups, and for a last projection of its
/// own. This test says when that has changed.
#[test]
fn candles_own_mamba2_has_other_logits_than_transformers() {
    let (theirs, recorded) = (recorded(), Recorded::read("mamba2"));
    for (theirs, of) in theirs.sequences.iter().zip(&recorded.sequences) {
        let apart = theirs.logits.iter().zip(&of.logits).take(of.prompt_len);
        for (theirs, of) in apart {
            let apart = theirs.iter().zip(of).map(|(theirs, of)| (theirs - of).abs());
            assert!(largest(apart) > 1000.0 * recorded.tolerance);
        }
    }
}

/// Its prompt in two parts has other logits than in one. This test says when that has changed.
#[test]
fn candles_own_prompt_in_two_parts_loses_the_window_of_the_first() {
    let recorded = recorded();
    let (model, config) = (model(&recorded).unwrap(), config(&recorded));
    let Sequence { tokens, logits, .. } = &recorded.sequences[0];
    for (parts, is_right) in [(&[18_usize][..], true), (&[10, 8], false)] {
        let mut state = State::new(1, &config, DType::F32, &Device::Cpu).unwrap();
        let (mut first, mut apart) = (0, 0.0);
        for len in parts {
            let part = Tensor::new(&tokens[first..first + len], &Device::Cpu).unwrap();
            let rows = model.forward_prefill(&part.unsqueeze(0).unwrap(), &mut state, 4).unwrap();
            let rows: Vec<Vec<f32>> = rows.squeeze(0).unwrap().to_vec2().unwrap();
            apart = largest(differences(&rows, &logits[first..first + len]));
            first += len;
        }
        assert_eq!(apart < 1e-4, is_right, "{apart}");
    }
}
