//! A lower tier: full blocks are copied to host memory, and come back by imports.
use std::collections::BTreeMap;
use std::sync::Arc;

use kv_core::backend::{AnyChunk, AnyHostPool, Backend, ChunkShape, HostPool, Queue};
use kv_core::events::Tier;
use kv_core::invariant::Invariant;
use kv_core::reuse::{BlockHold, BlockKey, Import, PrefixProbe};
use kv_core::{BlockId, CacheError, GroupId};

use super::choices::{Choices, Options};
use super::{Behaviour, StatefulTest};
use crate::case::{CaseError, ensure, same};
use crate::device::arrive;

/// Chunks of two blocks, and their number in a group.
const SHAPE: ChunkShape = ChunkShape { blocks: 2, header_bytes: 16 };
const CHUNKS: u32 = 8;

const STORAGE: &str = "a group with a pool has storage";

/// The host memory of one group.
#[derive(Debug)]
pub(super) struct HostTier {
    pool: AnyHostPool,
    /// The chunk of each block's content, and its place there.
    blocks: BTreeMap<BlockKey, (Arc<AnyChunk>, u32)>,
}

impl StatefulTest {
    /// Reserves host memory for each group.
    fn host_tiers(&self) -> Result<Vec<HostTier>, CaseError> {
        let tier = |(id, _): (GroupId, _)| {
            let storage = self.cache.storage(id).ok_or("a group without storage")?;
            let pool = self.backend.host_pool(storage.view(), SHAPE, CHUNKS)?;
            Ok(HostTier { pool, blocks: BTreeMap::new() })
        };
        self.groups().map(tier).collect()
    }

    /// Copies blocks that the tier lacks to a chunk of it.
    pub(super) fn export(&mut self, choices: &mut Choices<'_>) -> Result<(), CaseError> {
        if self.lower.is_empty() {
            self.lower = self.host_tiers()?;
        }
        let group = choices.index(self.lower.len());
        let tier = &mut self.lower[group];
        let id = GroupId(group as u8);
        let pool = self.cache.state().pool(id).ok_or("a group without a pool")?;
        let full = pool.index().iter().filter(|block| !block.is_partial);
        let new = full.filter(|block| !tier.blocks.contains_key(&block.key));
        let mut blocks: Vec<_> = new.map(|block| (block.block, block.key)).collect();
        blocks.sort_unstable();
        blocks.truncate(SHAPE.blocks as usize);
        if blocks.is_empty() {
            return Ok(());
        }
        let Some(chunk) = tier.pool.take() else {
            tier.blocks.clear();
            return Ok(());
        };
        self.record(|| format!("export {blocks:?} of group {group}"));
        self.arm_fault(choices);
        let mut holds = Vec::new();
        let copied = self.copy_out(id, &blocks, chunk, &mut holds);
        let has_failed = self.faults.clear();
        for hold in holds {
            self.cache.release_hold(hold)?;
        }
        match copied {
            Err(CacheError::Device(_)) if has_failed => self.coverage.add(Behaviour::FailedExport),
            Ok(_) if has_failed => return Err("a device failure was not reported".into()),
            Ok(chunk) => {
                let chunk = Arc::new(chunk);
                let places = blocks.iter().zip(0..);
                let places = places.map(|((_, key), place)| (*key, (Arc::clone(&chunk), place)));
                self.lower[group].blocks.extend(places);
                self.coverage.add_many(Behaviour::Exported, blocks.len() as u64);
            }
            Err(other) => return Err(other.into()),
        }
        Ok(())
    }

    fn copy_out(
        &mut self,
        group: GroupId,
        blocks: &[(BlockId, BlockKey)],
        chunk: AnyChunk,
        holds: &mut Vec<BlockHold>,
    ) -> Result<AnyChunk, CacheError> {
        for (block, key) in blocks {
            holds.extend(self.cache.hold_block(group, *block, *key)?);
        }
        let ids: Vec<_> = holds.iter().map(BlockHold::block).collect();
        let after = self.cache.queue_mut().submit()?;
        let storage = self.cache.storage(group).invariant(STORAGE).view();
        let pool = &mut self.lower[usize::from(group.0)].pool;
        let pending = pool.copy_out(&after, storage, &ids, chunk, 0)?;
        Ok(arrive(self.backend.capabilities(), pending)?)
    }

