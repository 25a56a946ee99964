//! The stages in their order: the most valuable ones first, in case a run ends early.
use std::fs;
use std::path::Path;

use anyhow::{Result, bail};
use serde_json::Value;

use super::extract::{counted, generated, last_lines, summary};
use super::report::Outcome;
use super::run::{Call, Ended, Runner, VISIBLE};

/// Exit code of `bin/gpu` without a device; not a failure.
pub(super) const NO_DEVICE: i32 = 3;

/// Variables for the suite: the folder of its vectors, and the file for its counts.
const TESTDATA: (&str, &str) = ("KV_CONFORMANCE_TESTDATA", "testdata");
const REPORT: &str = "KV_CONFORMANCE_REPORT";
const COUNTS: &str = "counts.json";
/// The suite on a card.
const SUITE: [&str; 3] = ["bin/conformance", "--backend", "cuda"];
/// Measured formats, those of the headlines first.
const FORMATS: [&str; 6] = ["bf16", "fp8-e4m3", "int8-tensor", "fp8-e4m3-row", "int8", "l4"];
/// Measured formats that only the general kernel decodes.
const GENERAL: [&str; 2] = ["q8_0", "l6"];
/// Cases to profile, each with its kernel and the number of launches before it, which fill a cache.
const PROFILES: [(&str, &str, u32); 6] = [
    ("decode_bf16_128", "decode/bf16/block16/gqa8/b64/c8192", 1),
    ("decode_e4m3_128", "decode/fp8-e4m3/block16/gqa8/b64/c8192", 1),
    ("prefill_bf16_128", "prefill/bf16/gqa4/t4096", 1),
    ("write_codes_128", "append/fp8-e4m3/b1/t16384", 40),
    ("decode_int8_row_128", "decode/int8/block16/gqa8/b64/c8192", 1),
    ("decode_l4_128", "decode/l4/block16/gqa8/b64/c8192", 1),
];

/// Kernels whose stall reasons are listed: their loops wait for their own results.
const STALLING: [&str; 2] = ["decode_int8_row_128", "decode_l4_128"];

/// Queries the facts about the card; returns whether that worked. Without a card, nothing is
/// written.
pub(super) fn facts(runner: &mut Runner<'_>) -> Result<bool> {
    let number = runner.device.to_string();
    let call = Call::new(60, &["bin/gpu", "--part", "facts", "--device", &number]);
    let ended = runner.start("facts", &call, runner.limit_of(&call))?;
    if ended.status().and_then(|status| status.code()) == Some(NO_DEVICE) {
        runner.clear();
        bail!("nothing was run and nothing written: {}", last_lines(&ended.output));
    }
    let records = &mut runner.report.records;
    records.read(&ended.output);
    let card = records.fact("card").and_then(Value::as_str).unwrap_or_default().to_owned();
    let is_known = !card.is_empty() && ended.is_success();
    runner.report.card = card;
    runner.report.driver = runner.driver();
    let outcome = ended.failure(runner.limit_of(&call)).unwrap_or_else(|| {
        if is_known {
            Outcome::Passed(String::new())
        } else {
            Outcome::Failed("the card is not among its facts".to_owned())
        }
    });
    runner.note("facts", &call.shown(), Some(&ended), outcome)?;
    Ok(is_known)
}

/// Runs all other stages; `docs/gpu/README.md` has their order and times, which a change must keep
/// within a deadline of 560 s.
pub(super) fn all(runner: &mut Runner<'_>) -> Result<()> {
    let card = on_card(runner);
    // First whether each kernel loads, then whether the measured ones are correct.
    let kernels = ["bin/driver", "driver::tests::every_kernel_loads", "--exact"];
    test(runner, "kernels", &card(Call::new(40, &kernels)))?;
    let (first, rest) = FORMATS.split_at(2);
    oracles(runner, first)?;
    measure(runner, "headlines", 60, &["headline"])?;
    println!("{}", runner.report.headlines());
    profiles(runner)?;
    let replay = card(Call::new(40, &["bin/replay"])).with("KV_CUDA_TEST_CARD", "0");
    test(runner, "graph replay", &replay)?;
    test(runner, "driver", &card(Call::new(60, &["bin/driver", "driver::"])))?;
    families(runner)?;
    oracles(runner, rest)?;
    peers(runner)?;
    grid(runner)?;
    for format in ["f32", "bf16", "int8"] {
        program(runner, format)?;
    }
    more_of_the_suite(runner)?;
    sanitizer(runner)
}

/// Checks formats against the oracle at the measured shapes.
fn oracles(runner: &mut Runner<'_>, formats: &[&str]) -> Result<()> {
    for format in formats {
        measure(runner, &format!("oracles, {format}"), 30, &["oracle", "--format", format])?;
    }
    Ok(())
}

/// Makes the card the first one of a program.
fn on_card(runner: &Runner<'_>) -> impl Fn(Call) -> Call + use<> {
    let visible = runner.visible.clone();
    move |call| call.with(VISIBLE, &visible)
}

/// Runs a program with the test harness.
fn test(runner: &mut Runner<'_>, name: &str, call: &Call) -> Result<()> {
    runner.stage(name, call, |ended| Outcome::Passed(summary(&ended.output)))?;
    Ok(())
}

