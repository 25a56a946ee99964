//! Lists that forks share: the token ids of a sequence, and the keys of its blocks.
use std::ops::Range;
use std::sync::Arc;

#[cfg(test)]
use crate::num::list_bytes;

/// A list in chunks of `CHUNK` items. A fork shares the full chunks and copies the items after
/// them, so its cost hardly depends on the list's length.
///
/// Invariant: every chunk of `full` has `CHUNK` items, and `last` has fewer.
#[derive(Debug, Clone)]
pub(super) struct SharedList<T, const CHUNK: usize> {
    full: Vec<Arc<Vec<T>>>,
    last: Vec<T>,
}

impl<T, const CHUNK: usize> Default for SharedList<T, CHUNK> {
    fn default() -> Self {
        const { assert!(CHUNK > 0, "a chunk holds something") };
        Self { full: Vec::new(), last: Vec::new() }
    }
}

impl<T: Copy + PartialEq, const CHUNK: usize> SharedList<T, CHUNK> {
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.full.len() * CHUNK + self.last.len()
    }

    /// Empties the list, and keeps memory for less than a chunk.
    pub(super) fn clear(&mut self) {
        self.full = Vec::new();
        self.last.clear();
    }

    /// Returns the chunk that holds item `at`, and the item's index in it; `None` past the last
    /// chunk.
    #[inline]
    fn place(&self, at: usize) -> Option<(&[T], usize)> {
        // `CHUNK` is above 0, so neither is refused.
        let (chunk, inside) =
            (at.checked_div(CHUNK).unwrap_or(0), at.checked_rem(CHUNK).unwrap_or(0));
        match self.full.get(chunk) {
            Some(items) => Some((items, inside)),
            None => (chunk == self.full.len()).then_some((&self.last, inside)),
        }
    }

    /// Returns item `at` and those after it in the same chunk.
    fn rest_of_chunk(&self, at: usize) -> &[T] {
        let rest = self.place(at).and_then(|(items, inside)| items.get(inside..));
        rest.unwrap_or_default()
    }

    #[inline]
    pub(super) fn get(&self, at: usize) -> Option<T> {
        let (items, inside) = self.place(at)?;
        items.get(inside).copied()
    }

    #[inline]
    pub(super) fn push(&mut self, item: T) {
        self.last.push(item);
        self.close_full();
    }

    pub(super) fn extend_from_slice(&mut self, mut items: &[T]) {
        while !items.is_empty() {
            let room = (CHUNK - self.last.len()).min(items.len());
            let (now, later) = items.split_at(room);
            self.last.extend_from_slice(now);
            self.close_full();
            items = later;
        }
    }

    #[inline]
    fn close_full(&mut self) {
        if self.last.len() == CHUNK {
            self.full.push(Arc::new(std::mem::take(&mut self.last)));
        }
    }

    /// Removes the items from `len` on. A shared chunk is copied before it is truncated.
    pub(super) fn truncate(&mut self, len: usize) {
        let chunks = len.checked_div(CHUNK).unwrap_or(0);
        let inside = len.checked_rem(CHUNK).unwrap_or(0);
        if let Some(cut) = self.full.get_mut(chunks) {
            let cut = std::mem::take(cut);
            self.last = Arc::try_unwrap(cut)
                .unwrap_or_else(|shared| shared.get(..inside).unwrap_or_default().to_vec());
            self.full.truncate(chunks);
        }
        if chunks == self.full.len() {
            self.last.truncate(inside);
        }
    }

    /// Returns the first `len` items, or all if there are fewer, as a list that shares them.
    pub(super) fn fork(&self, len: usize) -> Self {
        let len = len.min(self.len());
        let chunks = len.checked_div(CHUNK).unwrap_or(0);
        let items = self.place(len).and_then(|(items, inside)| items.get(..inside));
        Self {
            full: self.full.get(..chunks).unwrap_or_default().to_vec(),
            last: items.unwrap_or_default().to_vec(),
        }
    }

    /// Returns consecutive items, `None` if the list is shorter: in place, or in `copy` if they
    /// span chunks.
    #[inline]
    pub(super) fn slice<'a>(
        &'a self,
        range: Range<usize>,
        copy: &'a mut Vec<T>,
    ) -> Option<&'a [T]> {
        let (items, inside) = self.place(range.start)?;
        let end = inside + range.end.checked_sub(range.start)?;
        if let Some(found) = items.get(inside..end) {
            return Some(found);
        }
        self.gather(range, copy).then_some(copy)
    }

    /// Copies items out of their chunks; `false` if the list is shorter.
    fn gather(&self, range: Range<usize>, copy: &mut Vec<T>) -> bool {
        copy.clear();
        if range.end > self.len() {
            return false;
        }
        let mut at = range.start;
        while at < range.end {
            let rest = self.rest_of_chunk(at);
            let count = rest.len().min(range.end - at);
            assert!(count > 0, "item {at} of a list of {} lies in a chunk", self.len());
            copy.extend_from_slice(rest.get(..count).unwrap_or_default());
            at += count;
        }
        true
    }

    /// Returns the bytes of the list; a shared chunk is divided among its lists.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        let share = |chunk: &Arc<Vec<T>>| list_bytes(chunk).checked_div(Arc::strong_count(chunk));
        let chunks = self.full.iter().filter_map(share);
        chunks.chain([list_bytes(&self.full), list_bytes(&self.last)]).sum()
    }

    /// Returns how many of `items` equal those of the list from `at` on, before the first
    /// difference.
    pub(super) fn common(&self, at: usize, items: &[T]) -> usize {
        let mut same = 0_usize;
        loop {
            let mine = self.rest_of_chunk(at + same);
            let theirs = items.get(same..).unwrap_or_default();
            let equal = mine.iter().zip(theirs).take_while(|(a, b)| a == b).count();
            same += equal;
            if equal == 0 || equal < mine.len() {
                return same;
            }
        }
    }
}

