//! A model with recurrent states: what `cached_tokens` says of its prompts and chats.
use std::collections::HashMap;
use std::fs;

use candle_core::{Device, Tensor, safetensors};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::Case;
use crate::client::{COMPLETIONS, post};
use crate::recorded::recorded;
use crate::server::{Server, chat_model};

pub(crate) const CASES: &[Case] = &[
    ("states/the_same_prompt_again_computes_one_token", again),
    ("states/chats_share_the_system_message_and_go_on_from_any_answer", chats),
];

/// Makes a folder with a recorded model, the bundled tokenizer and a chat template.
fn hybrid() -> TempDir {
    let folder = chat_model();
    let cases = recorded();
    let case = cases.iter().find(|case| case.name == "qwen3_5_text").expect("a recorded model");
    for file in ["config.json", "model.safetensors"] {
        fs::remove_file(folder.path().join(file)).expect(file);
    }
    fs::write(folder.path().join("config.json"), case.config.to_string()).expect("written");
    let tensor = |(name, shape, values): (&str, &[usize], Vec<f32>)| {
        (name.to_owned(), Tensor::from_vec(values, shape, &Device::Cpu).expect("a tensor"))
    };
    let tensors: HashMap<_, _> = case.weights().map(tensor).collect();
    safetensors::save(&tensors, folder.path().join("model.safetensors")).expect("written");
    folder
}

fn start(folder: &TempDir) -> Server {
    let path = folder.path().to_str().expect("UTF-8");
    Server::start(&["--model", path, "--max-batch", "8"])
}

/// Returns the tokens of a prompt, and those of them that were cached.
fn usage(server: &Server, path: &str, body: &Value) -> (u64, u64) {
    let answer = post(server.address(), path, body);
    assert_eq!(answer.status, 200, "{}", answer.text());
    let usage = &answer.json()["usage"];
    let number = |value: &Value| value.as_u64().unwrap_or_else(|| panic!("{usage}"));
    let cached = number(&usage["prompt_tokens_details"]["cached_tokens"]);
    (number(&usage["prompt_tokens"]), cached)
}

fn again() {
    let folder = hybrid();
    let server = start(&folder);
    let body = |tokens: &[u32]| {
        let mut body = json!({"prompt": tokens, "max_tokens": 3, "temperature": 0});
        body["ignore_eos"] = true.into();
        body
    };
    for len in [2, 5, 16, 17, 40] {
        let prompt: Vec<u32> = (0..len).map(|at| 20 + len + at * 3).collect();
        let of = |prompt: &[u32]| usage(&server, COMPLETIONS, &body(prompt));
        let len = u64::from(len);
        assert_eq!(of(&prompt), (len, 0));
        assert_eq!(of(&prompt), (len, len - 1));
        // Another end: what is kept in front of the last token.
        let other = [&prompt[..prompt.len() - 1], &[7, 8, 9]].concat();
        assert_eq!(of(&other), (len + 2, len - 1));
        assert_eq!(of(&other), (len + 2, len + 1));
    }
    let metrics = server.metrics();
    assert_eq!(metrics.sum("kv_snapshot_evictions_total"), 0);
    server.end();
}

fn chats() {
    const CHATS: &str = "/v1/chat/completions";
    let folder = hybrid();
    let server = start(&folder);
    let message = |role: &str, content: &str| json!({"role": role, "content": content});
    let system = message("system", "You are Tom. You like the park, a red ball and a big dog.");
    let chat = |messages: &[Value]| {
        let all = [std::slice::from_ref(&system), messages].concat();
        usage(&server, CHATS, &json!({"messages": all, "max_tokens": 4, "temperature": 0}))
    };
    let (one, none) = chat(&[message("user", "Hello")]);
    assert_eq!(none, 0);
    // Another chat begins with the same message of the system.
    let (_, of_system) = chat(&[message("user", "Where is the dog?")]);
    assert!(of_system > 10 && of_system < one, "{of_system} of {one}");
    // The next turn goes on from the history, whatever the answer has become.
    let turn = [message("user", "Hello"), message("assistant", "Hi!"), message("user", "Bye")];
    let (two, of_history) = chat(&turn);
    assert!(of_history > of_system && of_history < one, "{of_history} of {one} and {two}");
    assert_eq!(chat(&turn).1, two - 1);
    server.end();
}
