//! The results of [`measure_tiers`](super::measure_tiers).
use std::fs;
use std::thread;

use serde::Serialize;

use super::TierOptions;

/// Stores beside their peers.
#[derive(Debug, Serialize)]
#[non_exhaustive]
pub struct TierReport {
    /// The processor.
    pub cpu: String,
    /// Threads of the processor.
    pub cpu_threads: usize,
    /// The folder.
    pub dir: String,
    /// Bytes of a chunk.
    pub chunk_bytes: u64,
    /// Rounds after the warm-up.
    pub rounds: u32,
    /// One line for each comparison.
    pub lines: Vec<TierLine>,
}

impl TierReport {
    pub(super) fn new(options: &TierOptions, chunk_bytes: u64, lines: Vec<TierLine>) -> Self {
        let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let cpu = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
        let cpu = cpu.map_or_else(|| "unknown".to_owned(), |(_, name)| name.to_owned());
        let cpu_threads = thread::available_parallelism().map_or(1, usize::from);
        let dir = options.dir.display().to_string();
        Self { cpu, cpu_threads, dir, chunk_bytes, rounds: options.rounds, lines }
    }
}

/// A figure of ours and that of a peer.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct TierLine {
    /// Name of the measurement.
    pub case: &'static str,
    /// Name of the peer.
    pub peer: &'static str,
    /// Unit of both figures.
    pub unit: &'static str,
    /// Threads that call.
    pub threads: u32,
    /// Bytes of a pass.
    pub bytes: u64,
    /// Our figure, a median.
    pub ours: f64,
    /// The peer's.
    pub theirs: f64,
    /// Ours divided by the peer's.
    pub ratio: f64,
    /// The least ratio that is aimed at.
    pub goal: f64,
    /// Seconds of CPU time of this process for a GiB.
    pub cpu_s_per_gib: Option<f64>,
    /// The same for the peer, where it runs in this process.
    pub peer_cpu_s_per_gib: Option<f64>,
}
