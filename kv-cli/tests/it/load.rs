//! `kv load` against a server of known behaviour.
mod server;

use std::fs;
use std::net::TcpListener;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{data, fails, json, kv, number, tokens};
use server::{Answer, Got, Server};

const FIELDS: [&str; 21] = [
    "url",
    "model",
    "sent",
    "succeeded",
    "failed",
    "unfinished",
    "failures",
    "seconds",
    "requests_per_second",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "hit_ratio",
    "prompt_tokens_per_second",
    "completion_tokens_per_second",
    "running_max",
    "time_to_first_token_ms",
    "time_between_tokens_ms",
    "request_ms",
    "lateness_ms",
    "is_late",
];

/// Runs with `--json`; every field is there.
fn load(server: &Server, args: &[&str]) -> Value {
    let report = json(&[&["load", &server.url()], args].concat());
    let mut fields: Vec<_> = report.as_object().expect("an object").keys().collect();
    let mut expected = FIELDS.to_vec();
    // Said where it is not 0.
    fields.retain(|field| *field != "without_usage");
    fields.sort();
    expected.sort_unstable();
    assert_eq!(fields, expected);
    report
}

/// Returns percentiles, which never decrease.
#[track_caller]
fn percentiles(report: &Value, field: &str) -> [f64; 4] {
    let values = ["p50", "p90", "p99", "max"].map(|name| number(&report[field], name));
    assert!(values.is_sorted() && values[0] >= 0.0, "{field}: {values:?}");
    values
}

fn prompts(server: &Server) -> Vec<Vec<u64>> {
    server.completions().iter().map(|got| tokens(&got.body["prompt"])).collect()
}

#[test]
fn requests_tokens_and_times_are_those_of_the_server() {
    let delay = Duration::from_millis(5);
    let server = Server::start(|_| Answer::Tokens { count: 4, delay: Duration::from_millis(5) });
    let args = ["--rate", "200", "--requests", "30", "--prompt-tokens", "10"];
    let report = load(&server, &args);
    assert_eq!((&report["url"], &report["model"]), (&json!(server.url()), &json!("fake")));
    let counts = ["sent", "succeeded", "failed", "unfinished"].map(|name| report[name].clone());
    assert_eq!(counts, [30, 30, 0, 0].map(|count| json!(count)));
    assert_eq!(report["failures"], json!([]));
    let counts = ["prompt_tokens", "cached_tokens", "completion_tokens"];
    let counts = counts.map(|name| report[name].clone());
    assert_eq!(counts, [300, 150, 120].map(|count| json!(count)));
    assert_eq!(report["hit_ratio"], json!(0.5));
    // The server waits before each token; everything may take longer.
    let ms = delay.as_secs_f64() * 1e3;
    assert!(percentiles(&report, "time_to_first_token_ms")[0] >= ms, "{report}");
    assert!(percentiles(&report, "request_ms")[0] >= 4.0 * ms, "{report}");
    assert!(percentiles(&report, "time_between_tokens_ms")[3] >= ms, "{report}");
    percentiles(&report, "lateness_ms");
    let rate = number(&report, "succeeded") / number(&report, "seconds");
    assert!((number(&report, "requests_per_second") / rate - 1.0).abs() < 1e-9, "{report}");
    let tokens = number(&report, "completion_tokens_per_second");
    assert!((tokens / (4.0 * rate) - 1.0).abs() < 1e-9, "{report}");
}

#[test]
fn a_request_is_what_the_command_line_says() {
    let server = Server::start(|_| Answer::Tokens { count: 1, delay: Duration::ZERO });
    let made = ["--rate", "1000", "--requests", "6", "--prompt-tokens", "20", "--vocab", "100"];
    let shared = ["--shared-prefix-tokens", "12", "--max-new-tokens", "7", "--turns", "2"];
    let who = ["--model", "mine", "--api-key", "secret", "--cache-salt", "pepper"];
    let report = load(&server, &[&made[..], &shared, &who].concat());
    assert_eq!(report["succeeded"], json!(6));
    for Got { authorization, body, .. } in server.completions() {
        assert_eq!(authorization.as_deref(), Some("Bearer secret"));
        let expected = json!({
            "model": "mine", "prompt": body["prompt"], "max_tokens": 7, "temperature": 0,
            "ignore_eos": true, "stream": true, "stream_options": {"include_usage": true},
            "cache_salt": "pepper",
        });
        assert_eq!(body, expected);
    }
    let mut prompts = prompts(&server);
    prompts.sort_by_key(Vec::len);
    assert_eq!(prompts.iter().map(Vec::len).collect::<Vec<_>>(), [20, 20, 20, 35, 35, 35]);
    for prompt in &prompts {
        assert!(prompt.iter().all(|token| (3..100).contains(token)), "{prompt:?}");
        assert_eq!(prompt[..12], prompts[0][..12]);
    }
    for later in &prompts[3..] {
        let begun = prompts[..3].iter().filter(|first| later.starts_with(first)).count();
        assert_eq!(begun, 1, "a second turn begins with one of the first");
    }
}

