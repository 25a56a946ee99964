//! Runs a kit: stages one after another, each a process with its own time limit.
//!
//! The report is written again after every stage, so that if a run ends early (a device that hangs,
//! a machine that is taken away) the results until then remain. [`stages`](super::stages) has the
//! list and order of stages.
use std::env;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::extract::{last_lines, shortened};
use super::process::{self, End};
use super::report::{Check, Outcome, Report};
use crate::shell;

/// Time limits.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Limits {
    /// Limit of all stages together.
    pub(super) deadline: Option<Duration>,
    /// Limit of a stage, whatever its own limit is.
    pub(super) stage_max: Option<Duration>,
}

/// The result of one program.
pub(super) struct Ended {
    pub(super) end: End,
    pub(super) seconds: f64,
    /// All of its output, without paths of the kit.
    pub(super) output: String,
}

/// A program with its arguments.
#[derive(Debug, Clone, Default)]
pub(super) struct Call {
    /// The program, of the kit or of the machine, and its arguments.
    pub(super) args: Vec<String>,
    /// Further variables.
    pub(super) settings: Vec<(String, String)>,
    pub(super) limit: Duration,
}

/// A kit that runs on one card.
pub(super) struct Runner<'k> {
    kit: &'k Path,
    out: PathBuf,
    reports: PathBuf,
    pub(super) device: u32,
    /// The card's name in `CUDA_VISIBLE_DEVICES`, for programs that use the first card.
    pub(super) visible: String,
    limits: Limits,
    /// Folder that is searched first for programs of the machine.
    pub(super) tools: Option<PathBuf>,
    begin: Instant,
    pub(super) report: Report,
}

/// Files in the folder of results: output of ended stages, and of the running one.
const LOGS: &str = "logs.txt";
const RUNNING: &str = "running.txt";
/// The same for records.
const RECORDS: &str = "records.jsonl";
const NEW_RECORDS: &str = "running.jsonl";
/// Stands for the folder of results in commands that are shown.
const OUT: &str = "$OUT";
/// Variable with the first folders of the library search.
const LIBRARIES: &str = "LD_LIBRARY_PATH";
/// Variable with the cards that programs may use.
pub(super) const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";
/// A stage with less than this until the deadline is not started.
const STAGE_LEAST: Duration = Duration::from_secs(2);
/// Time before the deadline for the work after the last stage.
const RESERVE: Duration = Duration::from_secs(2);

impl Call {
    pub(super) fn new(limit_s: u64, args: &[&str]) -> Self {
        let args = args.iter().map(|arg| (*arg).to_owned()).collect();
        Self { args, limit: Duration::from_secs(limit_s), settings: Vec::new() }
    }

    pub(super) fn with(mut self, name: &str, value: &str) -> Self {
        self.settings.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Returns the command as one would type it in the kit.
    pub(super) fn shown(&self) -> String {
        let settings = self.settings.iter().map(|(name, value)| format!("{name}={value}"));
        let quoted =
            |arg: &String| if arg.contains(' ') { format!("\"{arg}\"") } else { arg.clone() };
        settings.chain(self.args.iter().map(quoted)).collect::<Vec<_>>().join(" ")
    }
}

impl Ended {
    pub(super) fn status(&self) -> Option<ExitStatus> {
        match self.end {
            End::Exited(status) => Some(status),
            End::TimedOut | End::Stuck => None,
        }
    }

    pub(super) fn is_success(&self) -> bool {
        self.status().is_some_and(|status| status.success())
    }

