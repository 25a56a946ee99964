//! What is refused, who shares with whom, and how a server ends.
use std::fs;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use candle_core::{Device, Tensor, safetensors};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::Case;
use crate::client::{
    COMPLETIONS, Connection, get, greedy, long_stream, open_stream, post, request, text_of,
};
use crate::server::{Server, chat_model};

pub(crate) const CASES: &[Case] = &[
    ("behaviour/a_prompt_that_never_fits_is_refused_with_numbers", never_fits),
    ("behaviour/a_request_of_many_texts_runs_whole_or_not_at_all", many_texts_of_one_request),
    ("behaviour/one_more_than_the_queue_takes_is_refused", queue_is_full),
    ("behaviour/a_server_that_is_told_to_end_lets_texts_end", drains),
    ("behaviour/a_restart_keeps_a_prefix_on_disk", restart_keeps),
    ("behaviour/salts_share_nothing", salts),
    ("behaviour/hints_of_a_return_change_no_text", returns),
    ("behaviour/a_stop_string_frees_the_blocks", stop_string),
    ("behaviour/only_the_key_opens", key),
    ("behaviour/a_refusal_names_what_is_too_large", too_large),
    ("behaviour/only_named_origins_are_let_in", origins),
    ("behaviour/a_name_and_a_file_start_a_server", name_and_file),
    ("behaviour/connections_beyond_the_limit_wait", connections_wait),
    ("behaviour/the_page_is_one_file", page),
    ("behaviour/a_model_without_a_template_refuses_chats", chat_needs_a_template),
    ("behaviour/a_text_without_numbers_fails_alone", not_a_number),
];

/// About 400 tokens.
fn long_prompt() -> String {
    "Once upon a time, there was a little girl named Lily. ".repeat(24)
}

fn cached(answer: &Value) -> u64 {
    let cached = &answer["usage"]["prompt_tokens_details"]["cached_tokens"];
    cached.as_u64().unwrap_or_else(|| panic!("cached_tokens: {answer}"))
}

fn message(error: &Value) -> &str {
    error["message"].as_str().expect("text")
}

/// The model's context is 512 tokens; the second pool holds 64.
fn never_fits() {
    let tokens = |count: usize| json!({"prompt": vec![403; count], "max_tokens": 4});
    let small = ["--paged", "16,4"];
    for (args, count, numbers) in [(&[][..], 600, ["600", "512"]), (&small, 100, ["7 blocks", "4"])]
    {
        let server = Server::start(args);
        let error = post(server.address(), COMPLETIONS, &tokens(count)).error(400);
        assert_eq!(error["code"], "context_length_exceeded");
        let text = message(&error);
        assert!(numbers.iter().all(|number| text.contains(number)), "{text}");
        let fits = post(server.address(), COMPLETIONS, &tokens(40));
        assert_eq!(fits.status, 200, "{}", fits.text());
        // The sum counts, and not the prompt alone.
        let sum = json!({"prompt": vec![403; 40], "max_tokens": 473});
        let error = post(server.address(), COMPLETIONS, &sum).error(400);
        assert!(message(&error).contains("473") && message(&error).contains("512"), "{error}");
        server.wait_until_idle();
        let counted = server.metrics().labelled("kv_requests_total", "outcome=\"too_large\"");
        assert_eq!(counted, 2);
        server.end();
    }
}

/// Each prompt counts as often as `n` says, before any of them is looked at.
fn many_texts_of_one_request() {
    let server = Server::start(&["--max-queue", "8", "--max-batch", "2"]);
    for (prompt, n) in
        [(json!(["The", "A", "One", "Tom"]), 1), (json!("The"), 8), (json!(["a", "b"]), 3)]
    {
        let body = json!({"prompt": prompt, "n": n, "max_tokens": 3, "ignore_eos": true});
        let answer = post(server.address(), COMPLETIONS, &body);
        assert_eq!(answer.status, 200, "{}", answer.text());
        let prompts = prompt.as_array().map_or(1, Vec::len);
        let texts = answer.json()["choices"].as_array().map(Vec::len);
        assert_eq!(texts, Some(prompts * n), "{}", answer.text());
        assert_eq!(answer.json()["usage"]["completion_tokens"], prompts * n * 3);
    }
    for (prompt, n) in [(json!("The"), 9), (json!(["a", "b", "c"]), 3)] {
        let error = post(server.address(), COMPLETIONS, &json!({"prompt": prompt, "n": n}));
        let error = error.error(400);
        assert_eq!((&error["code"], &error["param"]), (&json!("too_many_texts"), &json!("n")));
        assert!(message(&error).contains("9 texts") && message(&error).contains("at most 8"));
    }
    // All prompts or none: the last one is too long.
    let body = json!({"prompt": [[403], vec![403; 600]], "max_tokens": 3});
    post(server.address(), COMPLETIONS, &body).error(400);
    server.wait_until_idle();
    let counted = server.metrics().labelled("kv_texts_total", "finish=\"length\"");
    assert_eq!(counted, 4 + 8 + 6, "no text of the refused request ran");
    server.end();
}

