//! Slots of recurrent states: what a step takes, what a refusal says, and that none is lost.
use super::*;
use crate::DType;
use crate::block::BlockChangeKind;
use crate::cache::state::{Admission, BlockDemand};
use crate::error::BlocksExhausted;
use crate::events::{EventKind, Tier};
use crate::num::to_u32;
use crate::spec::{StateFormat, StatesBuilder};

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

fn with_snapshots(snapshots: u32) -> KvCache<NullBackend> {
    let spec = CacheSpec::builder().layers(3).kv_heads(1).head_dim(4).paged(4, 32);
    let states = |states: StatesBuilder| {
        states.part([3, 5], DType::F32).slots(7).snapshots(snapshots, StateFormat::F16)
    };
    let spec = spec.states([1], states).states([2], states).build().unwrap();
    KvCache::new(NullBackend::new(), spec).unwrap()
}

/// Computes the rest of a sequence's prompt in one step.
fn compute(cache: &mut KvCache<NullBackend>, sequence: SequenceId, tokens: &[u32]) {
    let mut step = cache.begin_step(&[StepInput::tokens(sequence, tokens)]).unwrap();
    step.mark_written();
    step.mark_state_written(1).unwrap();
    step.mark_state_written(2).unwrap();
    step.commit().unwrap();
}

#[test]
fn a_state_is_kept_while_its_sequence_goes_on() {
    let mut cache = with_snapshots(4);
    let text: Vec<u32> = (0..11).collect();
    cache.start(SEQ[0], &text, StartOptions::default()).unwrap();
    compute(&mut cache, SEQ[0], &text[..9]);
    let options = StartOptions::default();
    let probe = cache.state().probe_keys(&text, &options);
    assert_eq!(cache.state().find_snapshots(&probe, 10), None);
    cache.keep_state(SEQ[0]).unwrap();
    let (len, blocks) = cache.state().find_snapshots(&probe, 10).unwrap();
    assert_eq!((len, blocks.len()), (9, 2));
    assert_eq!([blocks[0].0, blocks[1].0], [GroupId(3), GroupId(4)]);
    assert_eq!(cache.state().find_snapshots(&probe, 8), None);
    cache.keep_state(SEQ[0]).unwrap();
    assert_eq!(cache.state().find_snapshots(&probe, u32::MAX).unwrap().1, blocks, "once");
    let salted = cache.state().probe_keys(&text, &options.with_salt(b"x"));
    assert_eq!(cache.state().find_snapshots(&salted, 10), None);
    let unknown = cache.keep_state(SEQ[1]).unwrap_err();
    assert!(matches!(unknown, CacheError::Plan(PlanError::UnknownSequence { .. })));
}

#[test]
fn states_are_imported_with_their_rows() {
    let text: Vec<u32> = (0..14).collect();
    let options = StartOptions::default();
    for len in 1..=13 {
        let mut cache = with_snapshots(2);
        let probe = cache.state().probe_keys(&text, &options);
        assert_eq!((probe.cached(), probe.limit()), (0, 13));
        let state = probe.state(len).unwrap();
        assert_eq!((state.begin, state.end), ((len - 1) / 4 * 4, len));
        let rows = len.div_ceil(4);
        let mut import = cache.reserve_import_with_state(&probe, len).unwrap();
        assert_eq!(import.blocks().len(), usize::try_from(rows + 2).unwrap());
        assert_eq!(cache.state().probe(&text, options), 0, "the bytes have not come");
        cache.publish_import(&mut import, len, Tier::Disk).unwrap();
        assert!(import.blocks().is_empty());
        assert_eq!(cache.state().probe(&text, options), len);
        assert_eq!(cache.start(SEQ[0], &text, options).unwrap(), len);
        cache.finish_import(import).unwrap();
        check_invariants(cache.state());
        compute(&mut cache, SEQ[0], &text[usize::try_from(len).unwrap()..]);
        // Everything is there: nothing is taken.
        let import = cache.reserve_import_with_state(&probe, len).unwrap();
        assert_eq!(import.blocks(), []);
        cache.finish_import(import).unwrap();
        // The rows alone are no use.
        let mut import = with_snapshots(2);
        let probe = import.state().probe_keys(&text, &options);
        let mut rows = import.reserve_import_with_part(&probe, len).unwrap();
        import.publish_import(&mut rows, len, Tier::Disk).unwrap();
        assert_eq!(import.state().probe(&text, options), 0);
        import.finish_import(rows).unwrap();
    }
}

