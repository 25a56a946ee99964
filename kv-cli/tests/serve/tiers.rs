//! Failures of tiers: no text changes, and the operator learns of each.
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tempfile::TempDir;

use crate::Case;
use crate::client::{COMPLETIONS, greedy, post, text_of};
use crate::server::Server;

pub(crate) const CASES: &[Case] = &[
    ("tiers/a_removed_folder_is_told_and_made_again", removed),
    ("tiers/a_folder_without_room_is_told", full),
    ("tiers/a_folder_that_cannot_be_made_again_is_told", denied),
    ("tiers/a_damaged_chunk_is_told", damaged),
    ("tiers/a_store_that_refuses_is_told", refuses),
    ("tiers/a_store_that_comes_back_is_used", comes_back),
];

/// About 400 tokens: a chunk of this model has 256.
fn prompt(name: &str) -> Value {
    let text = format!("Once upon a time, there was a little girl named {name}. ").repeat(20);
    greedy(&text, 8)
}

/// Asks for the texts of these prompts; they must be those of a server without tiers.
fn ask(server: &Server, plain: &Server, names: &[&str]) {
    for name in names {
        let [text, expected] = [server, plain]
            .map(|server| text_of(&post(server.address(), COMPLETIONS, &prompt(name))));
        assert_eq!(text, expected, "{name}");
    }
}

fn failures(server: &Server, cause: &str) -> u64 {
    server.metrics().labelled("kv_tier_failures_total", &format!("cause=\"{cause}\""))
}

fn wait_for(server: &Server, cause: &str, count: u64) {
    server.wait_until(cause, |metrics| {
        metrics.labelled("kv_tier_failures_total", &format!("cause=\"{cause}\"")) >= count
    });
}

/// Returns the lines about tiers that failed. That something was not written is another line.
fn failed(log: &str) -> Vec<&str> {
    log.lines().filter(|line| !line.starts_with("kv: not everything was written")).collect()
}

/// Ends a server that logged two lines about a tier: at the failure, and at the end.
fn end_with(server: Server, words: &[&str]) {
    let log = server.end_with_log();
    let lines = failed(&log);
    assert_eq!(lines.len(), 2, "{log}");
    for line in lines {
        assert!(words.iter().all(|word| line.contains(word)), "{words:?}: {log}");
        assert!(line.ends_with("what was missing was computed"), "{log}");
    }
}

fn disk(folder: &Path, size: &str) -> String {
    format!("disk={}:{size}", folder.display())
}

fn chunks(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let of = |path: PathBuf| if path.is_dir() { chunks(&path) } else { vec![path] };
    let files = paths.flat_map(of);
    files.filter(|path| path.file_name().is_some_and(|name| name.len() == 64)).collect()
}

fn removed() {
    let parent = TempDir::new().expect("a folder");
    let folder = parent.path().join("cache");
    let (tier, plain) = (disk(&folder, "64MiB"), Server::start(&[]));
    let args = ["--tier", &tier, "--wait", "all"];
    let server = Server::start(&args);
    ask(&server, &plain, &["Lily"]);
    server.wait_until("written", |_| chunks(&folder).len() == 1);
    assert_eq!(failures(&server, "removed"), 0);
    fs::remove_dir_all(&folder).expect("removed");
    ask(&server, &plain, &["Tom", "Lily"]);
    server.wait_until("written again", |_| !chunks(&folder).is_empty());
    wait_for(&server, "removed", 1);
    end_with(server, &["disk=", "1 call failed", "was removed"]);
    let server = Server::start(&args);
    ask(&server, &plain, &["Tom"]);
    assert_eq!(server.metrics().labelled("kv_hit_tokens_total", "tier=\"disk\""), 256);
    server.end();
    plain.end();
}

