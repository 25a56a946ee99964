//! Models and devices that fail at any step: the step is rolled back, no block is lost, and the
//! texts are those of a run without a failure.
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::*;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    Error,
    Panic,
    PanicAfterWriting,
    NoLayers,
    TooFewRows,
    TooManyRows,
    NarrowRows,
    NotANumber,
}

const FAULTS: [Fault; 8] = [
    Fault::Error,
    Fault::Panic,
    Fault::PanicAfterWriting,
    Fault::NoLayers,
    Fault::TooFewRows,
    Fault::TooManyRows,
    Fault::NarrowRows,
    Fault::NotANumber,
];

/// A model that fails in one of its calls.
struct Faulty {
    model: Echo,
    fault: Fault,
    /// Calls until then.
    after: usize,
}

impl<B: Backend> Model<B> for Faulty {
    fn forward(&mut self, step: &mut Step<'_, B>, batch: &Batch) -> Result<Logits, ModelError> {
        let is_now = self.after == 0;
        self.after = self.after.wrapping_sub(1);
        if !is_now {
            return self.model.forward(step, batch);
        }
        match self.fault {
            Fault::Error => return Err("out of luck".into()),
            Fault::Panic => panic!("on purpose"),
            Fault::NoLayers => {
                let values = vec![0.5; to_usize(batch.num_logits() * VOCAB)];
                return Ok(Logits::new(values, VOCAB));
            }
            _ => {}
        }
        let mut values = self.model.forward(step, batch)?.values().to_vec();
        let rows = to_usize(batch.num_logits());
        match self.fault {
            Fault::PanicAfterWriting => panic!("on purpose"),
            Fault::TooFewRows => values.truncate(rows.saturating_sub(1) * to_usize(VOCAB)),
            Fault::TooManyRows => values.extend([0.5; 50]),
            Fault::NarrowRows => return Ok(Logits::new(vec![0.5; rows * 49], 49)),
            _ => values.fill(f32::NAN),
        }
        Ok(Logits::new(values, VOCAB))
    }
}

fn usage<B: Backend>(engine: &Engine<B>) -> (u32, u32) {
    let usage = engine.cache().state().usage();
    (usage.sequences, usage.blocks_used)
}

/// Requests of every kind: sampled, with choices, with beams; more than run at once.
fn submit_all<B: Backend>(engine: &mut Engine<B>) {
    let prompts = prompts(4);
    for (index, prompt) in prompts.iter().enumerate() {
        let sampler = Sampler::new(0.7, 5, index);
        let request = Request { sampler, ..Request::new(prompt.clone(), 6) };
        engine.submit_choices(request, vec![Sampler::new(0.7, 6, index)]).expect("fits");
    }
    let beams = Some(BeamOptions { width: 2, length_penalty: 1.0 });
    engine.submit(Request { beams, ..Request::new(prompts[3].clone(), 5) }).expect("fits");
}

fn texts(events: &[Event]) -> Vec<(usize, Vec<u32>)> {
    let mut texts: Vec<_> = events
        .iter()
        .filter_map(|event| match event {
            Event::Finished { index, generated } => Some((*index, generated.tokens.clone())),
            _ => None,
        })
        .collect();
    texts.sort();
    texts
}

