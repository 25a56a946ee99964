//! The cost of one request, and of many: memory is bounded by the length of the body and by limits
//! that are checked before any work, time by a deadline. Other clients are served meanwhile.
use std::io::Read;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kv_testkit::rng::Rng;
use serde_json::{Value, json};

use crate::client::{Answer, COMPLETIONS, Connection, get, greedy, post};
use crate::random::{body, list, text};
use crate::server::{Server, chat_model};
use crate::{Case, number};

pub(crate) const CASES: &[Case] = &[
    ("memory/a_small_request_costs_little", small_request),
    ("memory/a_long_body_is_refused_before_it_is_taken_apart", long_bodies),
    ("memory/random_bodies_cost_a_multiple_of_their_length", random_bodies),
    ("memory/a_request_that_drips_is_ended", drips),
    ("memory/a_flood_of_long_bodies_leaves_room_for_others", flood),
    ("memory/heads_that_do_not_end_are_cut", long_heads),
];

const CHATS: &str = "/v1/chat/completions";

/// Longest body, with some bytes for the fields around a long one.
const BODY_MAX: usize = 8 << 20;
const LONG: usize = BODY_MAX - 200;

/// Longest that anybody else may wait for an answer on a machine that is busy.
const PATIENCE: Duration = Duration::from_secs(10);

/// Returns the most memory that a request may take, in KiB: 64 MiB and eight times its body.
fn memory_max(bytes: usize) -> u64 {
    let bytes = u64::try_from(bytes).expect("short");
    (64 << 10) + bytes * 8 / 1024
}

fn chat_server(args: &[&str]) -> (Server, tempfile::TempDir) {
    let folder = chat_model();
    let model = folder.path().to_str().expect("UTF-8");
    (Server::start(&[&["--model", model], args].concat()), folder)
}

fn send(server: &Server, path: &str, body: &[u8]) -> Answer {
    let mut connection = Connection::open(server.address());
    let head =
        format!("POST {path} HTTP/1.1\r\nHost: kv\r\nContent-Length: {}\r\n\r\n", body.len());
    connection.send(&[head.as_bytes(), body].concat()).expect("a request");
    connection.answer()
}

/// Sends a body, and checks what it costs.
fn send_measured(server: &Server, path: &str, body: &[u8]) -> Answer {
    server.forget_peak();
    let answer = send(server, path, body);
    let (peak, max) = (server.peak(), memory_max(body.len()));
    let start = String::from_utf8_lossy(&body[..body.len().min(200)]);
    assert!(peak <= max, "{peak} KiB for {} bytes, at most {max}: {path}: {start}", body.len());
    answer
}

fn assert_health(server: &Server) {
    let begun = Instant::now();
    assert_eq!(get(server.address(), "/health").status, 200);
    assert!(begun.elapsed() < PATIENCE, "{:?}", begun.elapsed());
}

/// Stop strings, salts and prompts, once for each of many texts.
fn small_request() {
    let server = Server::start(&[]);
    let long = "b".repeat(32_768);
    for (field, value) in [
        ("stop", json!(vec![long.as_str(); 16])),
        ("cache_salt", json!("b".repeat(500_000))),
        ("model", json!("b".repeat(500_000))),
        ("user", json!("b".repeat(500_000))),
        ("stop", json!(vec!["b".repeat(500).as_str(); 16])),
        ("cache_salt", json!("b".repeat(1000))),
    ] {
        for (prompts, n) in [(64, 64), (4, 64)] {
            let mut body = json!({"prompt": vec!["a"; prompts], "n": n, "max_tokens": 1});
            body[field] = value.clone();
            let answer = send_measured(&server, COMPLETIONS, body.to_string().as_bytes());
            match answer.status {
                200 => assert!(prompts * n <= 256, "{}", body.to_string().len()),
                404 => assert_eq!(field, "model"),
                status => _ = answer.error(if status == 404 { 404 } else { 400 }),
            }
        }
    }
    server.wait_until_idle();
    server.end();
}

