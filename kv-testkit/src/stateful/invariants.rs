//! The invariants that are checked after every operation.
use std::collections::BTreeMap;
use std::ops::Range;

use kv_core::block::BlockPool;
use kv_core::eviction::Priority;
use kv_core::spec::PrefixReuse;
use kv_core::{BlockId, GroupId, SequenceId, Stats};

use super::{Behaviour, Sequence, StatefulTest, lock};
use crate::case::{At, CaseError, ensure, same};
use crate::consumer::place;
use crate::provenance;

/// The visible state of a cache, which a refused call must not change.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct VisibleState {
    lens: BTreeMap<SequenceId, Option<u32>>,
    tables: Vec<Vec<BlockId>>,
    /// Empty, idle and cached blocks, by group.
    pools: Vec<[usize; 3]>,
    /// Entries that left a window, by group and sequence.
    vacant: Vec<Range<u32>>,
    /// Tokens that known prompts would reuse.
    probes: Vec<u32>,
    /// Groups with a window.
    windowed: Vec<bool>,
    stats: Stats,
}

impl VisibleState {
    /// Returns the number of blocks that were filled with content that was cached already.
    pub(super) fn duplicates(&self) -> u64 {
        self.stats.duplicate_blocks
    }

    /// Fails unless sequences and their blocks are as before a step that was undone. Cached content
    /// may have been evicted for the step, but nothing new may be found.
    pub(super) fn check_undone(&self, before: &Self) -> Result<(), CaseError> {
        same("lengths after an undone step", &self.lens, &before.lens)?;
        same("blocks after an undone step", &self.tables, &before.tables)?;
        // Blocks that left a window when the step began stay free, and their content may be
        // evicted.
        let [now, then] = [self, before].map(|seen| {
            let pools = seen.pools.iter().zip(&seen.windowed);
            pools.filter(|(_, windowed)| !**windowed).map(|([empty, idle, _], _)| empty + idle)
        });
        ensure(now.eq(then), || format!("free blocks: {:?}, {:?}", self.pools, before.pools))?;
        if self.windowed.contains(&true) {
            return Ok(());
        }
        let is_found = self.probes.iter().zip(&before.probes).any(|(now, then)| now > then);
        ensure(!is_found, || {
            format!("{:?} are found, before the step {:?}", self.probes, before.probes)
        })
    }
}

impl StatefulTest {
    pub(super) fn groups(&self) -> impl Iterator<Item = (GroupId, &BlockPool)> {
        let count = self.spec.groups().len() as u8;
        (0..count).filter_map(|id| Some((GroupId(id), self.cache.state().pool(GroupId(id))?)))
    }

    pub(super) fn has_window(&self) -> bool {
        self.spec.groups().iter().any(|group| group.window().is_some())
    }

    /// Reads the visible state.
    pub(super) fn visible_state(&self) -> VisibleState {
        let cache = &self.cache;
        let lens = cache.state().sequences().map(|id| (id, cache.state().seq_len(id))).collect();
        let table =
            |s: &Sequence, id| cache.state().block_table(s.id, id).unwrap_or_default().to_vec();
        let tables = |(id, _)| self.sequences.iter().map(move |s| table(s, id));
        let vacant = |s: &Sequence, id| cache.state().vacant_entries(s.id, id).unwrap_or_default();
        let vacants = |(id, _)| self.sequences.iter().map(move |s| vacant(s, id));
        let pool = |(_, pool): (GroupId, &BlockPool)| {
            [pool.num_empty() as usize, pool.num_idle() as usize, pool.index().len()]
        };
        let probe = |(prompt, options): &(Vec<u32>, _)| {
            let options: &super::Options = options;
            cache.state().probe(prompt, options.start_options())
        };
        VisibleState {
            lens,
            tables: self.groups().flat_map(tables).collect(),
            pools: self.groups().map(pool).collect(),
            vacant: self.groups().flat_map(vacants).collect(),
            probes: self.prompts.iter().map(probe).collect(),
            windowed: self.spec.groups().iter().map(|group| group.window().is_some()).collect(),
            stats: cache.state().stats(),
        }
    }

