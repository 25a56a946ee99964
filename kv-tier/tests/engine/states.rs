//! Sessions of caches with recurrent states: a text goes on where it ended, with its state.
use std::fs;
use std::path::Path;

use kv_core::spec::{StateFormat, StatesBuilder};
use kv_core::{
    CacheSpec, DType, GroupId, KvCache, SequenceId, StartOptions, StepInput, TensorView,
    TensorViewMut,
};
use kv_tier::session::{self, SessionError, SessionHeader};
use kv_tier::{Identity, ModelDigest, Session, SessionInfo};

use crate::recurrence::{WIDTH, advance, with_states};
use crate::support::{Late, builder, identity, late, text};

/// A cache whose states follow from the tokens.
struct Hybrid {
    cache: KvCache<Late>,
}

impl Hybrid {
    fn new(spec: CacheSpec) -> Self {
        Self { cache: KvCache::new(late(), spec).unwrap() }
    }

    /// Computes the next tokens of a sequence in one step, after a look at its states.
    fn step(&mut self, sequence: SequenceId, text: &[u32], new: &[u32]) {
        let mut step = self.cache.begin_step(&[StepInput::tokens(sequence, new)]).unwrap();
        step.mark_written();
        advance(&mut step, (&[], text, new)).unwrap();
        step.commit().unwrap();
    }

    /// Starts a text and computes what is not cached, in steps that end at stops.
    fn run(&mut self, id: u64, text: &[u32], options: StartOptions<'_>) -> u32 {
        let sequence = SequenceId(id);
        let reused = self.cache.start(sequence, text, options).unwrap();
        let mut at = reused as usize;
        while at < text.len() {
            let stop = self.cache.state().next_stop(sequence).map_or(text.len(), |n| n as usize);
            let end = stop.min(text.len());
            self.step(sequence, &text[..at], &text[at..end]);
            at = end;
        }
        reused
    }

    fn dump(&mut self, id: u64, to: &Path) -> Result<SessionInfo, SessionError> {
        session::dump(&mut self.cache, &identity(), SequenceId(id), b"note", to)
    }

    fn load(&mut self, from: &Path) -> Result<Session, SessionError> {
        session::load(&mut self.cache, &identity(), from, &StartOptions::default())
    }

    fn probe(&self, text: &[u32]) -> u32 {
        self.cache.state().probe(text, StartOptions::default())
    }
}

/// Of three layers the second has a state alone, the third too.
const STATES: [u16; 2] = [1, 2];

fn hybrid(blocks: u32, snapshots: u32, grid: u32) -> CacheSpec {
    let spec = builder().layers(3).paged(4, blocks);
    with_states(spec, &STATES, (snapshots, grid)).build().unwrap()
}

#[test]
fn a_text_of_any_length_goes_on_with_its_state() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("chat.kvs");
    let specs: [fn() -> CacheSpec; 4] = [
        || hybrid(128, 8, 1),
        // No layer has rows.
        || {
            let spec = CacheSpec::builder().layers(3).paged(4, 128).states([0, 1, 2], |of| {
                of.part([WIDTH as u32], DType::F32).slots(6).snapshots(8, StateFormat::F16)
            });
            spec.build().unwrap()
        },
        || {
            let spec = builder().layers(3).paged(4, 128).window_left(9);
            with_states(spec, &STATES, (8, 1)).build().unwrap()
        },
        || {
            let spec = with_states(builder().layers(3).paged(4, 128), &STATES, (8, 1));
            spec.group([1], |group| group.paged(4, 128).window_left(5)).build().unwrap()
        },
    ];
    for (number, spec) in specs.iter().enumerate() {
        for len in (1..=13).chain([64, 65, 150]) {
            let tokens = text(1, len);
            let mut one = Hybrid::new(spec());
            one.run(0, &tokens, StartOptions::default());
            let info = one.dump(0, &path).unwrap();
            assert_eq!((info.tokens, info.is_whole), (len, true), "spec {number}");
            assert_eq!(info.bytes, fs::metadata(&path).unwrap().len());
            let header = SessionHeader::read(&path).unwrap();
            let states: Vec<_> = header.groups.iter().filter(|of| of.is_of_states).collect();
            assert!(
                states.iter().all(|of| of.blocks == [std::ops::Range { start: len, end: len + 1 }])
            );
            // The sequence goes on.
            one.step(SequenceId(0), &tokens, &[7, 8]);

            let mut other = Hybrid::new(spec());
            let session = other.load(&path).unwrap();
            assert_eq!((&session.tokens, session.cached), (&tokens, len), "spec {number}");
            assert_eq!(other.cache.state().num_imports(), 0);
            assert_eq!(other.run(0, &text(1, len + 5), StartOptions::default()), len);
            // Another text of the same beginning computes all of it.
            let other_end = [&tokens[..], &[0, 0]].concat();
            assert_eq!(other.run(1, &other_end, StartOptions::default()), len);
            assert_eq!(other.run(2, &text(2, len), StartOptions::default()), 0);
        }
    }
}

