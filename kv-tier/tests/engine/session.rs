//! Sessions: what is written goes on where it ended, and nothing else is read.
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use kv_core::backend::Plane;
use kv_core::spec::PrefixReuse;
use kv_core::{CacheSpec, GroupId, KvFormat, SequenceId, StartOptions, StepInput};
use kv_testkit::rng::Rng;
use kv_tier::session::{SessionError, SessionHeader};
use kv_tier::{ChunkErrorKind, ChunkSpec, Identity, ModelDigest, TierOptions};

use crate::support::{Engine, LAYERS, builder, identity, spec, text};

fn plain() -> StartOptions<'static> {
    StartOptions::default()
}

fn engine(spec: CacheSpec) -> Engine {
    Engine::new(spec, identity(), TierOptions::new())
}

/// Computes a text and writes it to a file.
fn write(engine: &mut Engine, tokens: &[u32], options: StartOptions<'_>, to: &Path) -> SequenceId {
    let (sequence, _) = engine.start_alone(tokens, options);
    engine.dump(sequence, b"note", to).unwrap();
    sequence
}

fn file() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("chat.kvs");
    (folder, path)
}

#[test]
fn a_session_of_any_length_goes_on_where_it_ended() {
    let (_folder, path) = file();
    for len in (1..=13).chain([64, 65, 250]) {
        let tokens = text(1, len);
        let mut one = engine(spec(128));
        let (sequence, _) = one.start_alone(&tokens, plain());
        let info = one.dump(sequence, b"note", &path).unwrap();
        assert_eq!((info.tokens, info.blocks, info.is_whole), (len, len.div_ceil(4), true));
        assert_eq!(info.bytes, fs::metadata(&path).unwrap().len());
        // The sequence goes on.
        one.compute(sequence, &text(1, len + 3), len);
        one.check(sequence, &text(1, len + 3));

        for (prompt, reused) in [(text(1, len + 5), len), (tokens.clone(), len - 1)] {
            let mut other = engine(spec(128));
            let session = other.load(&path, &plain()).unwrap();
            assert_eq!((&session.tokens, session.cached), (&tokens, len));
            assert_eq!((&session.contents[..], &session.note[..]), (&[][..], &b"note"[..]));
            other.assert_nothing_held();
            assert_eq!(other.start_alone(&prompt, plain()).1, reused, "{len} tokens");
            other.forget();
            other.assert_nothing_held();
        }
    }
}

#[test]
fn generated_tokens_are_part_of_a_session() {
    let (_folder, path) = file();
    let (mut one, tokens) = (engine(spec(128)), text(1, 30));
    let (sequence, _) = one.start_alone(&tokens[..9], plain());
    for len in 9..30 {
        one.compute(sequence, &tokens[..=len], u32::try_from(len).unwrap());
    }
    one.dump(sequence, b"", &path).unwrap();
    let mut other = engine(spec(128));
    let session = other.load(&path, &plain()).unwrap();
    assert_eq!((session.tokens, session.cached), (tokens, 30));
    assert_eq!(other.start_alone(&text(1, 33), plain()).1, 30);
}

#[test]
fn windows_and_groups_come_back_as_far_as_their_blocks_are_there() {
    let (_folder, path) = file();
    let specs: [fn() -> CacheSpec; 4] = [
        || builder().paged(4, 64).changes(99).window_left(9).sink_tokens(2).build().unwrap(),
        || builder().paged(4, 64).changes(99).group([1], |g| g.paged(8, 32)).build().unwrap(),
        || {
            let spec = builder().paged(4, 64).changes(99).window_left(5).window_slack(8);
            spec.group([1], |group| group.paged(3, 64)).build().unwrap()
        },
        || {
            let spec = builder().paged(4, 64).changes(99).prefix_reuse(PrefixReuse::FullBlocks);
            spec.group([1], |group| group.paged(8, 32).window_left(6)).build().unwrap()
        },
    ];
    let mut whole = 0;
    for (number, spec) in specs.iter().enumerate() {
        for len in 1..60 {
            let (mut one, tokens) = (engine(spec()), text(1, len));
            let (sequence, _) = one.start_alone(&tokens, plain());
            let info = one.dump(sequence, b"", &path).unwrap();
            assert!(info.is_whole, "a prompt in one step leaves all blocks in the index");
            one.cache.cache_mut().release(sequence).unwrap();
            let more = text(1, len + 1);
            let most = [&more, &tokens].map(|prompt| one.cache.state().probe(prompt, plain()));
            let mut other = engine(spec());
            let session = other.load(&path, &plain()).unwrap();
            let found = [&more, &tokens].map(|prompt| other.cache.state().probe(prompt, plain()));
            assert_eq!(found, most, "spec {number}, {len} tokens");
            assert_eq!(session.cached, most[0]);
            other.assert_nothing_held();
            let (_, reused) = other.start_alone(&text(1, len + 4), plain());
            assert_eq!(reused, most[0]);
            whole += u32::from(reused == len);
        }
    }
    assert!(whole > 60, "{whole}");
}

