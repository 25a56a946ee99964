//! `kv replay`: a real engine, a small trace with figures that the tests of the program work out by
//! hand. A prompt that is cached whole hits all of its tokens but the last.
use std::fs;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{data, fails, kv, number};

const FIELDS: [&str; 10] = [
    "policy",
    "capacity_blocks",
    "hit_tokens",
    "total_tokens",
    "token_hit_ratio",
    "evictions",
    "ns_per_request",
    "peak_blocks",
    "requests",
    "refused_requests",
];

/// Runs with `--json`: one list on one line, each element with the same fields in the same order.
fn replay(args: &[&str]) -> Vec<Value> {
    let output = kv(&[&["replay", "--json"], args].concat());
    assert_eq!((output.code, output.stderr.as_str()), (0, ""), "{args:?}");
    assert_eq!(output.stdout.lines().count(), 1, "{}", output.stdout);
    let list: Value = serde_json::from_str(&output.stdout).expect("JSON");
    let lines = list.as_array().expect("a list").clone();
    for text in output.stdout.trim_matches(['[', ']', '\n']).split("},{") {
        let places: Vec<_> =
            FIELDS.iter().map(|field| text.find(&format!("\"{field}\":"))).collect();
        assert!(places.is_sorted() && places[0].is_some(), "{text}");
    }
    for line in &lines {
        assert_eq!(line.as_object().expect("an object").len(), FIELDS.len(), "{line}");
        let ratio = number(line, "hit_tokens") / number(line, "total_tokens");
        assert!((number(line, "token_hit_ratio") - ratio).abs() < 1e-12, "{line}");
        assert!(line["ns_per_request"].is_u64(), "{line}");
    }
    lines
}

fn figures(line: &Value) -> [&Value; 5] {
    ["policy", "capacity_blocks", "hit_tokens", "evictions", "peak_blocks"].map(|name| &line[name])
}

/// Writes a file with this name and content.
fn file(dir: &TempDir, name: &str, content: impl AsRef<[u8]>) -> String {
    let path = dir.path().join(name);
    fs::write(&path, content).expect(name);
    path.to_str().expect("UTF-8").to_owned()
}

#[test]
fn figures_are_those_worked_out_by_hand() {
    for name in ["replay.jsonl", "replay.jsonl.zst"] {
        let trace = data(name);
        let capacities = ["--capacity-blocks", "4", "--capacity-blocks", "7"];
        let policies = ["--policy", "lru", "--policy", "min", "--policy", "infinite"];
        let lines = replay(&[&[trace.as_str()], &policies[..], &capacities[..]].concat());
        let expected = [
            json!(["lru", 4, 2535, 6, 4]),
            json!(["lru", 7, 4046, 1, 7]),
            json!(["min", 4, 3047, 5, 4]),
            json!(["min", 7, 4046, 1, 7]),
            json!(["infinite", 7, 4046, 0, 7]),
        ];
        assert_eq!(lines.len(), expected.len(), "{lines:?}");
        for (line, expected) in lines.iter().zip(&expected) {
            assert_eq!(json!(figures(line)), *expected);
            assert_eq!((&line["total_tokens"], &line["requests"]), (&json!(7284), &json!(6)));
            assert_eq!(line["refused_requests"], 0);
        }
    }
}

#[test]
fn requests_larger_than_the_cache_are_counted() {
    // acd and acdg have 3 and 4 blocks; of the others, ab is hit once before ef comes.
    let trace = data("replay.jsonl");
    let lines = replay(&[&trace, "--policy", "lru", "--capacity-blocks", "2"]);
    assert_eq!((&lines[0]["refused_requests"], &lines[0]["requests"]), (&json!(2), &json!(6)));
    assert_eq!((&lines[0]["hit_tokens"], &lines[0]["total_tokens"]), (&json!(999), &json!(7284)));
    let output = kv(&["replay", &trace, "--policy", "lru", "--capacity-blocks", "2"]);
    assert_eq!((output.code, output.stderr.as_str()), (0, ""));
    let row = output.stdout.lines().last().expect("a row");
    let cells: Vec<_> = row.split_whitespace().collect();
    assert_eq!(cells[..7], ["lru", "2", "999", "0.1371", "4", "2", "2"], "{}", output.stdout);
}

