//! Doubly linked lists in arrays: every operation is O(1), and only the growth of the arrays
//! allocates.
use hashbrown::HashSet;

use crate::num::{to_u32, to_usize};

/// Lists of numbered nodes; a node is in one list at most.
#[derive(Debug, Clone)]
pub(super) struct Lists {
    /// Neighbours `[before, after]` of each node. An unlinked node is its own neighbour.
    nodes: Vec<[u32; 2]>,
    /// `[last, first]` of each list: the neighbours of its end.
    ends: Vec<[u32; 2]>,
    /// Nodes that keep their places but are never the first of a list; few.
    hidden: HashSet<u32>,
}

/// Marks the end of a list.
const END: u32 = 1 << 31;

impl Lists {
    pub(super) fn new(num_nodes: u32, num_lists: u32) -> Self {
        Self {
            nodes: (0..num_nodes).map(|node| [node; 2]).collect(),
            ends: (0..num_lists).map(|list| [END | list; 2]).collect(),
            hidden: HashSet::new(),
        }
    }

    /// Returns the bytes of host memory.
    #[cfg(test)]
    pub(super) fn host_bytes(&self) -> usize {
        [&self.nodes, &self.ends].map(crate::num::list_bytes).iter().sum()
    }

    /// Adds a node that is in no list.
    pub(super) fn add_node(&mut self) -> u32 {
        let node = self.num_nodes();
        self.nodes.push([node; 2]);
        node
    }

    /// Adds a list.
    pub(super) fn add_list(&mut self) -> u32 {
        let list = to_u32(self.ends.len());
        self.ends.push([END | list; 2]);
        list
    }

    pub(super) fn num_nodes(&self) -> u32 {
        to_u32(self.nodes.len())
    }

    fn get(&self, at: u32) -> [u32; 2] {
        let of = if at & END == 0 { &self.nodes } else { &self.ends };
        of[to_usize(at & !END)]
    }

    fn link(&mut self, before: u32, after: u32) {
        for (at, side, other) in [(before, 1, after), (after, 0, before)] {
            let of = if at & END == 0 { &mut self.nodes } else { &mut self.ends };
            of[to_usize(at & !END)][side] = other;
        }
    }

    /// Returns whether the node is in a list.
    pub(super) fn contains(&self, node: u32) -> bool {
        self.get(node)[1] != node
    }

    /// Appends a node that is in no list.
    pub(super) fn push_back(&mut self, list: u32, node: u32) {
        debug_assert!(!self.contains(node), "a node is in one list at most");
        let [before, _] = self.get(END | list);
        self.link(before, node);
        self.link(node, END | list);
    }

    /// Moves all nodes of one list to the end of another.
    pub(super) fn append(&mut self, list: u32, from: u32) {
        let [back, front] = self.get(END | from);
        if front & END == 0 {
            let [before, _] = self.get(END | list);
            self.link(before, front);
            self.link(back, END | list);
            self.link(END | from, END | from);
        }
    }

    /// Removes a node from its list, if it is in one.
    pub(super) fn remove(&mut self, node: u32) {
        if self.contains(node) {
            let [before, after] = self.get(node);
            self.link(before, after);
            self.link(node, node);
        }
    }

    /// Passes over a node of a list until it is shown.
    pub(super) fn hide(&mut self, node: u32) {
        if self.contains(node) {
            self.hidden.insert(node);
        }
    }

    /// Shows a hidden node; `false` if it was not hidden, or left its list meanwhile.
    pub(super) fn show(&mut self, node: u32) -> bool {
        !self.hidden.is_empty() && self.hidden.remove(&node) && self.contains(node)
    }

    /// Returns whether a list has no node, hidden ones included.
    pub(super) fn is_empty(&self, list: u32) -> bool {
        let [_, first] = self.get(END | list);
        first & END != 0
    }

