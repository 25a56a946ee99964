//! Layers that are allocated when tokens are cached already: the rows that they lack.
use hashbrown::HashMap;

use crate::cache::state::{CacheState, unique};
use crate::error::PlanError;
use crate::ids::LayerId;
use crate::plan::AttentionOptions;
use crate::spec::LateLayers;

/// Leading tokens of sequences, by table row, that were cached before a layer was allocated. Empty
/// except with layers on demand.
#[derive(Debug, Default)]
pub(super) struct Late {
    missing: HashMap<u32, Vec<(LayerId, u32)>>,
}

impl Late {
    fn note(&mut self, row: u32, layer: LayerId, tokens: u32) {
        self.missing.entry(row).or_default().push((layer, tokens));
    }

    fn tokens(&self, row: u32, layer: LayerId) -> u32 {
        let layers = self.missing.get(&row).into_iter().flatten();
        layers.filter(|(of, _)| *of == layer).map(|(_, tokens)| *tokens).max().unwrap_or(0)
    }

    /// Copies the missing rows of a parent to its fork.
    pub(super) fn fork(&mut self, parent: u32, child: u32) {
        if let Some(layers) = self.missing.get(&parent).cloned() {
            self.missing.insert(child, layers);
        }
    }

    /// Truncates the missing rows: tokens added later are written to every layer.
    pub(super) fn truncate(&mut self, row: u32, len: u32) {
        if let Some(layers) = self.missing.get_mut(&row) {
            for (_, tokens) in layers {
                *tokens = len.min(*tokens);
            }
        }
    }

    pub(super) fn end(&mut self, row: u32) {
        self.missing.remove(&row);
    }
}

impl CacheState {
    /// Removes from the index the blocks that were cached before `layer` was allocated, and records
    /// the sequences that lack rows in it.
    pub(in crate::cache) fn note_late(&mut self, layer: LayerId) {
        if self.groups.iter().any(|group| !group.pool.index().is_empty()) {
            self.clear_index();
        }
        self.epoch = unique();
        let Self { sequences, late, ledger, .. } = self;
        sequences.each_mut(|row, state, history| {
            if state.len > 0 {
                late.note(row, layer, state.len);
                history.end(ledger);
            }
        });
    }

    /// Refuses the open step's attention over rows that a layer lacks.
    pub(in crate::cache) fn check_written_in(
        &self,
        layer: LayerId,
        options: &AttentionOptions<'_>,
    ) -> Result<(), PlanError> {
        if self.late.missing.is_empty() {
            return Ok(());
        }
        for entry in self.open.batch.iter().filter(|entry| entry.queries > 0) {
            let first = (entry.cached + entry.new_tokens).saturating_sub(entry.queries);
            let sees_sink_tokens = options.sink_tokens() > 0;
            let window = options.window_left().filter(|_| !sees_sink_tokens);
            let begin = window.map_or(0, |left| first.saturating_sub(left));
            self.check_rows_in(layer, entry.row, begin)?;
        }
        Ok(())
    }

    /// Refuses rows of a sequence from position `begin` on if a layer lacks them, unless the spec
    /// says that they are read as zeros.
    pub(in crate::cache) fn check_rows_in(
        &self,
        layer: LayerId,
        row: u32,
        begin: u32,
    ) -> Result<(), PlanError> {
        if self.spec.late_layers() == LateLayers::Zeros {
            return Ok(());
        }
        let tokens = self.late.tokens(row, layer);
        match self.sequences.id(row).filter(|_| begin < tokens) {
            Some(sequence) => Err(PlanError::RowsUnwritten { layer, sequence, tokens }),
            None => Ok(()),
        }
    }
}
