//! Steps that are held between calls.
use std::panic::AssertUnwindSafe;

use super::*;
use crate::backend::Plane;
use crate::calibration::Calibration;
use crate::error::StateProblem;
use crate::eviction::{Clock, Eviction, Priority, SystemClock};

const PROMPT: [u32; 6] = [1, 2, 3, 4, 5, 6];

/// Creates a sequence of known tokens, and a pin on its first block.
fn settled() -> (KvCache<NullBackend>, Pin) {
    let mut cache = cache(4, 8);
    cache.start(SEQ[0], &PROMPT, StartOptions::default()).unwrap();
    let mut step = cache.begin_step(&[StepInput::tokens(SEQ[0], &PROMPT)]).unwrap();
    write_all(&mut step).unwrap();
    step.commit().unwrap();
    let pin = cache.pin_prefix(&PROMPT, StartOptions::default());
    assert_eq!(pin.tokens, 4);
    (cache, pin)
}

fn hold(cache: &mut KvCache<NullBackend>, tokens: u32) {
    cache.begin_step(&[StepInput::count(SEQ[0], tokens)]).unwrap().hold();
}

/// Writes all layers of the held step, and holds it again.
fn write_held(cache: &mut KvCache<NullBackend>) -> Result<(), CacheError> {
    let mut step = cache.held().unwrap();
    write_all(&mut step)?;
    step.hold();
    Ok(())
}

#[test]
fn a_held_step_is_written_call_by_call() {
    let (mut cache, _) = settled();
    hold(&mut cache, 3);
    for layer in 0..2 {
        assert_eq!(cache.state().seq_len(SEQ[0]), Some(6), "lengths are those before the step");
        let mut step = cache.held().unwrap();
        assert_eq!(step.positions(), [6, 7, 8]);
        let rows = [0.0_f32; 6];
        let rows = TensorView::host(&rows, &[3, 1, 2]);
        step.write(layer, rows, rows, Axes::Thd).unwrap();
        step.hold();
        assert!(cache.state().is_step_open());
    }
    cache.held().unwrap().commit().unwrap();
    assert_eq!(cache.state().seq_len(SEQ[0]), Some(9));
    assert!(cache.held().is_none());
    check_invariants(cache.state());
}

/// Fails in the middle of a forward pass.
fn panics(cache: &mut KvCache<NullBackend>) {
    let step = cache.held();
    assert!(step.is_none(), "a model panics");
}

#[test]
fn a_held_step_can_end_in_every_way() {
    type End = fn(&mut KvCache<NullBackend>);
    let ends: [(End, u32); 6] = [
        (|c| c.held().unwrap().commit().unwrap(), 9),
        (|c| c.held().unwrap().commit_accepted(&[2]).unwrap(), 8),
        (|c| c.held().unwrap().roll_back(), 6),
        (|c| drop(c.held()), 6),
        (|c| std::mem::forget(c.held()), 6),
        (|c| assert!(std::panic::catch_unwind(AssertUnwindSafe(|| panics(c))).is_err()), 6),
    ];
    for (end, len) in ends {
        let (mut cache, _) = settled();
        hold(&mut cache, 3);
        write_held(&mut cache).unwrap();
        end(&mut cache);
        assert!(cache.held().is_none());
        assert_eq!(
            (cache.state().seq_len(SEQ[0]), cache.state().is_step_open()),
            (Some(len), false)
        );
        append(&mut cache, &[(SEQ[0], 1)]).unwrap();
        check_invariants(cache.state());
    }
}

#[test]
fn a_held_step_whose_commit_fails_is_rolled_back() {
    type Commit = fn(&mut KvCache<NullBackend>) -> Result<(), CacheError>;
    let commits: [(Commit, &str); 4] = [
        (
            |cache| cache.held().unwrap().commit(),
            "layer 0 and 1 more layer were not written in this step",
        ),
        (
            |cache| {
                write_held(cache)?;
                cache.held().unwrap().commit_accepted(&[1, 1])
            },
            "numbers of accepted tokens: expected 1 entries, got 2",
        ),
        (
            |cache| {
                write_held(cache)?;
                cache.backend().control().fail_after(0);
                cache.held().unwrap().commit()
            },
            "flush",
        ),
        (|cache| cache.held().unwrap().commit(), "layer 0 and"),
    ];
    let (mut cache, _) = settled();
    let before = books(cache.state());
    for (commit, text) in commits {
        hold(&mut cache, 3);
        let failed = commit(&mut cache).unwrap_err().to_string();
        assert!(failed.contains(text), "{failed}");
        assert!(!cache.state().is_step_open(), "{text}");
        assert_eq!(books(cache.state()), before);
    }
    assert!(cache.held().is_none());
}

