//! Logits and tokens that do not fit the step: each is refused with its reason, the step is rolled
//! back, and the next step repeats it.
use kv_engine::{Chosen, Output, OutputError};

use super::*;

/// Begins a step of two requests, ends it with the output of `make`, and runs both to their end.
fn refused(make: impl Fn(&Batch) -> Output) -> OutputError {
    let prompts = [vec![1, 2, 3, 4, 5], vec![7, 8]];
    let mut engine = Engine::new(cache(4, 40), limits(4, 100));
    let mut model = Echo::certain();
    for request in requests(&prompts, 6) {
        engine.submit(request).expect("fits");
    }
    engine.step(&mut model).expect("runs");
    let before = engine.cache().state().usage();
    engine.begin_step().expect("begins").expect("work");
    let computed = engine.with_step(|step, batch| model.forward(step, batch).map(|_| make(batch)));
    let output = computed.expect("held").expect("computed");
    let EngineError::Output(error) = engine.end_step(output).expect_err("refused") else {
        panic!("another error");
    };
    let after = engine.cache().state().usage();
    assert_eq!((after.blocks_used, after.sequences), (before.blocks_used, before.sequences));
    let (generated, _) = engine.run(&mut model, Vec::new()).expect("goes on");
    for (generated, prompt) in generated.iter().zip(&prompts) {
        assert_eq!(generated.tokens, expected(prompt, 6), "after {error}");
    }
    error
}

fn rows(count: usize, width: u32) -> Output {
    Logits::new(vec![0.5; count * to_usize(width)], width).into()
}

#[test]
fn logits_of_another_shape_are_refused() {
    assert_eq!(refused(|_| rows(1, VOCAB)), OutputError::Rows { got: 1, expected: 2 });
    assert_eq!(refused(|_| rows(3, VOCAB)), OutputError::Rows { got: 3, expected: 2 });
    assert_eq!(refused(|_| rows(0, VOCAB)), OutputError::Rows { got: 0, expected: 2 });
    assert_eq!(refused(|_| rows(2, 51)), OutputError::Width { got: 51, expected: 50 });
    assert_eq!(refused(|_| rows(0, 0)), OutputError::Width { got: 0, expected: 50 });
    let ragged = |_: &Batch| Logits::new(vec![0.5; 99], VOCAB).into();
    assert_eq!(refused(ragged), OutputError::Ragged { values: 99, width: 50 });
}

#[test]
fn logits_that_are_not_finite_are_refused() {
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for (at, request) in [(0, 0), (49, 0), (50, 1), (99, 1)] {
            let make = |_: &Batch| {
                let mut values = vec![0.5; 100];
                values[at] = value;
                Logits::new(values, VOCAB).into()
            };
            assert_eq!(refused(make), OutputError::NotFinite { request });
        }
    }
}

/// Changes the tokens of the two chunks.
fn tokens(change: impl Fn(&mut Vec<Chosen>)) -> impl Fn(&Batch) -> Output {
    move |batch| {
        let chosen =
            batch.chunks.iter().map(|chunk| Chosen { sequence: chunk.sequence, tokens: vec![9] });
        let mut chosen = chosen.collect();
        change(&mut chosen);
        chosen.into()
    }
}

#[test]
fn tokens_of_another_batch_are_refused() {
    let error = refused(tokens(|chosen| drop(chosen.pop())));
    assert_eq!(error, OutputError::Chunks { got: 1, expected: 2 });
    let error = refused(tokens(|chosen| chosen.extend(chosen.clone())));
    assert_eq!(error, OutputError::Chunks { got: 4, expected: 2 });
    let error = refused(tokens(|chosen| chosen.reverse()));
    let [first, second] = [SequenceId(0), SequenceId(1)];
    assert_eq!(error, OutputError::Sequence { got: second, expected: first });
    let error = refused(tokens(|chosen| chosen[1].tokens.clear()));
    assert_eq!(error, OutputError::NumTokens { sequence: second, got: 0, max: 1 });
    let error = refused(tokens(|chosen| chosen[1].tokens.push(3)));
    assert_eq!(error, OutputError::NumTokens { sequence: second, got: 2, max: 1 });
    let error = refused(tokens(|chosen| chosen[0].tokens[0] = VOCAB));
    assert_eq!(error, OutputError::Vocabulary { sequence: first, token: 50, vocab: 50 });
}

#[test]
fn accepted_drafts_must_be_the_drafts() {
    let limits = Limits { draft_tokens: 3, ..limits(1, 100) };
    let mut engine = Engine::new(cache(4, 40), limits);
    let mut model = Echo::new(|_| certain(3));
    engine.submit(Request::new(vec![3; 9], 12)).expect("fits");
    engine.step(&mut model).expect("runs");
    engine.begin_step().expect("begins").expect("work");
    engine.with_step(|step, batch| model.forward(step, batch)).expect("held").expect("computed");
    let sequence = SequenceId(0);
    let tokens = vec![3, 4, 3];
    let refused = engine.end_step(vec![Chosen { sequence, tokens }]).expect_err("another token");
    let EngineError::Output(error) = refused else { panic!("{refused}") };
    assert_eq!(error, OutputError::NotTheDraft { sequence, got: 4, draft: 3 });
    let (generated, _) = engine.run(model, Vec::new()).expect("goes on");
    assert_eq!(generated[0].tokens, [3; 12]);
}

#[test]
fn beams_and_choices_need_logits() {
    let beams = Some(BeamOptions { width: 2, length_penalty: 1.0 });
    let of_beams = Request { beams, ..Request::new(vec![1, 2, 3], 4) };
    let choices = (Request::new(vec![1, 2, 3], 4), vec![Sampler::greedy()]);
    for (request, samplers) in [(of_beams, Vec::new()), choices] {
        let mut engine = Engine::new(cache(4, 40), limits(4, 100));
        engine.submit_choices(request, samplers).expect("fits");
        let mut model = Echo::new(rough);
        engine.begin_step().expect("begins").expect("work");
        engine
            .with_step(|step, batch| model.forward(step, batch))
            .expect("held")
            .expect("computed");
        let chosen = vec![Chosen { sequence: SequenceId(0), tokens: vec![9] }];
        let refused = engine.end_step(chosen).expect_err("tokens alone");
        let EngineError::Output(error) = refused else { panic!("{refused}") };
        assert_eq!(error, OutputError::LogitsNeeded { request: 0 });
        assert_eq!(engine.cache().state().usage().blocks_used, 0);
        let (generated, _) = engine.run(model, Vec::new()).expect("goes on");
        assert_eq!(generated[0].tokens.len(), 4);
    }
}

#[test]
fn a_prompt_outside_of_the_vocabulary_is_refused() {
    let mut engine = Engine::new(cache(4, 40), limits(4, 100));
    let refused = engine.submit(Request::new(vec![1, VOCAB], 4));
    assert_eq!(refused, Err(RequestError::Vocabulary { index: 0, token: 50, vocab: 50 }));
    assert!(!engine.has_work());
}
