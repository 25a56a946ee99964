//! The known text of a sequence or a snapshot, for callers that keep it outside the cache.
use std::borrow::Cow;

use crate::cache::state::CacheState;
use crate::cache::state::probe::PrefixProbe;
use crate::ids::{BlockId, GroupId, SequenceId};
use crate::num::{to_u32, to_usize};
use crate::reuse::{BlockContent, BlockKey, ContentSpan, IndexedBlock};

/// The tokens of a sequence from position 0 on whose rows are cached and certain, or those behind
/// which a snapshot of recurrent states is, and the other inputs of their rows.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SequenceText<'a> {
    /// Token ids: fewer than the sequence's length after tokens without ids, and after drafts that
    /// no step has accepted yet.
    pub tokens: Vec<u32>,
    /// Contents of the placeholder tokens of the prompt.
    pub contents: Cow<'a, [ContentSpan]>,
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
        let contents = Cow::Borrowed(history.contents());
        Some(SequenceText { tokens, contents, salt, adapter })
    }

    /// Returns the text behind which a snapshot of recurrent states is, and the key of the
    /// snapshot. `None` for another block, and if a block before the snapshot has left the device.
    pub fn snapshot_text(
        &self,
        group: GroupId,
        block: BlockId,
    ) -> Option<(SequenceText<'_>, BlockKey)> {
        let snapshot = self.snapshot_pool(group)?.content(block)?;
        let named_by = self.names().chain;
        let pools = || self.groups.iter().filter(|of| of.chain == named_by).map(|of| &of.pool);
        let block_before = |of: &IndexedBlock<'_>| {
            let found = pools().find_map(|pool| pool.index().with_key(of.parent));
            found.filter(|before| Some(before.index) == of.index.checked_sub(1))
        };
        let mut path = vec![snapshot];
        while let Some(of) = path.last().filter(|of| of.index > 0) {
            path.push(block_before(of)?);
        }
        let (salt, adapter) = self.ledger.namespace(snapshot.namespace)?;
        let (mut tokens, mut contents) = (Vec::new(), Vec::new());
        for of in path.iter().rev() {
            BlockContent::join(of.contents, to_u32(tokens.len()), &mut contents);
            tokens.extend_from_slice(of.tokens);
        }
        let contents = Cow::Owned(contents);
        Some((SequenceText { tokens, contents, salt, adapter }, snapshot.key))
    }

    /// Finds a block of the device with the content of [`PrefixProbe::part`], or with a longer one
    /// that begins with it, and the key of that block.
    pub fn find_part(
        &self,
        probe: &PrefixProbe,
        group: GroupId,
        upto: u32,
    ) -> Option<(BlockId, BlockKey)> {
        let probed = &probe.probed;
        let of = probe.part(group, upto)?;
        let (namespace, _) = self.ledger.find_namespace(&probed.salt, probed.adapter)?;
        let mut parts = Vec::new();
        let content = probed.content(&of, namespace, &mut parts);
        let pool = &self.find_group(group)?.pool;
        let text = (content.tokens, content.contents);
        let (block, common) = pool.longest_beginning(of.parent, namespace, text)?;
        (common == of.end - of.begin).then_some((block, pool.content(block)?.key))
    }
}
