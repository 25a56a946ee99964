//! What routers ask: the routes, and the metrics under the names that they read.
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::Case;
use crate::client::{COMPLETIONS, Connection, get, greedy, post};
use crate::server::{Server, chat_model};

pub(crate) const CASES: &[Case] = &[
    ("fleet/an_instance_says_who_it_is", info),
    ("fleet/rendered_tokens_are_those_that_run", rendered),
    ("fleet/a_chat_is_rendered_by_its_template", chat),
    ("fleet/wrong_texts_are_refused_by_field", refused),
    ("fleet/routes_that_compute_need_the_key", key),
    ("fleet/metrics_have_the_names_that_routers_read", metrics),
    ("fleet/a_subscriber_hears_what_is_cached", events),
    ("fleet/salted_prompts_are_private_unless_told", salted_events),
    ("fleet/addresses_that_cannot_be_bound_end_the_server", wrong_endpoints),
];

const RENDER: &str = "/v1/completions/render";
const TEXT: &str = "Once upon a time, there was a little girl named Lily.";

fn tokens(of: &Value) -> Vec<u64> {
    let list = of.as_array().unwrap_or_else(|| panic!("tokens: {of}"));
    list.iter().map(|token| token.as_u64().expect("a token")).collect()
}

fn info() {
    let server = Server::start(&["--paged", "8,32"]);
    let ask = |path| get(server.address(), path).json();
    let name = ask("/v1/models")["data"][0]["id"].take();
    for path in ["/get_server_info", "/server_info"] {
        let info = ask(path);
        assert_eq!((&info["model_id"], &info["kv_block_size"]), (&name, &json!(8)), "{path}");
        assert_eq!(info["max_model_len"], 512);
    }
    assert_eq!(ask("/model_info")["model_path"], name);
    assert_eq!(ask("/version"), json!({"version": env!("CARGO_PKG_VERSION")}));
    assert_eq!(ask("/kv_event_sources"), json!({}));
    server.end();
}

fn rendered() {
    let server = Server::start(&[]);
    let ask = |path, body: &Value| post(server.address(), path, body).json();
    let text = tokens(&ask("/tokenize", &json!({"prompt": TEXT}))["tokens"]);
    let ran = ask(COMPLETIONS, &greedy(TEXT, 1));
    assert_eq!(ran["usage"]["prompt_tokens"], text.len());
    let prompts = json!({
        "prompt": [TEXT, "Once"], "max_tokens": 3, "temperature": 0.5, "cache_salt": "tenant",
    });
    let all = ask(RENDER, &prompts);
    assert_eq!(all.as_array().map(Vec::len), Some(2));
    assert_eq!(tokens(&all[0]["token_ids"]), text);
    assert_eq!(tokens(&all[1]["token_ids"])[..], text[..2]);
    assert_eq!(all[0]["sampling_params"]["max_tokens"], 3);
    assert_eq!(all[0]["sampling_params"]["temperature"], 0.5);
    assert_eq!(all[0]["cache_salt"], "tenant");
    assert!(all[0]["request_id"].as_str().is_some_and(|id| id.starts_with("cmpl-")));
    // What routers add changes no token; what does is refused.
    let added = json!({"prompt": TEXT, "skip_special_tokens": true, "top_k": 5, "echo": true});
    assert_eq!(tokens(&ask(RENDER, &added)[0]["token_ids"]), text);
    let other = json!({"prompt": TEXT, "suffix": "end"});
    let error = post(server.address(), RENDER, &other).error(400);
    assert_eq!(
        (&error["param"], &error["code"]),
        (&json!("suffix"), &json!("unsupported_parameter"))
    );
    // Tokens stay as they are.
    let again = ask(RENDER, &json!({"prompt": text}));
    assert_eq!(tokens(&again[0]["token_ids"]), text);
    assert_eq!(again[0]["cache_salt"], Value::Null);
    server.end();
}

fn chat() {
    let model = chat_model();
    let server = Server::start(&["--model", model.path().to_str().expect("UTF-8")]);
    let ask = |path, body: &Value| post(server.address(), path, body).json();
    let chat = json!({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1});
    let one = ask("/v1/chat/completions/render", &chat);
    let text = tokens(&one["token_ids"]);
    assert!(one["request_id"].as_str().is_some_and(|id| id.starts_with("chatcmpl-")));
    assert_eq!(tokens(&ask("/tokenize", &chat)["tokens"]), text);
    let ran = ask("/v1/chat/completions", &chat);
    assert_eq!(ran["usage"]["prompt_tokens"], text.len());
    server.end();
}

