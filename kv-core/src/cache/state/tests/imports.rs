//! Imports: content that is brought instead of computed.
use super::*;
use crate::error::{BlocksExhausted, StateProblem};
use crate::events::{EventKind, Tier};
use crate::eviction::{Eviction, Priority, Retention, RetentionRange};
use crate::reuse::{BlockKey, ContentSpan};
use crate::spec::PrefixReuse;

fn probe(state: &CacheState, prompt: &[u32]) -> PrefixProbe {
    state.probe_keys(prompt, &StartOptions::default())
}

/// Returns the tokens of every block of a sequence, by the index.
fn contents(state: &CacheState, group: GroupId, sequence: SequenceId) -> Vec<u32> {
    let vacant = state.vacant_entries(sequence, group).unwrap();
    let blocks = state.block_table(sequence, group).unwrap().iter().zip(0..);
    let blocks = blocks.filter(|(_, at)| !vacant.contains(at));
    let pool = state.pool(group).unwrap();
    blocks.flat_map(|(block, _)| pool.content(*block).unwrap().tokens.to_vec()).collect()
}

fn problem(refused: impl Into<CacheError>) -> StateProblem {
    match refused.into() {
        CacheError::Plan(PlanError::State { problem, .. }) => problem,
        other => panic!("{other}"),
    }
}

#[test]
fn a_probe_lists_every_block_of_the_prompt() {
    let mut state = state(4, 8);
    let prompt = tokens(0..14);
    run(&mut state, SEQ[0], &prompt[..6]);
    let spans = [ContentSpan { begin: 6, len: 4, id: 9 }];
    let options = StartOptions::default().with_contents(&spans);
    let probe = state.probe_keys(&prompt, &options);
    assert_eq!(
        (probe.cached(), probe.limit(), probe.root()),
        (4, 13, BlockKey::root(0, b"", None))
    );
    assert_eq!([0, 3, 4, 11, 12, 13, 99].map(|upto| probe.hit(upto)), [0, 0, 4, 8, 12, 12, 12]);
    let blocks: Vec<_> = probe.blocks(GroupId(0)).collect();
    assert_eq!(blocks.len(), 3);
    let (mut parent, mut parts) = (probe.root(), Vec::new());
    for (block, index) in blocks.iter().zip(0_u32..) {
        assert_eq!((block.index, block.parent), (index, parent));
        assert_eq!((block.begin, block.end), (index * 4, index * 4 + 4));
        probe.contents(block, &mut parts);
        assert_eq!(parts.is_empty(), index == 0);
        parent = parent.child(probe.tokens(block), &parts);
        assert_eq!(block.key, parent);
        assert_eq!(block.cached.is_some(), index == 0);
    }
    assert_eq!(probe.needed(GroupId(0), 9).collect::<Vec<_>>(), blocks[..2]);
    assert_eq!(probe.blocks(GroupId(1)).chain(probe.needed(GroupId(1), 9)).count(), 0);
    // A namespace that nothing is in has keys all the same.
    let salted = state.probe_keys(&prompt, &options.with_salt(b"x").with_adapter(2));
    assert_eq!((salted.salt(), salted.adapter(), salted.cached()), (&b"x"[..], Some(2), 0));
    assert_eq!(salted.root(), BlockKey::root(0, b"x", Some(2)));
    assert!(salted.blocks(GroupId(0)).all(|block| block.cached.is_none()));
    // Without reuse there is nothing to bring.
    let off = state.probe_keys(&prompt, &StartOptions::default().with_reuse(false));
    assert_eq!((off.limit(), off.hit(12), off.blocks(GroupId(0)).count()), (0, 0, 0));
    assert_eq!(state.probe_keys(&[], &StartOptions::default()).limit(), 0);
}

