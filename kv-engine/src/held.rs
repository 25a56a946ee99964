//! The step that an engine holds: the one place that lends and ends it.
use kv_core::backend::Backend;
use kv_core::invariant::Invariant;
use kv_core::{CacheError, KvCache, Step};

/// Lends the held step; `None` if there is none. It stays held, unless `using` panics.
pub(crate) fn lend<B: Backend, T>(
    cache: &mut KvCache<B>,
    using: impl FnOnce(&mut Step<'_, B>) -> T,
) -> Option<T> {
    let mut step = cache.held()?;
    let used = using(&mut step);
    step.hold();
    Some(used)
}

/// Commits the held step with the first tokens of each entry that `accepted` says, all if `None`;
/// on an error it is rolled back.
pub(crate) fn commit<B: Backend>(
    cache: &mut KvCache<B>,
    accepted: Option<&[u32]>,
) -> Result<(), CacheError> {
    let step = cache.held().invariant(HELD);
    match accepted {
        Some(accepted) => step.commit_accepted(accepted),
        None => step.commit(),
    }
}

/// Rolls the held step back; does nothing without one.
pub(crate) fn roll_back<B: Backend>(cache: &mut KvCache<B>) {
    drop(cache.held());
}

const HELD: &str = "an engine that holds a step has one open in its cache";
