//! Doubly linked lists through one array: every operation is O(1), and nothing allocates.
use crate::num::{to_u32, to_usize};

/// Lists of nodes `0..num_nodes`; a node is in one list at most.
#[derive(Debug, Clone)]
pub(super) struct Lists {
    /// Neighbours `[before, after]` of each node, then of each list's ends. What is linked to
    /// nothing is its own neighbour.
    links: Vec<[u32; 2]>,
    num_nodes: u32,
}

impl Lists {
    pub(super) fn new(num_nodes: u32, num_lists: u32) -> Self {
        Self {
            links: (0..num_nodes.saturating_add(num_lists)).map(|n| [n, n]).collect(),
            num_nodes,
        }
    }

    pub(super) fn num_nodes(&self) -> u32 {
        self.num_nodes
    }

    fn get(&self, at: u32) -> [u32; 2] {
        self.links.get(to_usize(at)).copied().unwrap_or([at; 2])
    }

    fn link(&mut self, before: u32, after: u32) {
        if let Some(link) = self.links.get_mut(to_usize(before)) {
            link[1] = after;
        }
        if let Some(link) = self.links.get_mut(to_usize(after)) {
            link[0] = before;
        }
    }

    fn end(&self, list: u32) -> u32 {
        self.num_nodes.saturating_add(list)
    }

    /// Is the node in a list? Not so for strangers.
    pub(super) fn contains(&self, node: u32) -> bool {
        node < self.num_nodes && self.get(node)[1] != node
    }

    /// Appends a node that is in no list.
    pub(super) fn push_back(&mut self, list: u32, node: u32) {
        let end = self.end(list);
        if node < self.num_nodes && to_usize(end) < self.links.len() {
            debug_assert!(!self.contains(node), "a node is in one list at most");
            let [before, _] = self.get(end);
            self.link(before, node);
            self.link(node, end);
        }
    }

    /// Takes a node out of its list, if it is in one.
    pub(super) fn remove(&mut self, node: u32) {
        if self.contains(node) {
            let [before, after] = self.get(node);
            self.link(before, after);
            self.link(node, node);
        }
    }

    /// The first node of a list.
    pub(super) fn front(&self, list: u32) -> Option<u32> {
        let [_, first] = self.get(self.end(list));
        (first < self.num_nodes).then_some(first)
    }

    /// Takes the first node out of a list.
    pub(super) fn pop_front(&mut self, list: u32) -> Option<u32> {
        let first = self.front(list)?;
        self.remove(first);
        Some(first)
    }
}

/// A set of small numbers that finds its least member by words of 64 bits.
#[derive(Debug, Clone)]
pub(super) struct BitSet {
    words: Vec<u64>,
}

impl BitSet {
    /// For members `0..len`.
    pub(super) fn new(len: u32) -> Self {
        Self { words: vec![0; to_usize(len.div_ceil(64))] }
    }

    /// Puts a number in or takes it out.
    pub(super) fn set(&mut self, member: u32, is_in: bool) {
        if let Some(word) = self.words.get_mut(to_usize(member / 64)) {
            let bit = 1_u64 << (member % 64);
            *word = if is_in { *word | bit } else { *word & !bit };
        }
    }

    /// The least member.
    pub(super) fn first(&self) -> Option<u32> {
        let (at, word) = self.words.iter().enumerate().find(|(_, word)| **word != 0)?;
        Some(to_u32(at).saturating_mul(64).saturating_add(word.trailing_zeros()))
    }

    /// Takes every member out.
    pub(super) fn clear(&mut self) {
        self.words.fill(0);
    }
}

/// First come, first served inside a bucket, least bucket first.
#[derive(Debug, Clone)]
pub(super) struct Buckets {
    lists: Lists,
    filled: BitSet,
    /// The bucket each node is in, or was in last.
    bucket: Vec<u8>,
}

impl Buckets {
    /// For nodes `0..num_nodes` and every bucket a `u8` can name.
    pub(super) fn new(num_nodes: u32) -> Self {
        let num_buckets = u32::from(u8::MAX).saturating_add(1);
        Self {
            lists: Lists::new(num_nodes, num_buckets),
            filled: BitSet::new(num_buckets),
            bucket: vec![0; to_usize(num_nodes)],
        }
    }

    pub(super) fn contains(&self, node: u32) -> bool {
        self.lists.contains(node)
    }

    /// Appends a node to a bucket; one that is in a bucket already stays where it is.
    pub(super) fn push_back(&mut self, bucket: u8, node: u32) {
        if node < self.lists.num_nodes() && !self.contains(node) {
            self.lists.push_back(u32::from(bucket), node);
            self.filled.set(u32::from(bucket), true);
            if let Some(slot) = self.bucket.get_mut(to_usize(node)) {
                *slot = bucket;
            }
        }
    }

    pub(super) fn remove(&mut self, node: u32) {
        if self.contains(node) {
            self.lists.remove(node);
            let bucket = self.bucket.get(to_usize(node)).copied().unwrap_or(0);
            self.filled.set(u32::from(bucket), self.lists.front(u32::from(bucket)).is_some());
        }
    }

    /// The first node of the least bucket, and that bucket.
    pub(super) fn first(&self) -> Option<(u8, u32)> {
        let bucket = self.filled.first()?;
        Some((u8::try_from(bucket).ok()?, self.lists.front(bucket)?))
    }
}
