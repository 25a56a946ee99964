//! Draft tokens, proposed from the text itself.
//!
//! # Source
//! Prompt lookup decoding (Saxena 2023): the tokens that followed the last n-gram when it occurred
//! before are likely to follow again. Names, quotations and code repeat; elsewhere little is lost.

/// Longest n-gram that is searched.
const NGRAM_MAX: usize = 4;

/// Appends at most `max` tokens to `drafts` that may follow `tokens`: those that followed the
/// latest earlier occurrence of its longest suffix that has one. An occurrence near the end
/// continues with the drafts themselves, so that a repetition is drafted to any length.
pub(super) fn propose(tokens: &[u32], max: usize, drafts: &mut Vec<u32>) {
    let Some(mut from) = follows(tokens) else {
        return;
    };
    let first = drafts.len();
    for _ in 0..max {
        let own = from.checked_sub(tokens.len()).map(|at| first.saturating_add(at));
        let next = match own {
            None => tokens.get(from),
            Some(own) => drafts.get(own),
        };
        let Some(next) = next.copied() else {
            return;
        };
        drafts.push(next);
        from = from.saturating_add(1);
    }
}

/// Returns the index after the occurrence.
fn follows(tokens: &[u32]) -> Option<usize> {
    let before = tokens.len().checked_sub(1)?;
    let earlier = tokens.get(..before)?;
    (1..=NGRAM_MAX.min(before)).rev().find_map(|n| {
        let suffix = tokens.get(tokens.len().checked_sub(n)?..)?;
        let at = earlier.windows(n).rposition(|run| run == suffix)?;
        at.checked_add(n)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drafts(tokens: &[u32], max: usize) -> Vec<u32> {
        let mut drafts = vec![77];
        propose(tokens, max, &mut drafts);
        assert_eq!(drafts.remove(0), 77, "what is there stays");
        drafts
    }

    #[test]
    fn the_longest_and_latest_suffix_decides() {
        assert_eq!(drafts(&[1, 2, 3, 9, 2, 3], 2), [9, 2]);
        // 3 came last before a 5, but 2 3 came before a 4.
        assert_eq!(drafts(&[2, 3, 4, 3, 5, 2, 3], 1), [4]);
        assert_eq!(drafts(&[3, 4, 3, 5, 3], 1), [5]);
        // Four tokens of a suffix of five are considered.
        assert_eq!(drafts(&[1, 2, 3, 4, 5, 8, 0, 2, 3, 4, 5, 9, 1, 2, 3, 4, 5], 1), [9]);
    }

    #[test]
    fn a_repetition_is_continued() {
        assert_eq!(drafts(&[7, 7], 4), [7; 4]);
        assert_eq!(drafts(&[5, 1, 2, 1, 2], 5), [1, 2, 1, 2, 1]);
    }

    #[test]
    fn text_without_repetition_has_no_drafts() {
        for tokens in [&[][..], &[1], &[1, 2, 3]] {
            assert!(drafts(tokens, 4).is_empty(), "{tokens:?}");
        }
        assert!(drafts(&[7, 7], 0).is_empty());
    }
}
