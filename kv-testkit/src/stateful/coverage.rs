//! Coverage counters of random runs: the suite fails if a behaviour never occurred.
use std::fmt;

macro_rules! behaviours {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// A behaviour that a run can show.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum Behaviour {
            $($(#[$doc])* $name,)*
        }
        impl Behaviour {
            /// All behaviours.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];
        }
    };
}

behaviours! {
    /// Any operation, refused ones included.
    Operation,
    /// A start was refused because the pool lacks the blocks it reserves.
    RefusedStart,
    /// A step was refused because the pool lacks blocks.
    RefusedStep,
    /// A sequence that joined an open step was refused because the pool lacks blocks.
    RefusedJoin,
    /// A start or a fork was refused because there are `max_sequences` sequences.
    RefusedSequence,
    /// A start was refused because its prompt or its reserve is too long.
    RefusedLength,
    /// A truncation was refused because keys that the next token sees have left a window.
    RefusedWindow,
    /// A token was reused by a new sequence.
    Reused,
    /// A token was reused by a sequence that started in a step.
    ReusedInStep,
    /// Tokens in a partly filled block were reused.
    ReusedPart,
    /// A sequence reused less than is cached, because of its backoff.
    BackedOff,
    /// The same, in a cache with a window.
    BackedOffWindow,
    /// A block was evicted.
    Evicted,
    /// A block was evicted while blocks of a higher level were idle.
    EvictedByLevel,
    /// A level expired.
    LevelExpired,
    /// Time passed.
    ClockStep,
    /// A sequence started with retention priorities.
    WithRetention,
    /// A block became idle with a hint of its return.
    Hinted,
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
    /// A cached prefix was pinned.
    Pinned,
    /// Cached content was forgotten on request.
    Forgotten,
    /// A reset dropped all cached content.
    Reset,
    /// The device failed in the begin of a step.
    FailedBegin,
    /// The device failed when a sequence joined a step.
    FailedJoin,
    /// The device failed in a write, and the step continued.
    FailedWrite,
    /// The device failed in a commit.
    FailedCommit,
    /// The device failed in a start.
    FailedStart,
    /// The device failed in a wipe.
    FailedWipe,
    /// A whole prompt passed the admission check and was computed, chunk by chunk.
    FitWhole,
    /// A whole prompt failed the admission check, and its first chunk was computed.
    UnfitWhole,
    /// A cache with tokens was recalibrated.
    Recalibrated,
    /// The same, with a window whose blocks the same sequence uses again.
    RecalibratedWrapped,
    /// The same, with blocks that left a window and that another sequence holds.
    RecalibratedReassigned,
    /// The same, with blocks that several sequences hold.
    RecalibratedShared,
    /// A recalibration was refused because a sequence was truncated inside codes.
    RefusedRecalibration,
    /// The device failed in a recalibration.
    FailedRecalibration,
    /// The device failed in a recalibration and again while the old bytes were restored.
    FailedRestore,
    /// A block was copied to host memory.
    Exported,
    /// A block was brought back from host memory.
    Imported,
    /// An import was refused because the pool lacks blocks.
    RefusedImport,
    /// The device failed when a block was copied to host memory.
    FailedExport,
    /// The device failed when blocks were brought back.
    FailedImport,
    /// A step was leaked.
    Leaked,
    /// A step had queries only.
    QueriesOnly,
    /// A layer was allocated while sequences had tokens.
    AddedLayer,
    /// A sequence with a window grew by many tokens.
    GrewLong,
    /// A sequence was truncated by more than one token where windows have slack.
    CutIntoSlack,
    /// A cache with rows of 16 bits.
    With16Bits,
    /// A cache with quantised rows.
    WithCodes,
    /// A cache with a tail in 16 bits.
    WithTail,
    /// A cache with a full-precision prefix.
    WithFullPrecisionPrefix,
    /// A cache with a window and quantised rows.
    WithCodesAndWindow,
    /// A cache with layers on demand.
    WithLayersOnDemand,
}

/// The counts of one run, or of several.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Coverage {
    counts: [u64; Behaviour::ALL.len()],
}

impl Default for Coverage {
    fn default() -> Self {
        Self { counts: [0; Behaviour::ALL.len()] }
    }
}

impl Coverage {
    /// Returns how often a behaviour occurred.
    pub fn count(&self, what: Behaviour) -> u64 {
        self.counts[what as usize]
    }

    /// Adds the counts of another run.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        self.counts.iter_mut().zip(other.counts).for_each(|(count, more)| *count += more);
        self
    }

    /// Returns the number of operations that were refused because the pool lacked blocks.
    pub fn refused(&self) -> u64 {
        let all = [Behaviour::RefusedStart, Behaviour::RefusedStep, Behaviour::RefusedJoin];
        all.map(|what| self.count(what)).iter().sum()
    }

    /// Returns the behaviours that never occurred.
    pub fn missing(&self) -> Vec<Behaviour> {
        Behaviour::ALL.iter().copied().filter(|what| self.count(*what) == 0).collect()
    }

    pub(super) fn add(&mut self, what: Behaviour) {
        self.add_many(what, 1);
    }
    pub(super) fn add_many(&mut self, what: Behaviour, times: u64) {
        self.counts[what as usize] += times;
    }
}

impl fmt::Debug for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(Behaviour::ALL.iter().map(|what| (what, self.count(*what)))).finish()
    }
}
