//! The number of tokens up to which available chunks reach.
use std::borrow::Borrow;
use std::ops::Range;

use kv_core::GroupId;
use kv_core::num::{to_u32, to_usize};
use kv_core::reuse::{PrefixProbe, ProbedBlock};

use super::{Chain, ChunkAt, chunk_of};

/// The blocks of one group of a prompt that are on the device or in available chunks.
#[derive(Debug)]
struct AtHand {
    group: GroupId,
    blocks: Vec<ProbedBlock>,
    /// For each block, the first block of the unbroken run that ends with this block. One past a
    /// missing block.
    run_start: Vec<u32>,
}

impl AtHand {
    fn new(probe: &PrefixProbe, chain: &Chain, mut has: impl FnMut(u32) -> bool) -> Self {
        let blocks: Vec<_> = probe.blocks(chain.group()).collect();
        let mut run_start = Vec::with_capacity(blocks.len());
        let mut start = 0;
        // `has` is called once per chunk.
        let (mut chunk, mut is_here) = (u32::MAX, false);
        for block in &blocks {
            let of = chunk_of(chain.spec(), block.index);
            if of != chunk {
                (chunk, is_here) = (of, of < chain.len() && has(of));
            }
            if block.cached.is_none() && !is_here {
                start = block.index + 1;
            }
            run_start.push(start);
        }
        Self { group: chain.group(), blocks, run_start }
    }

    fn has_all(&self, range: &Range<u32>) -> bool {
        let Some(last) = range.end.checked_sub(1).filter(|last| *last >= range.start) else {
            return true;
        };
        self.run_start.get(to_usize(last)).is_some_and(|start| *start <= range.start)
    }

    /// Returns a number of tokens to try next, less than `upto`, given that some block of `needed`
    /// is missing: no number in between can be reached.
    fn next(&self, needed: &[Range<u32>; 2], upto: u32) -> u32 {
        let [sinks, others] = needed;
        let begin = |index: u32| {
            let block = self.blocks.get(to_usize(index));
            block.map_or(0, |block| block.begin).min(upto.saturating_sub(1))
        };
        if !self.has_all(sinks) {
            return begin(sinks.start);
        }
        if others.start == 0 {
            // Without a window all blocks from the first on are needed: up to the first gap.
            let reached = self.run_start.iter().position(|start| *start > 0);
            return begin(reached.map_or(others.start, to_u32));
        }
        begin(others.end - 1)
    }
}

/// Returns the most tokens, up to `most`, that can be reused if the chunks come that `has` says, by
/// group and chunk; 0 for none. Without chains there are no names, and nothing can come.
pub(crate) fn reach<C: Borrow<Chain>>(
    probe: &PrefixProbe,
    chains: &[C],
    most: u32,
    mut has: impl FnMut(&Chain, u32) -> bool,
) -> u32 {
    let groups = chains.iter().map(Borrow::borrow);
    let groups = groups.map(|chain| AtHand::new(probe, chain, |chunk| has(chain, chunk)));
    let groups: Vec<_> = groups.collect();
    let mut upto = if chains.is_empty() { 0 } else { most.min(probe.limit()) };
    'shorter: while probe.hit(upto) > 0 {
        for group in &groups {
            let needed = probe.needed_indices(group.group, upto);
            if !needed.iter().all(|range| group.has_all(range)) {
                upto = group.next(&needed, upto);
                continue 'shorter;
            }
        }
        return upto;
    }
    0
}

/// Returns the whole chunks that hold blocks which are needed to reuse [`PrefixProbe::hit`]`(upto)`
/// tokens and are not on the device, in the order of the prompt.
pub(crate) fn missing(probe: &PrefixProbe, chain: &Chain, upto: u32) -> Vec<u32> {
    let needed = probe.needed(chain.group(), upto).filter(|block| block.cached.is_none());
    let mut chunks: Vec<_> = needed.map(|block| chunk_of(chain.spec(), block.index)).collect();
    chunks.dedup();
    chunks.retain(|chunk| *chunk < chain.len());
    chunks
}

/// Returns the whole chunks of a prompt with a block that is not on the device and that some number
/// of reused tokens needs.
pub(crate) fn absent(probe: &PrefixProbe, chain: &Chain) -> Vec<u32> {
    let blocks = probe.blocks(chain.group()).filter(|block| block.cached.is_none());
    let mut chunks: Vec<_> = blocks.map(|block| chunk_of(chain.spec(), block.index)).collect();
    chunks.dedup();
    chunks.retain(|chunk| *chunk < chain.len());
    chunks
}

/// Returns the chunks of one group, besides what is on the device, that a sequence needs to reuse
/// `len` tokens with the recurrent states behind them; `None` if one is not available.
///
/// The rows behind the last whole chunk are in a tail, or in the whole chunk of a text that goes
/// on.
fn gather(
    probe: &PrefixProbe,
    chain: &Chain,
    len: u32,
    mut has: impl FnMut(ChunkAt) -> bool,
) -> Option<Vec<ChunkAt>> {
    let upto = ChunkAt::Upto(len);
    let last = chain.last_block(probe, upto)?;
    if chain.spec().is_of_states() {
        let is_cached = probe.states().contains(&len);
        return (is_cached || has(upto)).then(|| if is_cached { Vec::new() } else { vec![upto] });
    }
    let last = chunk_of(chain.spec(), last.index);
    let mut chunks: Vec<ChunkAt> = Vec::new();
    let full = probe.needed(chain.group(), len);
    for block in full.chain(probe.part(chain.group(), len)) {
        if block.cached.is_some() {
            continue;
        }
        let chunk = chunk_of(chain.spec(), block.index);
        let whole = Some(ChunkAt::Whole(chunk)).filter(|_| chunk < chain.len());
        let tail = Some(upto).filter(|_| chunk == last);
        let known = chunks.last().copied();
        if known.is_some_and(|known| Some(known) == whole || Some(known) == tail) {
            continue;
        }
        chunks.push(whole.into_iter().chain(tail).find(|at| has(*at))?);
    }
    Some(chunks)
}

/// Returns the first of some numbers of tokens that can be reused with the recurrent states behind
/// them, and the chunks to bring for them, by place of the chain.
pub(crate) fn with_state(
    probe: &PrefixProbe,
    chains: &[Chain],
    lengths: impl IntoIterator<Item = u32>,
    mut has: impl FnMut(usize, ChunkAt) -> bool,
) -> Option<(u32, Vec<(usize, ChunkAt)>)> {
    if chains.is_empty() {
        return None; // There are no names.
    }
    let mut all = |len: u32| {
        if !probe.reaches(len) {
            return None;
        }
        let mut chunks = Vec::new();
        // States first: most lengths have none.
        for (group, chain) in chains.iter().enumerate().rev() {
            let of = gather(probe, chain, len, |at| has(group, at))?;
            chunks.extend(of.into_iter().map(|at| (group, at)));
        }
        Some((len, chunks))
    };
    lengths.into_iter().find_map(&mut all)
}
