//! Servers that are down or stop, and answers that are late, cut or reset.
use std::time::{Duration, Instant};

use kv_testkit::proxy::{FaultProxy, ProxyFault};
use kv_testkit::servers::Server;
use kv_tier::{BlockStore as _, StoreErrorKind};

use crate::{Case, assert_kind, assert_timeout, bytes, chunk, open, open_at, soon};

pub(crate) const CASES: &[Case] = &[
    ("a_trickle_costs_the_deadline", trickle),
    ("a_cut_answer_is_no_chunk", cut),
    ("a_reset_and_a_stall_are_errors", reset),
    ("a_late_answer_answers_no_other_question", late),
];

pub(crate) fn hangs_and_dies(server: &mut Server) {
    let store = open(server, "hung");
    let value = bytes(1, 500_000);
    store.put(&chunk(1), &value, soon()).unwrap();
    server.suspend();
    assert_timeout(|deadline| store.get(&chunk(1), &mut [0; 16], deadline));
    let more = vec![7; 4_000_000];
    assert_timeout(|deadline| store.put(&chunk(2), &more, deadline));
    assert_timeout(|deadline| store.contains(&[1, 2, 3].map(chunk), deadline));
    assert_timeout(|deadline| store.remove(&[chunk(9)], deadline));
    server.resume();
    let mut into = vec![0; value.len()];
    assert_eq!(store.get(&chunk(1), &mut into, soon()).unwrap(), Some(value.len()));
    assert!(into == value, "another question's answer");
    server.kill();
    for _ in 0..2 {
        let start = Instant::now();
        assert_kind(store.get(&chunk(1), &mut into, soon()), StoreErrorKind::Unavailable);
        assert!(start.elapsed() < Duration::from_secs(10), "a refusal is no timeout");
    }
    assert_kind(store.put(&chunk(1), b"x", soon()), StoreErrorKind::Unavailable);
    assert_kind(store.contains(&[chunk(1)], soon()), StoreErrorKind::Unavailable);
    assert_kind(store.remove(&[chunk(1)], soon()), StoreErrorKind::Unavailable);
}

/// A limit of each read alone would let such a call go on for hours.
fn trickle(server: &Server) {
    let proxy = FaultProxy::start(server.address()).unwrap();
    let store = open_at(proxy.address(), "trickle");
    store.put(&chunk(1), &bytes(1, 50_000), soon()).unwrap();
    proxy.set(Some(ProxyFault::Trickle(Duration::from_millis(2))));
    assert_timeout(|deadline| store.get(&chunk(1), &mut vec![0; 50_000], deadline));
}

/// Cuts the head of an answer and its body. A cut after the last byte that is read is no error.
fn cut(server: &Server) {
    let proxy = FaultProxy::start(server.address()).unwrap();
    let store = open_at(proxy.address(), "cut");
    let value = bytes(1, 20_000);
    store.put(&chunk(1), &value, soon()).unwrap();
    let mut into = vec![0; value.len()];
    for place in (0..10).chain((10..20_000).step_by(370)) {
        proxy.set(Some(ProxyFault::Cut(place)));
        assert_kind(store.get(&chunk(1), &mut into, soon()), StoreErrorKind::Unavailable);
    }
    proxy.set(None);
    assert_eq!(store.get(&chunk(1), &mut into, soon()).unwrap(), Some(value.len()));
    assert!(into == value);
}

fn reset(server: &Server) {
    let proxy = FaultProxy::start(server.address()).unwrap();
    let store = open_at(proxy.address(), "reset");
    let value = bytes(1, 100_000);
    store.put(&chunk(1), &value, soon()).unwrap();
    let mut into = vec![0; value.len()];
    for place in [0, 9, 90_000] {
        proxy.set(Some(ProxyFault::Reset(place)));
        assert_kind(store.get(&chunk(1), &mut into, soon()), StoreErrorKind::Unavailable);
        assert_timeout(|deadline| {
            proxy.set(Some(ProxyFault::Stall(place)));
            store.get(&chunk(1), &mut vec![0; 100_000], deadline)
        });
        proxy.set(None);
        assert_eq!(store.get(&chunk(1), &mut into, soon()).unwrap(), Some(value.len()));
    }
    assert!(into == value);
}

fn late(server: &Server) {
    let proxy = FaultProxy::start(server.address()).unwrap();
    let store = open_at(proxy.address(), "late");
    store.put(&chunk(1), b"one", soon()).unwrap();
    store.put(&chunk(2), b"two", soon()).unwrap();
    let mut into = [0; 3];
    for pause in [80, 120] {
        proxy.set(Some(ProxyFault::Delay(Duration::from_millis(pause))));
        let deadline = Instant::now() + Duration::from_millis(pause / 4);
        assert_kind(store.get(&chunk(1), &mut into, deadline), StoreErrorKind::Timeout);
        proxy.set(None);
        assert_eq!(store.get(&chunk(2), &mut into, soon()).unwrap(), Some(3));
        assert_eq!(&into, b"two");
    }
}
