//! Clients that are broken, slow or hostile: a 4xx or a closed connection, and the server answers
//! others as before.
use std::io::{self, Read};
use std::net::Shutdown;

use serde_json::json;

use crate::Case;
use crate::client::{COMPLETIONS, Connection, get, greedy, long_stream, post, request, text_of};
use crate::server::Server;

pub(crate) const CASES: &[Case] = &[
    ("hostile/requests_that_are_no_http", no_http),
    ("hostile/bodies_that_are_no_request", wrong_bodies),
    ("hostile/fields_that_are_wrong", wrong_fields),
    ("hostile/too_much_of_everything", too_much),
    ("hostile/half_a_request", half_open),
    ("hostile/a_client_that_does_not_read", slow_reader),
    ("hostile/several_requests_at_once", pipelined),
    ("hostile/wrong_methods_and_routes", wrong_methods),
    ("hostile/heads_that_are_wrong", wrong_heads),
];

/// Sends bytes as far as the server takes them; returns the status, `None` if it closed.
fn status_of(server: &Server, bytes: &[u8]) -> Option<u16> {
    let mut connection = Connection::open(server.address());
    // The server may have enough before everything is sent.
    let _ = connection.send(bytes);
    let _ = connection.socket().shutdown(Shutdown::Write);
    loop {
        let status = connection.read().ok().flatten()?.status;
        // The server requests the body, and gets none.
        if status != 100 {
            return Some(status);
        }
    }
}

fn is_refused(status: Option<u16>) -> bool {
    status.is_none_or(|status| (400..500).contains(&status))
}

fn assert_answers(server: &Server) {
    assert_eq!(get(server.address(), "/health").status, 200);
}

/// Makes a request with any bytes as its body.
fn with_body(body: &[u8]) -> Vec<u8> {
    let length = body.len();
    let head = format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nHost: kv\r\nContent-Type: application/json\r\n\
         Content-Length: {length}\r\n\r\n"
    );
    [head.as_bytes(), body].concat()
}

fn no_http() {
    let server = Server::start(&[]);
    let head = format!("POST {COMPLETIONS} HTTP/1.1\r\nHost: kv\r\n");
    let cases: &[&str] = &[
        "\u{16}\u{3}\u{1}\u{2}\0\u{1}\0\u{1}\u{fc}\u{3}\u{3}\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "GET\r\n\r\n",
        "GET /health HTTP/9.9\r\n\r\n",
        "GET /health HTTP/1.1\r\nno colon\r\n\r\n",
        "GET /health HTTP/1.1\r\n: no name\r\n\r\n",
        &format!("{head}Content-Length: -1\r\n\r\n{{}}"),
        &format!("{head}Content-Length: 99999999999999999999\r\n\r\n{{}}"),
        &format!("{head}Content-Length: 2\r\nContent-Length: 3\r\n\r\n{{}}"),
        &format!("{head}Transfer-Encoding: gzip\r\n\r\n{{}}"),
        &format!("{head}Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n{{}}"),
        &format!("{head}Transfer-Encoding: chunked\r\n\r\nno size\r\n{{}}"),
        &format!("{head}Transfer-Encoding: chunked\r\n\r\n2\r\n{{}}"),
    ];
    for case in cases {
        let status = status_of(&server, case.as_bytes());
        assert!(is_refused(status), "{status:?}: {case:?}");
        assert_answers(&server);
    }
    // Old, but allowed: the answer ends with the connection.
    let mut old = Connection::open(server.address());
    old.send(b"GET /health HTTP/1.0\r\n\r\n").expect("a request");
    assert_eq!(old.answer().status, 200);
    assert!(old.read().expect("an end").is_none());
    server.end();
}

fn wrong_bodies() {
    let server = Server::start(&[]);
    let deep = [b"{\"prompt\":".to_vec(), vec![b'['; 200_000]].concat();
    let cases: &[&[u8]] = &[
        b"",
        b"{",
        b"null",
        b"7",
        b"[]",
        b"\"prompt\"",
        b"{\"prompt\": \"x\"} more",
        b"{\"prompt\": \"x\", }",
        b"{\"prompt\": \"\xff\xfe\"}",
        b"{\"prompt\": \"\\ud800\"}",
        b"{\"prompt\": \"\xed\xa0\x80\"}",
        b"{\"prompt\": \"x\", \"max_tokens\": 1e999}",
        b"\0\0\0\0",
        &deep,
    ];
    for case in cases {
        let answer = post_bytes(&server, case);
        let error = answer.error(400);
        assert_eq!(error["type"], "invalid_request_error", "{error}");
        assert_answers(&server);
    }
    server.end();
}

fn post_bytes(server: &Server, body: &[u8]) -> crate::client::Answer {
    let mut connection = Connection::open(server.address());
    connection.send(&with_body(body)).expect("a request");
    connection.answer()
}

