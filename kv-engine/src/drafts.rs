//! Draft tokens, proposed from the text itself.
//!
//! # Source
//! Prompt lookup decoding (Saxena 2023): the tokens that followed the last n-gram when it occurred
//! before are likely to follow again. Names, quotations and code repeat; elsewhere little is lost.

use crate::num::to_usize;

/// Longest n-gram that is searched.
const NGRAM_MAX: usize = 4;

/// Returns at most `max` tokens that may follow `tokens`: the continuation of the latest earlier
/// occurrence of the longest suffix that has one. An occurrence near the end continues with the
/// drafts themselves, so that a repetition is drafted to any length.
pub(crate) fn propose(tokens: &[u32], max: u32) -> Vec<u32> {
    let Some(from) = follows(tokens).filter(|_| max > 0) else {
        return Vec::new();
    };
    let mut drafts = Vec::new();
    for at in from..from + to_usize(max) {
        let next = match at.checked_sub(tokens.len()) {
            None => tokens[at],
            Some(own) => drafts[own],
        };
        drafts.push(next);
    }
    drafts
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

    #[test]
    fn the_longest_and_latest_suffix_decides() {
        assert_eq!(propose(&[1, 2, 3, 9, 2, 3], 2), [9, 2]);
        // 3 came last before a 5, but 2 3 came before a 4.
        assert_eq!(propose(&[2, 3, 4, 3, 5, 2, 3], 1), [4]);
        assert_eq!(propose(&[3, 4, 3, 5, 3], 1), [5]);
        // Four tokens of a suffix of five are considered.
        assert_eq!(propose(&[1, 2, 3, 4, 5, 8, 0, 2, 3, 4, 5, 9, 1, 2, 3, 4, 5], 1), [9]);
    }

    #[test]
    fn a_repetition_is_continued() {
        assert_eq!(propose(&[7, 7], 4), [7; 4]);
        assert_eq!(propose(&[5, 1, 2, 1, 2], 5), [1, 2, 1, 2, 1]);
    }

    #[test]
    fn text_without_repetition_has_no_drafts() {
        for tokens in [&[][..], &[1], &[1, 2, 3]] {
            assert!(propose(tokens, 4).is_empty(), "{tokens:?}");
        }
        assert!(propose(&[7, 7], 0).is_empty());
    }
}
