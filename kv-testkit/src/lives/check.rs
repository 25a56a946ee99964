//! What must hold after every operation.
use std::collections::BTreeMap;
use std::ops::Range;

use kv_core::block::BlockPool;
use kv_core::eviction::Priority;
use kv_core::{BlockId, GroupId, PrefixReuse, SequenceId, Stats};

use super::{Happened, Life, Sequence, lock};
use crate::case::{At, CaseError, ensure, same};
use crate::consumer::place;
use crate::device::Device;
use crate::named;

/// What can be seen of a cache that a refusal must leave as it is.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Seen {
    lens: BTreeMap<SequenceId, Option<u32>>,
    tables: Vec<Vec<BlockId>>,
    /// Empty, idle and cached blocks, by group.
    pools: Vec<[usize; 3]>,
    /// Entries that left a window, by group and sequence.
    vacant: Vec<Range<u32>>,
    /// Tokens that known prompts would take over.
    probes: Vec<u32>,
    /// Groups with a window.
    windowed: Vec<bool>,
    stats: Stats,
}

impl Seen {
    /// Blocks that had been filled with content another had already.
    pub(super) fn duplicates(&self) -> u64 {
        self.stats.duplicate_blocks
    }

    /// Fails unless sequences and their blocks are as before a step that never happened. What is
    /// cached may have been given up for it, but nothing else is found than before.
    pub(super) fn undone(&self, before: &Self) -> Result<(), CaseError> {
        same("lengths after a step undone", &self.lens, &before.lens)?;
        same("blocks after a step undone", &self.tables, &before.tables)?;
        // A step that began has left its windows, and what was in them may have been given up.
        let [now, then] = [self, before].map(|seen| {
            let pools = seen.pools.iter().zip(&seen.windowed);
            pools.filter(|(_, windowed)| !**windowed).map(|([empty, idle, _], _)| empty + idle)
        });
        ensure(now.eq(then), || format!("free blocks: {:?}, {:?}", self.pools, before.pools))?;
        if self.windowed.contains(&true) {
            return Ok(());
        }
        let is_found = self.probes.iter().zip(&before.probes).any(|(now, then)| now > then);
        ensure(!is_found, || format!("{:?} are found, before {:?}", self.probes, before.probes))
    }
}

impl<B: Device> Life<B> {
    pub(super) fn groups(&self) -> impl Iterator<Item = (GroupId, &BlockPool)> {
        let count = self.spec.groups().len() as u8;
        (0..count).filter_map(|id| Some((GroupId(id), self.cache.pool(GroupId(id))?)))
    }

    pub(super) fn has_window(&self) -> bool {
        self.spec.groups().iter().any(|group| group.window().is_some())
    }

    /// What a refusal must leave as it is.
    pub(super) fn see(&self) -> Seen {
        let cache = &self.cache;
        let lens = cache.sequences().map(|id| (id, cache.seq_len(id))).collect();
        let table = |s: &Sequence, id| cache.block_table(s.id, id).unwrap_or_default().to_vec();
        let tables = |(id, _)| self.sequences.iter().map(move |s| table(s, id));
        let vacant = |s: &Sequence, id| cache.vacant_entries(s.id, id).unwrap_or_default();
        let vacants = |(id, _)| self.sequences.iter().map(move |s| vacant(s, id));
        let pool = |(_, pool): (GroupId, &BlockPool)| {
            [pool.num_empty() as usize, pool.num_idle() as usize, pool.index().len()]
        };
        let probe = |(prompt, options): &(Vec<u32>, _)| {
            let options: &super::Options = options;
            cache.probe(prompt, options.all())
        };
        Seen {
            lens,
            tables: self.groups().flat_map(tables).collect(),
            pools: self.groups().map(pool).collect(),
            vacant: self.groups().flat_map(vacants).collect(),
            probes: self.prompts.iter().map(probe).collect(),
            windowed: self.spec.groups().iter().map(|group| group.window().is_some()).collect(),
            stats: cache.stats(),
        }
    }

    /// Fails unless everything is as it was.
    pub(super) fn unchanged(&self, before: &Seen) -> Result<(), CaseError> {
        same("state after a refusal", &self.see(), before)
    }

