//! The serving example against the same requests one by one.
use std::collections::BTreeSet;
use std::path::Path;

use candle_core::Tensor;
use candle_transformers::models::llama::LlamaConfig;
use kv_candle::CandleStep;
use kv_candle::kv::KvFormat;

use crate::llama::common::generate::{Limits, generate};
use crate::llama::common::{Folder, Geometry, open_cache};
use crate::llama::model::Llama;
use crate::llama::serve;

const SYSTEM: &str = "Once upon a time, in a small town near the sea, there was a little girl \
    named Lily who liked to tell stories to all her friends.";

/// What the requests begin with, each with a part of its own words.
const WORDS: &str = "One day she saw a big red ball in the park and asked her mom if they could \
    take it home to the dog";

#[test]
fn sixty_four_requests_at_once_are_each_request_alone() {
    let folder = Folder::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/stories260K"));
    let folder = folder.unwrap();
    let config = folder.config::<LlamaConfig>().unwrap().into_config(false);
    let llama = Llama::load(folder.weights().unwrap(), &config).unwrap();
    let model = |ids: &Tensor, step: &CandleStep<'_>| {
        let logits = llama.forward(ids, step)?;
        assert_eq!((logits.dim(0)?, step.copies()), (step.last_rows().dim(0)?, 0));
        Ok(logits)
    };
    let words: Vec<_> = WORDS.split(' ').collect();
    let request = |at: usize| {
        let own = words.iter().cycle().skip(at).take(1 + at * 7 % 23).copied();
        format!("{SYSTEM}\n{}", own.collect::<Vec<_>>().join(" "))
    };
    let prompts: Vec<_> = (0..64).map(|at| folder.encode(&request(at)).unwrap()).collect();
    let lens: BTreeSet<_> = prompts.iter().map(Vec::len).collect();
    assert!(lens.len() > 20, "ragged: {lens:?}");
    // A full stop ends a text, so that each ends at its own time.
    let stop = vec![*folder.encode(".").unwrap().last().unwrap()];
    let limits = Limits { stop, ..folder.limits(24) };

    let geometry = Geometry {
        kv_heads: config.num_key_value_heads,
        head_dim: config.hidden_size / config.num_attention_heads,
        layers: config.num_hidden_layers,
    };
    let longest = prompts.iter().map(|prompt| limits.longest(prompt)).max().unwrap();
    let mut alone = open_cache(&geometry, KvFormat::F32, 1, longest).unwrap();
    let expected: Vec<_> = prompts
        .iter()
        .map(|prompt| generate(&mut alone, &model, prompt, &limits).unwrap())
        .collect();
    let ends: BTreeSet<_> = expected.iter().map(Vec::len).collect();
    assert!(ends.len() > 10, "sequences leave one by one: {ends:?}");

    for max_batch in [64, 9] {
        let mut cache = open_cache(&geometry, KvFormat::F32, 64, longest).unwrap();
        let served = serve::serve(&mut cache, &model, &prompts, &limits, max_batch).unwrap();
        for (at, (got, expected)) in served.new.iter().zip(&expected).enumerate() {
            assert_eq!(got, expected, "request {at}, at most {max_batch} at once");
        }
        assert_eq!(served.new.len(), 64);
        let all: usize = prompts.iter().map(Vec::len).sum();
        assert_eq!(served.prompt_tokens, all);
        assert!(served.batch == max_batch || served.batch > 50, "{served:?}");
        // The first prompt is computed, and what others have in common with it is not.
        let shared = folder.encode(SYSTEM).unwrap().len() - 1;
        assert!(served.reused_tokens >= 63 * shared, "{served:?}");
        let usage = cache.kv().state().usage();
        assert_eq!((usage.sequences, usage.tokens, usage.blocks_used), (0, 0, 0));
    }
}
