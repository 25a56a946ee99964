//! Every check is needed: for each there is a chunk that only this check refuses.
use super::header::*;
use super::verify::{CHECKS, run};
use super::*;

/// A change of a right chunk, and the check that must refuse it.
type Mutant = (ChunkErrorKind, fn(&mut Vec<u8>));

fn flip(chunk: &mut [u8], at: usize) {
    chunk[at] ^= 1;
    fix(chunk, PAGE);
}

fn contents_at(chunk: &[u8]) -> usize {
    FIELDS_END + 4 * usize::from(chunk[NUM_TOKENS]) + 1024 * usize::from(chunk[NUM_TOKENS + 1])
}

const MUTANTS: [Mutant; ChunkErrorKind::ALL.len()] = [
    (ChunkErrorKind::Length, |chunk| chunk.extend([0; PAGE])),
    (ChunkErrorKind::Magic, |chunk| flip(chunk, 0)),
    (ChunkErrorKind::Version, |chunk| flip(chunk, VERSION_AT + 1)),
    (ChunkErrorKind::HeaderCrc, |chunk| chunk[PAGE - 1] ^= 1),
    (ChunkErrorKind::Flags, |chunk| flip(chunk, FLAGS)),
    (ChunkErrorKind::Name, |chunk| flip(chunk, NAME + 31)),
    (ChunkErrorKind::Root, |chunk| flip(chunk, ROOT + 31)),
    (ChunkErrorKind::Model, |chunk| flip(chunk, MODEL)),
    (ChunkErrorKind::Encoding, |chunk| flip(chunk, ENCODING_KEY + 15)),
    (ChunkErrorKind::Shard, |chunk| flip(chunk, HEADS_BEGIN)),
    (ChunkErrorKind::Geometry, |chunk| flip(chunk, FIRST_BLOCK)),
    (ChunkErrorKind::Parent, |chunk| flip(chunk, PARENT)),
    (ChunkErrorKind::LastKey, |chunk| flip(chunk, LAST_KEY + 15)),
    (ChunkErrorKind::Tokens, |chunk| flip(chunk, FIELDS_END + 4 * 255 + 3)),
    (ChunkErrorKind::Contents, |chunk| {
        let at = contents_at(chunk);
        flip(chunk, at + CONTENT_BYTES - 1);
    }),
    (ChunkErrorKind::PayloadCrc, |chunk| chunk[PAGE + 8191] ^= 1),
];

#[test]
fn each_check_alone_refuses_a_chunk_that_differs_in_its_field() {
    let fixture = fixture();
    let expected = fixture.expectation();
    for (index, (kind, change)) in MUTANTS.into_iter().enumerate() {
        assert_eq!((CHECKS[index].0, kind.index()), (kind, index), "one for each check, in order");
        assert_eq!(ChunkErrorKind::ALL[index], kind);
        let mut chunk = fixture.chunk();
        change(&mut chunk);
        let error = verify(&chunk, &expected).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        let others = CHECKS.into_iter().filter(|(other, _)| *other != kind);
        run(&chunk, &expected, others).expect("only this check refuses it");
    }
}

#[test]
fn checks_are_made_in_their_order() {
    let fixture = fixture();
    // The last change is refused first, whatever follows it.
    let mut chunk = fixture.chunk();
    let without_fix = [ChunkErrorKind::HeaderCrc, ChunkErrorKind::PayloadCrc];
    for (kind, change) in MUTANTS.into_iter().rev() {
        if without_fix.contains(&kind) || kind == ChunkErrorKind::Length {
            continue;
        }
        change(&mut chunk);
        assert_eq!(verify(&chunk, &fixture.expectation()).unwrap_err().kind(), kind);
    }
}

#[test]
fn every_field_of_the_geometry_is_compared() {
    let fixture = fixture();
    let spec = fixture.root.spec();
    let mut fields = vec![("header pages", PAGES)];
    fields.extend(numbers(spec, 1).map(|(field, at, _)| (field, at)));
    fields.extend(lengths(spec).map(|(field, at, _)| (field, at)));
    fields.extend(formats(spec).map(|(field, at, _)| (field, at)));
    assert_eq!(fields.len(), 16);
    for (expected_field, at) in fields {
        let mut chunk = fixture.chunk();
        chunk[at] ^= 1;
        if at == HEADS_OF {
            // Both ends of the range, or it were a shard.
            chunk[HEADS_END] ^= 1;
        }
        fix(&mut chunk, PAGE);
        match verify(&chunk, &fixture.expectation()).unwrap_err() {
            ChunkError::Geometry { field, expected, got } => {
                assert_eq!(field, expected_field);
                assert_ne!(expected, got, "{field}");
            }
            other => panic!("{expected_field}: {other}"),
        }
    }
}

