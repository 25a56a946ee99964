//! Changes of cached blocks: which are announced, and when.
use std::collections::BTreeMap;

use super::*;
use crate::block::{BlockChange, BlockChangeKind};
use crate::events::{EventKind, StoredBlock, Tier};
use crate::eviction::Priority;
use crate::reuse::{BlockContent, BlockKey, ContentSpan};
use crate::spec::{LateLayers, PublishAt};

/// The stored blocks by replaying changes.
pub(in crate::cache) type Replay = BTreeMap<(GroupId, BlockId), BlockKey>;

/// Replays changes; each must be possible.
pub(in crate::cache) fn replay(stored: &mut Replay, changes: &[BlockChange]) {
    for change in changes {
        let place = (change.group, change.block);
        match change.kind {
            BlockChangeKind::Stored => {
                assert_eq!(stored.insert(place, change.key), None, "{change:?} twice");
            }
            BlockChangeKind::Removed => {
                assert_eq!(stored.remove(&place), Some(change.key), "{change:?} of nothing");
            }
        }
    }
}

/// Returns the blocks that [`CacheState::stored_blocks`] lists.
pub(in crate::cache) fn listed(state: &CacheState) -> Replay {
    let groups = (0..u8::try_from(state.spec().groups().len()).unwrap()).map(GroupId);
    let blocks = |group| state.stored_blocks(group).map(move |b| ((group, b.block), b.key));
    groups.flat_map(blocks).collect()
}

fn drain(state: &mut CacheState) -> Vec<BlockChange> {
    let mut changes = Vec::new();
    assert!(state.drain_changes(&mut changes), "none is lost");
    changes
}

fn kinds(changes: &[BlockChange]) -> [usize; 2] {
    let stored = changes.iter().filter(|change| change.kind == BlockChangeKind::Stored).count();
    [stored, changes.len() - stored]
}

fn state_of(publish_at: PublishAt) -> CacheState {
    state_with((4, 6), |spec| spec.publish_at(publish_at).changes(32))
}

#[test]
fn full_blocks_are_announced_when_they_are_certain() {
    for publish_at in [PublishAt::Begin, PublishAt::Commit] {
        let mut state = state_of(publish_at);
        let prompt = tokens(0..14);
        assert_eq!(state.start(SEQ[0], &prompt, StartOptions::default()).unwrap(), 0);
        begin(&mut state, &[StepInput::tokens(SEQ[0], &prompt[..9])]).unwrap();
        assert_eq!(drain(&mut state), [], "an open step may be rolled back");
        assert_eq!(listed(&state), Replay::new());
        state.roll_back();
        assert_eq!(drain(&mut state), [], "nothing of it was announced");
        begin(&mut state, &[StepInput::tokens(SEQ[0], &prompt[..9])]).unwrap();
        state.commit().unwrap();
        let mut stored = Replay::new();
        let changes = drain(&mut state);
        assert_eq!(kinds(&changes), [2, 0], "{publish_at:?}");
        replay(&mut stored, &changes);
        // The third block is full of drafts, of which one is not accepted.
        begin(&mut state, &[StepInput::tokens(SEQ[0], &prompt[9..]).with_drafts(5)]).unwrap();
        state.commit().unwrap();
        assert_eq!(drain(&mut state), [], "drafts");
        state.truncate(SEQ[0], 11).unwrap();
        begin(&mut state, &[StepInput::tokens(SEQ[0], &[11, 12, 13])]).unwrap();
        state.commit().unwrap();
        let changes = drain(&mut state);
        assert_eq!(kinds(&changes), [1, 0]);
        replay(&mut stored, &changes);
        state.release(SEQ[0]).unwrap();
        assert_eq!(drain(&mut state), [], "the partial block has no part in it");
        assert_eq!(stored, listed(&state));
        check_invariants(&state);
    }
}

#[test]
fn a_block_in_which_tokens_are_not_accepted_keeps_what_it_was_filled_with() {
    for publish_at in [PublishAt::Begin, PublishAt::Commit] {
        let mut state = state_of(publish_at);
        let mut stored = Replay::new();
        start(&mut state, SEQ[0]);
        begin(&mut state, &[StepInput::tokens(SEQ[0], &tokens(0..9))]).unwrap();
        state.commit_accepted(&[6]).unwrap();
        replay(&mut stored, &drain(&mut state));
        assert_eq!(stored, listed(&state), "{publish_at:?}");
        assert!(!stored.is_empty());
        check_invariants(&state);
    }
}

#[test]
fn evicted_and_forgotten_blocks_are_announced_even_while_a_step_is_open() {
    let mut state = state_of(PublishAt::Commit);
    run(&mut state, SEQ[0], &tokens(0..9));
    state.release(SEQ[0]).unwrap();
    assert_eq!(kinds(&drain(&mut state)), [2, 0]);
    start(&mut state, SEQ[1]);
    begin(&mut state, &[StepInput::count(SEQ[1], 20)]).unwrap();
    assert_eq!(kinds(&drain(&mut state)), [0, 1], "five blocks, and one of the six was empty");
    state.roll_back();
    assert_eq!(drain(&mut state), [], "an eviction is not undone");
    let forgotten = state.forget_prefix(&tokens(0..9), StartOptions::default(), 0).unwrap();
    assert_eq!((forgotten, kinds(&drain(&mut state))), (1, [0, 1]));
    assert_eq!(listed(&state), Replay::new());
}

