//! Runs stages in two lanes: one compiles, the other runs the compiled programs.
//!
//! Each stage is a separate process, whose output is kept in a file and printed at its end, so that
//! two parallel stages do not mix their lines. Knows no stage by name.
use std::env;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::mpsc::{self, Sender};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::stamps::{Inputs, Stamps};
use crate::workspace::Workspace;
use crate::{programs, shell, stamps};

/// One stage of `cargo xtask test`.
pub(crate) struct Stage {
    pub(crate) name: &'static str,
    pub(crate) lane: Lane,
    /// Stages that must pass first, besides the previous ones of its lane.
    pub(crate) after: &'static [&'static str],
    pub(crate) run: fn(&Workspace) -> Result<Outcome>,
    /// The inputs of the outcome: with the same inputs, a stage does not run twice.
    pub(crate) inputs: Inputs,
}

impl Stage {
    /// Skips the stage while it has passed with the same inputs.
    pub(crate) const fn unless_same(self, inputs: Inputs) -> Self {
        Self { inputs, ..self }
    }
}

/// Options for the records of earlier runs, and for a new record for other checkouts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Options {
    /// Runs every stage, also with inputs that it has passed with.
    pub(crate) all: bool,
    /// Writes the record of the tree.
    pub(crate) record: bool,
}

/// The lane of a stage; stages of different lanes run in parallel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lane {
    /// Compiles, by cargo or by a C++ compiler.
    Compile,
    /// Runs compiled programs; three stages at a time when nothing is left to compile.
    Run,
}

/// The outcome of a stage that did not fail.
pub(crate) enum Outcome {
    Passed,
    Skipped(String),
}

/// The result of a stage's process.
struct Ended {
    index: usize,
    took: Duration,
    /// Its output.
    message: String,
    passed: bool,
}

impl Ended {
    /// Returns the reason if the stage was skipped.
    fn skipped(&self) -> Option<&str> {
        self.message.lines().last().filter(|line| line.starts_with(SKIPPED))
    }
}

/// Starts the last line of a skipped stage.
const SKIPPED: &str = "skipped: ";

/// Starts the line before it: the processor time of a stage and of the programs it has started.
const CPU: &str = "CPU seconds: ";

/// Returns the file in which the stage that builds test programs lists them.
pub(crate) fn programs_file(workspace: &Workspace) -> PathBuf {
    folder(workspace).join("programs.json")
}

fn folder(workspace: &Workspace) -> PathBuf {
    workspace.target_dir.join("stages")
}

fn make_folder(workspace: &Workspace) -> Result<PathBuf> {
    let folder = folder(workspace);
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    Ok(folder)
}

/// Runs all stages, the lanes in parallel; starts no further ones after a failure.
pub(crate) fn run(stages: &[Stage], options: Options) -> Result<()> {
    let workspace = Workspace::load()?;
    let folder = make_folder(&workspace)?;
    let start = Instant::now();
    let (sender, receiver) = mpsc::channel();
    let mut order = Order::new(stages);
    let mut rows = Vec::new();
    let mut failed = None;
    let mut stamps = Stamps::load(&folder, options.record);
    let mut digests = vec![None; stages.len()];
    for (stage, digest) in stages.iter().zip(&mut digests) {
        *digest = stamps::digest(&workspace, stage.inputs)?;
    }
    loop {
        if failed.is_none() {
            for index in order.start() {
                let stage = stages.get(index).context("no such stage")?;
                let digest = digests.get(index).and_then(Option::as_deref);
                match digest.filter(|digest| !options.all && stamps.has(stage.name, digest)) {
                    Some(_) => pass(index, &sender),
                    None => begin(stage, index, &workspace, &sender)?,
                }
            }
        }
        if !order.is_running() {
            break;
        }
        let ended: Ended = receiver.recv().context("a stage ended without a result")?;
        order.end(ended.index);
        let stage = stages.get(ended.index).context("no such stage")?;
        let row = show(stage, &ended);
        rows.push((ended.index, row));
        if !ended.passed {
            failed.get_or_insert(stage.name);
        } else if let (Some(Some(digest)), None) = (digests.get(ended.index), ended.skipped()) {
            stamps.add(stage.name, stage.inputs, digest)?;
        }
    }
    rows.sort_by_key(|(index, _)| *index);
    println!("\n| stage | lane | seconds | CPU seconds | |\n|---|---|---|---|---|");
    for (_, row) in &rows {
        println!("{row}");
    }
    if let Some(name) = failed {
        bail!("stage \"{name}\"");
    }
    assert!(order.is_done(), "every stage has run, as none failed");
    println!("\n{:>7.1} s  all passed", start.elapsed().as_secs_f64());
    Ok(())
}