/// OpenAI's clients show the field that has to change.
fn too_large() {
    let folder = chat_model();
    let server = Server::start(&["--model", folder.path().to_str().expect("UTF-8")]);
    let ask = |path: &str, body: Value| post(server.address(), path, &body).error(400);
    let chat = "/v1/chat/completions";
    let messages = json!([{"role": "user", "content": "Hello"}]);
    let long = json!([{"role": "user", "content": "Hello ".repeat(700)}]);
    for (path, body, field) in [
        (COMPLETIONS, json!({"prompt": "a", "max_tokens": 1000}), "max_tokens"),
        (COMPLETIONS, json!({"prompt": "a ".repeat(700)}), "prompt"),
        (COMPLETIONS, json!({"prompt": "a ".repeat(700), "max_tokens": 1}), "prompt"),
        (COMPLETIONS, json!({"prompt": "a ".repeat(70_000), "max_tokens": 1}), "prompt"),
        (COMPLETIONS, json!({"prompt": vec![403; 600], "max_tokens": 1000}), "prompt"),
        (chat, json!({"messages": messages, "max_tokens": 1000}), "max_tokens"),
        (
            chat,
            json!({"messages": messages, "max_completion_tokens": 1000}),
            "max_completion_tokens",
        ),
        (chat, json!({"messages": long, "max_tokens": 1}), "messages"),
    ] {
        let error = ask(path, body);
        assert_eq!(error["code"], "context_length_exceeded", "{error}");
        assert_eq!(error["param"], field, "{error}");
    }
    let error = ask(COMPLETIONS, json!({"prompt": [1_000_000]}));
    assert!(message(&error).contains("no token 1000000, the model has 512"), "{error}");
    server.end();
}

fn queue_is_full() {
    const CLIENTS: usize = 20;
    let server = Server::start(&["--max-queue", "1", "--max-batch", "1"]);
    let barrier = Barrier::new(CLIENTS);
    let statuses: Vec<u16> = thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|_| {
                scope.spawn(|| {
                    let mut connection = Connection::open(server.address());
                    let mut body = long_stream("The sun", 400);
                    body["stream"] = false.into();
                    barrier.wait();
                    connection.send(&request(COMPLETIONS, &body)).expect("a request");
                    let answer = connection.answer();
                    if answer.status != 200 {
                        assert_eq!(answer.error(429)["code"], "queue_full");
                        assert!(answer.header("Retry-After").is_some());
                    }
                    answer.status
                })
            })
            .collect();
        clients.into_iter().map(|client| client.join().expect("a client")).collect()
    });
    let refused = statuses.iter().filter(|status| **status == 429).count();
    assert!((1..CLIENTS).contains(&refused), "{statuses:?}");
    server.wait_until_idle();
    let counted = server.metrics().labelled("kv_requests_total", "outcome=\"queue_full\"");
    assert_eq!(counted, u64::try_from(refused).expect("few"));
    server.end();
}

/// Texts that run one after another give time to ask while the server is stopping.
fn drains() {
    const TEXTS: usize = 8;
    let server = Server::start(&["--max-batch", "1", "--drain", "100"]);
    let body = long_stream("The sun", 400);
    let mut first = open_stream(server.address(), &body);
    first.next().expect("an event");
    let others: Vec<_> = (1..TEXTS)
        .map(|_| {
            let mut connection = Connection::open(server.address());
            connection.send(&request(COMPLETIONS, &body)).expect("a request");
            connection
        })
        .collect();
    server.wait_until("all are taken", |metrics| {
        metrics.labelled("kv_requests_total", "outcome=\"accepted\"") == 8
    });
    server.terminate();
    // The signal is on its way.
    let end = Instant::now() + Duration::from_secs(20);
    while get(server.address(), "/health").status == 200 {
        assert!(Instant::now() < end, "it does not stop");
    }
    let late = post(server.address(), COMPLETIONS, &greedy("Late", 4));
    assert_eq!(late.error(503)["code"], "stopping");
    assert!(late.header("Retry-After").is_some());
    let (text, reason) = first.finish();
    assert_eq!(reason, "length");
    for other in others {
        let (other, reason) = other.into_events().finish();
        // The event that was read above is missing in the first.
        assert!(other.ends_with(&text) && reason == "length", "{other}");
    }
    server.wait_for_end();
}