fn full() {
    let (folder, plain) = (TempDir::new().expect("a folder"), Server::start(&[]));
    let server = Server::start(&["--tier", &disk(&folder.path().join("cache"), "4KiB")]);
    ask(&server, &plain, &["Lily", "Tom", "Lily"]);
    wait_for(&server, "full", 1);
    assert_eq!(failures(&server, "removed"), 0);
    end_with(server, &["disk=", "failed", "the store has no room"]);
    plain.end();
}

fn denied() {
    let (parent, plain) = (TempDir::new().expect("a folder"), Server::start(&[]));
    let folder = parent.path().join("cache");
    let server = Server::start(&["--tier", &disk(&folder, "64MiB")]);
    fs::remove_dir_all(&folder).expect("removed");
    fs::create_dir(&folder).expect("a folder");
    fs::write(folder.join("mine"), "mine").expect("a file");
    ask(&server, &plain, &["Lily"]);
    wait_for(&server, "denied", 1);
    wait_for(&server, "removed", 1);
    let log = server.end_with_log();
    assert_eq!(failed(&log).len(), 3, "{log}");
    assert!(log.contains("is not a folder of kv-tier"), "{log}");
    assert_eq!(fs::read_dir(&folder).expect("a folder").count(), 1, "nobody else's folder is used");
    plain.end();
}

fn damaged() {
    let (parent, plain) = (TempDir::new().expect("a folder"), Server::start(&[]));
    let folder = parent.path().join("cache");
    let tier = disk(&folder, "64MiB");
    let args = ["--tier", &tier, "--wait", "all"];
    let server = Server::start(&args);
    ask(&server, &plain, &["Lily"]);
    server.end();
    let path = &chunks(&folder)[0];
    let mut bytes = fs::read(path).expect("a chunk");
    let last = bytes.len() - 1;
    bytes[last / 2] ^= 1;
    fs::write(path, bytes).expect("a chunk");
    let server = Server::start(&args);
    ask(&server, &plain, &["Lily"]);
    wait_for(&server, "damaged", 1);
    end_with(server, &["disk=", "1 chunk was damaged"]);
    plain.end();
}

fn refuses() {
    let plain = Server::start(&[]);
    // Nobody listens there any more.
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let tier = format!("redis://user:secret@{}", listener.local_addr().expect("an address"));
    drop(listener);
    let server = Server::start(&["--tier", &tier, "--tier-write", "publish"]);
    ask(&server, &plain, &["Lily", "Tom"]);
    wait_for(&server, "unavailable", 1);
    let metrics = crate::client::get(server.address(), "/metrics").text();
    let log = server.end_with_log();
    assert!(log.contains("redis://") && log.contains("calls failed"), "{log}");
    assert!(log.lines().count() >= 2, "{log}");
    assert!(!log.contains("secret") && !metrics.contains("secret"), "{log}");
    plain.end();
}

fn comes_back() {
    use kv_testkit::servers::{Server as Store, ServerKind};

    if let Err(why) = ServerKind::Redis.find() {
        println!("skipped: {why}");
        return;
    }
    let plain = Server::start(&[]);
    let mut store = Store::start(ServerKind::Redis, &[]).expect("a server");
    let tier = format!("redis://{}", store.address());
    let server = Server::start(&["--tier", &tier, "--tier-write", "publish"]);
    ask(&server, &plain, &["Lily"]);
    store.kill();
    ask(&server, &plain, &["Tom"]);
    server.wait_until("told", |metrics| metrics.sum("kv_tier_failures_total") > 0);
    store.restart().expect("the same port");
    // A breaker that has opened lets a call through after a second.
    let names = std::cell::Cell::new(0);
    server.wait_until("used again", |_| {
        let name = format!("Ben {}", names.replace(names.get() + 1));
        ask(&server, &plain, &[&name]);
        store.redis("DBSIZE").trim() != "0"
    });
    let log = server.end_with_log();
    assert!(log.lines().count() >= 2 && log.contains(&tier), "{log}");
    plain.end();
}
