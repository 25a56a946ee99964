//! The files of a folder as one process knows them: lengths, and the order of eviction.
//!
//! The order is that of the last use, which survives a restart as the time of the file. It is kept
//! here and not by [`kv_core::eviction`]: those policies number blocks `0..n` of a pool of known
//! size, and rank them by key, parent and priority, none of which a listed file tells without being
//! read.
use std::collections::{BTreeSet, HashMap};
use std::time::{SystemTime, UNIX_EPOCH};

use kv_core::num::to_u64;

use crate::ChunkAddress;

/// An entry of the index: the size and the last use of a file.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    /// Bytes that it counts for.
    pub(super) charge: u64,
    /// Time of the last use, in microseconds.
    used: u64,
    /// Number of the last use among those of this process.
    serial: u64,
    /// Time of the last update of the file's own time, in microseconds.
    stamped: u64,
    /// Number of the last listing that saw it.
    listing: u64,
}

#[derive(Debug, Default)]
pub(super) struct Index {
    entries: HashMap<ChunkAddress, Entry>,
    /// Least recently used first.
    order: BTreeSet<(u64, ChunkAddress)>,
    charged: u64,
    serial: u64,
    last_use: u64,
    listing: u64,
}

impl Index {
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns the bytes that all files count for.
    pub(super) const fn charged(&self) -> u64 {
        self.charged
    }

    pub(super) fn contains(&self, chunk: &ChunkAddress) -> bool {
        self.entries.contains_key(chunk)
    }

    pub(super) fn get(&self, chunk: &ChunkAddress) -> Option<Entry> {
        self.entries.get(chunk).copied()
    }

    /// Adds a file that was used or written now; `modified` is its time in microseconds.
    pub(super) fn insert(&mut self, chunk: ChunkAddress, charge: u64, modified: u64) {
        let stamped = self.entries.get(&chunk).map_or(modified, |entry| entry.stamped);
        let (used, serial) = self.next_use();
        self.set(chunk, Entry { charge, used, serial, stamped, listing: self.listing });
    }

    /// Adds a file that a listing found, in the order of its time.
    pub(super) fn insert_listed(&mut self, chunk: ChunkAddress, charge: u64, modified: u64) {
        let listing = self.listing;
        let used = modified.min(now());
        let found = Entry { charge, used, serial: 0, stamped: modified, listing };
        let entry = self.entries.get(&chunk).map_or(found, |known| Entry {
            charge,
            listing,
            used: known.used.max(used),
            stamped: known.stamped.max(modified),
            ..*known
        });
        self.set(chunk, entry);
    }

    /// Makes a file the most recently used one.
    pub(super) fn renew(&mut self, chunk: &ChunkAddress) {
        if let Some(entry) = self.get(chunk) {
            let (used, serial) = self.next_use();
            self.set(*chunk, Entry { used, serial, ..entry });
        }
    }

    /// The same unless the file is among the most recently used quarter already. A lookup has put
    /// the heads of chains before their tails there; reads in the order of the chain keep that.
    pub(super) fn renew_old(&mut self, chunk: &ChunkAddress) {
        let quarter = to_u64(self.len() / 4);
        let is_old = |entry: Entry| entry.serial + quarter < self.serial;
        if self.get(chunk).is_some_and(is_old) {
            self.renew(chunk);
        }
    }

    /// Returns whether the file's time should be set: it is older than the last use by more than
    /// `after` microseconds. The answer is yes once.
    pub(super) fn must_stamp(&mut self, chunk: &ChunkAddress, after: u64) -> bool {
        let Some(entry) = self.entries.get_mut(chunk) else { return false };
        let now = now();
        let must = now.saturating_sub(entry.stamped) > after;
        if must {
            entry.stamped = now;
        }
        must
    }

    pub(super) fn remove(&mut self, chunk: &ChunkAddress) -> Option<Entry> {
        let entry = self.entries.remove(chunk)?;
        self.order.remove(&(entry.used, *chunk));
        // Lengths of files may be anything.
        self.charged = self.charged.saturating_sub(entry.charge);
        Some(entry)
    }

