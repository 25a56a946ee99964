//! Fields that are read, and those that are refused by name.
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
            "return: unknown return hint \"soon\", expected one of ended, idle, tool-call",
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