#[test]
fn imported_blocks_are_found_once_they_are_published() {
    let mut state = state_with((4, 8), |spec| spec.events(16).changes(16));
    let prompt = tokens(0..14);
    run(&mut state, SEQ[0], &prompt[..6]);
    let probe = probe(&state, &prompt);
    let mut import = state.reserve_import(&probe, 13).unwrap();
    assert_eq!((import.upto(), import.hit(), state.num_imports()), (13, 12, 1));
    let places = |import: &Import| import.blocks().iter().map(|b| b.index).collect::<Vec<_>>();
    assert_eq!(places(&import), [1, 2], "the first is cached");
    assert_eq!(state.free_blocks(GroupId(0)), 4);
    check_invariants(&state);
    assert_eq!(state.probe(&prompt, StartOptions::default()), 4, "nothing of the import");
    state.take_events();
    state.publish_import(&mut import, 11, Tier::Host).unwrap();
    assert_eq!(places(&import), [2]);
    assert_eq!(state.probe(&prompt, StartOptions::default()), 8);
    state.publish_import(&mut import, 12, Tier::Disk).unwrap();
    state.publish_import(&mut import, 12, Tier::Store).unwrap();
    assert!(places(&import).is_empty());
    let events = state.take_events();
    let stored = events.iter().filter(|event| matches!(event.kind, EventKind::Stored(_))).count();
    assert_eq!(stored, 2);
    check_invariants(&state);
    let reused = state.start(SEQ[1], &prompt, StartOptions::default()).unwrap();
    assert_eq!(reused, 12);
    assert_eq!(contents(&state, GroupId(0), SEQ[1]), prompt[..12]);
    state.finish_import(import).unwrap();
    assert_eq!(state.num_imports(), 0);
    let counted = state.stats();
    assert_eq!((counted.hit_tokens, counted.host_hit_tokens, counted.disk_hit_tokens), (12, 4, 4));
    assert_eq!(counted.store_hit_tokens, 0);
    // Their next use is one of the device.
    state.start(SEQ[2], &prompt, StartOptions::default()).unwrap();
    assert_eq!((state.stats().host_hit_tokens, state.stats().disk_hit_tokens), (4, 4));
    check_invariants(&state);
    SEQ[..3].iter().for_each(|sequence| state.release(*sequence).unwrap());
    assert_eq!(state.free_blocks(GroupId(0)), 8);
    check_invariants(&state);
}

#[test]
fn what_did_not_come_is_empty_and_what_came_is_idle() {
    let mut state = state_with((4, 5), |spec| spec.wipe_on_release(true));
    let probe = probe(&state, &tokens(0..17));
    let mut import = state.reserve_import(&probe, 16).unwrap();
    state.publish_import(&mut import, 8, Tier::Disk).unwrap();
    state.finish_import(import).unwrap();
    let pool = state.pool(GroupId(0)).unwrap();
    assert_eq!((pool.num_idle(), pool.num_empty()), (2, 3));
    assert_eq!(state.unwiped().len(), 2, "bytes that were not published are zeroed");
    assert_eq!(state.start(SEQ[0], &tokens(0..17), StartOptions::default()).unwrap(), 8);
    assert_eq!(state.stats().disk_hit_tokens, 8, "also after the import");
    check_invariants(&state);
}

#[test]
fn an_import_takes_no_block_that_computing_would_leave() {
    let mut state = state_with((4, 6), |spec| spec.eviction(Eviction::Lru));
    run(&mut state, SEQ[0], &tokens(0..9));
    state.release(SEQ[0]).unwrap();
    run(&mut state, SEQ[1], &tokens(100..105));
    let prompt = tokens(0..21);
    let probe = probe(&state, &prompt);
    let before = books(&state);
    // Two of five blocks are cached, two are held, one is empty, one has a partial content.
    let refused = state.reserve_import(&probe, 20).unwrap_err();
    let CacheError::Exhausted(refused) = refused else { panic!("{refused}") };
    let BlocksExhausted { needed, free, evictable, .. } = refused;
    assert_eq!((needed, free, evictable), (3, 2, 1));
    assert_eq!(books(&state), before);
    assert_eq!((state.num_imports(), state.stats().evictions), (0, 0));
    let import = state.reserve_import(&probe, 16).unwrap();
    assert_eq!((import.blocks().len(), state.stats().evictions), (2, 1));
    assert_eq!(state.probe(&prompt, StartOptions::default()), 8, "what it found is held");
    check_invariants(&state);
    state.finish_import(import).unwrap();
    state.release(SEQ[1]).unwrap();
    assert_eq!(state.free_blocks(GroupId(0)), 6);
}

