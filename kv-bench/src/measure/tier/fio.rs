//! `fio`, if it is installed: the results of a standard benchmark for the same file.
use std::io;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use super::error::TierError;
use super::pass::Pass;
use crate::num::{to_f64, to_u64};

/// Runs `fio` over a file that exists; `None` if it is not installed.
pub(super) fn run(
    path: &Path,
    direction: &'static str,
    threads: u32,
    (chunk_bytes, chunks): (u64, usize),
) -> Result<Option<Pass>, TierError> {
    let bytes = chunk_bytes * to_u64(chunks);
    let jobs = u64::from(threads.max(1));
    let each = chunks.checked_div(usize::try_from(jobs).unwrap_or(1)).map_or(1, to_u64);
    let mut command = Command::new("fio");
    command.arg(format!("--filename={}", path.display()));
    command.args(["--name=kv", "--direct=1", "--ioengine=psync", "--thread", "--group_reporting"]);
    command.args(["--output-format=json", "--allow_file_create=0", "--overwrite=1"]);
    command.arg(format!("--rw=rand{direction}"));
    command.arg(format!("--bs={chunk_bytes}")).arg(format!("--numjobs={jobs}"));
    command.arg(format!("--size={bytes}"));
    command.arg(format!("--io_size={}", each.max(1) * chunk_bytes));
    let output = match command.output() {
        Ok(output) => output,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(TierError::io("start of fio")(error)),
    };
    let result: Option<Value> = serde_json::from_slice(&output.stdout).ok();
    let rate = result
        .as_ref()
        .and_then(|result| result.get("jobs")?.get(0)?.get(direction)?.get("bw_bytes")?.as_u64());
    if let Some(rate) = rate.filter(|rate| output.status.success() && *rate > 0) {
        return Ok(Some(Pass { seconds: to_f64(bytes) / to_f64(rate), cpu_seconds: None }));
    }
    let words = String::from_utf8_lossy(&output.stderr);
    Err(TierError::other(format!("fio failed: {}", words.trim())))
}