/// Runs one part of the measurements of `bin/gpu`.
fn measure(runner: &mut Runner<'_>, name: &str, limit: u64, part: &[&str]) -> Result<()> {
    let number = runner.device.to_string();
    let args = [&["bin/gpu", "--device", &number, "--part"], part].concat();
    runner.measure(name, Call::new(limit, &args), Some("--out"))?;
    Ok(())
}

/// Profiles one launch of each important kernel, and lists why the warps of some wait. Profiling is
/// often forbidden, which is not a failure.
fn profiles(runner: &mut Runner<'_>) -> Result<()> {
    const NAME: &str = "ncu";
    let is_there = runner.ask(&[NAME, "--version"]).is_some();
    let number = runner.device.to_string();
    let full = PROFILES.iter().map(|profile| (NAME, &["--set=full"][..], profile));
    let stalling = PROFILES.iter().filter(|(kernel, ..)| STALLING.contains(kernel));
    // Stall reasons are in the body of this section, which is not printed by default.
    let stalls = ["--section=WarpStateStats", "--print-details=all"];
    let stalls = stalling.map(|profile| ("ncu stalls", &stalls[..], profile));
    for (what, sections, (kernel, case, skipped)) in full.chain(stalls) {
        let filter = format!("regex:^{kernel}");
        let skipped = format!("--launch-skip={skipped}");
        let launch = [&skipped, "--launch-count=1", "--kernel-name", &filter];
        let bench = ["bin/gpu", "--device", &number, "--part", "headline", "--only", case];
        let args = [&[NAME], sections, &launch, &bench].concat();
        optional(runner, &format!("{what}, {kernel}"), &Call::new(25, &args), is_there)?;
    }
    Ok(())
}

/// Runs a tool of the machine; without the tool, or if it does not work, the stage counts as not
/// run.
fn optional(runner: &mut Runner<'_>, name: &str, call: &Call, is_there: bool) -> Result<bool> {
    let tool = call.args.first().cloned().unwrap_or_default();
    if !is_there {
        runner.skip(name, call, &format!("{tool} is not installed here"))?;
        return Ok(false);
    }
    let ended = runner.stage_or_failure(name, call, |_, failure| match failure {
        None => Outcome::Passed(String::new()),
        Some(failure) => {
            let (_, message) = failure.words();
            Outcome::Skipped(format!("{tool} does not work here: {message}"))
        }
    })?;
    Ok(ended.is_some_and(|ended| ended.is_success()))
}

/// Runs the suite, one process per family: a sticky error of the card
/// would fail all later cases of the same process.
fn families(runner: &mut Runner<'_>) -> Result<()> {
    let card = on_card(runner);
    let list = card(Call::new(60, &[&SUITE[..], &["--list"]].concat()));
    let found = runner.stage("conformance, list of cases", &list, |ended| {
        match families_of(&ended.output).len() {
            0 => Outcome::Failed("there are no cases".to_owned()),
            count => Outcome::Passed(format!("{count} families")),
        }
    })?;
    let families = found.map(|ended| families_of(&ended.output)).unwrap_or_default();
    for family in &families {
        let filter = format!("cuda::{family}/");
        suite(runner, &format!("conformance, {family}"), 60, &[&filter])?;
    }
    if families.is_empty() {
        suite(runner, "conformance", 200, &["cuda::"])?;
    }
    Ok(())
}

/// Returns the families among the names of cases, in order.
pub(super) fn families_of(list: &str) -> Vec<String> {
    let mut families: Vec<String> = Vec::new();
    let names = list.lines().filter_map(|line| line.strip_prefix("cuda::"));
    for (family, _) in names.filter_map(|name| name.split_once('/')) {
        if !families.iter().any(|known| known == family) {
            families.push(family.to_owned());
        }
    }
    families
}

/// Runs a part of the suite, with its counts.
fn suite(runner: &mut Runner<'_>, name: &str, limit: u64, args: &[&str]) -> Result<()> {
    let call = on_card(runner)(Call::new(limit, &[&SUITE[..], args].concat()));
    counting(runner, name, call)
}

/// Runs a runner of the suite with any command.
fn counting(runner: &mut Runner<'_>, name: &str, call: Call) -> Result<()> {
    let file = runner.place(COUNTS);
    let _ = fs::remove_file(&file);
    let call = call.with(TESTDATA.0, TESTDATA.1).with(REPORT, COUNTS);
    runner.stage_or_failure(name, &call, |_, failure| {
        let text = fs::read_to_string(&file).ok();
        let counts = text.and_then(|text| counted(&serde_json::from_str(&text).ok()?));
        match (failure, counts) {
            (None, Some(counts)) => Outcome::Passed(counts),
            (None, None) => Outcome::Failed("it left no counts".to_owned()),
            (Some(Outcome::Failed(message)), Some(counts)) => {
                Outcome::Failed(format!("{counts}; {message}"))
            }
            (Some(failure), _) => failure,
        }
    })?;
    let _ = fs::remove_file(&file);
    Ok(())
}