#[cfg(test)]
#[expect(clippy::arithmetic_side_effects, reason = "a test that overflows fails, as it should")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type List = SharedList<u32, 4>;

    #[derive(Debug, Clone)]
    enum Operation {
        Extend(Vec<u32>),
        Push(u32),
        Truncate(usize),
        Fork(usize),
        Clear,
    }

    fn operation() -> impl Strategy<Value = Operation> {
        prop_oneof![
            4 => prop::collection::vec(0..3_u32, 0..14).prop_map(Operation::Extend),
            4 => (0..3_u32).prop_map(Operation::Push),
            3 => (0..30_usize).prop_map(Operation::Truncate),
            2 => (0..30_usize).prop_map(Operation::Fork),
            1 => Just(Operation::Clear),
        ]
    }

    fn check(list: &List, plain: &[u32]) {
        assert_eq!(list.len(), plain.len());
        let mut copy = Vec::new();
        for begin in 0..=plain.len() + 1 {
            assert_eq!(list.get(begin), plain.get(begin).copied());
            for end in begin..=plain.len() + 1 {
                assert_eq!(list.slice(begin..end, &mut copy), plain.get(begin..end));
            }
            let rest = plain.get(begin..).unwrap_or_default();
            assert_eq!(list.common(begin, rest), rest.len());
            for differs in 0..rest.len() {
                let mut other = rest.to_vec();
                other[differs] += 1;
                assert_eq!(list.common(begin, &other), differs);
            }
            assert_eq!(list.common(begin, &[rest, &[7, 7]].concat()), rest.len());
        }
    }

    proptest! {
        #[test]
        fn forks_equal_plain_copies(
            operations in prop::collection::vec((0..4_usize, operation()), 1..40),
        ) {
            let mut lists = vec![(List::default(), Vec::new())];
            for (which, operation) in operations {
                let which = which % lists.len();
                let (list, plain) = &mut lists[which];
                match operation {
                    Operation::Extend(items) => {
                        list.extend_from_slice(&items);
                        plain.extend(items);
                    }
                    Operation::Push(item) => {
                        list.push(item);
                        plain.push(item);
                    }
                    Operation::Truncate(len) => {
                        list.truncate(len);
                        plain.truncate(len);
                    }
                    Operation::Fork(len) => {
                        let copy = plain.get(..len).unwrap_or(plain).to_vec();
                        let fork = (list.fork(len), copy);
                        if lists.len() < 4 {
                            lists.push(fork);
                        } else {
                            lists[(which + 1) % 4] = fork;
                        }
                    }
                    Operation::Clear => {
                        list.clear();
                        plain.clear();
                    }
                }
                for (list, plain) in &lists {
                    check(list, plain);
                }
            }
        }
    }

    #[test]
    fn a_fork_shares_full_chunks() {
        let mut list = List::default();
        list.extend_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8, 9]);
        let mut fork = list.fork(9);
        for (mine, theirs) in list.full.iter().zip(&fork.full) {
            assert!(Arc::ptr_eq(mine, theirs));
        }
        fork.truncate(6);
        assert!(Arc::ptr_eq(&list.full[0], &fork.full[0]));
        assert_eq!((list.len(), fork.len()), (9, 6));
        assert_eq!(list.get(6), Some(7), "the cut chunk is the other's own");
    }
}
