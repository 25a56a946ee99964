//! Whole runs of a kit whose programs are scripts: all succeed, each stage fails, hangs or crashes,
//! the driver is missing, the deadline comes.
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::Value;

use super::*;

/// A failure of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Fails,
    Crashes,
    Hangs,
}

const FAULTS: [Fault; 3] = [Fault::Fails, Fault::Crashes, Fault::Hangs];

/// The start of every script: the file `fault` names a fault and a part of the command line of the
/// program that has it.
const FAULTY: &str = r#"#!/bin/sh
if test -f fault; then
  IFS='|' read -r fault pattern < fault
  case "$0 $*" in *$pattern*)
    echo "about to be wrong"
    case $fault in
      Fails) exit 5 ;;
      Crashes) kill -s KILL $$ ;;
      Hangs) sleep 600 ;;
    esac ;;
  esac
fi
"#;

/// Scripts that print the output of the real programs.
const SCRIPTS: [(&str, &str); 9] = [
    ("bin/driver", "echo 'test result: ok. 2 passed'"),
    (
        "bin/conformance",
        r#"case "$*" in
          *--list*)
            printf '%s: test\n' cuda::attend/a cuda::quant/b 'typed(cuda)::attend/a' ;;
          *) echo '{"passed": 3, "failed": 0, "skipped": 1}' > "$KV_CONFORMANCE_REPORT" ;;
        esac
        test "$KV_CONFORMANCE_TESTDATA" = testdata || test "$3" = --list"#,
    ),
    ("bin/replay", r#"cp out/a-card.json seen.json; test "$KV_CUDA_TEST_CARD" = 0"#),
    (
        "bin/gpu",
        r#"echo '{"kind":"fact","name":"card","value":"A card"}'
        while test $# -gt 0; do
          case "$1" in
            --part) part=$2 ;;
            --format) part="$part/$2" ;;
            --out) out=$2 ;;
          esac
          shift
        done
        case "$part" in
          facts) exit 0 ;;
          oracle*) echo "{\"kind\":\"check\",\"name\":\"$part\",\"passed\":true}" > "$out" ;;
          *) echo "{\"kind\":\"measure\",\"name\":\"$part\",\"us\":10,\"bytes\":40}" > "$out"
        esac"#,
    ),
    ("bin/kv", r#"echo '{"sequences":[{"text":"One"}]}'"#),
    ("tools/nvidia-smi", "echo '1980 MHz, 300 W, 40'"),
    ("tools/ncu", "echo profiled"),
    ("tools/compute-sanitizer", r#"echo '{"passed": 1, "failed": 0, "skipped": 0}' > counts.json"#),
    (
        "tools/python3",
        r#"test "$1" = -c || echo '{"kind":"fact","name":"PyTorch","value":"2"}' > "$3""#,
    ),
];

/// Stages, each with a part of its command line that no other stage has.
const STAGES: [(&str, &str); 28] = [
    ("kernels", "every_kernel_loads"),
    ("oracles, bf16", "--part oracle --format bf16 "),
    ("headlines", "--part headline --out"),
    ("ncu, decode_bf16_128", "regex:^decode_bf16_128"),
    ("ncu stalls, decode_l4_128", "WarpStateStats*decode_l4_128"),
    ("graph replay", "bin/replay"),
    ("driver", "bin/driver driver:: "),
    ("conformance, list of cases", "--list"),
    ("conformance, attend", "cuda cuda::attend/ "),
    ("conformance, quant", "cuda::quant/"),
    ("peers", "peers.py"),
    ("decode, bf16", "--part decode --format bf16"),
    ("decode, l4", "--part decode --format l4"),
    ("prefill", "--part prefill"),
    ("steps", "--part steps"),
    ("moves, int8", "--part moves --format int8 "),
    ("kv generate, f32, cpu", "--format f32 --backend cpu"),
    ("kv generate, f32, cuda", "--format f32 --backend cuda"),
    ("kv generate, int8, cpu", "--format int8 --backend cpu"),
    ("kv generate, int8, cuda", "--format int8 --backend cuda"),
    ("conformance, typed", "typed(cuda)"),
    ("conformance, vectors/0", "--vectors"),
    ("differential: random operations", "cuda random"),
    ("compute-sanitizer, facts", "error-exitcode=9 bin/gpu"),
    ("compute-sanitizer memcheck, cuda::attend/ragged_gqa", "--tool=memcheck *ragged"),
    ("compute-sanitizer memcheck, cuda::copy/fork_then_child_writes", "--tool=memcheck *fork"),
    ("compute-sanitizer memcheck, cuda::gather/ranges", "--tool=memcheck *ranges"),
    ("compute-sanitizer racecheck, cuda::attend/ragged_gqa", "--tool=racecheck"),
];

/// A kit of scripts in a temporary folder.
struct Scripted(tempfile::TempDir);

/// The results of a run.
struct Left {
    is_clean: bool,
    json: Value,
    markdown: String,
    logs: String,
}

impl Scripted {
    fn new(other: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let kit = folder.path();
        for name in ["bin", "tools", "scripts/bin", "scripts/tools", "vectors/0"] {
            fs::create_dir_all(kit.join(name)).unwrap();
        }
        fs::write(kit.join("commit"), "abc\n").unwrap();
        fs::write(kit.join("peers.py"), "").unwrap();
        for (name, text) in SCRIPTS.iter().chain(other) {
            let text_file = kit.join("scripts").join(name);
            // A blank after the arguments, so that a pattern can match the end of one.
            let faulty = FAULTY.replace("$0 $*", "$0 $* ");
            fs::write(&text_file, format!("{faulty}{text}\n")).unwrap();
            // Written by another process: a process that another thread starts now would keep our
            // file open for writing, and a program that is open for writing cannot be started.
            let mut install = Command::new("install");
            let installed = install.args(["-m", "755"]).arg(text_file).arg(kit.join(name));
            assert!(installed.status().unwrap().success());
        }
        Self(folder)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn fault(&self, fault: Fault, pattern: &str) {
        fs::write(self.path().join("fault"), format!("{fault:?}|{pattern}\n")).unwrap();
    }

    fn try_run(&self, deadline: Option<Duration>, stage_max: Duration) -> Result<bool> {
        let out = self.path().join("out");
        let limits = Limits { deadline, stage_max: Some(stage_max) };
        let mut runner = Runner::new(self.path(), (self.path(), Some(&out)), 0, limits).unwrap();
        runner.tools = Some(self.path().join("tools"));
        run_kit(&mut runner)
    }

    fn run(&self, deadline: Option<Duration>, stage_max: Duration) -> Left {
        let is_clean = self.try_run(deadline, stage_max).unwrap();
        let read = |name: &str| fs::read_to_string(self.path().join("out").join(name)).unwrap();
        let name = |extension: &str| {
            let card =
                if self.path().join("out/a-card.md").exists() { "a-card" } else { "unnamed" };
            format!("{card}.{extension}")
        };
        let (json, markdown) = (read(&name("json")), read(&name("md")));
        assert!(!json.contains(self.path().to_str().unwrap()), "the path is in the report: {json}");
        let json = serde_json::from_str(&json).unwrap();
        Left { is_clean, json, markdown, logs: read("logs.txt") }
    }
}

impl Left {
    /// Returns names of checks with their outcomes.
    fn outcomes(&self) -> Vec<(String, String)> {
        let text = |check: &Value, key: &str| check[key].as_str().unwrap().to_owned();
        let checks = self.json["checks"].as_array().unwrap().iter();
        checks.map(|check| (text(check, "name"), text(check, "outcome"))).collect()
    }

    fn check(&self, name: &str) -> &Value {
        let mut checks = self.json["checks"].as_array().unwrap().iter();
        let found = checks.find(|check| check["name"] == name);
        found.unwrap_or_else(|| panic!("no {name} in {:#}", self.json))
    }

    fn detail(&self, name: &str) -> &str {
        self.check(name)["detail"].as_str().unwrap()
    }
}

/// More than any script takes on a busy machine.
const LONG: Duration = Duration::from_mins(1);

#[test]
fn a_kit_is_run_and_its_report_written() {
    let kit = Scripted::new(&[]);
    let left = kit.run(None, LONG);
    assert!(left.is_clean, "{:#}", left.json);
    assert_eq!(left.detail("kernels"), "ok. 2 passed");
    let families = ["attend", "quant", "typed", "vectors/0"];
    for name in families.map(|name| format!("conformance, {name}")) {
        assert_eq!(left.detail(&name), "3 passed, 0 failed, 1 skipped");
    }
    assert_eq!(left.detail("kv generate, int8, cuda"), "the same texts as with --backend cpu");
    assert_eq!(left.detail("oracle/bf16"), "");
    for (name, _) in STAGES {
        assert_eq!(left.check(name)["outcome"], "passed", "{name}");
    }
    assert_eq!(left.json["measures"][0]["name"], "headline");
    assert_eq!(left.json["facts"]["PyTorch"], "2");
    let around = "1980 MHz, 300 W, 40; then 1980 MHz, 300 W, 40";
    assert_eq!(left.json["facts"]["card around headlines"], around);
    assert!(left.markdown.starts_with("# A card\n"));
    assert!(left.logs.contains("== kernels: CUDA_VISIBLE_DEVICES=0 bin/driver"), "{}", left.logs);
    // Everything is in the one folder, and no temporary file is left.
    let mut files: Vec<_> = fs::read_dir(kit.path().join("out"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    files.sort();
    assert_eq!(files, ["a-card.json", "a-card.md", "logs.txt", "records.jsonl"]);
    let records = fs::read_to_string(kit.path().join("out/records.jsonl")).unwrap();
    assert!(records.contains("\"name\":\"headline\"") && records.contains("oracle/bf16"));
    // A stage in the middle has seen the report of earlier stages.
    let seen = fs::read_to_string(kit.path().join("seen.json")).unwrap();
    let seen: Value = serde_json::from_str(&seen).unwrap();
    assert_eq!(seen["measures"][0]["name"], "headline");
}

/// Returns how a fault is reported: tools that may be forbidden are not run, all others fail.
fn expected(name: &str, fault: Fault) -> &'static str {
    let is_optional = name.starts_with("ncu") || name == "compute-sanitizer, facts";
    match fault {
        _ if is_optional => "not run",
        Fault::Hangs => "timed out",
        Fault::Fails | Fault::Crashes => "failed",
    }
}

/// Returns whether a stage depends on another one.
fn depends(name: &str, on: &str) -> bool {
    let is_compared = on.ends_with(", cpu") && name == on.replace(", cpu", ", cuda");
    let is_listed = on == "conformance, list of cases" && name.starts_with("conformance");
    let is_watched = on == "compute-sanitizer, facts" && name.starts_with("compute-sanitizer ");
    is_compared || is_listed || is_watched || (on == "oracles, bf16" && name == "oracle/bf16")
}

/// Checks one faulty stage; all others must end as they do without it.
fn one_is_wrong(right: &[(String, String)], (name, pattern): (&str, &str), fault: Fault) {
    let kit = Scripted::new(&[]);
    kit.fault(fault, pattern);
    let limit = if fault == Fault::Hangs { Duration::from_secs(4) } else { LONG };
    let left = kit.run(None, limit);
    let check = left.check(name);
    assert_eq!(check["outcome"], expected(name, fault), "{name} {fault:?}");
    let detail = check["detail"].as_str().unwrap();
    assert!(detail.contains("about to be wrong"), "{name} {fault:?}: {detail}");
    let code = if fault == Fault::Fails { Value::from(5) } else { Value::Null };
    assert_eq!(check["exit_code"], code, "{name} {fault:?}");
    assert_eq!(left.is_clean, expected(name, fault) == "not run", "{name} {fault:?}");
    let others = |outcomes: &[(String, String)]| -> Vec<_> {
        let others = outcomes.iter().filter(|(other, _)| other != name && !depends(other, name));
        others.cloned().collect()
    };
    assert_eq!(others(&left.outcomes()), others(right), "{name} {fault:?}");
    assert!(left.logs.contains("about to be wrong"));
}

#[test]
fn a_stage_that_fails_hangs_or_crashes_spoils_no_other() {
    let right = Scripted::new(&[]).run(None, LONG).outcomes();
    let next = AtomicUsize::new(0);
    let work = || {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(stage) = STAGES.get(index) else { break };
            one_is_wrong(&right, *stage, FAULTS[index % FAULTS.len()]);
        }
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..4).map(|_| scope.spawn(work)).collect();
        for worker in workers {
            worker.join().unwrap();
        }
    });
}

