//! Sequences with known token ids, so that prefixes can be reused.
use kv_core::StartOptions;

use super::{Lab, seq};
use crate::case::CaseError;
use crate::device::Device;
use crate::model::Rows;

impl<B: Device> Lab<B> {
    /// Starts a sequence on `prompt` and returns the number of tokens whose blocks it reuses.
    /// `rows` makes the K and V of a number of leading tokens, as they were written. Not for layers
    /// with a tail.
    ///
    /// # Errors
    /// The cache's refusal, or cached rows that differ from `rows`.
    pub(crate) fn start_prompt(
        &mut self,
        id: u64,
        prompt: &[u32],
        rows: impl FnOnce(usize) -> Rows,
    ) -> Result<usize, CaseError> {
        let reused = self.cache.start(seq(id), prompt, StartOptions::default())?;
        self.model.start(seq(id));
        if reused > 0 {
            let rows = [rows(reused)];
            let mut after = self.model.clone();
            let taken = self.append(&mut after, std::iter::once(id), &rows);
            self.adopt(&mut after, &taken, &rows)?;
            self.model = after;
        }
        Ok(reused)
    }

    /// Sets the token ids of a sequence for the next step; for other sequences only a count is
    /// passed.
    pub(crate) fn tell(&mut self, id: u64, tokens: &[u32]) {
        self.told.insert(seq(id), tokens.to_vec());
    }
}
