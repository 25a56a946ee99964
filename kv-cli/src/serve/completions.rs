//! `POST /v1/completions`.
// Reads requests that may be anything.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
use std::borrow::Cow;

use kv_runner::{TextError, check_vocabulary};
use serde_json::value::RawValue;
use tokio::time::Instant;

use super::Server;
use super::answer::{Kind, Prepared, Rendered, Tokens};
use super::engine::Refused;
use super::error::ApiError;
use super::fields::{Fields, NoText, TooMany, entries, is_text, text};
use super::request::{COMPLETION, Wanted};

/// A prompt as a request gives it.
#[derive(Debug, PartialEq, Eq)]
enum Given<'a> {
    Text(Cow<'a, str>),
    Tokens(Vec<u32>),
    /// Tokens that were counted, and are too many for the model.
    TooMany(usize),
}

/// Most prompts of one request.
const PROMPTS_MAX: usize = 64;

/// Possible values of the field `prompt`.
const POSSIBLE: &str = "expected a text, token ids, or a list of either";

/// Reads a request and makes the tokens of its prompts; runs until the deadline at most.
pub(super) fn read(server: &Server, body: &[u8], deadline: Instant) -> Result<Prepared, ApiError> {
    let fields = Fields::parse(body, COMPLETION)?;
    let wanted = Wanted::read(&fields, Kind::Completion)?;
    let given = check(server, (&fields, &wanted))?;
    let place = server.reserve(given.len(), &wanted)?;
    let prompts = tokens(server, (&fields, &wanted), given, deadline)?;
    Ok(Prepared { kind: Kind::Completion, wanted, prompts, place })
}

/// Does what [`read`] does for a request that does not run.
pub(super) fn render(
    server: &Server,
    body: &[u8],
    deadline: Instant,
) -> Result<Rendered, ApiError> {
    let fields = Fields::parse(body, COMPLETION)?;
    let wanted = Wanted::read_prompt(&fields, Kind::Completion)?;
    let given = check(server, (&fields, &wanted))?;
    let prompts = tokens(server, (&fields, &wanted), given, deadline)?;
    Ok(Rendered { wanted, prompts })
}

/// Checks the model and the prompts, before they cost anything.
fn check<'a>(
    server: &Server,
    (fields, wanted): (&Fields<'a>, &Wanted),
) -> Result<Vec<Given<'a>>, ApiError> {
    server.check_model(wanted.model.as_deref())?;
    read_prompts(fields, crate::num::to_usize(server.config.context()))
}

/// Makes the tokens of the prompts.
fn tokens(
    server: &Server,
    (fields, wanted): (&Fields<'_>, &Wanted),
    given: Vec<Given<'_>>,
    deadline: Instant,
) -> Result<Vec<Tokens>, ApiError> {
    let context = server.config.context();
    let tokens = given.into_iter().map(|prompt| match prompt {
        Given::Text(text) => server.encode(&text, "prompt", deadline),
        Given::Tokens(tokens) => match check_vocabulary(&tokens, &server.config) {
            Ok(()) => Ok(tokens),
            Err(TextError::BeyondVocabulary { token, vocab }) => {
                let why = format!("there is no token {token}, the model has {vocab}");
                Err(fields.wrong("prompt", why))
            }
            Err(error) => Err(fields.wrong("prompt", error)),
        },
        Given::TooMany(prompt) => {
            let new = wanted.max_tokens.map_or(1, |limit| limit.tokens);
            let refused = Refused::TooLong { prompt, new, context };
            Err(ApiError::from(server.engine.refuse(refused)).about("prompt"))
        }
    });
    tokens.map(|tokens| Ok(Tokens { tokens: tokens?, stops: Vec::new() })).collect()
}

/// Reads the field `prompt`: a text, tokens, or a list of either. Of prompts longer than the
/// context only the number of tokens is returned.
fn read_prompts<'a>(fields: &Fields<'a>, context: usize) -> Result<Vec<Given<'a>>, ApiError> {
    let wrong = |why: &str| fields.wrong("prompt", why);
    let value = fields.raw("prompt").ok_or_else(|| wrong("missing"))?;
    let read = |value: &'a RawValue| {
        if is_text(value) {
            return text(value).map(Given::Text).map_err(|why: NoText| fields.wrong("prompt", why));
        }
        match count_tokens(value) {
            None => Err(wrong(POSSIBLE)),
            Some(0) => Err(wrong("a prompt has no tokens")),
            Some(count) if count > context => Ok(Given::TooMany(count)),
            Some(_) => match serde_json::from_str(value.get()) {
                Ok(tokens) => Ok(Given::Tokens(tokens)),
                Err(_) => Err(wrong("token ids are whole numbers from 0 on")),
            },
        }
    };
    if is_text(value) || has_numbers(value) {
        return Ok(vec![read(value)?]);
    }
    let prompts = match entries(value, PROMPTS_MAX) {
        Some(Ok(prompts)) => prompts,
        Some(Err(TooMany)) => {
            let why =
                format!("more than {PROMPTS_MAX} prompts, at most {PROMPTS_MAX} are possible");
            return Err(wrong(&why));
        }
        None => return Err(wrong(POSSIBLE)),
    };
    let texts = prompts.iter().filter(|prompt| is_text(prompt)).count();
    match prompts.len() {
        0 => Err(wrong("the list is empty")),
        all if texts > 0 && texts < all => Err(wrong(POSSIBLE)),
        _ => prompts.into_iter().map(read).collect(),
    }
}

