//! From host memory to blocks of the device.
use std::sync::Arc;

use kv_core::backend::{Backend, HostPool, Queue};
use kv_core::error::{DeviceError, DeviceErrorKind};
use kv_core::events::Tier;
use kv_core::invariant::Invariant;
use kv_core::reuse::{Import, ImportBlock};
use kv_core::{BlockId, CacheError, KvCache};

use super::prefetch::Prefetch;
use super::{ChunkOf, GROUP, TierError, Tiers, group};
use crate::chain::{Chain, ChunkAt, chunk_of, missing, reach};
use crate::policy::ChunkEvent;

impl<B: Backend> Tiers<B> {
    /// Brings the blocks that have come to the device; `None` if there are none, or no room.
    pub(super) fn import(
        &mut self,
        cache: &mut KvCache<B>,
        of: &Prefetch<ChunkOf<B>>,
    ) -> Result<Option<Import>, TierError> {
        let has_states = of.search.is_some();
        let (upto, chunks) =
            if has_states { of.held_state().unwrap_or_default() } else { held_rows(of) };
        let before = of.probe.reused();
        let hit = if has_states { upto } else { of.probe.hit(upto) };
        if hit <= before {
            return Ok(None);
        }
        let reserved = if has_states {
            cache.reserve_import_with_state(&of.probe, upto)
        } else {
            cache.reserve_import(&of.probe, upto)
        };
        let mut import = match reserved {
            Ok(import) => import,
            Err(CacheError::Exhausted(_)) => {
                self.stats.no_room += 1;
                return Ok(None);
            }
            Err(error) => return Err(error.into()),
        };
        let brought = self.copy_in(cache, of, &import).and_then(|tiers| {
            // All blocks from one tier in a row are published at once.
            tiers
                .chunk_by(|a, b| a.1 == b.1)
                .filter_map(|run| run.last())
                .try_for_each(|(end, tier)| Ok(cache.publish_import(&mut import, *end, *tier)?))
        });
        match brought {
            Ok(()) => {
                let tokens = u64::from(import.hit().saturating_sub(before));
                self.stats.loaded_tokens += tokens;
                self.note_uses(of, chunks);
                Ok(Some(import))
            }
            Err(error) => {
                // Some copies may have been recorded before, and must not reach blocks that were
                // given to others.
                self.abandoned.push(import);
                // If the device still fails, the next call tries again.
                let _: Result<(), TierError> = self.finish_abandoned(cache);
                Err(error)
            }
        }
    }

    /// Ends the imports whose copies failed, once the copies that were recorded before are done.
    ///
    /// # Errors
    /// Those of the device: the blocks stay held.
    pub(super) fn finish_abandoned(&mut self, cache: &mut KvCache<B>) -> Result<(), TierError> {
        if self.abandoned.is_empty() {
            return Ok(());
        }
        for group in &mut self.groups {
            let copied = group.pool.fence()?;
            cache.queue_mut().wait_for(&copied)?;
        }
        while let Some(import) = self.abandoned.pop() {
            cache.finish_import(import)?;
        }
        Ok(())
    }

    /// Copies the bytes of an import's blocks, and lets the queue wait for them. Returns the ends
    /// of blocks in ascending order, each with the tier that its bytes came from.
    fn copy_in(
        &mut self,
        cache: &mut KvCache<B>,
        of: &Prefetch<ChunkOf<B>>,
        import: &Import,
    ) -> Result<Vec<(u32, Tier)>, TierError> {
        let after = cache.queue_mut().submit()?;
        let mut tiers: Vec<(u32, Tier)> = Vec::with_capacity(import.blocks().len());
        let mut blocks: Vec<BlockId> = Vec::new();
        let same_chunk = |a: &ImportBlock, b: &ImportBlock| {
            let chunk =
                |of: &ImportBlock| chunk_of(&group::of(&self.groups, of.group).spec, of.index);
            a.group == b.group && chunk(a) == chunk(b) && a.index.checked_add(1) == Some(b.index)
        };
        // Blocks of a group without layers have no bytes.
        let has_bytes = |of: &&ImportBlock| group::place_of(&self.groups, of.group).is_some();
        let blocks_in: Vec<_> = import.blocks().iter().filter(has_bytes).copied().collect();
        let runs: Vec<_> = blocks_in.chunk_by(same_chunk).collect();
        for run in runs {
            let Some(first) = run.first() else { continue };
            let group = group::place_of(&self.groups, first.group).invariant(GROUP);
            let chain = of.chains.get(group).invariant(GROUP);
            let chunk = chunk_of(chain.spec(), first.index);
            let places = [ChunkAt::Whole(chunk), ChunkAt::Upto(import.upto())];
            let mut held = places.iter().filter_map(|at| Some((*at, of.held.get(&(group, *at))?)));
            let (at, (bytes, tier)) =
                held.next().invariant("an import needs only chunks that are here");
            // The header of the chunk must agree with the name.
            let record = chain.record(&of.probe, at);
            let checked = bytes.check_header(&record.expectation());
            checked.map_err(|error| {
                DeviceError::new(DeviceErrorKind::Driver, "use a chunk of host memory")
                    .with_detail(error.to_string())
            })?;
            blocks.clear();
            blocks.extend(run.iter().map(|block| block.block));
            let place = first.index - chain.spec().first_block(chunk);
            let storage = cache.storage(first.group).invariant(GROUP).view();
            let tier_of = self.groups.get_mut(group).invariant(GROUP);
            let chunk: &ChunkOf<B> = bytes.get_ref();
            let fence = tier_of.pool.copy_in(&after, storage, &blocks, chunk, place)?;
            cache.queue_mut().wait_for(&fence)?;
            tiers.extend(run.iter().map(|block| (block.end, *tier)));
        }
        tiers.sort_by_key(|(end, _)| *end);
        Ok(tiers)
    }

    /// Counts the use of an import's chunks, and lets stores with a rule for it have them.
    fn note_uses(&mut self, of: &Prefetch<ChunkOf<B>>, used: Vec<(usize, ChunkAt)>) {
        // The first chunk is the most recently used one.
        for (group, at) in used.into_iter().rev() {
            let name = of.chains.get(group).invariant(GROUP).name(&of.probe, at);
            let host = &mut self.groups.get_mut(group).invariant(GROUP).host;
            host.touch(&name, self.prompted.hint(&name));
            let Some(entry) = host.get_mut(&name) else { continue };
            entry.uses += 1;
            let record = Arc::clone(&entry.record);
            self.decide_writes(&record, ChunkEvent::Reused);
        }
    }
}

/// Returns the most tokens whose rows are on the device or held, and the chunks to bring.
fn held_rows<C>(of: &Prefetch<C>) -> (u32, Vec<(usize, ChunkAt)>) {
    let has = |chain: &Chain, chunk: u32| {
        let group = usize::from(chain.group().0);
        of.held.contains_key(&(group, ChunkAt::Whole(chunk)))
    };
    let upto = reach(&of.probe, &of.chains, u32::MAX, has);
    let of_chain = |(group, chain): (usize, &Chain)| {
        let missing = missing(&of.probe, chain, upto).into_iter();
        missing.map(move |chunk| (group, ChunkAt::Whole(chunk)))
    };
    (upto, of.chains.iter().enumerate().flat_map(of_chain).collect())
}
