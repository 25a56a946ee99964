//! Statistics of contents, kept for some time after their eviction.
//!
//! They cost host memory, for five contents per block. So contents are numbered, blocks first and
//! then evicted ones, and each field is an array of the narrowest possible type.
use crate::eviction::reuse_rate::rates;
#[cfg(test)]
use crate::num::list_bytes;
use crate::num::{to_u32, to_usize};
use crate::reuse::BlockKey;

/// Evicted contents remembered per block of the pool.
const GONE_PER_BLOCK: u32 = 4;

/// A content in no chain.
const NONE: u32 = u32::MAX;

/// The class of content in use, which does not age.
const IN_USE: u8 = u8::MAX;

/// Marks the end of a chain, which names its bucket.
const END: u32 = 1 << 31;

/// Statistics of the content of one block.
#[derive(Debug, Clone, Copy)]
pub(super) struct Held {
    /// The low half of the content's key, and of the one before it; 0 for none. A collision makes
    /// an estimate worse, nothing else.
    pub(super) key: u32,
    pub(super) parent: u32,
    /// The request after which it became idle.
    pub(super) since: u32,
    /// The class in which the content is counted, and the one by which it is ranked, while idle.
    class: u8,
    pub(super) rank: u8,
    pub(super) uses: u8,
    /// Times that a longer prompt continued one that ended here or before; 0 for a block without
    /// content.
    pub(super) turn: u8,
}

const EMPTY: Held = Held { key: 0, parent: 0, since: 0, class: IN_USE, rank: 0, uses: 0, turn: 0 };

impl Held {
    /// Creates the statistics of content in use.
    pub(super) fn new((key, parent): (u64, Option<u64>), uses: u8, turn: u8) -> Self {
        let (key, parent) = (low(key), parent.map_or(0, low));
        Self { key, parent, uses, turn: turn.max(1), ..EMPTY }
    }
    pub(super) fn is_named(&self, key: u64) -> bool {
        self.key == low(key)
    }
    /// Returns the class it ages in, while it is idle.
    pub(super) fn class(&self) -> Option<u8> {
        (self.class != IN_USE).then_some(self.class)
    }
    pub(super) fn set_class(&mut self, class: Option<u8>) {
        self.class = class.unwrap_or(IN_USE);
    }
}

/// Statistics of evicted content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Gone {
    /// The class it ages in and since when; `None` if it was lost while in use.
    pub(super) age: Option<(u8, u32)>,
    pub(super) uses: u8,
    pub(super) turn: u8,
}

/// Largest counts of uses and turns kept for evicted content.
const COUNT_MAX: u8 = 31;

/// Uses, turn and class of evicted content, in 16 bits.
#[derive(Debug, Clone, Copy)]
struct Packed(u16);

impl Packed {
    fn new(uses: u8, turn: u8, class: Option<u8>) -> Self {
        let [uses, turn] = [uses, turn].map(|count| u16::from(count.min(COUNT_MAX)));
        // The grade of uses in the class follows from the uses.
        let rest = class.map_or(0, |class| u16::from(rates::without_uses(class)).wrapping_add(1));
        Self(uses | turn << 5 | rest << 10)
    }
    fn field(self, shift: u16, mask: u16) -> u8 {
        u8::try_from(self.0 >> shift & mask).unwrap_or(0)
    }
    fn uses(self) -> u8 {
        self.field(0, 31)
    }
    fn turn(self) -> u8 {
        self.field(5, 31)
    }
    fn class(self) -> Option<u8> {
        let rest = self.field(10, 31).checked_sub(1)?;
        Some(rates::with_uses(rest, self.uses()))
    }
}

/// The place of a content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Block(u32),
    Gone(u32),
}

/// All contents: a fixed number, so that the one evicted longest ago is forgotten for a new one.
#[derive(Debug, Clone)]
pub(super) struct Contents {
    held: Vec<Held>,
    gone_key: Vec<u32>,
    gone_since: Vec<u32>,
    gone: Vec<Packed>,
    /// The one evicted longest ago, and the number of evicted ones, in a ring.
    oldest: u32,
    num_gone: u32,
    /// First content of each hash bucket.
    buckets: Vec<u32>,
    /// The next content in the chain of a bucket; blocks first, then evicted ones.
    next: Vec<u32>,
}

