//! Many clients at once: every text is that of its prompt alone, nothing is lost, and nothing is
//! left behind, also by clients that break off.
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Barrier, OnceLock};
use std::thread;

use crate::client::{
    COMPLETIONS, Connection, greedy, long_stream, open_stream, post, request, text_of,
};
use crate::server::Server;
use crate::{Case, number};

pub(crate) const CASES: &[Case] = &[
    ("load/a_text_under_load_is_that_of_its_prompt_alone", under_load),
    ("load/clients_that_break_off_leave_nothing_behind", clients_break_off),
];

/// Different prompts; more requests repeat them.
const PROMPTS: usize = 48;
const MAX_TOKENS: u32 = 24;

fn prompt(at: usize) -> String {
    let animals = ["cat", "dog", "bird", "frog", "bear", "fox"];
    let names = ["Tom", "Lily", "Max", "Sue", "Ben", "Mia", "Tim", "Anna"];
    let tail = " He liked to play in the park with his friends.".repeat(at % 5);
    let (animal, name) = (animals[at % animals.len()], names[at / animals.len() % names.len()]);
    format!("Once upon a time, there was a {animal} named {name}.{tail}")
}

/// Returns the text of each prompt, and why it ended, from a server that runs one at a time.
fn alone() -> &'static [(String, String)] {
    static TEXTS: OnceLock<Vec<(String, String)>> = OnceLock::new();
    TEXTS.get_or_init(|| {
        let server = Server::start(&["--max-batch", "1"]);
        let texts = (0..PROMPTS).map(|at| {
            text_of(&post(server.address(), COMPLETIONS, &greedy(&prompt(at), MAX_TOKENS)))
        });
        let texts = texts.collect();
        server.end();
        texts
    })
}

/// Starts a thread that needs little memory: there may be thousands.
pub(crate) fn spawn<'s>(scope: &'s thread::Scope<'s, '_>, run: impl FnOnce() + Send + 's) {
    thread::Builder::new().stack_size(512 << 10).spawn_scoped(scope, run).expect("a thread");
}

/// All connections are open before the first request is sent. The pool holds a part of the texts
/// that run, so that some are preempted.
fn under_load() {
    let connections = number("KV_SERVE_CONNECTIONS", 64);
    let count = connections.to_string();
    let server = Server::start(&["--max-queue", &count, "--paged", "16,20"]);
    let barrier = Barrier::new(connections);
    let alone = alone();
    thread::scope(|scope| {
        for at in 0..connections {
            let (server, barrier) = (&server, &barrier);
            spawn(scope, move || {
                let mut connection = Connection::open(server.address());
                let mut body = greedy(&prompt(at % PROMPTS), MAX_TOKENS);
                let is_stream = at.is_multiple_of(2);
                body["stream"] = is_stream.into();
                barrier.wait();
                connection.send(&request(COMPLETIONS, &body)).expect("a request");
                let text = if is_stream {
                    connection.into_events().finish()
                } else {
                    text_of(&connection.answer())
                };
                assert_eq!(text, alone[at % PROMPTS], "{}", prompt(at % PROMPTS));
            });
        }
    });
    server.wait_until_idle();
    let metrics = server.metrics();
    let accepted = metrics.labelled("kv_requests_total", "outcome=\"accepted\"");
    let connections = u64::try_from(connections).expect("few");
    assert_eq!((accepted, metrics.sum("kv_texts_total")), (connections, connections));
    assert!(metrics.sum("kv_preemptions_total") > 0, "the pool was never full");
    server.end();
}

/// The point at which a client breaks off.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Cut {
    /// After this part of the request, in 1/256.
    Request(usize),
    /// At once after the request.
    Answer,
    /// After this many events of the stream.
    Events(usize),
    /// The same, of three texts.
    EventsOfThree(usize),
}

/// Says what the client of a request does; `None` for one that stays. Depends on the number alone.
pub(crate) fn cut(at: usize) -> Option<Cut> {
    if !at.is_multiple_of(3) {
        return None;
    }
    let mixed = (at / 3 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(23);
    let place = mixed / 4 % 256;
    Some(match mixed % 4 {
        0 => Cut::Request(place),
        1 => Cut::Answer,
        2 => Cut::Events(place % 40),
        _ => Cut::EventsOfThree(place % 40),
    })
}

pub(crate) fn break_off(server: &Server, at: usize, cut: Cut) {
    let mut body = long_stream(&prompt(at % PROMPTS), 200);
    match cut {
        Cut::Request(part) => {
            let bytes = request(COMPLETIONS, &body);
            let mut connection = Connection::open(server.address());
            connection.send(&bytes[..bytes.len() * part / 256]).expect("a part");
        }
        Cut::Answer => {
            body["stream"] = at.is_multiple_of(2).into();
            let mut connection = Connection::open(server.address());
            connection.send(&request(COMPLETIONS, &body)).expect("a request");
        }
        Cut::Events(events) => {
            assert_eq!(open_stream(server.address(), &body).take(events).count(), events);
        }
        Cut::EventsOfThree(events) => {
            body["n"] = 3.into();
            assert_eq!(open_stream(server.address(), &body).take(events).count(), events);
        }
    }
}

/// Sends a request and checks its text: equal to the text of the same prompt alone.
pub(crate) fn check_text(server: &Server, at: usize) {
    let body = greedy(&prompt(at % PROMPTS), MAX_TOKENS);
    let text = text_of(&post(server.address(), COMPLETIONS, &body));
    assert_eq!(text, alone()[at % PROMPTS], "request {at}");
}

/// A third of the requests is broken off at a random place.
fn clients_break_off() {
    const CLIENTS: usize = 16;
    /// Memory may vary so much, in KiB.
    const GROWTH: u64 = 16 << 10;
    let requests = number("KV_SERVE_REQUESTS", 300);
    let server = Server::start(&["--paged", "16,64"]);
    let run = |from: usize, to: usize| {
        let next = AtomicUsize::new(from);
        thread::scope(|scope| {
            for _ in 0..CLIENTS {
                spawn(scope, || {
                    loop {
                        let at = next.fetch_add(1, Ordering::Relaxed);
                        if at >= to {
                            return;
                        }
                        if let Some(cut) = cut(at) {
                            break_off(&server, at, cut);
                            continue;
                        }
                        check_text(&server, at);
                    }
                });
            }
        });
        server.wait_until_idle();
        server.memory()
    };
    // The first part fills what is kept, the second must not need more.
    let before = run(0, requests / 3);
    let after = run(requests / 3, requests);
    assert!(after < before + GROWTH, "{before} KiB after a third, {after} KiB at the end");
    let cancelled = server.metrics().labelled("kv_texts_total", "finish=\"cancelled\"");
    // Of the requests that are broken off, three of four arrive.
    assert!(cancelled > u64::try_from(requests / 8).expect("few"), "{cancelled} cancelled");
    server.end();
}
