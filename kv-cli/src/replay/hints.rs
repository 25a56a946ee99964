//! What callers say of the return of conversations: the words of the trace itself, or what the rest
//! of the trace shows.
use std::fmt;
use std::str::FromStr;

use kv::error::UnknownName;
use kv::eviction::Return;

use super::trace::{Request, Trace};
use crate::mix::mix;
use crate::num::{to_f64, to_u64, to_usize};

/// A value of `--hints`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum HintSource {
    /// What the rest of the trace shows.
    Oracle,
    /// The same but for this share of the requests, which have the hints of others.
    Noisy(f64),
}

/// A value of `--hints` that is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum HintSourceError {
    #[error(transparent)]
    Unknown(#[from] UnknownName),
    #[error("noisy={got}: a share from 0 to 1 is needed")]
    Share { got: String },
}

/// The text before the share of wrong hints.
const NOISY: &str = "noisy=";

impl fmt::Display for HintSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Oracle => f.write_str("oracle"),
            Self::Noisy(share) => write!(f, "{NOISY}{share}"),
        }
    }
}

impl FromStr for HintSource {
    type Err = HintSourceError;

    fn from_str(text: &str) -> Result<Self, HintSourceError> {
        if text == Self::Oracle.to_string() {
            return Ok(Self::Oracle);
        }
        let Some(got) = text.strip_prefix(NOISY) else {
            return Err(UnknownName::new("source of hints", text, "oracle, noisy=SHARE").into());
        };
        let share = got.parse().ok().filter(|share| (0.0..=1.0).contains(share));
        share.map(Self::Noisy).ok_or_else(|| HintSourceError::Share { got: got.to_owned() })
    }
}

/// The hints of a replay.
#[derive(Debug, Clone, Default)]
pub(super) struct Hints {
    /// Where they come from; `None` without any.
    source: Option<String>,
    /// One for each request, or none at all.
    each: Vec<Option<Return>>,
}

impl Hints {
    /// Takes those of the command line, or else those of the trace.
    pub(super) fn new(trace: &Trace, source: Option<HintSource>) -> Self {
        let Some(source) = source else {
            let own = trace.hints().to_vec();
            let has_any = own.iter().any(Option::is_some);
            return if has_any {
                Self { source: Some("trace".to_owned()), each: own }
            } else {
                Self::default()
            };
        };
        let right = oracle(trace);
        let each = match source {
            HintSource::Oracle => right,
            HintSource::Noisy(share) => mixed_up(&right, share),
        };
        let each = each.into_iter().map(Some).collect();
        Self { source: Some(source.to_string()), each }
    }

    /// Returns where the hints come from, `None` without any.
    pub(super) fn source(&self) -> Option<&str> {
        self.source.as_deref()
    }

    /// Returns the hint of a request.
    pub(super) fn of(&self, request: usize) -> Option<Return> {
        self.each.get(request).copied().flatten()
    }
}

/// Returns what a caller would say who knows the rest of the trace: [`Return::Ended`], or the time
/// until the first request that continues the conversation.
///
/// A request continues an earlier one if it asks for the last whole id of it, which no two
/// different whole ids have followed up to then, or for its very last id. The last id of a request
/// that stands for fewer tokens than others is not whole: with the tokens of the next turn it is
/// another one.
fn oracle(trace: &Trace) -> Vec<Return> {
    let since = shared_since(trace);
    let mut next = vec![None; since.len()];
    let mut hints = vec![Return::Ended; trace.requests().len()];
    for ((index, request), hint) in trace.requests().iter().enumerate().zip(&mut hints).rev() {
        let (_, ids) = trace.ids(request);
        let asks = |id: &u32| next.get(to_usize(*id)).copied().flatten();
        let is_private = |id: &u32, by: usize| {
            let since = since.get(to_usize(*id)).copied().flatten();
            since.is_none_or(|since| since > by)
        };
        let (whole, part) = whole_ids(trace, request);
        let of_whole = whole.last().and_then(|id| asks(id).filter(|by| is_private(id, *by)));
        let of_part = part.and_then(asks);
        if let Some(by) = of_whole.into_iter().chain(of_part).min() {
            // Times of a trace may go back.
            *hint = Return::Within(trace.arrives(by).saturating_sub(trace.arrives(index)));
        }
        for id in ids {
            if let Some(next) = next.get_mut(to_usize(*id)) {
                *next = Some(index);
            }
        }
    }
    hints
}

/// Splits the ids of a request into the whole ones and the last one, if it is not whole.
fn whole_ids<'t>(trace: &'t Trace, request: &Request) -> (&'t [u32], Option<&'t u32>) {
    match trace.ids(request).1 {
        ids if trace.ends_whole(request) => (ids, None),
        [whole @ .., part] => (whole, Some(part)),
        [] => (&[], None),
    }
}

/// Returns for every id the request with which a second whole id has followed it, `None` for the
/// ids of one conversation.
fn shared_since(trace: &Trace) -> Vec<Option<usize>> {
    let last = trace.all_ids().unwrap_or_default().iter().max();
    let num_ids = last.map_or(0, |id| to_usize(*id) + 1);
    let (mut followers, mut since) = (vec![None; num_ids], vec![None; num_ids]);
    for (index, request) in trace.requests().iter().enumerate() {
        let (whole, _) = whole_ids(trace, request);
        for (id, after) in whole.iter().zip(whole.iter().skip(1)) {
            let id = to_usize(*id);
            let Some((follower, since)) = followers.get_mut(id).zip(since.get_mut(id)) else {
                continue;
            };
            if *follower.get_or_insert(*after) != *after {
                since.get_or_insert(index);
            }
        }
    }
    since
}

/// The number that all draws follow from.
const SEED: u64 = 0;

/// Gives each request, with the probability `share`, the hint of any other one.
fn mixed_up(right: &[Return], share: f64) -> Vec<Return> {
    let others = to_u64(right.len()).saturating_sub(1);
    let hint = |(index, own): (u64, &Return)| {
        let first = mix(SEED.wrapping_add(index.wrapping_mul(2)));
        let second = mix(SEED.wrapping_add(index.wrapping_mul(2).wrapping_add(1)));
        // As many bits as a float has.
        let draw = to_f64(first >> 11) / to_f64(1 << 53);
        let Some(other) = second.checked_rem(others).filter(|_| draw < share) else {
            return *own;
        };
        let other = if other < index { other } else { other + 1 };
        let other = usize::try_from(other).ok().and_then(|other| right.get(other));
        other.copied().unwrap_or(*own)
    };
    (0..).zip(right).map(hint).collect()
}

#[cfg(test)]
mod tests;
