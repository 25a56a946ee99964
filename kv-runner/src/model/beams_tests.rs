//! Beam search of the bundled model against a search without a cache and without forks.
#![expect(clippy::arithmetic_side_effects, reason = "a test that overflows fails, as it should")]
use std::cell::RefCell;
use std::path::Path;

use kv::engine::{BeamOptions, Engine, Finish, Limits, Request};
use kv::quant::Stored;
use kv::spec::PublishAt;
use kv::{Device, KvCache, KvFormat};

use super::Decoder;
use crate::num::to_usize;
use crate::reader::Reader;
use search::brute_force;

#[path = "../../../kv-engine/tests/it/search.rs"]
mod search;

#[test]
fn a_model_finds_the_texts_of_a_search_without_a_cache() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/stories260K");
    let model = Decoder::read(&dir).expect("a model");
    let backend = Device::open("cpu").expect("the CPU");
    let reader = Reader::f32(&model, &backend, 64).expect("a reader");
    let reader = RefCell::new(reader);
    let rule = |history: &[u32]| -> Vec<f32> {
        let mut reader = reader.borrow_mut();
        reader.begin().expect("begins");
        let rows = reader.read(history, &mut |_| Ok(())).expect("reads");
        let last = rows.narrow(0, history.len() - 1, 1).expect("a row");
        model.logits(&last).and_then(|row| row.get(0)?.to_vec1()).expect("logits")
    };
    let prompts: Vec<Vec<u32>> = vec![vec![1, 403, 407, 261, 378], vec![1, 267, 337, 335, 311]];
    for (width, stop) in [(2, vec![]), (3, vec![426])] {
        let spec = model.config().spec(&Stored::plain(KvFormat::F32), |cache| {
            cache.publish_at(PublishAt::Begin).paged(4, 60)
        });
        let spec = spec.expect("spec");
        let cache = KvCache::new(backend.clone(), spec).expect("cache");
        let limits = Limits { stop: stop.clone(), ..model.config().limits() };
        let requests = prompts.iter().map(|prompt| {
            let beams = Some(BeamOptions { width, length_penalty: 1.0 });
            Request { beams, ..Request::new(prompt.clone(), 10) }
        });
        let run = Engine::new(cache, limits).run(&model, requests.collect());
        let (generated, _) = run.expect("runs");
        for (generated, prompt) in generated.iter().zip(&prompts) {
            let expected = brute_force(&rule, prompt, 10, &stop, (to_usize(width), 1.0));
            assert_eq!(generated.hypotheses.len(), expected.len());
            for (hypothesis, text) in generated.hypotheses.iter().zip(&expected) {
                assert_eq!(hypothesis.tokens, text.tokens);
                assert_eq!(hypothesis.finish == Finish::Stop, text.has_stopped);
                // Logits differ in their last bits with the number of rows.
                assert!((hypothesis.score - text.score).abs() < 1e-4, "{}", hypothesis.score);
            }
        }
    }
}