fn refused() {
    let server = Server::start(&[]);
    for (path, body, param) in [
        (RENDER, json!({}), "prompt"),
        (RENDER, json!({"prompt": "x", "model": "other"}), "model"),
        (RENDER, json!({"prompt": [4_000_000]}), "prompt"),
        (RENDER, json!({"prompt": vec![403; 600]}), "prompt"),
        (RENDER, json!({"prompt": "x", "temperature": 3}), "temperature"),
        ("/v1/chat/completions/render", json!({"messages": []}), "messages"),
        ("/tokenize", json!({}), "prompt"),
        ("/tokenize", json!({"prompt": 5}), "prompt"),
        ("/tokenize", json!({"prompt": "x", "messages": []}), "messages"),
        ("/tokenize", json!({"prompt": "x", "add_special_tokens": false}), "add_special_tokens"),
        ("/tokenize", json!({"prompt": "x", "return_token_strs": true}), "return_token_strs"),
        ("/tokenize", json!({"prompt": "x", "model": "other"}), "model"),
    ] {
        let answer = post(server.address(), path, &body);
        let status = if param == "model" { 404 } else { 400 };
        assert_eq!(answer.error(status)["param"], param, "{path}: {body}");
    }
    assert_eq!(server.metrics().sum("kv_prompt_tokens_total"), 0, "nothing ran");
    server.end();
}

fn key() {
    let server = Server::start(&["--api-key", "secret"]);
    for path in [RENDER, "/v1/chat/completions/render", "/tokenize"] {
        let answer = post(server.address(), path, &json!({"prompt": "x"}));
        assert_eq!(answer.error(401)["code"], "invalid_api_key", "{path}");
    }
    for path in ["/get_server_info", "/server_info", "/model_info", "/version", "/kv_event_sources"]
    {
        assert_eq!(get(server.address(), path).status, 200, "{path}");
    }
    server.end();
}

fn metrics() {
    let server = Server::start(&["--paged", "8,32"]);
    for _ in 0..2 {
        assert_eq!(post(server.address(), COMPLETIONS, &greedy(TEXT, 4)).status, 200);
    }
    server.wait_until_idle();
    let mut connection = Connection::open(server.address());
    let head = "GET /metrics HTTP/1.1\r\nHost: kv\r\nConnection: close\r\n\r\n";
    connection.send(head.as_bytes()).expect("a request");
    let text = connection.answer().text();
    let config = text.lines().find(|line| line.starts_with("vllm:cache_config_info{"));
    let config = config.expect("the pool");
    for label in ["engine=\"0\"", "block_size=\"8\"", "num_gpu_blocks=\"32\"", "model_name="] {
        assert!(config.contains(label), "{config}");
    }
    for name in ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"] {
        assert!(text.contains(&format!("vllm:{name}{{")), "{name}: {text}");
    }
    let metrics = server.metrics();
    for (own, of_vllm) in [
        ("kv_prompt_tokens_total", "vllm:prefix_cache_queries_total"),
        ("kv_prompt_tokens_total", "vllm:prompt_tokens_total"),
        ("kv_hit_tokens_total", "vllm:prefix_cache_hits_total"),
        ("kv_generated_tokens_total", "vllm:generation_tokens_total"),
        ("kv_time_to_first_token_seconds_count", "vllm:time_to_first_token_seconds_count"),
    ] {
        assert_eq!(metrics.sum(of_vllm), metrics.sum(own), "{of_vllm}");
        assert!(metrics.sum(of_vllm) > 0, "{of_vllm}");
    }
    let ends = metrics.sum("vllm:request_success_total");
    assert_eq!((ends, metrics.sum("kv_texts_total")), (2, 2));
    server.end();
}

/// A subscriber of everything, which reads bytes and does not parse them.
struct Subscriber {
    stream: TcpStream,
    heard: Vec<u8>,
}

impl Subscriber {
    fn new(endpoint: &Value) -> Self {
        let address = endpoint.as_str().and_then(|text| text.strip_prefix("tcp://"));
        let mut stream = TcpStream::connect(address.expect("an endpoint")).expect("a connection");
        stream.set_read_timeout(Some(Duration::from_millis(50))).expect("a timeout");
        let mut hello = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 0];
        hello.extend(b"NULL");
        hello.resize(64, 0);
        hello.extend(b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB");
        // A message of one byte: all topics.
        hello.extend([0, 1, 1]);
        stream.write_all(&hello).expect("a greeting");
        Self { stream, heard: Vec::new() }
    }