#[test]
fn every_stage_may_be_wrong_and_each_is_in_the_report() {
    for fault in FAULTS {
        // All but the first, without which there is nothing to report.
        let kit = Scripted::new(&[]);
        let text = FAULTY.replace("*$pattern*)", "*'bin/gpu --part facts'*) ;; *$pattern*)");
        for (name, script) in SCRIPTS {
            let file = kit.path().join("scripts").join(name);
            fs::write(&file, format!("{text}{script}\n")).unwrap();
            let mut install = Command::new("install");
            let installed = install.args(["-m", "755"]).arg(file).arg(kit.path().join(name));
            assert!(installed.status().unwrap().success());
        }
        kit.fault(fault, "");
        let limit = if fault == Fault::Hangs { Duration::from_millis(500) } else { LONG };
        let left = kit.run(None, limit);
        assert!(!left.is_clean);
        let outcomes = left.outcomes();
        assert!(outcomes.len() > 20, "{outcomes:?}");
        for (name, outcome) in outcomes {
            let outcome = outcome.as_str();
            match name.as_str() {
                "facts" => assert_eq!(outcome, "passed"),
                // The tools do not even print their version.
                _ if name.starts_with("ncu") || name.starts_with("compute-sanitizer") => {
                    assert_eq!(outcome, "not run", "{name} {fault:?}");
                }
                "peers" => assert_eq!(outcome, "not run", "{fault:?}"),
                _ => assert_eq!(outcome, expected(&name, fault), "{name} {fault:?}"),
            }
        }
    }
}