impl Contents {
    pub(super) fn new(num_blocks: u32) -> Self {
        assert!(num_blocks < END, "a pool of {num_blocks} blocks");
        // Saturating, because the ids that blocks leave bound both numbers.
        let gone = num_blocks.saturating_mul(GONE_PER_BLOCK).min(END - num_blocks);
        let num_buckets = num_blocks.saturating_mul(2).clamp(1, END - 2);
        let all = num_blocks + gone;
        Self {
            held: vec![EMPTY; to_usize(num_blocks)],
            gone_key: vec![0; to_usize(gone)],
            gone_since: vec![0; to_usize(gone)],
            gone: vec![Packed(0); to_usize(gone)],
            oldest: 0,
            num_gone: 0,
            buckets: (0..num_buckets).map(|bucket| END | bucket).collect(),
            next: vec![NONE; to_usize(all)],
        }
    }

    /// Returns the bytes of host memory.
    #[cfg(test)]
    pub(super) fn host_bytes(&self) -> usize {
        let numbers = [&self.gone_key, &self.gone_since, &self.buckets, &self.next];
        let others = [list_bytes(&self.held), list_bytes(&self.gone)];
        numbers.map(list_bytes).iter().chain(&others).sum()
    }

    /// Returns the number of contents that can be remembered.
    #[cfg(test)]
    pub(super) fn capacity(&self) -> u32 {
        to_u32(self.next.len())
    }

    fn num_blocks(&self) -> u32 {
        to_u32(self.held.len())
    }

    /// Returns the content of a block.
    pub(super) fn held(&self, block: u32) -> Option<Held> {
        Some(self.held[to_usize(block)]).filter(|held| held.turn > 0)
    }
    pub(super) fn held_mut(&mut self, block: u32) -> Option<&mut Held> {
        Some(&mut self.held[to_usize(block)]).filter(|held| held.turn > 0)
    }
    /// Returns the statistics of an evicted content.
    pub(super) fn gone(&self, at: u32) -> Gone {
        let (packed, since) = (self.gone[to_usize(at)], self.gone_since[to_usize(at)]);
        let age = packed.class().map(|class| (class, since));
        Gone { age, uses: packed.uses(), turn: packed.turn() }
    }

    /// Finds the content of this key.
    pub(super) fn find(&self, key: u64) -> Option<Place> {
        let mut at = self.first(self.bucket(key));
        while at & END == 0 {
            if self.key(at) == low(key) {
                let gone = at.checked_sub(self.num_blocks());
                return Some(gone.map_or(Place::Block(at), Place::Gone));
            }
            at = self.next(at);
        }
        None
    }

    /// Inserts new content in a block without any; it can be found unless other content has its
    /// key.
    pub(super) fn insert(&mut self, block: u32, key: u64, new: Held) {
        let is_known = self.find(key).is_some();
        self.held[to_usize(block)] = new;
        if !is_known {
            self.link(block, self.bucket(key));
        }
    }

    /// Removes the content of a block and remembers it. Returns the content that is forgotten for
    /// it: the content evicted longest ago, or the removed content if another one has its key.
    pub(super) fn remove(&mut self, block: u32) -> Option<Gone> {
        let held = self.held(block)?;
        self.held[to_usize(block)] = EMPTY;
        let age = held.class().map(|class| (class, held.since));
        if self.next(block) == NONE {
            return Some(Gone { age, uses: held.uses, turn: held.turn });
        }
        let bucket = self.unlink(block);
        let room = to_u32(self.gone.len());
        let forgotten = (self.num_gone == room).then(|| {
            let oldest = self.gone(self.oldest);
            self.forget(self.oldest);
            oldest
        });
        let at = self.wrap(self.oldest + self.num_gone);
        let (class, since) = age.unzip();
        self.set_gone(at, (held.key, since.unwrap_or(0)), Packed::new(held.uses, held.turn, class));
        self.num_gone += 1;
        self.link(self.num_blocks() + at, bucket);
        forgotten
    }

    /// Forgets an evicted content; the oldest moves to its place, which keeps the others together.
    pub(super) fn forget(&mut self, at: u32) {
        let num_blocks = self.num_blocks();
        self.unlink(num_blocks + at);
        let oldest = self.oldest;
        if at != oldest {
            let bucket = self.unlink(num_blocks + oldest);
            let of = to_usize(oldest);
            self.set_gone(at, (self.gone_key[of], self.gone_since[of]), self.gone[of]);
            self.link(num_blocks + at, bucket);
        }
        self.oldest = self.wrap(oldest + 1);
        self.num_gone -= 1;
    }

    fn set_gone(&mut self, at: u32, (key, since): (u32, u32), packed: Packed) {
        let at = to_usize(at);
        (self.gone_key[at], self.gone_since[at], self.gone[at]) = (key, since, packed);
    }

