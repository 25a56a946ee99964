//! Who does the work: the calling thread, with rayon's global pool or a pool of one's own beside
//! it.
//!
//! The calling thread works too, as threads of a pool sleep and take long to wake: a short call is
//! half done by then.
//!
//! Units of work are taken from a counter, so which thread does which is left open and results may
//! not depend on it. Knows nothing of what a unit is.
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kv_core::{DeviceError, DeviceErrorKind};

use crate::encoding::unsupported;

/// A source of parallelism.
#[derive(Debug, Clone)]
pub(crate) enum Threads {
    /// The calling thread alone; nothing of rayon runs.
    One,
    /// Rayon's global pool.
    Global(usize),
    /// A pool of this backend, of one thread less.
    Own(Arc<rayon::ThreadPool>),
}

impl Threads {
    /// `count` threads of its own, or rayon's global pool.
    pub(crate) fn new(count: Option<usize>) -> Result<Self, DeviceError> {
        match count {
            Some(0) => Err(unsupported("open cpu", "0 threads given, at least 1 is needed")),
            Some(1) => Ok(Self::One),
            Some(count) => rayon::ThreadPoolBuilder::new()
                .num_threads(count.saturating_sub(1))
                .thread_name(|index| format!("kv-cpu-{index}"))
                .build()
                .map(|pool| Self::Own(Arc::new(pool)))
                .map_err(|error| {
                    DeviceError::new(DeviceErrorKind::Driver, "open cpu").with_source(error)
                }),
            None => Ok(match rayon::current_num_threads() {
                0 | 1 => Self::One,
                count => Self::Global(count),
            }),
        }
    }

    /// Reads a setting such as that of `KV_CPU_THREADS`; absent or empty means rayon's pool.
    pub(crate) fn parse_count(setting: Option<&str>) -> Result<Option<usize>, DeviceError> {
        match setting.map(str::trim) {
            None | Some("") => Ok(None),
            Some(number) => match number.parse::<NonZeroUsize>() {
                Ok(count) => Ok(Some(count.get())),
                Err(_) => Err(unsupported(
                    "open cpu",
                    format!("thread count {number:?}, expected a number of at least 1"),
                )),
            },
        }
    }

    /// Threads that work side by side.
    pub(crate) fn count(&self) -> usize {
        match self {
            Self::One => 1,
            Self::Global(count) => *count,
            Self::Own(pool) => pool.current_num_threads().saturating_add(1),
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
        let alone = !side_by_side || units < 2 || locals.len() < 2;
        if alone || matches!(self, Self::One) {
            if let Some(local) = locals.first_mut() {
                (0..units).for_each(|unit| work(local, unit));
            }
            return;
        }
        let next = AtomicUsize::new(0);
        let (next, work) = (&next, &work);
        let Some((own, others)) = locals.split_first_mut() else {
            return;
        };
        let others = others.iter_mut().take(units.saturating_sub(1));
        match self {
            Self::Own(pool) => pool.in_place_scope(|scope| {
                for local in others {
                    scope.spawn(move |_| take(next, units, local, work));
                }
                take(next, units, own, work);
            }),
            _ => rayon::in_place_scope(|scope| {
                for local in others {
                    scope.spawn(move |_| take(next, units, local, work));
                }
                take(next, units, own, work);
            }),
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
        for wrong in ["0", "-1", "many"] {
            let refused = Threads::parse_count(Some(wrong)).unwrap_err();
            assert!(refused.to_string().contains(wrong), "{refused}");
        }
        assert!(Threads::new(Some(0)).is_err());
    }
}