/// Runs the other measurements, in separate processes.
fn grid(runner: &mut Runner<'_>) -> Result<()> {
    measure(runner, "prefill", 60, &["prefill"])?;
    measure(runner, "steps", 40, &["steps"])?;
    for format in FORMATS.into_iter().chain(GENERAL) {
        let part = ["decode", "--format", format];
        measure(runner, &format!("decode, {format}"), 60, &part)?;
    }
    for format in FORMATS {
        measure(runner, &format!("moves, {format}"), 30, &["moves", "--format", format])?;
    }
    Ok(())
}

/// Runs the measurements of other libraries.
fn peers(runner: &mut Runner<'_>) -> Result<()> {
    let call = on_card(runner)(Call::new(90, &["python3", "-B", "peers.py"]));
    if runner.ask(&["python3", "-c", "import torch"]).is_none() {
        return runner.skip(
            "peers",
            &call,
            "PyTorch is not installed: python3 cannot import torch",
        );
    }
    runner.measure("peers", call, None)?;
    Ok(())
}

/// Checks that the program `kv` generates the CPU's text if nothing is rounded.
fn program(runner: &mut Runner<'_>, format: &str) -> Result<()> {
    let call = |backend: &str| {
        let model = ["bin/kv", "generate", "--model", "models/stories260K", "--json"];
        let prompts = ["--prompt", "Once upon a time", "--prompt", "Lily and Tom"];
        let how = ["--max-new-tokens", "64", "--format", format, "--backend", backend];
        Call::new(40, &[&model[..], &prompts, &how].concat())
    };
    let name = |backend: &str| format!("kv generate, {format}, {backend}");
    let texts = |ended: &Ended| generated(&ended.output);
    let of_cpu = runner.stage(&name("cpu"), &call("cpu"), |ended| match texts(ended) {
        Some(_) => Outcome::Passed(String::new()),
        None => Outcome::Failed(last_lines(&ended.output)),
    })?;
    let of_cpu = of_cpu.as_ref().and_then(texts);
    let cuda = call(&format!("cuda:{}", runner.device));
    runner.stage(&name("cuda"), &cuda, |ended| match (texts(ended), &of_cpu) {
        (None, _) => Outcome::Failed(last_lines(&ended.output)),
        (_, None) => Outcome::Failed("--backend cpu gave nothing to compare with".to_owned()),
        (Some(cuda), Some(cpu)) if cuda == *cpu => {
            Outcome::Passed("the same texts as with --backend cpu".to_owned())
        }
        // Rounding of stored rows may change a close call.
        _ if format != "f32" => Outcome::Passed("other texts than with --backend cpu".to_owned()),
        _ => Outcome::Failed("other texts than with --backend cpu".to_owned()),
    })?;
    Ok(())
}

/// Runs the cases of the backend's own type, given vector files, and other random operations. These
/// are compared with the naive model, as on the CPU backend, so that both backends agree if both
/// pass.
fn more_of_the_suite(runner: &mut Runner<'_>) -> Result<()> {
    suite(runner, "conformance, typed", 60, &["typed(cuda)::"])?;
    for vectors in folders(&runner.place("vectors")) {
        let place = format!("vectors/{vectors}");
        let name = format!("conformance, {place}");
        suite(runner, &name, 60, &["--vectors", &place])?;
    }
    let random = Call::new(60, &[&SUITE[..], &["random"]].concat());
    let random = on_card(runner)(random).with("KV_CONFORMANCE_SEED", "2");
    counting(runner, "differential: random operations", random)
}

/// Runs a few cases under each of the toolkit's sanitizers. Some machines have the tools but forbid
/// them to watch a card; a program that does nothing shows that.
fn sanitizer(runner: &mut Runner<'_>) -> Result<()> {
    const NAME: &str = "compute-sanitizer";
    const CASES: [(&str, &str); 4] = [
        ("memcheck", "cuda::attend/ragged_gqa"),
        ("memcheck", "cuda::copy/fork_then_child_writes"),
        ("memcheck", "cuda::gather/ranges"),
        ("racecheck", "cuda::attend/ragged_gqa"),
    ];
    let number = runner.device.to_string();
    let is_there = runner.ask(&[NAME, "--version"]).is_some();
    let facts = [NAME, "--error-exitcode=9", "bin/gpu", "--part", "facts", "--device", &number];
    let works = optional(runner, &format!("{NAME}, facts"), &Call::new(60, &facts), is_there)?;
    for (tool, case) in CASES {
        let name = format!("{NAME} {tool}, {case}");
        let tool = format!("--tool={tool}");
        let args = [&[NAME, &tool, "--error-exitcode=9"][..], &SUITE, &[case, "--test-threads=1"]];
        let call = on_card(runner)(Call::new(90, &args.concat()));
        if works {
            counting(runner, &name, call)?;
        } else {
            runner.skip(&name, &call, "compute-sanitizer does not work here")?;
        }
    }
    Ok(())
}

/// Returns the names of the folders in a folder, sorted.
fn folders(place: &Path) -> Vec<String> {
    let entries = fs::read_dir(place).into_iter().flatten().flatten();
    let mut names: Vec<_> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}