    /// Returns an index in the ring of evicted contents.
    fn wrap(&self, at: u32) -> u32 {
        at % to_u32(self.gone.len())
    }

    fn key(&self, at: u32) -> u32 {
        match at.checked_sub(self.num_blocks()) {
            None => self.held[to_usize(at)].key,
            Some(gone) => self.gone_key[to_usize(gone)],
        }
    }

    /// Returns the bucket by the high half of a key; the low half is compared.
    fn bucket(&self, key: u64) -> u32 {
        let buckets = u64::from(to_u32(self.buckets.len()));
        u32::try_from((key >> 32).wrapping_mul(buckets) >> 32).unwrap_or(0)
    }
    fn first(&self, bucket: u32) -> u32 {
        self.buckets[to_usize(bucket)]
    }
    fn next(&self, at: u32) -> u32 {
        self.next[to_usize(at)]
    }

    fn link(&mut self, at: u32, bucket: u32) {
        let first = &mut self.buckets[to_usize(bucket)];
        self.next[to_usize(at)] = std::mem::replace(first, at);
    }

    /// Removes a content from its chain; the end of the chain names the bucket.
    fn unlink(&mut self, at: u32) -> u32 {
        let after = self.next(at);
        assert!(after != NONE, "content {at} is found by its name");
        let mut end = after;
        while end & END == 0 {
            end = self.next(end);
        }
        let bucket = end & !END;
        let mut before = self.first(bucket);
        if before == at {
            self.buckets[to_usize(bucket)] = after;
        } else {
            while self.next(before) != at {
                assert!(before & END == 0, "content {at} is in the chain of its bucket");
                before = self.next(before);
            }
            self.next[to_usize(before)] = after;
        }
        self.next[to_usize(at)] = NONE;
        bucket
    }
}

/// Truncates a key to 64 bits, never 0; tests use keys that are not hashes.
pub(super) fn short_key(key: BlockKey) -> u64 {
    let [low, high] = [key.0, key.0 >> 64].map(|half| u64::try_from(half & MASK).unwrap_or(0));
    (low ^ high.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
}

const MASK: u128 = 0xffff_ffff_ffff_ffff;

fn low(key: u64) -> u32 {
    u32::try_from(key & 0xffff_ffff).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn evicted_contents_keep_their_class() {
        for (uses, turn) in [(1, 1), (2, 1), (5, 9), (30, 4), (200, 250)] {
            for is_last in [false, true] {
                let class = rates::class(uses, turn, is_last);
                let packed = Packed::new(uses, turn, Some(class));
                assert_eq!(packed.class(), Some(class), "{uses} uses, turn {turn}");
                assert_eq!((packed.uses(), packed.turn()), (uses.min(31), turn.min(31)));
            }
            assert_eq!(Packed::new(uses, turn, None).class(), None);
        }
    }

    /// Against a list that is searched from end to end.
    #[test]
    fn contents_are_found_by_key_until_they_are_forgotten() {
        let mut contents = Contents::new(3);
        let mut blocks: Vec<Option<u64>> = vec![None; 3];
        let mut gone: Vec<u64> = Vec::new();
        let mut random = 1_u64;
        for _ in 0..5000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let (block, name) = ((random >> 33) % 3, (random >> 40) % 30);
            let (at, key) = (u32::try_from(block).unwrap(), short_key(BlockKey(name.into())));
            if let Some(key) = blocks[usize::try_from(block).unwrap()].take() {
                contents.remove(at);
                gone.push(key);
                // The oldest is forgotten.
                if gone.len() > 12 {
                    gone.remove(0);
                }
            }
            if blocks.contains(&Some(key)) {
                continue;
            }
            if let Some(Place::Gone(place)) = contents.find(key) {
                contents.forget(place);
                let place = gone.iter().position(|other| *other == key).unwrap();
                // The oldest takes its place.
                gone.swap(place, 0);
                gone.remove(0);
            }
            contents.insert(at, key, Held::new((key, None), 1, 1));
            blocks[usize::try_from(block).unwrap()] = Some(key);
            for name in 0..30_u128 {
                let key = short_key(BlockKey(name));
                let held = blocks.iter().position(|other| *other == Some(key));
                match contents.find(key) {
                    Some(Place::Block(at)) => assert_eq!(held, Some(to_usize(at))),
                    Some(Place::Gone(_)) => assert!(gone.contains(&key)),
                    None => assert!(held.is_none() && !gone.contains(&key)),
                }
            }
        }
    }
}