    /// Every invariant.
    pub(super) fn check(&mut self) -> Result<(), CaseError> {
        same("sequences", self.cache.num_sequences() as usize, self.sequences.len())?;
        for sequence in &self.sequences {
            let len = Some(sequence.names.len() as u32);
            same(format!("length of {}", sequence.id), self.cache.seq_len(sequence.id), len)?;
        }
        self.check_holders()?;
        self.check_policies()?;
        self.check_contents()?;
        self.check_rows()?;
        self.check_offers()?;
        self.check_events()
    }

    /// Every block is held by those who list it, and by nobody else.
    fn check_holders(&self) -> Result<(), CaseError> {
        for (id, pool) in self.groups() {
            let mut holders: BTreeMap<BlockId, u32> = BTreeMap::new();
            for sequence in &self.sequences {
                let table = self.cache.block_table(sequence.id, id).unwrap_or_default();
                let vacant = self.cache.vacant_entries(sequence.id, id).unwrap_or_default();
                for (block, at) in table.iter().zip(0..) {
                    if !vacant.contains(&at) {
                        *holders.entry(*block).or_default() += 1;
                    }
                }
            }
            self.cache.pinned_blocks(id).for_each(|block| *holders.entry(block).or_default() += 1);
            let (mut idle, mut cached) = (0, 0);
            for block in (0..pool.num_blocks()).map(BlockId) {
                let expected = holders.get(&block).copied().unwrap_or(0);
                let name = || place(usize::from(id.0), block);
                same(format!("holders of {}", name()), pool.holders(block), expected)?;
                cached += usize::from(pool.is_stored(block));
                idle += u32::from(pool.is_stored(block) && expected == 0);
            }
            let held = holders.len() as u32;
            same("blocks nobody holds", pool.num_free(), pool.num_blocks() - held)?;
            same("idle blocks", pool.num_idle(), idle)?;
            same("cached blocks", pool.index().len(), cached)?;
            same("empty blocks", pool.num_empty(), pool.num_blocks() - held - idle)?;
        }
        Ok(())
    }

    /// No two blocks of a group are cached with the same content: a key names the tokens of a block
    /// and all before them, their namespace and what lies behind them.
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

    /// Policies know what is cached, and choose as they promise.
    fn check_policies(&self) -> Result<(), CaseError> {
        for ((id, pool), watched) in self.groups().zip(&self.watched) {
            let watched = lock(watched);
            ensure(watched.broken().is_none(), || format!("{:?}", watched.broken()))?;
            same("blocks that the policy knows", watched.num_known(), pool.index().len())?;
            for block in (0..pool.num_blocks()).map(BlockId) {
                let content = pool.content(block);
                let known = watched.of(block);
                let name = || place(usize::from(id.0), block);
                same(format!("content of {}", name()), known.is_some(), content.is_some())?;
                if let Some(((priority, is_idle), content)) = known.zip(content) {
                    same(format!("a candidate: {}", name()), is_idle, pool.is_idle(block))?;
                    // A level that ran out is the default one.
                    let is_default = priority == Priority::default();
                    ensure(priority == content.priority || is_default, || {
                        format!("{}: {priority:?}, asked for {:?}", name(), content.priority)
                    })?;
                }
            }
        }
        Ok(())
    }

