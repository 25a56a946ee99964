//! `kv replay --instances`: fleets over small traces with figures worked out by hand. A prompt that
//! is cached whole hits all of its tokens but the last.
use std::fs;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{data, fails, kv, number};

const FIELDS: [&str; 16] = [
    "route",
    "instances",
    "copies",
    "capacity_blocks",
    "hit_tokens",
    "total_tokens",
    "token_hit_ratio",
    "evictions",
    "first_token_p50_seconds",
    "first_token_p99_seconds",
    "busiest_over_mean",
    "events",
    "event_bytes",
    "restarts",
    "requests",
    "refused_requests",
];

/// Two users, each with three prompts of two blocks of 512 tokens, 100 s apart.
const TWO_USERS: [(u32, [u32; 2]); 6] =
    [(0, [1, 2]), (100, [3, 4]), (200, [3, 4]), (300, [1, 2]), (400, [1, 2]), (500, [3, 4])];

/// Writes a trace of two blocks each.
fn trace(dir: &TempDir, requests: &[(u32, [u32; 2])]) -> String {
    let line = |(seconds, ids): &(u32, [u32; 2])| {
        let lengths = r#""input_length": 1024, "output_length": 1"#;
        format!("{{\"timestamp\": {}, {lengths}, \"hash_ids\": {ids:?}}}\n", seconds * 1000)
    };
    let path = dir.path().join("trace.jsonl");
    fs::write(&path, requests.iter().map(line).collect::<String>()).expect("a file");
    path.to_str().expect("UTF-8").to_owned()
}

/// Runs with `--json`: one list on one line, each element with the same fields in the same order.
fn fleet(trace: &str, args: &[&str]) -> Vec<Value> {
    let output = kv(&[&["replay", trace, "--json"], args].concat());
    assert_eq!((output.code, output.stderr.as_str()), (0, ""), "{args:?}");
    assert_eq!(output.stdout.lines().count(), 1, "{}", output.stdout);
    let list: Value = serde_json::from_str(&output.stdout).expect("JSON");
    for text in output.stdout.trim_matches(['[', ']', '\n']).split("},{") {
        let places: Vec<_> =
            FIELDS.iter().map(|field| text.find(&format!("\"{field}\":"))).collect();
        assert!(places.is_sorted() && places[0].is_some(), "{text}");
    }
    let lines = list.as_array().expect("a list").clone();
    for line in &lines {
        assert_eq!(line.as_object().expect("an object").len(), FIELDS.len(), "{line}");
        let ratio = number(line, "hit_tokens") / number(line, "total_tokens");
        assert!((number(line, "token_hit_ratio") - ratio).abs() < 1e-12, "{line}");
    }
    lines
}

#[test]
fn every_route_has_its_hits() {
    let dir = TempDir::new().expect("a directory");
    let trace = trace(&dir, &TWO_USERS);
    let sizes = ["--instances", "2", "--capacity-blocks", "5", "--prefill", "1024"];
    let lines = fleet(&trace, &sizes);
    // In turns: 12 on 0, 34 on 1, 34 on 0, 12 on 1, and both hit. Nobody waits, so that the least
    // work is in turns too. With events each user stays.
    let [turns, least, hash, kv] = lines.as_slice() else { panic!("four routes: {lines:?}") };
    let expected = [("round-robin", 2 * 1023), ("least", 2 * 1023), ("hash", 4092), ("kv", 4092)];
    for (line, (route, tokens)) in [turns, least, hash, kv].into_iter().zip(expected) {
        assert_eq!((&line["route"], &line["hit_tokens"]), (&json!(route), &json!(tokens)));
    }
    // Two of six prompts are computed in a second each, the others in 1/1024.
    assert_eq!(turns["first_token_p50_seconds"], 1.0);
    assert!((number(kv, "first_token_p50_seconds") - 1.0 / 1024.0).abs() < 2e-9, "{kv}");
    assert_eq!(kv["first_token_p99_seconds"], 1.0);
    assert_eq!((&turns["busiest_over_mean"], &kv["busiest_over_mean"]), (&json!(1.0), &json!(1.0)));
    assert_eq!((&turns["events"], &turns["event_bytes"]), (&json!(0), &json!(0)));
    let stored = 150 + 2 * (9 + 512 * 4);
    assert_eq!((&kv["events"], &kv["event_bytes"]), (&json!(2), &json!(2 * stored)));
    for line in &lines {
        assert_eq!((&line["requests"], &line["total_tokens"]), (&json!(6), &json!(6 * 1024)));
        assert_eq!((&line["instances"], &line["copies"]), (&json!(2), &json!(1)));
        assert_eq!((&line["evictions"], &line["restarts"]), (&json!(0), &json!(0)));
    }
}

#[test]
fn a_restart_and_a_lag_lose_hits() {
    let dir = TempDir::new().expect("a directory");
    let trace = trace(&dir, &TWO_USERS);
    let sizes = ["--instances", "2", "--capacity-blocks", "4", "--route", "kv"];
    let with = |args: &[&str]| fleet(&trace, &[&sizes[..], args].concat()).remove(0);
    assert_eq!(with(&["--event-lag", "99"])["hit_tokens"], 4 * 1023);
    // After 250 s the first instance has nothing; after 500 s, at the last prompt, the second.
    let restarted = with(&["--restart", "250"]);
    assert_eq!((&restarted["hit_tokens"], &restarted["restarts"]), (&json!(2 * 1023), &json!(2)));
    // Of 34 the router hears after its second prompt and before its third, of 12 too late for its
    // second, so that both instances have both.
    let late = with(&["--event-lag", "350"]);
    assert_eq!(late["hit_tokens"], 2 * 1023);
}