#[test]
fn salt_adapter_and_images_are_kept_apart() {
    let (_folder, path) = file();
    let known = || identity().with_adapter(3, ModelDigest::of_bytes(b"adapter"));
    let images = [kv_core::reuse::ContentSpan { begin: 2, len: 5, id: 77 }];
    let options = plain().with_salt(b"tenant").with_adapter(3).with_contents(&images);
    let mut one = Engine::new(spec(64), known(), TierOptions::new());
    write(&mut one, &text(1, 22), options, &path);
    let bytes = fs::read(&path).unwrap();
    assert!(!bytes.windows(6).any(|part| part == b"tenant"), "the salt itself is in no file");

    let mut other = Engine::new(spec(64), known(), TierOptions::new());
    let mut load = |options| other.load(&path, &options);
    let salted = plain().with_salt(b"tenant");
    assert!(matches!(load(plain().with_adapter(3)), Err(SessionError::Salt)));
    assert!(matches!(load(salted), Err(SessionError::Adapter { .. })));
    assert!(matches!(load(salted.with_adapter(4)), Err(SessionError::UnknownAdapter(_))));
    let session = load(salted.with_adapter(3)).unwrap();
    assert_eq!((session.contents.as_slice(), session.cached), (&images[..], 22));
    let prompt = text(1, 25);
    assert_eq!(other.cache.state().probe(&prompt, plain()), 0);
    assert_eq!(other.start_alone(&prompt, salted.with_adapter(3).with_contents(&images)).1, 22);
}

/// The number of an adapter belongs to one process.
#[test]
fn an_adapter_is_known_by_its_digest() {
    let (_folder, path) = file();
    let digest = ModelDigest::of_bytes(b"adapter");
    // The last block of the second text is a partial one.
    for len in [20, 22] {
        let mut one = Engine::new(spec(64), identity().with_adapter(3, digest), TierOptions::new());
        write(&mut one, &text(1, len), plain().with_adapter(3), &path);
        let mut other =
            Engine::new(spec(64), identity().with_adapter(8, digest), TierOptions::new());
        let options = plain().with_adapter(8);
        assert_eq!(other.load(&path, &options).unwrap().cached, len);
        assert_eq!(other.start_alone(&text(1, len + 3), options).1, len);
        let another = identity().with_adapter(8, ModelDigest::of_bytes(b"another"));
        let mut other = Engine::new(spec(64), another, TierOptions::new());
        let refused = other.load(&path, &options).unwrap_err();
        assert!(matches!(refused, SessionError::Adapter { .. }), "{refused}");
    }
}

