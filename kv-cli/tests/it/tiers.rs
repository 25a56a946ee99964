//! Prompts reuse what earlier processes left in tiers: after a kill, and while a store fails.
use std::process::Stdio;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::{command, fails, json, kv};

/// About 330 tokens: a chunk of this model has 256.
fn prompt() -> String {
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park \
     with her dog Max. One sunny day, they went to the park to play with a big red ball. "
        .repeat(6)
}

fn generate(new: &str, extra: &[&str]) -> Value {
    let prompt = prompt();
    let args = ["generate", "--ignore-eos", "--prompt", &prompt, "--max-new-tokens", new];
    json(&[&args, extra].concat())
}

fn disk(folder: &tempfile::TempDir) -> String {
    format!("disk={}:64MiB", folder.path().join("cache").display())
}

fn text(report: &Value) -> &str {
    report["sequences"][0]["text"].as_str().expect("a text")
}

#[test]
fn a_killed_process_leaves_its_prompt_to_the_next() {
    let folder = tempfile::tempdir().expect("a folder");
    let tier = disk(&folder);
    let plain = generate("40", &[]);
    let prompt = prompt();
    // Generates until it is killed.
    let args = ["generate", "--ignore-eos", "--prompt", &prompt, "--max-new-tokens", "180"];
    let mut killed = command(&[&args, &["--tier", tier.as_str()][..]].concat())
        .stdout(Stdio::null())
        .spawn()
        .expect("the program starts");
    let start = Instant::now();
    let is_written = || {
        let listed = kv(&["tier", "stat", &folder.path().join("cache").display().to_string()]);
        listed.code == 0 && listed.stdout.contains("1 chunk")
    };
    while !is_written() && killed.try_wait().expect("a child").is_none() {
        assert!(start.elapsed() < Duration::from_mins(1), "nothing was written");
        sleep(Duration::from_millis(10));
    }
    killed.kill().expect("a child");
    killed.wait().expect("a child");

    let again = generate("40", &["--tier", &tier]);
    assert_eq!(text(&again), text(&plain));
    assert_eq!(again["sequences"][0]["reused_tokens"], 256);
    assert_eq!(again["stats"]["reused_tokens"], 256);
    let tiers = &again["stats"]["tiers"];
    assert_eq!((&tiers["disk_tokens"], &tiers["host_tokens"]), (&256.into(), &0.into()));
    assert_eq!(tiers["stores"][0]["chunks_read"], 1);
}

#[test]
fn the_report_says_what_came_from_where() {
    let folder = tempfile::tempdir().expect("a folder");
    let (tier, prompt) = (disk(&folder), prompt());
    let args = ["generate", "--prompt", &prompt, "--max-new-tokens", "4", "--tier", &tier];
    kv(&args);
    let output = kv(&args);
    assert_eq!((output.code, output.stderr.as_str()), (0, ""));
    let words = "256 of the reused tokens from tiers: 0 from host memory, 256 from disk";
    assert!(output.stdout.contains(words), "{}", output.stdout);
    assert!(output.stdout.contains("chunks read 1 "), "{}", output.stdout);
    let compared = json(&[&args[..], &["--compare"]].concat());
    let lines = compared["tiers"]["lines"].as_array().expect("lines");
    let reused: Vec<_> = lines.iter().map(|line| line["disk_tokens"].as_u64()).collect();
    assert_eq!(reused, [Some(0), Some(256), Some(256)]);
    assert!(lines.iter().all(|line| line["same_tokens"] == true));
}

/// The one chunk of the prompt has more than 1 KiB.
#[test]
fn a_day_gets_no_more_bytes_than_it_may() {
    let prompt = prompt();
    let left = "kv: not everything was written to the tiers: 1 writes and 0 copies are left\n";
    for (bytes, written, note) in [("1KiB", 0, left), ("1GiB", 1, "")] {
        let folder = tempfile::tempdir().expect("a folder");
        let args = ["generate", "--json", "--prompt", &prompt, "--max-new-tokens", "4"];
        let tier = ["--tier", &disk(&folder), "--tier-bytes-per-day", bytes];
        let output = kv(&[&args[..], &tier].concat());
        assert_eq!((output.code, output.stderr.as_str()), (0, note), "{bytes}");
        let report: Value = serde_json::from_str(&output.stdout).expect("JSON");
        let store = &report["stats"]["tiers"]["stores"][0];
        assert_eq!(store["chunks_written"], written, "{bytes}: {store}");
    }
}