#[test]
fn content_that_appears_meanwhile_is_not_imported_twice() {
    for before_reserve in [true, false] {
        let mut state = state_with((4, 12), |spec| spec.changes(32));
        let prompt = tokens(0..13);
        let probe = probe(&state, &prompt);
        let mut import = (!before_reserve).then(|| state.reserve_import(&probe, 12).unwrap());
        run(&mut state, SEQ[0], &prompt[..9]);
        let mut import = match import.take() {
            Some(import) => import,
            None => state.reserve_import(&probe, 12).unwrap(),
        };
        assert_eq!(import.blocks().len(), if before_reserve { 1 } else { 3 });
        state.publish_import(&mut import, 12, Tier::Store).unwrap();
        assert_eq!(state.pool(GroupId(0)).unwrap().index().len(), 3);
        check_invariants(&state);
        state.release(SEQ[0]).unwrap();
        assert_eq!(state.pool(GroupId(0)).unwrap().num_used(), 3, "held by the import");
        assert_eq!(state.start(SEQ[1], &prompt, StartOptions::default()).unwrap(), 12);
        assert_eq!(contents(&state, GroupId(0), SEQ[1]), prompt[..12]);
        assert_eq!(state.stats().store_hit_tokens, 4, "the others were computed");
        state.finish_import(import).unwrap();
        check_invariants(&state);
    }
}

#[test]
fn a_window_needs_only_what_a_hit_needs() {
    let mut state = state_with((4, 12), |spec| {
        spec.window_left(5).sink_tokens(2).group([1], |group| group.paged(3, 16).window_left(3))
    });
    let prompt = tokens(0..30);
    let probe = probe(&state, &prompt);
    // Ends of blocks in both groups are multiples of 12.
    assert_eq!([11, 12, 23, 24, 29].map(|upto| probe.hit(upto)), [0, 12, 12, 24, 24]);
    let needed = |group| probe.needed(GroupId(group), 29).map(|b| b.index).collect::<Vec<_>>();
    assert_eq!((needed(0), needed(1)), (vec![0, 4, 5], vec![0, 7]));
    let mut import = state.reserve_import(&probe, 29).unwrap();
    assert_eq!(import.blocks().len(), 5);
    state.publish_import(&mut import, 29, Tier::Host).unwrap();
    assert_eq!(state.start(SEQ[0], &prompt, StartOptions::default()).unwrap(), 24);
    assert_eq!(contents(&state, GroupId(0), SEQ[0]), [&prompt[..4], &prompt[16..24]].concat());
    assert_eq!(state.stats().host_hit_tokens, 12);
    state.finish_import(import).unwrap();
    check_invariants(&state);
}

#[test]
fn blocks_of_a_backoff_are_imported_and_computed_anew() {
    let mut state = state(4, 8);
    let prompt = tokens(0..14);
    let options = StartOptions::default().with_backoff_blocks(1);
    let probe = state.probe_keys(&prompt, &options);
    assert_eq!([4, 8, 12, 13].map(|upto| probe.hit(upto)), [0, 4, 8, 8]);
    let mut import = state.reserve_import(&probe, 13).unwrap();
    assert_eq!(import.blocks().len(), 3);
    state.publish_import(&mut import, 13, Tier::Host).unwrap();
    assert_eq!(state.start(SEQ[0], &prompt, options).unwrap(), 8);
    state.finish_import(import).unwrap();
    check_invariants(&state);
}