    /// Every row that a sequence can read is of its own prefix.
    fn check_rows(&mut self) -> Result<(), CaseError> {
        for sequence in &self.sequences {
            for (group, index) in self.spec.groups().iter().zip(0_usize..) {
                let id = GroupId(index as u8);
                let vacant = self.cache.vacant_entries(sequence.id, id).unwrap_or_default();
                let map = group.slot_map();
                let len = sequence.names.len() as u32;
                let [first, second] = if vacant.is_empty() {
                    [0..len, len..len]
                } else {
                    [0..map.tokens(vacant.start).min(len), map.tokens(vacant.end).min(len)..len]
                };
                let in_group =
                    |layer: &&u16| self.spec.locate((**layer).into()).is_some_and(|l| l.0 == id);
                for layer in self.layers.iter().filter(in_group) {
                    let lacks = sequence.lacks.iter().filter(|(of, _)| of == layer);
                    let lacks = lacks.map(|(_, tokens)| *tokens as u32).max().unwrap_or(0);
                    for range in [first.clone(), second.clone()] {
                        let begin = range.start.max(lacks);
                        if begin < range.end {
                            let named = &sequence.names[begin as usize..range.end as usize];
                            let (device, cache) = (&self.backend, &mut self.cache);
                            named::check_layer(device, cache, (sequence.id, *layer), begin, named)?;
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// What a living sequence has offered can be found: nobody may give its blocks up.
    fn check_offers(&self) -> Result<(), CaseError> {
        if self.spec.prefix_reuse() == PrefixReuse::Off || self.has_window() {
            return Ok(());
        }
        for sequence in self.sequences.iter().filter(|sequence| sequence.offers) {
            let known = sequence.tokens.iter().take(sequence.offered as usize);
            let mut prompt: Vec<_> = known.map_while(|token| *token).collect();
            let mut whole = (prompt.len() as u32).min(sequence.cut);
            let ends = |group: &kv_core::GroupSpec, len| {
                let map = group.slot_map();
                map.tokens(map.full_blocks(len))
            };
            // The last boundary of blocks in all groups.
            while let Some(less) = self.spec.groups().iter().map(|group| ends(group, whole)).min()
                && less < whole
            {
                whole = less;
            }
            prompt.push(77);
            let found = self.cache.probe(&prompt, sequence.options.naming());
            ensure(found >= whole, || {
                format!("{} offers {whole} tokens, {found} are found", sequence.id)
            })?;
        }
        Ok(())
    }

    /// Who follows the events knows what can be reused, and so does the index.
    fn check_events(&mut self) -> Result<(), CaseError> {
        let snapshot = self.cache.snapshot();
        for (id, pool) in self.groups() {
            let listed = |block: &&kv_core::events::StoredBlock| block.group == id;
            let full = pool.index().iter().filter(|block| !block.is_partial).count();
            let in_snapshot = snapshot.blocks.iter().filter(listed).count();
            same("contents in the snapshot", in_snapshot, full)?;
        }
        if self.spec.events() == 0 {
            return same("events without room", self.cache.take_events().len(), 0);
        }
        // Not after each operation, so that some are lost where there is little room.
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

    /// Lets go of everything: nothing is held then, and nothing stays cached behind a reset.
    pub(super) fn end(&mut self) -> Result<(), CaseError> {
        for sequence in std::mem::take(&mut self.sequences) {
            self.cache.release(sequence.id)?;
        }
        for pin in std::mem::take(&mut self.pins) {
            ensure(self.cache.unpin(pin.id)?, || format!("{:?} was not pinned", pin.id))?;
        }
        self.lived.add(Happened::Operated);
        self.check()?;
        let total = |(_, pool): (GroupId, &BlockPool)| pool.num_free() == pool.num_blocks();
        ensure(self.groups().all(total), || "blocks are held by nobody".to_owned())?;
        self.lived.add_many(Happened::Evicted, self.cache.stats().evictions);
        let seen = self.watched.iter().map(|watched| lock(watched).lived());
        self.lived = seen.fold(self.lived, super::Lived::and);
        ensure(self.cache.reset_prefixes()?, || "a reset was refused".to_owned())?;
        let empty = |(_, pool): (GroupId, &BlockPool)| pool.num_empty() == pool.num_blocks();
        ensure(self.groups().all(empty), || "content survived a reset".to_owned())?;
        let found = self.prompts.iter().map(|(prompt, o)| self.cache.probe(prompt, o.all()));
        same("tokens found after a reset", found.sum::<u32>(), 0)?;
        same("contents after a reset", self.cache.snapshot().blocks.len(), 0)?;
        self.check_wiped()
    }

    /// Nothing is left of what was let go, though the device may have failed meanwhile.
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

    /// What the model has, for messages.
    pub(super) fn describe(&self) -> String {
        let groups = self.spec.groups().iter();
        let group = |group: &kv_core::GroupSpec| {
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
            self.sequences.iter().map(|s| (s.id.0, s.names.len())).collect::<Vec<_>>(),
        )
    }
}