#[test]
fn a_block_size_splits_or_joins_ids() {
    let trace = data("replay.jsonl");
    let infinite = |size| replay(&[&trace, "--policy", "infinite", "--block-size", size]);
    assert_eq!(json!(figures(&infinite("256")[0])), json!(["infinite", 13, 4046, 0, 13]));
    assert_eq!(json!(figures(&infinite("1024")[0])), json!(["infinite", 5, 3022, 0, 5]));
    fails(&["replay", &trace, "--block-size", "500"], 1, "line 1: --block-size 500");
}

#[test]
fn a_capacity_beyond_the_trace_takes_no_memory() {
    let trace = data("replay.jsonl");
    let lines = replay(&[&trace, "--policy", "lru", "--capacity-blocks", "4294967295"]);
    assert_eq!(json!(figures(&lines[0])), json!(["lru", 4_294_967_295_u32, 4046, 0, 7]));
}

#[test]
fn traces_of_lengths_have_no_hits() {
    let dir = TempDir::new().expect("a directory");
    let csv = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,33,44\n\
               2023-11-16 18:15:50.9951690,100,109\n";
    let trace = file(&dir, "azure.csv", csv);
    let lines = replay(&[&trace, "--policy", "lru", "--capacity-blocks", "8"]);
    assert_eq!(json!(figures(&lines[0])), json!(["lru", 8, 0, 2, 8]));
    let output = kv(&["replay", &trace]);
    assert_eq!((output.code, output.stderr.as_str()), (0, ""));
    assert!(output.stdout.contains("every block is new"), "{}", output.stdout);
}

#[test]
fn traces_of_qwen_and_burst_gpt_are_read() {
    // Three turns of one conversation, which find one id and three, and another conversation.
    let trace = data("qwen.jsonl");
    let lines = replay(&[&trace, "--policy", "infinite"]);
    assert_eq!(json!(figures(&lines[0])), json!(["infinite", 9, 16 + 48, 0, 9]));
    assert_eq!(lines[0]["total_tokens"], 33 + 50 + 70 + 16);
    let halves = replay(&[&trace, "--policy", "infinite", "--block-size", "8"]);
    assert_eq!(halves[0]["hit_tokens"], 16 + 48);
    let lines = replay(&[&data("burstgpt.csv"), "--policy", "lru", "--capacity-blocks", "100"]);
    assert_eq!(json!(figures(&lines[0])), json!(["lru", 100, 0, 0, 30 + 68]));
    let output = kv(&["replay", &data("burstgpt.csv")]);
    assert!(output.stdout.contains("BurstGPT trace, blocks of 16"), "{}", output.stdout);
    assert!(output.stdout.contains("every block is new"), "{}", output.stdout);
}

#[test]
fn tokens_per_id_default_to_those_of_the_trace() {
    let trace = data("qwen.jsonl");
    fails(&["replay", &trace, "--tokens-per-id", "32"], 1, "2 are needed: one for every 32 begun");
    let given = replay(&[&trace, "--policy", "infinite", "--tokens-per-id", "16"]);
    assert_eq!(given[0]["hit_tokens"], 16 + 48);
    let csv = data("burstgpt.csv");
    fails(&["replay", &csv, "--tokens-per-id", "16"], 1, "a trace of BurstGPT has no ids");
    fails(&["replay", &trace, "--tokens-per-id", "0"], 2, "at least 1");
}

#[test]
fn a_table_and_a_plot_are_for_people() {
    let (trace, dir) = (data("replay.jsonl"), TempDir::new().expect("a directory"));
    let plot = dir.path().join("hits.svg");
    let output = kv(&["replay", &trace, "--plot", plot.to_str().expect("UTF-8")]);
    assert_eq!((output.code, output.stderr.as_str()), (0, ""));
    let mut lines = output.stdout.lines();
    let first = lines.next().expect("a heading");
    assert!(first.ends_with("6 requests of 7284 input tokens, Mooncake trace, blocks of 512"));
    let rows: Vec<_> = lines.collect();
    assert!(rows[0].starts_with("policy") && rows[0].ends_with("ns/request"), "{rows:?}");
    assert!(rows.iter().all(|row| row.len() == rows[0].len()), "columns line up: {rows:?}");
    for policy in ["lru", "reuse-rate", "infinite", "min"] {
        assert!(rows.iter().any(|row| row.starts_with(policy)), "{policy}: {rows:?}");
    }
    let svg = fs::read_to_string(&plot).expect("a plot");
    assert!(svg.starts_with("<svg ") && svg.contains("infinite"), "{svg}");
    fails(&["replay", &trace, "--plot", "/no/such/folder/a.svg"], 1, "/no/such/folder/a.svg");
}

