//! Memory that is kept for someone before it is taken.
use std::any::Any;
use std::fmt;

/// Memory that a device keeps for a cache or a host pool, until this is dropped.
#[derive(Default)]
pub struct Reserved(#[expect(dead_code, reason = "held for its destructor")] Option<Guard>);

type Guard = Box<dyn Any + Send + Sync>;

impl Reserved {
    /// Wraps a guard that gives the memory back when it is dropped.
    pub fn new(guard: impl Any + Send + Sync) -> Self {
        Self(Some(Box::new(guard)))
    }
}

impl fmt::Debug for Reserved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reserved").finish_non_exhaustive()
    }
}
