//! Priorities of the blocks of one sequence.
use crate::eviction::Priority;

/// A range of prompt positions and the priority of its blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_structs, reason = "a literal names each field")]
pub struct RetentionRange {
    /// First position.
    pub begin: u32,
    /// One past the last position; `None` for the rest of the prompt.
    pub end: Option<u32>,
    /// Priority of its blocks.
    pub priority: Priority,
}

/// The priorities of a sequence's blocks: by position in the prompt, and one for generated tokens.
///
/// ```
/// use kv::eviction::{Priority, Retention, RetentionRange};
///
/// let system = Priority { level: 90, duration: None };
/// let range = RetentionRange { begin: 0, end: Some(64), priority: system };
/// let retention = Retention::new(vec![range])?;
/// assert_eq!(retention.priority_at(48, 100), system);
/// assert_eq!(retention.priority_at(64, 100), Priority::default());
/// # Ok::<(), kv::eviction::RetentionError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Retention {
    /// In order, without overlap.
    ranges: Vec<RetentionRange>,
    decode: Option<Priority>,
}

impl Retention {
    /// Checks ranges of prompt positions, given in any order. Positions in no range have the
    /// default priority.
    ///
    /// # Errors
    /// A range that is empty or overlaps another, an open end that is not the last one, a level
    /// above [`Priority::MAX_LEVEL`].
    pub fn new(mut ranges: Vec<RetentionRange>) -> Result<Self, RetentionError> {
        ranges.sort_by_key(|range| range.begin);
        for range in &ranges {
            check_level(range.priority)?;
            if let Some(end) = range.end.filter(|end| *end <= range.begin) {
                return Err(RetentionError::Empty { begin: range.begin, end });
            }
        }
        for (range, next) in ranges.iter().zip(ranges.iter().skip(1)) {
            let Some(end) = range.end else {
                return Err(RetentionError::OpenEnd { begin: range.begin, next: next.begin });
            };
            if end > next.begin {
                return Err(RetentionError::Overlap { end, next: next.begin });
            }
        }
        Ok(Self { ranges, decode: None })
    }

    /// Sets the priority of blocks that begin after the prompt.
    ///
    /// # Errors
    /// A level above [`Priority::MAX_LEVEL`].
    pub fn with_decode(self, priority: Priority) -> Result<Self, RetentionError> {
        check_level(priority)?;
        Ok(Self { decode: Some(priority), ..self })
    }

    /// Returns the ranges, in order.
    pub fn ranges(&self) -> &[RetentionRange] {
        &self.ranges
    }

    /// Returns the priority of blocks that begin after the prompt, if one was set.
    pub fn decode(&self) -> Option<Priority> {
        self.decode
    }

    /// Returns the priority of the block whose first token is at `position`; `prompt_len` in
    /// tokens.
    ///
    /// A range does not apply to a block that begins before it, however much of the block it
    /// covers.
    pub fn priority_at(&self, position: u32, prompt_len: u32) -> Priority {
        if position >= prompt_len {
            return self.decode.unwrap_or_default();
        }
        let behind = self.ranges.partition_point(|range| range.begin <= position);
        let range = behind.checked_sub(1).and_then(|at| self.ranges.get(at));
        range
            .filter(|range| range.end.is_none_or(|end| position < end))
            .map_or_else(Priority::default, |range| range.priority)
    }
}

fn check_level(Priority { level, .. }: Priority) -> Result<(), RetentionError> {
    if level > Priority::MAX_LEVEL { Err(RetentionError::Level { level }) } else { Ok(()) }
}

/// Ranges of a [`Retention`] that contradict each other or themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RetentionError {
    /// A range holds no position.
    #[error("the range {begin}..{end} is empty")]
    Empty {
        /// Its first position.
        begin: u32,
        /// Its end.
        end: u32,
    },
    /// A range without an end is followed by another.
    #[error("the range from {begin} on has no end, but one from {next} on follows")]
    OpenEnd {
        /// Beginning of the open range.
        begin: u32,
        /// Beginning of the next range.
        next: u32,
    },
    /// Two ranges hold the same position.
    #[error("a range ends at {end}, the next one begins at {next}")]
    Overlap {
        /// The end of the first.
        end: u32,
        /// Beginning of the second range.
        next: u32,
    },
    /// A level is out of range.
    #[error("level {level} is above {}", Priority::MAX_LEVEL)]
    Level {
        /// The level given.
        level: u8,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(begin: u32, end: Option<u32>, level: u8) -> RetentionRange {
        RetentionRange { begin, end, priority: Priority { level, duration: None } }
    }

    #[test]
    fn a_block_has_the_priority_of_its_first_token() {
        let levels = |ranges: Vec<RetentionRange>, block_size, prompt_len| {
            let retention = Retention::new(ranges).unwrap();
            let at = |position| retention.priority_at(position, prompt_len).level;
            (0..prompt_len).step_by(block_size).map(at).collect::<Vec<_>>()
        };
        assert_eq!(levels(vec![range(0, Some(1), 80), range(1, Some(2), 5)], 32, 64), [80, 35]);
        assert_eq!(levels(vec![range(127, Some(193), 80)], 64, 320), [35, 35, 80, 80, 35]);
        assert_eq!(levels(vec![range(64, None, 9), range(0, Some(32), 1)], 32, 128), [1, 35, 9, 9]);
    }

    #[test]
    fn generated_tokens_have_their_own_priority() {
        let low = Priority { level: 3, duration: Some(std::time::Duration::from_secs(1)) };
        let retention = Retention::new(vec![range(0, None, 70)]).unwrap();
        assert_eq!(retention.priority_at(16, 16), Priority::default());
        let retention = retention.with_decode(low).unwrap();
        assert_eq!(retention.decode(), Some(low));
        assert_eq!([15, 16].map(|at| retention.priority_at(at, 16).level), [70, 3]);
        assert_eq!(Retention::default().priority_at(0, 1), Priority::default());
    }

    #[test]
    fn ranges_that_contradict_are_refused() {
        let new = |ranges: &[RetentionRange]| Retention::new(ranges.to_vec()).unwrap_err();
        assert_eq!(new(&[range(4, Some(4), 1)]), RetentionError::Empty { begin: 4, end: 4 });
        assert_eq!(new(&[range(4, Some(2), 1)]), RetentionError::Empty { begin: 4, end: 2 });
        let open = [range(8, Some(9), 1), range(0, None, 1)];
        assert_eq!(new(&open), RetentionError::OpenEnd { begin: 0, next: 8 });
        let overlap = [range(0, Some(9), 1), range(8, Some(16), 1)];
        assert_eq!(new(&overlap), RetentionError::Overlap { end: 9, next: 8 });
        assert_eq!(new(&[range(0, None, 101)]), RetentionError::Level { level: 101 });
        let bad = Retention::default().with_decode(Priority { level: 200, duration: None });
        assert_eq!(bad, Err(RetentionError::Level { level: 200 }));
    }
}
