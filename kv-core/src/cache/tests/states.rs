//! Slots of recurrent states: what a step takes, what a refusal says, and that none is lost.
use super::*;
use crate::DType;
use crate::cache::state::{Admission, BlockDemand};
use crate::error::BlocksExhausted;
use crate::spec::StateFormat;

const STATES: GroupId = GroupId(1);

fn cache(slots: u32, drafts: u32) -> KvCache<NullBackend> {
    let spec = CacheSpec::builder().layers(2).kv_heads(1).head_dim(2).paged(4, 32);
    let spec =
        spec.states([1], |states| states.part([2, 2], DType::F32).slots(slots).drafts(drafts));
    KvCache::new(NullBackend::new(), spec.build().unwrap()).unwrap()
}

fn write_states(step: &mut Step<'_, NullBackend>) {
    step.mark_written();
    step.mark_state_written(1).unwrap();
}

/// Returns the slots that an entry of one token would take, and those that are free.
fn demand(cache: &KvCache<NullBackend>, sequence: SequenceId, drafts: u32) -> BlockDemand {
    let input = StepInput::count(sequence, 4).with_drafts(drafts);
    cache.state().blocks_for_step(STATES, &[input]).unwrap()
}

#[test]
fn a_scheduler_sees_the_slots() {
    let mut cache = cache(5, 2);
    cache.start(SEQ[0], &[], StartOptions::default()).unwrap();
    assert_eq!(demand(&cache, SEQ[0], 0), BlockDemand { needed: 1, free: 5 });
    assert_eq!(demand(&cache, SEQ[0], 2), BlockDemand { needed: 3, free: 5 });
    let mut step = cache.begin_step(&[StepInput::count(SEQ[0], 4).with_drafts(2)]).unwrap();
    write_states(&mut step);
    step.commit_accepted(&[3]).unwrap();
    assert_eq!(demand(&cache, SEQ[0], 2), BlockDemand { needed: 3, free: 4 });
    cache.fork(SEQ[0], SEQ[1]).unwrap();
    assert_eq!(demand(&cache, SEQ[1], 0).free, 4, "a fork shares the slot");

    let admit = |cache: &KvCache<NullBackend>, slots| {
        let admission = Admission::default().with_free_slots(slots).with_watermark(slots);
        cache.state().check_admission(&[1, 2], StartOptions::default(), &admission)
    };
    assert_eq!(admit(&cache, 3).unwrap(), 0);
    let refused = admit(&cache, 4).unwrap_err();
    let expected = BlocksExhausted { group: STATES, needed: 5, free: 4, evictable: 0 };
    assert!(matches!(refused, CacheError::Exhausted(got) if got == expected), "{refused:?}");

    cache.release(SEQ[0]).unwrap();
    assert_eq!(demand(&cache, SEQ[1], 0).free, 4);
    cache.truncate(SEQ[1], 0).unwrap();
    assert_eq!(demand(&cache, SEQ[1], 0).free, 5);
}