#[test]
fn hints_are_part_of_the_report() {
    let (trace, dir) = (data("replay.jsonl"), TempDir::new().expect("a directory"));
    let sized = ["--policy", "lru", "--policy", "reuse-rate", "--policy", "min"];
    let sized = [&sized[..], &["--policy", "infinite", "--capacity-blocks", "4"]].concat();
    let plain = replay(&[&[trace.as_str()], &sized[..]].concat());
    let with = |trace: &str, more: &[&str]| {
        let output = kv(&[&["replay", "--json", trace], &sized[..], more].concat());
        assert_eq!((output.code, output.stderr.as_str()), (0, ""), "{more:?}");
        let list: Value = serde_json::from_str(&output.stdout).expect("JSON");
        list.as_array().expect("a list").clone()
    };
    for source in ["oracle", "noisy=0.5"] {
        let lines = with(&trace, &["--hints", source]);
        assert_eq!(lines.len(), plain.len());
        for (line, without) in lines.iter().zip(&plain) {
            assert_eq!((&line["hints"], &without["hints"]), (&json!(source), &Value::Null));
            assert_eq!(line["total_tokens"], without["total_tokens"]);
            // A policy that learns from hints may evict others.
            if line["policy"] != "reuse-rate" {
                assert_eq!(figures(line), figures(without), "{source}");
            }
        }
    }
    let [plain, tiers] = [&[][..], &["--hints", "oracle"]]
        .map(|hints| with(&trace, &[&["--tier", "host=3"], hints].concat()).swap_remove(0));
    assert_eq!((&tiers["hints"], &tiers["policy"]), (&json!("oracle"), &json!("lru")));
    assert_eq!(tiers["tiers"], plain["tiers"]);
    assert!(number(&tiers["tiers"], "hit_tokens") > number(&tiers, "hit_tokens"), "{tiers}");
    let states =
        on_grid(&trace, &["--policy", "lru", "--capacity-blocks", "9", "--hints", "oracle"]);
    assert!(states.len() > 1 && states.iter().all(|line| line["hints"] == "oracle"), "{states:?}");
    // What the trace says itself, unless others are asked for.
    let text = fs::read_to_string(&trace).expect("the trace");
    let own = text.replace("\"hash_ids\"", "\"return\": \"tool-call\", \"hash_ids\"");
    let own = file(&dir, "own.jsonl", own);
    assert_eq!(with(&own, &[])[0]["hints"], "trace");
    assert_eq!(with(&own, &["--hints", "oracle"])[0]["hints"], "oracle");
    let output = kv(&["replay", &own, "--policy", "lru"]);
    assert_eq!(output.stdout.lines().nth(1), Some("Hints of a return: trace"));
    let wrong =
        file(&dir, "wrong.jsonl", text.replace("\"hash_ids\"", "\"return\": \"x\", \"hash_ids\""));
    fails(&["replay", &wrong], 1, "line 1: return: unknown return hint \"x\"");
    fails(&["replay", &trace, "--hints", "noisy=2"], 2, "a share from 0 to 1");
    fails(&["replay", &trace, "--hints", "oracle", "--instances", "2"], 2, "cannot be used with");
}

