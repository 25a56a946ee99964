//! A buffer whose type is erased.
use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// Buffer of an [`AnyBackend`](crate::backend::AnyBackend).
#[derive(Clone)]
pub struct AnyBuffer(Arc<dyn Any + Send + Sync>);

impl fmt::Debug for AnyBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AnyBuffer").finish_non_exhaustive()
    }
}

impl AnyBuffer {
    /// Erases a buffer of a concrete backend, such as one that wraps the caller's memory.
    pub fn new<T: Any + Send + Sync>(buffer: T) -> Self {
        Self(Arc::new(buffer))
    }
    /// Returns the concrete buffer, `None` if it belongs to another backend.
    pub fn downcast_ref<T: Any>(&self) -> Option<&T> {
        self.0.downcast_ref()
    }
}