#[test]
fn no_step_loses_a_slot() {
    let mut cache = cache(6, 1);
    for sequence in [SEQ[0], SEQ[1]] {
        cache.start(sequence, &[], StartOptions::default()).unwrap();
    }
    let input = |sequence| StepInput::count(sequence, 2).with_drafts(1);
    let ends: [fn(Step<'_, NullBackend>); 5] = [
        |step| drop(step),
        |step| step.roll_back(),
        |step| std::mem::forget(step),
        |step| assert!(step.commit().is_err(), "nothing was written"),
        |step| assert!(step.commit_accepted(&[1]).is_err(), "of another length"),
    ];
    for end in ends {
        end(cache.begin_step(&[input(SEQ[0]), input(SEQ[1])]).unwrap());
        cache.wipe().unwrap();
        assert_eq!(demand(&cache, SEQ[0], 0).free, 6);
    }
    // An entry that is refused after others takes its slots back alone.
    let mut step = cache.begin_step(&[input(SEQ[0])]).unwrap();
    let too_long = step.add(StepInput::count(SEQ[1], 1000).with_drafts(1));
    assert!(too_long.is_err());
    step.add(input(SEQ[1])).unwrap();
    let twice = step.add(input(SEQ[1]));
    assert!(matches!(twice, Err(CacheError::Plan(PlanError::DuplicateSequence { .. }))));
    write_states(&mut step);
    step.commit().unwrap();
    assert_eq!(demand(&cache, SEQ[0], 0).free, 4);
    cache.reset().unwrap();
    cache.start(SEQ[0], &[], StartOptions::default()).unwrap();
    assert_eq!(demand(&cache, SEQ[0], 0).free, 6);
}

#[test]
fn a_length_without_a_state_is_refused() {
    let mut cache = cache(4, 0);
    cache.start(SEQ[0], &[], StartOptions::default()).unwrap();
    let mut step = cache.begin_step(&[StepInput::count(SEQ[0], 7)]).unwrap();
    write_states(&mut step);
    step.commit().unwrap();
    let refused = cache.truncate(SEQ[0], 5).unwrap_err();
    let expected = PlanError::StateMissing { sequence: SEQ[0], asked: 5, shorter: 0, longer: 7 };
    assert!(matches!(refused, CacheError::Plan(got) if got == expected));
    assert_eq!(cache.state().seq_len(SEQ[0]), Some(7));
    cache.truncate(SEQ[0], 7).unwrap();
    // A step that keeps nothing of it leaves the state.
    let mut step = cache.begin_step(&[StepInput::count(SEQ[0], 1)]).unwrap();
    let slot = step.state_slots(1).unwrap().read(0);
    step.mark_written();
    step.commit_accepted(&[0]).unwrap();
    let step = cache.begin_step(&[StepInput::count(SEQ[0], 1)]).unwrap();
    assert_eq!(step.state_slots(1).unwrap().read(0), slot);
}

#[test]
fn stops_are_added_to_running_sequences() {
    let spec = CacheSpec::builder().layers(2).kv_heads(1).head_dim(4).paged(4, 32);
    let spec = spec.states([1], |states| {
        let states = states.part([3, 5], DType::F32).slots(7);
        states.snapshots(8, StateFormat::F16).grid(3)
    });
    let spec = spec.build().unwrap();
    assert_eq!((spec.max_sequences(), spec.max_sequences_in_step()), (7, 3));
    let mut cache = KvCache::new(NullBackend::new(), spec).unwrap();
    assert_eq!([2, 3, 11].map(|len| cache.state().kept_length(len)), [0, 3, 9]);
    cache.start(SEQ[0], &[5; 20], StartOptions::default().with_stops(&[7])).unwrap();
    let next = |cache: &KvCache<NullBackend>| cache.state().next_stop(SEQ[0]);
    assert_eq!(next(&cache), Some(6));
    for len in [13, 5, 4, 2, 0] {
        cache.add_stop(SEQ[0], len).unwrap();
    }
    let mut stops = Vec::new();
    while let Some(stop) = next(&cache) {
        stops.push(stop);
        let new = stop - cache.state().seq_len(SEQ[0]).unwrap();
        let mut step = cache.begin_step(&[StepInput::count(SEQ[0], new)]).unwrap();
        write_states(&mut step);
        step.commit().unwrap();
    }
    assert_eq!(stops, [3, 6, 12, 18]);
    cache.add_stop(SEQ[0], 18).unwrap();
    assert_eq!(next(&cache), None, "it is there already");
    let unknown = cache.add_stop(SEQ[1], 4).unwrap_err();
    assert!(matches!(unknown, CacheError::Plan(PlanError::UnknownSequence { .. })));
    // Nothing of a sequence without reuse is kept.
    cache.start(SEQ[1], &[5; 20], StartOptions::default().with_reuse(false)).unwrap();
    cache.add_stop(SEQ[1], 9).unwrap();
    assert_eq!(cache.state().next_stop(SEQ[1]), None);
    cache.begin_step(&[]).unwrap().hold();
    let held = cache.add_stop(SEQ[0], 20).unwrap_err();
    assert!(matches!(held, CacheError::Plan(PlanError::State { .. })), "{held:?}");
}
