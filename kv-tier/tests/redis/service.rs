//! Behaviour of a server that works: keys, lifetimes, memory, users.
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use kv_testkit::servers::Server;
use kv_testkit::store::{StoreFixture, check_store};
use kv_tier::redis::RedisWarning;
use kv_tier::{BlockStore, ListChunks, Listed, Put, StoreError, StoreErrorKind};

use crate::{Case, assert_kind, bytes, chunk, key, open, soon};

pub(crate) const CASES: &[Case] = &[
    ("does_what_every_store_does", &[], suite),
    ("keys_have_prefix_version_root_and_name", &[], keys),
    ("a_chunk_is_written_once", &[], written_once),
    ("large_chunks_come_back", &[], large),
    ("many_keys_are_asked_for_at_once", &[], many),
    ("threads_share_the_connections", &[], shared),
    ("a_read_gives_the_whole_lifetime_again", &[], lifetime),
    ("a_full_server_says_so", &["--maxmemory", "3mb", "--maxmemory-policy", "noeviction"], full),
    (
        "settings_are_warned_about",
        &["--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru"],
        warned,
    ),
    ("a_password_is_checked", &["--requirepass", "right"], password),
    ("a_user_who_may_only_read_reads", &[], reader),
    ("what_is_no_chunk_is_refused", &[], no_chunk),
    ("databases_are_apart", &[], databases),
    ("what_lies_below_the_prefix_is_listed", &[], listed),
    ("fronts_are_read", &[], fronts),
];

struct Fixture<'a>(&'a Server);

impl StoreFixture for Fixture<'_> {
    fn open(&self) -> Result<Box<dyn BlockStore>, StoreError> {
        Ok(Box::new(open(self.0, "")))
    }
}

fn suite(server: &mut Server) {
    check_store(&Fixture(server));
}

fn keys(server: &mut Server) {
    let store = open(server, "?prefix=llama%3A");
    assert_eq!(store.put(&chunk(1), b"one", soon()).unwrap(), Put::New);
    assert_eq!(server.redis(&format!("EXISTS llama:{}", key(1))), ":1");
    assert_eq!(server.redis("DBSIZE"), ":1");
    assert_eq!(open(server, "").contains(&[chunk(1)], soon()).unwrap(), [false]);
    store.remove(&[chunk(1), chunk(2)], soon()).unwrap();
    assert_eq!(server.redis("DBSIZE"), ":0");
}

fn written_once(server: &mut Server) {
    let store = open(server, "");
    assert_eq!(store.put(&chunk(1), b"first", soon()).unwrap(), Put::New);
    assert_eq!(store.put(&chunk(1), b"other", soon()).unwrap(), Put::WasThere);
    let mut into = [0; 8];
    assert_eq!(store.get(&chunk(1), &mut into, soon()).unwrap(), Some(5));
    assert_eq!(&into, b"first\0\0\0");
    assert_eq!(store.get(&chunk(2), &mut into, soon()).unwrap(), None);
    assert_kind(store.put(&chunk(3), &[], soon()), StoreErrorKind::Corrupt);
    // Zeroed memory takes none until it is read, and it is refused before.
    let huge = vec![0; (512 << 20) + 1];
    assert_kind(store.put(&chunk(3), &huge, soon()), StoreErrorKind::Denied);
    assert_eq!(store.contains(&[chunk(3)], soon()).unwrap(), [false]);
}

fn large(server: &mut Server) {
    let store = open(server, "?connections=1");
    // Around the size of the client's buffer, and many times as long.
    for (number, length) in (0..).zip([1, 16_300, 16_384, 16_400, 32_768, 5_000_001]) {
        let value = bytes(number, length);
        assert_eq!(store.put(&chunk(number), &value, soon()).unwrap(), Put::New);
        let mut into = vec![0xee; length + 3];
        assert_eq!(store.get(&chunk(number), &mut into, soon()).unwrap(), Some(length));
        assert!(into[..length] == value, "{length} bytes differ");
        assert_eq!(into[length..], [0xee; 3], "written past the chunk's {length} bytes");
    }
    let clients = server.redis("INFO clients");
    assert!(clients.contains("connected_clients:2\r"), "the store's and this one's: {clients}");
}

fn many(server: &mut Server) {
    let store = open(server, "");
    let chunks: Vec<_> = (0..2_500_u32)
        .map(|number| {
            let mut name = [0; 32];
            name[..4].copy_from_slice(&number.to_le_bytes());
            kv_tier::ChunkAddress {
                root: kv_tier::ChunkName::new([2; 32]),
                name: kv_tier::ChunkName::new(name),
            }
        })
        .collect();
    for at in [0, 1_023, 1_024, 2_499] {
        store.put(&chunks[at], b"x", soon()).unwrap();
    }
    let present = store.contains(&chunks, soon()).unwrap();
    let found: Vec<_> = (0..chunks.len()).filter(|at| present[*at]).collect();
    assert_eq!(found, [0, 1_023, 1_024, 2_499]);
    store.remove(&chunks, soon()).unwrap();
    assert_eq!(server.redis("DBSIZE"), ":0");
    assert!(store.contains(&[], soon()).unwrap().is_empty());
}