#[test]
fn a_file_has_the_longest_state_that_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("chat.kvs");
    // On the grid there are lengths of 8, 16 and 24.
    for len in 1..30 {
        let mut one = Hybrid::new(hybrid(64, 8, 8));
        let tokens = text(1, len);
        one.run(0, &tokens, StartOptions::default());
        let info = one.dump(0, &path).unwrap();
        let kept = len / 8 * 8;
        // Without a stop nothing is kept on the way.
        let kept = if kept == len || kept == (len - 1) / 8 * 8 { kept } else { 0 };
        assert_eq!((info.is_whole, info.blocks > 0), (kept == len, kept > 0), "{len} tokens");
        let mut other = Hybrid::new(hybrid(64, 8, 8));
        assert_eq!(other.load(&path).unwrap().cached, kept);
        assert_eq!(other.run(0, &text(1, len + 3), StartOptions::default()), kept);
    }
}

/// Reads the state of a sequence that goes on behind `cached` tokens.
fn read_behind(cache: &mut KvCache<Late>, id: u64, text: &[u32], values: usize) -> Vec<f32> {
    let reused = cache.start(SequenceId(id), text, StartOptions::default()).unwrap();
    assert_eq!(reused as usize, text.len() - 1);
    let mut step = cache.begin_step(&[StepInput::idle(SequenceId(id))]).unwrap();
    let mut state = vec![0.0_f32; values];
    let dims = [1, values as u32];
    step.read_state(1, 0, TensorViewMut::host(&mut state, &dims)).unwrap();
    state
}

#[test]
fn a_snapshot_in_int8_is_read_as_in_the_cache_that_wrote_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("chat.kvs");
    for values in [3_usize, 32, 100, 512] {
        let spec = || {
            let spec = builder().paged(4, 64).layers(3).states([1], |of| {
                of.part([values as u32], DType::F32).slots(6).snapshots(8, StateFormat::Int8)
            });
            spec.build().unwrap()
        };
        let (mut one, mut other) = (Hybrid::new(spec()), Hybrid::new(spec()));
        let (tokens, longer) = (text(1, 9), text(1, 10));
        let written: Vec<_> = (0..values).map(|at| (at as f32 * 0.37).sin() * 3.0).collect();
        one.cache.start(SequenceId(0), &tokens, StartOptions::default()).unwrap();
        let mut step = one.cache.begin_step(&[StepInput::tokens(SequenceId(0), &tokens)]).unwrap();
        step.mark_written();
        let dims = [1, values as u32];
        step.write_state(1, 0, TensorView::host(&written, &dims)).unwrap();
        step.commit().unwrap();
        assert!(one.dump(0, &path).unwrap().is_whole);
        one.cache.release(SequenceId(0)).unwrap();
        let own = read_behind(&mut one.cache, 1, &longer, values);
        let steps = own.iter().zip(&written).map(|(own, written)| (own - written).abs());
        assert!(own != written && steps.fold(0.0, f32::max) < 3.0 / 127.0, "{own:?}");

        assert_eq!(other.load(&path).unwrap().cached, 9);
        assert_eq!(read_behind(&mut other.cache, 1, &longer, values), own, "{values} values");
    }
}