#[test]
fn clearing_announces_every_block() {
    let late = |spec: CacheSpecBuilder| {
        spec.layers_on_demand().late_layers(LateLayers::Refuse).changes(32)
    };
    let mut state = state_with((4, 6), late);
    run(&mut state, SEQ[0], &tokens(0..9));
    state.note_late(LayerId(0));
    assert_eq!(kinds(&drain(&mut state)), [2, 2]);
    let mut state = state_of(PublishAt::Commit);
    run(&mut state, SEQ[0], &tokens(0..9));
    state.release(SEQ[0]).unwrap();
    assert!(state.reset_prefixes().unwrap());
    assert_eq!(kinds(&drain(&mut state)), [2, 2]);
}

#[test]
fn after_a_loss_the_index_says_what_is_there() {
    let mut state = state_with((4, 8), |spec| spec.changes(2));
    run(&mut state, SEQ[0], &tokens(0..13));
    let mut changes = Vec::new();
    assert!(!state.drain_changes(&mut changes), "three blocks");
    assert_eq!(changes, []);
    let mut stored = listed(&state);
    assert_eq!(stored.len(), 3);
    run(&mut state, SEQ[1], &tokens(100..105));
    replay(&mut stored, &drain(&mut state));
    assert_eq!(stored, listed(&state));
    // Without the setting nothing is recorded, and so nothing lost.
    let mut state = state_with((4, 8), |spec| spec);
    run(&mut state, SEQ[0], &tokens(0..13));
    assert_eq!(drain(&mut state), []);
    assert_eq!(listed(&state).len(), 3);
}

#[test]
fn stored_blocks_tell_all_that_names_their_content() {
    let mut state = state_of(PublishAt::Commit);
    let spans = [ContentSpan { begin: 5, len: 2, id: 9 }];
    let priority = Priority { level: 80, duration: None };
    let prompt = tokens(0..9);
    let options = StartOptions::default().with_salt(b"tenant").with_adapter(3);
    let options = options.with_contents(&spans);
    state.start(SEQ[0], &prompt, options).unwrap();
    begin(&mut state, &[StepInput::tokens(SEQ[0], &prompt)]).unwrap();
    state.commit().unwrap();
    assert_eq!(state.prioritise_prefix(&prompt, options, priority), 8);
    let blocks: Vec<_> = state.stored_blocks(GroupId(0)).collect();
    assert_eq!(blocks.len(), 2);
    let mut parts = Vec::new();
    let root = BlockKey::root(0, b"tenant", Some(3));
    let mut parent = root;
    for (block, index) in blocks.iter().zip(0_u32..) {
        let (begin, end) = (index * 4, index * 4 + 4);
        BlockContent::cut(&spans, (begin, end), &mut parts);
        assert_eq!((block.index, block.parent, block.priority), (index, parent, priority));
        assert_eq!((block.tokens, block.contents), (&tokens(begin..end)[..], &parts[..]));
        assert_eq!(state.namespace(block.namespace), Some((&b"tenant"[..], Some(3))));
        parent = parent.child(&tokens(begin..end), &parts);
        assert_eq!(block.key, parent);
    }
    assert_eq!(state.stored_blocks(GroupId(7)).count(), 0);
}

#[test]
fn events_say_whose_content_it_is() {
    let mut state = state_with((4, 8), |spec| spec.events(64));
    let whose = [(&b""[..], None), (b"tenant", None), (b"", Some(3)), (b"tenant", Some(4))];
    for (salt, adapter) in whose {
        let mut options = StartOptions::default().with_salt(salt);
        options = adapter.map_or(options, |adapter| options.with_adapter(adapter));
        let prompt = tokens(0..5);
        state.start(SEQ[0], &prompt, options).unwrap();
        begin(&mut state, &[StepInput::tokens(SEQ[0], &prompt)]).unwrap();
        state.commit().unwrap();
        state.release(SEQ[0]).unwrap();
    }
    let stored = |kind| match kind {
        EventKind::Stored(block) => Some(block),
        _ => None,
    };
    let mut announced: Vec<_> =
        state.take_events().into_iter().filter_map(|event| stored(event.kind)).collect();
    let names: Vec<_> = announced.iter().map(|block| (&block.salt[..], block.adapter)).collect();
    assert_eq!(names, whose);
    let mut listed = state.snapshot().blocks;
    announced.sort_by_key(|block| block.key);
    listed.sort_by_key(|block| block.key);
    assert_eq!(listed, announced);
}

#[test]
fn lower_tiers_announce_their_own_events_only() {
    let mut state = state_with((4, 8), |spec| spec.events(8));
    let (group, key) = (GroupId(0), BlockKey(7));
    let block = |tier| StoredBlock {
        group,
        key,
        parent: BlockKey(1),
        index: 1,
        tokens: [1, 2].into(),
        tier,
        priority: Priority::default(),
        salt: [].into(),
        adapter: None,
    };
    let removed = |tier| EventKind::Removed { group, key, tier };
    assert!(state.announce(EventKind::Stored(block(Tier::Disk))));
    assert!(state.announce(removed(Tier::Store)));
    assert!(state.announce(EventKind::Cleared { tier: Tier::Disk }));
    for refused in [
        EventKind::Stored(block(Tier::Device)),
        removed(Tier::Device),
        EventKind::Cleared { tier: Tier::Device },
        EventKind::Lost { from: 0, to: 1 },
    ] {
        assert!(!state.announce(refused.clone()), "{refused:?}");
    }
    let kinds: Vec<_> = state.take_events().into_iter().map(|event| event.kind).collect();
    let cleared = EventKind::Cleared { tier: Tier::Disk };
    assert_eq!(kinds, [EventKind::Stored(block(Tier::Disk)), removed(Tier::Store), cleared]);
    assert!(!super::state(4, 8).announce(removed(Tier::Host)), "events are off");
}
