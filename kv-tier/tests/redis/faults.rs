//! Servers that are down, stop, restart, and replies that are late, cut, reset or corrupt.
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use kv_testkit::proxy::{FaultProxy, ProxyFault};
use kv_testkit::servers::Server;
use kv_tier::redis::RedisStore;
use kv_tier::{BlockStore as _, Put, StoreErrorKind};

use crate::{Case, assert_kind, assert_timeout, bytes, chunk, open, open_at, soon};

pub(crate) const CASES: &[Case] = &[
    ("a_server_that_is_down_is_unavailable", &[], down),
    ("a_server_that_restarts_is_found_again", &[], restarted),
    ("a_hung_server_costs_the_deadline", &[], hung),
    ("a_new_connection_to_a_hung_server_costs_the_deadline", &[], hung_connect),
    ("a_busy_pool_costs_the_deadline", &[], busy_pool),
    ("a_trickle_costs_the_deadline", &[], trickle),
    ("a_late_reply_answers_no_other_question", &[], late),
    ("a_cut_reply_is_no_chunk", &[], cut),
    ("a_reset_and_a_stall_are_errors", &[], reset),
    ("a_corrupt_byte_leaves_no_connection_behind", &[], corrupt),
    ("a_slow_server_is_waited_for", &[], slow),
];

fn down(server: &mut Server) {
    let store = open(server, "");
    store.put(&chunk(1), b"x", soon()).unwrap();
    server.kill();
    for _ in 0..3 {
        let start = Instant::now();
        assert_kind(store.get(&chunk(1), &mut [0; 4], soon()), StoreErrorKind::Unavailable);
        assert!(start.elapsed() < Duration::from_secs(5), "a refusal is no timeout");
    }
    assert_kind(store.put(&chunk(1), b"x", soon()), StoreErrorKind::Unavailable);
    assert_kind(store.contains(&[chunk(1)], soon()), StoreErrorKind::Unavailable);
    assert_kind(store.remove(&[chunk(1)], soon()), StoreErrorKind::Unavailable);
    let nowhere = RedisStore::from_url("redis://no-such-host.invalid").unwrap();
    let error =
        nowhere.contains(&[chunk(1)], Instant::now() + Duration::from_millis(300)).unwrap_err();
    let kinds = [StoreErrorKind::Unavailable, StoreErrorKind::Timeout];
    assert!(kinds.contains(&error.kind()), "{error}");
}

fn restarted(server: &mut Server) {
    let store = open(server, "");
    store.put(&chunk(1), b"x", soon()).unwrap();
    server.restart().unwrap();
    // The kept connection has ended with the old server: the store notices before it asks.
    assert_eq!(store.get(&chunk(1), &mut [0; 4], soon()).unwrap(), None);
    assert_eq!(store.put(&chunk(1), b"y", soon()).unwrap(), Put::New);
}

fn hung(server: &mut Server) {
    let store = open(server, "");
    let value = bytes(1, 3_000_000);
    store.put(&chunk(1), &value, soon()).unwrap();
    server.suspend();
    assert_timeout(|deadline| store.get(&chunk(1), &mut [0; 16], deadline));
    // More than the system's buffers hold: the write itself is stuck.
    let more = vec![7; 30_000_000];
    assert_timeout(|deadline| store.put(&chunk(2), &more, deadline));
    assert_timeout(|deadline| store.contains(&[chunk(1)], deadline));
    assert_timeout(|deadline| store.remove(&[chunk(9)], deadline));
    server.resume();
    let mut into = vec![0; value.len()];
    assert_eq!(store.get(&chunk(1), &mut into, soon()).unwrap(), Some(value.len()));
    assert!(into == value, "another question's answer");
    assert_eq!(store.contains(&[2, 1].map(chunk), soon()).unwrap(), [false, true]);
}

fn hung_connect(server: &mut Server) {
    server.suspend();
    let store = open(server, "");
    assert_timeout(|deadline| store.get(&chunk(1), &mut [0; 16], deadline));
    server.resume();
    assert_eq!(store.get(&chunk(1), &mut [0; 16], soon()).unwrap(), None);
}

fn busy_pool(server: &mut Server) {
    let store = Arc::new(open(server, "?connections=1"));
    store.put(&chunk(1), b"x", soon()).unwrap();
    server.suspend();
    let first = Arc::clone(&store);
    let holder = thread::spawn(move || {
        let deadline = Instant::now() + Duration::from_millis(200);
        assert_kind(first.get(&chunk(1), &mut [0; 4], deadline), StoreErrorKind::Timeout);
    });
    assert_timeout(|deadline| store.get(&chunk(1), &mut [0; 4], deadline));
    holder.join().unwrap();
    server.resume();
    assert_eq!(store.get(&chunk(1), &mut [0; 4], soon()).unwrap(), Some(1));
}

/// A limit of each read alone would let such a call go on for hours.
fn trickle(server: &mut Server) {
    let proxy = FaultProxy::start(server.address()).unwrap();
    let store = open_at(proxy.address(), "");
    store.put(&chunk(1), &bytes(1, 50_000), soon()).unwrap();
    proxy.set(Some(ProxyFault::Trickle(Duration::from_millis(2))));
    assert_timeout(|deadline| store.get(&chunk(1), &mut vec![0; 50_000], deadline));
    assert_timeout(|deadline| store.contains(&[chunk(1); 100], deadline));
}

