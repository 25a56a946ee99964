//! Sequences whose tokens are known, so that others may take their rows over.
use kv_core::StartOptions;

use super::{Lab, seq};
use crate::case::CaseError;
use crate::device::Device;
use crate::model::Rows;

impl<B: Device> Lab<B> {
    /// Begins a sequence that takes over what is cached of `prompt`; `rows` are K and V of so many
    /// leading tokens of it, as whoever wrote them did. Returns how many were taken over. Not for
    /// layers with a tail.
    ///
    /// # Errors
    /// The cache's refusal; cached rows that are none of these.
    pub(crate) fn start_prompt(
        &mut self,
        id: u64,
        prompt: &[u32],
        rows: impl FnOnce(u32) -> Rows,
    ) -> Result<u32, CaseError> {
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

    /// Tells which tokens a sequence brings in the next step; of others only the number is known.
    pub(crate) fn tell(&mut self, id: u64, tokens: &[u32]) {
        self.told.insert(seq(id), tokens.to_vec());
    }
}
