//! The fields of a request, checked once. A refusal names the wrong field.
use std::borrow::Cow;
use std::fmt;
use std::ops::RangeInclusive;
use std::sync::Arc;

use kv::eviction::Return;
use serde::Deserialize;

use super::answer::Kind;
use super::error::ApiError;
use super::fields::{Fields, TooMany, entries, is_text, text};

/// Fields of completions and of chats.
pub(super) const COMPLETION: &[&str] = &[
    "best_of",
    "cache_salt",
    "ignore_eos",
    "max_tokens",
    "model",
    "n",
    "prompt",
    "return",
    "seed",
    "skip_special_tokens",
    "stop",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
];
pub(super) const CHAT: &[&str] = &[
    "best_of",
    "cache_salt",
    "ignore_eos",
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "model",
    "n",
    "return",
    "seed",
    "skip_special_tokens",
    "stop",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
];

/// The fields that completions and chats have in common.
#[derive(Debug, Clone, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "each is a field of requests")]
pub(super) struct Wanted {
    pub(super) model: Option<String>,
    pub(super) temperature: f64,
    pub(super) top_p: f64,
    pub(super) seed: Option<u64>,
    /// Texts that end a text, none of them empty; all texts of the request read the same ones.
    pub(super) stop: Arc<[String]>,
    /// Texts for each prompt.
    pub(super) n: usize,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
    pub(super) ignore_eos: bool,
    /// Whether special tokens, such as an end of text with `ignore_eos`, are left out of texts.
    pub(super) skip_special: bool,
    pub(super) salt: Vec<u8>,
    /// Whether and when the client expects to continue the text.
    pub(super) hint: Option<Return>,
    /// `None`: as many as the kind of request has by default.
    pub(super) max_tokens: Option<Limit>,
}

/// The limit of new tokens, and the field that gives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Limit {
    pub(super) tokens: u32,
    pub(super) field: &'static str,
}

/// Most texts for one prompt, most stop strings, and most bytes of a stop string, of a salt and of
/// a hint.
const TEXTS_MAX: usize = 64;
const STOPS_MAX: usize = 16;
const STOP_BYTES_MAX: usize = 512;
const SALT_BYTES_MAX: usize = 1024;
const HINT_BYTES_MAX: usize = 64;

#[derive(Debug, Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

impl Wanted {
    /// Reads and checks the fields.
    pub(super) fn read(fields: &Fields<'_>, kind: Kind) -> Result<Self, ApiError> {
        fields.check_supported()?;
        Self::read_supported(fields, kind)
    }

    /// Reads and checks the fields of a request that asks for tokens of its prompts alone.
    pub(super) fn read_prompt(fields: &Fields<'_>, kind: Kind) -> Result<Self, ApiError> {
        fields.check_prompt_supported()?;
        Self::read_supported(fields, kind)
    }

    fn read_supported(fields: &Fields<'_>, kind: Kind) -> Result<Self, ApiError> {
        let n =
            fields.get::<u64>("n", &format!("a whole number from 1 to {TEXTS_MAX}"))?.unwrap_or(1);
        let n = usize::try_from(n).ok().filter(|n| (1..=TEXTS_MAX).contains(n));
        let n =
            n.ok_or_else(|| fields.wrong("n", format_args!("from 1 to {TEXTS_MAX} is possible")))?;
        let best_of = fields.get::<u64>("best_of", "a whole number")?;
        if best_of.is_some_and(|best_of| usize::try_from(best_of) != Ok(n)) {
            let why = format_args!("only that of n ({n}) is supported");
            return Err(fields.wrong("best_of", why));
        }
        let options = "an object, such as {\"include_usage\": true}";
        let include_usage = fields.get::<StreamOptions>("stream_options", options)?;
        let boolean = |name| fields.get::<bool>(name, "true or false");
        Ok(Self {
            model: fields.text("model")?.map(Cow::into_owned),
            temperature: within(fields, "temperature", 0.0..=2.0)?,
            top_p: within(fields, "top_p", 0.0..=1.0)?,
            // OpenAI's seeds are signed.
            seed: fields.get::<i64>("seed", "a whole number of 64 bits")?.map(i64::cast_unsigned),
            stop: read_stop(fields)?,
            n,
            stream: boolean("stream")?.unwrap_or(false),
            include_usage: include_usage.and_then(|options| options.include_usage) == Some(true),
            ignore_eos: boolean("ignore_eos")?.unwrap_or(false),
            skip_special: boolean("skip_special_tokens")?.unwrap_or(false),
            salt: read_salt(fields)?,
            hint: read_hint(fields)?,
            max_tokens: read_limit(fields, kind)?,
        })
    }
}

