//! Leaked steps: every call that takes the cache by `&mut` rolls them back first.
use super::*;
use crate::DType;
use crate::calibration::Calibration;
use crate::eviction::{Clock, Eviction, Priority, SystemClock};
use crate::spec::{PrefixReuse, PublishAt};

const PROMPT: [u32; 9] = [1, 2, 3, 4, 5, 6, 7, 8, 9];

type Call = fn(&mut KvCache<NullBackend>, Pin) -> String;

/// Creates two sequences of known tokens, and a pinned prefix of them.
fn settled() -> (KvCache<NullBackend>, Pin) {
    let spec = CacheSpec::builder().layers(2).kv_heads(1).head_dim(2).paged(4, 12);
    let spec = spec.publish_at(PublishAt::Begin).prefix_reuse(PrefixReuse::Partial).events(64);
    let mut cache = KvCache::new(NullBackend::new(), spec.build().unwrap()).unwrap();
    cache.start(SEQ[0], &PROMPT, StartOptions::default()).unwrap();
    let mut step = cache.begin_step(&[StepInput::tokens(SEQ[0], &PROMPT)]).unwrap();
    write_all(&mut step).unwrap();
    step.commit().unwrap();
    cache.fork(SEQ[0], SEQ[1]).unwrap();
    let pin = cache.pin_prefix(&PROMPT[..4], StartOptions::default());
    assert_eq!(pin.tokens, 4);
    (cache, pin)
}

/// Opens a step that allocates blocks, copies one, publishes another early, and starts a sequence.
fn open(cache: &mut KvCache<NullBackend>) -> Step<'_, NullBackend> {
    let inputs =
        [StepInput::tokens(SEQ[0], &[10, 11, 12, 13]), StepInput::tokens(SEQ[1], &[20, 21])];
    let mut step = cache.begin_step(&inputs).unwrap();
    let longer = [PROMPT.as_slice(), &[10, 11, 12, 13]].concat();
    let reused = step.start(SEQ[2], &longer, StartOptions::default()).unwrap();
    assert!(reused > 8, "{reused}");
    step
}

/// Returns everything visible of a cache, events included.
fn seen(cache: &mut KvCache<NullBackend>) -> String {
    let longer = [PROMPT.as_slice(), &[10, 11, 12, 13]].concat();
    let probes = [&PROMPT[..], &longer].map(|p| cache.state().probe(p, StartOptions::default()));
    let usage = Usage { blocks_peak: 0, ..cache.state().usage() };
    format!("{:?} {usage:?} {probes:?} {:?}", books(cache.state()), cache.state().snapshot())
}

#[test]
fn every_call_recovers_from_a_leaked_step() {
    let calls: [(&str, Call); 20] = [
        ("allocate_layer", |c, _| format!("{:?}", c.allocate_layer(0))),
        ("begin_step", |c, _| {
            let step = c.begin_step(&[StepInput::tokens(SEQ[0], &[10])]).unwrap();
            format!("{:?}", step.positions())
        }),
        ("start", |c, _| format!("{:?}", c.start(SEQ[2], &PROMPT, StartOptions::default()))),
        ("fork", |c, _| format!("{:?}", c.fork(SEQ[1], SEQ[2]))),
        ("truncate", |c, _| format!("{:?}", c.truncate(SEQ[0], 7))),
        ("release", |c, _| format!("{:?}", c.release(SEQ[0]))),
        ("reset", |c, _| format!("{:?}", c.reset())),
        ("preempt", |c, _| format!("{:?}", c.preempt(SEQ[1]))),
        ("gather", |c, _| {
            let mut out = [0.0_f32; 4];
            let out = TensorViewMut::host(&mut out, &[2, 1, 2]);
            let ranges = [(SEQ[0], 7, 2)];
            format!("{:?}", c.gather(0, crate::backend::Plane::Key, &ranges, out, Axes::Thd))
        }),
        ("pin_prefix", |c, _| format!("{:?}", c.pin_prefix(&PROMPT, StartOptions::default()))),
        ("unpin", |c, pin| format!("{:?}", c.unpin(pin.id))),
        ("forget_sequence", |c, _| format!("{:?}", c.forget_sequence(SEQ[0]))),
        ("forget_prefix", |c, _| {
            format!("{:?}", c.forget_prefix(&PROMPT, StartOptions::default(), 0))
        }),
        ("reset_prefixes", |c, _| format!("{:?}", c.reset_prefixes())),
        ("set_policy", |c, _| {
            let clock: Arc<dyn Clock> = Arc::new(SystemClock::new());
            format!("{:?}", c.set_policy(GroupId(0), Eviction::Lru.policy(12, &clock)))
        }),
        ("prioritise_prefix", |c, _| {
            let options = StartOptions::default();
            format!("{:?}", c.prioritise_prefix(&PROMPT, options, Priority::default()))
        }),
        ("hint", |c, _| format!("{:?}", c.hint(SEQ[2], None))),
        ("take_events", |c, _| format!("{}", c.take_events().is_empty())),
        ("recalibrate", |c, _| {
            let layers = vec![crate::calibration::LayerCalibration::default(); 2];
            format!("{:?}", c.recalibrate(Calibration::new(layers)))
        }),
        ("queue_mut", |c, _| {
            let buffer = c.backend().alloc(to_u64(DType::F32.size())).unwrap();
            format!("{:?}", c.queue_mut().zero(&buffer, 0, 4))
        }),
    ];
    for (name, call) in calls {
        let (mut leaked, pin) = settled();
        std::mem::forget(open(&mut leaked));
        let (mut dropped, same_pin) = settled();
        drop(open(&mut dropped));
        assert_eq!(call(&mut leaked, pin), call(&mut dropped, same_pin), "{name}");
        assert!(!leaked.state().is_step_open(), "{name}");
        check_invariants(leaked.state());
        assert_eq!(seen(&mut leaked), seen(&mut dropped), "{name}");
        // The cache stays usable.
        for id in [SEQ[0], SEQ[3]] {
            if !leaked.state().contains(id) {
                leaked.start(id, &PROMPT, StartOptions::default()).unwrap();
            }
        }
        append(&mut leaked, &[(SEQ[0], 1), (SEQ[3], 2)]).unwrap();
        check_invariants(leaked.state());
    }
}

#[test]
fn a_written_step_that_is_leaked_is_rolled_back() {
    let (mut cache, _) = settled();
    let mut step = open(&mut cache);
    write_all(&mut step).unwrap();
    std::mem::forget(step);
    assert_eq!(cache.state().seq_len(SEQ[0]), Some(9));
    append(&mut cache, &[(SEQ[1], 1)]).unwrap();
    assert_eq!(cache.state().seq_len(SEQ[0]), Some(9));
    assert_eq!(cache.state().seq_len(SEQ[1]), Some(10));
    assert!(!cache.state().contains(SEQ[2]), "it began in the leaked step");
    check_invariants(cache.state());
}