#[test]
fn records_of_a_stage_that_crashes_are_kept() {
    let gpu = r#"case "$*" in
        *facts*) echo '{"kind":"fact","name":"card","value":"A card"}' ;;
        *) for last; do :; done
          echo '{"kind":"measure","name":"copy/driver","us":10,"bytes":40}' > "$last"
          printf '{"kind":"measure","na' >> "$last"
          kill -s KILL $$ ;;
        esac"#;
    let left = Scripted::new(&[("bin/gpu", gpu)]).run(None, LONG);
    assert!(!left.is_clean);
    assert_eq!(left.json["measures"][0]["name"], "copy/driver");
    assert_eq!(left.check("headlines")["outcome"], "failed");
    assert!(left.detail("headlines").contains("signal"), "{}", left.detail("headlines"));
}

#[test]
fn failures_are_reported_with_their_output() {
    let kv = r#"case "$*" in *cuda*) t=Two;; *) t=One;; esac
        echo "{\"sequences\":[{\"text\":\"$t\"}]}""#;
    let conformance = r#"case "$*" in
          *--list*) echo 'cuda::attend/a: test' ;;
          *) echo '{"passed": 3, "failed": 2, "skipped": 1}' > "$KV_CONFORMANCE_REPORT"
            echo 'two cases are wrong'; exit 101 ;;
        esac"#;
    let replay = "echo at $0; exit 3";
    let others = [("bin/replay", replay), ("bin/kv", kv), ("bin/conformance", conformance)];
    let left = Scripted::new(&others).run(None, LONG);
    assert!(!left.is_clean);
    let markdown = &left.markdown;
    let replay = "KV_CUDA_TEST_CARD=0 bin/replay` | 3 |";
    assert!(markdown.contains(replay), "{markdown}");
    assert!(markdown.contains("**FAILED**: at ./bin/replay"), "{markdown}");
    assert!(markdown.contains("**FAILED**: other texts than with --backend cpu"), "{markdown}");
    assert!(markdown.contains("passed: other texts than with --backend cpu"), "{markdown}");
    assert!(markdown.contains("| headline | 40 |"), "{markdown}");
    let detail = left.detail("conformance, attend");
    assert_eq!(detail, "3 passed, 2 failed, 1 skipped; two cases are wrong");
}

