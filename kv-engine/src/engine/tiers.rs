//! The calls of an engine that are for the tiers of its cache.
use std::time::Instant;

use kv_core::backend::Backend;
use kv_tier::{TieredCache, TiersStats, Unwritten};

use super::Engine;
use crate::error::EngineError;

impl<B: Backend> Engine<B> {
    /// Returns what the tiers have done so far; `None` without tiers.
    pub fn tiers(&self) -> Option<TiersStats> {
        self.state.memory.tiered().map(TieredCache::stats)
    }

    /// Lets the tiers go on with copies and writes while nothing runs; a step does so too.
    ///
    /// # Errors
    /// [`EngineError::Tier`] if the device failed.
    pub fn poll_tiers(&mut self) -> Result<(), EngineError> {
        Ok(self.state.memory.poll()?)
    }

    /// Gives the tiers time to write what only they have, and returns what is left: see
    /// [`TieredCache::flush`]. Nothing is, without tiers.
    ///
    /// # Errors
    /// [`EngineError::StepOpen`] while a step is held; [`EngineError::Tier`] if the device failed.
    pub fn flush_tiers(&mut self, deadline: Instant) -> Result<Unwritten, EngineError> {
        self.check_closed("flush tiers")?;
        Ok(self.state.memory.flush(deadline)?)
    }

    /// Waits until what the tiers have to copy and to write now is done, and returns whether it was
    /// before the deadline: see [`TieredCache::drain`].
    ///
    /// # Errors
    /// Those of [`Self::flush_tiers`].
    pub fn drain_tiers(&mut self, deadline: Instant) -> Result<bool, EngineError> {
        self.check_closed("drain tiers")?;
        Ok(self.state.memory.drain(deadline)?)
    }
}
