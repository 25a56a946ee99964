//! Running a kit: every check, then the measures.
use std::env;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::record::Records;
use super::report::{Check, Outcome, Report};
use crate::shell;

/// What one program left.
struct Ended {
    status: ExitStatus,
    seconds: f64,
    output: String,
}

/// A kit that runs on one card.
struct Runner<'k> {
    kit: &'k Path,
    device: u32,
    /// The card as `CUDA_VISIBLE_DEVICES` names it, for programs that take the first.
    visible: String,
    checks: Vec<Check>,
}

/// Variables that a program is started with.
type Settings<'a> = &'a [(&'a str, &'a str)];

/// Where runners of the suite leave their counts, and programs their records; in the kit.
const COUNTS: &str = "logs/counts.json";
const RECORDS: &str = "logs/records.json";
const PEERS: &str = "logs/peers.json";
/// Leaves programs these cards alone.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";
/// Tells the suite where its vectors are.
const TESTDATA: (&str, &str) = ("KV_CONFORMANCE_TESTDATA", "testdata");
const REPORT: (&str, &str) = ("KV_CONFORMANCE_REPORT", COUNTS);

/// Runs everything. Ends early only where there is no card: then nothing else was run.
pub(super) fn all(kit: &Path, device: u32) -> Result<Report> {
    let mut runner = Runner { kit, device, visible: visible(device), checks: Vec::new() };
    let _ = fs::remove_dir_all(kit.join("logs"));
    fs::create_dir_all(kit.join("logs"))?;
    let number = device.to_string();
    let facts = runner.start("facts", &["bin/gpu", "--facts", "--device", &number], &[])?;
    let mut records = Records::default();
    records.read(&facts.output);
    let card = records.fact("card").and_then(Value::as_str).unwrap_or_default().to_owned();
    if !facts.status.success() || card.is_empty() {
        bail!("nothing was run and nothing written: {}", last_lines(&facts.output));
    }
    runner.suite()?;
    runner.sanitizer()?;
    runner.program()?;
    let records = runner.measures()?;
    let commit = fs::read_to_string(kit.join("commit")).context("the kit names no commit")?;
    let mut today = Command::new("date");
    let date = shell::output(today.args(["-u", "+%Y-%m-%d"])).unwrap_or_default();
    Ok(Report {
        card,
        driver: driver(),
        commit: commit.trim().to_owned(),
        date: date.trim().to_owned(),
        checks: runner.checks,
        records,
    })
}

/// A card by its number among those that are visible now.
fn visible(device: u32) -> String {
    let now = env::var(VISIBLE).unwrap_or_default();
    let mut cards = now.split(',').map(str::trim).filter(|card| !card.is_empty());
    let card = cards.nth(usize::try_from(device).unwrap_or(usize::MAX));
    card.map_or_else(|| device.to_string(), str::to_owned)
}

/// The driver's version, from its own tool or the kernel.
fn driver() -> String {
    let mut tool = Command::new("nvidia-smi");
    let version = shell::output(tool.args(["--query-gpu=driver_version", "--format=csv,noheader"]))
        .or_else(|| fs::read_to_string("/proc/driver/nvidia/version").ok());
    let version = version.as_deref().and_then(|text| text.lines().next()).unwrap_or_default();
    if version.trim().is_empty() { "unknown".to_owned() } else { version.trim().to_owned() }
}