#[test]
fn calls_that_a_held_step_could_not_undo_are_refused() {
    type Call = fn(&mut KvCache<NullBackend>, Pin) -> Result<(), CacheError>;
    let calls: [(&str, Call); 13] = [
        ("begin_step", |c, _| c.begin_step(&[]).map(drop)),
        ("start", |c, _| c.start(SEQ[1], &PROMPT, StartOptions::default()).map(drop)),
        ("fork", |c, _| c.fork(SEQ[0], SEQ[1])),
        ("truncate", |c, _| c.truncate(SEQ[0], 1)),
        ("release", |c, _| c.release(SEQ[0])),
        ("preempt", |c, _| c.preempt(SEQ[0])),
        ("reset", |c, _| c.reset()),
        ("unpin", |c, pin| c.unpin(pin.id).map(drop)),
        ("forget_sequence", |c, _| c.forget_sequence(SEQ[0]).map(drop)),
        ("forget_prefix", |c, _| c.forget_prefix(&PROMPT, StartOptions::default(), 0).map(drop)),
        ("reset_prefixes", |c, _| c.reset_prefixes().map(drop)),
        ("gather", |c, _| {
            let mut out = [0.0_f32; 4];
            let out = TensorViewMut::host(&mut out, &[2, 1, 2]);
            c.gather(0, Plane::Key, &[(SEQ[0], 0, 2)], out, Axes::Thd)
        }),
        ("recalibrate", |c, _| {
            let layers = vec![crate::calibration::LayerCalibration::default(); 2];
            c.recalibrate(Calibration::new(layers))
        }),
    ];
    let (mut cache, pin) = settled();
    hold(&mut cache, 3);
    let (before, recorded) = (books(cache.state()), cache.backend().control().recorded());
    for (name, call) in calls {
        let refused = call(&mut cache, pin).unwrap_err();
        let CacheError::Plan(PlanError::State { problem, .. }) = refused else {
            panic!("{name}: {refused}")
        };
        assert_eq!(problem, StateProblem::StepOpen, "{name}");
        assert_eq!(books(cache.state()), before, "{name}");
    }
    assert_eq!(cache.backend().control().recorded(), recorded, "nothing was recorded");
    assert_eq!(cache.state().stats().preemptions, 0);
    write_held(&mut cache).unwrap();
    cache.held().unwrap().commit().unwrap();
    for (name, call) in calls.into_iter().filter(|(name, _)| *name == "gather") {
        call(&mut cache, pin).expect(name);
    }
    check_invariants(cache.state());
}

#[test]
fn calls_that_a_held_step_allows_leave_it_open() {
    let (mut cache, _) = settled();
    hold(&mut cache, 3);
    let before = books(cache.state());
    cache.queue_mut();
    assert!(!cache.allocate_layer(0).unwrap());
    let options = StartOptions::default;
    assert_eq!(cache.prioritise_prefix(&PROMPT, options(), Priority::default()), 4);
    let clock: Arc<dyn Clock> = Arc::new(SystemClock::new());
    let policy = Eviction::Lru.policy(8, &clock);
    assert!(!cache.set_policy(GroupId(0), policy), "something is cached");
    assert!(cache.take_events().is_empty());
    assert_eq!(books(cache.state()), before);
    assert_eq!(cache.pin_prefix(&PROMPT, options()).tokens, 4);
    assert_eq!(cache.state().probe(&PROMPT, options()), 4);
    // A step can start a sequence and add it to the batch.
    let mut step = cache.held().unwrap();
    assert_eq!(step.start(SEQ[1], &PROMPT, options()).unwrap(), 4);
    step.add(StepInput::tokens(SEQ[1], &PROMPT[4..])).unwrap();
    step.hold();
    write_held(&mut cache).unwrap();
    cache.wipe().unwrap();
    cache.held().unwrap().commit().unwrap();
    assert_eq!([SEQ[0], SEQ[1]].map(|s| cache.state().seq_len(s)), [Some(9), Some(6)]);
    check_invariants(cache.state());
}

#[test]
fn a_leaked_step_is_not_taken_for_a_held_one() {
    let (mut cache, _) = settled();
    let before = books(cache.state());
    let leak = |cache: &mut KvCache<NullBackend>| {
        std::mem::forget(cache.begin_step(&[StepInput::count(SEQ[0], 3)]).unwrap());
    };
    leak(&mut cache);
    assert!(cache.held().is_none());
    assert_eq!(books(cache.state()), before);
    leak(&mut cache);
    hold(&mut cache, 1);
    std::mem::forget(cache.held().unwrap());
    assert!(cache.held().is_none(), "it was leaked");
    assert_eq!(books(cache.state()), before);
}

/// A device that cannot open queues.
#[derive(Debug)]
struct Queueless(NullBackend);

impl Backend for Queueless {
    type Buffer = crate::backend::NullBuffer;
    type Queue = crate::backend::NullQueue;
    type HostPool = crate::backend::QueueHostPool<Self::Queue>;
    fn name(&self) -> &'static str {
        self.0.name()
    }
    fn capabilities(&self) -> &crate::backend::Capabilities {
        self.0.capabilities()
    }
    fn alloc(&self, bytes: u64) -> Result<Self::Buffer, DeviceError> {
        self.0.alloc(bytes)
    }
    fn queue(&self) -> Result<Self::Queue, DeviceError> {
        Err(DeviceError::new(DeviceErrorKind::Driver, "queue"))
    }
    fn host_pool(
        &self,
        storage: crate::storage::StorageView<'_, Self::Buffer>,
        shape: crate::backend::ChunkShape,
        chunks: u32,
    ) -> Result<Self::HostPool, DeviceError> {
        self.0.host_pool(storage, shape, chunks)
    }
}

#[test]
fn a_cache_runs_on_the_queue_of_its_caller() {
    let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(2).paged(4, 8).build().unwrap();
    let device = || Queueless(NullBackend::new());
    assert!(KvCache::new(device(), spec.clone()).is_err());
    let backend = NullBackend::new();
    let queue = backend.queue().unwrap();
    let mut cache = KvCache::builder(device(), spec).queue(queue).build().unwrap();
    let before = backend.control().recorded();
    cache.queue_mut().flush().unwrap();
    assert_eq!(backend.control().recorded(), before + 1);
}