fn shared(server: &mut Server) {
    let store = Arc::new(open(server, "?connections=2"));
    let one = |number: u8| {
        let store = Arc::clone(&store);
        thread::spawn(move || {
            let value = bytes(number, 100_000);
            store.put(&chunk(number), &value, soon()).unwrap();
            let mut into = vec![0; 100_000];
            for _ in 0..20 {
                assert_eq!(store.get(&chunk(number), &mut into, soon()).unwrap(), Some(100_000));
                assert!(into == value, "a reply to another thread's question");
            }
        })
    };
    let threads: Vec<_> = (0..8).map(one).collect();
    for thread in threads {
        thread.join().unwrap();
    }
}

fn lifetime(server: &mut Server) {
    let store = open(server, "?ttl=1h");
    let left = || -> u64 { server.redis(&format!("PTTL {}", key(1)))[1..].parse().unwrap() };
    let shorten = || assert_eq!(server.redis(&format!("PEXPIRE {} 5000", key(1))), ":1");
    store.put(&chunk(1), b"x", soon()).unwrap();
    assert!((3_500_000..=3_600_000).contains(&left()));
    shorten();
    assert_eq!(store.contains(&[chunk(1)], soon()).unwrap(), [true]);
    assert!(left() <= 5_000, "a lookup is no use");
    assert_eq!(store.get(&chunk(1), &mut [0; 4], soon()).unwrap(), Some(1));
    assert!(left() > 3_500_000);
    shorten();
    assert_eq!(store.put(&chunk(1), b"x", soon()).unwrap(), Put::WasThere);
    assert!(left() > 3_500_000);
    assert_eq!(store.get(&chunk(2), &mut [0; 4], soon()).unwrap(), None);
    open(server, "").put(&chunk(3), b"x", soon()).unwrap();
    assert_eq!(server.redis(&format!("PTTL {}", key(3))), ":-1");
}

fn full(server: &mut Server) {
    let store = open(server, "");
    let value = bytes(0, 400_000);
    let mut written = 0;
    let error = loop {
        match store.put(&chunk(written), &value, soon()) {
            Ok(put) => assert_eq!(put, Put::New),
            Err(error) => break error,
        }
        written += 1;
        assert!(written < 50, "3 MB hold {written} chunks of 400 kB");
    };
    assert_eq!(error.kind(), StoreErrorKind::Full, "{error}");
    let policy = RedisWarning::NoEviction { policy: "noeviction".to_owned() };
    assert_eq!(store.warnings(), [policy]);
    if written > 0 {
        assert_eq!(store.get(&chunk(0), &mut vec![0; 400_000], soon()).unwrap(), Some(400_000));
    }
    store.remove(&(0..written).map(chunk).collect::<Vec<_>>(), soon()).unwrap();
}

fn warned(server: &mut Server) {
    let store = open(server, "");
    assert_eq!(store.warnings(), [], "nothing is known before the first call");
    store.contains(&[chunk(1)], soon()).unwrap();
    assert_eq!(store.warnings(), []);
    server.redis("CONFIG SET maxmemory-policy volatile-lru");
    let store = open(server, "");
    store.contains(&[chunk(1)], soon()).unwrap();
    assert_eq!(store.warnings(), [RedisWarning::NoEviction { policy: "volatile-lru".to_owned() }]);
    let store = open(server, "?ttl=1h");
    store.contains(&[chunk(1)], soon()).unwrap();
    assert_eq!(store.warnings(), []);
    server.redis("CONFIG SET maxmemory 0");
    let store = open(server, "?ttl=1h");
    store.contains(&[chunk(1)], soon()).unwrap();
    assert_eq!(store.warnings(), [RedisWarning::NoMemoryLimit]);
}

fn password(server: &mut Server) {
    let at = |account: &str| {
        let url = format!("redis://{account}{}", server.address());
        kv_tier::redis::RedisStore::from_url(&url).unwrap()
    };
    for account in ["", ":wrong@", "default:wrong@", "nobody:right@"] {
        assert_kind(at(account).contains(&[chunk(1)], soon()), StoreErrorKind::Denied);
    }
    for account in [":right@", "default:right@"] {
        assert_eq!(at(account).contains(&[chunk(1)], soon()).unwrap(), [false]);
    }
}

fn reader(server: &mut Server) {
    open(server, "").put(&chunk(1), b"x", soon()).unwrap();
    assert_eq!(server.redis("ACL SETUSER reader on >pass ~* +get +exists"), "+OK");
    let url = format!("redis://reader:pass@{}?ttl=1h", server.address());
    let store = kv_tier::redis::RedisStore::from_url(&url).unwrap();
    let mut into = [0; 4];
    assert_eq!(store.get(&chunk(1), &mut into, soon()).unwrap(), Some(1));
    assert_eq!(store.contains(&[chunk(1)], soon()).unwrap(), [true]);
    assert!(matches!(&store.warnings()[..], [RedisWarning::ExpiryRefused { .. }]));
    assert_kind(store.put(&chunk(2), b"x", soon()), StoreErrorKind::Denied);
    assert_kind(store.remove(&[chunk(1)], soon()), StoreErrorKind::Denied);
    assert_eq!(store.get(&chunk(1), &mut into, soon()).unwrap(), Some(1));
}