#[test]
fn imports_without_room_for_a_state_are_refused() {
    let (text, options) = ([7; 9], StartOptions::default());
    let mut cache = with_snapshots(1);
    let probe = cache.state().probe_keys(&text, &options);
    let held = cache.reserve_import_with_state(&probe, 8).unwrap();
    let free = cache.state().free_blocks(GroupId(0));
    let refused = cache.reserve_import_with_state(&probe, 5).unwrap_err();
    let expected = BlocksExhausted { group: GroupId(3), needed: 1, free: 0, evictable: 0 };
    assert!(matches!(refused, CacheError::Exhausted(got) if got == expected), "{refused:?}");
    assert_eq!(cache.state().free_blocks(GroupId(0)), free);
    // An import that never publishes gives its blocks back.
    cache.finish_import(held).unwrap();
    assert_eq!(cache.state().free_blocks(GroupId(0)), 32);
    let import = cache.reserve_import_with_state(&probe, 5).unwrap();
    drop(import);
    assert_eq!(cache.finish_imports().unwrap(), 1);
    assert!(cache.reserve_import_with_state(&probe, 5).is_ok());
    assert_eq!(probe.state(0), None);
    assert_eq!(probe.state(9), None);
}

#[test]
fn a_short_hit_has_its_reason() {
    let mut cache = with_snapshots(8);
    let (text, options) = ((0..14).collect::<Vec<u32>>(), StartOptions::default());
    let hit = |cache: &KvCache<NullBackend>, text: &[u32]| {
        let hit = cache.state().explain_hit(text, StartOptions::default());
        assert_eq!(hit.tokens, cache.state().probe(text, StartOptions::default()));
        (hit.tokens, hit.to_string())
    };
    assert_eq!(hit(&cache, &text), (0, "attention 0, state 0".to_owned()));
    cache.start(SEQ[0], &text, options).unwrap();
    compute(&mut cache, SEQ[0], &text);
    assert_eq!(hit(&cache, &text), (0, "attention 12, state 0".to_owned()));
    cache.release(SEQ[0]).unwrap();
    let more = [&text[..], &[1, 2]].concat();
    assert_eq!(hit(&cache, &more), (14, "attention 14, state 14".to_owned()));
    let branch = [&text[..9], &[50, 51]].concat();
    assert_eq!(hit(&cache, &branch), (0, "attention 9, state 0".to_owned()));
    cache.start(SEQ[0], &branch, options).unwrap();
    let stats = cache.state().stats();
    assert_eq!((stats.stateless_tokens, stats.stored_snapshots), (9, 2));
    let rows = CacheSpec::builder().layers(1).kv_heads(1).head_dim(4).paged(4, 8).build().unwrap();
    let rows = KvCache::new(NullBackend::new(), rows).unwrap();
    assert_eq!(hit(&rows, &text), (0, "attention 0".to_owned()));
}

#[test]
fn groups_have_their_own_fill() {
    let mut cache = with_snapshots(3);
    let usage = |cache: &KvCache<NullBackend>, group| {
        let usage = cache.state().group_usage(GroupId(group))?;
        Some([usage.total, usage.used, usage.cached])
    };
    assert_eq!(usage(&cache, 0), Some([32, 0, 0]));
    cache.start(SEQ[0], &[5; 9], StartOptions::default()).unwrap();
    compute(&mut cache, SEQ[0], &[5; 9]);
    assert_eq!([usage(&cache, 0), usage(&cache, 1)], [Some([32, 3, 0]), Some([7, 1, 0])]);
    cache.release(SEQ[0]).unwrap();
    assert_eq!([usage(&cache, 1), usage(&cache, 2)], [Some([7, 0, 0]); 2]);
    assert_eq!([usage(&cache, 3), usage(&cache, 4)], [Some([3, 0, 1]); 2]);
    cache.start(SEQ[0], &[5; 12], StartOptions::default()).unwrap();
    assert_eq!(usage(&cache, 4), Some([3, 1, 0]), "a sequence goes on from it");
    assert_eq!(usage(&cache, 5), None);
}

#[test]
fn snapshots_are_announced_as_groups_of_their_own() {
    let spec = CacheSpec::builder().layers(2).kv_heads(1).head_dim(4).paged(4, 32).events(64);
    let spec = spec
        .changes(64)
        .states([1], |states| states.part([3], DType::F32).slots(4).snapshots(1, StateFormat::F16));
    let mut cache = KvCache::new(NullBackend::new(), spec.build().unwrap()).unwrap();
    let mut known = std::collections::BTreeSet::new();
    for first in 0..3 {
        let text: Vec<u32> = (0..6).map(|at| first * 100 + at).collect();
        cache.start(SEQ[0], &text, StartOptions::default()).unwrap();
        let mut step = cache.begin_step(&[StepInput::tokens(SEQ[0], &text)]).unwrap();
        write_states(&mut step);
        step.commit().unwrap();
        cache.release(SEQ[0]).unwrap();
        for event in cache.take_events() {
            match event.kind {
                EventKind::Stored(of) if of.group == GroupId(2) => {
                    assert_eq!((of.index, &of.tokens[..]), (1, &text[4..]));
                    assert!(known.insert(of.key));
                }
                EventKind::Removed { group: GroupId(2), key, .. } => assert!(known.remove(&key)),
                EventKind::Stored(of) => assert_eq!((of.group, of.tokens.len()), (GroupId(0), 4)),
                other => panic!("{other:?}"),
            }
        }
        let snapshot = cache.state().snapshot();
        let states = snapshot.blocks.iter().filter(|of| of.group == GroupId(2));
        assert_eq!(states.map(|of| of.key).collect::<std::collections::BTreeSet<_>>(), known);
        assert_eq!(known.len(), 1, "there is room for one");
    }
    assert_eq!(cache.state().stats().evicted_snapshots, 2);
    let mut changes = Vec::new();
    assert!(cache.drain_changes(&mut changes));
    let of_group = |group| changes.iter().filter(move |of| of.group == group).map(|of| of.kind);
    assert_eq!(of_group(GroupId(0)).collect::<Vec<_>>(), [BlockChangeKind::Stored; 3]);
    let [stored, removed] = [BlockChangeKind::Stored, BlockChangeKind::Removed];
    let expected = [stored, removed, stored, removed, stored];
    assert_eq!(of_group(GroupId(2)).collect::<Vec<_>>(), expected);
}

