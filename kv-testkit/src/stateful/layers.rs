//! Layers on demand: allocated one after another while sequences exist.
use kv_core::KvCache;

use super::choices::Choices;
use super::{Behaviour, StatefulTest};
use crate::case::{CaseError, same};

/// The most layers that a run allocates.
const LAYERS_MAX: u16 = 3;

/// Allocates the first layer if layers are on demand; returns the layers that have memory.
pub(super) fn first(cache: &mut KvCache) -> Result<Vec<u16>, CaseError> {
    if !cache.state().spec().layers_on_demand() {
        return Ok((0..cache.state().spec().num_layers()).collect());
    }
    same("allocation of the first layer", cache.allocate_layer(0)?, true)?;
    Ok(vec![0])
}

impl StatefulTest {
    /// Allocates the next layer: cached content without rows in it is not found from here on.
    pub(super) fn add_layer(&mut self, choices: &mut Choices<'_>) -> Result<(), CaseError> {
        let next = self.layers.len() as u16;
        if !self.spec.layers_on_demand() || next == LAYERS_MAX {
            return self.step(choices);
        }
        self.record(|| format!("allocate layer {next}"));
        same("allocation of a layer", self.cache.allocate_layer(next)?, true)?;
        same("second allocation of a layer", self.cache.allocate_layer(next)?, false)?;
        self.layers.push(next);
        for sequence in self.sequences.iter_mut().filter(|sequence| !sequence.hashes.is_empty()) {
            sequence.publishes = false;
            sequence.missing_rows.push((next, sequence.hashes.len()));
            self.coverage.add(Behaviour::AddedLayer);
        }
        self.check_nothing_cached()
    }

    /// Checks that content cached before cannot be reused. The content of the lower tier is
    /// forgotten: its bytes mean something else now.
    pub(super) fn check_nothing_cached(&mut self) -> Result<(), CaseError> {
        self.lower.clear();
        let found = self
            .prompts
            .iter()
            .map(|(prompt, o)| self.cache.state().probe(prompt, o.start_options()));
        same("tokens found in invalidated blocks", found.sum::<u32>(), 0)?;
        same("contents of invalidated blocks", self.cache.state().snapshot().blocks.len(), 0)
    }
}