impl Runner<'_> {
    /// Tests of the driver, the suite, vectors, replay.
    fn suite(&mut self) -> Result<()> {
        let visible = self.visible.clone();
        let card = (VISIBLE, visible.as_str());
        self.test("driver", &["bin/driver", "driver::"], &[card])?;
        let suite = ["bin/conformance", "--backend", "cuda"];
        self.test("conformance", &suite, &[card, TESTDATA, REPORT])?;
        for vectors in folders(&self.kit.join("vectors")) {
            let place = format!("vectors/{vectors}");
            let args = [&suite[..], &["--vectors", place.as_str()]].concat();
            self.test(&format!("conformance, {place}"), &args, &[card, TESTDATA, REPORT])?;
        }
        // The same random operations on the card and on the naive model, compared step by step: as
        // the CPU backend is, so that both agree where both pass.
        let seed = ("KV_CONFORMANCE_SEED", "2");
        let args = [&suite[..], &["random"]].concat();
        self.test("differential: random lives", &args, &[card, TESTDATA, REPORT, seed])?;
        self.test("graph replay", &["bin/replay"], &[card, ("KV_CUDA_TEST_CARD", "0")])
    }

    /// A few cases under each of the toolkit's tools that fit them.
    fn sanitizer(&mut self) -> Result<()> {
        const CASES: [(&str, &str); 4] = [
            ("memcheck", "cuda::attend/ragged_gqa"),
            ("memcheck", "cuda::copy/fork_then_child_writes"),
            ("memcheck", "cuda::gather/ranges"),
            ("racecheck", "cuda::attend/ragged_gqa"),
        ];
        const NAME: &str = "compute-sanitizer";
        let is_there = shell::output(Command::new(NAME).arg("--version")).is_some();
        let visible = self.visible.clone();
        for (tool, case) in CASES {
            let name = format!("{NAME} {tool}, {case}");
            let tool = format!("--tool={tool}");
            let args = [NAME, &tool, "--error-exitcode=9", "bin/conformance", "--backend", "cuda"];
            let args = [&args[..], &[case, "--test-threads=1"]].concat();
            if is_there {
                let card = (VISIBLE, visible.as_str());
                self.test(&name, &args, &[card, TESTDATA, REPORT])?;
            } else {
                self.skip(&name, &args, "compute-sanitizer is not installed here");
            }
        }
        Ok(())
    }

    /// The text that the program `kv` generates must be the CPU's where nothing is rounded.
    fn program(&mut self) -> Result<()> {
        let backends = [format!("cuda:{}", self.device), "cpu".to_owned()];
        for format in ["f32", "bf16", "int8"] {
            let name = format!("kv generate, {format}");
            let mut texts = Vec::new();
            let mut last = None;
            for backend in backends.iter().rev() {
                let model = ["bin/kv", "generate", "--model", "models/stories260K", "--json"];
                let prompts = ["--prompt", "Once upon a time", "--prompt", "Lily and Tom"];
                let how = ["--max-new-tokens", "64", "--format", format, "--backend", backend];
                let args = [&model[..], &prompts, &how].concat();
                let ended = self.start(&format!("{name}, {backend}"), &args, &[])?;
                texts.push(generated(&ended.output));
                last = Some((shown(&args, &[]), ended));
            }
            let Some((command, ended)) = last else { continue };
            let outcome = match texts.as_slice() {
                [Some(cpu), Some(cuda)] if !ended.status.success() || cpu != cuda => {
                    // What is rounded when it is stored may turn a close call.
                    if ended.status.success() && format != "f32" {
                        Outcome::Passed("other texts than with --backend cpu".to_owned())
                    } else {
                        Outcome::Failed("other texts than with --backend cpu".to_owned())
                    }
                }
                [Some(_), Some(_)] => {
                    Outcome::Passed("the same texts as with --backend cpu".to_owned())
                }
                _ => Outcome::Failed(last_lines(&ended.output)),
            };
            let (exit_code, seconds) = (ended.status.code(), ended.seconds);
            self.checks.push(Check { name, command, exit_code, seconds, outcome });
        }
        Ok(())
    }

    /// Oracles at the shapes that are measured, the measures, and those of others.
    fn measures(&mut self) -> Result<Records> {
        let number = self.device.to_string();
        let args = ["bin/gpu", "--device", &number, "--out", RECORDS];
        let ended = self.start("measures", &args, &[])?;
        let mut records = Records::default();
        records.read(&fs::read_to_string(self.kit.join(RECORDS)).unwrap_or_default());
        for (name, wrong) in &records.checks {
            let outcome = match wrong {
                None => Outcome::Passed(String::new()),
                Some(why) => Outcome::Failed(why.clone()),
            };
            let (command, exit_code) = (shown(&args, &[]), None);
            self.checks.push(Check {
                name: name.clone(),
                command,
                exit_code,
                seconds: 0.0,
                outcome,
            });
        }
        self.ended("measures", (&args, &[]), &ended, None);
        let python = ["python3", "-B", "peers.py", PEERS];
        let mut has_torch = Command::new("python3");
        if shell::output(has_torch.args(["-c", "import torch"])).is_none() {
            self.skip("peers", &python, "PyTorch is not at hand: python3 cannot import torch");
            return Ok(records);
        }
        let visible = self.visible.clone();
        let card = (VISIBLE, visible.as_str());
        let ended = self.start("peers", &python, &[card])?;
        records.read(&fs::read_to_string(self.kit.join(PEERS)).unwrap_or_default());
        self.ended("peers", (&python, &[card]), &ended, None);
        Ok(records)
    }

    /// Runs a test program; runners of the suite have counts.
    fn test(&mut self, name: &str, args: &[&str], settings: Settings<'_>) -> Result<()> {
        let _ = fs::remove_file(self.kit.join(COUNTS));
        let ended = self.start(name, args, settings)?;
        let counts = fs::read_to_string(self.kit.join(COUNTS)).ok();
        let counts = counts.and_then(|text| counted(&serde_json::from_str(&text).ok()?));
        self.ended(name, (args, settings), &ended, counts);
        Ok(())
    }

    fn ended(
        &mut self,
        name: &str,
        (args, settings): (&[&str], Settings<'_>),
        ended: &Ended,
        said: Option<String>,
    ) {
        let outcome = if ended.status.success() {
            Outcome::Passed(said.unwrap_or_else(|| summary(&ended.output)))
        } else {
            let tail = last_lines(&ended.output);
            Outcome::Failed(said.map_or(tail.clone(), |said| format!("{said}; {tail}")))
        };
        let (name, command) = (name.to_owned(), shown(args, settings));
        let (exit_code, seconds) = (ended.status.code(), ended.seconds);
        self.checks.push(Check { name, command, exit_code, seconds, outcome });
    }

    fn skip(&mut self, name: &str, args: &[&str], why: &str) {
        println!("-- {name}: {why}");
        let (name, command) = (name.to_owned(), shown(args, &[]));
        let outcome = Outcome::Skipped(why.to_owned());
        self.checks.push(Check { name, command, exit_code: None, seconds: 0.0, outcome });
    }

    /// Runs a program in the kit; what it says goes to a log.
    fn start(&self, name: &str, args: &[&str], settings: Settings<'_>) -> Result<Ended> {
        println!("-- {name}: {}", shown(args, settings));
        let Some((program, args)) = args.split_first() else { bail!("{name}: no program") };
        let plain = |letter: char| if letter.is_ascii_alphanumeric() { letter } else { '-' };
        let log = format!("logs/{}.log", name.chars().map(plain).collect::<String>());
        let log = self.kit.join(log);
        let file = File::create(&log)?;
        let is_ours = program.starts_with("bin/");
        let program = if is_ours { self.kit.join(program) } else { PathBuf::from(program) };
        let mut command = Command::new(&program);
        command.args(args).envs(settings.iter().copied()).current_dir(self.kit);
        command.stdout(file.try_clone()?).stderr(file);
        let begin = Instant::now();
        let status = command.status();
        let status = status.with_context(|| format!("cannot start {}", program.display()))?;
        let seconds = begin.elapsed().as_secs_f64();
        let output = String::from_utf8_lossy(&fs::read(&log)?).into_owned();
        // Where the kit lies is nobody's business.
        let output = output.replace(&*self.kit.to_string_lossy(), ".");
        println!("   {status}, {seconds:.1} s");
        Ok(Ended { status, seconds, output })
    }
}