#[test]
fn a_machine_without_tools_runs_what_it_can() {
    let absent = "exit 127";
    let tools = ["tools/ncu", "tools/compute-sanitizer", "tools/python3", "tools/nvidia-smi"];
    let left = Scripted::new(&tools.map(|name| (name, absent))).run(None, LONG);
    assert!(left.is_clean, "{:#}", left.json);
    assert_eq!(left.detail("ncu, write_codes_128"), "ncu is not installed here");
    assert_eq!(left.detail("compute-sanitizer, facts"), "compute-sanitizer is not installed here");
    let peers = "PyTorch is not installed: python3 cannot import torch";
    assert_eq!(left.detail("peers"), peers);
    assert_eq!(left.check("kernels")["outcome"], "passed");
}

#[test]
fn a_sanitizer_that_refuses_the_device_is_not_run() {
    let refuses = r#"test "$1" = --version && exit 0; echo 'Device not supported'; exit 9"#;
    let left = Scripted::new(&[("tools/compute-sanitizer", refuses)]).run(None, LONG);
    assert!(left.is_clean, "{:#}", left.json);
    for (name, outcome) in left.outcomes() {
        let is_sanitizer = name.starts_with("compute-sanitizer");
        assert_eq!(outcome == "not run", is_sanitizer, "{name}");
    }
    assert!(left.detail("compute-sanitizer, facts").contains("Device not supported"));
}