fn restart_keeps() {
    let folder = TempDir::new().expect("a folder");
    let tier = format!("disk={}:64MiB", folder.path().display());
    let args = ["--tier", &tier, "--wait", "all"];
    let body = greedy(&long_prompt(), 8);
    let server = Server::start(&args);
    let first = post(server.address(), COMPLETIONS, &body);
    let text = text_of(&first);
    assert_eq!(cached(&first.json()), 0);
    server.end();

    let server = Server::start(&args);
    let again = post(server.address(), COMPLETIONS, &body);
    assert_eq!(text_of(&again), text);
    let kept = cached(&again.json());
    assert!(kept > 0, "nothing was kept");
    let metrics = server.metrics();
    assert_eq!(metrics.labelled("kv_hit_tokens_total", "tier=\"disk\""), kept);
    server.end();
}

fn salts() {
    let server = Server::start(&[]);
    let ask = |salt: Option<&str>| {
        let mut body = greedy(&long_prompt(), 8);
        if let Some(salt) = salt {
            body["cache_salt"] = salt.into();
        }
        let answer = post(server.address(), COMPLETIONS, &body);
        (text_of(&answer), cached(&answer.json()))
    };
    let (text, none) = ask(Some("a"));
    assert_eq!(none, 0);
    let mut hits = 0;
    for (salt, is_first) in [
        (Some("a"), false),
        (Some("b"), true),
        (None, true),
        (Some("A"), true),
        (Some("a\0"), true),
        (None, false),
        (Some("b"), false),
    ] {
        let (other, cached) = ask(salt);
        assert_eq!(other, text, "{salt:?}");
        assert_eq!(cached == 0, is_first, "{salt:?}: {cached} cached");
        hits += cached;
    }
    assert_eq!(server.metrics().sum("kv_hit_tokens_total"), hits);
    let mut empty = greedy("x", 1);
    empty["cache_salt"] = "".into();
    assert_eq!(post(server.address(), COMPLETIONS, &empty).error(400)["param"], "cache_salt");
    server.end();
}

fn returns() {
    let server = Server::start(&[]);
    let ask = |hint: Option<&str>| {
        let mut body = greedy(&long_prompt(), 8);
        body["return"] = hint.into();
        text_of(&post(server.address(), COMPLETIONS, &body))
    };
    let text = ask(None);
    for hint in ["ended", "idle", "tool-call", "within=0.5"] {
        assert_eq!(ask(Some(hint)), text, "{hint}");
    }
    for wrong in ["later", "within=soon", ""] {
        let mut body = greedy("x", 1);
        body["return"] = wrong.into();
        let error = post(server.address(), COMPLETIONS, &body).error(400);
        assert_eq!(
            (&error["param"], &error["type"]),
            (&json!("return"), &json!("invalid_request_error"))
        );
        let message = error["message"].as_str().expect("a text");
        assert!(message.contains("ended, idle, tool-call, within=SECONDS"), "{message}");
    }
    server.end();
}

/// The text goes on for the scheduler, which must learn that no client reads the rest.
fn stop_string() {
    let server = Server::start(&[]);
    let body = greedy("Once upon a time", 60);
    let (whole, _) = text_of(&post(server.address(), COMPLETIONS, &body));
    let stop = whole.split(' ').nth(6).expect("some words");
    // So long that the engine hears of the stop string before the text reaches its length.
    let mut body = long_stream("Once upon a time", 480);
    body["stream"] = false.into();
    body["stop"] = json!([stop]);
    let (text, reason) = text_of(&post(server.address(), COMPLETIONS, &body));
    let end = whole.find(stop).expect("it is there");
    assert_eq!((text.as_str(), reason.as_str()), (&whole[..end], "stop"));
    body["stream"] = true.into();
    let streamed = open_stream(server.address(), &body).finish();
    assert_eq!(streamed, (text, reason));
    server.wait_until_idle();
    // Both count as texts that have stopped; the whole one has reached its length.
    let metrics = server.metrics();
    let texts = ["stop", "length", "cancelled"]
        .map(|finish| metrics.labelled("kv_texts_total", &format!("finish=\"{finish}\"")));
    assert_eq!(texts, [2, 1, 0]);
    server.end();
}

