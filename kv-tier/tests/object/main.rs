//! The store in S3 against real servers, behind a proxy that spoils answers, and against answers
//! that no real server gives.
#![expect(
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    clippy::panic,
    clippy::unwrap_used,
    reason = "tests"
)]
mod answers;
#[path = "../common/mod.rs"]
mod common;
mod faults;
mod listing;
mod service;

use std::net::SocketAddr;
use std::process::ExitCode;

use kv_testkit::servers::{BUCKET, Server, ServerKind, SharedServer, trial};
use kv_tier::object::ObjectStore;
use libtest_mimic::{Arguments, Trial};

use common::{assert_kind, assert_timeout, bytes, chunk, soon};

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
        let cases = service::CASES.iter().chain(faults::CASES).chain(listing::CASES);
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
