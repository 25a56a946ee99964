//! Who does the work: the calling thread, and helpers beside it ([`Crew`]).
//!
//! Units of work are taken from a counter, so which thread does which is left open and results may
//! not depend on it. Knows nothing of what a unit is.
mod call;
mod crew;
mod place;

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crew::Crew;
use kv_core::{DeviceError, DeviceErrorKind};

use crate::layout::unsupported;

/// A source of parallelism.
#[derive(Debug, Clone)]
pub(crate) enum Threads {
    /// The calling thread alone.
    One,
    /// The calling thread and some helpers.
    Several(Arc<Crew>),
}

/// The most threads of one backend. Beyond it, starting them fails in ways that end the process:
/// each takes several mappings of memory, of which Linux allows 65,530.
pub(crate) const THREADS_MAX: usize = 4096;

/// As many as the machine has cores for, for all backends that do not say otherwise.
static SHARED: OnceLock<Threads> = OnceLock::new();

impl Threads {
    /// `count` threads, with helpers of its own; or one a core, with helpers that all share.
    pub(crate) fn new(count: Option<usize>) -> Result<Self, DeviceError> {
        match count {
            Some(0) => Err(unsupported("open cpu", "0 threads given, at least 1 is needed")),
            Some(count) if count > THREADS_MAX => Err(unsupported(
                "open cpu",
                format!("{count} threads given, at most {THREADS_MAX} are possible"),
            )),
            Some(1) => Ok(Self::One),
            Some(count) => match Crew::new(count.saturating_sub(1)) {
                Ok(crew) => Ok(Self::Several(Arc::new(crew))),
                Err(error) => {
                    Err(DeviceError::new(DeviceErrorKind::Driver, "open cpu").with_source(error))
                }
            },
            None => {
                if let Some(shared) = SHARED.get() {
                    return Ok(shared.clone());
                }
                let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
                let threads = Self::new(Some(cores.min(THREADS_MAX)))?;
                Ok(SHARED.get_or_init(|| threads).clone())
            }
        }
    }

    /// Reads a setting such as that of `KV_CPU_THREADS`; absent or empty means one a core.
    pub(crate) fn parse_count(setting: Option<&str>) -> Result<Option<usize>, DeviceError> {
        match setting.map(str::trim) {
            None | Some("") => Ok(None),
            Some(number) => match number.parse::<NonZeroUsize>() {
                Ok(count) if count.get() <= THREADS_MAX => Ok(Some(count.get())),
                _ => Err(unsupported(
                    "open cpu",
                    format!(
                        "thread count {number:?} in KV_CPU_THREADS, expected a number of at least \
                         1 and at most {THREADS_MAX}"
                    ),
                )),
            },
        }
    }

    /// Threads that work side by side.
    pub(crate) fn count(&self) -> usize {
        match self {
            Self::One => 1,
            Self::Several(crew) => crew.helpers().saturating_add(1),
        }
    }

    /// Runs units `0..units`, each once, with one of `locals` for the time of the unit.
    ///
    /// At most `locals.len()` run side by side; the calling thread alone when `side_by_side` is
    /// false.
    pub(crate) fn run<T: Send>(
        &self,
        units: usize,
        side_by_side: bool,
        locals: &mut [T],
        work: impl Fn(&mut T, usize) + Sync,
    ) {
        let Some((own, others)) = locals.split_first_mut() else {
            return;
        };
        let helpers = others.len().min(units.saturating_sub(1));
        match self {
            Self::Several(crew) if side_by_side && helpers > 0 => {
                let next = AtomicUsize::new(0);
                let others = Mutex::new(others.iter_mut());
                let help = || {
                    let local = others.lock().unwrap_or_else(PoisonError::into_inner).next();
                    if let Some(local) = local {
                        take(&next, units, local, &work);
                    }
                };
                crew.run(helpers, || take(&next, units, own, &work), &help);
            }
            _ => (0..units).for_each(|unit| work(own, unit)),
        }
    }
}

/// Takes units until none is left.
fn take<T>(next: &AtomicUsize, units: usize, local: &mut T, work: &impl Fn(&mut T, usize)) {
    loop {
        let unit = next.fetch_add(1, Ordering::Relaxed);
        if unit >= units {
            return;
        }
        work(local, unit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_unit_runs_once() {
        for count in [1, 2, 5] {
            let threads = Threads::new(Some(count)).unwrap();
            assert_eq!(threads.count(), count);
            let mut locals = vec![0_usize; count];
            let seen: Vec<_> = (0..100).map(|_| AtomicUsize::new(0)).collect();
            threads.run(seen.len(), true, &mut locals, |local, unit| {
                *local += 1;
                seen[unit].fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(locals.iter().sum::<usize>(), 100);
            assert!(seen.iter().all(|n| n.load(Ordering::Relaxed) == 1));
        }
    }

    #[test]
    fn counts_are_parsed_or_refused() {
        assert_eq!(Threads::parse_count(None).unwrap(), None);
        assert_eq!(Threads::parse_count(Some("3")).unwrap(), Some(3));
        assert_eq!(Threads::parse_count(Some("4096")).unwrap(), Some(THREADS_MAX));
        for wrong in ["0", "-1", "many", "4097", "100000", "99999999999999999999"] {
            let refused = Threads::parse_count(Some(wrong)).unwrap_err();
            assert!(refused.to_string().contains(wrong), "{refused}");
        }
        assert!(Threads::new(Some(0)).is_err());
        let refused = Threads::new(Some(THREADS_MAX + 1)).unwrap_err().to_string();
        assert!(refused.contains("4097 threads given, at most 4096 are possible"), "{refused}");
    }
}