    /// Brings blocks of a prompt that the tier has and the device lacks, and perhaps starts a
    /// sequence on them.
    pub(super) fn import(&mut self, choices: &mut Choices<'_>) -> Result<(), CaseError> {
        let Some((prompt, options, upto)) = self.wanted(choices)? else {
            return Ok(());
        };
        let probe = self.cache.state().probe_keys(&prompt, &options.start_options());
        let before = self.visible_state();
        self.record(|| format!("import {prompt:?} up to {upto}, {options:?}"));
        self.arm_fault(choices);
        let mut import = match self.cache.reserve_import(&probe, upto) {
            Ok(import) => import,
            Err(CacheError::Exhausted(_)) => {
                self.faults.clear();
                self.coverage.add(Behaviour::RefusedImport);
                return self.unchanged(&before);
            }
            Err(CacheError::Device(_)) if self.faults.clear() => {
                self.coverage.add(Behaviour::FailedImport);
                return Ok(());
            }
            Err(other) => return Err(other.into()),
        };
        let brought = import.blocks().len() as u64;
        if let Err(error) = self.copy_in(&import) {
            ensure(self.faults.clear(), || format!("without a failure: {error}"))?;
            self.coverage.add(Behaviour::FailedImport);
            self.wait_for_copies(&import)?;
            return Ok(self.cache.finish_import(import)?);
        }
        ensure(!self.faults.clear(), || "a device failure was not reported".to_owned())?;
        // At once, or one part after the other.
        let first = choices.below(upto + 1);
        self.cache.publish_import(&mut import, first, Tier::Disk)?;
        self.cache.publish_import(&mut import, upto, Tier::Store)?;
        same("blocks that were not published", import.blocks().len(), 0)?;
        let found = self.cache.state().probe(&prompt, options.start_options());
        ensure(found >= import.hit(), || format!("{found} of {} tokens", import.hit()))?;
        self.coverage.add_many(Behaviour::Imported, brought);
        if choices.one_in(2) {
            self.start_imported((prompt, options), found)?;
        }
        self.cache.finish_import(import)?;
        self.wipe(choices)
    }

    /// Chooses an earlier prompt that has something to import, and the most tokens of it.
    fn wanted(
        &mut self,
        choices: &mut Choices<'_>,
    ) -> Result<Option<(Vec<u32>, Options, u32)>, CaseError> {
        if self.prompts.is_empty() || self.lower.is_empty() {
            return Ok(None);
        }
        let first = choices.index(self.prompts.len());
        let reach = |test: &Self, (prompt, options): &(Vec<u32>, Options)| {
            test.reach(&test.cache.state().probe_keys(prompt, &options.start_options()))
        };
        let (before, after) = self.prompts.split_at(first);
        let found = after.iter().chain(before).find_map(|of| Some((of, reach(self, of)?)));
        if let Some(((prompt, options), upto)) = found {
            return Ok(Some((prompt.clone(), options.clone(), upto)));
        }
        // The device has it still.
        let of = self.prompts[first].clone();
        self.record(|| format!("forget {of:?}"));
        let forgotten = self.cache.forget_prefix(&of.0, of.1.key_options(), 0)?;
        self.coverage.add_many(Behaviour::Forgotten, u64::from(forgotten));
        Ok(reach(self, &of).map(|upto| (of.0, of.1, upto)))
    }

    /// Returns the most tokens that can be imported, if they are more than the device has.
    fn reach(&self, probe: &PrefixProbe) -> Option<u32> {
        let has = |(tier, id): (&HostTier, u8), upto| {
            let mut needed = probe.needed(GroupId(id), upto);
            needed.all(|block| block.cached.is_some() || tier.blocks.contains_key(&block.key))
        };
        let has_all = |upto: &u32| self.lower.iter().zip(0..).all(|tier| has(tier, *upto));
        let more = |upto: &u32| probe.hit(*upto) > probe.cached();
        (probe.cached() + 1..=probe.limit()).rev().find(|upto| more(upto) && has_all(upto))
    }

    fn copy_in(&mut self, import: &Import) -> Result<(), CacheError> {
        let after = self.cache.queue_mut().submit()?;
        for of in import.blocks() {
            let tier = &mut self.lower[usize::from(of.group.0)];
            let (chunk, place) = &tier.blocks[&of.key];
            let storage = self.cache.storage(of.group).invariant(STORAGE).view();
            let copied = tier.pool.copy_in(&after, storage, &[of.block], chunk, *place)?;
            self.cache.queue_mut().wait_for(&copied)?;
        }
        Ok(())
    }

    /// Orders later work after copies that were recorded before another one failed.
    fn wait_for_copies(&mut self, import: &Import) -> Result<(), CaseError> {
        for of in import.blocks() {
            let after = self.cache.queue_mut().submit()?;
            let tier = &mut self.lower[usize::from(of.group.0)];
            let (chunk, _) = &tier.blocks[&of.key];
            let storage = self.cache.storage(of.group).invariant(STORAGE).view();
            let copied = tier.pool.copy_in(&after, storage, &[], chunk, 0)?;
            self.cache.queue_mut().wait_for(&copied)?;
        }
        Ok(())
    }

    /// Starts a sequence that reuses the blocks of an import.
    fn start_imported(
        &mut self,
        (prompt, options): (Vec<u32>, Options),
        found: u32,
    ) -> Result<(), CaseError> {
        let id = self.new_id();
        let reused = match self.cache.start(id, &prompt, options.start_options()) {
            Ok(reused) => reused,
            Err(CacheError::Exhausted(_) | CacheError::Plan(_)) => return Ok(()),
            Err(other) => return Err(other.into()),
        };
        same("start after an import", reused, found)?;
        self.count_reuse(&prompt, &options, reused, false);
        self.remember(&prompt, &options);
        let sequence = self.started(id, (prompt, options), reused);
        self.sequences.push(sequence);
        self.check_retention()
    }
}
