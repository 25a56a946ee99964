//! Passes over chunks: their time, their threads, their medians.
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use kv::tier::StoreError;
use rustix::time::{ClockId, clock_gettime};

use super::error::TierError;
use super::report::TierLine;
use crate::measure::Progress;
use crate::measure::clock::{Samples, gb_per_s};
use crate::num::{to_f64, to_u64};

/// Time of one pass.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pass {
    pub(super) seconds: f64,
    /// CPU time of the process; `None` if another process works.
    pub(super) cpu_seconds: Option<f64>,
}

/// Times what `run` does.
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

/// Calls `run` for each of `items`, on one thread for each of `states`. The first failure ends it.
pub(super) fn on_threads<S: Send>(
    states: &mut [S],
    items: &[usize],
    run: impl Fn(&mut S, usize) -> Result<(), TierError> + Sync,
) -> Result<(), TierError> {
    let (next, failure) = (AtomicUsize::new(0), Mutex::new(None));
    thread::scope(|scope| {
        for state in states {
            scope.spawn(|| {
                while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(error) = run(state, *item) {
                        next.store(items.len(), Ordering::Relaxed);
                        *failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                        return;
                    }
                }
            });
        }
    });
    let failure = failure.into_inner().unwrap_or_else(PoisonError::into_inner);
    failure.map_or(Ok(()), Err)
}

/// Returns `0..count` in an order that depends on `seed`.
pub(super) fn shuffled(count: usize, seed: u64) -> Vec<usize> {
    let mut order: Vec<_> = (0..count).collect();
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    for end in (1..count).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let at = state.checked_rem(to_u64(end).saturating_add(1)).unwrap_or(0);
        order.swap(end, usize::try_from(at).unwrap_or(0));
    }
    order
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

/// What two sides did.
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
    fn an_order_has_every_index_once_and_depends_on_the_seed() {
        let (a, b) = (shuffled(100, 1), shuffled(100, 2));
        assert_ne!(a, b);
        assert_ne!(a, (0..100).collect::<Vec<_>>());
        for mut order in [a, b] {
            order.sort_unstable();
            assert_eq!(order, (0..100).collect::<Vec<_>>());
        }
        assert_eq!((shuffled(0, 1), shuffled(1, 1)), (vec![], vec![0]));
    }

    #[test]
    fn every_item_runs_once_and_the_first_failure_ends_the_pass() {
        let mut states = vec![0_usize; 4];
        on_threads(&mut states, &shuffled(50, 3), |sum, item| {
            *sum += item + 1;
            Ok(())
        })
        .unwrap();
        assert_eq!(states.iter().sum::<usize>(), 50 * 51 / 2);
        let failed = on_threads(&mut states, &[1, 2, 3], |_, _| Err(TierError::NotHere));
        assert!(matches!(failed, Err(TierError::NotHere)));
    }

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
