//! Counts of what happened in lives, so that nobody takes lives for a test of what they never do.
use std::fmt;

macro_rules! happenings {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What can happen in a life.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum Happened {
            $($(#[$doc])* $name,)*
        }
        impl Happened {
            /// Everything that can happen.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];
        }
    };
}

happenings! {
    /// An operation, the refused ones included.
    Operated,
    /// A start was refused for want of the blocks it reserves.
    RefusedStart,
    /// A step was refused for want of blocks.
    RefusedStep,
    /// A sequence was refused for want of blocks that came late to a step.
    RefusedLate,
    /// A start or a fork was refused because there are enough sequences.
    RefusedSequence,
    /// A start was refused because its prompt or its reserve is too long.
    RefusedLength,
    /// A truncation was refused because what the next token sees has left a window.
    RefusedWindow,
    /// A token was taken over by a sequence that began.
    Reused,
    /// Of these, by a sequence that began in a step.
    ReusedInStep,
    /// Of these, in an unfull block.
    ReusedPart,
    /// A sequence took over less than is there, by its backoff.
    BackedOff,
    /// As that, of groups of which one has a window.
    BackedOffWindow,
    /// A block was given up for another one.
    Evicted,
    /// A block was given up while others of a higher level could have been.
    EvictedByLevel,
    /// A level ran out.
    LevelRanOut,
    /// Time passed.
    ClockStep,
    /// A sequence began with priorities of its own.
    Retained,
    /// A step was dropped.
    Dropped,
    /// A step was committed in part.
    AcceptedPart,
    /// A sequence was forked.
    Forked,
    /// A sequence became shorter.
    Truncated,
    /// A sequence was preempted.
    Preempted,
    /// A prompt was computed again, and nothing more was cached.
    Repeated,
    /// A prefix was pinned that is cached.
    Pinned,
    /// Something cached was forgotten.
    Forgotten,
    /// A reset gave everything up.
    Reset,
    /// The device failed when a step began.
    FailedBegin,
    /// The device failed when a sequence joined a step.
    FailedJoin,
    /// The device failed in a write of a step that went on.
    FailedWrite,
    /// The device failed in a commit.
    FailedCommit,
    /// The device failed in a start.
    FailedStart,
    /// The device failed when blocks were wiped that somebody let go.
    FailedWipe,
    /// A whole prompt was said to fit and was computed, chunk by chunk.
    FitWhole,
    /// A whole prompt was said not to fit, and its first chunk did.
    UnfitWhole,
    /// Constants were exchanged while sequences had tokens.
    Exchanged,
    /// As that, with a window whose blocks the same sequence uses again.
    ExchangedWrapped,
    /// As that, with blocks that left a window and that another sequence holds.
    ExchangedTakenOver,
    /// As that, with blocks that several sequences hold.
    ExchangedShared,
    /// An exchange of constants was refused for a sequence that was cut inside codes.
    RefusedExchange,
    /// The device failed when constants were exchanged.
    FailedExchange,
    /// The device failed then, and at putting the old bytes back.
    FailedRestore,
    /// A step was leaked.
    Leaked,
    /// A step brought queries alone.
    Queried,
    /// A layer got memory when sequences had tokens.
    AddedLayer,
    /// A sequence with a window went on for many tokens.
    Wandered,
    /// A sequence was cut back by more than a token where windows have slack.
    CutIntoSlack,
    /// A life with rows of 16 bits.
    LivedIn16Bits,
    /// A life with quantised rows.
    LivedQuantised,
    /// A life with a tail in 16 bits.
    LivedWithTail,
    /// A life with a full-precision prefix.
    LivedWithFullPrecisionPrefix,
    /// A life with a window and codes.
    LivedQuantisedWindow,
    /// A life with layers on demand.
    LivedOnDemand,
}

/// What happened in one life, or in several.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Lived {
    counts: [u64; Happened::ALL.len()],
}

impl Default for Lived {
    fn default() -> Self {
        Self { counts: [0; Happened::ALL.len()] }
    }
}

impl Lived {
    /// How often it happened.
    pub fn count(&self, what: Happened) -> u64 {
        self.counts[what as usize]
    }

    /// Adds another life.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        self.counts.iter_mut().zip(other.counts).for_each(|(count, more)| *count += more);
        self
    }

    /// Operations refused for want of blocks.
    pub fn refused(&self) -> u64 {
        let all = [Happened::RefusedStart, Happened::RefusedStep, Happened::RefusedLate];
        all.map(|what| self.count(what)).iter().sum()
    }

    /// What did not happen.
    pub fn missing(&self) -> Vec<Happened> {
        Happened::ALL.iter().copied().filter(|what| self.count(*what) == 0).collect()
    }

    pub(super) fn add(&mut self, what: Happened) {
        self.add_many(what, 1);
    }
    pub(super) fn add_many(&mut self, what: Happened, times: u64) {
        self.counts[what as usize] += times;
    }
}

impl fmt::Debug for Lived {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(Happened::ALL.iter().map(|what| (what, self.count(*what)))).finish()
    }
}
