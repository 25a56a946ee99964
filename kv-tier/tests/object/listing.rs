//! The listing of a bucket over several pages of the server's answers, and the beginnings of
//! chunks.
use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::thread;
use std::time::Duration;

use kv_testkit::servers::{BUCKET, Server, ServerKind};
use kv_tier::object::ObjectStore;
use kv_tier::{
    BlockStore as _, ChunkAddress, ChunkName, ListChunks as _, Listed, ListedChunk, StoreErrorKind,
};
use object_store::aws::AmazonS3Builder;
use object_store::path::Path;
use object_store::{ClientOptions, ObjectStoreExt as _};

use crate::{Case, assert_kind, bytes, chunk, open, soon};

pub(crate) const CASES: &[Case] = &[
    ("every_page_of_a_listing_is_read", pages),
    ("a_listing_goes_on_while_its_chunks_are_removed", removed_meanwhile),
    ("a_visitor_ends_a_listing", ended),
    ("objects_that_are_no_chunks_are_named", others),
    ("a_front_is_what_there_is_of_it", fronts),
    ("a_bucket_that_is_missing_is_no_empty_one", no_bucket),
];

/// Objects of one page of an answer: the most that S3 returns.
const PAGE: u16 = 1_000;

/// Returns the address of one of many chunks of several roots.
fn numbered(number: u16) -> ChunkAddress {
    let [high, low] = number.to_be_bytes();
    let mut name = [0x5a; 32];
    // The order of names is not that of numbers.
    (name[0], name[1]) = (low.reverse_bits(), high);
    ChunkAddress { root: ChunkName::new([low % 3; 32]), name: ChunkName::new(name) }
}

/// Writes chunks of different lengths with several threads.
fn fill(server: &Server, store: &ObjectStore, count: u16) {
    let writers = 8;
    thread::scope(|scope| {
        for first in 0..writers {
            scope.spawn(move || {
                for number in (first..count).step_by(usize::from(writers)) {
                    let value = bytes(1, usize::from(number % 50) + 1);
                    let put = store.put(&numbered(number), &value, soon());
                    put.unwrap_or_else(|error| panic!("{number} of {}: {error:?}", server.kind()));
                }
            });
        }
    });
}

/// Lists everything; no chunk may come twice.
fn list(store: &ObjectStore) -> (BTreeMap<ChunkName, ListedChunk>, Vec<String>) {
    let (mut chunks, mut others) = (BTreeMap::new(), Vec::new());
    let mut visit = |listed| {
        match listed {
            Listed::Chunk(chunk) => {
                let twice = chunks.insert(chunk.address.name, chunk);
                assert_eq!(twice, None);
            }
            Listed::Other { path } => others.push(path),
        }
        ControlFlow::Continue(())
    };
    store.list(Duration::from_secs(30), &mut visit).unwrap();
    others.sort();
    (chunks, others)
}

fn remove(store: &ObjectStore, chunks: impl IntoIterator<Item = ChunkAddress>) {
    let all: Vec<_> = chunks.into_iter().collect();
    for some in all.chunks(256) {
        store.remove(some, soon()).unwrap();
    }
}

/// Moto answers too slowly for thousands.
fn more_than_a_page(server: &Server) -> u16 {
    if server.kind() == ServerKind::SeaweedFs { PAGE + 203 } else { 300 }
}

fn pages(server: &Server) {
    let store = open(server, "pages");
    assert!(list(&store).0.is_empty());
    let count = more_than_a_page(server);
    fill(server, &store, count);
    let (chunks, others) = list(&store);
    assert!(others.is_empty(), "{others:?}");
    let expected: BTreeSet<_> = (0..count).map(|number| numbered(number).name).collect();
    assert_eq!(chunks.keys().copied().collect::<BTreeSet<_>>(), expected);
    for number in 0..count {
        let (address, listed) = (numbered(number), &chunks[&numbered(number).name]);
        assert_eq!(listed.bytes, u64::from(number % 50) + 1);
        // Eight bytes of the root are in the path, the others are zeroes.
        let (known, rest) = listed.address.root.as_bytes().split_at(8);
        assert_eq!((known, rest), (&address.root.as_bytes()[..8], &[0; 24][..]));
    }
    // An address of the listing is one for calls.
    let listed = chunks[&numbered(77).name].address;
    let mut into = [0; 50];
    assert_eq!(store.get(&listed, &mut into, soon()).unwrap(), Some(28));
    assert_eq!(into[..28], bytes(1, 28));
    // Exactly a page.
    if count > PAGE {
        remove(&store, (PAGE..count).map(numbered));
        assert_eq!(list(&store).0.len(), usize::from(PAGE));
    }
    remove(&store, chunks.values().map(|listed| listed.address));
    assert!(list(&store).0.is_empty());
}