fn key() {
    let server = Server::start(&["--api-key", "correct horse"]);
    let ask = |path: &str, header: &str| {
        let mut connection = Connection::open(server.address());
        let head = format!("GET {path} HTTP/1.1\r\nHost: kv\r\n{header}\r\n");
        connection.send(head.as_bytes()).expect("a request");
        connection.answer()
    };
    for header in [
        "",
        "Authorization: correct horse\r\n",
        "Authorization: Bearer \r\n",
        "Authorization: Bearer correct\r\n",
        "Authorization: Bearer correct horses\r\n",
        "Authorization: Basic correct horse\r\n",
    ] {
        for path in ["/v1/models", "/metrics"] {
            assert_eq!(ask(path, header).error(401)["code"], "invalid_api_key", "{header}");
        }
        assert_eq!(ask("/health", header).status, 200);
    }
    let refused = post(server.address(), COMPLETIONS, &greedy("x", 1));
    assert_eq!(refused.error(401)["type"], "authentication_error");
    assert!(refused.header("WWW-Authenticate").is_some_and(|value| value.starts_with("Bearer")));
    for header in ["Authorization: Bearer", "Authorization: bearer", "x-api-key:"] {
        let header = format!("{header} correct horse\r\n");
        assert_eq!(ask("/v1/models", &header).status, 200, "{header}");
    }
    server.end();
}

/// A browser asks first, without the key, and shows an answer only with the right headers.
fn origins() {
    const PAGE: &str = "http://localhost:3000";
    let ask = |server: &Server, method: &str, origin: &str, more: &str| {
        let mut connection = Connection::open(server.address());
        let head =
            format!("{method} /v1/models HTTP/1.1\r\nHost: kv\r\nOrigin: {origin}\r\n{more}\r\n");
        connection.send(head.as_bytes()).expect("a request");
        connection.answer()
    };
    let preflight = "Access-Control-Request-Method: POST\r\n\
        Access-Control-Request-Headers: authorization, x-stainless-os\r\n";
    let allowed = |answer: &crate::client::Answer| {
        answer.header("Access-Control-Allow-Origin").map(str::to_owned)
    };
    let closed = Server::start(&["--api-key", "key"]);
    assert_eq!(ask(&closed, "OPTIONS", PAGE, preflight).status, 405);
    assert_eq!(allowed(&ask(&closed, "GET", PAGE, "")), None);
    closed.end();
    let server = Server::start(&["--api-key", "key", "--allow-origin", PAGE]);
    let answer = ask(&server, "OPTIONS", PAGE, preflight);
    assert_eq!((answer.status, allowed(&answer).as_deref()), (200, Some(PAGE)));
    let headers = answer.header("Access-Control-Allow-Headers").expect("headers");
    assert!(headers.contains("authorization") && headers.contains("x-stainless-os"), "{headers}");
    // Refusals are shown too.
    let answer = ask(&server, "GET", PAGE, "");
    assert_eq!((answer.status, allowed(&answer).as_deref()), (401, Some(PAGE)));
    let answer = ask(&server, "GET", PAGE, "Authorization: Bearer key\r\n");
    assert_eq!((answer.status, allowed(&answer).as_deref()), (200, Some(PAGE)));
    assert_eq!(allowed(&ask(&server, "OPTIONS", "http://localhost:3001", preflight)), None);
    server.end();
    let server = Server::start(&["--allow-origin", "*"]);
    assert_eq!(allowed(&ask(&server, "GET", PAGE, "")).as_deref(), Some("*"));
    server.end();
}

fn name_and_file() {
    let folder = TempDir::new().expect("a folder");
    let file = folder.path().join("key");
    fs::write(&file, "correct horse\n").expect("a file");
    let file = file.to_str().expect("UTF-8");
    let server = Server::start_at("localhost:0", &["--api-key-file", file]);
    let mut connection = Connection::open(server.address());
    let head = "GET /v1/models HTTP/1.1\r\nHost: kv\r\nAuthorization: Bearer correct horse\r\n\r\n";
    connection.send(head.as_bytes()).expect("a request");
    assert_eq!(connection.answer().status, 200);
    assert_eq!(get(server.address(), "/v1/models").error(401)["code"], "invalid_api_key");
    server.end();
}

