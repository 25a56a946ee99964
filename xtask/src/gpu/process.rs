//! Runs one program with a time limit.
//!
//! The program runs in its own process group, and the whole group is killed when the time is over,
//! so that a program that hangs or leaves child processes cannot delay later stages.
use std::io::Read as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use std::{io, thread};

/// The end of a program.
#[derive(Debug)]
pub(super) enum End {
    /// It exited, or another signal ended it.
    Exited(ExitStatus),
    /// Killed at its limit.
    TimedOut,
    /// It cannot be killed at its limit: it is in the kernel, where no signal reaches it.
    Stuck,
}

/// Shortest and longest interval of polling for the end of a program.
const POLL: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(100)];
/// Time for a killed program to end. One that waits for a device in the kernel may never.
const GOING: Duration = Duration::from_secs(5);

/// Runs a program for at most `limit`.
///
/// # Errors
/// If it cannot be started or waited for.
pub(super) fn run(command: &mut Command, limit: Duration) -> io::Result<End> {
    end(&mut start(command)?, limit)
}

/// Returns the output of a program that prints little, `None` if it cannot be started, fails, or
/// has not ended by its limit.
pub(super) fn output(command: &mut Command, limit: Duration) -> Option<String> {
    let mut child = start(command.stdout(Stdio::piped()).stderr(Stdio::null())).ok()?;
    let End::Exited(status) = end(&mut child, limit).ok()? else { return None };
    let mut text = String::new();
    child.stdout.take()?.read_to_string(&mut text).ok()?;
    status.success().then_some(text)
}

fn start(command: &mut Command) -> io::Result<Child> {
    lead_group(command);
    command.stdin(Stdio::null()).spawn()
}

/// Waits for a program, and kills the rest of its group.
fn end(child: &mut Child, limit: Duration) -> io::Result<End> {
    let status = wait(child, limit)?;
    kill_group(child);
    match status {
        Some(status) => Ok(End::Exited(status)),
        None => Ok(wait(child, GOING)?.map_or(End::Stuck, |_| End::TimedOut)),
    }
}

/// Waits up to a limit.
fn wait(child: &mut Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    let begin = Instant::now();
    let [mut pause, longest] = POLL;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        let left = limit.saturating_sub(begin.elapsed());
        if left.is_zero() {
            return Ok(None);
        }
        thread::sleep(pause.min(left));
        pause = pause.saturating_mul(2).min(longest);
    }
}

#[cfg(unix)]
fn lead_group(command: &mut Command) {
    use std::os::unix::process::CommandExt;
    command.process_group(0);
}

#[cfg(not(unix))]
fn lead_group(_: &mut Command) {}

/// Kills every process of the program's group.
fn kill_group(child: &mut Child) {
    // The shell has its own `kill`, so no package is needed.
    let mut kill = Command::new("sh");
    kill.args(["-c", "kill -s KILL -- \"-$1\"", "sh", &child.id().to_string()]);
    let _ = kill.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
    // Without a shell, kill at least the program itself.
    let _ = child.kill();
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    /// Returns whether a process exists and is not a zombie.
    fn is_alive(process: &str) -> bool {
        let stat = Path::new("/proc").join(process.trim()).join("stat");
        fs::read_to_string(stat).is_ok_and(|stat| !stat.contains(") Z "))
    }

    #[test]
    fn a_program_that_ends_has_its_own_status() {
        let end = run(&mut shell("exit 7"), Duration::from_mins(1)).unwrap();
        assert!(matches!(end, End::Exited(status) if status.code() == Some(7)), "{end:?}");
        let end = run(&mut shell("kill -s SEGV $$"), Duration::from_mins(1)).unwrap();
        assert!(matches!(end, End::Exited(status) if status.code().is_none()), "{end:?}");
    }

    #[test]
    fn a_program_that_hangs_is_killed_with_its_children() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("child");
        // The shell ignores the signals that can be ignored, and so does its child.
        let script =
            format!("trap '' TERM HUP INT; sleep 600 & echo $! > {}; wait", file.display());
        let begin = Instant::now();
        let end = run(&mut shell(&script), Duration::from_millis(400)).unwrap();
        assert!(matches!(end, End::TimedOut), "{end:?}");
        assert!(begin.elapsed() < Duration::from_mins(1));
        let child = fs::read_to_string(file).unwrap();
        thread::sleep(Duration::from_millis(100));
        assert!(!is_alive(&child), "process {child} is left");
    }

    #[test]
    fn background_processes_end_with_their_program() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("child");
        let script = format!("sleep 600 & echo $! > {}; exit 0", file.display());
        let end = run(&mut shell(&script), Duration::from_mins(1)).unwrap();
        assert!(matches!(end, End::Exited(status) if status.success()), "{end:?}");
        let child = fs::read_to_string(file).unwrap();
        thread::sleep(Duration::from_millis(100));
        assert!(!is_alive(&child), "process {child} is left");
    }

    #[test]
    fn an_output_is_that_of_a_program_that_succeeds_in_time() {
        let limit = Duration::from_mins(1);
        assert_eq!(output(&mut shell("echo said; echo no >&2"), limit).as_deref(), Some("said\n"));
        assert_eq!(output(&mut shell("echo said; exit 1"), limit), None);
        assert_eq!(output(&mut shell("echo said; sleep 600"), Duration::from_millis(200)), None);
        assert_eq!(output(&mut Command::new("/no/such/program"), limit), None);
    }

    #[test]
    fn a_missing_program_is_an_error() {
        let error = run(&mut Command::new("/no/such/program"), Duration::from_secs(1)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