fn late(server: &mut Server) {
    let proxy = FaultProxy::start(server.address()).unwrap();
    let store = open_at(proxy.address(), "?connections=1");
    store.put(&chunk(1), b"one", soon()).unwrap();
    store.put(&chunk(2), b"two", soon()).unwrap();
    let mut into = [0; 3];
    for pause in [80, 120, 160] {
        // On a machine with other work, a reply may be read late that came in time.
        let is_late = (0..20).any(|_| {
            proxy.set(Some(ProxyFault::Delay(Duration::from_millis(pause))));
            let deadline = Instant::now() + Duration::from_millis(pause / 4);
            let answer = store.get(&chunk(1), &mut into, deadline);
            proxy.set(None);
            let is_late = match answer {
                Ok(read) => {
                    assert_eq!((read, &into), (Some(3), b"one"));
                    false
                }
                error => {
                    assert_kind(error, StoreErrorKind::Timeout);
                    true
                }
            };
            assert_eq!(store.get(&chunk(2), &mut into, soon()).unwrap(), Some(3));
            assert_eq!(&into, b"two");
            is_late
        });
        assert!(is_late, "no reply of 20 was later than a quarter of {pause} ms");
    }
}

/// The reply is `$22\r\n`, 22 bytes, `\r\n` and `:1\r\n`, and 64 places are cut of a longer one.
fn cut(server: &mut Server) {
    let proxy = FaultProxy::start(server.address()).unwrap();
    let store = open_at(proxy.address(), "?connections=1&ttl=1h");
    let value = bytes(1, 53);
    store.put(&chunk(1), &value, soon()).unwrap();
    let reply = "$53\r\n".len() + value.len() + "\r\n:1\r\n".len();
    assert_eq!(reply, 64);
    let mut into = [0; 53];
    for place in 0..64 {
        assert_eq!(store.get(&chunk(1), &mut into, soon()).unwrap(), Some(53), "before {place}");
        proxy.set(Some(ProxyFault::Cut(place)));
        assert_kind(store.get(&chunk(1), &mut into, soon()), StoreErrorKind::Unavailable);
    }
    assert_eq!(store.get(&chunk(1), &mut into, soon()).unwrap(), Some(53));
    assert_eq!(into[..], value);
    for place in [0, 1, 3, 6] {
        store.contains(&[chunk(1)], soon()).unwrap();
        proxy.set(Some(ProxyFault::Cut(place)));
        assert_kind(store.contains(&[1, 2].map(chunk), soon()), StoreErrorKind::Unavailable);
    }
}

fn reset(server: &mut Server) {
    let proxy = FaultProxy::start(server.address()).unwrap();
    let store = open_at(proxy.address(), "?connections=1");
    let value = bytes(1, 200_000);
    store.put(&chunk(1), &value, soon()).unwrap();
    let mut into = vec![0; value.len()];
    for place in [0, 1, 8, 9, 100, 100_000, 200_009] {
        proxy.set(Some(ProxyFault::Reset(place)));
        assert_kind(store.get(&chunk(1), &mut into, soon()), StoreErrorKind::Unavailable);
        assert_eq!(store.get(&chunk(1), &mut into, soon()).unwrap(), Some(value.len()));
        proxy.set(Some(ProxyFault::Stall(place)));
        let deadline = Instant::now() + Duration::from_millis(50);
        assert_kind(store.get(&chunk(1), &mut into, deadline), StoreErrorKind::Timeout);
        assert_eq!(store.get(&chunk(1), &mut into, soon()).unwrap(), Some(value.len()));
    }
    assert!(into == value);
}

/// Flips each byte of a reply. What is no reply is refused; a flipped byte of the value comes
/// through, for the chunk's own checksum. The next call always gets its own answer.
fn corrupt(server: &mut Server) {
    let proxy = FaultProxy::start(server.address()).unwrap();
    let store = open_at(proxy.address(), "?connections=1");
    let value = bytes(1, 20);
    store.put(&chunk(1), &value, soon()).unwrap();
    store.put(&chunk(2), b"another", soon()).unwrap();
    let mut into = [0; 64];
    let reply = "$20\r\n".len() + value.len() + "\r\n".len();
    for place in 0..reply {
        proxy.set(Some(ProxyFault::Corrupt(place as u64)));
        let deadline = Instant::now() + Duration::from_millis(40);
        match store.get(&chunk(1), &mut into, deadline) {
            Ok(found) => {
                assert!((5..25).contains(&place), "place {place} of the frame was not checked");
                assert_eq!(found, Some(20));
            }
            // A line whose end is gone may be waited for.
            Err(error) => assert!(
                [StoreErrorKind::Corrupt, StoreErrorKind::Timeout].contains(&error.kind()),
                "place {place}: {error}"
            ),
        }
        proxy.set(None);
        assert_eq!(store.get(&chunk(2), &mut into, soon()).unwrap(), Some(7), "after {place}");
        assert_eq!(&into[..7], b"another");
    }
}

fn slow(server: &mut Server) {
    let proxy = FaultProxy::start(server.address()).unwrap();
    proxy.set(Some(ProxyFault::Delay(Duration::from_millis(10))));
    let store = open_at(proxy.address(), "");
    assert_eq!(store.put(&chunk(1), b"x", soon()).unwrap(), Put::New);
    assert_eq!(store.get(&chunk(1), &mut [0; 4], soon()).unwrap(), Some(1));
}