fn wrong_fields() {
    let server = Server::start(&[]);
    let cases = [
        ("prompt", json!(null)),
        ("prompt", json!(7)),
        ("prompt", json!({})),
        ("prompt", json!([])),
        ("prompt", json!([1, "x"])),
        ("prompt", json!([-1])),
        ("prompt", json!([512])),
        ("prompt", json!([4_294_967_296_u64])),
        ("prompt", json!([[1, 403], []])),
        ("prompt", json!([[1, 403], [512]])),
        ("prompt", json!(vec!["x"; 65])),
        ("max_tokens", json!(0)),
        ("max_tokens", json!(-1)),
        ("max_tokens", json!("many")),
        ("max_tokens", json!(1.5)),
        ("max_tokens", json!(18_446_744_073_709_551_615_u64)),
        ("temperature", json!(-0.1)),
        ("temperature", json!("hot")),
        ("temperature", json!(1e300)),
        ("top_p", json!(-1)),
        ("top_p", json!(1.1)),
        ("n", json!(0)),
        ("n", json!(-1)),
        ("n", json!(1_000_000)),
        ("stop", json!(7)),
        ("stop", json!([""])),
        ("stop", json!([7])),
        ("stop", json!(vec!["x"; 1_000])),
        ("seed", json!("x")),
        ("stream", json!("yes")),
        ("ignore_eos", json!("yes")),
        ("cache_salt", json!("")),
        ("cache_salt", json!(7)),
    ];
    for (field, value) in cases {
        let mut body = greedy("x", 4);
        body[field] = value.clone();
        let error = post(server.address(), COMPLETIONS, &body).error(400);
        assert_eq!(error["param"], field, "{value}: {error}");
    }
    let mut other = greedy("x", 4);
    other["model"] = "another".into();
    assert_eq!(post(server.address(), COMPLETIONS, &other).error(404)["param"], "model");
    let missing = post(server.address(), COMPLETIONS, &json!({"max_tokens": 4})).error(400);
    assert_eq!(missing["param"], "prompt");
    server.wait_until_idle();
    server.end();
}

fn too_much() {
    const LARGE: usize = 100 << 20;
    /// Memory may grow so much, in KiB: the longest body that is read is 8 MiB.
    const GROWTH: u64 = 32 << 10;
    let server = Server::start(&[]);
    let head =
        format!("POST {COMPLETIONS} HTTP/1.1\r\nHost: kv\r\nContent-Type: application/json\r\n");
    let before = server.memory();
    let declared = format!("{head}Content-Length: {LARGE}\r\n\r\n{{\"prompt\": \"");
    let chunked = format!("{head}Transfer-Encoding: chunked\r\n\r\n{LARGE:x}\r\n{{\"prompt\": \"");
    let waiting = format!("{head}Content-Length: {LARGE}\r\nExpect: 100-continue\r\n\r\n");
    let status = status_of(&server, waiting.as_bytes());
    assert!(is_refused(status), "{status:?}");
    for start in [&declared, &chunked] {
        let body = [start.as_bytes(), &vec![b'x'; LARGE]].concat();
        let status = status_of(&server, &body);
        assert!(matches!(status, None | Some(413)), "{status:?}");
        assert_answers(&server);
    }
    let after = server.memory();
    assert!(after < before + GROWTH, "{before} KiB, then {after} KiB");

    // A client that asks before it sends gets the refusal, and not an invitation.
    let asks = format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nHost: kv\r\nExpect: 100-continue\r\n\
         Content-Length: {LARGE}\r\n\r\n"
    );
    assert_eq!(status_of(&server, asks.as_bytes()), Some(413));

    let headers = "X: y\r\n".repeat(10_000);
    let get_with = |header: &str| format!("GET /health HTTP/1.1\r\nHost: kv\r\n{header}\r\n");
    let cases = [
        get_with(&headers),
        get_with(&format!("X: {}\r\n", "y".repeat(4 << 20))),
        format!("GET /{} HTTP/1.1\r\nHost: kv\r\n\r\n", "x".repeat(1 << 20)),
    ];
    for case in cases {
        let status = status_of(&server, case.as_bytes());
        assert!(is_refused(status), "{status:?}: {:?}", &case[..60]);
        assert_answers(&server);
    }
    let long = post(server.address(), COMPLETIONS, &greedy(&"word ".repeat(200_000), 4));
    assert_eq!(long.error(400)["code"], "context_length_exceeded");
    server.wait_until_idle();
    server.end();
}

/// Connections that stay open with a part of a request, in any number, delay no other client; the
/// server closes them.
fn half_open() {
    let server = Server::start(&[]);
    let whole = request(COMPLETIONS, &greedy("Once", 4));
    let body_at = whole.windows(4).position(|bytes| bytes == b"\r\n\r\n").expect("a body") + 4;
    let parts: Vec<_> = [0, 5, body_at - 1, body_at, whole.len() - 1]
        .into_iter()
        .cycle()
        .take(100)
        .map(|length| {
            let mut connection = Connection::open(server.address());
            connection.send(&whole[..length]).expect("a part");
            connection
        })
        .collect();
    text_of(&post(server.address(), COMPLETIONS, &greedy("Once", 4)));
    let mut cut = Connection::open(server.address());
    cut.send(&whole[..body_at - 1]).expect("a part");
    cut.socket().shutdown(Shutdown::Write).expect("an end");
    assert!(is_refused(cut.read().ok().flatten().map(|answer| answer.status)));
    // The head is incomplete: the server gives up first.
    let mut half = parts.into_iter().nth(1).expect("a part");
    assert!(is_refused(half.read().expect("an end").map(|answer| answer.status)));
    server.wait_until_idle();
    server.end();
}

