//! `kv bench` at small sizes, which say nothing about speed: every line exists, and its numbers are
//! consistent.
use serde_json::Value;

use crate::support::{fails, json, kv, number};

const SHAPE: [&str; 8] = [
    "--batch=3",
    "--context=40",
    "--layers=2",
    "--q-heads=4",
    "--kv-heads=2",
    "--head-dim=64",
    "--rounds=2",
    "--formats=bf16,fp8-e4m3,int8/l4",
];

/// Bytes of one slot of a layer and slots of 40 tokens, by format: K and V of two heads of 64. A
/// row of 128 bytes in the full-precision prefix takes four slots, because l4 has rows of 34. Few
/// formats, because a software driver compiles each shader for seconds.
const STORED: [(&str, u64, u64); 3] =
    [("bf16", 512, 40), ("fp8-e4m3", 256, 40), ("int8/l4", 200, 52)];

/// Returns a device of this machine, `None` without one of this kind.
#[expect(clippy::print_stdout, reason = "the output of a test shows what it left out")]
fn device(backend: &str) -> Option<String> {
    let report = json(&["devices"]);
    let is_its = |value: &&Value| value["backend"] == backend && value["refusal"].is_null();
    let found = report["devices"].as_array().expect("a list").iter().find(is_its);
    if found.is_none() {
        println!("skipped: no device for {backend}");
    }
    found.map(|device| device["name"].as_str().expect("text").to_owned())
}

fn whole(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is not a whole number"))
}

/// Returns the bytes that a step of two layers reads and writes.
fn moved(operation: &str, (_, slot, slots): (&str, u64, u64)) -> (u64, u64) {
    let (layers, batch, context, token) = (2, 3, 40, 2 * 2 * 64 * 2);
    let stored = layers * slots * slot;
    match operation {
        "decode" => (batch * stored, 0),
        "append" => (layers * batch * token, layers * batch * slot),
        "append-prompt" => (layers * context * token, stored),
        "copy" => (stored, stored),
        _ => panic!("{operation} is new"),
    }
}

fn every_line_is_there(backend: &str) {
    let report = json(&[&["bench", "--backend", backend][..], &SHAPE].concat());
    assert_eq!(report["backend"], backend);
    let runs_on = report["runs_on"].as_str().expect("text");
    assert!(["cpu", "card", "software"].contains(&runs_on), "{report}");
    assert_eq!(report["note"].is_null(), runs_on != "software", "{report}");
    assert_eq!((whole(&report["rounds"]), whole(&report["q_heads"])), (2, 4));
    let lines = report["lines"].as_array().expect("lines");
    let operations = ["decode", "append", "append-prompt", "copy"];
    let expected = operations.iter().flat_map(|name| STORED.map(|stored| (*name, stored)));
    assert_eq!(lines.len(), operations.len() * STORED.len());
    for (line, (operation, stored)) in lines.iter().zip(expected) {
        assert_eq!((&line["operation"], &line["format"]), (&operation.into(), &stored.0.into()));
        let bytes = (whole(&line["bytes_read"]), whole(&line["bytes_written"]));
        assert_eq!(bytes, moved(operation, stored), "{line}");
        assert_eq!(whole(&line["copy_bytes"]), bytes.0, "{line}");
        let [us, rate, copy_us, copy_rate, of_copy] =
            ["us", "gb_per_s", "copy_us", "copy_gb_per_s", "of_copy"].map(|name| {
                let figure = number(line, name);
                assert!(figure.is_finite() && figure > 0.0, "{name}: {line}");
                figure
            });
        let is_near = |a: f64, b: f64| (a - b).abs() <= 1e-9 * b;
        let giga = |bytes: u64| f64::from(u32::try_from(bytes).expect("small")) / 1e9;
        assert!(is_near(rate, giga(bytes.0 + bytes.1) / us * 1e6), "{line}");
        assert!(is_near(copy_rate, giga(2 * bytes.0) / copy_us * 1e6), "{line}");
        assert!(is_near(of_copy, rate / copy_rate), "{line}");
    }
}

#[test]
fn the_cpu_is_measured() {
    every_line_is_there("cpu");
}

#[test]
fn an_adapter_is_measured() {
    if let Some(name) = device("wgpu") {
        every_line_is_there(&name);
    }
}

