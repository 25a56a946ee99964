//! Passes over chunks: their time and their medians.
use std::time::{Duration, Instant};

use kv::tier::StoreError;
use rustix::time::{ClockId, clock_gettime};

use super::error::TierError;
use super::report::TierLine;
use crate::measure::Progress;
use crate::measure::clock::{Samples, gb_per_s};
use crate::num::to_f64;

/// Time of one pass.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pass {
    pub(super) seconds: f64,
    /// CPU time of the process; `None` if another process works.
    pub(super) cpu_seconds: Option<f64>,
}

/// Times the call of `run`.
pub(super) fn timed(run: impl FnOnce() -> Result<(), TierError>) -> Result<Pass, TierError> {
    let (begin, cpu) = (Instant::now(), cpu_time());
    run()?;
    let (seconds, cpu) = (begin.elapsed().as_secs_f64(), cpu_time().saturating_sub(cpu));
    Ok(Pass { seconds, cpu_seconds: Some(cpu.as_secs_f64()) })
}

/// Returns the CPU time of all threads of the process.
fn cpu_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap_or_default()
}

/// The passes of a store or of a peer.
#[derive(Debug, Default)]
pub(super) struct Passes {
    seconds: Samples,
    cpu: Samples,
    has_cpu: bool,
}

impl Passes {
    /// Adds a pass; the one of round 0 warms up.
    pub(super) fn push(&mut self, round: u32, pass: Pass, progress: &mut dyn Progress) {
        progress.advance(1);
        if round == 0 {
            return;
        }
        self.seconds.push(pass.seconds);
        if let Some(cpu) = pass.cpu_seconds {
            self.has_cpu = true;
            self.cpu.push(cpu);
        }
    }

    fn cpu_s_per_gib(&self, bytes: u64) -> Option<f64> {
        self.has_cpu.then(|| self.cpu.median() / (to_f64(bytes) / to_f64(1 << 30)))
    }
}

/// A case that was measured on two sides.
pub(super) struct Comparison {
    pub(super) case: &'static str,
    pub(super) peer: &'static str,
    pub(super) goal: f64,
    pub(super) threads: u32,
    pub(super) bytes: u64,
}

impl Comparison {
    /// Makes the line of a report.
    pub(super) fn line(&self, ours: &Passes, theirs: &Passes) -> TierLine {
        let Self { case, peer, goal, threads, bytes } = *self;
        let rate = |passes: &Passes| gb_per_s(bytes, passes.seconds.median());
        let ratio = if rate(theirs) > 0.0 { rate(ours) / rate(theirs) } else { 0.0 };
        TierLine {
            case,
            peer,
            unit: "GB/s",
            threads,
            bytes,
            ours: rate(ours),
            theirs: rate(theirs),
            ratio,
            goal,
            cpu_s_per_gib: ours.cpu_s_per_gib(bytes),
            peer_cpu_s_per_gib: theirs.cpu_s_per_gib(bytes),
        }
    }
}

/// Refuses a read of another length than a chunk's.
pub(super) fn expect_chunk(
    read: Result<Option<usize>, StoreError>,
    expected: usize,
) -> Result<(), TierError> {
    match read? {
        Some(read) if read == expected => Ok(()),
        Some(read) => Err(TierError::other(format!("{read} bytes of a chunk of {expected}"))),
        None => Err(TierError::other("a chunk that was written is gone")),
    }
}

/// Returns a deadline that only a store that hangs reaches.
pub(super) fn soon() -> Instant {
    let now = Instant::now();
    now.checked_add(LIMIT).unwrap_or(now)
}

const LIMIT: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_medians_without_the_warm_up() {
        struct Silent;
        impl Progress for Silent {
            fn begin(&mut self, _: u64) {}
            fn advance(&mut self, _: u64) {}
            fn left_out(&mut self, _: &str, _: &crate::measure::LeftOut) {}
        }
        let passes = |seconds: [f64; 4], cpu| {
            let mut passes = Passes::default();
            for (round, seconds) in (0..).zip(seconds) {
                passes.push(round, Pass { seconds, cpu_seconds: cpu }, &mut Silent);
            }
            passes
        };
        let case = Comparison { case: "read", peer: "raw", goal: 0.85, threads: 4, bytes: 1 << 30 };
        let line = case.line(
            &passes([100.0, 1.0, 2.0, 9.0], Some(0.5)),
            &passes([100.0, 1.0, 1.0, 1.0], None),
        );
        assert!((line.theirs - 1.073_741_824).abs() < 1e-9, "{line:?}");
        assert!((line.ratio - 0.5).abs() < 1e-9, "{line:?}");
        assert_eq!((line.cpu_s_per_gib, line.peer_cpu_s_per_gib), (Some(0.5), None));
    }
}
