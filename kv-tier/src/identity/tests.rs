//! Roots and links: what matters is in them, and they never change.
use std::fs;

use kv_core::reuse::ContentSpan;
use kv_core::{CacheSpec, GroupId};

use super::*;
use crate::ChunkName;
use crate::chunk::ChunkContent;

fn spec() -> ChunkSpec {
    let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(8).paged(4, 64);
    ChunkSpec::new(&spec.build().unwrap(), GroupId(0)).unwrap().with_blocks(2).unwrap()
}

fn identity() -> Identity {
    Identity::new(ModelDigest::of_bytes(b"weights"))
}

fn distinct(mut names: Vec<ChunkName>) {
    names.sort_unstable();
    assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "{names:?}");
}

/// Stores keep names for years: a change needs a new version of the format.
#[test]
fn names_never_change() {
    let root = identity().root(&spec(), 5, b"salt", None).unwrap();
    let keyed = identity().with_tenant_key([9; 32]).root(&spec(), 5, b"salt", None).unwrap();
    let tokens: Vec<u32> = (0..100).collect();
    let names = [
        root.name(),
        keyed.name(),
        root.link(&root.name(), &tokens, [].into_iter()),
        keyed.link(&root.name(), &tokens[..4], [].into_iter()),
    ];
    let expected = GOLDEN_NAMES.map(|name| name.parse().unwrap());
    assert_eq!(names, expected);
}

const GOLDEN_NAMES: [&str; 4] = [
    "784cd751d2cf7841e2265572ef5b0cec3436933c0cc831163cde3a593cbe3ce1",
    "249ec1fc483e2f78d55b2cd5da13e1884155c468e28b8a28fbe58420de3c4892",
    "0e5d3367d0f6925cae5bfc404fc89f97ffa9a96e0c91af1711f9448a60358709",
    "c9801b3f62d279d123f40ee61d1c0696cc67e88bc3a22596910d2265d0d76217",
];

#[test]
fn everything_that_matters_changes_the_root() {
    let adapter = |number| ModelDigest::of_bytes(&[number]);
    let plain = identity();
    let tuned = identity().with_adapter(3, adapter(1)).with_adapter(4, adapter(2));
    let root = |identity: &Identity, salt: &[u8], adapter| {
        identity.root(&spec(), 5, salt, adapter).unwrap().name()
    };
    let numerics = |name: &str| root(&identity().with_numerics(name), b"", None);
    let two_groups = CacheSpec::builder().layers(2).kv_heads(1).head_dim(8).paged(4, 64);
    let two_groups = two_groups.group([1], |group| group).build().unwrap();
    let [first, second] = [0, 1].map(|group| {
        let spec = ChunkSpec::new(&two_groups, GroupId(group)).unwrap().with_blocks(2).unwrap();
        plain.root(&spec, 5, b"", None).unwrap().name()
    });
    assert_eq!(first, root(&plain, b"", None));
    distinct(vec![
        first,
        second,
        root(&Identity::new(ModelDigest::of_bytes(b"other")), b"", None),
        plain.root(&spec(), 6, b"", None).unwrap().name(),
        plain.root(&spec().with_blocks(4).unwrap(), 5, b"", None).unwrap().name(),
        root(&plain, b"a", None),
        root(&plain, adapter(1).as_bytes(), None),
        root(&tuned, b"", Some(3)),
        root(&tuned, b"", Some(4)),
        root(&tuned, b"a", Some(3)),
        numerics(""),
        numerics("cpu"),
        root(&identity().with_numerics("b"), b"a", None),
        root(&identity().with_numerics(""), b"ab", None),
        root(&identity().with_tenant_key([0; 32]), b"", None),
        root(&identity().with_tenant_key([1; 32]), b"", None),
    ]);
    // Numbers of adapters mean nothing outside the process.
    let renumbered = identity().with_adapter(7, adapter(1));
    assert_eq!(root(&renumbered, b"", Some(7)), root(&tuned, b"", Some(3)));
    assert_eq!(root(&tuned, b"", None), root(&plain, b"", None));
}

#[test]
fn an_adapter_without_a_digest_takes_no_part() {
    let tuned = identity().with_adapter(3, ModelDigest::of_bytes(b"adapter"));
    let error = tuned.root(&spec(), 5, b"", Some(4)).unwrap_err();
    assert_eq!(error, UnknownAdapter { number: 4 });
}

