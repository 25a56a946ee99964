//! Steps that the caller drives: begun, computed and ended by calls of their own.
use std::collections::HashMap;
use std::time::Instant;

use kv_core::error::PlanError;
use kv_engine::{Chosen, SavedText};
use kv_tier::{Identity, ModelDigest};

use super::*;

/// Returns the sum of what is held, to see that nothing is lost.
fn usage<B: Backend>(engine: &Engine<B>) -> (u32, u32) {
    let usage = engine.cache().state().usage();
    (usage.sequences, usage.blocks_used)
}

fn tokens_of(events: &[Event], index: usize) -> Vec<u32> {
    let tokens = events.iter().filter_map(|event| match event {
        Event::Token { index: of, token } if *of == index => Some(*token),
        _ => None,
    });
    tokens.collect()
}

/// Chooses each next token by the rule, as a caller would on its device; accepts drafts as far as
/// the rule does.
fn choose(batch: &Batch, histories: &HashMap<SequenceId, Vec<u32>>) -> Vec<Chosen> {
    let mut chosen = Vec::new();
    for (chunk, tokens) in batch.iter().filter(|(chunk, _)| chunk.logits > 0) {
        let mut history = histories[&chunk.sequence].clone();
        let drafts = &tokens[to_usize(chunk.tokens - chunk.drafts)..];
        let mut accepted = Vec::new();
        for draft in drafts.iter().map(Some).chain([None]) {
            let token = drafts::wave_token(&history);
            accepted.push(token);
            history.push(token);
            if draft != Some(&token) {
                break;
            }
        }
        chosen.push(Chosen { sequence: chunk.sequence, tokens: accepted });
    }
    chosen
}

#[test]
fn chosen_tokens_give_the_text_of_logits_also_with_drafts() {
    let prompts = drafts::cases();
    let (expected, ..) =
        run_rule(drafts::wave, cache(4, 300), requests(&prompts, 30), limits(8, 1000))
            .expect("runs");
    for draft_tokens in [0, 3, 12] {
        let mut engine = Engine::new(cache(4, 300), Limits { draft_tokens, ..limits(8, 60) });
        for request in requests(&prompts, 30) {
            engine.submit(request).expect("fits");
        }
        let mut model = Echo::new(drafts::wave);
        let mut texts: Vec<Vec<u32>> = prompts.clone();
        let mut ended = 0;
        while engine.begin_step().expect("begins").is_some() {
            // The model writes K and V; what it would choose from is left alone.
            let logits = engine.with_step(|step, batch| model.forward(step, batch));
            logits.expect("held").expect("computed");
            let chosen = engine
                .with_step(|_, batch| {
                    let text = |chunk: &Chunk| (chunk.sequence, texts[chunk.request].clone());
                    choose(batch, &batch.chunks.iter().map(text).collect())
                })
                .expect("held");
            for event in engine.end_step(chosen).expect("ends") {
                match event {
                    Event::Token { index, token } => texts[index].push(token),
                    Event::Finished { .. } => ended += 1,
                    _ => unreachable!("there are no other events"),
                }
            }
        }
        assert_eq!((ended, usage(&engine)), (prompts.len(), (0, 0)));
        for ((text, prompt), expected) in texts.iter().zip(&prompts).zip(&expected) {
            assert_eq!(text[prompt.len()..], expected.tokens, "{draft_tokens} drafts");
        }
        assert_eq!(engine.stats().accepted_tokens > 0, draft_tokens > 0);
    }
}

#[test]
fn calls_in_a_wrong_order_are_refused() {
    let mut engine = Engine::new(cache(4, 40), limits(4, 100));
    let mut model = Echo::certain();
    let no_step = |error: EngineError| matches!(error, EngineError::NoStep { .. });
    assert!(no_step(engine.end_step(Logits::default()).expect_err("no step")));
    assert!(no_step(engine.with_step(|_, _| ()).expect_err("no step")));
    assert!(no_step(engine.forward(&mut model).expect_err("no step")));
    engine.roll_back();
    assert_eq!(engine.begin_step().expect("fine"), None, "without work there is no step");
    assert!(no_step(engine.end_step(Vec::new()).expect_err("no step")));

    let prompt: Vec<u32> = (3..20).collect();
    engine.submit(Request::new(prompt.clone(), 6)).expect("fits");
    engine.begin_step().expect("begins").expect("work");
    let held = usage(&engine);
    let open = |error: EngineError| matches!(error, EngineError::StepOpen { .. });
    assert!(open(engine.begin_step().expect_err("twice")));
    assert!(open(engine.step(&mut model).expect_err("twice")));
    assert!(open(engine.flush_tiers(Instant::now()).expect_err("held")));
    let identity = Identity::new(ModelDigest::of_bytes(b"echo"));
    let path = std::path::Path::new("/nowhere/chat.kvs");
    let text = SavedText { tokens: vec![1], drawn: 0 };
    assert!(open(engine.save_session(&identity, &text, path).expect_err("held")));
    assert!(open(engine.load_session(&identity, path).expect_err("held")));
    engine.poll_tiers().expect("there are none");
    assert_eq!(usage(&engine), held, "the step is as it was");
    let events = engine.forward(&mut model).expect("ends");
    assert_eq!(tokens_of(&events, 0), expected(&prompt, 1));
}