fn no_chunk(server: &mut Server) {
    let store = open(server, "?connections=1");
    server.redis(&format!("SET {} \"\"", key(1)));
    server.redis(&format!("RPUSH {} a b", key(2)));
    server.redis(&format!("SET {} 123456789", key(3)));
    server.redis(&format!("SET {} 12345678", key(4)));
    let mut into = [0; 8];
    for number in [1, 2, 3] {
        assert_kind(store.get(&chunk(number), &mut into, soon()), StoreErrorKind::Corrupt);
        assert_eq!(into, [0; 8], "written for key {number}");
    }
    assert_eq!(store.get(&chunk(4), &mut into, soon()).unwrap(), Some(8));
    assert_eq!(&into, b"12345678");
    assert_eq!(
        store.contains(&[1, 2, 3, 5].map(chunk), soon()).unwrap(),
        [true, true, true, false]
    );
    store.remove(&[1, 2, 3, 4].map(chunk), soon()).unwrap();
    assert_eq!(server.redis("DBSIZE"), ":0");
}

fn databases(server: &mut Server) {
    open(server, "/3").put(&chunk(1), b"x", soon()).unwrap();
    assert_eq!(open(server, "/3").contains(&[chunk(1)], soon()).unwrap(), [true]);
    assert_eq!(open(server, "").contains(&[chunk(1)], soon()).unwrap(), [false]);
    assert_kind(open(server, "/9999").contains(&[chunk(1)], soon()), StoreErrorKind::Other);
    let past = Instant::now().checked_sub(Duration::from_millis(1)).unwrap();
    assert_kind(open(server, "").contains(&[chunk(1)], past), StoreErrorKind::Timeout);
}

fn listed(server: &mut Server) {
    // What a pattern would give a meaning.
    let store = open(server, "?prefix=a%5B%2A%5D%5C%3A");
    for number in 0..50 {
        store.put(&chunk(number), &bytes(number, 100), soon()).unwrap();
    }
    server.redis("SET ab:v1/x y");
    open(server, "").put(&chunk(99), b"x", soon()).unwrap();
    let key = |number| format!("\"a[*]\\\\:{}\"", key(number));
    assert_eq!(server.redis(&format!("RPUSH {} a b", key(77))), ":2");
    assert_eq!(server.redis("SET \"a[*]\\\\:v1/other\" x"), "+OK");
    assert_eq!(server.redis(&format!("SET {} \"\"", key(78))), "+OK");
    let (mut chunks, mut others) = (BTreeMap::new(), Vec::new());
    let mut visit = |listed| {
        match listed {
            Listed::Chunk(chunk) => _ = chunks.insert(chunk.address.name, chunk),
            Listed::Other { path } => others.push(path),
        }
        ControlFlow::Continue(())
    };
    store.list(Duration::from_secs(20), &mut visit).unwrap();
    others.sort();
    let list = format!("a[*]\\:{}", crate::key(77));
    assert_eq!(others, [list, "a[*]\\:v1/other".to_owned()]);
    assert_eq!(chunks.len(), 51);
    assert_eq!(chunks[&chunk(78).name].bytes, 0);
    let all: Vec<_> = chunks.values().map(|chunk| chunk.address).collect();
    assert!(chunks.values().all(|listed| listed.bytes == 100 || listed.bytes == 0));
    let mut into = [0; 100];
    assert_eq!(store.get(&chunks[&chunk(7).name].address, &mut into, soon()).unwrap(), Some(100));
    assert_eq!(into[..], bytes(7, 100));
    store.remove(&all, soon()).unwrap();
    let mut seen = 0;
    let mut count = |_| {
        seen += 1;
        ControlFlow::Break(())
    };
    store.list(Duration::from_secs(20), &mut count).unwrap();
    assert_eq!(seen, 1, "of two that are no chunks");
    let past = store.list(Duration::ZERO, &mut |_| ControlFlow::Continue(()));
    assert_kind(past, StoreErrorKind::Timeout);
}

fn fronts(server: &mut Server) {
    let store = open(server, "?connections=1");
    let value = bytes(1, 10_000);
    store.put(&chunk(1), &value, soon()).unwrap();
    let mut into = [0; 4_096];
    assert_eq!(store.get_front(&chunk(1), &mut into, soon()).unwrap(), Some(4_096));
    assert!(into == value[..4_096]);
    assert_eq!(store.get_front(&chunk(1), &mut vec![0; 20_000], soon()).unwrap(), Some(10_000));
    assert_eq!(store.get_front(&chunk(2), &mut into, soon()).unwrap(), None);
    server.redis(&format!("SET {} \"\"", key(3)));
    assert_kind(store.get_front(&chunk(3), &mut into, soon()), StoreErrorKind::Corrupt);
}
