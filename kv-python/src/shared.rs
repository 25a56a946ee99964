//! A value that threads of Python share, and forks of their process do not.
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{mem, process};

use pyo3::prelude::*;

use crate::report::Failure;

/// A value behind a lock, in the process that made it.
#[derive(Debug)]
pub(crate) struct Shared<T> {
    value: Arc<Mutex<T>>,
    process: u32,
}

impl<T> Drop for Shared<T> {
    fn drop(&mut self) {
        if process::id() != self.process {
            // A backend would wait for threads that this fork does not have. The garbage collector
            // of a child comes by here, whatever the child does.
            mem::forget(Arc::clone(&self.value));
        }
    }
}

impl<T: Send> Shared<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value: Arc::new(Mutex::new(value)), process: process::id() }
    }

    /// Locks the value, without the interpreter, and runs a call.
    ///
    /// # Errors
    /// Those of the call; [`Failure::Forked`] in a child of the process that made the value.
    pub(crate) fn locked<R: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut T) -> Result<R, Failure> + Send,
    ) -> PyResult<R> {
        self.check_process()?;
        Ok(py.detach(|| call(&mut self.lock()))?)
    }

    /// Locks the value, for a thread that may hold the interpreter or not.
    ///
    /// # Errors
    /// [`Failure::Forked`] in a child of the process that made the value.
    pub(crate) fn guard(&self) -> Result<MutexGuard<'_, T>, Failure> {
        self.check_process()?;
        Ok(self.lock())
    }

    /// Refuses a process that has the value's memory and none of its threads.
    fn check_process(&self) -> Result<(), Failure> {
        if process::id() == self.process {
            return Ok(());
        }
        Err(Failure::Forked { parent: self.process })
    }

    fn lock(&self) -> MutexGuard<'_, T> {
        // A panic in a call is reported by pyo3; a cache rolls its step back by itself.
        self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