/// The client takes one byte, then nothing, while its texts end.
fn slow_reader() {
    let server = Server::start(&[]);
    let alone = text_of(&post(server.address(), COMPLETIONS, &greedy("Once", 20)));
    let mut body = long_stream("Tom and Sue", 400);
    body["n"] = 8.into();
    let mut slow = Connection::open(server.address());
    slow.send(&request(COMPLETIONS, &body)).expect("a request");
    let mut byte = [0];
    let mut socket = slow.socket();
    assert_eq!(socket.read(&mut byte).expect("a byte"), 1);
    assert_eq!(text_of(&post(server.address(), COMPLETIONS, &greedy("Once", 20))), alone);
    server.wait_until_idle();
    // Everything is still there for it.
    let mut rest = Vec::new();
    let mut buffer = [0; 4096];
    while !rest.ends_with(b"data: [DONE]\n\n\r\n0\r\n\r\n") {
        match socket.read(&mut buffer).expect("more") {
            0 => panic!("it was cut: {}", String::from_utf8_lossy(&rest)),
            read => rest.extend_from_slice(&buffer[..read]),
        }
    }
    server.end();
}

fn pipelined() {
    let server = Server::start(&[]);
    let alone = text_of(&post(server.address(), COMPLETIONS, &greedy("Once", 8)));
    let health: &[u8] = b"GET /health HTTP/1.1\r\nHost: kv\r\n\r\n";
    let completion = request(COMPLETIONS, &greedy("Once", 8));
    let wrong = request(COMPLETIONS, &json!({"prompt": 7}));
    let mut connection = Connection::open(server.address());
    connection.send(&[health, &completion, &wrong, &completion, health].concat()).expect("five");
    assert_eq!(connection.answer().status, 200);
    assert_eq!(text_of(&connection.answer()), alone);
    connection.answer().error(400);
    assert_eq!(text_of(&connection.answer()), alone);
    assert_eq!(connection.answer().json()["status"], "ok");
    drop(connection);
    server.wait_until_idle();
    server.end();
}

fn wrong_methods() {
    let server = Server::start(&[]);
    let ask = |method: &str, path: &str| -> io::Result<_> {
        let mut connection = Connection::open(server.address());
        let head = format!("{method} {path} HTTP/1.1\r\nHost: kv\r\nContent-Length: 0\r\n\r\n");
        connection.send(head.as_bytes())?;
        connection.read().map(|answer| answer.expect("an answer"))
    };
    for (method, path, status) in [
        ("GET", COMPLETIONS, 405),
        ("PUT", COMPLETIONS, 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/metrics", 405),
        ("POST", "/health", 405),
        ("GET", "/v1", 404),
        ("GET", "/v1/models/another", 404),
        ("GET", "/v1/models/%ff", 400),
        ("GET", "//", 404),
        ("GET", "/../../etc/passwd", 404),
        ("GET", "/%00", 404),
        ("POST", "/v1/embeddings", 404),
        ("BREW", "/v1/nothing", 404),
    ] {
        let answer = ask(method, path).expect("an answer");
        assert_eq!(answer.status, status, "{method} {path}");
        assert_eq!(answer.error(status)["type"], "invalid_request_error");
    }
    server.end();
}

fn wrong_heads() {
    let server = Server::start(&[]);
    let body = "{\"prompt\": \"x\", \"max_tokens\": 1}";
    let ask = |version: &str, headers: &str| {
        let length = body.len();
        let mut connection = Connection::open(server.address());
        let request = format!(
            "POST {COMPLETIONS} HTTP/{version}\r\n{headers}Content-Length: {length}\r\n\r\n{body}"
        );
        connection.send(request.as_bytes()).expect("a request");
        connection.answer()
    };
    for (version, headers, status) in [
        ("1.1", "", 400),
        ("1.1", "Host: kv\r\nHost: kv\r\n", 400),
        ("1.1", "Host: kv\r\nContent-Encoding: gzip\r\n", 415),
        ("1.1", "Host: kv\r\nContent-Encoding: br\r\n", 415),
        ("1.1", "Host: kv\r\nContent-Encoding: identity, zstd\r\n", 415),
        ("1.1", "Host: kv\r\nContent-Encoding: identity\r\nContent-Encoding: gzip\r\n", 415),
    ] {
        let error = ask(version, headers).error(status);
        assert_eq!(error["type"], "invalid_request_error", "{headers}");
    }
    for (version, headers) in
        [("1.0", ""), ("1.1", "Host: kv\r\n"), ("1.1", "Host:\r\nContent-Encoding: Identity\r\n")]
    {
        assert_eq!(ask(version, headers).status, 200, "{headers}");
    }
    server.end();
}
