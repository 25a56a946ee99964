//! The store in S3 against real servers, behind a proxy that spoils answers, and against answers
//! that no real server gives.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "tests"
)]
mod answers;
mod faults;
mod service;

use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use kv_testkit::servers::{BUCKET, Server, ServerKind, SharedServer, trial};
use kv_tier::object::ObjectStore;
use kv_tier::{ChunkAddress, ChunkName, StoreError, StoreErrorKind};
use libtest_mimic::{Arguments, Trial};

/// Name of a case, and the test.
type Case = (&'static str, fn(&Server));

fn main() -> ExitCode {
    let mut trials: Vec<_> = answers::CASES
        .iter()
        .map(|(name, run)| {
            Trial::test(format!("answers::{name}"), || {
                run();
                Ok(())
            })
        })
        .collect();
    for kind in [ServerKind::Moto, ServerKind::SeaweedFs] {
        let shared = SharedServer::new(kind);
        let cases = service::CASES.iter().chain(faults::CASES);
        trials.extend(cases.map(|(name, run)| shared.trial(name, *run)));
        trials.push(trial(kind, "a_server_that_hangs_and_dies", &[], faults::hangs_and_dies));
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// Opens a store with a prefix, as tests of one server run at once.
fn open(server: &Server, prefix: &str) -> ObjectStore {
    open_at(server.address(), prefix)
}

fn open_at(address: SocketAddr, prefix: &str) -> ObjectStore {
    let keys = [("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret")];
    open_with(address, &format!("{BUCKET}/{prefix}"), &keys)
}

fn open_with(address: SocketAddr, path: &str, variables: &[(&str, &str)]) -> ObjectStore {
    let url = format!("s3://{path}?endpoint=http://{address}&allow_http=true&region=eu-central-1");
    let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    ObjectStore::with_variables(&url, variables).unwrap()
}

fn chunk(number: u8) -> ChunkAddress {
    ChunkAddress { root: ChunkName::new([1; 32]), name: ChunkName::new([number; 32]) }
}

/// Bytes that differ from place to place and from chunk to chunk.
fn bytes(number: u8, length: usize) -> Vec<u8> {
    (0..length).map(|at| (at / 251 + at * 7) as u8 ^ number).collect()
}

/// A deadline that no healthy call reaches.
fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

#[track_caller]
fn assert_kind<T: std::fmt::Debug>(result: Result<T, StoreError>, kind: StoreErrorKind) {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), kind, "{error}: {:?}", std::error::Error::source(&error));
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