#[test]
fn a_deadline_ends_everything_and_names_what_was_not_run() {
    let kit = Scripted::new(&[]);
    kit.fault(Fault::Hangs, "every_kernel_loads");
    let begin = std::time::Instant::now();
    // Two seconds of it are reserved for the report.
    let left = kit.run(Some(Duration::from_secs(5)), Duration::from_secs(30));
    assert!(begin.elapsed() < Duration::from_secs(30));
    assert_eq!(left.check("kernels")["outcome"], "timed out");
    let steps = left.check("steps");
    assert_eq!(steps["outcome"], "not run");
    assert_eq!(steps["detail"], "the deadline of 5 s was near");
    assert!(left.markdown.contains("not run: the deadline of 5 s was near"));
}

#[test]
fn without_a_driver_nothing_is_written() {
    let none = "echo 'error: no CUDA driver library'; exit 3";
    let kit = Scripted::new(&[("bin/gpu", none)]);
    let error = kit.try_run(None, LONG).unwrap_err().to_string();
    assert!(error.contains("nothing written: error: no CUDA driver library"), "{error}");
    assert!(!kit.path().join("out").exists());
}

#[test]
fn a_driver_that_fails_at_once_leaves_a_report_of_that() {
    for fault in FAULTS {
        let kit = Scripted::new(&[]);
        kit.fault(fault, "bin/gpu --part facts");
        let left = kit.run(None, Duration::from_secs(if fault == Fault::Hangs { 1 } else { 60 }));
        assert!(!left.is_clean);
        assert_eq!(left.outcomes(), [("facts".to_owned(), expected("facts", fault).to_owned())]);
        assert!(left.detail("facts").contains("about to be wrong"), "{fault:?}");
    }
}