#[test]
fn a_card_is_measured() {
    if let Some(name) = device("cuda") {
        every_line_is_there(&name);
    }
}

#[test]
fn the_table_lists_the_measurements() {
    let tiny = ["--batch", "1", "--context", "5", "--layers", "1", "--head-dim", "8"];
    let args = ["bench", "--formats", "bf16,l4", "--rounds", "1"];
    let output = kv(&[&args[..], &tiny].concat());
    assert_eq!((output.code, output.stderr.as_str()), (0, ""));
    let text = output.stdout;
    for words in [
        "cpu: ",
        " threads; CPU\n",
        "1 sequence of 5 tokens, 1 layer, 32 query heads on 8 kv heads of 8, blocks of 16",
        "medians of 1 round\n",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert!(!text.contains("software") && !text.contains("Decode "), "{text}");
    for operation in ["decode", "append", "append-prompt", "copy"] {
        let is_line = |line: &&str| {
            let mut words = line.split_whitespace();
            words.next() == Some(operation) && matches!(words.next(), Some("bf16" | "l4"))
        };
        assert_eq!(text.lines().filter(is_line).count(), 2, "{operation}: {text}");
    }
}

#[test]
fn an_adapter_in_software_is_reported() {
    let Some(name) = device("wgpu") else { return };
    let devices = json(&["devices"]);
    let is_it = |device: &&Value| device["name"] == name.as_str();
    let adapter = devices["devices"].as_array().expect("a list").iter().find(is_it);
    let adapter = adapter.expect("it was there").clone();
    let (shape, _) = SHAPE.split_at(SHAPE.len() - 1);
    let args = ["bench", "--backend", &name, "--formats", "bf16"];
    let text = kv(&[&args[..], shape].concat()).stdout;
    let word = |field: &str| adapter[field].as_str().expect("text");
    let first = format!("{name}: {}; {}, {}", word("adapter"), word("api"), word("kind"));
    assert!(text.starts_with(&first), "{first}: {text}");
    assert!(text.contains(&format!("driver {}\n", word("driver"))), "{text}");
    let is_software = word("kind") == "Cpu";
    assert_eq!(text.contains("A CPU runs the shaders of this adapter"), is_software, "{text}");
    assert_eq!(text.contains("say nothing about a card"), is_software, "{text}");
    assert_eq!(text.contains("of the plain copy's rate in "), !is_software, "{text}");
}

/// The figures say nothing at this size; what they are compared with is there.
#[cfg(target_os = "linux")]
#[test]
fn a_folder_is_measured_beside_its_disk() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    let dir = folder.path().to_str().expect("UTF-8");
    let args = ["bench", "--suite", "tier", "--dir", dir, "--size", "1KiB", "--rounds", "1"];
    let found = lines(&[&args[..], &["--json"]].concat());
    let of_disk = ["disk to verified memory", "memory to disk"];
    let of_engine = ["poll, nothing to do", "decode step, host memory", "decode step, to disk"];
    let has = |case: &&str| found.iter().any(|line| line["case"] == **case);
    assert!(of_disk.iter().chain(&of_engine).all(has), "{found:?}");
    for line in &found {
        let [ours, theirs, ratio] = ["ours", "theirs", "ratio"].map(|name| number(line, name));
        assert!(ours > 0.0, "{line}");
        if of_engine.iter().any(|case| line["case"] == **case) {
            // Times: less is better.
            assert!((ratio - theirs / ours).abs() < 1e-9, "{line}");
            continue;
        }
        assert!((ratio - ours / theirs).abs() < 1e-9, "{line}");
        assert_eq!(
            (whole(&line["bytes"]), &line["unit"]),
            (8 * ((2 << 20) + 4_096), &"GB/s".into())
        );
        assert!(number(line, "cpu_s_per_gib") > 0.0, "{line}");
    }
    let text = kv(&args);
    assert_eq!((text.code, text.stderr.as_str()), (0, ""));
    assert!(text.stdout.contains("chunks of 2.00 MiB; medians of 1 round\n"), "{}", text.stdout);
    assert_eq!(std::fs::read_dir(dir).expect("a folder").count(), 0, "something is left");
}

