//! The content spans of a prompt, found by position.
use crate::num::recycle;
use crate::reuse::{BlockContent, ContentSpan};

/// Content spans in the order in which they were given, which may be any, with bounds by which the
/// parts of a block are found without looking at all of them.
#[derive(Debug, Clone, Default)]
pub(crate) struct ContentSpans {
    list: Vec<ContentSpan>,
    /// The last end of the spans up to each one: it never decreases.
    ends: Vec<u32>,
    /// The first begin of the spans from each one on: it never decreases.
    begins: Vec<u32>,
}

impl ContentSpans {
    pub(crate) fn new(spans: &[ContentSpan]) -> Self {
        let mut new = Self::default();
        new.set(spans);
        new
    }

    /// Replaces the spans. The memory stays for the next ones.
    pub(crate) fn set(&mut self, spans: &[ContentSpan]) {
        self.clear();
        self.list.extend_from_slice(spans);
        self.ends.extend(spans.iter().scan(0, |last, span| {
            *last = end(span).max(*last);
            Some(*last)
        }));
        self.begins.extend(spans.iter().rev().scan(u32::MAX, |first, span| {
            *first = span.begin.min(*first);
            Some(*first)
        }));
        self.begins.reverse();
    }

    pub(crate) fn clear(&mut self) {
        recycle(&mut self.list);
        recycle(&mut self.ends);
        recycle(&mut self.begins);
    }

    pub(crate) fn list(&self) -> &[ContentSpan] {
        &self.list
    }
    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Does what [`BlockContent::cut`] does with all spans.
    pub(crate) fn cut(&self, (begin, end): (u32, u32), out: &mut Vec<BlockContent>) {
        // Those before end too early, and those after begin too late.
        let first = self.ends.partition_point(|last| *last <= begin);
        let count = self.begins.partition_point(|first| *first < end);
        let spans = self.list.get(first..count).unwrap_or_default(); // none if reversed
        BlockContent::cut(spans, (begin, end), out);
    }
}

/// Returns the end of a caller's span, which may go on past every block.
fn end(span: &ContentSpan) -> u32 {
    span.begin.saturating_add(span.len)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn span() -> impl Strategy<Value = ContentSpan> {
        (0..40_u32, 0..9_u32, 0..3_u128).prop_map(|(begin, len, id)| ContentSpan { begin, len, id })
    }

    proptest! {
        /// Spans in any order, that overlap or are empty too.
        #[test]
        fn the_parts_of_a_block_are_those_of_a_search_of_all(
            mut spans in prop::collection::vec(span(), 0..12),
            is_sorted in any::<bool>(),
        ) {
            if is_sorted {
                spans.sort_by_key(|span| span.begin);
            }
            let found = ContentSpans::new(&spans);
            let (mut parts, mut expected) = (Vec::new(), Vec::new());
            for begin in 0..50 {
                for len in 0..10 {
                    found.cut((begin, begin + len), &mut parts);
                    BlockContent::cut(&spans, (begin, begin + len), &mut expected);
                    prop_assert_eq!(&parts, &expected);
                }
            }
        }
    }

    /// Spans one after another, as the pictures of a prompt are: a block looks at its own.
    #[test]
    fn a_block_looks_at_its_own_spans() {
        let spans: Vec<_> =
            (0..1000).map(|n| ContentSpan { begin: 10 * n, len: 8, id: n.into() }).collect();
        let found = ContentSpans::new(&spans);
        let first = found.ends.partition_point(|last| *last <= 5000);
        let count = found.begins.partition_point(|first| *first < 5016);
        assert_eq!((first, count), (500, 502));
    }
}
