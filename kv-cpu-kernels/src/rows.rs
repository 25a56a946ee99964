//! Rows of K or V where they lie in memory.
use std::marker::PhantomData;
use std::ops::Range;

use crate::layout::RowLayout;

/// Rows of one head at one stride: row `i` begins `i * stride` bytes after the first.
#[derive(Debug, Clone, Copy)]
pub struct KeyRows<'a> {
    first: *const u8,
    stride: usize,
    count: usize,
    layout: &'a RowLayout,
    memory: PhantomData<&'a [u8]>,
}

impl<'a> KeyRows<'a> {
    /// Returns the first `count` rows of `layout` in `bytes`, `stride` bytes apart.
    ///
    /// # Panics
    /// If the last row ends after `bytes`.
    #[inline]
    pub fn new(bytes: &'a [u8], stride: usize, count: usize, layout: &'a RowLayout) -> Self {
        let fits = count.checked_sub(1).is_none_or(|last| {
            let begin = last.checked_mul(stride);
            let end = begin.and_then(|begin| begin.checked_add(layout.bytes()));
            end.is_some_and(|end| end <= bytes.len())
        });
        assert!(fits, "{count} rows lie inside their memory");
        Self { first: bytes.as_ptr(), stride, count, layout, memory: PhantomData }
    }

    /// Creates a run without rows.
    pub fn empty(layout: &'a RowLayout) -> Self {
        Self::new(&[], 0, 0, layout)
    }

    /// Returns the number of rows.
    pub fn len(&self) -> usize {
        self.count
    }
    /// Returns whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }
    /// Returns the layout of each row.
    pub fn layout(&self) -> &'a RowLayout {
        self.layout
    }
    /// Bytes from a row to the next.
    pub(crate) fn stride(&self) -> usize {
        self.stride
    }

    /// Returns some of the rows.
    ///
    /// # Panics
    /// If the range ends after the last row.
    #[inline]
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.count, "a range of the rows");
        let first = self.first.wrapping_add(range.start * self.stride);
        Self { first, count: range.end - range.start, ..*self }
    }

    /// Address of row `index`, which is readable for the bytes of the layout if the row exists.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "an addition inside of kernels")]
    pub(crate) fn at(&self, index: usize) -> *const u8 {
        self.first.wrapping_add(index * self.stride)
    }

    /// Returns the bytes of row `index`.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn row(&self, index: usize) -> &'a [u8] {
        assert!(index < self.count, "row {index} of {}", self.count);
        // SAFETY: row `index` lies inside the slice of `'a` that `new` got.
        unsafe { std::slice::from_raw_parts(self.at(index), self.layout.bytes()) }
    }
}

/// Rows of K or V of a tile: runs of one layout, one after another; never empty.
#[derive(Debug, Clone, Copy)]
pub struct TileRows<'a> {
    runs: &'a [KeyRows<'a>],
    layout: &'a RowLayout,
    len: usize,
}

impl<'a> TileRows<'a> {
    /// Returns the rows of some runs.
    ///
    /// # Panics
    /// If the runs have no row, or several layouts.
    #[inline]
    pub fn new(runs: &'a [KeyRows<'a>]) -> Self {
        let layout = runs.first().map(KeyRows::layout);
        assert!(layout.is_some(), "a tile has rows");
        #[expect(clippy::unwrap_used, reason = "asserted")]
        let layout = layout.unwrap();
        let is_alike = |other: &RowLayout| std::ptr::eq(other, layout) || other == layout;
        let mut len = 0;
        for run in runs {
            assert!(is_alike(run.layout), "rows of one layout");
            len += run.count;
        }
        assert!(len > 0, "a tile has rows");
        Self { runs, layout, len }
    }
    /// Returns the rows of one run.
    ///
    /// # Panics
    /// If it is empty.
    #[inline]
    pub fn of_run(run: &'a KeyRows<'a>) -> Self {
        Self::new(std::slice::from_ref(run))
    }

    /// Returns the number of rows, at least one.
    #[expect(clippy::len_without_is_empty, reason = "a tile is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }
    /// Returns the layout of each row.
    pub fn layout(&self) -> &'a RowLayout {
        self.layout
    }
    /// Returns the runs.
    pub fn runs(&self) -> &'a [KeyRows<'a>] {
        self.runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Element;

    #[test]
    fn rows_lie_at_their_stride() {
        let bytes: Vec<u8> = (0..40).collect();
        let layout = RowLayout::plain(Element::F16, 4);
        let rows = KeyRows::new(&bytes, 10, 4, &layout);
        assert_eq!((rows.len(), rows.row(3)), (4, &bytes[30..38]));
        let middle = rows.slice(1..3);
        assert_eq!((middle.len(), middle.row(1)), (2, &bytes[20..28]));
        assert!(rows.slice(4..4).is_empty() && KeyRows::empty(&layout).is_empty());
    }

    #[test]
    fn a_tile_counts_the_rows_of_its_runs() {
        let bytes = [0; 40];
        let layout = RowLayout::plain(Element::F16, 2);
        let runs = [3, 0, 2].map(|count| KeyRows::new(&bytes, 8, count, &layout));
        let tile = TileRows::new(&runs);
        assert_eq!((tile.len(), tile.runs().len(), tile.layout()), (5, 3, &layout));
        assert_eq!(TileRows::of_run(&runs[2]).len(), 2);
    }

    #[test]
    #[should_panic(expected = "a tile has rows")]
    fn an_empty_tile_is_refused() {
        let layout = RowLayout::plain(Element::F16, 2);
        let _tile = TileRows::new(&[KeyRows::empty(&layout); 2]);
    }

    #[test]
    #[should_panic(expected = "rows of one layout")]
    fn rows_of_two_layouts_are_refused() {
        let layouts = [2, 4].map(|dim| RowLayout::plain(Element::F16, dim));
        let runs = [0, 1].map(|i| KeyRows::new(&[0; 8], 8, 1, &layouts[i]));
        let _tile = TileRows::new(&runs);
    }

    #[test]
    #[should_panic(expected = "rows lie inside their memory")]
    fn a_row_after_the_memory_is_refused() {
        let layout = RowLayout::plain(Element::F32, 4);
        let _rows = KeyRows::new(&[0; 47], 16, 3, &layout);
    }
}