#[test]
fn the_loop_is_open() {
    // No answer before all requests are there.
    let server = Server::start(|_| Answer::Together { count: 2, requests: 300 });
    let report = load(&server, &["--rate", "3000", "--requests", "300"]);
    assert_eq!((&report["succeeded"], &report["running_max"]), (&json!(300), &json!(300)));
    assert_eq!(server.running_max(), 300);
}

#[test]
fn connections_are_limited_when_asked_and_the_delay_is_said() {
    let server = Server::start(|_| Answer::Tokens { count: 1, delay: Duration::from_millis(20) });
    let report = load(&server, &["--rate", "5000", "--requests", "24", "--connections", "3"]);
    assert_eq!(report["succeeded"], json!(24));
    assert!(server.running_max() <= 3, "{}", server.running_max());
    // Eight rounds of 20 ms: the last requests cannot have been sent within 100 ms.
    assert!(percentiles(&report, "lateness_ms")[3] >= 100.0, "{report}");
    assert_eq!(report["is_late"], json!(true));
    let text = kv(&["load", &server.url(), "--rate", "5000", "--connections", "1"]);
    assert!(text.stdout.contains("Requests were sent late"), "{}", text.stdout);
}

#[test]
fn a_trace_is_replayed() {
    let server = Server::start(|_| Answer::Tokens { count: 1, delay: Duration::ZERO });
    let trace = data("replay.jsonl.zst");
    let scaled = ["--scale", "1000000", "--scale-tokens", "0.25", "--max-new-tokens", "5"];
    let report = load(&server, &[&["--trace", &trace], &scaled[..]].concat());
    assert_eq!(report["sent"], json!(6));
    let mut lengths: Vec<_> = prompts(&server).iter().map(Vec::len).collect();
    lengths.sort_unstable();
    let lines = fs::read_to_string(data("replay.jsonl")).expect("a trace");
    let line = |line: &str| serde_json::from_str::<Value>(line).expect("JSON");
    let quarter = |line: Value| line["input_length"].as_u64().expect("a length") / 4;
    let mut expected: Vec<_> =
        lines.lines().map(|text| usize::try_from(quarter(line(text))).expect("small")).collect();
    expected.sort_unstable();
    assert_eq!(lengths, expected);
    let shared = prompts(&server).windows(2).filter(|two| two[0][0] == two[1][0]).count();
    assert!(shared > 0, "prompts of the trace share prefixes");
    for got in server.completions() {
        assert!(got.body["max_tokens"].as_u64().is_some_and(|most| (1..=5).contains(&most)));
    }
}

#[test]
fn failures_are_counted_by_their_kind() {
    let server = Server::start(|number| match number {
        0..3 => Answer::Status(429, "the queue is full"),
        3..5 => Answer::Raw("data: {\"choices\": [{\"text\": \"a\"}]}\n\n"),
        5 => Answer::Raw("data: {\"error\": {\"message\": \"the step failed\"}}\n\n"),
        6 => Answer::Raw("other: event\n\n"),
        7 => Answer::Silence,
        _ => Answer::Tokens { count: 1, delay: Duration::ZERO },
    });
    // Time enough for all but the silent one on a busy machine.
    let args = ["--rate", "500", "--requests", "20", "--timeout", "3"];
    let dir = TempDir::new().expect("a folder");
    let plot = dir.path().join("load.svg");
    let plot = plot.to_str().expect("UTF-8");
    let report = load(&server, &[&args[..], &["--plot", plot]].concat());
    assert_eq!((&report["sent"], &report["succeeded"]), (&json!(20), &json!(12)));
    let failures = report["failures"].as_array().expect("a list");
    let of = |kind: &str| {
        let line = failures.iter().find(|line| line["kind"] == kind).cloned();
        line.unwrap_or_else(|| panic!("{kind}: {report}"))
    };
    let refused = json!({"kind": "429", "count": 3, "message": "the queue is full"});
    assert_eq!(failures[0], refused, "the most frequent kind comes first");
    assert_eq!(of("connection")["count"], json!(2));
    assert_eq!(
        (&of("stream")["count"], &of("stream")["message"]),
        (&json!(1), &json!("the step failed"))
    );
    assert!(of("protocol")["message"].as_str().is_some_and(|m| m.contains("expected data:")));
    assert_eq!(of("timeout")["count"], json!(1));
    let svg = fs::read_to_string(plot).expect("a plot");
    assert_eq!(svg.matches("<circle ").count(), 12, "one for each success");
    assert!(svg.contains("Time to first token"));
}