    /// Returns the failure of a program, `None` if it succeeded.
    pub(super) fn failure(&self, limit: Duration) -> Option<Outcome> {
        let tail = last_lines(&self.output);
        let limit = limit.as_secs_f64();
        match self.end {
            End::Exited(status) if status.success() => None,
            End::Exited(status) => Some(Outcome::Failed(match status.code() {
                Some(_) => tail,
                None => format!("{status}; {tail}"),
            })),
            End::TimedOut => Some(Outcome::TimedOut(format!("killed after {limit:.1} s; {tail}"))),
            End::Stuck => {
                let why = "a signal does not end it";
                Some(Outcome::TimedOut(format!("{why} after {limit:.1} s; {tail}")))
            }
        }
    }
}

impl<'k> Runner<'k> {
    /// Prepares the run of a kit; writes nothing yet.
    ///
    /// Results go to `out`; without it, the report goes next to the others, and the rest into the
    /// kit.
    pub(super) fn new(
        kit: &'k Path,
        (reports, out): (&Path, Option<&Path>),
        device: u32,
        limits: Limits,
    ) -> Result<Self> {
        let commit = fs::read_to_string(kit.join("commit")).context("the kit names no commit")?;
        let mut today = Command::new("date");
        let date = shell::output(today.args(["-u", "+%Y-%m-%d"])).unwrap_or_default();
        let report = Report {
            commit: commit.trim().to_owned(),
            date: date.trim().to_owned(),
            ..Report::default()
        };
        Ok(Self {
            kit,
            out: out.map_or_else(|| kit.join("out"), Path::to_owned),
            reports: out.unwrap_or(reports).to_owned(),
            device,
            visible: visible(device),
            limits,
            tools: None,
            begin: Instant::now(),
            report,
        })
    }

    /// Makes the command of a program of the kit or of the machine.
    fn command(&self, program: &str) -> Command {
        let is_ours = program.starts_with("bin/");
        let place = if is_ours { self.kit.join(program) } else { PathBuf::from(program) };
        let mut command = Command::new(place);
        command.current_dir(self.kit);
        if let Some(tools) = &self.tools {
            let others = env::var_os("PATH").unwrap_or_default();
            let all = std::iter::once(tools.clone()).chain(env::split_paths(&others));
            command.env("PATH", env::join_paths(all).unwrap_or(others));
        }
        // Without this, a toolkit's stub of the driver, meant for linking, would be found before
        // the driver.
        if let Some(libraries) = env::var_os(LIBRARIES) {
            let real = env::split_paths(&libraries).filter(|folder| !folder.ends_with("stubs"));
            command.env(LIBRARIES, env::join_paths(real).unwrap_or(libraries));
        }
        command
    }

    /// Returns the output of a tool of the machine. A card that hangs makes even queries hang.
    pub(super) fn ask(&self, args: &[&str]) -> Option<String> {
        let (program, args) = args.split_first()?;
        let limit = Duration::from_secs(30).min(self.limits.stage_max.unwrap_or(Duration::MAX));
        process::output(self.command(program).args(args), limit)
    }

    /// Returns one line of the driver's own tool about a card.
    fn query(&self, what: &str) -> Option<String> {
        let what = format!("--query-gpu={what}");
        let message =
            self.ask(&["nvidia-smi", &what, "--format=csv,noheader", "-i", &self.visible])?;
        message.lines().next().map(|line| line.trim().to_owned()).filter(|line| !line.is_empty())
    }

    /// Returns clock of the multiprocessors, power and temperature, from the driver's tool.
    fn clocks(&self) -> Option<String> {
        self.query("clocks.sm,power.draw,temperature.gpu")
    }

    /// Returns the driver's version, from its own tool or the kernel.
    pub(super) fn driver(&self) -> String {
        let version = self
            .query("driver_version")
            .or_else(|| fs::read_to_string("/proc/driver/nvidia/version").ok());
        let version = version.as_deref().and_then(|text| text.lines().next()).unwrap_or_default();
        if version.trim().is_empty() { "unknown".to_owned() } else { version.trim().to_owned() }
    }

    /// Returns a folder of the kit.
    pub(super) fn place(&self, name: &str) -> PathBuf {
        self.kit.join(name)
    }