    /// Fails unless the visible state equals `before`.
    pub(super) fn unchanged(&self, before: &VisibleState) -> Result<(), CaseError> {
        same("state after a refusal", &self.visible_state(), before)
    }

    /// Checks every invariant.
    pub(super) fn check(&mut self) -> Result<(), CaseError> {
        same("sequences", self.cache.state().num_sequences() as usize, self.sequences.len())?;
        for sequence in &self.sequences {
            let len = Some(sequence.hashes.len() as u32);
            same(
                format!("length of {}", sequence.id),
                self.cache.state().seq_len(sequence.id),
                len,
            )?;
        }
        self.check_holders()?;
        self.check_policies()?;
        self.check_contents()?;
        self.check_rows()?;
        self.check_text()?;
        self.check_published()?;
        self.check_events()
    }

    /// Checks that the holders of every block are the tables and pins that list it.
    fn check_holders(&self) -> Result<(), CaseError> {
        for (id, pool) in self.groups() {
            let mut holders: BTreeMap<BlockId, u32> = BTreeMap::new();
            for sequence in &self.sequences {
                let table = self.cache.state().block_table(sequence.id, id).unwrap_or_default();
                let vacant = self.cache.state().vacant_entries(sequence.id, id).unwrap_or_default();
                for (block, at) in table.iter().zip(0..) {
                    if !vacant.contains(&at) {
                        *holders.entry(*block).or_default() += 1;
                    }
                }
            }
            self.cache
                .state()
                .pinned_blocks(id)
                .for_each(|block| *holders.entry(block).or_default() += 1);
            let (mut idle, mut cached) = (0, 0);
            for block in (0..pool.num_blocks()).map(BlockId) {
                let expected = holders.get(&block).copied().unwrap_or(0);
                let name = || place(usize::from(id.0), block);
                same(format!("holders of {}", name()), pool.holders(block), expected)?;
                cached += usize::from(pool.is_stored(block));
                idle += u32::from(pool.is_stored(block) && expected == 0);
            }
            let held = holders.len() as u32;
            same("free blocks", pool.num_free(), pool.num_blocks() - held)?;
            same("idle blocks", pool.num_idle(), idle)?;
            same("cached blocks", pool.index().len(), cached)?;
            same("empty blocks", pool.num_empty(), pool.num_blocks() - held - idle)?;
        }
        Ok(())
    }

    /// Checks that no two blocks of a group are cached with the same content. A key stands for the
    /// tokens of a block and all tokens before them, their namespace and the contents of
    /// placeholders.
    fn check_contents(&self) -> Result<(), CaseError> {
        for (id, pool) in self.groups() {
            let mut blocks = BTreeMap::new();
            for cached in pool.index().iter() {
                let before = blocks.insert(cached.key, cached.block);
                ensure(before.is_none(), || {
                    let [a, b] = [before, Some(cached.block)]
                        .map(|block| block.map(|block| place(usize::from(id.0), block)));
                    format!("{a:?} and {b:?} are cached with the same content")
                })?;
            }
        }
        Ok(())
    }

    /// Checks that policies know exactly the cached blocks, and that no eviction broke their rules.
    fn check_policies(&self) -> Result<(), CaseError> {
        for ((id, pool), observed) in self.groups().zip(&self.observed) {
            let observed = lock(observed);
            ensure(observed.broken().is_none(), || format!("{:?}", observed.broken()))?;
            same("blocks that the policy knows", observed.num_known(), pool.index().len())?;
            for block in (0..pool.num_blocks()).map(BlockId) {
                let content = pool.content(block);
                let known = observed.of(block);
                let name = || place(usize::from(id.0), block);
                same(format!("content of {}", name()), known.is_some(), content.is_some())?;
                if let Some(((priority, is_idle), content)) = known.zip(content) {
                    same(format!("a candidate: {}", name()), is_idle, pool.is_idle(block))?;
                    // A level that expired becomes the default one.
                    let is_default = priority == Priority::default();
                    ensure(priority == content.priority || is_default, || {
                        format!("{}: {priority:?}, requested {:?}", name(), content.priority)
                    })?;
                }
            }
        }
        Ok(())
    }