#[test]
fn a_step_that_is_rolled_back_never_was() {
    let prompts = prompts(4);
    let mut engine = Engine::new(cache(4, 40), limits(3, 20));
    for request in requests(&prompts, 9) {
        engine.submit(request).expect("fits");
    }
    let (mut model, mut count) = (Echo::certain(), 0);
    while engine.has_work() {
        let before = (usage(&engine), engine.queued());
        let first = format!("{:?}", engine.begin_step().expect("begins"));
        engine.roll_back();
        assert_eq!((usage(&engine), engine.queued()), before);
        let again = format!("{:?}", engine.begin_step().expect("begins"));
        assert_eq!(first, again, "the next step repeats it");
        for event in engine.forward(&mut model).expect("ends") {
            if let Event::Finished { index, generated } = event {
                assert_eq!(generated.tokens, expected(&prompts[index], 9));
                count += 1;
            }
        }
    }
    assert_eq!((count, usage(&engine)), (4, (0, 0)));
}

/// Requests that end between the beginning and the end of a step: the step goes on, and the blocks
/// are free after it, whether it is committed or not.
#[test]
fn a_request_may_be_cancelled_while_a_step_is_held() {
    let prompts = prompts(4);
    for cancelled in 0..4 {
        for commits in [true, false] {
            for steps in 0..6 {
                let mut engine = Engine::new(cache(4, 60), limits(3, 20));
                let mut model = Echo::certain();
                for request in requests(&prompts, 9) {
                    engine.submit(request).expect("fits");
                }
                for _ in 0..steps {
                    engine.step(&mut model).expect("runs");
                }
                let about = format!("request {cancelled} in step {steps}, {commits}");
                engine.begin_step().expect("begins").expect("work");
                let ended = engine.cancel(cancelled).expect("it runs or waits");
                let all = expected(&prompts[cancelled], 9);
                assert!(all.starts_with(&ended.tokens), "{about}");
                assert_eq!(engine.cancel(cancelled), None, "{about}");
                let mut events = Vec::new();
                if commits {
                    events = engine.forward(&mut model).expect("ends");
                } else {
                    engine.roll_back();
                }
                while engine.has_work() {
                    events.extend(engine.step(&mut model).expect("runs"));
                }
                assert_eq!(usage(&engine), (0, 0), "{about}");
                assert!(tokens_of(&events, cancelled).is_empty(), "{about}");
                let ends = events.iter().filter_map(|event| match event {
                    Event::Finished { index, generated } => {
                        assert_eq!(generated.tokens, expected(&prompts[*index], 9), "{about}");
                        Some(*index)
                    }
                    _ => None,
                });
                assert_eq!(ends.count(), 3, "{about}");
            }
        }
    }
}

#[test]
fn an_engine_that_ends_with_a_step_gives_all_blocks_back() {
    let mut engine = Engine::new(cache(4, 40), limits(3, 20));
    for request in requests(&prompts(4), 9) {
        engine.submit(request).expect("fits");
    }
    engine.step(Echo::certain()).expect("runs");
    engine.begin_step().expect("begins").expect("work");
    let cache = engine.into_cache();
    assert_eq!((cache.state().is_step_open(), cache.state().usage().blocks_used), (false, 0));
}

#[test]
fn a_step_without_its_layers_is_refused_and_repeated() {
    let mut engine = Engine::new(cache(4, 40), limits(3, 20));
    engine.submit(Request::new(vec![1, 2, 3], 2)).expect("fits");
    engine.begin_step().expect("begins").expect("work");
    let refused = engine.end_step(Logits::new(certain(3), VOCAB)).expect_err("nothing is written");
    let EngineError::Cache(CacheError::Plan(PlanError::LayersUnwritten { .. })) = refused else {
        panic!("{refused}");
    };
    assert_eq!(usage(&engine), (0, 0));
    let (generated, _) = engine.run(Echo::certain(), Vec::new()).expect("goes on");
    assert_eq!(generated[0].tokens, expected(&[1, 2, 3], 2));
}
