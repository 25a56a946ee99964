//! Publication of blocks: which blocks become reusable, and when.
//!
//! Content is indexed once. If a block is filled with content that is indexed already, the sequence
//! holds the indexed block in its place. While a step is open no block is replaced, because the
//! step writes it; blocks that were published early are checked again at commit.
use crate::block::{Fill, Ledger};
use crate::cache::state::history::History;
use crate::cache::state::undo::Undo;
use crate::cache::state::{CacheState, Group, Unwiped};
use crate::ids::BlockId;
use crate::reuse::Offered;
use crate::spec::{PrefixReuse, PublishAt};

impl CacheState {
    /// Publishes every block that the first `certain` tokens of a sequence fill. `len` tokens lie
    /// in its blocks. With `is_early` the open step has yet to write the blocks, and withdraws them
    /// if it is rolled back.
    pub(super) fn publish_full(&mut self, row: u32, (certain, len): (u32, u32), is_early: bool) {
        let Self { groups, ledger, sequences, open, unwiped, .. } = self;
        let (state, history) = sequences.both_mut(row);
        state.store_at = u32::MAX;
        if history.space().is_none() {
            return;
        }
        let certain = certain.min(history.known());
        let fill = if is_early { Fill::Unwritten } else { Fill::Full };
        for (index, group) in groups.iter_mut().enumerate() {
            let map = group.slot_map();
            let coded = map.coded_after(group.tables.coded(row), len).min(certain);
            let mut at = history.stored(index);
            // Tokens after `coded` are in a tail, or are drafts.
            while map.tokens(at + 1) <= coded {
                if let Some((block, offered)) = group.offer_full(history, ledger, (row, at, fill)) {
                    if is_early {
                        let is_new = offered == Offered::New;
                        open.undo.push(Undo::Stored { group: index, row, at, block, is_new });
                    } else {
                        group.settle_full((history, ledger, unwiped), (row, at, block), offered);
                    }
                }
                at += 1;
            }
            history.set_stored(index, at);
            state.store_at = state.store_at.min(map.tokens(at + 1));
        }
    }

    /// Checks the blocks again that the open step published before it wrote them: duplicates are
    /// replaced now.
    pub(super) fn settle_early(&mut self) {
        let Self { groups, ledger, sequences, open, unwiped, .. } = self;
        for undo in &open.undo {
            let Undo::Stored { group, row, at, block, is_new } = *undo else {
                continue;
            };
            let group = groups.at_mut(group);
            let (state, history) = sequences.both_mut(row);
            let offered = if is_new {
                group.pool.set_written(block, ledger);
                Some((block, Offered::New))
            } else {
                // A block with tokens that were not accepted will be written again.
                let is_full = group.slot_map().tokens(at + 1) <= state.len;
                let place = (row, at, Fill::Full);
                is_full.then(|| group.offer_full(history, ledger, place)).flatten()
            };
            if let Some((block, offered)) = offered {
                group.settle_full((history, ledger, unwiped), (row, at, block), offered);
            }
        }
    }

    /// Publishes the last blocks of a sequence at its end, as far as the settings say.
    pub(super) fn publish_rest(&mut self, row: u32) {
        let state = self.sequences.at(row);
        let (certain, len) = (state.certain.min(state.len), state.len);
        let is_partial = self.spec.prefix_reuse() == PrefixReuse::Partial;
        // No further step begins, which would publish the last step's accepted drafts. The partial
        // block is of use only with the full ones before it.
        let is_due = is_partial || self.spec.publish_at() == PublishAt::Commit;
        if is_due && certain >= state.store_at {
            self.publish_full(row, (certain, len), false);
        }
        if !is_partial {
            return;
        }
        if self.groups.have_tail() {
            return;
        }
        let Self { groups, ledger, sequences, unwiped, .. } = self;
        let (_, history) = sequences.both_mut(row);
        let certain = certain.min(history.known());
        for (index, group) in groups.iter_mut().enumerate() {
            let map = group.slot_map();
            let last = history.stored(index);
            let is_empty = map.tokens(last) >= certain;
            let is_full = map.tokens(last + 1) <= certain;
            // If ids are unknown from some token on, the sequence may have left this block.
            if is_empty || is_full || group.vacant(row).contains(&last) {
                continue;
            }
            let block = group.entry(row, last);
            let priority = history.priority(map.tokens(last));
            let (has_priority, hint) = (history.has_retention(), history.hint);
            let content = history.partial(group.chain, &map, (last, certain));
            let Some(content) = content else {
                continue;
            };
            match group.pool.offer(block, &content, (priority, Fill::Partial), ledger) {
                Offered::New => group.drop_prefixes(block, ledger, unwiped),
                Offered::Known(known) if known != block => {
                    group.pool.renew(known, hint);
                    if has_priority {
                        group.pool.set_priority(known, priority, ledger);
                    }
                }
                Offered::Known(_) | Offered::Refused => {}
            }
        }
    }