    /// Creates the files of results and removes those of earlier runs.
    pub(super) fn prepare(&self) -> Result<()> {
        fs::create_dir_all(&self.out)
            .with_context(|| format!("cannot make {}", self.out.display()))?;
        for name in [LOGS, RUNNING, RECORDS, NEW_RECORDS] {
            match fs::remove_file(self.out.join(name)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
                _ => {}
            }
        }
        Ok(())
    }

    /// Removes all output, because nothing worth reading ran.
    pub(super) fn clear(&self) {
        let _ = fs::remove_file(self.out.join(LOGS));
        // Stays if it has files of others.
        let _ = fs::remove_dir(&self.out);
    }

    /// Returns the time limit of a stage, far from the deadline.
    pub(super) fn limit_of(&self, call: &Call) -> Duration {
        call.limit.min(self.limits.stage_max.unwrap_or(Duration::MAX))
    }

    /// Returns the time limit of a stage now; notes a skipped stage if too little time is left.
    fn has_time(&mut self, name: &str, call: &Call) -> Result<Option<Duration>> {
        let limit = self.limit_of(call);
        let Some(deadline) = self.limits.deadline else { return Ok(Some(limit)) };
        let left = deadline.saturating_sub(RESERVE).saturating_sub(self.begin.elapsed());
        if left < STAGE_LEAST.min(limit) {
            let why = format!("the deadline of {:.0} s was near", deadline.as_secs_f64());
            self.skip(name, call, &why)?;
            return Ok(None);
        }
        Ok(Some(limit.min(left)))
    }

    /// Runs a stage and notes its outcome, which `outcome_of` decides if the program succeeds. `None` if
    /// it was not run.
    pub(super) fn stage(
        &mut self,
        name: &str,
        call: &Call,
        outcome_of: impl FnOnce(&Ended) -> Outcome,
    ) -> Result<Option<Ended>> {
        self.stage_or_failure(name, call, |ended, failure| {
            failure.unwrap_or_else(|| outcome_of(ended))
        })
    }

    /// Runs a stage like [`Self::stage`], but `outcome_of` also gets the failure of a program.
    pub(super) fn stage_or_failure(
        &mut self,
        name: &str,
        call: &Call,
        outcome_of: impl FnOnce(&Ended, Option<Outcome>) -> Outcome,
    ) -> Result<Option<Ended>> {
        let Some(limit) = self.has_time(name, call)? else { return Ok(None) };
        let ended = match self.start(name, call, limit) {
            Ok(ended) => ended,
            // A program that the machine or a damaged kit lacks.
            Err(error) => {
                let outcome = Outcome::Failed(format!("{error:#}"));
                self.note(name, &call.shown(), None, outcome)?;
                return Ok(None);
            }
        };
        let outcome = outcome_of(&ended, ended.failure(limit));
        self.note(name, &call.shown(), Some(&ended), outcome)?;
        Ok(Some(ended))
    }

    /// Notes an outcome and writes the report again.
    pub(super) fn note(
        &mut self,
        name: &str,
        command: &str,
        ended: Option<&Ended>,
        outcome: Outcome,
    ) -> Result<()> {
        let (word, message) = outcome.words();
        println!("   {word}{}{message}", if message.is_empty() { "" } else { ": " });
        self.report.checks.push(Check {
            name: name.to_owned(),
            command: self.without_places(command),
            exit_code: ended.and_then(Ended::status).and_then(|status| status.code()),
            seconds: ended.map_or(0.0, |ended| ended.seconds),
            outcome,
        });
        self.write()
    }

    pub(super) fn skip(&mut self, name: &str, call: &Call, why: &str) -> Result<()> {
        println!("-- {name}");
        self.note(name, &call.shown(), None, Outcome::Skipped(why.to_owned()))
    }

    /// Writes the present report.
    pub(super) fn write(&self) -> Result<()> {
        fs::create_dir_all(&self.reports)
            .with_context(|| format!("cannot make {}", self.reports.display()))?;
        let write = |extension: &str, text: String| {
            let file = self.report_file(extension);
            // Written atomically, in case the run is ended meanwhile.
            let partial = file.with_extension("partial");
            fs::write(&partial, text)
                .and_then(|()| fs::rename(&partial, &file))
                .with_context(|| format!("cannot write {}", file.display()))
        };
        write("json", format!("{:#}\n", self.report.json()))?;
        write("md", self.report.markdown())
    }