/// Servers are free to name and number events, and to leave the usage out.
#[test]
fn streams_of_other_servers_are_read() {
    const STREAM: &str = "retry: 5\n\nid: 1\nevent: message\ndata: {\"choices\": [{\"text\": \
        \"a\"}]}\n\n: waiting\n\nid: 2\ndata: {\"choices\": [{\"text\": \"\", \
        \"finish_reason\": \"length\"}]}\n\nevent: end\ndata: [DONE]\n\n";
    let server = Server::start(|_| Answer::Stream(STREAM));
    let report = load(&server, &["--rate", "500", "--requests", "4"]);
    assert_eq!((&report["succeeded"], &report["failed"]), (&json!(4), &json!(0)), "{report}");
    assert_eq!((&report["without_usage"], &report["prompt_tokens"]), (&json!(4), &json!(0)));
    assert!(report["time_to_first_token_ms"].is_object(), "{report}");
}

#[test]
fn a_load_without_any_success_fails() {
    let server = Server::start(|_| Answer::Status(401, "the API key is wrong"));
    let output = kv(&["load", &server.url(), "--rate", "1000", "--requests", "3"]);
    assert_eq!(output.code, 1, "{}", output.stderr);
    assert!(output.stdout.contains("failed, 401: 3"), "{}", output.stdout);
    let line = "kv: no request succeeded: 401: the API key is wrong\n";
    assert_eq!(output.stderr, line);
}

#[test]
fn what_cannot_be_loaded_is_refused_with_words() {
    let closed = TcpListener::bind("127.0.0.1:0").expect("a port");
    let away = format!("http://{}", closed.local_addr().expect("an address"));
    drop(closed);
    fails(&["load", &away, "--rate", "1"], 1, "refused");
    fails(&["load", &away, "--rate", "1", "--requests", "1", "--model", "m"], 1, "refused");
    fails(&["load", "https://host", "--rate", "1"], 2, "https is not spoken");
    fails(&["load", "host:80", "--rate", "1"], 2, "expected http://HOST");
    fails(&["load", &away], 2, "--trace");
    fails(&["load", &away, "--rate", "-1"], 2, "above 0");
    let away = away.as_str();
    fails(&["load", away, "--trace", "no/such.jsonl"], 1, "no/such.jsonl");
    fails(&["load", away, "--trace", &data("eval.txt")], 1, "line 1");
    let dir = TempDir::new().expect("a folder");
    let late = dir.path().join("late.jsonl");
    let line = |time| {
        let rest = "\"input_length\": 1, \"output_length\": 1, \"hash_ids\": [1]";
        format!("{{\"timestamp\": {time}, {rest}}}\n")
    };
    fs::write(&late, line("0") + &line("1e308")).expect("a trace");
    let late = late.to_str().expect("UTF-8");
    fails(&["load", away, "--trace", late], 1, "at most 31 days are possible");
    let shared = ["--shared-prefix-tokens", "129"];
    fails(&[&["load", away, "--rate", "1"], &shared[..]].concat(), 1, "a prompt has 128 tokens");
    fails(&["load", away, "--rate", "1", "--vocab", "3"], 1, "--first-token 3");
    let plot = ["--plot", "no/such/folder/a.svg"];
    fails(&[&["load", away, "--rate", "1"], &plot[..]].concat(), 1, "not a file in a folder");
}
