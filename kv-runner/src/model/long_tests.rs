//! Logits behind tokens of a longer text against those of transformers, of the models with
//! recurrent states: transformers computes it in chunks of 64 tokens, and steps of 64 end where its
//! chunks do, and elsewhere.
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use kv::{SequenceId, StartOptions};
use serde::Deserialize;

use super::recorded::recorded;
use super::recorded_tests::{cache, model, read};
use crate::num::{to_u32, to_usize};

/// Angles of later positions have larger errors in f32, see `recorded_tests`: the largest
/// difference seen is 1.2e-4, in the Granite with rotary embeddings.
const TOLERANCE: f64 = 2e-4;

#[derive(Debug, Deserialize)]
struct Long {
    tokens: Vec<u32>,
    /// Tokens behind which logits are recorded, the entries of the vocabulary, and the logits of
    /// each model.
    after: Vec<usize>,
    kept: Vec<usize>,
    logits: BTreeMap<String, Vec<Vec<f64>>>,
}

impl Long {
    fn read() -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/long.json");
        serde_json::from_str(&fs::read_to_string(path).expect("a file")).expect("a recording")
    }

    /// Checks the logits after the tokens from `first` on; returns how many are recorded.
    fn check(&self, name: &str, first: usize, rows: &[Vec<f32>], mode: &str) -> usize {
        let mut count = 0;
        for (at, expected) in self.after.iter().zip(&self.logits[name]) {
            let Some(row) = at.checked_sub(first).and_then(|at| rows.get(at)) else { continue };
            for (id, expected) in self.kept.iter().zip(expected) {
                let off = (f64::from(row[*id]) - expected).abs();
                let of = format!("{name}, {mode}: logit {id} after token {at}");
                assert!(off <= TOLERANCE, "{of} is off by {off}");
                count += 1;
            }
        }
        count
    }
}

#[test]
fn a_longer_text_in_steps_of_a_chunk_has_the_logits_of_transformers() {
    let long = Long::read();
    let [first, second] = [1, 2].map(SequenceId);
    let recorded = recorded();
    let known = recorded.iter().filter(|case| long.logits.contains_key(&case.name));
    let known: Vec<_> = known.collect();
    assert_eq!((known.len(), long.tokens.len()), (11, 140));
    for case in known {
        let (model, name) = (model(case), &case.name);
        assert!(model.config.recurrence.is_some(), "{name}");
        for chunk in [long.tokens.len(), 64, 63, 17] {
            let mut cache = cache(&model);
            let stops = (1..=2).map(|count| count * chunk);
            let stops: Vec<_> = stops.filter(|at| *at < long.tokens.len()).map(to_u32).collect();
            let options = StartOptions::default().with_stops(&stops);
            cache.start(first, &long.tokens, options).expect("starts");
            let (mut count, mode) = (0, format!("in steps of {chunk}"));
            for (at, tokens) in (0..).step_by(chunk).zip(long.tokens.chunks(chunk)) {
                let rows = read(&model, &mut cache, first, tokens);
                count += long.check(name, at, &rows, &mode);
            }
            assert_eq!(count, long.after.len() * long.kept.len(), "{name}");
            cache.release(first).expect("releases");
            if chunk == 64 {
                // From the state behind the second of these steps.
                let prompt = [&long.tokens[..2 * chunk + 3], &[1]].concat();
                let reused = cache.start(second, &prompt, StartOptions::default());
                assert_eq!(to_usize(reused.expect("starts")), 2 * chunk, "{name}");
                let rows = read(&model, &mut cache, second, &long.tokens[2 * chunk..]);
                assert!(long.check(name, 2 * chunk, &rows, "from a snapshot") > 0);
            }
        }
    }
}
