//! Features of content when a sequence releases it, each in a few grades.
use crate::eviction::Return;
use crate::eviction::reuse_rate::contents::Content;

/// The grade of each feature, in the order in which their effects are estimated: turn, uses,
/// whether the sequence ends with it, blocks of the request that were unknown, different contents
/// that followed, requests since the last known block was used, and what the caller said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Features(pub(super) [u8; NUM_FEATURES]);

pub(super) const NUM_FEATURES: usize = 7;
/// Grades of a feature at most.
pub(super) const NUM_GRADES: usize = 16;
const LAST: usize = 2;
const FOLLOWED: usize = 4;
const HINT: usize = 6;

/// Uses at which the grades begin.
const USES: [u16; 11] = [2, 3, 4, 6, 10, 21, 45, 95, 200, 450, 1000];

/// Contents that follow in one conversation: the partial end of a turn, and the full block that
/// has its place in the next turn. What more contents follow is shared.
const FOLLOWERS: u8 = 2;

/// Facts about the request that releases a content, the same for all its blocks but the turn.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Request {
    /// The largest turn of the content and those after it.
    pub(super) turn: u8,
    /// Blocks that were unknown.
    pub(super) run: u8,
    /// The grade of the requests since the last known block was used: see [`gap`].
    pub(super) gap: u8,
    /// The grade of what the caller said: see [`hint`].
    pub(super) hint: u8,
}

impl Features {
    pub(super) fn new(content: Content, is_last: bool, of: Request) -> Self {
        let [turn, run] = [of.turn, of.run].map(u16::from);
        let is_shared = content.continuations > FOLLOWERS;
        Self([
            grade(&[2, 3, 6], turn),
            grade(&USES, content.uses),
            is_last.into(),
            grade(&[1, 2, 4, 8, 16, 32], run),
            content.continuations,
            of.gap,
            if is_shared { 0 } else { of.hint },
        ])
    }

    /// Returns the features of such content inside of a sequence, where some content follows it, if
    /// a sequence ends with it.
    pub(super) fn inside(mut self) -> Option<Self> {
        let is_last = std::mem::take(&mut self.0[LAST]) > 0;
        self.0[FOLLOWED] = self.0[FOLLOWED].max(1);
        is_last.then_some(self)
    }

    /// Returns the number of the shape by age: 0 for all contents, others for an expected time.
    pub(super) fn shape(self) -> usize {
        usize::from(self.0[HINT].saturating_sub(WITHIN - 1))
    }
}

/// Shapes of the chance of a use by age.
pub(super) const NUM_SHAPES: usize = 13;

/// The first grade of a hint with a time; each is an octave of seconds.
const WITHIN: u8 = 4;

/// Grades what the caller said of the return.
pub(super) fn hint(hint: Option<Return>) -> u8 {
    match hint {
        None => 0,
        Some(Return::Ended) => 1,
        Some(Return::Idle) => 2,
        Some(Return::ToolCall) => 3,
        Some(Return::Within(time)) => {
            let octave = u8::try_from(time.as_secs().max(1).ilog2()).unwrap_or(u8::MAX);
            WITHIN + octave.min(11)
        }
    }
}

/// Grades the number of requests since a block was used; 0 is for none.
pub(super) fn gap(requests: u32) -> u8 {
    grade(&[8, 32, 128, 512, 2048], u16::try_from(requests).unwrap_or(u16::MAX)) + 1
}

/// Returns how many of the ascending bounds a number reaches.
fn grade(bounds: &[u16], number: u16) -> u8 {
    u8::try_from(bounds.partition_point(|bound| *bound <= number)).unwrap_or(u8::MAX)
}
