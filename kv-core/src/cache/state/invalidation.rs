//! Removal of cached content from the index, other than eviction.
use crate::cache::state::history::History;
use crate::cache::state::start::Lookup;
use crate::cache::state::{CacheState, Group, StartOptions, unique};
use crate::error::PlanError;
use crate::ids::{BlockId, SequenceId};
use crate::num::to_u32;
use crate::reuse::Content;

impl CacheState {
    /// See [`KvCache::forget_sequence`](crate::KvCache::forget_sequence).
    pub(in crate::cache) fn forget_sequence(
        &mut self,
        sequence: SequenceId,
    ) -> Result<u32, PlanError> {
        self.check_closed("forget")?;
        let row = self.sequences.row(sequence)?;
        let mut forgotten = 0_u32;
        let Self { groups, ledger, unwiped, .. } = self;
        for group in groups.iter_mut() {
            let vacant = group.vacant(row);
            for at in (0..group.tables.row_len(row)).rev().filter(|at| !vacant.contains(at)) {
                let block = group.entry(row, at);
                let Some(content) = group.pool.content(block) else {
                    continue;
                };
                let is_shared = group.pool.holders(block) > 1;
                let is_continued = || group.pool.index().has_children(content.key);
                if is_shared || (!content.is_partial && is_continued()) {
                    break;
                }
                group.forget(block, ledger, unwiped);
                forgotten += 1;
            }
        }
        // Snapshots behind tokens whose blocks others have stay with them.
        let map = self.groups.at(0).slot_map();
        let len = self.sequences.at(row).len;
        let mut kept = 0;
        let first = self.groups.at(0);
        for at in 0..first.tables.row_len(row) {
            let is_kept =
                first.vacant(row).contains(&at) || first.pool.is_stored(first.entry(row, at));
            kept = if is_kept { map.tokens(at + 1) } else { break };
        }
        let (_, history) = self.sequences.both_mut(row);
        let mut history = std::mem::take(history);
        forgotten += self.forget_snapshots(&mut history, len, kept);
        history.end(&mut self.ledger);
        *self.sequences.both_mut(row).1 = history;
        Ok(forgotten)
    }

    /// See [`KvCache::forget_prefix`](crate::KvCache::forget_prefix).
    pub(in crate::cache) fn forget_prefix(
        &mut self,
        tokens: &[u32],
        options: StartOptions<'_>,
        keep: u32,
    ) -> Result<u32, PlanError> {
        self.check_closed("forget")?;
        let Lookup { found, mut history } = self.look_up_whole(tokens, &options);
        let len = to_u32(tokens.len());
        let mut forgotten = 0_u32;
        let Self { groups, ledger, unwiped, .. } = self;
        for (group, found) in groups.iter_mut().zip(&found.groups) {
            let map = group.slot_map();
            // The end of the prompt, in a block that it does not fill, follows the full ones.
            while let Some(block) = own_part(group, &mut history, len, keep) {
                group.forget(block, ledger, unwiped);
                forgotten += 1;
            }
            for (at, block) in found.blocks.iter().enumerate().rev() {
                let Some((block, content)) =
                    block.and_then(|block| Some((block, group.pool.content(block)?)))
                else {
                    continue;
                };
                let is_kept = map.tokens(to_u32(at)) < keep;
                let is_needed = !group.pool.is_idle(block);
                if is_kept || is_needed || group.pool.index().has_children(content.key) {
                    break;
                }
                group.forget(block, ledger, unwiped);
                forgotten += 1;
            }
        }
        forgotten += self.forget_snapshots(&mut history, len, keep);
        Ok(forgotten)
    }

    /// See [`KvCache::forget_salt`](crate::KvCache::forget_salt).
    pub(in crate::cache) fn forget_salt(&mut self, salt: &[u8]) -> Result<u32, PlanError> {
        self.check_closed("forget")?;
        let mut forgotten = 0_u32;
        let Self { groups, ledger, unwiped, .. } = self;
        for group in groups.iter_mut() {
            let has_salt = |namespace| ledger.namespace(namespace).is_some_and(|of| of.0 == salt);
            let index = group.pool.index().iter().filter(|block| has_salt(block.namespace));
            let mut blocks: Vec<_> = index.map(|at| (at.index, at.is_partial, at.block)).collect();
            // A block after those that follow it.
            blocks.sort_unstable_by(|a, b| b.cmp(a));
            for (_, _, block) in blocks {
                let content = group.pool.content(block).filter(|_| group.pool.is_idle(block));
                let is_last = content.is_some_and(|content| {
                    content.is_partial || !group.pool.index().has_children(content.key)
                });
                if is_last {
                    group.forget(block, ledger, unwiped);
                    forgotten += 1;
                }
            }
        }
        forgotten += self.forget_snapshots_with(salt);
        Ok(forgotten)
    }

    /// See [`KvCache::reset_prefixes`](crate::KvCache::reset_prefixes).
    pub(in crate::cache) fn reset_prefixes(&mut self) -> Result<bool, PlanError> {
        self.check_closed("reset")?;
        let snapshots = self.states.iter().filter_map(|group| group.snapshots.as_ref());
        let pools = self.groups.iter().map(|group| &group.pool);
        if pools.chain(snapshots.map(|of| &of.pool)).any(|pool| pool.num_used() > 0) {
            return Ok(false);
        }
        self.clear_index();
        Ok(true)
    }

    /// Removes all content from the index; blocks stay with their holders.
    pub(super) fn clear_index(&mut self) {
        let Self { groups, states, ledger, unwiped, .. } = self;
        for group in groups.iter_mut() {
            for block in group.pool.clear(ledger) {
                unwiped.note(group.group_id(), block);
            }
        }
        for snapshots in states.iter_mut().filter_map(|group| group.snapshots.as_mut()) {
            snapshots.clear(ledger, unwiped);
        }
        ledger.clear();
        self.epoch = unique();
    }

    /// Ends reuse for live sequences and invalidates everything cached, because the encoding
    /// changed.
    pub(in crate::cache) fn change_encoding(&mut self, encoding_key: u128) {
        self.clear_index();
        let Self { sequences, imports, ledger, .. } = self;
        sequences.each_mut(|_, _, history| history.end(ledger));
        imports.leave_namespaces(ledger);
        self.encoding_key = encoding_key;
        self.ledger.namespaces_mut().set_encoding(encoding_key);
    }
}

/// Returns an idle block that a prompt of `len` tokens does not fill and has all tokens of, if it
/// begins after `keep` tokens.
fn own_part(group: &Group, history: &mut History, len: u32, keep: u32) -> Option<BlockId> {
    let map = group.slot_map();
    let index = map.full_blocks(len);
    if map.tokens(index) < keep || map.tokens(index) == len {
        return None;
    }
    let content = history.partial(group.chain, &map, (index, len))?;
    let Content { parent, namespace, tokens, contents, .. } = content;
    let (block, common) = group.pool.longest_beginning(parent, namespace, (tokens, contents))?;
    let found = group.pool.content(block)?;
    let is_own = found.is_partial && to_u32(found.tokens.len()) == common;
    (is_own && group.pool.is_idle(block)).then_some(block)
}
