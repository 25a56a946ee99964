//! The known text of a sequence, for callers that keep it outside the cache.
use crate::cache::state::CacheState;
use crate::ids::SequenceId;
use crate::num::to_usize;
use crate::reuse::ContentSpan;

/// The tokens of a sequence from position 0 on whose rows are cached and certain, and the other
/// inputs of its rows.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SequenceText<'a> {
    /// Token ids: fewer than the sequence's length after tokens without ids, and after drafts that
    /// no step has accepted yet.
    pub tokens: Vec<u32>,
    /// Contents of the placeholder tokens of the prompt.
    pub contents: &'a [ContentSpan],
    /// The tenant's salt; empty without one.
    pub salt: &'a [u8],
    /// The adapter that K and V come from.
    pub adapter: Option<u64>,
}

impl CacheState {
    /// Returns the text of a sequence. `None` for an unknown sequence and for one that offers no
    /// blocks to others: started without reuse, or before everything cached became invalid.
    ///
    /// ```
    /// use kv::backend::NullBackend;
    /// use kv::{CacheSpec, KvCache, SequenceId, StartOptions, StepInput};
    ///
    /// let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(4).paged(2, 8).build()?;
    /// let mut cache = KvCache::new(NullBackend::new(), spec)?;
    /// cache.start(SequenceId(0), &[5, 6, 7], StartOptions::default().with_salt(b"x"))?;
    /// let mut step = cache.begin_step(&[StepInput::tokens(SequenceId(0), &[5, 6])])?;
    /// step.mark_written();
    /// step.commit()?;
    /// let text = cache.state().sequence_text(SequenceId(0)).expect("a live sequence");
    /// assert_eq!((&text.tokens[..], text.salt), (&[5, 6][..], &b"x"[..]));
    /// # Ok::<(), kv::CacheError>(())
    /// ```
    pub fn sequence_text(&self, sequence: SequenceId) -> Option<SequenceText<'_>> {
        let (row, state) = self.sequences.get(sequence).ok()?;
        let (history, recent) = self.sequences.history(row);
        let (namespace, _) = history.space()?;
        let (salt, adapter) = self.ledger.namespace(namespace)?;
        let len = to_usize(state.certain.min(state.len));
        let mut tokens = history.tokens(len);
        let more = recent.iter().take(len - tokens.len());
        tokens.extend(more);
        Some(SequenceText { tokens, contents: history.contents(), salt, adapter })
    }
}