/// Reads a number that is 1 by default.
fn within(fields: &Fields<'_>, name: &str, range: RangeInclusive<f64>) -> Result<f64, ApiError> {
    let (from, to) = (range.start(), range.end());
    let value = fields.get::<f64>(name, &format!("a number from {from} to {to}"))?.unwrap_or(1.0);
    if range.contains(&value) {
        return Ok(value);
    }
    Err(fields.wrong(name, format_args!("it is {value:?}, from {from} to {to} is possible")))
}

/// Reads the limit of new tokens; chats have a newer name for it too.
fn read_limit(fields: &Fields<'_>, kind: Kind) -> Result<Option<Limit>, ApiError> {
    let names: &[&'static str] = match kind {
        Kind::Completion => &["max_tokens"],
        Kind::Chat => &["max_completion_tokens", "max_tokens"],
    };
    let mut limit = None;
    for field in names {
        let tokens = fields.get::<u32>(field, "a whole number, at least 1")?;
        if tokens == Some(0) {
            return Err(fields.wrong(field, "it is 0, at least 1 is needed"));
        }
        limit = limit.or(tokens.map(|tokens| Limit { tokens, field }));
    }
    Ok(limit)
}

fn read_salt(fields: &Fields<'_>) -> Result<Vec<u8>, ApiError> {
    let Some(salt) = fields.text("cache_salt")? else { return Ok(Vec::new()) };
    if salt.is_empty() {
        let why = "it is empty: leave it out to share the cache with everybody";
        return Err(fields.wrong("cache_salt", why));
    }
    check_length(fields, "cache_salt", &salt, SALT_BYTES_MAX)?;
    Ok(salt.into_owned().into_bytes())
}

fn read_hint(fields: &Fields<'_>) -> Result<Option<Return>, ApiError> {
    let Some(hint) = fields.text("return")? else { return Ok(None) };
    check_length(fields, "return", &hint, HINT_BYTES_MAX)?;
    hint.parse().map(Some).map_err(|unknown| fields.wrong("return", unknown))
}

fn read_stop(fields: &Fields<'_>) -> Result<Arc<[String]>, ApiError> {
    let Some(value) = fields.raw("stop") else { return Ok(Arc::new([])) };
    let wrong = |why: fmt::Arguments<'_>| fields.wrong("stop", why);
    let given = if is_text(value) {
        vec![value]
    } else {
        match entries(value, STOPS_MAX) {
            Some(Ok(given)) => given,
            Some(Err(TooMany)) => {
                return Err(wrong(format_args!("at most {STOPS_MAX} texts are possible")));
            }
            None => return Err(wrong(format_args!("expected a text or a list of texts"))),
        }
    };
    let read = |value| {
        let stop = text(value).map_err(|why| wrong(format_args!("{why}")))?;
        if stop.is_empty() {
            return Err(wrong(format_args!("a text is empty")));
        }
        check_length(fields, "stop", &stop, STOP_BYTES_MAX)?;
        Ok(stop.into_owned())
    };
    given.into_iter().map(read).collect()
}

fn check_length(fields: &Fields<'_>, name: &str, text: &str, max: usize) -> Result<(), ApiError> {
    match text.len() {
        bytes if bytes > max => {
            let why = format_args!("a text has {bytes} bytes, at most {max} are possible");
            Err(fields.wrong(name, why))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
