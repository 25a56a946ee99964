//! Rows of K or V where they lie in memory.
#![expect(
    clippy::arithmetic_side_effects,
    reason = "offsets inside of a slice, which `new` asserts"
)]
use std::marker::PhantomData;
use std::ops::Range;

use crate::layout::RowLayout;

/// Rows of one head at one stride: row `i` begins `i * stride` bytes behind the first.
#[derive(Debug, Clone, Copy)]
pub struct KeyRows<'a> {
    first: *const u8,
    stride: usize,
    count: usize,
    layout: &'a RowLayout,
    memory: PhantomData<&'a [u8]>,
}

impl<'a> KeyRows<'a> {
    /// The first `count` rows of `layout` in `bytes`, `stride` bytes apart.
    ///
    /// # Panics
    /// When the last row ends behind `bytes`.
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

    /// No rows.
    pub fn empty(layout: &'a RowLayout) -> Self {
        Self::new(&[], 0, 0, layout)
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.count
    }
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }
    /// Layout of each row.
    pub fn layout(&self) -> &'a RowLayout {
        self.layout
    }
    /// Bytes from a row to the next.
    pub(crate) fn stride(&self) -> usize {
        self.stride
    }

    /// Some of the rows.
    ///
    /// # Panics
    /// When the range ends behind the last row.
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

    /// Bytes of row `index`.
    ///
    /// # Panics
    /// When there is no such row.
    pub fn row(&self, index: usize) -> &'a [u8] {
        assert!(index < self.count, "row {index} of {}", self.count);
        // SAFETY: row `index` lies inside the slice of `'a` that `new` got.
        unsafe { std::slice::from_raw_parts(self.at(index), self.layout.bytes()) }
    }
}

/// Rows of several heads at one stride: row `i` of head `h` begins `h * per_head + i * stride` bytes
/// behind the first.
#[derive(Debug, Clone, Copy)]
pub struct HeadRows<'a> {
    rows: KeyRows<'a>,
    per_head: usize,
    heads: usize,
}

impl<'a> HeadRows<'a> {
    /// The first `count` rows of each of `heads` in `bytes`; strides are those from a row and from a
    /// head to the next.
    ///
    /// # Panics
    /// When the last row ends behind `bytes`.
    pub fn new(
        bytes: &'a [u8],
        (stride, per_head): (usize, usize),
        (count, heads): (usize, usize),
        layout: &'a RowLayout,
    ) -> Self {
        let rows = KeyRows::new(bytes, stride, count, layout);
        let fits = heads.checked_sub(1).is_none_or(|last| {
            let begin = last.checked_mul(per_head);
            begin.and_then(|begin| bytes.get(begin..)).is_some_and(|bytes| {
                let _checked = KeyRows::new(bytes, stride, count, layout);
                true
            })
        });
        assert!(fits, "rows of {heads} heads lie inside their memory");
        Self { rows, per_head, heads }
    }

    /// Number of heads.
    pub fn heads(&self) -> usize {
        self.heads
    }
    /// Number of rows of each.
    pub fn len(&self) -> usize {
        self.rows.count
    }
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
    /// Layout of each row.
    pub fn layout(&self) -> &'a RowLayout {
        self.rows.layout
    }

    /// Some rows of a head.
    ///
    /// # Panics
    /// When there is no such head, or the range ends behind its last row.
    #[inline]
    pub fn rows(&self, head: usize, range: Range<usize>) -> KeyRows<'a> {
        assert!(head < self.heads, "head {head} of {}", self.heads);
        let rows = self.rows.slice(range);
        KeyRows { first: rows.first.wrapping_add(head * self.per_head), ..rows }
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
    fn rows_of_heads_lie_at_both_strides() {
        let bytes: Vec<u8> = (0..40).collect();
        let layout = RowLayout::plain(Element::F16, 2);
        let heads = HeadRows::new(&bytes, (4, 16), (3, 2), &layout);
        assert_eq!((heads.heads(), heads.len(), heads.is_empty()), (2, 3, false));
        assert_eq!(heads.rows(1, 1..3).row(1), &bytes[24..28]);
    }

    #[test]
    #[should_panic(expected = "lie inside their memory")]
    fn a_head_behind_the_memory_is_refused() {
        let layout = RowLayout::plain(Element::F16, 2);
        let _rows = HeadRows::new(&[0; 27], (4, 16), (3, 2), &layout);
    }

    #[test]
    #[should_panic(expected = "rows lie inside their memory")]
    fn a_row_behind_the_memory_is_refused() {
        let layout = RowLayout::plain(Element::F32, 4);
        let _rows = KeyRows::new(&[0; 47], 16, 3, &layout);
    }
}
