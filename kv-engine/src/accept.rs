//! The check of a request before it waits: whether it could run alone.
use std::time::Duration;

use kv_core::{CacheSpec, SequenceId};

use crate::beams::BeamSearch;
use crate::error::RequestError;
use crate::fit::RequestSize;
use crate::num::{to_u32, to_usize};
use crate::request::{Finish, Limits, Request};
use crate::task::{FromTiers, Search, Sequence, Task};

/// Makes the task of a request, or refuses one that can never run.
pub(crate) fn accept(
    request: Request,
    index: usize,
    spec: &CacheSpec,
    limits: &Limits,
) -> Result<Task, RequestError> {
    let (tokens, context) = (request.prompt.len(), limits.context);
    if tokens == 0 {
        return Err(RequestError::EmptyPrompt { index });
    }
    if tokens >= to_usize(context) {
        return Err(RequestError::PromptTooLong { index, tokens, context });
    }
    if let Some(vocab) = limits.vocab
        && let Some(token) = request.prompt.iter().find(|token| **token >= vocab)
    {
        return Err(RequestError::Vocabulary { index, token: *token, vocab });
    }
    let prompt_len = to_u32(tokens);
    let mut before = 0;
    for &stop in &request.stops {
        if stop <= before || stop > prompt_len {
            return Err(RequestError::Stop { index, before, stop, tokens });
        }
        before = stop;
    }
    // A request may ask for any number.
    let wanted = prompt_len.saturating_add(request.max_new_tokens);
    let (tokens_max, finish_at_max) =
        if wanted > context { (context, Finish::Context) } else { (wanted, Finish::Length) };
    let task = Task {
        index,
        prompt_len,
        tokens_max,
        finish_at_max,
        // The caller names the sequence, and knows the time and the tiers.
        sequences: vec![Sequence::new(SequenceId(0), request.prompt)],
        search: match request.beams {
            None => Search::Sample(request.sampler),
            Some(options) => Search::Beams(BeamSearch::new(options)),
        },
        salt: request.salt,
        stops: request.stops,
        ignore_stop: request.ignore_stop,
        hint: request.hint,
        choices: Vec::new(),
        reused: None,
        submitted: Duration::ZERO,
        admitted: None,
        first_token: Duration::ZERO,
        was_preempted: false,
        overtaken: 0,
        tiers: FromTiers::Nothing,
    };
    check_fits(&task, spec, limits)?;
    Ok(task)
}

fn check_fits(task: &Task, spec: &CacheSpec, limits: &Limits) -> Result<(), RequestError> {
    let Task { index, prompt_len: prompt, .. } = *task;
    // The last token is never added to a step.
    let (tokens, width, forget) = (task.tokens_max - 1, task.width(), limits.forget);
    let chunk = limits.max_step_tokens.max(1).min(if forget { tokens } else { prompt });
    let size = RequestSize { prompt, chunk, tokens, width, forget };
    size.check(spec).map_err(|shortage| RequestError::DoesNotFit { index, tokens, shortage })?;
    let max = spec.max_seq_len();
    if tokens > max {
        return Err(RequestError::TooLong { index, tokens, max });
    }
    let available = spec.max_sequences_in_step();
    if width > available {
        return Err(RequestError::TooManyBeams { index, needed: width, available });
    }
    Ok(())
}