#[test]
fn copies_have_blocks_and_times_of_their_own() {
    let dir = TempDir::new().expect("a directory");
    let trace = trace(&dir, &[(0, [1, 2]), (10, [1, 2])]);
    let args = ["--instances", "1", "--capacity-blocks", "100", "--route", "kv"];
    let with = |copies| fleet(&trace, &[&args[..], &["--copies", copies]].concat()).remove(0);
    let (one, five) = (with("1"), with("5"));
    assert_eq!((&one["hit_tokens"], &one["requests"]), (&json!(1023), &json!(2)));
    assert_eq!((&five["hit_tokens"], &five["requests"]), (&json!(5 * 1023), &json!(10)));
    assert_eq!((&five["events"], &five["total_tokens"]), (&json!(5), &json!(10 * 1024)));
}

#[test]
fn one_instance_hits_what_the_cache_hits() {
    let trace = data("replay.jsonl");
    for capacity in ["2", "4", "7", "8"] {
        let args = ["--capacity-blocks", capacity, "--policy", "lru"];
        let output = kv(&[&["replay", &trace, "--json"], &args[..]].concat());
        let cache: Value = serde_json::from_str(&output.stdout).expect("JSON");
        let fields = ["hit_tokens", "total_tokens", "evictions", "requests", "refused_requests"];
        for line in fleet(&trace, &[&args[..], &["--instances", "1"]].concat()) {
            for field in fields {
                assert_eq!(line[field], cache[0][field], "{field} with {capacity}: {line}");
            }
        }
    }
}

#[test]
fn a_table_and_a_plot_are_for_people() {
    let (trace, dir) = (data("replay.jsonl"), TempDir::new().expect("a directory"));
    let plot = dir.path().join("fleet.svg");
    let sizes = ["--instances", "2", "--capacity-blocks", "3", "--capacity-blocks", "8"];
    let more = ["--restart", "2", "--plot", plot.to_str().expect("UTF-8")];
    let output = kv(&[&["replay", &trace], &sizes[..], &more].concat());
    assert_eq!((output.code, output.stderr.as_str()), (0, ""));
    let lines: Vec<_> = output.stdout.lines().collect();
    assert!(lines[0].ends_with("6 requests of 7284 input tokens, Mooncake trace, blocks of 512"));
    assert_eq!(
        lines[1],
        "instances: 2, copies of the trace: 1, prefill: 22000 tokens/s, events after 0.1 s, \
         restarts: 2, one every 2 s"
    );
    assert!(lines[2].starts_with("route") && lines[2].ends_with("refused"), "{lines:?}");
    assert_eq!(lines.len(), 3 + 4 * 2, "{lines:?}");
    assert!(lines[3..].iter().all(|row| row.len() == lines[2].len()), "{lines:?}");
    let svg = fs::read_to_string(&plot).expect("a plot");
    for name in
        ["round-robin", "least p50", "hash p99", "kv", "Time to the first token by capacity"]
    {
        assert!(svg.contains(&format!("\n{name}\n")), "{name}: {svg}");
    }
}

#[test]
fn traces_of_lengths_show_queues_alone() {
    let trace = data("burstgpt.csv");
    let args = ["--instances", "2", "--capacity-blocks", "100", "--prefill", "10"];
    for line in fleet(&trace, &args) {
        assert_eq!(line["hit_tokens"], 0, "{line}");
        assert!(number(&line, "first_token_p99_seconds") > 0.0, "{line}");
    }
    let output = kv(&[&["replay", &trace], &args[..]].concat());
    assert!(output.stdout.contains("every block is new"), "{}", output.stdout);
}

#[test]
fn a_fleet_without_a_request_that_fits_has_no_times() {
    let dir = TempDir::new().expect("a directory");
    let trace = trace(&dir, &TWO_USERS);
    let args = ["--instances", "2", "--capacity-blocks", "1", "--route", "kv"];
    let line = fleet(&trace, &args).remove(0);
    assert_eq!((&line["refused_requests"], &line["hit_tokens"]), (&json!(6), &json!(0)));
    assert_eq!(line["first_token_p50_seconds"], Value::Null);
    assert_eq!(line["busiest_over_mean"], Value::Null);
}

#[test]
fn refusals_name_the_option() {
    let trace = data("replay.jsonl");
    let refused = |args: &[&str], code, words| {
        fails(&[&["replay", &trace, "--instances", "2"], args].concat(), code, words);
    };
    refused(&["--tier", "host=7"], 2, "--tier");
    refused(&["--policy", "reuse-rate"], 2, "--policy reuse-rate: the caches of a fleet");
    refused(&["--route", "random"], 2, "unknown route \"random\"");
    refused(&["--copies", "4000000000"], 1, "--copies 4000000000: 24000000000 requests in all");
    refused(&["--restart", "0.000001"], 1, "--restart 0.000001: 5400000 restarts");
    fails(&["replay", &trace, "--instances", "0"], 2, "at least 1");
    fails(&["replay", &trace, "--route", "kv"], 2, "--instances");
    fails(&["replay", &trace, "--prefill", "5"], 2, "--prefill needs --tier");
}