/// Every list, object and text of a body, as long as a body can be.
fn long_bodies() {
    let (server, _folder) = chat_server(&[]);
    let completion = |field: &str, value: &str| {
        let prompt = if field == "prompt" { "" } else { "\"prompt\": \"a\", " };
        (COMPLETIONS, format!("{{{prompt}\"max_tokens\": 1, \"{field}\": {value}}}"))
    };
    let chat = |messages: &str| (CHATS, format!("{{\"max_tokens\": 1, \"messages\": {messages}}}"));
    let user = |content: &str| chat(&format!("[{{\"role\": \"user\", \"content\": {content}}}]"));
    let nested = format!("{}{}", "[".repeat(LONG / 2), "]".repeat(LONG / 2));
    let object = |entry: &str| {
        let list = list(entry, LONG);
        format!("{{{}}}", &list[1..list.len() - 1])
    };
    let cases = [
        completion("prompt", &list("\"\"", LONG)),
        completion("prompt", &list("1", LONG)),
        completion("prompt", &list("[1]", LONG)),
        completion("prompt", &nested),
        completion("prompt", &text("a", LONG)),
        completion("prompt", &text("\\u0061", LONG)),
        completion("stop", &list("\"a\"", LONG)),
        completion("stop", &text("a", LONG)),
        completion("n", &"7".repeat(LONG)),
        completion("logit_bias", &object("\"1\":1")),
        completion("tools", &list("{}", LONG)),
        (COMPLETIONS, object("\"a\":0")),
        (COMPLETIONS, object("\"prompt\":0")),
        (COMPLETIONS, list("{}", LONG)),
        chat(&list("{}", LONG)),
        chat(&list("{\"role\":\"user\",\"content\":\"\"}", LONG)),
        user(&text("a", LONG)),
        user(&text("\\u0061", LONG)),
        user(&list("{\"type\":\"text\",\"text\":\"\"}", LONG)),
        user(&nested),
    ];
    for (path, body) in cases {
        assert!(body.len() <= BODY_MAX);
        send_measured(&server, path, body.as_bytes()).error(400);
        assert_health(&server);
    }
    // As long, and nothing is wrong with it.
    for (field, value) in
        [("user", list("\"\"", LONG)), ("metadata", nested), ("stream_options", object("\"a\":0"))]
    {
        let (path, body) = completion(field, &value);
        assert_eq!(send_measured(&server, path, body.as_bytes()).status, 200, "{field}");
    }
    server.wait_until_idle();
    server.end();
}

fn random_bodies() {
    let bodies = number("KV_SERVE_BODIES", 80);
    let (server, _folder) = chat_server(&[]);
    let mut random = Rng::new(7);
    let mut answered = 0;
    for at in 0..bodies {
        let bytes_max = if random.one_in(16) { LONG } else { 1 << 17 };
        let body = body(&mut random, bytes_max);
        if body.len() > BODY_MAX {
            continue;
        }
        let path = random.pick(&[COMPLETIONS, CHATS]);
        let answer = send_measured(&server, path, &body);
        match answer.status {
            200 => answered += 1,
            404 => assert_eq!(answer.error(404)["param"], "model"),
            _ => {
                let error = answer.error(400);
                let message = error["message"].as_str().expect("text");
                let types = ["struct", "enum", "variant", "u32", "u64", "i64", "usize", "untagged"];
                assert!(types.iter().all(|word| !message.contains(word)), "{message}");
                assert!(message.len() < 3000, "{message}");
            }
        }
        if at % 16 == 0 {
            assert_health(&server);
        }
    }
    assert!(answered > bodies / 50, "{answered} of {bodies} were right");
    server.wait_until_idle();
    server.end();
}

/// Whatever comes slowly, the request is over at its deadline, and its place is free.
fn drips() {
    let server = Server::start(&["--request-timeout", "1", "--max-connections", "8"]);
    let head = format!("POST {COMPLETIONS} HTTP/1.1\r\nHost: kv\r\n");
    let announced = format!("{head}Content-Length: 1000000\r\n\r\n");
    let health = "GET /health HTTP/1.1\r\nHost: kv\r\n\r\n";
    let starts = [
        ("POST /v1".to_owned(), 0),
        (format!("{head}X: "), 0),
        (format!("{head}Transfer-Encoding: chunked\r\n\r\nfffff\r\n"), 0),
        (announced.clone(), 0),
        // A connection that was good before.
        (format!("{health}{announced}"), 1),
        (format!("{health}POST /v1"), 1),
    ];
    thread::scope(|scope| {
        for (start, answers) in starts.into_iter().cycle().take(18) {
            let server = &server;
            scope.spawn(move || drip(server, start.as_bytes(), answers));
        }
        // More connections than there are places.
        assert_eq!(get(server.address(), "/health").status, 200);
    });
    server.wait_until_idle();
    server.end();
}