#[test]
fn tiers_are_sized_from_a_trace() {
    let (trace, dir) = (data("replay.jsonl"), TempDir::new().expect("a directory"));
    let plot = dir.path().join("tiers.svg");
    let tiers = ["--policy", "lru", "--capacity-blocks", "4", "--tier", "disk=204800B"];
    let more = ["--tier", "host=3", "--bytes-per-token", "100", "--prefill", "1000"];
    let speeds = ["--bandwidth", "host=1MB/s", "--bandwidth", "128KB/s", "--latency", "disk=100ms"];
    let drawn = ["--plot", plot.to_str().expect("UTF-8")];
    let args = [&["replay", &trace], &tiers[..], &more, &speeds, &drawn].concat();
    let output = kv(&[&args[..], &["--json"]].concat());
    assert_eq!((output.code, output.stderr.as_str()), (0, ""));
    let list: Value = serde_json::from_str(&output.stdout).expect("JSON");
    let tiers = &list[0]["tiers"];
    assert_eq!(list[0]["hit_tokens"], 2535, "the device alone");
    assert_eq!((&tiers["hit_tokens"], &tiers["device_hit_tokens"]), (&json!(3559), &json!(2535)));
    let saved = number(tiers, "prefill_seconds_saved") - number(tiers, "load_seconds");
    assert!((number(tiers, "first_token_seconds_saved") - saved).abs() < 1e-9, "{tiers}");
    let figures = |tier: usize| {
        let fields = ["tier", "write", "capacity_blocks", "hit_tokens", "written_blocks"];
        let more = ["written_bytes", "written_bytes_per_day", "evictions"];
        let figure = |name: &str| tiers["tiers"][tier][name].clone();
        json!(fields.into_iter().chain(more).map(figure).collect::<Vec<_>>())
    };
    let day = 86_400_u64 * 10 / 45;
    let host = json!(["host", "publish", 3, 512, 5, 256_000, 256_000 * day, 3]);
    let disk = json!(["disk", "leave", 4, 512, 2, 102_400, 102_400 * day, 0]);
    assert_eq!((figures(0), figures(1)), (host, disk));
    let svg = fs::read_to_string(&plot).expect("a plot");
    assert!(svg.contains("\nlru\n") && svg.contains("\nlru + host + disk\n"), "{svg}");

    let output = kv(&args);
    assert_eq!((output.code, output.stderr.as_str()), (0, ""));
    let rows: Vec<_> = output.stdout.lines().skip(3).collect();
    let words = |row: &str| row.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(rows[..2], ["", "below lru with 4 blocks:"], "{}", output.stdout);
    assert_eq!(words(rows[3]), ["device", "4", "2535", "0.3480"]);
    assert_eq!(words(rows[4])[..5], ["host", "publish", "3", "512", "0.0703"]);
    assert_eq!(words(rows[6]), ["all", "3559", "0.4886"]);
    assert!(rows[7].starts_with("1.0 s of prefill saved for 0.6 s of loading"), "{}", rows[7]);
    fails(
        &["replay", &trace, "--tier", "host=9B", "--bytes-per-token", "1"],
        1,
        "--tier host: 9 bytes hold no block of 512",
    );
}

/// Runs with 100 bytes a token and 51,200 bytes a snapshot, as many as those of a block, and with
/// snapshots at every length.
fn with_states(trace: &str, args: &[&str]) -> Vec<Value> {
    on_grid(trace, &[&["--state-grid", "1"], args].concat())
}

/// The same, with snapshots where the trace names tokens.
fn on_grid(trace: &str, args: &[&str]) -> Vec<Value> {
    let sizes = ["--bytes-per-token", "100", "--state-bytes", "51200", "--json"];
    let output = kv(&[&["replay", trace], &sizes[..], args].concat());
    assert_eq!((output.code, output.stderr.as_str()), (0, ""), "{args:?}");
    let list: Value = serde_json::from_str(&output.stdout).expect("JSON");
    list.as_array().expect("a list").clone()
}

/// Returns the hits of a line, and its pools.
fn states(line: &Value) -> Value {
    let fields = ["share", "row_blocks", "snapshots", "peak_snapshots", "snapshot_evictions"];
    let states = &line["states"];
    json!([line["hit_tokens"], fields.map(|field| &states[field])])
}