    /// Returns the least recently used file.
    pub(super) fn oldest(&self) -> Option<ChunkAddress> {
        self.order.first().map(|(_, chunk)| *chunk)
    }

    /// Begins a listing.
    pub(super) fn begin_listing(&mut self) {
        self.listing += 1;
    }

    /// Ends a listing that saw every folder, and removes the files that neither the listing nor
    /// this process has seen since its beginning.
    pub(super) fn end_listing(&mut self) {
        let listing = self.listing;
        let gone = self.entries.iter().filter(|(_, entry)| entry.listing != listing);
        for chunk in gone.map(|(chunk, _)| *chunk).collect::<Vec<_>>() {
            self.remove(&chunk);
        }
    }

    fn set(&mut self, chunk: ChunkAddress, entry: Entry) {
        self.remove(&chunk);
        // Lengths of files may be anything.
        self.charged = self.charged.saturating_add(entry.charge);
        self.order.insert((entry.used, chunk));
        self.entries.insert(chunk, entry);
    }

    fn next_use(&mut self) -> (u64, u64) {
        self.last_use = now().max(self.last_use + 1);
        self.serial += 1;
        (self.last_use, self.serial)
    }
}

/// Returns the time in microseconds, as files have it; `u64::MAX` if later.
pub(super) fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ChunkName;

    fn chunk(n: u8) -> ChunkAddress {
        ChunkAddress { root: ChunkName::new([0; 32]), name: ChunkName::new([n; 32]) }
    }

    fn order(index: &Index) -> Vec<u8> {
        index.order.iter().map(|(_, chunk)| chunk.name.as_bytes()[0]).collect()
    }

    #[test]
    fn the_least_recently_used_is_first() {
        let mut index = Index::default();
        for n in 0..4 {
            index.insert(chunk(n), 10, 0);
        }
        index.renew(&chunk(0));
        assert_eq!((order(&index), index.charged()), (vec![1, 2, 3, 0], 40));
        index.insert(chunk(1), 30, 0);
        assert_eq!((order(&index), index.charged(), index.len()), (vec![2, 3, 0, 1], 60, 4));
        assert_eq!(index.remove(&chunk(1)).unwrap().charge, 30);
        assert_eq!((index.oldest(), index.charged()), (Some(chunk(2)), 30));
    }

    #[test]
    fn reads_of_a_chain_keep_the_order_of_its_lookup() {
        let mut index = Index::default();
        for n in 0..40 {
            index.insert(chunk(n), 1, 0);
        }
        for n in (0..4).rev() {
            index.renew(&chunk(n));
        }
        (0..4).for_each(|n| index.renew_old(&chunk(n)));
        assert_eq!(order(&index)[36..], [3, 2, 1, 0]);
        index.renew_old(&chunk(4));
        assert_eq!(order(&index)[36..], [2, 1, 0, 4]);
    }

    #[test]
    fn listed_files_come_in_the_order_of_their_times() {
        let mut index = Index::default();
        index.insert(chunk(9), 1, 0);
        index.begin_listing();
        index.insert(chunk(8), 1, 0);
        index.insert_listed(chunk(1), 1, 200);
        index.insert_listed(chunk(2), 1, 100);
        assert_eq!(order(&index), [2, 1, 9, 8]);
        index.end_listing();
        assert_eq!((order(&index), index.charged()), (vec![2, 1, 8], 3));
        // A clock that was ahead makes no file the last for ever.
        index.insert_listed(chunk(3), 1, u64::MAX);
        index.insert(chunk(4), 1, 0);
        assert_eq!(order(&index).last(), Some(&4));
    }

    #[test]
    fn a_time_is_set_once_in_a_while() {
        let mut index = Index::default();
        index.insert_listed(chunk(1), 1, 100);
        assert!(index.must_stamp(&chunk(1), 1_000_000) && !index.must_stamp(&chunk(1), 1_000_000));
        assert!(!index.must_stamp(&chunk(2), 0));
    }
}
