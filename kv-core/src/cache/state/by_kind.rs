//! Reuse and fill by kind: rows of attention, slots of recurrent states, snapshots of these.
use std::fmt;

use crate::block::BlockPool;
use crate::cache::state::snapshots::longest_of_all;
use crate::cache::state::start::Lookup;
use crate::cache::state::states::StateGroup;
use crate::cache::state::{CacheState, StartOptions};
use crate::ids::GroupId;
use crate::num::to_u32;

/// The cached tokens of a prompt, by kind of layer: the reason of a short hit.
///
/// ```
/// use kv::backend::NullBackend;
/// use kv::{CacheSpec, DType, KvCache, SequenceId, StartOptions, StepInput};
/// use kv::spec::StateFormat;
///
/// let spec = CacheSpec::builder().layers(2).kv_heads(1).head_dim(4).paged(4, 64);
/// let spec = spec.states([1], |states| {
///     states.part([8], DType::F32).slots(4).snapshots(16, StateFormat::F16)
/// });
/// let mut cache = KvCache::new(NullBackend::new(), spec.build()?)?;
/// let prompt: Vec<u32> = (0..10).collect();
/// cache.start(SequenceId(0), &prompt, StartOptions::default())?;
/// let mut step = cache.begin_step(&[StepInput::tokens(SequenceId(0), &prompt)])?;
/// step.mark_written();
/// step.mark_state_written(1)?;
/// step.commit()?; // in one step, past the stop in front of the last token
/// let hit = cache.state().explain_hit(&prompt, StartOptions::default());
/// assert_eq!(hit.to_string(), "attention 8, state 0");
/// # Ok::<(), kv::CacheError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct HitByKind {
    /// Tokens that a sequence would reuse: cached by every kind of layer.
    pub tokens: u32,
    /// Tokens whose rows are cached, with or without a state behind them.
    pub rows: u32,
    /// Tokens behind which the longest states are that every group keeps, with or without rows;
    /// `None` in a cache without states.
    pub state: Option<u32>,
}

impl fmt::Display for HitByKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "attention {}", self.rows)?;
        self.state.map_or(Ok(()), |state| write!(f, ", state {state}"))
    }
}

/// The fill of one group: blocks of rows, slots of running states, or snapshots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[expect(clippy::exhaustive_structs, reason = "three numbers that add up")]
pub struct GroupUsage {
    /// All of them.
    pub total: u32,
    /// Those with a holder.
    pub used: u32,
    /// Those without a holder whose content can be reused.
    pub cached: u32,
}

impl GroupUsage {
    fn of(pool: &BlockPool) -> Self {
        Self { total: pool.num_blocks(), used: pool.num_used(), cached: pool.num_idle() }
    }
}

impl CacheState {
    /// Says how far a prompt is cached, by kind of layer. Changes nothing.
    pub fn explain_hit(&self, prompt: &[u32], options: StartOptions<'_>) -> HitByKind {
        let mut lookup = Lookup::default();
        self.look_up_unnamed(&mut lookup, prompt, &options);
        let tokens = lookup.found.tokens();
        if self.states.is_empty() {
            return HitByKind { tokens, rows: tokens, state: None };
        }
        let limit = to_u32(prompt.len()).saturating_sub(1);
        let longest = longest_of_all(&self.states, &mut lookup.history, &self.names(), limit);
        let state = Some(longest.map_or(0, |(_, len)| len));
        HitByKind { tokens, rows: lookup.found.rows, state }
    }

    /// Returns the fill of one group, by its number: rows first, then slots of states, then
    /// snapshots ([`CacheSpec::states`](crate::CacheSpec::states)). `None` for an unknown group,
    /// and for snapshots that are not kept.
    pub fn group_usage(&self, group: GroupId) -> Option<GroupUsage> {
        if let Some(pool) = self.pool(group) {
            return Some(GroupUsage::of(pool));
        }
        let index = usize::from(group.0).checked_sub(self.groups.len())?;
        self.states.get(index).map(StateGroup::usage)
    }
}
