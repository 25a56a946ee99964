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
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read_as(kind: Kind, value: &Value) -> Result<Wanted, ApiError> {
        let names = if kind == Kind::Chat { CHAT } else { COMPLETION };
        Wanted::read(&Fields::parse(value.to_string().as_bytes(), names)?, kind)
    }

    fn read(value: &Value) -> Result<Wanted, ApiError> {
        read_as(Kind::Completion, value)
    }

    fn refused(value: &Value) -> Value {
        read(value).expect_err("it is refused").body()
    }

    #[test]
    fn what_is_absent_has_the_defaults_of_openai() {
        let wanted = read(&json!({})).expect("nothing is needed");
        assert_eq!((wanted.temperature, wanted.top_p, wanted.n), (1.0, 1.0, 1));
        assert_eq!((wanted.stream, wanted.ignore_eos, wanted.max_tokens), (false, false, None));
        assert_eq!(wanted, read(&json!({"n": null, "stop": null, "seed": null})).expect("null"));
    }

    #[test]
    fn fields_are_read() {
        let wanted = read(&json!({
            "model": "m", "temperature": 0, "top_p": 0.5, "seed": -1, "stop": "x", "n": 3,
            "best_of": 3, "stream": true, "stream_options": {"include_usage": true, "more": 1},
            "ignore_eos": true, "skip_special_tokens": true, "cache_salt": "s", "max_tokens": 7,
            "return": "within=2.5",
            "user": "u", "tools": [], "logit_bias": {}, "frequency_penalty": 0.0,
            "response_format": {"type": "text"},
        }))
        .expect("all of it is supported");
        let expected = Wanted {
            model: Some("m".to_owned()),
            temperature: 0.0,
            top_p: 0.5,
            seed: Some(u64::MAX),
            stop: Arc::new(["x".to_owned()]),
            n: 3,
            stream: true,
            include_usage: true,
            ignore_eos: true,
            skip_special: true,
            salt: b"s".to_vec(),
            hint: Some(Return::Within(std::time::Duration::from_millis(2500))),
            max_tokens: Some(Limit { tokens: 7, field: "max_tokens" }),
        };
        assert_eq!(wanted, expected);
        let both = json!({"max_tokens": 7, "max_completion_tokens": 8});
        let limit = read_as(Kind::Chat, &both).expect("both").max_tokens;
        assert_eq!(limit, Some(Limit { tokens: 8, field: "max_completion_tokens" }));
    }

    #[test]
    fn a_refusal_names_the_field() {
        for (value, field) in [
            (json!({"temperature": 2.5}), "temperature"),
            (json!({"temperature": -0.1}), "temperature"),
            (json!({"temperature": "warm"}), "temperature"),
            (json!({"top_p": 1.01}), "top_p"),
            (json!({"n": 0}), "n"),
            (json!({"n": 65}), "n"),
            (json!({"n": 2, "best_of": 3}), "best_of"),
            (json!({"best_of": 2}), "best_of"),
            (json!({"max_tokens": 0}), "max_tokens"),
            (json!({"max_tokens": -1}), "max_tokens"),
            (json!({"max_tokens": 1.5}), "max_tokens"),
            (json!({"seed": 1.5}), "seed"),
            (json!({"stop": ["a", ""]}), "stop"),
            (json!({"stop": vec!["a"; 17]}), "stop"),
            (json!({"stop": 1}), "stop"),
            (json!({"stop": ["a", 1]}), "stop"),
            (json!({"stop": "a".repeat(STOP_BYTES_MAX + 1)}), "stop"),
            (json!({"cache_salt": ""}), "cache_salt"),
            (json!({"cache_salt": 5}), "cache_salt"),
            (json!({"cache_salt": "a".repeat(SALT_BYTES_MAX + 1)}), "cache_salt"),
            (json!({"return": "soon"}), "return"),
            (json!({"return": ""}), "return"),
            (json!({"return": 5}), "return"),
            (json!({"return": {"within": 5}}), "return"),
            (json!({"return": "within=-1"}), "return"),
            (json!({"return": "within=".to_owned() + &"1".repeat(HINT_BYTES_MAX)}), "return"),
            (json!({"model": ["m"]}), "model"),
            (json!({"stream": "yes"}), "stream"),
            (json!({"stream_options": true}), "stream_options"),
            (json!({"tools": [{"type": "function"}]}), "tools"),
            (json!({"tool_choice": "auto"}), "tool_choice"),
            (json!({"logprobs": 1}), "logprobs"),
            (json!({"logprobs": true}), "logprobs"),
            (json!({"logit_bias": {"1": 2}}), "logit_bias"),
            (json!({"presence_penalty": 0.5}), "presence_penalty"),
            (json!({"response_format": {"type": "json_object"}}), "response_format"),
            (json!({"suffix": "x"}), "suffix"),
            (json!({"echo": true}), "echo"),
        ] {
            assert_eq!(refused(&value)["error"]["param"], field, "{value}");
        }
    }

    /// A refusal tells the client the possible values, in the client's terms.
    #[test]
    fn a_refusal_says_what_is_possible() {
        for (value, words) in [
            (json!({"n": "x"}), "n: expected a whole number"),
            (json!({"stop": 5}), "stop: expected a text or a list of texts"),
            (json!({"stop": [5]}), "stop: expected a text"),
            (json!({"temperature": "x"}), "temperature: expected a number from 0 to 2"),
            (json!({"stream": 1}), "stream: expected true or false"),
            (json!({"seed": 1.5}), "seed: expected a whole number of 64 bits"),
            (json!({"max_tokens": {}}), "max_tokens: expected a whole number, at least 1"),
            (json!({"stream_options": {"include_usage": 5}}), "stream_options: expected an object"),
            (
                json!({"return": "soon"}),
                "return: unknown return hint \"soon\", expected one of ended, idle, tool-call, within=",
            ),
        ] {
            let error = refused(&value);
            let message = error["error"]["message"].as_str().expect("text");
            assert!(message.starts_with(words), "{value}: {message}");
        }
    }

    /// Another server would do something else for each of them.
    #[test]
    fn fields_of_other_servers_are_refused_by_name() {
        for (name, value) in [
            ("stop_token_ids", json!([5])),
            ("min_tokens", json!(50)),
            ("guided_json", json!({})),
            ("structured_outputs", json!({"regex": "a"})),
            ("n_predict", json!(5)),
            ("repeat_penalty", json!(1.1)),
            ("typical_p", json!(0.5)),
            ("continue_final_message", json!(true)),
            ("add_generation_prompt", json!(false)),
            ("chat_template_kwargs", json!({"enable_thinking": false})),
            ("top_k", json!(40)),
            ("regex", json!("a+")),
            ("grammar", json!("root ::= \"a\"")),
        ] {
            let error = refused(&json!({name: value}));
            assert_eq!(error["error"]["param"], name);
            assert_eq!(error["error"]["code"], "unsupported_parameter");
            let error = read_as(Kind::Chat, &json!({name: value})).expect_err("refused").body();
            assert_eq!(error["error"]["param"], name);
        }
        let neutral = json!({
            "stop_token_ids": [], "min_tokens": 0, "repeat_penalty": 1.0, "typical_p": 1,
            "add_generation_prompt": true, "chat_template_kwargs": {}, "top_k": -1, "grammar": "",
            "guided_json": null, "cache_prompt": true, "id_slot": -1, "metadata": {"a": "b"},
        });
        assert!(read(&neutral).is_ok());
    }
}
