//! Behaviour of a server that works.
use std::sync::Arc;
use std::thread;

use kv_testkit::servers::{BUCKET, Server, ServerKind};
use kv_testkit::store::{StoreFixture, check_store};
use kv_tier::{BlockStore, Put, StoreError, StoreErrorKind};

use crate::{Case, assert_kind, bytes, chunk, open, open_with, soon};

pub(crate) const CASES: &[Case] = &[
    ("does_what_every_store_does", suite),
    ("a_chunk_is_written_once", written_once),
    ("large_chunks_come_back", large),
    ("many_are_looked_up_and_removed_at_once", many),
    ("threads_share_a_store", shared),
    ("a_thread_of_another_runtime_may_call", other_runtime),
    ("a_request_without_a_signature_is_judged_by_the_server", unsigned),
    ("a_bucket_that_is_missing_is_said", no_bucket),
];

struct Fixture<'a>(&'a Server);

impl StoreFixture for Fixture<'_> {
    fn open(&self) -> Result<Box<dyn BlockStore>, StoreError> {
        Ok(Box::new(open(self.0, "suite")))
    }
}

fn suite(server: &Server) {
    check_store(&Fixture(server));
}

fn written_once(server: &Server) {
    let store = open(server, "once");
    let mut into = [0xee; 8];
    assert_eq!(store.get(&chunk(1), &mut into, soon()).unwrap(), None);
    assert_eq!(store.put(&chunk(1), b"first", soon()).unwrap(), Put::New);
    assert_eq!(store.put(&chunk(1), b"other", soon()).unwrap(), Put::WasThere);
    assert_eq!(store.get(&chunk(1), &mut into, soon()).unwrap(), Some(5));
    assert_eq!(&into, b"first\xee\xee\xee");
    assert_kind(store.get(&chunk(1), &mut into[..4], soon()), StoreErrorKind::Corrupt);
    assert_eq!(open(server, "once/more").contains(&[chunk(1)], soon()).unwrap(), [false]);
}

fn large(server: &Server) {
    let store = open(server, "large");
    for (number, length) in (0..).zip([1, 65_537, 5_000_001]) {
        let value = bytes(number, length);
        assert_eq!(store.put(&chunk(number), &value, soon()).unwrap(), Put::New);
        let mut into = vec![0xee; length + 3];
        assert_eq!(store.get(&chunk(number), &mut into, soon()).unwrap(), Some(length));
        assert!(into[..length] == value, "{length} bytes differ");
        assert_eq!(into[length..], [0xee; 3], "written past the chunk's {length} bytes");
    }
}

fn many(server: &Server) {
    let store = open(server, "many");
    for number in [0, 31, 32, 69] {
        store.put(&chunk(number), b"x", soon()).unwrap();
    }
    let chunks: Vec<_> = (0..70).map(chunk).collect();
    let present = store.contains(&chunks, soon()).unwrap();
    let found: Vec<_> = (0..70).filter(|at| present[*at]).collect();
    assert_eq!(found, [0, 31, 32, 69]);
    store.remove(&chunks, soon()).unwrap();
    assert_eq!(store.contains(&chunks[30..34], soon()).unwrap(), [false; 4]);
    assert!(store.contains(&[], soon()).unwrap().is_empty());
}

fn shared(server: &Server) {
    let store = Arc::new(open(server, "shared"));
    let one = |number: u8| {
        let store = Arc::clone(&store);
        thread::spawn(move || {
            let value = bytes(number, 200_000);
            store.put(&chunk(number), &value, soon()).unwrap();
            let mut into = vec![0; 200_000];
            for _ in 0..3 {
                assert_eq!(store.get(&chunk(number), &mut into, soon()).unwrap(), Some(200_000));
                assert!(into == value, "an answer to another thread's question");
            }
        })
    };
    let threads: Vec<_> = (0..8).map(one).collect();
    for thread in threads {
        thread.join().unwrap();
    }
}

fn other_runtime(server: &Server) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let store = open(server, "runtime");
        let value = bytes(1, 3_000_000);
        store.put(&chunk(1), &value, soon()).unwrap();
        let mut into = vec![0; value.len()];
        assert_eq!(store.get(&chunk(1), &mut into, soon()).unwrap(), Some(value.len()));
        assert!(into == value);
        let chunks: Vec<_> = (0..70).map(chunk).collect();
        assert!(store.contains(&chunks, soon()).unwrap()[1]);
        store.remove(&chunks, soon()).unwrap();
    });
}

/// Moto refuses a request without a signature; SeaweedFS without users accepts it.
fn unsigned(server: &Server) {
    open(server, "unsigned").put(&chunk(1), b"x", soon()).unwrap();
    let path = format!("{BUCKET}/unsigned");
    let store = open_with(server.address(), &path, &[("AWS_SKIP_SIGNATURE", "true")]);
    let found = store.get(&chunk(1), &mut [0; 4], soon());
    match server.kind() {
        ServerKind::Moto => assert_kind(found, StoreErrorKind::Denied),
        _ => assert_eq!(found.unwrap(), Some(1)),
    }
}

fn no_bucket(server: &Server) {
    let keys = [("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret")];
    let store = open_with(server.address(), "no-such-bucket/x", &keys);
    assert_kind(store.put(&chunk(1), b"x", soon()), StoreErrorKind::Denied);
    assert_eq!(store.get(&chunk(1), &mut [0; 4], soon()).unwrap(), None);
}