    pub(super) fn report_file(&self, extension: &str) -> PathBuf {
        self.reports.join(format!("{}.{extension}", self.report.file_name()))
    }

    /// Appends the option for the file of new records to `args`, runs the program, and reads the
    /// records, however it ended. Checks among the records are noted.
    pub(super) fn measure(
        &mut self,
        name: &str,
        mut call: Call,
        option: Option<&str>,
    ) -> Result<Option<Ended>> {
        let file = self.out.join(NEW_RECORDS);
        call.args.extend(option.map(str::to_owned));
        call.args.push(file.to_string_lossy().into_owned());
        let before = self.report.records.checks.len();
        let clocks = self.clocks();
        let ended = self.stage(name, &call, |_| Outcome::Passed(String::new()))?;
        let text = fs::read(&file).unwrap_or_default();
        let _ = fs::remove_file(&file);
        let text = String::from_utf8_lossy(&text);
        self.append(RECORDS, &text)?;
        self.report.records.read(&text);
        if let (Some(before), Some(after)) = (clocks, self.clocks()) {
            let fact = (format!("card around {name}"), format!("{before}; then {after}").into());
            self.report.records.facts.push(fact);
        }
        let checks = self.report.records.checks.get(before..).unwrap_or_default().to_vec();
        for (check, wrong) in checks {
            let outcome = wrong.map_or_else(|| Outcome::Passed(String::new()), Outcome::Failed);
            self.note(&check, &call.shown(), None, outcome)?;
        }
        self.write()?;
        Ok(ended)
    }

    /// Runs a program of the kit; its output goes to the log.
    pub(super) fn start(&self, name: &str, call: &Call, limit: Duration) -> Result<Ended> {
        println!("-- {name}: {}", self.without_places(&call.shown()));
        let Some((program, args)) = call.args.split_first() else { bail!("{name}: no program") };
        let running = self.out.join(RUNNING);
        let file = File::create(&running)?;
        let mut command = self.command(program);
        command.args(args);
        command.envs(call.settings.iter().map(|(name, value)| (name, value)));
        command.stdout(file.try_clone()?).stderr(file);
        let begin = Instant::now();
        let end =
            process::run(&mut command, limit).with_context(|| format!("cannot run {program}"))?;
        let seconds = begin.elapsed().as_secs_f64();
        let output = fs::read(&running)?;
        let output = self.without_places(&shortened(&String::from_utf8_lossy(&output)));
        println!("   {end:?}, {seconds:.1} s");
        let command = self.without_places(&call.shown());
        let title = format!("== {name}: {command}\n== {end:?}, {seconds:.1} s\n");
        self.append(LOGS, &format!("{title}{}\n", output.trim_end()))?;
        fs::remove_file(&running)?;
        Ok(Ended { end, seconds, output })
    }

    /// Removes the paths of the kit and of its results from a text.
    fn without_places(&self, text: &str) -> String {
        let text = text.replace(&*self.out.to_string_lossy(), OUT);
        text.replace(&*self.kit.to_string_lossy(), ".")
    }

    fn append(&self, name: &str, text: &str) -> Result<()> {
        let file = self.out.join(name);
        let mut file = OpenOptions::new().create(true).append(true).open(file)?;
        Ok(file.write_all(text.as_bytes())?)
    }
}

/// Returns a card's name by its index among the visible ones.
fn visible(device: u32) -> String {
    let now = env::var(VISIBLE).unwrap_or_default();
    let mut cards = now.split(',').map(str::trim).filter(|card| !card.is_empty());
    let card = cards.nth(usize::try_from(device).unwrap_or(usize::MAX));
    card.map_or_else(|| device.to_string(), str::to_owned)
}
