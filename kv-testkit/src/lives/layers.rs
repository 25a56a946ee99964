//! Layers on demand: allocated one after another while sequences exist.
use kv_core::KvCache;

use super::choose::Bytes;
use super::{Happened, Life};
use crate::case::{CaseError, same};
use crate::device::Device;
use crate::erratic::Erratic;

/// The most layers that a run allocates.
const LAYERS_MAX: u16 = 3;

/// Allocates the first layer if layers are on demand; returns the layers that have memory.
pub(super) fn first<B: Device>(cache: &mut KvCache<Erratic<B>>) -> Result<Vec<u16>, CaseError> {
    if !cache.spec().layers_on_demand() {
        return Ok((0..cache.spec().num_layers()).collect());
    }
    same("allocation of the first layer", cache.allocate_layer(0)?, true)?;
    Ok(vec![0])
}

impl<B: Device> Life<B> {
    /// Allocates the next layer: cached content without rows in it is not found from here on.
    pub(super) fn add_layer(&mut self, bytes: &mut Bytes<'_>) -> Result<(), CaseError> {
        let next = self.layers.len() as u16;
        if !self.spec.layers_on_demand() || next == LAYERS_MAX {
            return self.step(bytes);
        }
        self.tell(|| format!("allocate layer {next}"));
        same("allocation of a layer", self.cache.allocate_layer(next)?, true)?;
        same("second allocation of a layer", self.cache.allocate_layer(next)?, false)?;
        self.layers.push(next);
        for sequence in self.sequences.iter_mut().filter(|sequence| !sequence.names.is_empty()) {
            sequence.offers = false;
            sequence.lacks.push((next, sequence.names.len()));
            self.lived.add(Happened::AddedLayer);
        }
        self.nothing_is_found()
    }

    /// Checks that content cached before cannot be reused.
    pub(super) fn nothing_is_found(&self) -> Result<(), CaseError> {
        let found = self.prompts.iter().map(|(prompt, o)| self.cache.probe(prompt, o.all()));
        same("tokens found in invalidated blocks", found.sum::<usize>(), 0)?;
        same("contents of invalidated blocks", self.cache.snapshot().blocks.len(), 0)
    }
}