#[test]
fn a_path_has_no_more_snapshots_than_its_bound() {
    let spec = CacheSpec::builder().layers(2).kv_heads(1).head_dim(4).paged(4, 64);
    let spec = spec.states([1], |states| {
        let states = states.part([3], DType::F32).slots(4).snapshots(40, StateFormat::F16);
        states.snapshots_per_path(3)
    });
    let spec = spec.build().unwrap();
    assert_eq!(spec.states()[0].snapshots().unwrap().per_path(), Some(3));
    let mut cache = KvCache::new(NullBackend::new(), spec).unwrap();
    let run = |cache: &mut KvCache<NullBackend>, text: &[u32], stops: &[u32]| {
        let options = StartOptions::default().with_stops(stops);
        let mut at = cache.start(SEQ[0], text, options).unwrap();
        let reused = at;
        while at < to_u32(text.len()) {
            let end = cache.state().next_stop(SEQ[0]).unwrap_or(to_u32(text.len()));
            let range = usize::try_from(at).unwrap()..usize::try_from(end).unwrap();
            let new = &text[range];
            let mut step = cache.begin_step(&[StepInput::tokens(SEQ[0], new)]).unwrap();
            write_states(&mut step);
            step.commit().unwrap();
            at = end;
        }
        cache.release(SEQ[0]).unwrap();
        reused
    };
    let text: Vec<u32> = (0..30).collect();
    let has = |cache: &KvCache<NullBackend>| -> Vec<u32> {
        let probe = cache.state().probe_keys(&[&text[..], &[0]].concat(), &StartOptions::default());
        let mut limit = 30;
        let mut all = Vec::new();
        while let Some((at, _)) = cache.state().find_snapshots(&probe, limit) {
            all.insert(0, at);
            limit = at - 1;
        }
        all
    };
    run(&mut cache, &text[..10], &[3, 5, 7]);
    assert_eq!(has(&cache), [7, 9, 10]);
    // Two other texts go on from 7, so that it stays; 10 has one.
    for other in [100, 200] {
        assert_eq!(run(&mut cache, &[&text[..7], &[other, other + 1]].concat(), &[]), 7);
    }
    assert_eq!(run(&mut cache, &text[..20], &[]), 10);
    assert_eq!(has(&cache), [7, 19, 20]);
    assert_eq!(run(&mut cache, &text[..25], &[]), 20);
    assert_eq!(has(&cache), [7, 24, 25]);
    assert!(cache.state().group_usage(GroupId(2)).unwrap().cached > 5, "others keep theirs");
}

#[test]
fn snapshots_have_a_pool_and_slots_have_none() {
    let spec = CacheSpec::builder().layers(2).kv_heads(1).head_dim(2).paged(4, 32);
    let spec = spec.states([1], |states| {
        states.part([2, 2], DType::F32).slots(3).snapshots(5, StateFormat::F16)
    });
    let mut cache = KvCache::new(NullBackend::new(), spec.build().unwrap()).unwrap();
    cache.start(SEQ[0], &[1, 2, 3], StartOptions::default()).unwrap();
    let mut step = cache.begin_step(&[StepInput::tokens(SEQ[0], &[1, 2, 3])]).unwrap();
    write_states(&mut step);
    step.commit().unwrap();
    let idle = |cache: &KvCache<NullBackend>, group| {
        cache.state().pool(GroupId(group)).map(|pool| (pool.num_blocks(), pool.num_idle()))
    };
    assert_eq!(idle(&cache, 2), Some((5, 0)));
    cache.release(SEQ[0]).unwrap();
    // The state behind the whole text.
    assert_eq!(idle(&cache, 2), Some((5, 1)));
    assert_eq!((idle(&cache, 1), idle(&cache, 3)), (None, None));
}
