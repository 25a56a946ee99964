//! The store in Redis against real servers, whole and behind a proxy that spoils replies.
//!
//! The suite of stores has the checks of every store; here are the server's own limits and faults.
#![expect(
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::float_cmp,
    clippy::panic,
    clippy::unwrap_used,
    reason = "tests"
)]
#[path = "../common/mod.rs"]
mod common;
mod faults;
mod handoff;
#[path = "../engine/recurrence.rs"]
#[expect(dead_code, reason = "shared with the tests of the engine, which use all of it")]
mod recurrence;
mod service;
#[path = "../engine/support.rs"]
#[expect(dead_code, reason = "shared with the tests of the engine, which use all of it")]
mod support;

use std::process::ExitCode;

use kv_testkit::servers::{Server, ServerKind, trial};
use kv_tier::redis::RedisStore;
use libtest_mimic::Arguments;

use common::{assert_kind, assert_timeout, bytes, chunk, soon};

/// Name of a case, more arguments of the server, and the test.
type Case = (&'static str, &'static [&'static str], fn(&mut Server));

fn main() -> ExitCode {
    let kinds = [ServerKind::Redis, ServerKind::Valkey];
    let cases: Vec<Case> = [service::CASES, faults::CASES, handoff::CASES].concat();
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

/// Returns the key of [`chunk`].
fn key(number: u8) -> String {
    format!("v1/{}/{}", "01".repeat(8), chunk(number).name)
}