#[cfg(all(target_os = "linux", feature = "redis"))]
#[test]
fn a_server_is_measured_beside_a_plain_client() {
    use kv_testkit::servers::{Server, ServerKind};

    if ServerKind::Redis.find().is_err() {
        return;
    }
    let server = Server::start(ServerKind::Redis, &[]).expect("a server");
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    let (dir, url) =
        (folder.path().to_str().expect("UTF-8"), format!("redis://{}", server.address()));
    let args = ["bench", "--suite", "tier", "--dir", dir, "--size", "1KiB", "--rounds", "1"];
    let found = lines(&[&args[..], &["--redis", &url, "--json"]].concat());
    let threads = found.iter().filter(|line| line["peer"] == "plain RESP client");
    assert_eq!(threads.map(|line| whole(&line["threads"])).collect::<Vec<_>>(), [1, 4]);
    assert_eq!(server.redis("DBSIZE"), ":0", "something is left");
}

#[test]
fn the_suite_of_stores_is_apart() {
    for (args, words) in [
        (&["--suite", "tier,decode"][..], "measured alone"),
        (&["--suite", "tier", "--batch", "4"], "--batch is not for --suite tier"),
        (&["--suite", "decode", "--dir", "."], "--dir is for --suite tier"),
    ] {
        fails(&[&["bench"], args].concat(), 2, words);
    }
    let bad = ["bench", "--suite", "tier", "--size", "1KiB", "--redis", "redis://:pass@host"];
    #[cfg(feature = "redis")]
    fails(&bad, 1, "expected redis://HOST");
    #[cfg(not(feature = "redis"))]
    fails(&bad, 1, "without feature `redis`");
    #[cfg(not(feature = "object"))]
    fails(&["bench", "--suite", "tier", "--s3", "s3://bucket"], 1, "without feature `object`");
}

#[cfg(target_os = "linux")]
#[test]
fn memory_is_no_disk() {
    let Ok(folder) = tempfile::tempdir_in("/dev/shm") else { return };
    let dir = folder.path().to_str().expect("UTF-8");
    fails(&["bench", "--suite", "tier", "--dir", dir], 1, "is in memory (tmpfs)");
}

/// A grid of two small shapes in two formats, for every suite.
const GRID: [&str; 11] = [
    "bench",
    "--suite=all",
    "--batch=2",
    "--context=24,40",
    "--q-heads=4",
    "--kv-heads=2",
    "--head-dim=64",
    "--formats=bf16,l4",
    "--layers=2",
    "--rounds=2",
    "--json",
];
/// Rooflines fill the memory that is given, which takes unoptimised programs seconds.
const LESS_MEMORY: [&str; 2] = ["--memory", "12MiB"];

fn lines(args: &[&str]) -> Vec<Value> {
    let output = kv(args);
    assert_eq!((output.code, output.stderr.as_str()), (0, ""), "{args:?}");
    let list: Value = serde_json::from_str(&output.stdout).expect("JSON");
    list.as_array().expect("a list").clone()
}

#[test]
fn every_suite_measures_every_case() {
    let plot = tempfile::tempdir().expect("a folder");
    let path = plot.path().join("roofline.svg");
    let to = ["--plot", path.to_str().expect("UTF-8"), "--threads", "1,2", "--isa", "scalar"];
    let lines = lines(&[&GRID[..], &LESS_MEMORY, &to].concat());
    // Contexts, two more kinds of blocks and another format; plans have no formats.
    let one = 2 + 2 + 1;
    let names = ["decode", "prefill", "append", "append-prompt", "gather", "copy", "plan"];
    for threads in [1, 2] {
        for name in names {
            let is_its = |line: &&Value| line["case"] == name && line["threads"] == threads;
            let expected = if name == "plan" { one - 1 } else { one };
            assert_eq!(lines.iter().filter(is_its).count(), expected, "{name}, {threads}");
        }
    }
    assert_eq!(lines.len(), 2 * (one * names.len() - 1));
    for line in &lines {
        assert_eq!((&line["backend"], &line["isa"]), (&"cpu".into(), &"scalar".into()));
        let is_plan = line["case"] == "plan";
        assert!(number(line, "ns").is_finite() && number(line, "ns") > 0.0, "{line}");
        for name in ["gbps", "limit_gbps", "fraction"] {
            assert!(is_plan || number(line, name) > 0.0, "{name}: {line}");
            assert!(is_plan || number(line, name).is_finite(), "{name}: {line}");
        }
    }
    let decode = |line: &&Value| {
        line["case"] == "decode" && line["context"] == 40 && line["format"] == "bf16"
    };
    // K and V of two heads of 64, in bf16.
    assert_eq!(whole(&lines.iter().find(decode).expect("a case")["bytes"]), 2 * 40 * 512);
    let svg = std::fs::read_to_string(&path).expect("a plot");
    assert_eq!(svg.matches("<circle ").count(), lines.len());
}