    /// Records that the tokens from `len` on are removed with their blocks: those added later are
    /// published anew.
    pub(super) fn unpublish_from(&mut self, row: u32, len: u32) {
        let Self { groups, sequences, .. } = self;
        let (state, history) = sequences.both_mut(row);
        state.certain = state.certain.min(len);
        state.store_at = 0;
        for group in groups.iter() {
            let map = group.slot_map();
            let full = map.full_blocks(len);
            // A block that keeps codes and is filled anew would not depend on its tokens alone: it
            // is not published.
            let is_cut = map.has_tail() && group.tables.coded(row) > map.tokens(full);
            if full < history.stored(group.id) {
                // A block that is in the index is not written in place.
                state.own_end = 0;
            }
            history.cut_to(group.id, full, is_cut);
        }
    }
}

impl Group {
    /// Publishes a full block of a row.
    fn offer_full(
        &mut self,
        history: &mut History,
        ledger: &mut Ledger,
        (row, at, fill): (u32, u32, Fill),
    ) -> Option<(BlockId, Offered)> {
        let map = self.slot_map();
        let is_withheld = self.vacant(row).contains(&at) || history.is_cut(self.id, at);
        let block = self.entry(row, at);
        let priority = history.priority(map.tokens(at));
        let content = history.full(self.chain, &map, at)?;
        if is_withheld {
            return Some((block, Offered::Refused));
        }
        Some((block, self.pool.offer(block, &content, (priority, fill), ledger)))
    }

    /// Completes the publication of a written block: gives the row the block that had the content
    /// already, or drops blocks that the new content makes redundant.
    fn settle_full(
        &mut self,
        (history, ledger, unwiped): (&History, &mut Ledger, &mut Unwiped),
        (row, at, block): (u32, u32, BlockId),
        offered: Offered,
    ) {
        match offered {
            Offered::New => self.drop_prefixes(block, ledger, unwiped),
            Offered::Known(known) if known != block => {
                // If others hold `block` too, no block becomes empty: the row would take an idle
                // block that the demand of its step did not count.
                let takes_one = self.pool.is_idle(known) && self.pool.holders(block) > 1;
                let is_empty = if takes_one {
                    self.pool.renew(known, history.hint);
                    false
                } else {
                    self.replace(row, at, (block, known));
                    self.pool.exchange(block, known)
                };
                if history.has_retention() {
                    let priority = history.priority(self.slot_map().tokens(at));
                    self.pool.set_priority(known, priority, ledger);
                }
                if is_empty {
                    unwiped.note(self.group_id(), block);
                }
            }
            Offered::Known(_) | Offered::Refused => {}
        }
    }

    /// Drops partial blocks whose content is a prefix of the new content of `block`.
    pub(super) fn drop_prefixes(
        &mut self,
        block: BlockId,
        ledger: &mut Ledger,
        unwiped: &mut Unwiped,
    ) {
        while let Some(beginning) = self.pool.beginning_of(block) {
            self.forget(beginning, ledger, unwiped);
        }
    }
}
