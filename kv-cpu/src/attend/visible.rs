//! The keys that queries see: causal, sliding window, sink tokens.
use kv_core::plan::{AttentionOptions, PlannedSequence};

/// Positions that some neighbouring queries see: sink tokens `sink_tokens.0..sink_tokens.1`, then
/// `window.0..window.1`. At least one of the queries sees each position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Visible {
    sink_tokens: (u32, u32),
    window: (u32, u32),
}

impl Visible {
    /// Returns the positions that queries `q_begin..q_end` see.
    pub(super) fn of(
        options: &AttentionOptions<'_>,
        sequence: &PlannedSequence,
        (q_begin, q_end): (u32, u32),
    ) -> Self {
        let Some(last) = q_end.checked_sub(1).filter(|last| q_begin <= *last) else {
            return Self { sink_tokens: (0, 0), window: (0, 0) };
        };
        // Bounds never decrease from one query to the next and windows of neighbours touch, so the
        // first and the last query determine the union.
        let (begin, _) = options.visible(sequence, q_begin);
        let (_, end) = options.visible(sequence, last);
        let sink_tokens = options.visible_sink_tokens(sequence, last).min(begin);
        Self { sink_tokens: (0, sink_tokens), window: (begin, end.max(begin)) }
    }

    /// The positions at `begin..end`.
    pub(super) fn within(self, begin: u32, end: u32) -> Self {
        let cut = |range: (u32, u32)| {
            let first = range.0.max(begin);
            (first, range.1.min(end).max(first))
        };
        Self { sink_tokens: cut(self.sink_tokens), window: cut(self.window) }
    }

    /// Returns whether any position is at `begin..end`.
    pub(super) fn intersects(self, begin: u32, end: u32) -> bool {
        self.within(begin, end).num_keys() > 0
    }

    /// Returns the number of positions.
    pub(super) fn num_keys(self) -> u32 {
        let len = |(begin, end): (u32, u32)| end.saturating_sub(begin);
        len(self.sink_tokens) + len(self.window)
    }

    /// Returns the first run of positions from `from` on, as begin and end; empty if none is left.
    pub(super) fn seen_from(self, from: u32) -> (u32, u32) {
        if from < self.sink_tokens.1 {
            return (from.max(self.sink_tokens.0), self.sink_tokens.1);
        }
        (from.max(self.window.0).min(self.window.1), self.window.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: Visible = Visible { sink_tokens: (0, 4), window: (100, 130) };

    #[test]
    fn runs_jump_from_the_sink_tokens_to_the_window() {
        assert_eq!(BOTH.seen_from(0), (0, 4));
        assert_eq!(BOTH.seen_from(3), (3, 4));
        assert_eq!(BOTH.seen_from(4), (100, 130));
        assert_eq!(BOTH.seen_from(128), (128, 130));
        assert_eq!(BOTH.seen_from(130), (130, 130));
        assert_eq!(BOTH.seen_from(500), (130, 130));
    }

    #[test]
    fn a_part_has_the_positions_inside_it() {
        assert_eq!(BOTH.num_keys(), 34);
        assert_eq!(BOTH.within(2, 110), Visible { sink_tokens: (2, 4), window: (100, 110) });
        assert_eq!(BOTH.within(110, 200).seen_from(110), (110, 130));
        assert_eq!(BOTH.within(4, 100).num_keys(), 0);
        assert!(BOTH.intersects(0, 1) && BOTH.intersects(99, 101) && BOTH.intersects(129, 500));
        assert!(!BOTH.intersects(4, 100) && !BOTH.intersects(130, 131));
        let (from, end) = BOTH.within(130, 200).seen_from(130);
        assert!(from >= end, "nothing is left after the window");
    }
}
