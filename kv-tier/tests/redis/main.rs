//! The store in Redis against real servers, whole and behind a proxy that spoils replies.
//!
//! What every store must do is in the suite of stores; here are the server's own limits and faults.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "tests"
)]
mod faults;
mod service;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use kv_testkit::servers::{Server, ServerKind, trial};
use kv_tier::redis::RedisStore;
use kv_tier::{ChunkAddress, ChunkName, StoreError, StoreErrorKind};
use libtest_mimic::Arguments;

/// Name of a case, more arguments of the server, and the test.
type Case = (&'static str, &'static [&'static str], fn(&mut Server));

fn main() -> ExitCode {
    let kinds = [ServerKind::Redis, ServerKind::Valkey];
    let cases: Vec<Case> = [service::CASES, faults::CASES].concat();
    let trials = kinds.iter().flat_map(|kind| {
        cases.iter().map(|(name, arguments, run)| trial(*kind, name, arguments, *run))
    });
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit_code()
}

fn open(server: &Server, parameters: &str) -> RedisStore {
    open_at(server.address(), parameters)
}

fn open_at(address: std::net::SocketAddr, parameters: &str) -> RedisStore {
    RedisStore::from_url(&format!("redis://{address}{parameters}")).unwrap()
}

fn chunk(number: u8) -> ChunkAddress {
    ChunkAddress { root: ChunkName::new([1; 32]), name: ChunkName::new([number; 32]) }
}

/// Returns the key of [`chunk`].
fn key(number: u8) -> String {
    format!("v1/{}/{}", "01".repeat(8), chunk(number).name)
}

/// Bytes that differ from place to place and from chunk to chunk.
fn bytes(number: u8, length: usize) -> Vec<u8> {
    (0..length).map(|at| (at / 251 + at * 7) as u8 ^ number).collect()
}

/// A deadline that no healthy call reaches.
fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

#[track_caller]
fn assert_kind<T: std::fmt::Debug>(result: Result<T, StoreError>, kind: StoreErrorKind) {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), kind, "{error}");
}

/// Checks that a call that gets no answer ends with a timeout, at most 50 ms late. A busy machine
/// may be late once or twice, a call without a limit is late every time.
#[track_caller]
fn assert_timeout<T: std::fmt::Debug>(call: impl Fn(Instant) -> Result<T, StoreError>) {
    let limit = Duration::from_millis(60);
    let mut late = Duration::MAX;
    for _ in 0..5 {
        let start = Instant::now();
        assert_kind(call(start + limit), StoreErrorKind::Timeout);
        late = late.min(start.elapsed().saturating_sub(limit));
        if late <= Duration::from_millis(50) {
            return;
        }
    }
    panic!("a deadline was exceeded by {late:?}");
}