/// Names of the folders in a folder, in order.
fn folders(place: &Path) -> Vec<String> {
    let entries = fs::read_dir(place).into_iter().flatten().flatten();
    let mut names: Vec<_> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// A command as one would type it in the kit.
pub(super) fn shown(args: &[&str], settings: Settings<'_>) -> String {
    let settings = settings.iter().map(|(name, value)| format!("{name}={value}"));
    let quoted = |arg: &&str| {
        if arg.contains(' ') { format!("\"{arg}\"") } else { (*arg).to_owned() }
    };
    settings.chain(args.iter().map(quoted)).collect::<Vec<_>>().join(" ")
}

/// Counts of a runner of the suite.
pub(super) fn counted(report: &Value) -> Option<String> {
    let count = |key| report.get(key).and_then(Value::as_u64);
    let (passed, failed, skipped) = (count("passed")?, count("failed")?, count("skipped")?);
    Some(format!("{passed} passed, {failed} failed, {skipped} skipped"))
}

/// The texts that `kv generate --json` made; its object is one line among others.
pub(super) fn generated(output: &str) -> Option<Vec<String>> {
    let mut records = output.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let report = records.find(|record| record.get("sequences").is_some())?;
    let sequences = report.get("sequences")?.as_array()?;
    let text = |sequence: &Value| Some(sequence.get("text")?.as_str()?.to_owned());
    sequences.iter().map(text).collect()
}

/// What the harness of tests says at the end.
fn summary(output: &str) -> String {
    let line = output.lines().rev().find(|line| line.starts_with("test result: "));
    line.unwrap_or_default().trim_start_matches("test result: ").to_owned()
}

/// The end of an output, on one line.
pub(super) fn last_lines(output: &str) -> String {
    let lines = output.lines().rev().map(str::trim).filter(|line| !line.is_empty());
    let mut lines: Vec<_> = lines.take(6).collect();
    lines.reverse();
    lines.join(" / ")
}