#[test]
fn cases_that_do_not_fit_are_left_out_and_reported() {
    let args = ["--batch", "2,4000", "--context", "40", "--formats", "bf16", "--layers", "1"];
    let output = kv(&[&["bench", "--suite", "decode", "--json"], &args[..], &LESS_MEMORY].concat());
    assert_eq!(output.code, 0, "{}", output.stderr);
    let notes: Vec<_> = output.stderr.lines().collect();
    assert!(!notes.is_empty(), "{}", output.stdout);
    for line in notes {
        let is_large = line.contains("decode bf16") && line.contains("of memory, 12.00 MiB are");
        assert!(line.starts_with("kv: left out: ") && is_large, "{line}");
    }
    let list: Value = serde_json::from_str(&output.stdout).expect("JSON");
    assert!(list.as_array().expect("a list").iter().all(|line| line["batch"] == 2));
    let nothing = ["bench", "--suite", "decode", "--memory", "1KiB", "--batch", "1"];
    assert!(kv(&nothing).stderr.ends_with("kv: no case fits\n"));
    let long = ["bench", "--suite", "prefill", "--memory", "0"];
    assert_eq!(kv(&long).code, 1);
}

#[test]
fn wrong_input_is_refused() {
    let fails_with = |args: &[&str], code, words| fails(&[&["bench"], args].concat(), code, words);
    fails_with(&["--backend", "abacus"], 2, "unknown backend \"abacus\"");
    fails_with(&["--backend", "cpu:1"], 2, "expected NAME or NAME:INDEX");
    fails_with(&["--formats", "bf16,int3"], 2, "unknown stored format \"int3\"");
    fails_with(
        &["--formats", "l4,full-precision-prefix=0"],
        2,
        "unknown stored format \"full-precision-prefix=0\"",
    );
    fails_with(&["--formats", ""], 2, "unknown stored format \"\"");
    for name in ["--batch", "--context", "--q-heads", "--kv-heads", "--head-dim", "--block-size"] {
        fails_with(&[name, "0"], 2, "at least 1");
        fails_with(&[name, "-1"], 2, name);
        fails_with(&[name, "x"], 2, name);
    }
    fails_with(&["--rounds", "0"], 2, "at least 1");
    fails_with(&["--layers", "0"], 2, "--layers");
    fails_with(&["--layers", "65536"], 2, "--layers");
    fails_with(&["--kv-heads", "5"], 2, "--q-heads 32 is not a multiple of --kv-heads 5");
    fails_with(&["--block-size", "2", "--formats", "l4"], 1, "l4: full_precision_prefix");
    fails_with(&["--batch", "4294967295", "--formats", "bf16"], 1, "too many sequences");
    let many = ["--batch", "4294967294", "--context", "4294967295", "--formats", "bf16"];
    fails_with(&many, 1, "more than 2^32 blocks");
    fails_with(&["--backend", "wgpu:no such card"], 1, "no adapter");
    fails_with(&["--batch", "1,2"], 2, "--batch takes one value without --suite, 2 are given");
    fails_with(&["--block-size", "contiguous"], 2, "--block-size contiguous needs --suite");
    fails_with(&["--full"], 2, "--suite");
    fails_with(&["--suite", "sort"], 2, "sort");
    fails_with(&["--backend", "wgpu:0", "--threads", "2"], 2, "--threads is for the backend cpu");
    fails_with(&["--threads", "0"], 2, "--threads");
    fails_with(&["--isa", "sse9"], 2, "unknown instruction set \"sse9\"");
    let plot = ["--suite", "plan", "--plot", "no/such/folder/a.svg"];
    fails_with(&plot, 1, "not a file in a folder that exists");
}
