//! Tests of `kv serve`: each starts the program and talks to it as its clients do.
//!
//! `KV_SERVE_CONNECTIONS` and `KV_SERVE_REQUESTS` set how much load there is: 64 and 300, in a long
//! run 1,000 and 10,000; `KV_SERVE_BODIES` how many random bodies there are: 80, or 5,000;
//! `KV_SERVE_SECONDS` how long the longest test takes: 6, or an hour. `KV_SERVE_BROWSER` is the
//! browser that opens the page.
#![expect(clippy::expect_used, clippy::panic, clippy::print_stdout, reason = "tests")]
mod behaviour;
mod chats;
mod client;
mod endurance;
mod fleet;
mod hostile;
mod load;
mod memory;
mod public;
mod random;
#[path = "../../../kv-runner/src/model/recorded.rs"]
mod recorded;
mod server;
mod states;
mod tiers;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};

fn main() -> ExitCode {
    let cases = [
        behaviour::CASES,
        chats::CASES,
        endurance::CASES,
        fleet::CASES,
        hostile::CASES,
        load::CASES,
        memory::CASES,
        states::CASES,
        tiers::CASES,
    ];
    let cases = cases.concat();
    let mut trials: Vec<_> = cases
        .into_iter()
        .map(|(name, run)| {
            Trial::test(name, move || {
                run();
                Ok(())
            })
        })
        .collect();
    trials.extend(public::trials());
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// Name of a case, and the test.
type Case = (&'static str, fn());

/// Returns the number that a variable sets.
fn number(variable: &str, default: usize) -> usize {
    std::env::var(variable).map_or(default, |text| text.parse().expect("a number"))
}
