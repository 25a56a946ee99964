//! Finds the main loop of a kernel: the shortest walk around a loop that does the work of one trip.
//!
//! The work is known from the kernel's format and head dim: products, copies, exponentials. A walk
//! counts what its blocks contain, so that an inner loop is entered as often as the work needs, and
//! paths for masks, soft caps or partly visible tiles, which do more, are not taken. No address and
//! no number of a block is written down anywhere.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, HashMap};

use anyhow::{Context, Result};

use super::flow::{Block, Flow};
use super::sass::{INSTRUCTION_BYTES, Instruction};

/// A kind of work that a trip is recognised by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    /// A product of matrices, not predicated.
    Product,
    /// An asynchronous copy to shared memory.
    AsyncCopy,
    /// An exponential of the softmax.
    Exponential,
    /// A wait until at most this number of groups of copies is under way.
    WaitFor(u32),
    /// A read of the block table.
    TableRead,
    /// A store of decoded codes.
    WideStore,
    /// A conversion of two e4m3 codes.
    FromE4m3,
    /// A subtraction of the bias of two int8 codes.
    FromInt8,
    /// A permutation of bytes.
    Permutation,
}

impl Work {
    fn is(self, one: &Instruction) -> bool {
        match self {
            Self::Product => one.base() == "HMMA" && !one.is_predicated,
            Self::AsyncCopy => one.base() == "LDGSTS",
            Self::Exponential => one.opcode == "MUFU.EX2",
            Self::WaitFor(groups) => {
                one.base() == "DEPBAR" && one.operands == format!("SB0, {groups:#x}")
            }
            Self::TableRead => one.base() == "LDG" && one.has("CONSTANT"),
            Self::WideStore => one.base() == "STS" && one.has("128"),
            Self::FromE4m3 => one.base() == "F2FP" && one.has("E4M3"),
            Self::FromInt8 => one.base() == "HADD2",
            Self::Permutation => one.base() == "PRMT",
        }
    }

    /// Returns how many instructions of a block do it.
    fn count(self, block: &Block<'_>) -> u32 {
        let count = block.instructions.iter().filter(|one| self.is(one)).count();
        u32::try_from(count).unwrap_or(u32::MAX)
    }
}

/// The work of one pass through a loop's body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Pass {
    /// Each kind with the number of instructions, at least.
    pub(super) work: Vec<(Work, u32)>,
    /// Whether blocks of several exponentials are left out: they belong to another pass.
    pub(super) is_without_exponentials: bool,
}

/// One trip of a kernel's main loop: all passes, one after another.
#[derive(Debug)]
pub(super) struct Trip<'k> {
    /// Instructions in the order in which a warp issues them.
    pub(super) instructions: Vec<&'k Instruction>,
    /// Bytes of the different instructions among them.
    pub(super) code_bytes: u32,
    /// The fewest instructions from the kernel's begin to the loop.
    pub(super) before: u32,
    /// The fewest instructions from the loop's first block to the kernel's end.
    pub(super) after: u32,
}

/// Finds the main loop.
///
/// # Errors
/// If no loop does the work of all passes, or the loop cannot be reached or left.
pub(super) fn find<'k>(flow: &Flow<'k>, passes: &[Pass]) -> Result<Trip<'k>> {
    let mut best: Option<(u32, usize, Vec<usize>)> = None;
    for head in heads(flow) {
        let limit = best.as_ref().map_or(u32::MAX, |(length, ..)| *length);
        let mut walked = Some((0_u32, Vec::new()));
        for pass in passes {
            walked = walked.and_then(|(length, mut blocks)| {
                let left = limit.checked_sub(length)?;
                let (more, other) = walk(flow, head, pass, left)?;
                blocks.extend(other);
                Some((length.checked_add(more)?, blocks))
            });
        }
        if let Some((length, blocks)) = walked.filter(|(length, _)| *length < limit) {
            best = Some((length, head, blocks));
        }
    }
    let (_, head, blocks) = best.context("no main loop: no walk around a loop does its work")?;
    let own = |index: &usize| flow.blocks.get(*index);
    let different: BTreeSet<usize> = blocks.iter().copied().collect();
    let code: u32 = different.iter().filter_map(own).map(Block::len).sum();
    let first = own(&head).context("no such block")?;
    let before = shortest(flow, 0, |index| index == head).context("nothing reaches the loop")?;
    let is_exit = |index: usize| flow.blocks.get(index).is_some_and(|block| block.exits);
    let after = shortest(flow, head, is_exit).context("nothing leaves the loop")?;
    Ok(Trip {
        instructions: blocks.iter().filter_map(own).flat_map(|block| block.instructions).collect(),
        code_bytes: code.checked_mul(INSTRUCTION_BYTES).context("the loop is too large")?,
        before: before.checked_sub(first.len()).context("a way to the loop ends in it")?,
        after,
    })
}