#[test]
fn other_caches_refuse_a_session() {
    let (_folder, path) = file();
    let tokens = text(1, 22);
    write(&mut engine(spec(64)), &tokens, plain(), &path);
    let load = |spec: CacheSpec, identity: Identity| {
        let mut other = Engine::new(spec, identity, TierOptions::new());
        let refused = other.load(&path, &plain()).unwrap_err();
        assert_eq!(other.cache.state().stored_blocks(GroupId(0)).count(), 0);
        other.assert_nothing_held();
        refused
    };
    let model = load(spec(64), Identity::new(ModelDigest::of_bytes(b"other weights")));
    assert!(matches!(model, SessionError::Model { .. }), "{model}");
    let f16 = builder().format(KvFormat::F16).paged(4, 64).changes(64).build().unwrap();
    let format = load(f16, identity());
    assert!(matches!(format, SessionError::Encoding { .. }), "{format}");
    let key = load(spec(64), identity().with_tenant_key([1; 32]));
    assert!(matches!(key, SessionError::Salt), "{key}");
    let numerics = load(spec(64), identity().with_numerics("cuda"));
    assert!(matches!(numerics, SessionError::Root { .. }), "{numerics}");
    let sizes = load(builder().paged(8, 64).changes(64).build().unwrap(), identity());
    assert!(matches!(sizes, SessionError::Root { .. } | SessionError::Encoding { .. }), "{sizes}");
    let short =
        load(builder().paged(4, 64).changes(64).max_seq_len(16).build().unwrap(), identity());
    assert!(matches!(short, SessionError::TooLong { tokens: 22, max: 16 }), "{short}");
}

#[test]
fn without_room_nothing_is_evicted() {
    let (_folder, path) = file();
    write(&mut engine(spec(64)), &text(1, 22), plain(), &path);
    let mut small = engine(spec(7));
    let (held, _) = small.start_alone(&text(2, 30)[10..16], plain());
    let (idle, _) = small.start_alone(&text(3, 30)[10..13], plain());
    small.cache.cache_mut().release(idle).unwrap();
    let before: Vec<_> =
        small.cache.state().stored_blocks(GroupId(0)).map(|block| block.key).collect();
    let refused = small.load(&path, &plain()).unwrap_err();
    assert!(matches!(refused, SessionError::NoRoom(_)), "{refused}");
    let after: Vec<_> =
        small.cache.state().stored_blocks(GroupId(0)).map(|block| block.key).collect();
    assert_eq!(before, after);
    small.cache.cache_mut().release(held).unwrap();
    assert_eq!(small.load(&path, &plain()).unwrap().cached, 22);
}

#[test]
fn damaged_files_are_refused_and_leave_nothing() {
    let (_folder, path) = file();
    let mut one = engine(spec(64));
    write(&mut one, &text(1, 22), plain(), &path);
    let bytes = fs::read(&path).unwrap();
    let chunk = ChunkSpec::new(&spec(64), GroupId(0)).unwrap().with_blocks(1).unwrap();
    let (chunk, header) = (chunk.chunk_bytes(), bytes.len() - 6 * chunk.chunk_bytes());
    assert_eq!(SessionHeader::from_bytes(&bytes[..header]).unwrap().tokens, text(1, 22));
    let mut other = engine(spec(64));
    let mut load = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        let loaded = other.load(&path, &plain());
        assert_eq!(
            other.cache.state().stored_blocks(GroupId(0)).count(),
            if loaded.is_ok() { 5 } else { 0 }
        );
        other.assert_nothing_held();
        loaded
    };
    let changed = |at: usize| {
        let mut changed = bytes.clone();
        changed[at] ^= 1 << (at % 8);
        changed
    };
    for at in (0..192).chain((192..header).step_by(61)) {
        assert!(load(&changed(at)).is_err(), "byte {at}");
    }
    for at in (header..bytes.len()).step_by(509) {
        let refused = load(&changed(at)).unwrap_err();
        let block = u32::try_from((at - header) / chunk).unwrap();
        assert!(matches!(refused, SessionError::Block { block: b, .. } if b == block), "{refused}");
    }
    for len in (0..40).chain((40..bytes.len()).step_by(1009)).chain([bytes.len() - 1]) {
        let refused = load(&bytes[..len]).unwrap_err();
        let is_cut =
            matches!(refused, SessionError::Length { .. } | SessionError::NotASession { .. });
        assert!(is_cut, "{len} bytes: {refused}");
    }
    assert!(matches!(load(&[&bytes[..], &[0]].concat()), Err(SessionError::Length { .. })));
    // Whole chunks at each other's place, and one of another text.
    let mut swapped = bytes.clone();
    let [first, second] = swapped[header..].get_disjoint_mut([0..chunk, chunk..2 * chunk]).unwrap();
    first.swap_with_slice(second);
    let refused = load(&swapped).unwrap_err();
    let SessionError::Block { block: 0, source, .. } = refused else { panic!("{refused}") };
    assert_eq!(source.kind(), ChunkErrorKind::Name);
    write(&mut one, &[text(1, 9), text(2, 13)].concat(), plain(), &path);
    let mixed =
        [&bytes[..header + 5 * chunk], &fs::read(&path).unwrap()[header + 5 * chunk..]].concat();
    assert!(matches!(load(&mixed), Err(SessionError::Block { block: 5, .. })));
    let mut newer = bytes.clone();
    newer[8] = 3;
    assert!(matches!(load(&newer), Err(SessionError::Version { got: 3, newest: 2 })));
    load(&bytes).unwrap();
}