fn connections_wait() {
    let server = Server::start(&["--max-connections", "2"]);
    let idle = [Connection::open(server.address()), Connection::open(server.address())];
    let mut third = Connection::open(server.address());
    third.send(b"GET /health HTTP/1.1\r\nHost: kv\r\n\r\n").expect("a request");
    let brief = Duration::from_millis(200);
    third.socket().set_read_timeout(Some(brief)).expect("a timeout");
    assert!(third.read().is_err(), "there was room");
    third.socket().set_read_timeout(Some(brief * 100)).expect("a timeout");
    drop(idle);
    assert_eq!(third.answer().status, 200);
    drop(third);
    server.end();
}

/// The page refers to nothing outside, so a server in a closed network shows it too.
fn page() {
    let server = Server::start(&["--api-key", "key"]);
    let page = get(server.address(), "/");
    assert_eq!(page.status, 200);
    let kind = page.header("Content-Type").expect("a type");
    assert!(kind.starts_with("text/html"), "{kind}");
    let text = page.text();
    for outside in ["http://", "https://", "src=", "@import", "url("] {
        assert!(!text.contains(outside), "{outside}");
    }
    for name in ["kv_blocks_used", "kv_hit_tokens_total", "kv_step_seconds_sum"] {
        assert!(text.contains(name), "{name}");
    }
    server.end();
}

fn chat_needs_a_template() {
    let body = json!({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4});
    let server = Server::start(&[]);
    let error = post(server.address(), "/v1/chat/completions", &body).error(400);
    assert!(message(&error).contains("template"), "{error}");
    server.end();
    let folder = chat_model();
    let server = Server::start(&["--model", folder.path().to_str().expect("UTF-8")]);
    let answer = post(server.address(), "/v1/chat/completions", &body);
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(answer.json()["choices"][0]["message"]["role"], "assistant");
    server.end();
}

/// Makes the bundled model with NaN in place of one token's embedding, but not in the head.
fn damaged_model(token: usize) -> TempDir {
    let folder = chat_model();
    let (config, weights) =
        (folder.path().join("config.json"), folder.path().join("model.safetensors"));
    let text = fs::read_to_string(&config).expect("a config");
    let mut fields: Value = serde_json::from_str(&text).expect("JSON");
    fields["tie_word_embeddings"] = false.into();
    let mut tensors = safetensors::load(&weights, &Device::Cpu).expect("weights");
    let embedding = tensors["model.embed_tokens.weight"].clone();
    let mut rows = embedding.to_vec2::<f32>().expect("rows");
    rows[token].fill(f32::NAN);
    tensors.insert("lm_head.weight".to_owned(), embedding);
    let rows = Tensor::new(rows, &Device::Cpu).expect("a tensor");
    tensors.insert("model.embed_tokens.weight".to_owned(), rows);
    for link in [&config, &weights] {
        fs::remove_file(link).expect("a link");
    }
    fs::write(&config, fields.to_string()).expect("written");
    safetensors::save(&tensors, &weights).expect("written");
    folder
}

/// A text whose logits are not numbers gets an error; those beside it go on, and so does the
/// server.
fn not_a_number() {
    /// A byte that is part of no story.
    const TOKEN: usize = 10;
    let folder = damaged_model(TOKEN);
    let server = Server::start(&["--model", folder.path().to_str().expect("a path")]);
    let body = long_stream("Once upon a time", 300);
    let alone = open_stream(server.address(), &body).finish();
    let mut beside = open_stream(server.address(), &body);
    beside.next().expect("an event");
    for _ in 0..5 {
        let bad = json!({"prompt": [TOKEN, TOKEN], "max_tokens": 4});
        let error = post(server.address(), COMPLETIONS, &bad).error(500);
        assert!(message(&error).contains("not a number"), "{error}");
    }
    let (text, reason) = beside.finish();
    assert!(alone.0.ends_with(&text) && reason == alone.1, "{text}");
    assert!(text.len() > alone.0.len() / 2, "most of it was computed after the first event");
    server.wait_until_idle();
    let log = server.end_with_log();
    assert_eq!(log.matches("a text failed").count(), 5, "{log}");
}