#[test]
fn a_prefix_is_reused_from_the_third_prompt_that_has_it() {
    // Prompts ab, ac and ad of two blocks. With rows alone, the second and the third hit a. States
    // are kept in front of the last token and at the end, and after ac behind a, where its rows hit
    // and no state was.
    let dir = TempDir::new().expect("a directory");
    let line = |ids: [u32; 2]| {
        let lengths = r#""timestamp": 0, "input_length": 1024, "output_length": 1"#;
        format!("{{{lengths}, \"hash_ids\": {ids:?}}}\n")
    };
    let trace = file(&dir, "fork.jsonl", [[1, 2], [1, 3], [1, 4]].map(line).concat());
    let unlimited = with_states(&trace, &["--policy", "infinite"]);
    let [rows, all] = unlimited.as_slice() else { panic!("two lines: {unlimited:?}") };
    assert_eq!((&rows["hit_tokens"], &rows["states"]), (&json!(1024), &Value::Null));
    assert_eq!(states(all), json!([512, ["unlimited", 4, 7, 7, 0]]));
    // Of the three snapshots of ac, the one behind a is the oldest.
    let args = ["--policy", "lru", "--capacity-blocks", "8", "--snapshots", "2"];
    let lines = with_states(&trace, &[&args[..], &["--snapshots", "3"]].concat());
    let [rows, two, three] = lines.as_slice() else { panic!("three lines: {lines:?}") };
    assert_eq!((&rows["hit_tokens"], &rows["states"]), (&json!(1024), &Value::Null));
    assert_eq!(states(two), json!([0, ["2", 6, 2, 2, 6]]));
    assert_eq!(states(three), json!([512, ["3", 5, 3, 3, 4]]));
    // A share of eight blocks: 25 % are two snapshots.
    let lines = with_states(&trace, &[&args[..4], &["--snapshots", "25%"]].concat());
    assert_eq!(states(&lines[1]), json!([0, ["25%", 6, 2, 2, 6]]));
    let lines = with_states(&trace, &args[..4]);
    let shares: Vec<_> = lines.iter().map(|line| line["states"]["share"].clone()).collect();
    assert_eq!(json!(shares), json!([null, "10%", "15%", "20%", "30%"]));
}

#[test]
fn snapshots_keep_the_hits_of_repeated_prompts() {
    // Of ab, acd, ab, ef, acdg, ab, every prompt but acd finds a state where its rows end: the hits
    // of rows alone less the 512 tokens of acd.
    let trace = data("replay.jsonl");
    let lines = with_states(&trace, &["--policy", "infinite"]);
    assert_eq!(lines[0]["hit_tokens"], 999 + 512 + 1536 + 999);
    // ab keeps two states, acd three, ef two, acdg two; the others are known.
    assert_eq!(states(&lines[1]), json!([999 + 1536 + 999, ["unlimited", 7, 9, 9, 0]]));
    // Behind whole ids: ab keeps a and hits it twice, acd hits a and keeps c and d, acdg hits three
    // and keeps g, ef keeps e.
    let infinite = on_grid(&trace, &["--policy", "infinite"]);
    assert_eq!(states(&infinite[1]), json!([3 * 512 + 1536, ["unlimited", 7, 5, 5, 0]]));
    // Blocks of half an id do not change that; those of two ids hit acd in acdg no more.
    let halves = on_grid(&trace, &["--policy", "infinite", "--block-size", "256"]);
    assert_eq!(states(&halves[1]), json!([3 * 512 + 1536, ["unlimited", 13, 5, 5, 0]]));
    let doubles = on_grid(&trace, &["--policy", "infinite", "--block-size", "1024"]);
    assert_eq!(states(&doubles[1])[0], 1024);
    // Without snapshots nothing is reused.
    let none = ["--policy", "reuse-rate", "--capacity-blocks", "9", "--snapshots", "0%"];
    assert_eq!(states(&with_states(&trace, &none)[1]), json!([0, ["0%", 9, 0, 0, 0]]));
    // acdg has four blocks, and the rows three.
    let small = ["--policy", "lru", "--capacity-blocks", "5", "--snapshots", "2"];
    assert_eq!(with_states(&trace, &small)[1]["refused_requests"], 1);
    let output = kv(&[
        &["replay", &trace, "--bytes-per-token", "100", "--state-bytes", "51200"],
        &small[..],
    ]
    .concat());
    assert_eq!((output.code, output.stderr.as_str()), (0, ""));
    let rows: Vec<_> = output.stdout.lines().skip(1).collect();
    assert!(rows[0].ends_with("row blocks  snapshots  peak snapshots  evicted"), "{rows:?}");
    assert!(rows.iter().all(|row| row.len() == rows[0].len()), "columns line up: {rows:?}");
}

