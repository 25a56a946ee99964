//! What a request asks for: its fields, checked once, with the name of the one that is wrong.
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::api::ApiError;

/// The fields of a JSON object.
#[derive(Debug)]
pub(super) struct Fields(Map<String, Value>);

impl Fields {
    /// Parses the body of a request.
    pub(super) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        match serde_json::from_slice(body) {
            Ok(Value::Object(fields)) => Ok(Self(fields)),
            Ok(_) => Err(ApiError::bad("the body is JSON, but no object")),
            Err(error) => Err(ApiError::bad(format!("the body is not JSON: {error}"))),
        }
    }

    /// Returns a field; `None` if it is absent or null.
    pub(super) fn get<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, ApiError> {
        match self.0.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match T::deserialize(value) {
                Ok(value) => Ok(Some(value)),
                Err(error) => Err(ApiError::bad(format!("{name}: {error}")).about(name)),
            },
        }
    }

    /// Refuses fields that would change the answer and that this server does not know. What it
    /// never heard of is ignored.
    pub(super) fn check_supported(&self) -> Result<(), ApiError> {
        for (name, changes_nothing) in UNSUPPORTED {
            let value = self.0.get(*name).filter(|value| !value.is_null());
            if value.is_some_and(|value| !changes_nothing.contains(&value.to_string().as_str())) {
                let error = ApiError::bad(format!("{name} is not supported")).about(*name);
                return Err(error.with_code("unsupported_parameter"));
            }
        }
        Ok(())
    }
}

/// Fields that are not supported, and the JSON of values that ask for nothing.
const UNSUPPORTED: &[(&str, &[&str])] = &[
    ("audio", &[]),
    ("echo", &["false"]),
    ("frequency_penalty", &["0", "0.0"]),
    ("function_call", &["\"none\""]),
    ("functions", &["[]"]),
    ("logit_bias", &["{}"]),
    ("logprobs", &["false"]),
    ("min_p", &["0", "0.0"]),
    ("modalities", &["[\"text\"]"]),
    ("prediction", &[]),
    ("presence_penalty", &["0", "0.0"]),
    ("repetition_penalty", &["1", "1.0"]),
    ("response_format", &["{\"type\":\"text\"}"]),
    ("suffix", &["\"\""]),
    ("tool_choice", &["\"none\""]),
    ("tools", &["[]"]),
    ("top_k", &["0", "-1"]),
    ("top_logprobs", &["0"]),
    ("web_search_options", &[]),
];

/// What completions and chats have in common.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Wanted {
    pub(super) model: Option<String>,
    pub(super) temperature: f64,
    pub(super) top_p: f64,
    pub(super) seed: Option<u64>,
    /// Texts that end a text, none of them empty.
    pub(super) stop: Vec<String>,
    /// Texts for each prompt.
    pub(super) n: usize,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
    pub(super) ignore_eos: bool,
    pub(super) salt: Vec<u8>,
    /// `None`: as many as the kind of request has by default.
    pub(super) max_tokens: Option<u32>,
}

/// Most texts for one prompt, and most stop strings.
const TEXTS_MAX: usize = 64;
const STOPS_MAX: usize = 16;

#[derive(Debug, serde::Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

#[derive(Debug, serde::Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

impl Wanted {
    /// Reads and checks the fields; `max_tokens` are the names of the limit, the newest first.
    pub(super) fn read(fields: &Fields, max_tokens: &[&str]) -> Result<Self, ApiError> {
        fields.check_supported()?;
        let within = |name: &str, default: f64, range: std::ops::RangeInclusive<f64>| {
            let value = fields.get::<f64>(name)?.unwrap_or(default);
            if range.contains(&value) {
                return Ok(value);
            }
            let (from, to) = range.into_inner();
            Err(ApiError::bad(format!("{name} is {value}, from {from} to {to} is possible"))
                .about(name))
        };
        let n = fields.get::<usize>("n")?.unwrap_or(1);
        if !(1..=TEXTS_MAX).contains(&n) {
            let error = format!("n is {n}, from 1 to {TEXTS_MAX} is possible");
            return Err(ApiError::bad(error).about("n"));
        }
        if let Some(best_of) = fields.get::<usize>("best_of")?.filter(|best_of| *best_of != n) {
            let error = format!("best_of is {best_of}, only that of n ({n}) is supported");
            return Err(ApiError::bad(error).about("best_of"));
        }
        let mut limit = None;
        for name in max_tokens {
            let given = fields.get::<u32>(name)?;
            if given == Some(0) {
                return Err(
                    ApiError::bad(format!("{name} is 0, at least 1 is needed")).about(*name)
                );
            }
            limit = limit.or(given);
        }
        let salt = fields.get::<String>("cache_salt")?;
        if salt.as_deref() == Some("") {
            let error = "cache_salt is empty: leave it out to share the cache with everybody";
            return Err(ApiError::bad(error).about("cache_salt"));
        }
        let include_usage = fields.get::<StreamOptions>("stream_options")?;
        Ok(Self {
            model: fields.get("model")?,
            temperature: within("temperature", 1.0, 0.0..=2.0)?,
            top_p: within("top_p", 1.0, 0.0..=1.0)?,
            // OpenAI's seeds are signed.
            seed: fields.get::<i64>("seed")?.map(i64::cast_unsigned),
            stop: read_stop(fields)?,
            n,
            stream: fields.get("stream")?.unwrap_or(false),
            include_usage: include_usage.and_then(|options| options.include_usage) == Some(true),
            ignore_eos: fields.get("ignore_eos")?.unwrap_or(false),
            salt: salt.unwrap_or_default().into_bytes(),
            max_tokens: limit,
        })
    }
}

fn read_stop(fields: &Fields) -> Result<Vec<String>, ApiError> {
    let stop = match fields.get("stop")? {
        None => Vec::new(),
        Some(OneOrMany::One(stop)) => vec![stop],
        Some(OneOrMany::Many(stop)) => stop,
    };
    let wrong = if stop.len() > STOPS_MAX {
        format!("stop has {} texts, at most {STOPS_MAX} are possible", stop.len())
    } else if stop.iter().any(String::is_empty) {
        "stop has an empty text".to_owned()
    } else {
        return Ok(stop);
    };
    Err(ApiError::bad(wrong).about("stop"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(value: &Value) -> Result<Wanted, ApiError> {
        Wanted::read(&Fields::parse(value.to_string().as_bytes())?, &["max_tokens"])
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
            "ignore_eos": true, "cache_salt": "s", "max_tokens": 7, "user": "u", "tools": [],
            "logit_bias": {}, "frequency_penalty": 0.0, "response_format": {"type": "text"},
        }))
        .expect("all of it is supported");
        let expected = Wanted {
            model: Some("m".to_owned()),
            temperature: 0.0,
            top_p: 0.5,
            seed: Some(u64::MAX),
            stop: vec!["x".to_owned()],
            n: 3,
            stream: true,
            include_usage: true,
            ignore_eos: true,
            salt: b"s".to_vec(),
            max_tokens: Some(7),
        };
        assert_eq!(wanted, expected);
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
            (json!({"cache_salt": ""}), "cache_salt"),
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

    #[test]
    fn a_body_that_is_no_object_is_refused() {
        for body in [&b""[..], b"{", b"[]", b"\"x\"", b"{\"a\": \xff}", b"nul"] {
            let error = Fields::parse(body).expect_err("no object");
            assert_eq!(error.body()["error"]["type"], "invalid_request_error");
        }
    }
}