#[test]
fn rows_of_others_are_not_in_the_file() {
    let (_folder, path) = file();
    let mut one = engine(spec(4));
    one.start_alone(&text(7, 16), plain());
    one.forget();
    write(&mut one, &text(1, 6), plain(), &path);
    let bytes = fs::read(&path).unwrap();
    let chunk = ChunkSpec::new(&spec(4), GroupId(0)).unwrap().with_blocks(1).unwrap();
    let last = &bytes[bytes.len() - chunk.chunk_bytes()..];
    for layer in 0..u32::from(LAYERS) {
        for plane in [Plane::Key, Plane::Value] {
            let piece = &last[chunk.piece(0, layer, plane)];
            for head in piece.chunks(piece.len() / 2) {
                let (own, others) = head.split_at(head.len() / 2);
                assert!(own.iter().any(|byte| *byte != 0) && others.iter().all(|byte| *byte == 0));
            }
        }
    }
}

#[test]
fn what_cannot_be_written_is_refused_and_the_file_before_stays() {
    let (folder, path) = file();
    let mut one = engine(spec(64));
    let (sequence, _) = one.start_alone(&text(1, 6), plain());
    let absent = one.dump(sequence, b"", &folder.path().join("a/b.kvs"));
    assert!(matches!(absent, Err(SessionError::Io { operation: "create", .. })), "{absent:?}");
    fs::write(&path, b"before").unwrap();
    let mut dump = |sequence| one.dump(sequence, b"", &path).unwrap_err();
    assert!(matches!(dump(SequenceId(9)), SessionError::UnknownSequence { .. }));
    one.cache.cache_mut().start(SequenceId(9), &[1, 2], plain().with_reuse(false)).unwrap();
    let mut dump = |sequence| one.dump(sequence, b"", &path).unwrap_err();
    assert!(matches!(dump(SequenceId(9)), SessionError::NotReusable { .. }));
    one.cache.begin_step(&[StepInput::tokens(sequence, &[5])]).unwrap().hold();
    let mut dump = |sequence| one.dump(sequence, b"", &path).unwrap_err();
    assert!(matches!(dump(sequence), SessionError::StepOpen));
    let loaded = one.load(&path, &plain());
    assert!(matches!(loaded, Err(SessionError::StepOpen)));
    drop(one.cache.cache_mut().held());
    assert_eq!(fs::read(&path).unwrap(), b"before");
    let none = one.load(&folder.path().join("none.kvs"), &plain());
    assert!(matches!(none, Err(SessionError::Io { operation: "read", .. })));
    one.cache.cache_mut().release(sequence).unwrap();
    one.cache.cache_mut().release(SequenceId(9)).unwrap();
    one.assert_nothing_held();
}

#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_leaves_the_file_before() {
    let folder = tempfile::tempdir().unwrap();
    let mount = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=128k", "kv-tier-test"])
        .arg(folder.path())
        .output();
    if !mount.is_ok_and(|mount| mount.status.success()) {
        println!("skipped: no file system can be mounted");
        return;
    }
    let path = folder.path().join("chat.kvs");
    let mut one = engine(spec(64));
    write(&mut one, &text(1, 6), plain(), &path);
    let before = fs::read(&path).unwrap();
    let (long, _) = one.start_alone(&text(2, 100), plain());
    let full = one.dump(long, b"", &path);
    let after = fs::read(&path).unwrap();
    let files = fs::read_dir(folder.path()).unwrap().count();
    Command::new("umount").arg("-l").arg(folder.path()).status().unwrap();
    assert!(matches!(full, Err(SessionError::Io { operation: "write", .. })), "{full:?}");
    assert_eq!((before == after, files), (true, 1));
    one.forget();
    one.assert_nothing_held();
}