/// Sends a byte at a time until the server ends the connection, which it does in time.
fn drip(server: &Server, start: &[u8], answers: usize) {
    const PAUSE: Duration = Duration::from_millis(50);
    let mut connection = Connection::open(server.address());
    connection.send(start).expect("a part");
    for _ in 0..answers {
        assert_eq!(connection.answer().status, 200);
    }
    connection.socket().set_read_timeout(Some(PAUSE)).expect("a timeout");
    let begun = Instant::now();
    let mut bytes = Vec::new();
    loop {
        assert!(begun.elapsed() < 6 * PATIENCE, "it is never ended");
        let mut buffer = [0; 1024];
        match connection.socket().read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => bytes.extend_from_slice(&buffer[..read]),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => break,
            // The pause is over.
            Err(_) => {
                if connection.send(b"a").is_err() {
                    break;
                }
            }
        }
    }
    let said = String::from_utf8_lossy(&bytes);
    assert!(said.is_empty() || said.starts_with("HTTP/1.1 408"), "{said}");
}

/// Clients send long bodies at once, again and again; each is answered, most with a refusal.
fn flood() {
    const CLIENTS: usize = 12;
    const TIMES: usize = 2;
    let server = Server::start(&[]);
    let long = format!("{{\"max_tokens\": 1, \"prompt\": {}}}", list("\"\"", LONG));
    let (barrier, is_over) = (Barrier::new(CLIENTS), AtomicBool::new(false));
    server.forget_peak();
    let asked = thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|_| {
                scope.spawn(|| {
                    barrier.wait();
                    (0..TIMES).map(|_| flood_once(&server, long.as_bytes())).collect::<Vec<_>>()
                })
            })
            .collect();
        let others = scope.spawn(|| {
            let mut asked = 0;
            while !is_over.load(Ordering::Relaxed) {
                assert_health(&server);
                let answer = post(server.address(), COMPLETIONS, &greedy("Once", 2));
                assert_eq!(answer.status, 200, "{}", answer.text());
                asked += 1;
            }
            asked
        });
        let statuses: Vec<_> =
            clients.into_iter().flat_map(|client| client.join().expect("a client")).collect();
        is_over.store(true, Ordering::Relaxed);
        assert!(statuses.contains(&Some(400)), "{statuses:?}");
        let is_refused = |status: &Option<u16>| matches!(status, None | Some(400 | 503));
        assert!(statuses.iter().all(is_refused), "{statuses:?}");
        others.join().expect("the others")
    });
    assert!(asked > 0);
    assert!(server.peak() <= memory_max(BODY_MAX), "{} KiB", server.peak());
    server.wait_until_idle();
    server.end();
}

/// Returns the status; `None` if the server has closed the connection before it read everything.
fn flood_once(server: &Server, body: &[u8]) -> Option<u16> {
    let mut connection = Connection::open(server.address());
    let head = format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nHost: kv\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    let _ = connection.send(&[head.as_bytes(), body].concat());
    let answer = connection.read().ok().flatten()?;
    if answer.status == 503 {
        let error: Value = answer.error(503);
        assert_eq!(error["code"], "busy");
        assert!(answer.header("Retry-After").is_some());
    }
    Some(answer.status)
}

/// Memory that many connections may take beside a server that is idle, in KiB.
const CONNECTIONS: u64 = 32 << 10;

/// The head of a request, which has no end, in many connections.
fn long_heads() {
    let server = Server::start(&[]);
    let before = server.memory();
    server.forget_peak();
    let head = format!("GET / HTTP/1.1\r\nHost: kv\r\nX: {}", "y".repeat(380_000));
    let open: Vec<_> = (0..150)
        .map(|_| {
            let mut connection = Connection::open(server.address());
            // It may be cut before it is whole.
            let _ = connection.send(head.as_bytes());
            connection
        })
        .collect();
    assert_health(&server);
    for mut connection in open {
        let status = connection.read().ok().flatten().map(|answer| answer.status);
        assert!(matches!(status, None | Some(431)), "{status:?}");
    }
    let peak = server.peak();
    assert!(peak < before + CONNECTIONS, "{before} KiB, then {peak} KiB");
    server.end();
}