#[test]
fn imported_blocks_have_the_priorities_of_the_prompt() {
    let mut state = state(4, 8);
    let high = Priority { level: 90, duration: None };
    let range = RetentionRange { begin: 0, end: Some(4), priority: high };
    let retention = Retention::new(vec![range]).unwrap();
    let options = StartOptions::default().with_retention(&retention);
    let probe = state.probe_keys(&tokens(0..9), &options);
    let mut import = state.reserve_import(&probe, 8).unwrap();
    state.publish_import(&mut import, 8, Tier::Disk).unwrap();
    let priorities: Vec<_> = state.stored_blocks(GroupId(0)).map(|block| block.priority).collect();
    assert_eq!(priorities, [high, Priority::default()]);
    state.finish_import(import).unwrap();
}

#[test]
fn an_import_counts_as_one_use_with_the_start_it_is_made_for() {
    // Of two prompts the one that was computed twice is kept, not the one that was imported once.
    let mut state = state_with((4, 4), |spec| spec.eviction(Eviction::Lfu));
    for _ in 0..2 {
        run(&mut state, SEQ[0], &tokens(0..5));
        state.release(SEQ[0]).unwrap();
    }
    let prompt = tokens(100..105);
    let probe = probe(&state, &prompt);
    let mut import = state.reserve_import(&probe, 4).unwrap();
    state.publish_import(&mut import, 4, Tier::Disk).unwrap();
    state.start(SEQ[0], &prompt, StartOptions::default()).unwrap();
    state.finish_import(import).unwrap();
    state.release(SEQ[0]).unwrap();
    start(&mut state, SEQ[1]);
    append(&mut state, &[(SEQ[1], 12)]).unwrap();
    let left = [&tokens(0..5), &prompt].map(|p| state.probe(p, StartOptions::default()));
    assert_eq!(left, [4, 0]);
}

#[test]
fn imports_that_were_dropped_are_found_and_ended() {
    let mut state = state(4, 8);
    let probes = [0, 100].map(|from| probe(&state, &tokens(from..from + 9)));
    drop(state.reserve_import(&probes[0], 8).unwrap());
    let mut second = state.reserve_import(&probes[1], 8).unwrap();
    assert_eq!((state.num_imports(), state.free_blocks(GroupId(0))), (2, 4));
    assert_eq!(state.usage().slots_wasted, 0);
    assert_eq!(state.finish_imports().unwrap(), 2);
    assert_eq!((state.num_imports(), state.pool(GroupId(0)).unwrap().num_empty()), (0, 8));
    let refused = state.publish_import(&mut second, 8, Tier::Host).unwrap_err();
    assert_eq!(problem(refused), StateProblem::Ended);
    assert_eq!(problem(state.finish_import(second).unwrap_err()), StateProblem::Ended);
    assert!(state.ledger.find_namespace(b"", None).is_none(), "the namespace has no user");
    check_invariants(&state);
}

#[test]
fn a_probe_from_before_a_clear_or_of_another_cache_is_refused() {
    let prompt = tokens(0..9);
    let clears: [fn(&mut CacheState); 3] = [
        |state| assert!(state.reset_prefixes().unwrap()),
        |state| state.change_encoding(7),
        |state| state.note_late(LayerId(1)),
    ];
    for clear in clears {
        let mut state = state(4, 8);
        let old = probe(&state, &prompt);
        clear(&mut state);
        let refused = state.reserve_import(&old, 8).unwrap_err();
        assert_eq!(problem(refused), StateProblem::Outdated);
        let new = probe(&state, &prompt);
        let import = state.reserve_import(&new, 8).unwrap();
        state.finish_import(import).unwrap();
    }
    // Bytes that were encoded before must not be found after.
    for clear in &clears[1..] {
        let mut state = state(4, 8);
        let probe = probe(&state, &prompt);
        let mut import = state.reserve_import(&probe, 8).unwrap();
        assert!(!state.reset_prefixes().unwrap(), "blocks are held");
        state.publish_import(&mut import, 4, Tier::Disk).unwrap();
        clear(&mut state);
        let refused = state.publish_import(&mut import, 8, Tier::Disk).unwrap_err();
        assert_eq!(problem(refused), StateProblem::Outdated);
        check_invariants(&state);
        state.finish_import(import).unwrap();
        assert_eq!(state.pool(GroupId(0)).unwrap().num_empty(), 8);
    }
    let (mut one, mut other) = (state(4, 8), state(4, 8));
    let probe = probe(&one, &prompt);
    let import = one.reserve_import(&probe, 8).unwrap();
    assert_eq!(problem(other.reserve_import(&probe, 8).unwrap_err()), StateProblem::Outdated);
    assert_eq!(problem(other.finish_import(import).unwrap_err()), StateProblem::Ended);
    assert_eq!(one.num_imports(), 1);
}