/// Version 1 is read for ever.
#[test]
fn the_golden_session_is_read() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/v1-f32.kvs");
    if !path.exists() {
        write(&mut engine(spec(64)), &text(1, 11), plain(), &path);
        panic!("{} was written: check it in", path.display());
    }
    let mut other = engine(spec(64));
    let session = other.load(&path, &plain()).unwrap();
    assert_eq!((session.tokens, &session.note[..]), (text(1, 11), &b"note"[..]));
    assert_eq!(other.start_alone(&text(1, 14), plain()).1, 11);
    // As drawn, without the code that writes it.
    let bytes = fs::read(&path).unwrap();
    let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    assert_eq!((&bytes[..8], u32_at(8), u32_at(12)), (&b"KVSESSN1"[..], 1, 0));
    assert_eq!((u64_at(16), u64_at(24)), (4096, 4096 + 3 * 8192));
    assert_eq!(bytes[32..64], *ModelDigest::of_bytes(b"weights").as_bytes());
    // Groups, ranges, tokens, contents, bytes of the note.
    assert_eq!([152, 156, 160, 164, 168].map(u32_at), [1, 1, 11, 0, 4]);
    assert_eq!((u64_at(192 + 32), u64_at(192 + 40)), (8192, 1));
    assert_eq!((u32_at(240), u32_at(244), u32_at(248), u32_at(252)), (0, 3, 0, 1));
    assert_eq!((&bytes[248 + 44..248 + 48], &bytes[4096..4104]), (&b"note"[..], &b"KVCHUNK1"[..]));
}

fn modified(path: &Path) -> SystemTime {
    fs::metadata(path).unwrap().modified().unwrap()
}

const CHILD: &str = "KV_TIER_SESSION_CHILD";

/// Writes one of two texts after another until it is killed.
#[test]
fn the_child() {
    let Some(path) = std::env::var_os(CHILD).map(PathBuf::from) else { return };
    let mut one = engine(spec(256));
    let sequences = [1, 2].map(|number| one.start_alone(&text(number, 300 + number), plain()).0);
    for round in 0..100_000_usize {
        one.dump(sequences[round % 2], b"", &path).unwrap();
    }
}

#[test]
fn a_killed_writer_leaves_the_old_file_or_the_new_one() {
    let runs: u32 = std::env::var("KV_TIER_CRASH_RUNS").map_or(30, |runs| runs.parse().unwrap());
    let (folder, path) = file();
    let mut rng = Rng::new(1);
    let mut other = engine(spec(256));
    let mut seen = [0, 0];
    write(&mut other, &text(1, 301), plain(), &path);
    for run in 0..runs {
        let mut child = Command::new(std::env::current_exe().unwrap());
        let child = child.args(["session::the_child", "--exact"]).env(CHILD, &path);
        let mut child = child.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        for _ in 0..=rng.below(3) {
            let before = modified(&path);
            while modified(&path) == before {
                assert!(child.try_wait().unwrap().is_none(), "the child has ended");
                std::thread::sleep(Duration::from_micros(200));
            }
        }
        std::thread::sleep(Duration::from_micros(rng.below(5_000).into()));
        child.kill().unwrap();
        child.wait().unwrap();
        other.forget();
        let session = other.load(&path, &plain()).unwrap();
        let number = u32::try_from(session.tokens.len()).unwrap() - 300;
        assert_eq!(session.tokens, text(number, 300 + number), "run {run}");
        assert_eq!(other.start_alone(&session.tokens, plain()).1, 299 + number, "run {run}");
        seen[number as usize - 1] += 1;
    }
    assert!(seen.iter().all(|n| *n > 0) || runs < 10, "{seen:?}");
    // What killed writers left is gone after the next write.
    let (sequence, _) = other.start_alone(&text(3, 9), plain());
    other.dump(sequence, b"", &path).unwrap();
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}