    /// Checks that every row which a sequence can read belongs to its own prefix.
    fn check_rows(&mut self) -> Result<(), CaseError> {
        for sequence in &self.sequences {
            for (group, index) in self.spec.groups().iter().zip(0_usize..) {
                let id = GroupId(index as u8);
                let vacant = self.cache.state().vacant_entries(sequence.id, id).unwrap_or_default();
                let map = group.slot_map();
                let len = sequence.hashes.len() as u32;
                let [first, second] = if vacant.is_empty() {
                    [0..len, len..len]
                } else {
                    [0..map.tokens(vacant.start).min(len), map.tokens(vacant.end).min(len)..len]
                };
                let in_group =
                    |layer: &&u16| self.spec.locate((**layer).into()).is_some_and(|l| l.0 == id);
                for layer in self.layers.iter().filter(in_group) {
                    let missing_rows = sequence.missing_rows.iter().filter(|(of, _)| of == layer);
                    let missing_rows =
                        missing_rows.map(|(_, tokens)| *tokens as u32).max().unwrap_or(0);
                    for range in [first.clone(), second.clone()] {
                        let begin = range.start.max(missing_rows);
                        if begin < range.end {
                            let provenance = &sequence.hashes[begin as usize..range.end as usize];
                            let (device, cache) = (&self.backend, &mut self.cache);
                            provenance::check_layer(
                                device,
                                cache,
                                (sequence.id, *layer),
                                begin,
                                provenance,
                            )?;
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Checks that the text of every sequence that offers blocks is all of it up to the first draft
    /// or token without an ID.
    fn check_text(&self) -> Result<(), CaseError> {
        if self.spec.prefix_reuse() == PrefixReuse::Off {
            return Ok(());
        }
        for sequence in self.sequences.iter().filter(|sequence| sequence.publishes) {
            let certain = sequence.tokens.iter().take(sequence.certain as usize);
            let expected: Vec<_> = certain.map_while(|token| *token).collect();
            let text = self.cache.state().sequence_text(sequence.id).map(|text| text.tokens);
            same(format!("text of {}", sequence.id), text, Some(expected))?;
        }
        Ok(())
    }

    /// Checks that the published tokens of running sequences are found: their blocks are held, so
    /// they cannot be evicted.
    fn check_published(&self) -> Result<(), CaseError> {
        if self.spec.prefix_reuse() == PrefixReuse::Off || self.has_window() {
            return Ok(());
        }
        for sequence in self.sequences.iter().filter(|sequence| sequence.publishes) {
            let known = sequence.tokens.iter().take(sequence.published as usize);
            let mut prompt: Vec<_> = known.map_while(|token| *token).collect();
            let mut whole = (prompt.len() as u32).min(sequence.cut);
            let ends = |group: &kv_core::spec::GroupSpec, len| {
                let map = group.slot_map();
                map.tokens(map.full_blocks(len))
            };
            // The last position that is a block boundary in all groups.
            while let Some(less) = self.spec.groups().iter().map(|group| ends(group, whole)).min()
                && less < whole
            {
                whole = less;
            }
            prompt.push(77);
            let found = self.cache.state().probe(&prompt, sequence.options.key_options());
            ensure(found >= whole, || {
                format!("{} published {whole} tokens, but {found} are found", sequence.id)
            })?;
        }
        Ok(())
    }

    /// Checks that the events, a snapshot and the index agree.
    fn check_events(&mut self) -> Result<(), CaseError> {
        let snapshot = self.cache.state().snapshot();
        for (id, pool) in self.groups() {
            let listed = |block: &&kv_core::events::StoredBlock| block.group == id;
            let full = pool.index().iter().filter(|block| !block.is_partial).count();
            let in_snapshot = snapshot.blocks.iter().filter(listed).count();
            same("contents in the snapshot", in_snapshot, full)?;
        }
        if self.spec.events() == 0 {
            return same("events although there is no room", self.cache.take_events().len(), 0);
        }
        // Events are taken at every third operation, so that some are lost where there is little
        // room.
        if self.operations().is_multiple_of(3) {
            let events = self.cache.take_events();
            self.consumer.apply(&events).at("events")?;
            if self.consumer.is_lost() {
                self.consumer.resync(&snapshot);
            }
            self.consumer.check(&snapshot)?;
        }
        Ok(())
    }

    /// Releases everything: afterwards no block is held, and nothing is cached after a reset.
    pub(super) fn finish(&mut self) -> Result<(), CaseError> {
        for sequence in std::mem::take(&mut self.sequences) {
            self.cache.release(sequence.id)?;
        }
        for pin in std::mem::take(&mut self.pins) {
            ensure(self.cache.unpin(pin.id)?, || format!("{:?} was not pinned", pin.id))?;
        }
        self.coverage.add(Behaviour::Operation);
        self.check()?;
        let total = |(_, pool): (GroupId, &BlockPool)| pool.num_free() == pool.num_blocks();
        ensure(self.groups().all(total), || "blocks are held without a holder".to_owned())?;
        self.coverage.add_many(Behaviour::Evicted, self.cache.state().stats().evictions);
        let seen = self.observed.iter().map(|observed| lock(observed).coverage());
        self.coverage = seen.fold(self.coverage, super::Coverage::and);
        ensure(self.cache.reset_prefixes()?, || "a reset was refused".to_owned())?;
        let empty = |(_, pool): (GroupId, &BlockPool)| pool.num_empty() == pool.num_blocks();
        ensure(self.groups().all(empty), || "content survived a reset".to_owned())?;
        let found = self
            .prompts
            .iter()
            .map(|(prompt, o)| self.cache.state().probe(prompt, o.start_options()));
        same("tokens found after a reset", found.sum::<u32>(), 0)?;
        same("contents after a reset", self.cache.state().snapshot().blocks.len(), 0)?;
        self.check_wiped()
    }

    /// Checks that released blocks are zero, even if the device failed to wipe them at first.
    fn check_wiped(&mut self) -> Result<(), CaseError> {
        if !self.spec.wipe_on_release() {
            return Ok(());
        }
        for id in 0..self.spec.groups().len() as u8 {
            let planes = crate::suite::bytes(&mut self.cache, GroupId(id))?;
            let left = planes.iter().flatten().filter(|byte| **byte != 0).count();
            same("bytes left of blocks that were let go", left, 0)?;
        }
        Ok(())
    }

    /// Formats the state of the model for messages.
    pub(super) fn describe(&self) -> String {
        let groups = self.spec.groups().iter();
        let group = |group: &kv_core::spec::GroupSpec| {
            let [k, _] = group.layouts();
            let map = group.slot_map();
            let rows = format!(
                "{} full-precision prefix {} tail {}",
                k.format(),
                map.full_precision_prefix(),
                map.has_tail()
            );
            let blocks = format!("{}x{}", group.num_blocks(), group.block_size());
            format!("{blocks} {:?} {rows}", group.window())
        };
        let trace = self.trace.iter().flatten();
        let last: Vec<_> = trace.rev().take(40).map(String::as_str).collect();
        format!(
            "{}\noperation {}, groups {:?}, {:?}, {:?}, lengths {:?}",
            last.into_iter().rev().collect::<Vec<_>>().join("\n"),
            self.operations(),
            groups.map(group).collect::<Vec<_>>(),
            self.spec.prefix_reuse(),
            self.spec.publish_at(),
            self.sequences.iter().map(|s| (s.id.0, s.hashes.len())).collect::<Vec<_>>(),
        )
    }
}