#[test]
fn imports_are_refused_during_a_step_and_beyond_their_ends() {
    let mut state = state(4, 8);
    let probe = probe(&state, &tokens(0..9));
    let too_many = state.reserve_import(&probe, 9).unwrap_err();
    assert_eq!(too_many.to_string(), "imported tokens: 9 given, at most 8 are possible");
    let mut import = state.reserve_import(&probe, 4).unwrap();
    let too_many = state.publish_import(&mut import, 5, Tier::Disk).unwrap_err();
    assert_eq!(too_many.to_string(), "imported tokens: 5 given, at most 4 are possible");
    start(&mut state, SEQ[0]);
    begin(&mut state, &[StepInput::count(SEQ[0], 1)]).unwrap();
    let before = books(&state);
    for refused in [
        state.reserve_import(&probe, 8).map(|_| ()).unwrap_err(),
        state.publish_import(&mut import, 4, Tier::Disk).unwrap_err().into(),
        state.finish_imports().map(|_| ()).unwrap_err().into(),
        state.finish_import(import).unwrap_err().into(),
    ] {
        assert_eq!(problem(refused), StateProblem::StepOpen);
    }
    assert_eq!(books(&state), before);
    state.roll_back();
    assert_eq!(state.finish_imports().unwrap(), 1);
}

#[test]
fn a_partial_block_gives_way_to_an_import_that_continues_it() {
    let mut state = state_with((4, 8), |spec| spec.prefix_reuse(PrefixReuse::Partial));
    run(&mut state, SEQ[0], &tokens(0..6));
    state.release(SEQ[0]).unwrap();
    let prompt = tokens(0..9);
    let probe = probe(&state, &prompt);
    let mut import = state.reserve_import(&probe, 8).unwrap();
    state.publish_import(&mut import, 8, Tier::Disk).unwrap();
    assert_eq!(state.pool(GroupId(0)).unwrap().index().len(), 2);
    state.finish_import(import).unwrap();
    assert_eq!(state.start(SEQ[0], &prompt, StartOptions::default()).unwrap(), 8);
    check_invariants(&state);
}

#[test]
fn the_last_block_of_an_import_may_be_partial() {
    let mut state = state_with((4, 8), |spec| spec.events(16));
    let prompt = tokens(0..11);
    let probe = probe(&state, &prompt);
    let part = probe.part(GroupId(0), 10).unwrap();
    assert_eq!((part.index, part.begin, part.end, part.cached), (2, 8, 10, None));
    assert_eq!((probe.tokens(&part), probe.part(GroupId(0), 8)), (&prompt[8..10], None));
    let mut import = state.reserve_import_with_part(&probe, 10).unwrap();
    let of: Vec<_> = import.blocks().iter().map(|block| (block.index, block.end)).collect();
    assert_eq!((of, import.hit()), (vec![(0, 4), (1, 8), (2, 10)], 10));
    assert_eq!(import.blocks()[2].key, part.key);
    state.publish_import(&mut import, 9, Tier::Disk).unwrap();
    assert_eq!(state.probe(&prompt, StartOptions::default()), 8);
    state.publish_import(&mut import, 10, Tier::Disk).unwrap();
    assert_eq!(import.blocks(), []);
    check_invariants(&state);
    // Every token of it, all but the last, and as far as others agree.
    let others = [prompt.clone(), prompt[..10].to_vec(), [&prompt[..9], &[99, 99]].concat()];
    let found = others.map(|prompt| state.probe(&prompt, StartOptions::default()));
    assert_eq!(found, [10, 9, 9]);
    assert_eq!(state.start(SEQ[0], &prompt, StartOptions::default()).unwrap(), 10);
    assert_eq!(state.stats().disk_hit_tokens, 10);
    // Its holders write to a copy while the import holds it.
    append(&mut state, &[(SEQ[0], 3)]).unwrap();
    check_invariants(&state);
    state.finish_import(import).unwrap();
    check_invariants(&state);
    state.release(SEQ[0]).unwrap();
    assert_eq!(state.free_blocks(GroupId(0)), 8);
    check_invariants(&state);
}

