//! The bookkeeping of a cache without a device: holders of blocks, and refusals without a trace.
#![expect(clippy::arithmetic_side_effects, reason = "a test that overflows fails, as it should")]
pub(in crate::cache) mod changes;
mod drafts;
mod history;
mod hits;
mod holds;
mod imports;
mod prefixes;
mod steps;
mod windows;

use std::collections::BTreeMap;

use super::*;
use crate::error::CacheError;
use crate::plan::BlockCopy;
use crate::spec::CacheSpecBuilder;

/// The work of a cache between the calls of its device.
impl CacheState {
    /// Returns the copies that the open step needs in one group.
    pub(in crate::cache) fn copies(&self, group: GroupId) -> &[BlockCopy] {
        self.open.copies.get(usize::from(group.0)).map_or(&[], Vec::as_slice)
    }

    /// Opens a step as a cache does, without a device.
    fn begin(
        &mut self,
        inputs: &[StepInput<'_>],
        workers: impl Fn(u32) -> u32,
    ) -> Result<(), CacheError> {
        let added = self.reserve_batch(inputs)?;
        let planned = self.plan(&added, workers);
        if planned.is_err() {
            self.roll_back();
            return planned;
        }
        self.publish_early(&added);
        Ok(())
    }

    /// Adds a sequence to the open step as a cache does, without a device.
    fn add(
        &mut self,
        input: StepInput<'_>,
        workers: impl Fn(u32) -> u32,
    ) -> Result<(), CacheError> {
        let added = self.reserve_more(input)?;
        let planned = self.plan(&added, &workers);
        if planned.is_err() {
            self.take_back(&added);
            self.plan(&added, workers)?;
            return planned;
        }
        self.publish_early(&added);
        Ok(())
    }

    /// Starts a sequence in the open step.
    fn start_in_step(
        &mut self,
        sequence: SequenceId,
        prompt: &[u32],
        options: StartOptions<'_>,
    ) -> Result<u32, CacheError> {
        self.check_open("start")?;
        self.check_start(sequence, prompt, &options)?;
        self.start_in_step_checked(sequence, prompt, options)
    }

    /// Ends the open step.
    fn commit(&mut self) -> Result<(), PlanError> {
        self.check_open("commit")?;
        self.commit_checked(None);
        Ok(())
    }

    /// Ends the open step and keeps some of its tokens.
    fn commit_accepted(&mut self, accepted: &[u32]) -> Result<(), PlanError> {
        self.check_open("commit")?;
        self.check_accepted(accepted).inspect_err(|_| self.roll_back())?;
        self.commit_checked(Some(accepted));
        Ok(())
    }

    /// Begins a sequence.
    fn start(
        &mut self,
        sequence: SequenceId,
        prompt: &[u32],
        options: StartOptions<'_>,
    ) -> Result<u32, CacheError> {
        self.check_closed("start")?;
        self.check_start(sequence, prompt, &options)?;
        self.start_checked(sequence, prompt, options)
    }
}

const SEQ: [SequenceId; 4] = [SequenceId(0), SequenceId(1), SequenceId(2), SequenceId(3)];

/// Creates a state for two layers of one head, in one pool.
fn state_with(
    (block_size, num_blocks): (u32, u32),
    build: impl FnOnce(CacheSpecBuilder) -> CacheSpecBuilder,
) -> CacheState {
    let spec = CacheSpec::builder().layers(2).kv_heads(1).head_dim(2).paged(block_size, num_blocks);
    CacheState::new(build(spec).build().unwrap(), 0)
}

fn state(block_size: u32, num_blocks: u32) -> CacheState {
    state_with((block_size, num_blocks), |spec| spec)
}

fn start(state: &mut CacheState, sequence: SequenceId) {
    assert_eq!(state.start(sequence, &[], StartOptions::default()).unwrap(), 0);
}

fn begin(state: &mut CacheState, inputs: &[StepInput<'_>]) -> Result<(), CacheError> {
    state.begin(inputs, |_| 1)
}

/// Runs a step of tokens without ids.
fn append(state: &mut CacheState, inputs: &[(SequenceId, u32)]) -> Result<(), CacheError> {
    let inputs: Vec<_> = inputs.iter().map(|&(s, n)| StepInput::count(s, n)).collect();
    begin(state, &inputs)?;
    Ok(state.commit()?)
}

/// Computes the missing tokens of a prompt, and returns the number of cached tokens.
fn run(state: &mut CacheState, sequence: SequenceId, prompt: &[u32]) -> u32 {
    let cached = state.start(sequence, prompt, StartOptions::default()).unwrap();
    begin(state, &[StepInput::prompt(sequence, prompt)]).unwrap();
    state.commit().unwrap();
    cached
}

fn table(state: &CacheState, sequence: SequenceId) -> Vec<BlockId> {
    state.block_table(sequence, GroupId(0)).unwrap().to_vec()
}

fn tokens(range: Range<u32>) -> Vec<u32> {
    range.collect()
}

/// Removes all blocks of a group from the index except those at `kept` in their sequence.
pub(in crate::cache) fn forget_but(state: &mut CacheState, group: usize, kept: &[u32]) {
    let CacheState { groups, ledger, unwiped, .. } = state;
    let group = groups.at_mut(group);
    for block in (0..group.pool.num_blocks()).map(BlockId) {
        if group.pool.content(block).is_some_and(|content| !kept.contains(&content.index)) {
            group.forget(block, ledger, unwiped);
        }
    }
}

/// Everything that a caller can see, and the holders of every block.
pub(in crate::cache) type Books =
    (BTreeMap<SequenceId, (u32, Vec<Vec<BlockId>>)>, Vec<Vec<u32>>, Vec<Vec<Range<u32>>>);

pub(in crate::cache) fn books(cache: &CacheState) -> Books {
    let groups = 0..u8::try_from(cache.groups.len()).unwrap();
    let tables =
        |s| groups.clone().map(|g| cache.block_table(s, GroupId(g)).unwrap().to_vec()).collect();
    let sequences =
        cache.sequences().map(|s| (s, (cache.seq_len(s).unwrap(), tables(s)))).collect();
    let holders = |group: &Group| {
        (0..group.pool.num_blocks()).map(|b| group.pool.holders(BlockId(b))).collect()
    };
    let vacant = |group: &Group| cache.sequences.iter().map(|(row, _)| group.vacant(row)).collect();
    let groups = || cache.groups.iter();
    (sequences, groups().map(holders).collect(), groups().map(vacant).collect())
}

/// Checks that a block's holders are the table entries that name it, and that the free list is the
/// rest.
pub(in crate::cache) fn check_invariants(cache: &CacheState) {
    let (sequences, holders, _) = books(cache);
    for (index, group) in cache.groups.iter().enumerate() {
        let mut counted = vec![0; holders[index].len()];
        for (_, block) in cache.pins.blocks().filter(|(group, _)| *group == index) {
            counted[usize::try_from(block.0).unwrap()] += 1;
        }
        let others = cache.holds.blocks().chain(cache.imports.blocks());
        for (_, block) in others.filter(|(group, _)| *group == index) {
            counted[usize::try_from(block.0).unwrap()] += 1;
        }
        // Blocks that an open step replaced in a row and releases when it ends.
        for (_, block) in cache.open.kept.iter().filter(|(group, _)| *group == index) {
            counted[usize::try_from(block.0).unwrap()] += 1;
        }
        for (sequence, (len, tables)) in &sequences {
            let vacant = group.vacant(cache.sequences.row(*sequence).unwrap());
            for (block, _) in tables[index].iter().zip(0..).filter(|(_, i)| !vacant.contains(i)) {
                counted[usize::try_from(block.0).unwrap()] += 1;
            }
            let blocks = u32::try_from(tables[index].len()).unwrap();
            let map = group.slot_map();
            let coded = group.tables.coded(cache.sequences.row(*sequence).unwrap());
            assert!(map.blocks_in(*len, coded) <= blocks, "{len} tokens, {blocks} blocks");
            if map.has_tail() {
                assert_eq!(map.coded_after(coded, *len), coded, "{len} tokens");
            }
        }
        assert_eq!(counted, holders[index]);
        let mut keys: Vec<_> = group.pool.index().iter().map(|block| block.key).collect();
        keys.sort_unstable();
        assert!(keys.is_sorted_by(|a, b| a < b), "two blocks are indexed with the same content");
        let free = counted.iter().filter(|n| **n == 0).count();
        assert_eq!(group.pool.num_free(), u32::try_from(free).unwrap());
        if cache.open.is_open {
            // Its published blocks are checked at commit.
            continue;
        }
        for block in group.pool.index().iter() {
            let useless = group.pool.beginning_of(block.block);
            assert_eq!(useless, None, "block {} goes on behind all of it", block.block);
        }
        // Positions that a step does not check again.
        for (row, state) in cache.sequences.iter().filter(|(_, state)| state.len < state.own_end) {
            let map = group.slot_map();
            for index in map.full_blocks(state.len)..map.blocks(state.own_end) {
                let block = group.tables.row(row)[usize::try_from(index).unwrap()];
                assert!(group.pool.is_private(block), "block {block} of row {row}");
            }
        }
    }
}