/// Runs stages one after another in this process, with direct output.
pub(crate) fn run_in_order(stages: &[Stage]) -> Result<()> {
    let workspace = Workspace::load()?;
    let start = Instant::now();
    let mut lines = Vec::new();
    for stage in stages {
        println!("\n== {}", stage.name);
        let began = Instant::now();
        let outcome = (stage.run)(&workspace).with_context(|| format!("stage \"{}\"", stage.name));
        let why = match outcome? {
            Outcome::Passed => String::new(),
            Outcome::Skipped(why) => format!(" ({SKIPPED}{why})"),
        };
        lines.push(format!("{:>7.1} s  {}{why}", began.elapsed().as_secs_f64(), stage.name));
    }
    println!("\n{}\n{:>7.1} s  all passed", lines.join("\n"), start.elapsed().as_secs_f64());
    Ok(())
}

/// Runs one stage in this process.
pub(crate) fn run_one(stages: &[Stage], name: &str) -> Result<()> {
    let Some(stage) = stages.iter().find(|stage| stage.name == name) else {
        let names: Vec<_> = stages.iter().map(|stage| stage.name).collect();
        bail!("unknown stage {name:?}, known:\n  {}", names.join("\n  "));
    };
    let workspace = Workspace::load()?;
    make_folder(&workspace)?;
    let outcome = (stage.run)(&workspace);
    if let Some(seconds) = cpu_seconds() {
        println!("{CPU}{seconds:.1}");
    }
    if let Outcome::Skipped(why) = outcome? {
        println!("{SKIPPED}{why}");
    }
    Ok(())
}

/// Returns the processor time of this process and of all programs that it has waited for, `None`
/// where the system has no `/proc`.
fn cpu_seconds() -> Option<f64> {
    /// `USER_HZ` of Linux: it is part of the interface, whatever the kernel's own clock.
    const TICKS_PER_SECOND: f64 = 100.0;
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    // The second field, the program's name in parentheses, may contain spaces.
    let (_, fields) = stat.rsplit_once(')')?;
    // Fields 14 to 17 of proc(5): utime, stime, cutime, cstime; the third comes first here.
    let ticks: Vec<u32> =
        fields.split_whitespace().skip(11).take(4).map_while(|field| field.parse().ok()).collect();
    (ticks.len() == 4).then(|| ticks.into_iter().map(f64::from).sum::<f64>() / TICKS_PER_SECOND)
}

/// Starts the process of a stage, and a thread that waits for it.
fn begin(stage: &Stage, index: usize, workspace: &Workspace, sender: &Sender<Ended>) -> Result<()> {
    println!("   ... {}", stage.name);
    let path = folder(workspace).join(format!("{index}.txt"));
    let file = File::create(&path).with_context(|| format!("cannot make {}", path.display()))?;
    let mut command = shell::program(env::current_exe().context("this program has no path")?);
    command.args(["stage", stage.name]).stdin(Stdio::null());
    command.env("CARGO_MANIFEST_DIR", shell::root().join("xtask"));
    command.stderr(file.try_clone()?).stdout(file);
    // Earlier stages have listed their builds; alone, a stage builds its own programs.
    if stage.lane == Lane::Run {
        programs::use_built(&mut command, &programs_file(workspace));
    }
    let start = Instant::now();
    let mut child = command.spawn().context("cannot start a stage")?;
    let sender = sender.clone();
    std::thread::spawn(move || {
        let passed = child.wait().is_ok_and(|status| status.success());
        let ended = Ended { index, took: start.elapsed(), message: read(&path), passed };
        // There is no receiver any more if starting another stage failed.
        let _ = sender.send(ended);
    });
    Ok(())
}

/// Ends a stage that has passed with the same inputs.
fn pass(index: usize, sender: &Sender<Ended>) {
    let message = format!("{SKIPPED}passed before with the same inputs; `--all` runs it");
    let _ = sender.send(Ended { index, took: Duration::ZERO, message, passed: true });
}

fn read(path: &Path) -> String {
    let bytes = fs::read(path).unwrap_or_else(|error| format!("{error}\n").into());
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Prints the output of a stage; returns its row of the table.
fn show(stage: &Stage, ended: &Ended) -> String {
    let seconds = format!("{:.1}", ended.took.as_secs_f64());
    println!("\n== {}\n{}", stage.name, ended.message.trim_end());
    println!("{seconds:>7} s  {}{}", stage.name, if ended.passed { "" } else { " FAILED" });
    let cpu = ended.message.lines().rev().take(2).find_map(|line| line.strip_prefix(CPU));
    let cpu = cpu.unwrap_or_default();
    let lane = if stage.lane == Lane::Compile { "compile" } else { "run" };
    let remark = if ended.passed { ended.skipped().unwrap_or_default() } else { "FAILED" };
    format!("| {} | {lane} | {seconds} | {cpu} | {remark} |", stage.name)
}

/// The order of stages: the next one of each lane, when the stages it needs have passed.
struct Order<'s> {
    stages: &'s [Stage],
    begun: Vec<bool>,
    done: Vec<bool>,
}