#[test]
fn a_part_that_is_cached_is_not_brought_again() {
    for continues in [false, true] {
        for before_reserve in [true, false] {
            let mut state = state(4, 8);
            let probe = probe(&state, &tokens(0..7));
            let computed = tokens(0..if continues { 8 } else { 6 });
            let mut import =
                (!before_reserve).then(|| state.reserve_import_with_part(&probe, 6).unwrap());
            run(&mut state, SEQ[0], &computed);
            state.release(SEQ[0]).unwrap();
            let mut import = match import.take() {
                Some(import) => import,
                None => state.reserve_import_with_part(&probe, 6).unwrap(),
            };
            assert_eq!(import.blocks().len(), if before_reserve { 0 } else { 2 });
            state.publish_import(&mut import, 6, Tier::Disk).unwrap();
            let pool = state.pool(GroupId(0)).unwrap();
            assert_eq!((pool.index().len(), pool.num_used()), (2, 2));
            check_invariants(&state);
            state.finish_import(import).unwrap();
            assert_eq!(state.start(SEQ[1], &tokens(0..7), StartOptions::default()).unwrap(), 6);
            assert_eq!(state.stats().disk_hit_tokens, 0);
            check_invariants(&state);
        }
    }
}

#[test]
fn a_part_is_one_block_in_every_group() {
    let groups = |spec: CacheSpecBuilder| spec.window_left(5).group([1], |group| group.paged(8, 8));
    let mut state = state_with((4, 12), groups);
    let probe = probe(&state, &tokens(0..23));
    assert_eq!(probe.hit(22), 16);
    let part = |group| probe.part(GroupId(group), 22).map(|part| (part.index, part.end));
    // In the first group it is a full block, whose end limits the reuse of a sequence.
    assert_eq!((part(0), part(1), part(2)), (Some((4, 20)), Some((2, 22)), None));
    let mut import = state.reserve_import_with_part(&probe, 22).unwrap();
    assert_eq!(import.hit(), 20);
    state.publish_import(&mut import, 22, Tier::Host).unwrap();
    assert_eq!(state.start(SEQ[0], &tokens(0..23), StartOptions::default()).unwrap(), 20);
    state.finish_import(import).unwrap();
    check_invariants(&state);
}

#[test]
fn without_partial_reuse_there_is_no_part() {
    let full = |spec: CacheSpecBuilder| spec.prefix_reuse(PrefixReuse::FullBlocks);
    let mut state = state_with((4, 8), full);
    let probe = probe(&state, &tokens(0..7));
    assert_eq!(probe.part(GroupId(0), 6), None);
    let import = state.reserve_import_with_part(&probe, 6).unwrap();
    assert_eq!((import.hit(), import.blocks().len()), (4, 1));
    state.finish_import(import).unwrap();
    let options = StartOptions::default().with_backoff_blocks(1);
    let probe = state.probe_keys(&tokens(0..7), &options);
    assert_eq!(probe.part(GroupId(0), 6), None);
}