#[test]
fn errors_say_what_came_and_what_was_expected() {
    let fixture = fixture();
    let refused = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut chunk = fixture.chunk();
        change(&mut chunk);
        verify(&chunk, &fixture.expectation()).unwrap_err().to_string()
    };
    let text = refused(&|chunk| flip(chunk, FORMAT_K));
    assert_eq!(text, "format of K: cf16, expected bf16");
    let text = refused(&|chunk| flip(chunk, FORMAT_V + 4));
    assert_eq!(text, "format of V: bf16\\x01, expected bf16");
    let text = refused(&|chunk| flip(chunk, HEADS_BEGIN));
    assert_eq!(text, "kv heads 1..1 of 1: shards are not supported");
    let text = refused(&|chunk| flip(chunk, FLAGS));
    assert_eq!(text, "sealed (flags 0x1): only who has its key reads it");
    let text = refused(&|chunk| flip(chunk, FLAGS + 1));
    assert_eq!(text, "unknown flags 0x100");
    let text = refused(&|chunk| flip(chunk, 7));
    assert_eq!(text, "begins with \"KVCHUNK0\", which is no chunk");
    let text = refused(&|chunk| flip(chunk, FIELDS_END + 8));
    assert_eq!(text, "256 tokens, expected 256; they differ from token 2 on");
    let text = refused(&|chunk| flip(chunk, NUM_TOKENS));
    assert_eq!(text, "257 tokens, expected 256; they differ from token 256 on");
    let text = refused(&|chunk| flip(chunk, NUM_CONTENTS));
    assert_eq!(text, "other contents of placeholder tokens: 3 parts, expected 2");
    let text = refused(&|chunk| chunk.truncate(100));
    assert_eq!(text, "100 bytes, expected 12288");
}

#[test]
fn a_chunk_of_the_future_is_not_ours_to_remove() {
    let fixture = fixture();
    let mut chunk = fixture.chunk();
    chunk[VERSION_AT] = 3;
    // What a later version has elsewhere is unknown, its checksum too.
    chunk[100..PAGE].fill(0x55);
    let error = verify(&chunk, &fixture.expectation()).unwrap_err();
    assert_eq!(error, ChunkError::Version { newest: 2, got: 3 });
    assert!(error.kind().is_foreign());
    assert_eq!(read_header(&chunk).unwrap_err(), error);
    let foreign: Vec<_> = ChunkErrorKind::ALL.into_iter().filter(|k| k.is_foreign()).collect();
    let expected = [
        ChunkErrorKind::Version,
        ChunkErrorKind::Flags,
        ChunkErrorKind::Model,
        ChunkErrorKind::Shard,
    ];
    assert_eq!(foreign, expected);
}

/// As if two prompts had names that collide, or a store mixed up its answers.
#[test]
fn a_chunk_of_another_prompt_is_refused_whatever_its_name() {
    let own = fixture();
    let chunk = own.chunk();
    let refused = |expected: &Expectation<'_>| verify(&chunk, expected).unwrap_err().kind();
    let other = Fixture::new(own.root.spec(), 1, 8);
    assert_eq!(refused(&other.expectation()), ChunkErrorKind::Name);
    let same = own.expectation();
    let tokens = &other.tokens;
    assert_eq!(refused(&Expectation { tokens, ..same }), ChunkErrorKind::Tokens);
    let tokens = &own.tokens[..255];
    assert_eq!(refused(&Expectation { tokens, ..same }), ChunkErrorKind::Tokens);
    assert_eq!(refused(&Expectation { tokens: &[], ..same }), ChunkErrorKind::Tokens);
    let contents = &other.contents;
    assert_eq!(refused(&Expectation { contents, ..same }), ChunkErrorKind::Contents);
    assert_eq!(refused(&Expectation { contents: &[], ..same }), ChunkErrorKind::Contents);
    let parent = other.parent;
    assert_eq!(refused(&Expectation { parent, ..same }), ChunkErrorKind::Parent);
    assert_eq!(refused(&Expectation { index: 0, ..same }), ChunkErrorKind::Geometry);
    let identity = Identity::new(own.root.model());
    let (spec, key) = (own.root.spec(), own.root.encoding_key());
    let root = &identity.root(spec, key, b"another tenant", None).unwrap();
    assert_eq!(refused(&Expectation { root, ..same }), ChunkErrorKind::Root);
    verify(&chunk, &same).unwrap();
}