impl<'s> Order<'s> {
    fn new(stages: &'s [Stage]) -> Self {
        Self { stages, begun: vec![false; stages.len()], done: vec![false; stages.len()] }
    }

    /// Returns the stages that start now.
    fn start(&mut self) -> Vec<usize> {
        let mut started = Vec::new();
        while let Some(index) = self.next(Lane::Compile).or_else(|| self.next(Lane::Run)) {
            if let Some(begun) = self.begun.get_mut(index) {
                *begun = true;
            }
            started.push(index);
        }
        started
    }

    /// Returns the next stage of a lane if the lane has room and the stages that it needs have
    /// passed. Stages of a lane start in their order.
    fn next(&self, lane: Lane) -> Option<usize> {
        let of_lane = || self.stages.iter().enumerate().filter(|(_, stage)| stage.lane == lane);
        let running =
            of_lane().filter(|(index, _)| self.is_begun(*index) && !self.has_ended(*index));
        if running.count() >= self.room(lane) {
            return None;
        }
        let (index, stage) = of_lane().find(|(index, _)| !self.is_begun(*index))?;
        let has_passed = |name: &&str| {
            let index = self.stages.iter().position(|stage| stage.name == *name);
            index.is_some_and(|index| self.has_ended(index))
        };
        stage.after.iter().all(has_passed).then_some(index)
    }

    /// Returns how many stages of a lane may run at a time. When everything is compiled, the lane
    /// that runs takes the place of the other: some tests wait, or keep one core busy.
    fn room(&self, lane: Lane) -> usize {
        let compiles =
            |(index, stage): (usize, &Stage)| stage.lane == Lane::Compile && !self.has_ended(index);
        match lane {
            Lane::Compile => 1,
            Lane::Run if self.stages.iter().enumerate().any(compiles) => 1,
            Lane::Run => 3,
        }
    }

    fn is_begun(&self, index: usize) -> bool {
        self.begun.get(index) == Some(&true)
    }

    fn has_ended(&self, index: usize) -> bool {
        self.done.get(index) == Some(&true)
    }

    fn end(&mut self, index: usize) {
        if let Some(done) = self.done.get_mut(index) {
            *done = true;
        }
    }

    fn is_running(&self) -> bool {
        self.begun != self.done
    }

    fn is_done(&self) -> bool {
        self.done.iter().all(|done| *done)
    }
}

/// Goes through all stages as if each took the same time; panics if one never starts.
#[cfg(test)]
pub(crate) fn check_order(stages: &[Stage]) {
    let mut order = Order::new(stages);
    while !order.is_done() {
        let started = order.start();
        assert!(!started.is_empty(), "stages that never start");
        for index in started {
            order.end(index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn stage(name: &'static str, lane: Lane, after: &'static [&'static str]) -> Stage {
        Stage { name, lane, after, run: |_| Ok(Outcome::Passed), inputs: Inputs::All }
    }

    #[test]
    fn lanes_run_side_by_side_in_their_orders() {
        let stages = [
            stage("build", Lane::Compile, &[]),
            stage("docs", Lane::Compile, &[]),
            stage("self-test", Lane::Run, &[]),
            stage("tests", Lane::Run, &["build"]),
        ];
        let mut order = Order::new(&stages);
        assert_eq!(order.start(), [0, 2]);
        assert!(order.start().is_empty());
        order.end(2);
        assert!(order.start().is_empty(), "tests wait for their build");
        order.end(0);
        assert_eq!(order.start(), [1, 3]);
        assert!(order.is_running() && !order.is_done());
        order.end(1);
        order.end(3);
        assert!(!order.is_running() && order.is_done());
    }

    #[test]
    fn three_stages_run_when_everything_is_compiled() {
        let run = |name| stage(name, Lane::Run, &["build"]);
        let stages = [stage("build", Lane::Compile, &[]), run("a"), run("b"), run("c"), run("d")];
        let mut order = Order::new(&stages);
        assert_eq!(order.start(), [0]);
        order.end(0);
        assert_eq!(order.start(), [1, 2, 3]);
        order.end(2);
        assert_eq!(order.start(), [4]);
    }

    #[test]
    fn an_unknown_stage_lists_the_known_ones() {
        let stages = [stage("build", Lane::Compile, &[])];
        let error = run_one(&stages, "built").unwrap_err().to_string();
        assert!(error.contains("\"built\"") && error.contains("build"), "{error}");
    }
}