/// Returns the first blocks of loops that contain a product: targets of branches backwards.
fn heads(flow: &Flow<'_>) -> BTreeSet<usize> {
    let has_product =
        |(index, block): (usize, &Block<'_>)| (Work::Product.count(block) > 0).then_some(index);
    let products: BTreeSet<usize> =
        flow.blocks.iter().enumerate().filter_map(has_product).collect();
    let edges = flow.blocks.iter().enumerate();
    let edges = edges.flat_map(|(from, block)| block.next.iter().map(move |to| (from, *to)));
    let spans = |(from, to): (usize, usize)| {
        (to <= from && products.range(to..=from).next().is_some()).then_some(to)
    };
    edges.filter_map(spans).collect()
}

/// A place on a walk: the block, and the work that has been done, each kind up to what is needed.
type State = (usize, Vec<u32>);

/// Finds the shortest walk from a block back to it that does the work of a pass, if one has at most
/// `limit` instructions: Dijkstra's algorithm. Returns its length and its blocks.
fn walk(flow: &Flow<'_>, head: usize, pass: &Pass, limit: u32) -> Option<(u32, Vec<usize>)> {
    let done: Vec<Vec<u32>> = flow
        .blocks
        .iter()
        .map(|block| pass.work.iter().map(|(work, _)| work.count(block)).collect())
        .collect();
    let is_left_out = |block: &Block<'_>| {
        pass.is_without_exponentials && Work::Exponential.count(block) >= EXPONENTIALS
    };
    let returning = returning(flow, head);
    let blocks = flow.blocks.iter().enumerate();
    let left_out: Vec<bool> =
        blocks.map(|(index, block)| is_left_out(block) || !returning.contains(&index)).collect();
    let add = |before: &[u32], index: usize| -> Option<Vec<u32>> {
        let own = before.iter().zip(done.get(index)?).zip(&pass.work);
        Some(own.map(|((a, b), (_, needed))| a.saturating_add(*b).min(*needed)).collect())
    };
    let length = |index: usize| flow.blocks.get(index).map(Block::len);
    let start = (head, add(&vec![0; pass.work.len()], head)?);
    let mut best = HashMap::from([(start.clone(), (length(head)?, None::<State>))]);
    let mut open = BinaryHeap::from([Reverse((length(head)?, start))]);
    // The work of shorter walks to each block: one that has done no more than another cannot win.
    let mut shorter: Vec<Vec<Vec<u32>>> = vec![Vec::new(); flow.blocks.len()];
    while let Some(Reverse((so_far, state))) = open.pop() {
        let known = shorter.get_mut(state.0)?;
        let does_as_much =
            |other: &Vec<u32>| other.iter().zip(&state.1).all(|(other, own)| other >= own);
        if known.iter().any(does_as_much) {
            continue;
        }
        known.push(state.1.clone());
        for next in &flow.blocks.get(state.0)?.next {
            if *next == head {
                if pass.work.iter().zip(&state.1).all(|((_, needed), done)| done == needed) {
                    return Some((so_far, path(&best, state)));
                }
                continue;
            }
            let so_far = so_far.checked_add(length(*next)?)?;
            if left_out.get(*next) == Some(&true) || so_far > limit {
                continue;
            }
            let there = (*next, add(&state.1, *next)?);
            if best.get(&there).is_none_or(|(known, _)| so_far < *known) {
                best.insert(there.clone(), (so_far, Some(state.clone())));
                open.push(Reverse((so_far, there)));
            }
        }
    }
    None
}

/// Returns the blocks from which a walk leads to this one: the others would only widen the search.
fn returning(flow: &Flow<'_>, head: usize) -> BTreeSet<usize> {
    let mut found = BTreeSet::from([head]);
    loop {
        let before = found.len();
        for (index, block) in flow.blocks.iter().enumerate().rev() {
            if block.next.iter().any(|next| found.contains(next)) {
                found.insert(index);
            }
        }
        if found.len() == before {
            return found;
        }
    }
}

/// Returns the blocks of a walk to its last state.
fn path(best: &HashMap<State, (u32, Option<State>)>, last: State) -> Vec<usize> {
    let mut blocks = Vec::new();
    let mut at = Some(last);
    while let Some(state) = at {
        at = best.get(&state).and_then(|(_, before)| before.clone());
        blocks.push(state.0);
    }
    blocks.reverse();
    blocks
}

/// Returns the fewest instructions of a path, those of its first and last block included.
fn shortest(flow: &Flow<'_>, from: usize, is_end: impl Fn(usize) -> bool) -> Option<u32> {
    let mut best = HashMap::from([(from, flow.blocks.get(from)?.len())]);
    let mut open = BinaryHeap::from([Reverse((flow.blocks.get(from)?.len(), from))]);
    while let Some(Reverse((so_far, index))) = open.pop() {
        if is_end(index) {
            return Some(so_far);
        }
        for next in &flow.blocks.get(index)?.next {
            let so_far = so_far.checked_add(flow.blocks.get(*next)?.len())?;
            if best.get(next).is_none_or(|known| so_far < *known) {
                best.insert(*next, so_far);
                open.push(Reverse((so_far, *next)));
            }
        }
    }
    None
}

/// Exponentials from which on a block belongs to the softmax: fewer rescale.
const EXPONENTIALS: u32 = 4;
