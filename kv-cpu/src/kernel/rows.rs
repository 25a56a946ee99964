//! The rows of a tile: where each begins.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::inline_always,
    reason = "indices are those of a tile, as `push` asserts; both lengths are compiled apart"
)]
use std::marker::PhantomData;

use super::TILE;
use super::matrix::BLOCK;

/// Rows of memory, [`TILE`] at most, each of so many bytes.
#[derive(Debug, Clone)]
pub(crate) struct TileRows<'a> {
    at: [*const u8; TILE],
    len: usize,
    bytes: usize,
    /// By block of tokens: bytes from each row to the next; 0 where they are not from one run.
    strides: [usize; TILE / BLOCK],
    memory: PhantomData<&'a [u8]>,
}

impl<'a> TileRows<'a> {
    /// None yet.
    pub(crate) const fn new() -> Self {
        Self {
            at: [std::ptr::null(); TILE],
            len: 0,
            bytes: 0,
            strides: [0; TILE / BLOCK],
            memory: PhantomData,
        }
    }

    /// Forgets its rows; those to come have so many bytes.
    pub(crate) fn clear(&mut self, bytes: usize) {
        (self.len, self.bytes, self.strides) = (0, bytes, [0; TILE / BLOCK]);
    }

    /// Adds `count` rows, the first at the begin of a run, the next `stride` bytes behind it.
    ///
    /// # Panics
    /// When they end behind the run, or are more than a tile has.
    #[inline]
    pub(crate) fn push(&mut self, run: &'a [u8], stride: usize, count: usize) {
        let (begin, end) = (self.len, self.len + count);
        let fits = count.checked_sub(1).is_none_or(|last| last * stride + self.bytes <= run.len());
        assert!(fits && end <= TILE, "rows of a tile lie inside their run");
        let rows = &mut self.at[begin..end];
        // A block has a length that the compiler knows.
        match rows.as_mut_array::<BLOCK>() {
            Some(block) => fill(block, run.as_ptr(), stride),
            None => fill(rows, run.as_ptr(), stride),
        }
        let blocks = begin.div_ceil(BLOCK)..end / BLOCK;
        if blocks.start < blocks.end {
            self.strides[blocks].fill(stride);
        }
        self.len = end;
    }

    /// Rows that are anywhere.
    pub(crate) fn of(rows: impl IntoIterator<Item = &'a [u8]>, bytes: usize) -> Self {
        let mut all = Self::new();
        all.clear(bytes);
        for row in rows {
            all.push(row, bytes, 1);
        }
        all
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Bytes that may be read of each row.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where the rows begin.
    pub(super) fn at(&self) -> &[*const u8] {
        &self.at[..self.len]
    }

    /// The first row of a block of [`BLOCK`] tokens, and bytes from one to the next, where the
    /// block is whole and from one run.
    pub(super) fn even(&self, block: usize) -> Option<(*const u8, usize)> {
        let stride = self.strides[block];
        (stride > 0).then(|| (self.at[block * BLOCK], stride))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &'a [u8]> + '_ {
        // SAFETY: `push` asserted that the row is inside a slice that lives as long.
        self.at().iter().map(|at| unsafe { std::slice::from_raw_parts(*at, self.bytes) })
    }
}

/// Writes addresses, `stride` bytes from each to the next.
#[inline(always)]
fn fill(to: &mut [*const u8], first: *const u8, stride: usize) {
    let mut next = first;
    for at in to {
        *at = next;
        next = next.wrapping_add(stride);
    }
}