    /// Returns the first node of a list that is not hidden.
    pub(super) fn front(&self, list: u32) -> Option<u32> {
        let [_, mut first] = self.get(END | list);
        while !self.hidden.is_empty() && self.hidden.contains(&first) {
            [_, first] = self.get(first);
        }
        (first & END == 0).then_some(first)
    }

    /// Removes the first node of a list that is not hidden.
    pub(super) fn pop_front(&mut self, list: u32) -> Option<u32> {
        let first = self.front(list)?;
        self.remove(first);
        Some(first)
    }
}

/// A set of small numbers that finds its least member, by a summary of its words of 64 bits.
#[derive(Debug, Clone)]
pub(super) struct BitSet {
    words: Vec<u64>,
    /// Words that are not 0.
    summary: Vec<u64>,
}

impl BitSet {
    /// Creates the set for members `0..len`.
    pub(super) fn new(len: u32) -> Self {
        let words = |len: u32| vec![0; to_usize(len.div_ceil(64))];
        Self { words: words(len), summary: words(len.div_ceil(64)) }
    }

    /// Inserts or removes a number.
    pub(super) fn set(&mut self, member: u32, is_in: bool) {
        let is_filled = set_bit(&mut self.words, member, is_in);
        set_bit(&mut self.summary, member / 64, is_filled);
    }

    /// Returns the least member.
    pub(super) fn first(&self) -> Option<u32> {
        let word = first_bit(&self.summary, 0)?;
        first_bit(&self.words, to_usize(word))
    }
}

/// Sets a bit; returns whether its word is not 0 then.
fn set_bit(words: &mut [u64], at: u32, is_set: bool) -> bool {
    let word = &mut words[to_usize(at / 64)];
    let bit = 1_u64 << (at % 64);
    *word = if is_set { *word | bit } else { *word & !bit };
    *word > 0
}

/// Returns the first bit that is set, from a word on.
fn first_bit(words: &[u64], from: usize) -> Option<u32> {
    let (at, word) = words.iter().enumerate().skip(from).find(|(_, word)| **word != 0)?;
    Some(to_u32(at) * 64 + word.trailing_zeros())
}

/// A queue of buckets: the least bucket first, in order of arrival inside a bucket.
#[derive(Debug, Clone)]
pub(super) struct Buckets {
    lists: Lists,
    /// Buckets with a node that is not hidden, and some that had one.
    filled: BitSet,
}

impl Buckets {
    /// Creates the queue for nodes `0..num_nodes` and every bucket of a `u8`.
    pub(super) fn new(num_nodes: u32) -> Self {
        let num_buckets = u32::from(u8::MAX) + 1;
        Self { lists: Lists::new(num_nodes, num_buckets), filled: BitSet::new(num_buckets) }
    }

    pub(super) fn contains(&self, node: u32) -> bool {
        self.lists.contains(node)
    }

    /// Appends a node to a bucket; a node that is in a bucket stays there.
    pub(super) fn push_back(&mut self, bucket: u8, node: u32) {
        if !self.contains(node) {
            self.lists.push_back(u32::from(bucket), node);
            self.filled.set(u32::from(bucket), true);
        }
    }

    pub(super) fn remove(&mut self, node: u32) {
        self.lists.remove(node);
    }

    /// Passes over a node until it is shown.
    pub(super) fn hide(&mut self, node: u32) {
        self.lists.hide(node);
    }

    /// Shows a hidden node, which is in this bucket.
    pub(super) fn show(&mut self, bucket: u8, node: u32) {
        if self.lists.show(node) {
            self.filled.set(u32::from(bucket), true);
        }
    }

    /// Returns the first node of the least bucket, and that bucket.
    pub(super) fn first(&mut self) -> Option<(u8, u32)> {
        loop {
            let bucket = self.filled.first()?;
            match self.lists.front(bucket) {
                Some(node) => return Some((u8::try_from(bucket).ok()?, node)),
                None => self.filled.set(bucket, false),
            }
        }
    }
}
