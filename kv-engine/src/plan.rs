//! The plan of the next step: the tokens of running requests, and the waiting requests that join.
//!
//! A waiting request is passed over, and may be overtaken, while the cache has no blocks for its
//! prompt beside the blocks of all running requests, while its beams have no room, or while its
//! blocks are on their way from a tier. [`Limits::max_overtakes`] bounds that.
//!
//! A request follows another one that is computing the same beginning of a prompt: it is admitted
//! when the common blocks can be reused, never later than it would compute them itself.
//!
//! In a cache with recurrent states, chunks of a prompt end where the cache keeps states for other
//! prompts, and where a request that follows it needs them.
use kv_core::error::BlocksExhausted;
use kv_core::invariant::Invariant;
use kv_core::scheduling::{Admission, CacheState};
use kv_core::spec::{GroupSpec, PrefixReuse, StatesSpec};
use kv_core::{CacheError, CacheSpec, SequenceId};

use crate::drafts;
use crate::model::{Batch, Chunk};
use crate::num::{to_u32, to_usize};
use crate::queues::{Overtakes, Queues};
use crate::request::Limits;
use crate::share;
use crate::task::{Search, Sequence, Task, common};

/// The size of a step, which shrinks while blocks are missing.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Size {
    /// Most tokens.
    pub(crate) tokens: u32,
    pub(crate) with_drafts: bool,
}

/// The requests that join a step.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// Oldest first.
    pub(crate) newcomers: Vec<Newcomer>,
    /// Tokens of the step that nothing has a use for yet.
    pub(crate) spare: u32,
    /// Lengths at which running sequences keep their recurrent states for newcomers after them.
    pub(crate) stops: Vec<(SequenceId, u32)>,
    /// The shortage of the oldest waiting request, if it does not join because blocks are missing.
    pub(crate) refused: Option<BlocksExhausted>,
}

/// A waiting request that may join a step.
#[derive(Debug)]
pub(crate) struct Newcomer {
    /// Number of the request.
    pub(crate) request: usize,
    pub(crate) share: Share,
    /// Lengths at which it keeps its recurrent states for newcomers after it.
    pub(crate) stops: Vec<u32>,
}

/// The tokens of a newcomer.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Share {
    Own(u32),
    /// Spare ones, once the first `len` tokens of another sequence can be reused.
    After {
        leader: SequenceId,
        len: u32,
    },
}

/// A waiting request, as seen before a step.
enum Outlook {
    /// It can join and compute this many tokens.
    Ready {
        needs: u32,
    },
    Follows {
        leader: SequenceId,
        len: u32,
    },
    Blocked(Option<BlocksExhausted>),
}

/// Fills the batch with tokens of running sequences, and chooses the requests that join.
pub(crate) fn plan(
    cache: &CacheState,
    queues: &Queues,
    limits: &Limits,
    size: Size,
    batch: &mut Batch,
) -> Result<Plan, CacheError> {
    batch.clear();
    let (mut newcomers, refused) = newcomers(cache, queues, limits, size)?;
    let stops = stops(queues, &mut newcomers, cache);
    let (mut decoding, mut prompts) = (Vec::new(), Vec::new());
    for task in queues.running() {
        let goal = task.goal(cache);
        for sequence in &task.sequences {
            match sequence.pending(cache, goal) {
                0 => {}
                1 => decoding.push((task, sequence)),
                needs => {
                    let chunk = to_next_stop(cache, sequence.id, &stops).min(needs);
                    prompts.push((task, sequence, chunk));
                }
            }
        }
    }
    let has_prompts = !prompts.is_empty() || !newcomers.is_empty();
    let decoding_tokens = to_u32(decoding.len());
    let rest = share::after_decoding(size.tokens, decoding_tokens, has_prompts);
    let mut drafts_left = if size.with_drafts { rest.drafts_max } else { 0 };
    let before_drafts = drafts_left;
    for (task, sequence) in decoding.into_iter().take(to_usize(size.tokens)) {
        let most = drafts_per_sequence(cache.spec(), limits).min(drafts_left);
        let drafts = draft_after(task, sequence, most);
        drafts_left -= push(batch, cache, (task, sequence), 1, &drafts).drafts;
    }
    let left = rest.tokens - (before_drafts - drafts_left);
    let mut needs: Vec<u32> = prompts.iter().map(|(.., needs)| *needs).collect();
    needs.extend(newcomers.iter().filter_map(|newcomer| match newcomer.share {
        Share::Own(needs) => Some(needs),
        Share::After { .. } => None,
    }));
    let mut shares = share::among_prompts(left, &needs).into_iter();
    let mut spare = left;
    for ((task, sequence, _), count) in prompts.into_iter().zip(shares.by_ref()) {
        spare -= count;
        if count > 0 {
            push(batch, cache, (task, sequence), count, &[]);
        }
    }
    for newcomer in &mut newcomers {
        if let Share::Own(share) = &mut newcomer.share {
            *share = shares.next().unwrap_or(0);
            spare -= *share;
        }
    }
    Ok(Plan { newcomers, spare, stops, refused })
}

