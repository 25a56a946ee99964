//! Load that goes on for long, in a pool that holds one longest text: memory stays flat, no block
//! leaks, and every block can still be used at the end.
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::client::{COMPLETIONS, post};
use crate::load::{break_off, check_text, cut, spawn};
use crate::server::Server;
use crate::{Case, number};

pub(crate) const CASES: &[Case] =
    &[("endurance/long_load_costs_neither_memory_nor_blocks", endures)];

/// Tokens of the longest text of the bundled model, which is as long as the pool.
const CONTEXT: u32 = 512;
const BLOCKS: u64 = 32;

/// Resident memory may grow by this between the second and the last quarter, in KiB. In an hour
/// they are half an hour and 30,000 requests apart: 150 lost bytes for each are more.
const GROWTH: u64 = 4 << 10;

/// Rounds of load, one after another, until the time is over. The server is idle after each.
fn endures() {
    let length = Duration::from_secs(number("KV_SERVE_SECONDS", 6).try_into().expect("seconds"));
    let folder = TempDir::new().expect("a folder");
    let disk = format!("disk={}:8MiB", folder.path().display());
    let server = Server::start(&["--paged", "16,32", "--tier", "host=1MiB", "--tier", &disk]);
    let (begun, mut memory, mut sent) = (Instant::now(), Vec::new(), 0);
    while begun.elapsed() < length || memory.len() < 4 {
        sent += round(&server, memory.len());
        server.wait_until_idle();
        assert_eq!(server.metrics().sum("kv_blocks_total"), BLOCKS);
        memory.push(server.memory());
    }

    // Of the first half, what is kept has been filled; the last quarter must not need more.
    let before = median(&memory[memory.len() / 4..memory.len() / 2]);
    let after = median(&memory[memory.len() - memory.len() / 4..]);
    println!(
        "{} rounds in {:.0?}, {sent} requests of `kv load`; {before} KiB resident, then {after}",
        memory.len(),
        begun.elapsed()
    );
    assert!(after <= before + GROWTH, "resident memory in KiB, after each round: {memory:?}");

    // The load was one that could have gone wrong.
    let metrics = server.metrics();
    for name in ["kv_evictions_total", "kv_preemptions_total"] {
        assert!(metrics.sum(name) > 0, "{name} is 0");
    }
    assert!(metrics.labelled("kv_texts_total", "finish=\"cancelled\"") > 0, "none was cancelled");
    let below = ["host", "disk"].map(|tier| format!("tier=\"{tier}\""));
    let hits = below.map(|tier| metrics.labelled("kv_hit_tokens_total", &tier));
    assert!(hits.iter().sum::<u64>() > 0, "no tier gave anything");

    use_every_block(&server);
    server.wait_until_idle();
    // At its end the program checks holders and counts of all blocks, and fails if one is wrong.
    server.end();
}

/// Two tenants run `kv load`; beside them, clients compare texts and break off. Returns the
/// requests of `kv load`, all of which must succeed.
fn round(server: &Server, at: usize) -> u64 {
    const CLIENTS: usize = 2;
    let is_over = AtomicBool::new(false);
    let (url, is_over) = (server.url(), &is_over);
    thread::scope(|scope| {
        for client in 0..CLIENTS {
            spawn(scope, move || {
                for step in 0.. {
                    let request = (at * 1000 + step) * CLIENTS + client;
                    match cut(request) {
                        Some(cut) => break_off(server, request, cut),
                        None => check_text(server, request),
                    }
                    if is_over.load(Ordering::Relaxed) {
                        return;
                    }
                }
            });
        }
        let tenants = ["one", "two"].map(|salt| {
            let url = &url;
            scope.spawn(move || tenant(url, salt, at))
        });
        let sent = tenants.map(ScopedJoinHandle::join);
        is_over.store(true, Ordering::Relaxed);
        sent.map(|sent| sent.expect("a tenant's load")).iter().sum()
    })
}

/// Runs `kv load`; a round repeats the prompts of the one before the last.
fn tenant(url: &str, salt: &str, round: usize) -> u64 {
    let seed = (round % 2).to_string();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kv"));
    command.args(["load", url, "--cache-salt", salt, "--seed", &seed, "--json"]);
    command.args(["--rate", "10", "--requests", "12", "--max-new-tokens", "16"]);
    command.args(["--prompt-tokens", "320", "--shared-prefix-tokens", "288"]);
    let output = command.stdin(Stdio::null()).output().expect("the program starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "kv load: {}\n{said}", output.status);
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let count = |name: &str| report[name].as_u64().expect("a count");
    assert_eq!((count("succeeded"), count("unfinished")), (count("sent"), 0), "{report}");
    count("sent")
}

/// Generates a text that needs the whole pool: with one block lost it could not end.
fn use_every_block(server: &Server) {
    let prompt = [1, 403, 407];
    let new = CONTEXT - u32::try_from(prompt.len()).expect("short");
    let body = json!({"prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": true});
    let answer = post(server.address(), COMPLETIONS, &body).json();
    assert_eq!(answer["choices"][0]["finish_reason"], "length", "{answer}");
    assert_eq!(answer["usage"]["completion_tokens"], new, "{answer}");
}

fn median(values: &[u64]) -> u64 {
    let mut values = values.to_vec();
    values.sort_unstable();
    values[values.len() / 2]
}