fn removed_meanwhile(server: &Server) {
    let store = open(server, "meanwhile");
    let count = more_than_a_page(server);
    fill(server, &store, count);
    let (mut seen, mut batch) = (BTreeSet::new(), Vec::new());
    let mut visit = |listed| {
        let Listed::Chunk(chunk) = listed else { panic!("{listed:?}") };
        assert!(seen.insert(chunk.address.name), "{chunk:?} came twice");
        batch.push(chunk.address);
        if batch.len() == 100 {
            store.remove(&batch, soon()).unwrap();
            batch.clear();
        }
        ControlFlow::Continue(())
    };
    store.list(Duration::from_secs(30), &mut visit).unwrap();
    assert_eq!(seen.len(), usize::from(count));
    remove(&store, batch);
    assert!(list(&store).0.is_empty());
}

fn ended(server: &Server) {
    let store = open(server, "ended");
    fill(server, &store, 20);
    let mut seen = 0;
    let mut visit = |_| {
        seen += 1;
        if seen == 7 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    store.list(Duration::from_secs(30), &mut visit).unwrap();
    assert_eq!(seen, 7);
    let past = store.list(Duration::ZERO, &mut |_| ControlFlow::Continue(()));
    assert_kind(past, StoreErrorKind::Timeout);
}

/// Writes objects as others do.
fn put_plain(server: &Server, objects: &[(&str, &[u8])]) {
    let client = ClientOptions::new().with_allow_http(true);
    let client = AmazonS3Builder::new()
        .with_bucket_name(BUCKET)
        .with_endpoint(format!("http://{}", server.address()))
        .with_access_key_id("key")
        .with_secret_access_key("secret")
        .with_client_options(client)
        .build()
        .unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    for (path, value) in objects {
        let path = Path::parse(path).unwrap();
        runtime.block_on(client.put(&path, value.to_vec().into())).unwrap();
    }
}

/// Returns the key of a chunk.
fn key(prefix: &str, chunk: &ChunkAddress) -> String {
    format!("{prefix}/v1/{}/{}", &chunk.root.to_string()[..16], chunk.name)
}

fn others(server: &Server) {
    let store = open(server, "others");
    store.put(&chunk(1), b"one", soon()).unwrap();
    let upper = key("others", &chunk(0xab)).replace("ab", "AB");
    let strange = ["others/v1/a b", "others/v1/ä%2F&=?", "others/v1/x/y", &upper];
    let (below, beside) = (format!("{}/more", key("others", &chunk(3))), "others/v10/x");
    for path in strange.iter().copied().chain([below.as_str(), beside, "others2/v1/x", "x"]) {
        put_plain(server, &[(path, b"not a chunk")]);
    }
    put_plain(server, &[(&key("others", &chunk(2)), b"")]);
    let (chunks, others) = list(&store);
    let found: Vec<_> = chunks.values().map(|listed| (listed.address.name, listed.bytes)).collect();
    assert_eq!(found, [(chunk(1).name, 3), (chunk(2).name, 0)]);
    let mut expected: Vec<_> = strange.iter().map(|&path| path.to_owned()).collect();
    expected.push(below);
    expected.sort();
    assert_eq!(others, expected);
    // A store with a shorter prefix sees none of them below its own `v1`.
    assert_eq!(list(&open(server, "other")), (BTreeMap::new(), Vec::new()));
}

fn fronts(server: &Server) {
    let store = open(server, "fronts");
    let value = bytes(1, 10_000);
    store.put(&chunk(1), &value, soon()).unwrap();
    let mut into = [0; 4_096];
    assert_eq!(store.get_front(&chunk(1), &mut into, soon()).unwrap(), Some(4_096));
    assert!(into == value[..4_096]);
    let mut large = vec![0; 20_000];
    assert_eq!(store.get_front(&chunk(1), &mut large, soon()).unwrap(), Some(10_000));
    assert!(large[..10_000] == value && large[10_000..] == [0; 10_000]);
    assert_eq!(store.get_front(&chunk(2), &mut into, soon()).unwrap(), None);
    put_plain(server, &[(&key("fronts", &chunk(3)), b"")]);
    assert_kind(store.get_front(&chunk(3), &mut into, soon()), StoreErrorKind::Corrupt);
    assert_kind(store.get(&chunk(3), &mut into, soon()), StoreErrorKind::Corrupt);
}

fn no_bucket(server: &Server) {
    let keys = [("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret")];
    let store = crate::open_with(server.address(), "no-such-bucket/x", &keys);
    let listed = store.list(Duration::from_secs(30), &mut |_| ControlFlow::Continue(()));
    assert_kind(listed, StoreErrorKind::Denied);
}