/// Chooses the waiting requests that may join the step, with the tokens that each could use.
fn newcomers(
    cache: &CacheState,
    queues: &Queues,
    limits: &Limits,
    size: Size,
) -> Result<(Vec<Newcomer>, Option<BlocksExhausted>), CacheError> {
    let mut chosen: Vec<Newcomer> = Vec::new();
    let mut leaders: Vec<&Task> =
        queues.running().iter().filter(|task| is_prompt(cache, task)).collect();
    let (mut refused, mut taken) = (None, 0);
    let (mut overtakes, mut passed_over) = (Overtakes::new(), 0);
    let mut room = queues.room(limits, cache.spec());
    for task in queues.waiting() {
        let is_alone = queues.running().is_empty() && chosen.is_empty();
        let is_full = room == 0 && !is_alone;
        if is_full || !overtakes.are_left() || passed_over == PASSED_OVER_MAX {
            break;
        }
        let outlook = if !is_alone && task.width() > room {
            Outlook::Blocked(None)
        } else {
            let watermark = if is_alone { 0 } else { queues.promised(cache, task)? + taken };
            outlook(cache, task, &leaders, size, watermark)?
        };
        match outlook {
            Outlook::Ready { needs } => {
                // One that is alone may be wider.
                room = room.saturating_sub(task.width());
                taken += blocks_of(cache, task);
                leaders.push(task);
                let (request, share) = (task.index, Share::Own(needs));
                chosen.push(Newcomer { request, share, stops: Vec::new() });
                overtakes.note_admitted();
                continue;
            }
            Outlook::Follows { leader, len } => {
                let share = Share::After { leader, len };
                chosen.push(Newcomer { request: task.index, share, stops: Vec::new() });
                overtakes.note_admitted();
            }
            Outlook::Blocked(exhausted) => refused = refused.or(exhausted),
        }
        passed_over += 1;
        overtakes.note_passed_over(task, limits);
    }
    Ok((chosen, refused))
}

/// Looks at one waiting request.
fn outlook(
    cache: &CacheState,
    task: &Task,
    leaders: &[&Task],
    size: Size,
    watermark: u32,
) -> Result<Outlook, CacheError> {
    if !task.tiers.is_ready() {
        return Ok(Outlook::Blocked(None));
    }
    let admission = Admission::default().with_chunk(size.tokens).with_must_fit(true);
    let admission = admission.with_watermark(watermark);
    let prompt = task.first_part(cache);
    let reused = match cache.check_admission(prompt, task.start_options(), &admission) {
        Ok(reused) => reused,
        Err(CacheError::Exhausted(exhausted)) => {
            // The blocks of a leader may make room.
            let follows = leader_of(cache, task, leaders, 0);
            let follows = follows.map(|(leader, len)| Outlook::Follows { leader, len });
            return Ok(follows.unwrap_or(Outlook::Blocked(Some(exhausted))));
        }
        Err(error) => return Err(error),
    };
    if let Some((leader, len)) = leader_of(cache, task, leaders, reused) {
        return Ok(Outlook::Follows { leader, len });
    }
    Ok(Outlook::Ready { needs: task.goal(cache) - reused })
}