#[test]
fn files_of_other_states_are_refused_with_their_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("chat.kvs");
    let mut one = Hybrid::new(hybrid(64, 8, 1));
    one.run(0, &text(1, 21), StartOptions::default());
    one.dump(0, &path).unwrap();
    let refused = |spec: CacheSpec| {
        let mut other = Hybrid::new(spec);
        let refused = other.load(&path).unwrap_err();
        let state = other.cache.state();
        assert_eq!((state.free_blocks(GroupId(0)), state.num_imports()), (64, 0));
        assert_eq!(other.probe(&text(1, 25)), 0);
        refused
    };
    let with_part = |shape: &'static [u32]| {
        let states =
            |of: StatesBuilder| of.part(shape, DType::F32).slots(6).snapshots(8, StateFormat::F16);
        let spec = builder().paged(4, 64).layers(3).states([1], states).states([2], states);
        spec.build().unwrap()
    };
    let error = refused(with_part(&[1, WIDTH as u32]));
    let words = error.to_string();
    assert!(matches!(error, SessionError::Block { group: GroupId(3), block: 21, .. }), "{words}");
    let error = refused(with_part(&[5000]));
    let SessionError::ChunkBytes { group: GroupId(3), expected, got } = error else {
        panic!("{error}");
    };
    assert!(expected > got, "{expected} {got}");
    let error = refused(builder().paged(4, 64).layers(3).build().unwrap());
    assert!(matches!(error, SessionError::Encoding { .. }), "{error}");
    let one_group = builder().paged(4, 64).layers(3).states([1, 2], |of| {
        of.part([WIDTH as u32], DType::F32).slots(6).snapshots(8, StateFormat::F16)
    });
    let error = refused(one_group.build().unwrap());
    assert!(matches!(error, SessionError::Groups { expected: 2, got: 3 }), "{error}");
}

#[test]
fn damage_anywhere_is_refused_before_anything_changes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("chat.kvs");
    let mut one = Hybrid::new(hybrid(64, 8, 1));
    one.run(0, &text(1, 6), StartOptions::default());
    one.dump(0, &path).unwrap();
    let right = fs::read(&path).unwrap();
    for at in (0..right.len()).step_by(211).chain([right.len() - 4096, right.len() - 4000]) {
        let mut wrong = right.clone();
        wrong[at] ^= 0x10;
        fs::write(&path, &wrong).unwrap();
        let mut other = Hybrid::new(hybrid(64, 8, 1));
        assert!(other.load(&path).is_err(), "byte {at} of {}", right.len());
        assert_eq!(other.probe(&text(1, 9)), 0);
        assert_eq!(other.cache.state().free_blocks(GroupId(0)), 64);
    }
    for cut in [1, 4096, 5000] {
        fs::write(&path, &right[..right.len() - cut]).unwrap();
        let refused = Hybrid::new(hybrid(64, 8, 1)).load(&path).unwrap_err();
        assert!(matches!(refused, SessionError::Length { .. }), "{refused}");
    }
    let stranger = Identity::new(ModelDigest::of_bytes(b"others"));
    fs::write(&path, &right).unwrap();
    let mut other = Hybrid::new(hybrid(64, 8, 1));
    let options = StartOptions::default();
    let refused = session::load(&mut other.cache, &stranger, &path, &options).unwrap_err();
    assert!(matches!(refused, SessionError::Model { .. }), "{refused}");
}

#[test]
fn without_room_for_the_state_the_load_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("chat.kvs");
    let mut one = Hybrid::new(hybrid(64, 1, 1));
    one.run(0, &text(1, 21), StartOptions::default());
    one.dump(0, &path).unwrap();
    let mut other = Hybrid::new(hybrid(64, 1, 1));
    other.run(0, &text(2, 9), StartOptions::default());
    let pin = other.cache.pin_prefix(&text(2, 9), StartOptions::default());
    assert_eq!(pin.tokens, 8);
    let refused = other.load(&path).unwrap_err();
    let SessionError::NoRoom(exhausted) = &refused else { panic!("{refused}") };
    assert_eq!((exhausted.group, exhausted.needed, exhausted.free), (GroupId(3), 1, 0));
    assert!(other.cache.unpin(pin.id).unwrap());
    assert_eq!(other.load(&path).unwrap().cached, 21);
    // A sequence whose state nothing keeps is saved without it.
    let pin = other.cache.pin_prefix(&text(1, 25), StartOptions::default());
    assert_eq!(pin.tokens, 21);
    other.run(1, &text(3, 9), StartOptions::default());
    let info = other.dump(1, &path).unwrap();
    assert_eq!((info.tokens, info.blocks, info.is_whole), (9, 0, false));
    assert_eq!(Hybrid::new(hybrid(64, 1, 1)).load(&path).unwrap().cached, 0);
}
