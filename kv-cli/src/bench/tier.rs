//! `kv bench --suite tier`.
use std::env;
use std::path::PathBuf;

use indicatif::ProgressBar;
use kv::tier::Bytes;
use kv_bench::measure::{TierLine, TierOptions, TierReport, measure_tiers};

use super::Bar;
use super::report::{count, figure};
use crate::args::BenchArgs;
use crate::output;

pub(super) fn run(args: &BenchArgs) -> anyhow::Result<()> {
    let options = TierOptions {
        dir: args.dir.clone().unwrap_or_else(default_dir),
        redis: args.redis.clone(),
        s3: args.s3.clone(),
        bytes: args.size.map_or(TierOptions::BYTES, |Bytes(bytes)| bytes),
        rounds: args.rounds.unwrap_or(TierOptions::ROUNDS),
    };
    let mut bar = Bar(ProgressBar::hidden());
    let report = measure_tiers(&options, &mut bar)?;
    bar.0.finish_and_clear();
    if args.json { output::json(&report.lines) } else { output::text(&show(&report)) }
}

/// Returns a folder that is rarely in memory, as temporary ones often are: `target`, the user's
/// cache, or the current folder.
fn default_dir() -> PathBuf {
    let home = env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    let caches = env::var_os("XDG_CACHE_HOME").map(PathBuf::from).into_iter().chain(home);
    let folders = [PathBuf::from("target")].into_iter().chain(caches);
    folders.into_iter().find(|folder| folder.is_dir()).unwrap_or_else(|| PathBuf::from("."))
}

fn show(report: &TierReport) -> String {
    let TierReport { cpu, cpu_threads, dir, chunk_bytes, rounds, lines, .. } = report;
    let mut rows = vec![HEADING.map(str::to_owned).to_vec()];
    rows.extend(lines.iter().map(cells));
    format!(
        "{cpu}, {}; {dir}\nchunks of {}; medians of {}\n\n{}\n{LEGEND}",
        count(crate::num::to_u32(*cpu_threads), "thread"),
        Bytes(*chunk_bytes),
        count(*rounds, "round"),
        output::table(&rows)
    )
}

const HEADING: [&str; 10] =
    ["case", "beside", "threads", "bytes", "unit", "ours", "theirs", "ratio", "goal", "CPU s/GiB"];

fn cells(line: &TierLine) -> Vec<String> {
    let cpu = |seconds: Option<f64>| seconds.map_or_else(|| "-".to_owned(), figure);
    vec![
        line.case.to_owned(),
        line.peer.to_owned(),
        line.threads.to_string(),
        Bytes(line.bytes).to_string(),
        line.unit.to_owned(),
        figure(line.ours),
        figure(line.theirs),
        format!("{:.2}", line.ratio),
        format!("{:.2}", line.goal),
        format!("{} / {}", cpu(line.cpu_s_per_gib), cpu(line.peer_cpu_s_per_gib)),
    ]
}

const LEGEND: &str = "\
disk to verified memory  a chunk is read past the page cache and every check of it made
memory to disk           a chunk becomes a file; the plain write fills a file that is there
get                      a chunk from a server, into memory of the caller, without checks
GB/s counts 10^9 bytes; CPU is that of this process, ours and the peer's.
";