#[test]
fn a_fault_at_any_step_changes_no_text() {
    let run = |fault: Fault, after: usize| {
        let mut engine = Engine::new(cache(4, 24), limits(5, 24));
        submit_all(&mut engine);
        let mut model = Faulty { model: Echo::new(rough), fault, after };
        let (mut events, mut failures) = (Vec::new(), 0);
        while engine.has_work() {
            let before = (usage(&engine), engine.queued());
            let preemptions = engine.stats().preemptions;
            match catch_unwind(AssertUnwindSafe(|| engine.step(&mut model))) {
                Ok(Ok(more)) => events.extend(more),
                failed => {
                    failures += 1;
                    assert_eq!(failed.is_err(), fault.to_owned_panics(), "{fault:?} {after}");
                    if engine.stats().preemptions == preemptions {
                        assert_eq!((usage(&engine), engine.queued()), before, "{fault:?} {after}");
                    }
                    assert!(!engine.cache().state().is_step_open());
                }
            }
        }
        assert_eq!(usage(&engine), (0, 0), "{fault:?} {after}");
        (texts(&events), failures)
    };
    let (expected, none) = run(Fault::Error, usize::MAX);
    assert_eq!((expected.len(), none), (9, 0));
    for fault in FAULTS {
        let mut at_any = 0;
        for after in 0..12 {
            let (texts, failures) = run(fault, after);
            assert_eq!(texts, expected, "{fault:?} {after}");
            at_any += failures;
        }
        // A step without rows has none to be wrong.
        assert!(at_any >= 8, "{fault:?}: {at_any}");
    }
}

impl Fault {
    fn to_owned_panics(self) -> bool {
        matches!(self, Self::Panic | Self::PanicAfterWriting)
    }
}

#[test]
fn the_error_of_a_model_comes_out_as_it_was() {
    let mut engine = Engine::new(cache(4, 24), limits(5, 24));
    engine.submit(Request::new(vec![1, 2], 3)).expect("fits");
    let fault = Faulty { model: Echo::new(rough), fault: Fault::Error, after: 0 };
    let error = engine.step(fault).expect_err("fails");
    assert!(matches!(error, EngineError::Model(_)));
    assert_eq!(error.to_string(), "out of luck");
}

/// A request that always breaks the model is cancelled, and the others go on.
#[test]
fn one_bad_request_can_be_cancelled() {
    let prompts = prompts(3);
    let mut engine = Engine::new(cache(4, 100), limits(4, 100));
    for request in requests(&prompts, 5) {
        engine.submit(request).expect("fits");
    }
    let bad = engine.submit(Request::new(vec![49, 49], 5)).expect("fits");
    let mut model = Echo::new(|history| match history {
        [49, ..] => vec![f32::NAN; 50],
        _ => certain(next(history)),
    });
    let mut done = 0;
    while engine.has_work() {
        match engine.step(&mut model) {
            Ok(events) => done += texts(&events).len(),
            Err(EngineError::Output(kv_engine::OutputError::NotFinite { request })) => {
                assert_eq!(request, bad);
                assert!(engine.cancel(request).is_some());
            }
            Err(other) => panic!("{other}"),
        }
    }
    assert_eq!((done, usage(&engine)), (3, (0, 0)));
}

#[test]
fn a_device_that_fails_anywhere_loses_no_block() {
    let spec = || {
        let spec = CacheSpec::builder().layers(LAYERS).kv_heads(1).head_dim(1).paged(4, 24);
        let spec = spec.publish_at(PublishAt::Begin).wipe_on_release(true);
        spec.build().expect("spec")
    };
    let mut failed = [0, 0];
    for after in 0..150 {
        let backend = NullBackend::new();
        let control = backend.control();
        let mut engine = Engine::new(KvCache::new(backend, spec()).expect("cache"), limits(5, 24));
        submit_all(&mut engine);
        control.fail_after(after);
        let mut ended = 0;
        while engine.has_work() {
            match engine.step(Blind::default()) {
                Ok(events) => ended += texts(&events).len(),
                Err(EngineError::Cache(CacheError::Device(_))) => failed[0] += 1,
                Err(EngineError::Model(error)) => {
                    assert!(matches!(error.downcast_ref(), Some(CacheError::Device(_))));
                    failed[1] += 1;
                }
                Err(other) => panic!("{other}"),
            }
        }
        assert_eq!((ended, usage(&engine)), (9, (0, 0)), "after {after}");
    }
    assert!(failed[0] > 20 && failed[1] > 20, "{failed:?}");
}