/// Returns whether a value is a list that begins with a number.
fn has_numbers(value: &RawValue) -> bool {
    let list = value.get().strip_prefix('[').map(str::trim_start);
    list.is_some_and(|list| list.starts_with(|first: char| first == '-' || first.is_ascii_digit()))
}

/// Counts the entries of a list of numbers by its commas, before any is read; `None` for another
/// value.
fn count_tokens(value: &RawValue) -> Option<usize> {
    if has_numbers(value) {
        return Some(value.get().matches(',').count().saturating_add(1));
    }
    let list = value.get().strip_prefix('[')?;
    list.trim_start().starts_with(']').then_some(0)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(prompt: &Value) -> Result<Vec<String>, Value> {
        let body = json!({"prompt": prompt}).to_string();
        let fields = Fields::parse(body.as_bytes(), COMPLETION).expect("an object");
        let read = read_prompts(&fields, 4).map_err(|error| error.body()["error"].take())?;
        Ok(read.iter().map(|prompt| format!("{prompt:?}")).collect())
    }

    #[test]
    fn a_prompt_is_a_text_or_tokens_or_a_list_of_either() {
        assert_eq!(read(&json!("a")).expect("a text"), ["Text(\"a\")"]);
        assert_eq!(read(&json!(["a", ""])).expect("texts"), ["Text(\"a\")", "Text(\"\")"]);
        assert_eq!(read(&json!([5, 6])).expect("tokens"), ["Tokens([5, 6])"]);
        let lists = read(&json!([[5], [6, 7]])).expect("lists");
        assert_eq!(lists, ["Tokens([5])", "Tokens([6, 7])"]);
        let long = read(&json!([[1, 2, 3, 4], [1, 2, 3, 4, 5]])).expect("counted");
        assert_eq!(long, ["Tokens([1, 2, 3, 4])", "TooMany(5)"]);
        assert_eq!(read(&json!([9, 9, 9, 9, 9, 9])).expect("counted"), ["TooMany(6)"]);
        assert_eq!(read(&json!(vec!["a"; PROMPTS_MAX])).expect("many").len(), PROMPTS_MAX);
    }

    #[test]
    fn other_prompts_are_refused_with_what_is_possible() {
        let possible = "prompt: expected a text, token ids, or a list of either";
        let ids = "prompt: token ids are whole numbers from 0 on";
        for (prompt, words) in [
            (json!(5), possible),
            (json!({}), possible),
            (json!(true), possible),
            (json!(["a", 5]), possible),
            (json!(["a", [5]]), possible),
            (json!([[5], "a"]), possible),
            (json!([["a"]]), possible),
            (json!([[[5]]]), possible),
            (json!([null]), possible),
            (json!([5, "a"]), ids),
            (json!([5, [5]]), ids),
            (json!([-1]), ids),
            (json!([1.5]), ids),
            (json!([4_294_967_296_u64]), ids),
            (json!([[5], []]), "prompt: a prompt has no tokens"),
            (json!([]), "prompt: the list is empty"),
            (json!(null), "prompt: missing"),
            (json!(vec!["a"; PROMPTS_MAX + 1]), "prompt: more than 64 prompts"),
            (json!(vec![json!([]); 1000]), "prompt: more than 64 prompts"),
        ] {
            let error = read(&prompt).expect_err("refused");
            let message = error["message"].as_str().expect("text");
            assert!(message.starts_with(words), "{prompt}: {message}");
            assert_eq!(error["param"], "prompt");
        }
    }
}