    /// Reads for a while; returns the number of times that the bytes have been heard.
    fn count(&mut self, wanted: &[u8], time: Duration) -> usize {
        let end = Instant::now() + time;
        let mut buffer = [0; 1 << 13];
        while Instant::now() < end {
            match self.stream.read(&mut buffer) {
                Ok(0) => panic!("the publisher closed"),
                Ok(read) => self.heard.extend(&buffer[..read]),
                Err(_) => {}
            }
        }
        self.heard.windows(wanted.len()).filter(|bytes| *bytes == wanted).count()
    }

    /// Reads until the bytes are heard.
    fn wait_for(&mut self, wanted: &[u8]) {
        let end = Instant::now() + Duration::from_secs(10);
        while self.count(wanted, Duration::from_millis(50)) == 0 {
            assert!(Instant::now() < end, "{:?} is not heard", String::from_utf8_lossy(wanted));
        }
    }
}

/// Returns tokens of two blocks as MessagePack has numbers from 256 on.
fn block(first: u32) -> (Vec<u32>, Vec<u8>) {
    let tokens: Vec<_> = (first..first + 16).collect();
    let bytes = tokens.iter().flat_map(|token| {
        let [.., high, low] = token.to_be_bytes();
        [0xcd, high, low]
    });
    let bytes = bytes.collect();
    (tokens, bytes)
}

const EVENTS: &[&str] = &["--events", "tcp://127.0.0.1:0", "--paged", "16,32"];

fn events() {
    let more = ["--events-replay", "tcp://127.0.0.1:0", "--events-topic", "kv@pod@model"];
    let server = Server::start(&[EVENTS, &more].concat());
    let sources = get(server.address(), "/kv_event_sources").json();
    let source = &sources["0"];
    assert_eq!((&source["publisher"], &source["topic"]), (&json!("zmq"), &json!("kv@pod@model")));
    assert!(source["replay_endpoint"].as_str().is_some_and(|text| text.starts_with("tcp://127.")));
    let mut subscriber = Subscriber::new(&source["endpoint"]);
    subscriber.wait_for(b"AllBlocksCleared");
    subscriber.wait_for(b"kv@pod@model");
    let (mut tokens, bytes) = block(300);
    tokens.push(403);
    let body = json!({"prompt": tokens, "max_tokens": 1});
    assert_eq!(post(server.address(), COMPLETIONS, &body).status, 200);
    subscriber.wait_for(b"BlockStored");
    subscriber.wait_for(&bytes);
    assert_eq!(subscriber.count(b"BlockRemoved", Duration::ZERO), 0);
    server.end();
}

fn salted_events() {
    for is_told in [false, true] {
        let more: &[&str] = if is_told { &["--events-salted"] } else { &[] };
        let server = Server::start(&[EVENTS, more].concat());
        let sources = get(server.address(), "/kv_event_sources").json();
        let mut subscriber = Subscriber::new(&sources["0"]["endpoint"]);
        subscriber.wait_for(b"AllBlocksCleared");
        let (mut tokens, bytes) = block(300);
        tokens.push(403);
        let secret = json!({"prompt": tokens, "max_tokens": 1, "cache_salt": "tenant-a"});
        assert_eq!(post(server.address(), COMPLETIONS, &secret).status, 200);
        let (mut tokens, open) = block(330);
        tokens.push(403);
        let body = json!({"prompt": tokens, "max_tokens": 1});
        assert_eq!(post(server.address(), COMPLETIONS, &body).status, 200);
        subscriber.wait_for(&open);
        let heard = [&bytes[..], b"tenant-a"]
            .map(|wanted| subscriber.count(wanted, Duration::from_millis(200)) > 0);
        assert_eq!(heard, [is_told; 2]);
        server.end();
    }
}

fn wrong_endpoints() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let taken = format!("tcp://{}", taken.local_addr().expect("an address"));
    for endpoint in ["5557", "udp://127.0.0.1:1", "tcp://127.0.0.1", &taken] {
        let mut kv = Command::new(env!("CARGO_BIN_EXE_kv"));
        kv.args(["serve", "--addr", "127.0.0.1:0", "--events", endpoint]).stdin(Stdio::null());
        let output = kv.output().expect("the program");
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && error.contains(endpoint), "{endpoint}: {error}");
    }
}
