//! Layers on demand: they get memory one after another, with sequences there already.
use kv_core::KvCache;

use super::choose::Bytes;
use super::{Happened, Life};
use crate::case::{CaseError, same};
use crate::device::Device;
use crate::erratic::Erratic;

/// The most layers that a life gives memory to.
const LAYERS_MAX: u16 = 3;

/// The layers a life begins with: the first of those on demand, all of any others.
pub(super) fn first<B: Device>(cache: &mut KvCache<Erratic<B>>) -> Result<Vec<u16>, CaseError> {
    if !cache.spec().layers_on_demand() {
        return Ok((0..cache.spec().num_layers()).collect());
    }
    same("the first layer gets memory", cache.allocate_layer(0)?, true)?;
    Ok(vec![0])
}

impl<B: Device> Life<B> {
    /// Gives the next layer its memory: nothing that lacks rows in it is found from here on.
    pub(super) fn add_layer(&mut self, bytes: &mut Bytes<'_>) -> Result<(), CaseError> {
        let next = self.layers.len() as u16;
        if !self.spec.layers_on_demand() || next == LAYERS_MAX {
            return self.step(bytes);
        }
        self.tell(|| format!("layer {next} gets memory"));
        same("a layer gets memory", self.cache.allocate_layer(next)?, true)?;
        same("it has it", self.cache.allocate_layer(next)?, false)?;
        self.layers.push(next);
        for sequence in self.sequences.iter_mut().filter(|sequence| !sequence.names.is_empty()) {
            sequence.offers = false;
            sequence.lacks.push((next, sequence.names.len()));
            self.lived.add(Happened::AddedLayer);
        }
        self.nothing_is_found()
    }

    /// What was cached before cannot be reused.
    pub(super) fn nothing_is_found(&self) -> Result<(), CaseError> {
        let found = self.prompts.iter().map(|(prompt, o)| self.cache.probe(prompt, o.all()));
        same("tokens found that are void", found.sum::<u32>(), 0)?;
        same("contents that are void", self.cache.snapshot().blocks.len(), 0)
    }
}
