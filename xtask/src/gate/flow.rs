//! The control flow graph of a kernel: basic blocks and the blocks that may follow each.
//!
//! A call is one step, after which the next block follows: what a function does is no part of the
//! way through its caller.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use anyhow::{Context, Result, bail};

use super::sass::{Instruction, Kernel};

/// Basic blocks in the order of their addresses.
#[derive(Debug)]
pub(super) struct Flow<'k> {
    pub(super) blocks: Vec<Block<'k>>,
}

/// Instructions that run one after another, with the indices of blocks that may follow.
#[derive(Debug)]
pub(super) struct Block<'k> {
    pub(super) instructions: &'k [Instruction],
    pub(super) next: Vec<usize>,
    /// Whether the kernel may end here.
    pub(super) exits: bool,
}

impl Block<'_> {
    /// Returns the number of its instructions.
    pub(super) fn len(&self) -> u32 {
        u32::try_from(self.instructions.len()).unwrap_or(u32::MAX)
    }
}

/// Instructions that end a block.
const ENDS: [&str; 9] = ["BRA", "BRX", "EXIT", "RET", "CALL", "BSYNC", "BREAK", "JMP", "KILL"];

impl<'k> Flow<'k> {
    /// Makes the graph.
    ///
    /// # Errors
    /// Names a branch whose target is not known.
    pub(super) fn new(kernel: &'k Kernel) -> Result<Self> {
        let all = &kernel.instructions;
        let mut starts = BTreeSet::from([0]);
        for (index, one) in all.iter().enumerate() {
            if !one.labels.is_empty() {
                starts.insert(index);
            }
            if ENDS.contains(&one.base()) {
                starts.extend(index.checked_add(1).filter(|next| *next < all.len()));
            }
        }
        let ends = starts.iter().copied().skip(1).chain([all.len()]);
        let ranges: Vec<Range<usize>> =
            starts.iter().zip(ends).map(|(start, end)| *start..end).collect();
        let mut blocks = Vec::new();
        let mut places = BTreeMap::new();
        for (index, range) in ranges.into_iter().enumerate() {
            let instructions = all.get(range).context("a block outside of its kernel")?;
            let labels = instructions.first().into_iter().flat_map(|first| &first.labels);
            places.extend(labels.map(|label| (label.as_str(), index)));
            blocks.push(Block { instructions, next: Vec::new(), exits: false });
        }
        let mut flow = Self { blocks };
        flow.connect(&places)?;
        Ok(flow)
    }

    /// Adds the edges.
    fn connect(&mut self, places: &BTreeMap<&str, usize>) -> Result<()> {
        let count = self.blocks.len();
        for (index, block) in self.blocks.iter_mut().enumerate() {
            let last = block.instructions.last().context("an empty block")?;
            let to = |label: &str| {
                let place = places.get(label).copied();
                place.with_context(|| format!("{:#x}: no label {label:?}", last.address))
            };
            let mut falls_through = true;
            match last.base() {
                "BRA" => {
                    block.next.push(to(target(last)?)?);
                    falls_through = is_conditional(last);
                }
                "BRX" => {
                    for label in targets(last)? {
                        block.next.push(to(label)?);
                    }
                    falls_through = last.is_predicated;
                }
                "EXIT" | "KILL" => {
                    block.exits = true;
                    falls_through = last.is_predicated;
                }
                "RET" => falls_through = last.is_predicated,
                "JMP" => bail!("{:#x}: a jump to an address", last.address),
                _ => {}
            }
            let after = index.checked_add(1).filter(|after| *after < count);
            match after {
                Some(after) if falls_through => block.next.push(after),
                // Padding follows the last branch.
                None if falls_through && last.base() != "NOP" => {
                    bail!("{:#x}: the code ends here", last.address)
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// Returns the label in a branch's operand: `` `(.L_x_1) ``.
fn target(branch: &Instruction) -> Result<&str> {
    let label = branch.operands.split_once("`(").and_then(|(_, rest)| rest.split_once(')'));
    let label = label.with_context(|| format!("{:#x}: a branch to no label", branch.address))?;
    Ok(label.0)
}

/// Returns the labels of an indirect branch, which a comment lists.
fn targets(branch: &Instruction) -> Result<Vec<&str>> {
    let list = branch.operands.split_once("BRANCH_TARGETS ");
    let list = list.and_then(|(_, rest)| rest.split_once('"'));
    let list = list.with_context(|| format!("{:#x}: a branch to no list", branch.address))?;
    Ok(list.0.split(',').map(str::trim).collect())
}

/// Returns whether a branch may not be taken: by its guard, by a predicate among its operands, or
/// because it is for warps whose lanes have diverged.
fn is_conditional(branch: &Instruction) -> bool {
    let first = branch.operands.split(',').next().unwrap_or_default().trim_start_matches('!');
    let is_predicate = first.strip_prefix("UP").or(first.strip_prefix('P'));
    let is_predicate = is_predicate.is_some_and(|number| number.parse::<u8>().is_ok());
    branch.is_predicated || branch.has("DIV") || is_predicate
}