#[test]
fn everything_that_matters_changes_a_link() {
    let root = identity().root(&spec(), 5, b"", None).unwrap();
    let salted = identity().root(&spec(), 5, b"a", None).unwrap();
    let start = root.name();
    let mut parts = Vec::new();
    let mut contents = |begin, id| {
        let span = ContentSpan { begin, len: 2, id };
        kv_core::reuse::BlockContent::cut(&[span], (0, 4), &mut parts);
        parts.clone().into_iter()
    };
    let none = || [].into_iter();
    distinct(vec![
        start,
        root.link(&start, &[1, 2, 3, 4], none()),
        root.link(&start, &[1, 2, 3, 5], none()),
        root.link(&start, &[1, 2, 3], none()),
        root.link(&start, &[1, 2, 3, 4], contents(0, 1)),
        root.link(&start, &[1, 2, 3, 4], contents(0, 2)),
        root.link(&start, &[1, 2, 3, 4], contents(1, 1)),
        // The bytes of a content are no tokens.
        root.link(&start, &[1, 2, 3, 4, 1, 0, 0, 0, 0, 0, 2], none()),
        root.link(&salted.name(), &[1, 2, 3, 4], none()),
        salted.link(&start, &[1, 2, 3, 4], none()),
    ]);
}

#[test]
fn a_chunk_has_the_name_of_its_last_block() {
    let root = identity().root(&spec(), 5, b"", None).unwrap();
    let tokens: Vec<u32> = (0..8).collect();
    let spans = [ContentSpan { begin: 8 + 3, len: 3, id: 6 }];
    let mut contents = Vec::new();
    ChunkContent::cut(&spec(), &spans, 1, &mut contents);
    assert_eq!(contents.len(), 2, "a part in each block");
    let parent = ChunkName::new([1; 32]);
    let part = |index: usize| [contents[index].content].into_iter();
    let middle = root.link(&parent, &tokens[..4], part(0));
    let last = root.link(&middle, &tokens[4..], part(1));
    assert_eq!(root.chunk_name(1, &parent, &tokens, &contents), last);
    assert_ne!(root.chunk_name(1, &parent, &tokens, &[]), last);
}

#[test]
#[should_panic(expected = "the tokens of all its blocks")]
fn a_chunk_without_all_tokens_has_no_name() {
    let root = identity().root(&spec(), 5, b"", None).unwrap();
    root.chunk_name(0, &root.name(), &[1; 7], &[]);
}

#[test]
fn no_secret_is_printed() {
    let identity = identity().with_tenant_key([0xab; 32]);
    let root = identity.root(&spec(), 5, b"", None).unwrap();
    for text in [format!("{identity:?}"), format!("{root:?}")] {
        assert!(!text.contains("171, 171") && !text.contains("abab"), "{text}");
        assert!(text.contains(&identity.model().to_string()), "{text}");
    }
    assert!(!format!("{root:?}").contains("link_key"));
}

#[test]
fn a_digest_covers_names_and_contents_of_weights_and_configuration() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| fs::write(dir.path().join(name), bytes).unwrap();
    let digest = || ModelDigest::of(dir.path()).unwrap();
    assert!(matches!(ModelDigest::of(dir.path()), Err(DigestError::NoWeights { .. })));
    write("config.json", b"{}");
    assert!(matches!(ModelDigest::of(dir.path()), Err(DigestError::NoWeights { .. })));
    // Longer than what is read at a time.
    write("b.safetensors", &vec![1; 200_000]);
    write("a.safetensors", b"a");
    let first = digest();
    write("README.md", b"other files do not count");
    fs::create_dir(dir.path().join("onnx")).unwrap();
    assert_eq!(digest(), first);
    let files = ["b.safetensors", "config.json", "a.safetensors"].map(|n| dir.path().join(n));
    assert_eq!(ModelDigest::of_files(&files).unwrap(), first, "in any order");
    let mut digests = vec![first];
    for (name, bytes) in [
        ("config.json", &b"{ }"[..]),
        ("adapter_config.json", b"{}"),
        ("a.safetensors", b"b"),
        ("c.gguf", b""),
    ] {
        write(name, bytes);
        digests.push(digest());
    }
    fs::rename(&files[0], dir.path().join("d.safetensors")).unwrap();
    digests.push(digest());
    digests.sort_unstable();
    assert!(digests.windows(2).all(|pair| pair[0] != pair[1]));
    assert_eq!(first.to_string().parse(), Ok(first));
    assert!("weights".parse::<ModelDigest>().is_err());
}

#[test]
fn weights_that_cannot_be_read_are_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("missing.gguf");
    let error = ModelDigest::of_files(&[&missing]).unwrap_err();
    assert!(matches!(&error, DigestError::Io { path, .. } if *path == missing), "{error}");
    assert!(matches!(ModelDigest::of(&missing), Err(DigestError::Io { .. })));
    let none: [&std::path::Path; 0] = [];
    assert!(matches!(ModelDigest::of_files(&none), Err(DigestError::NoWeights { .. })));
}