#[test]
fn a_broken_file_is_reported_with_its_line() {
    let dir = TempDir::new().expect("a directory");
    let good = fs::read_to_string(data("replay.jsonl")).expect("the trace");
    let zst = fs::read(data("replay.jsonl.zst")).expect("the trace");
    let with = |line: &str| format!("{good}{line}\n").into_bytes();
    let mut damaged = zst.clone();
    let last = damaged.len() - 1;
    damaged[last] ^= 1;
    let huge = r#"{"timestamp": 0, "input_length": 1152921504606846976, "output_length": 1,
                   "hash_ids": [1]}"#
        .replace('\n', " ");
    let negative = r#"{"timestamp": 0, "input_length": -5, "output_length": 1, "hash_ids": [1]}"#;
    let ids = r#"{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1, 2]}"#;
    for (name, content, words) in [
        ("no.jsonl", with("{"), "no.jsonl: line 7: no request of a Mooncake trace, column 1: EOF"),
        (
            "fields.jsonl",
            with("{\"timestamp\": 0}"),
            "line 7: no request of a Mooncake trace, column 16: missing field `input_length`",
        ),
        (
            "negative.jsonl",
            with(negative),
            "line 7: no request of a Mooncake trace, column 35: invalid value: integer `-5`",
        ),
        ("huge.jsonl", with(&huge), "line 7: 1152921504606846976 input tokens"),
        ("ids.jsonl", with(ids), "line 7: 2 ids for 5 input tokens, 1 are needed"),
        ("empty.jsonl", Vec::new(), "empty.jsonl: line 1: no request"),
        ("short.jsonl.zst", zst[..zst.len() / 2].to_vec(), "the zstd data end early"),
        ("damaged.zst", damaged, "checksum"),
        ("plain.zst", good.clone().into_bytes(), "line 1: cannot be read: the zstd data are dam"),
        ("header.csv", b"a,b,c\n1,2,3\n".to_vec(), "header.csv: line 1: the header is \"a,b,c\""),
        ("trace.txt", b"hello\n".to_vec(), "trace.txt: line 1: neither a JSON object"),
        (
            "trace.csv.gz",
            vec![0x1f, 0x8b, 8, 0, 0],
            "gzip is not read: unpack the file with gunzip",
        ),
        ("utf16.csv", b"\xff\xfeT\0".to_vec(), "UTF-16 by its byte order mark"),
    ] {
        fails(&["replay", &file(&dir, name, content)], 1, words);
    }
    fails(&["replay", "/no/such/trace"], 1, "/no/such/trace: No such file");
    fails(&["replay", dir.path().to_str().expect("UTF-8")], 1, "Is a directory");
}

#[test]
fn wrong_usage_is_2_and_help_has_examples() {
    let trace = data("replay.jsonl");
    for (args, words) in [
        (&["--policy", "fifo"][..], "unknown policy \"fifo\", expected"),
        (&["--capacity-blocks", "0"], "at least 1"),
        (&["--capacity-blocks", "-1"], "--capacity-blocks"),
        (&["--capacity-blocks", "4294967296"], "too large"),
        (&["--block-size", "0"], "at least 1"),
        (&["--tier", "host=1", "--tier", "host=2"], "--tier is given twice for host"),
        (&["--write", "leave"], "--tier"),
        (&["--bytes-per-token", "8"], "--tier"),
        (&["--state-bytes", "8"], "--bytes-per-token"),
        (&["--snapshots", "8"], "--state-bytes"),
        (&["--state-grid", "8"], "--state-bytes"),
        (&["--state-bytes", "8", "--bytes-per-token", "8", "--state-grid", "0"], "at least 1"),
        (&["another"], "another"),
    ] {
        fails(&[&["replay", &trace], args].concat(), 2, words);
    }
    let sizes = ["replay", &trace, "--bytes-per-token", "8", "--state-bytes", "8"];
    for (args, code, words) in [
        (&["--tier", "host=7"][..], 2, "cannot be used with"),
        (&["--policy", "min"], 2, "--policy min knows when blocks are used next"),
        (&["--snapshots", "101%"], 2, "expected a share from 0% to 100%"),
        (&["--capacity-blocks", "7", "--snapshots", "100%"], 1, "--snapshots 100%: 3584 snapshots"),
        (&["--capacity-blocks", "7", "--snapshots", "9999"], 1, "leave no block of 4096"),
    ] {
        fails(&[&sizes[..], args].concat(), code, words);
    }
    fails(&["replay"], 2, "TRACE");
    let help = kv(&["replay", "--help"]);
    assert_eq!((help.code, help.stderr.as_str()), (0, ""));
    assert!(help.stdout.contains("Examples:\n  kv replay "), "{}", help.stdout);
}