#[cfg(feature = "seal")]
#[test]
fn a_sealed_folder_serves_only_who_has_the_key() {
    let folder = tempfile::tempdir().expect("a folder");
    let tier = disk(&folder);
    let key = |name: &str, digit: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, digit.repeat(64)).expect("a key");
        path.display().to_string()
    };
    let [mine, theirs] = [key("mine", "a"), key("theirs", "b")];
    let plain = generate("4", &[]);
    for (key, reused) in [(Some(&mine), 0), (Some(&mine), 256), (Some(&theirs), 0), (None, 0)] {
        let mut extra = vec!["--tier", tier.as_str()];
        extra.extend(key.iter().flat_map(|key| ["--tier-key", key.as_str()]));
        let run = generate("4", &extra);
        assert_eq!(text(&run), text(&plain));
        assert_eq!(run["sequences"][0]["reused_tokens"], reused, "{key:?}");
    }
    // Two keys and none: the tools leave alone what they cannot read.
    let place = folder.path().join("cache").display().to_string();
    let verified = json(&["tier", "verify", &place]);
    assert_eq!((&verified["good"], &verified["broken"]), (&1.into(), &Value::Array(vec![])));
    let sealed = verified["foreign"].as_array().expect("a list");
    assert_eq!(sealed.len(), 2);
    assert!(sealed.iter().all(|chunk| chunk["why"].as_str().expect("why").starts_with("sealed")));
    let absent = folder.path().join("absent").display().to_string();
    fails(&["generate", "--json", "--tier", &tier, "--tier-key", &absent], 1, "absent");
    fails(&["generate", "--json", "--tier-key", &mine], 2, "--tier");
}

#[test]
fn a_folder_that_cannot_be_used_is_refused_before_the_model_runs() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("notes.txt"), "mine").expect("a file");
    let tier = format!("disk={}:64MiB", folder.path().display());
    fails(&["generate", "--json", "--tier", &tier], 1, "disk=");
    let tier = format!("disk={}/notes.txt/cache:64MiB", folder.path().display());
    fails(&["generate", "--json", "--tier", &tier], 1, "disk=");
    for (args, words) in [
        (&["--tier", "host=1GiB", "--tier", "host=1GiB"][..], "given twice"),
        (&["--tier", "host=1KiB"], "host memory"),
    ] {
        fails(&[&["generate", "--json"], args].concat(), 1, words);
    }
    for (args, words) in [
        (&["--tier", "2GiB"][..], "is no tier"),
        (&["--tier", "disk=cache:2GiB", "--no-reuse"], "cannot be used with"),
        (&["--wait", "2s"], "--tier"),
        (&["--tier", "host=1GiB", "--wait", "soon"], "200ms"),
        (&["--tier", "host=1GiB", "--tier-write", "often"], "reuse:N"),
        (&["--tier-bytes-per-day", "1GB"], "--tier"),
        (&["--tier", "host=1GiB", "--tier-bytes-per-day", "some"], "24GiB"),
    ] {
        fails(&[&["generate", "--json"], args].concat(), 2, words);
    }
}

#[cfg(feature = "redis")]
#[test]
fn a_server_that_stops_changes_no_text_and_is_named_once() {
    use kv_testkit::servers::{Server, ServerKind};

    if let Err(why) = ServerKind::Redis.find() {
        println!("skipped: {why}");
        return;
    }
    let server = Server::start(ServerKind::Redis, &[]).expect("a server");
    let tier = format!("redis://{}", server.address());
    let extra = ["--tier", tier.as_str(), "--tier-write", "publish"];
    let plain = generate("150", &[]);
    generate("4", &extra);
    let again = generate("150", &extra);
    assert_eq!(text(&again), text(&plain));
    assert_eq!(again["stats"]["tiers"]["store_tokens"], 256);

    // It stops in the middle: chunks of the text that follows cannot be written.
    let prompt = prompt();
    let args = ["generate", "--ignore-eos", "--json", "--prompt", &prompt];
    let args = [&args[..], &["--max-new-tokens", "150", "--wait", "all"], &extra].concat();
    server.suspend();
    let output = kv(&args);
    server.resume();
    assert_eq!(output.code, 0, "{}", output.stderr);
    // Whether a write is left at the end is a question of time; then another line says so.
    let named = output.stderr.lines().filter(|line| line.contains(&tier)).count();
    assert_eq!(named, 1, "{}", output.stderr);
    let report: Value = serde_json::from_str(&output.stdout).expect("JSON");
    assert_eq!(text(&report), text(&plain));
}