/// Returns the sequence that is about to compute most tokens that a prompt could reuse beyond its
/// cached ones, and the number of these tokens, whole blocks alone.
fn leader_of(
    cache: &CacheState,
    task: &Task,
    leaders: &[&Task],
    reused: u32,
) -> Option<(SequenceId, u32)> {
    if cache.spec().prefix_reuse() == PrefixReuse::Off {
        return None;
    }
    let block_size = cache.spec().groups().iter().map(GroupSpec::block_size).max()?;
    let prompt = task.first_part(cache);
    // The last token is always computed.
    let usable = prompt.split_last()?.1;
    let shared = |leader: &&Task| {
        let first = leader.first();
        let cached = cache.seq_len(first.id).unwrap_or(0);
        let next = to_usize(cached);
        // Most prompts differ there, or earlier.
        let differs = leader.salt != task.salt || usable.get(next) != first.tokens.get(next);
        let len = if differs { 0 } else { common(usable, leader.first_part(cache)) };
        let len = cache.kept_length(len - len % block_size);
        (len > cached && len > reused).then_some((first.id, len))
    };
    leaders.iter().filter_map(shared).max_by_key(|(_, len)| *len)
}

/// Lists where running sequences keep their recurrent states for newcomers that follow them, and
/// notes the same of newcomers that others follow.
fn stops(
    queues: &Queues,
    newcomers: &mut [Newcomer],
    cache: &CacheState,
) -> Vec<(SequenceId, u32)> {
    let mut stops = Vec::new();
    if cache.spec().states().is_empty() {
        return stops;
    }
    for at in 0..newcomers.len() {
        let Share::After { leader, len } = newcomers[at].share else { continue };
        if cache.contains(leader) {
            stops.push((leader, len));
            continue;
        }
        let waiting = queues.waiting().iter().find(|task| task.first().id == leader);
        let leader =
            waiting.and_then(|task| newcomers.iter_mut().find(|n| n.request == task.index));
        leader.invariant("a leader runs, or waits and joins the step").stops.push(len);
    }
    stops
}

/// Returns the tokens of a prompt up to the next length at which its recurrent states are kept.
fn to_next_stop(cache: &CacheState, id: SequenceId, stops: &[(SequenceId, u32)]) -> u32 {
    let cached = cache.seq_len(id).unwrap_or(0);
    let added = stops.iter().filter(|(of, _)| *of == id).map(|(_, stop)| *stop);
    let stops = added.chain(cache.next_stop(id)).filter(|stop| *stop > cached);
    stops.min().map_or(u32::MAX, |stop| stop - cached)
}

/// Returns the most drafts of a sequence: a cache with recurrent states keeps one behind each.
fn drafts_per_sequence(spec: &CacheSpec, limits: &Limits) -> u32 {
    spec.states().iter().map(StatesSpec::drafts).fold(limits.draft_tokens, u32::min)
}

/// Returns whether the first sequence of a running request has a prompt to compute.
fn is_prompt(cache: &CacheState, task: &Task) -> bool {
    task.first().pending(cache, task.goal(cache)) > 1
}

/// Returns the blocks of a whole prompt in the group that needs most.
fn blocks_of(cache: &CacheState, task: &Task) -> u32 {
    let len = task.goal(cache);
    let blocks = cache.spec().groups().iter().map(|group| group.slot_map().blocks_reserved(len));
    blocks.max().unwrap_or(0)
}

/// Drafts at most `max` tokens after a sequence's last one, within its length limit.
fn draft_after(task: &Task, sequence: &Sequence, max: u32) -> Vec<u32> {
    if !matches!(task.search, Search::Sample(_)) || !task.choices.is_empty() {
        return Vec::new();
    }
    // The step's own token follows the last accepted one.
    let room = task.tokens_max.saturating_sub(sequence.len()).saturating_sub(1);
    drafts::propose(&sequence.tokens, max.min(room))
}

/// Adds the next `count` tokens of a sequence, and drafts after them.
pub(crate) fn push(
    batch: &mut Batch,
    cache: &CacheState,
    (task, sequence): (&Task, &Sequence),
    count: u32,
    drafts: &[u32],
) -> Chunk {
    let begin = cache.seq_len(sequence.id).unwrap_or(0);
    let end = begin + count;
    batch.tokens.extend_from_slice(&sequence.tokens[to_usize(begin)..to_usize(end)]);
    batch.tokens.extend_from_slice(drafts);
    let drafts = to_u32(drafts.len());
    let logits = if end == sequence.len() { drafts + 1 } else { 0 };
    let (sequence, request, tokens) = (sequence.id, task.index, count + drafts);
    let chunk = Chunk { sequence, request, tokens, drafts, logits };
    batch.chunks.push(chunk);
    chunk
}

/// Requests that one plan passes over: a look at each costs as much as its admission.
const PASSED_OVER_MAX: u32 = 32;
