//! Which blocks become reusable, and when.
use crate::backend::Backend;
use crate::cache::undo::Undo;
use crate::cache::{KvCache, slot_map};
use crate::num::to_usize;
use crate::spec::{PrefixReuse, PublishAt};

impl<B: Backend> KvCache<B> {
    /// Offers the index every block that the first `certain` tokens of a sequence fill. `len`
    /// tokens lie in its blocks. Taken back with the step if `undo`.
    pub(super) fn store_full(&mut self, row: u32, (certain, len): (u32, u32), undo: bool) {
        let Self { groups, ledger, sequences, open, .. } = self;
        let Some((state, history)) = sequences.both_mut(row) else {
            return;
        };
        state.store_at = u32::MAX;
        if history.space().is_none() {
            return;
        }
        let certain = certain.min(history.known());
        for (index, group) in groups.iter_mut().enumerate() {
            let map = slot_map(group);
            let coded = map.coded_after(group.tables.coded(row), len).min(certain);
            let vacant = group.vacant(row);
            let mut stored = history.stored(index);
            // Tokens behind `coded` are in a tail, or are drafts.
            while map.tokens(stored.saturating_add(1)) <= coded {
                let block = group.tables.row(row).get(to_usize(stored)).copied();
                let priority = history.priority(map.tokens(stored));
                let content = history.full(group.chain, &map, stored);
                if let Some((block, content)) = block.zip(content) {
                    let is_new = !vacant.contains(&stored)
                        && group.pool.store_as(block, &content, (priority, false), ledger);
                    if undo {
                        open.undo.push(Undo::Stored { group: index, row, block, is_new });
                    }
                }
                stored = stored.saturating_add(1);
            }
            history.set_stored(index, stored);
            state.store_at = state.store_at.min(map.tokens(stored.saturating_add(1)));
        }
    }

    /// Stores what a sequence leaves behind, as far as the settings want it.
    pub(super) fn store_rest(&mut self, row: u32) {
        let Some(state) = self.sequences.at_mut(row) else {
            return;
        };
        let (certain, len) = (state.certain.min(state.len), state.len);
        if self.spec.publish_at() == PublishAt::Commit && certain >= state.store_at {
            self.store_full(row, (certain, len), false);
        }
        if self.spec.prefix_reuse() != PrefixReuse::Partial {
            return;
        }
        let Self { groups, ledger, sequences, .. } = self;
        let Some((_, history)) = sequences.both_mut(row) else {
            return;
        };
        let certain = certain.min(history.known());
        if groups.iter().any(|group| slot_map(group).has_tail()) {
            return;
        }
        for (index, group) in groups.iter_mut().enumerate() {
            let map = slot_map(group);
            let last = history.stored(index);
            let is_empty = map.tokens(last) >= certain;
            let is_full = map.tokens(last.saturating_add(1)) <= certain;
            // Where ids were unknown from some token on, the sequence may have left this block.
            if is_empty || is_full || group.vacant(row).contains(&last) {
                continue;
            }
            let block = group.tables.row(row).get(to_usize(last)).copied();
            let priority = history.priority(map.tokens(last));
            let content = history.partial(group.chain, &map, (last, certain));
            if let Some((block, content)) = block.zip(content) {
                group.pool.store_as(block, &content, (priority, true), ledger);
            }
        }
    }

    /// Notes that the tokens from `len` on are gone, and their blocks: those to come are to be
    /// offered anew.
    pub(super) fn unstore_from(&mut self, row: u32, len: u32) {
        let Self { groups, sequences, .. } = self;
        let Some((state, history)) = sequences.both_mut(row) else {
            return;
        };
        state.certain = state.certain.min(len);
        state.store_at = 0;
        for (index, group) in groups.iter().enumerate() {
            let map = slot_map(group);
            let full = map.full_blocks(len);
            // Codes that stay in a block which is filled anew would not be those of its tokens
            // alone: such a block is not offered.
            let is_cut = map.has_tail() && group.tables.coded(row) > map.tokens(full);
            let stored = history.stored(index).min(full);
            if stored < history.stored(index) {
                // A block that others may know by its content is not written in place.
                state.own_end = 0;
            }
            history.set_stored(index, if is_cut { full.saturating_add(1) } else { stored });
        }
    }
}
