//! A server that answers as OpenAI's completions do, or as it is told to, and notes what it got.
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

/// The server's answer to a completion.
#[derive(Debug, Clone)]
pub(crate) enum Answer {
    /// This number of tokens, each after a delay, and usage; half of the prompt was cached.
    Tokens { count: u64, delay: Duration },
    /// The same, once this number of requests is there at the same time.
    Together { count: u64, requests: usize },
    /// This status, with an error of OpenAI's.
    Status(u16, &'static str),
    /// A stream of these bytes.
    Stream(&'static str),
    /// The same, which breaks off: the connection ends.
    Raw(&'static str),
    /// Nothing, and the connection stays.
    Silence,
}

/// A request as it came.
#[derive(Debug, Clone)]
pub(crate) struct Got {
    pub(crate) path: String,
    pub(crate) authorization: Option<String>,
    pub(crate) body: Value,
}

#[derive(Debug, Default)]
struct Log {
    got: Vec<Got>,
    running: usize,
    running_max: usize,
}

#[derive(Debug)]
struct Shared {
    log: Mutex<Log>,
    changed: Condvar,
    /// By the number of the completion, from 0.
    answer: fn(usize) -> Answer,
}

#[derive(Debug)]
pub(crate) struct Server {
    address: SocketAddr,
    shared: Arc<Shared>,
}

impl Server {
    /// Starts a server; its threads end with the process of the test.
    pub(crate) fn start(answer: fn(usize) -> Answer) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let (log, changed) = (Mutex::new(Log::default()), Condvar::new());
        let shared = Arc::new(Shared { log, changed, answer });
        let server = Self { address, shared: Arc::clone(&shared) };
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = Arc::clone(&shared);
                // A client that goes away ends its thread.
                thread::spawn(move || shared.serve(stream));
            }
        });
        server
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns the completions that came, in order.
    pub(crate) fn completions(&self) -> Vec<Got> {
        let log = self.shared.log.lock().expect("no thread failed");
        log.got.iter().filter(|got| got.path == "/v1/completions").cloned().collect()
    }

    /// Returns the most requests that were there at once.
    pub(crate) fn running_max(&self) -> usize {
        self.shared.log.lock().expect("no thread failed").running_max
    }
}

impl Shared {
    /// Answers one request after another of a connection; `None` when it ends.
    fn serve(&self, stream: TcpStream) -> Option<()> {
        let mut out = stream.try_clone().ok()?;
        out.set_nodelay(true).ok()?;
        let mut lines = BufReader::new(stream);
        loop {
            let got = read(&mut lines)?;
            if got.path == "/v1/models" {
                let models = json!({"object": "list", "data": [{"id": "fake"}, {"id": "other"}]});
                respond(&mut out, "200 OK", &models)?;
                continue;
            }
            let prompt = got.body["prompt"].as_array().map_or(0, Vec::len);
            let number = {
                let mut log = self.log.lock().expect("no thread failed");
                log.running += 1;
                log.running_max = log.running_max.max(log.running);
                log.got.push(got);
                self.changed.notify_all();
                log.got.len() - 1
            };
            self.answer(number, prompt, &mut out)?;
        }
    }

    /// Notes that a request ends; its client must not know yet.
    fn end(&self) {
        self.log.lock().expect("no thread failed").running -= 1;
    }

    fn answer(&self, number: usize, prompt: usize, out: &mut TcpStream) -> Option<()> {
        let (count, delay) = match (self.answer)(number) {
            Answer::Tokens { count, delay } => (count, delay),
            Answer::Together { count, requests } => {
                let log = self.log.lock().expect("no thread failed");
                let wait = self.changed.wait_while(log, |log| log.got.len() < requests);
                drop(wait.expect("no thread failed"));
                (count, Duration::ZERO)
            }
            Answer::Status(status, message) => {
                let error = json!({"error": {"message": message, "type": "x", "code": null}});
                self.end();
                return respond(out, &format!("{status} Status"), &error);
            }
            Answer::Stream(body) => {
                head(out, "text/event-stream")?;
                self.end();
                return write!(out, "{:x}\r\n{body}\r\n0\r\n\r\n", body.len()).ok();
            }
            Answer::Raw(body) => {
                head(out, "text/event-stream")?;
                self.end();
                write!(out, "{:x}\r\n{body}\r\n", body.len()).ok()?;
                return None;
            }
            Answer::Silence => {
                thread::sleep(Duration::from_mins(1));
                self.end();
                return None;
            }
        };
        head(out, "text/event-stream; charset=utf-8")?;
        for token in 0..count {
            thread::sleep(delay);
            let last = token + 1 == count;
            let finish = if last { json!("length") } else { Value::Null };
            let choice = json!({"index": 0, "text": "ä", "finish_reason": finish});
            event(out, &json!({"choices": [choice], "usage": null}).to_string())?;
        }
        let usage = json!({
            "prompt_tokens": prompt, "completion_tokens": count,
            "prompt_tokens_details": {"cached_tokens": prompt / 2},
        });
        event(out, &json!({"choices": [], "usage": usage}).to_string())?;
        self.end();
        event(out, "[DONE]")?;
        out.write_all(b"0\r\n\r\n").ok()
    }
}

/// Reads a request.
fn read(lines: &mut impl BufRead) -> Option<Got> {
    let mut first = String::new();
    lines.read_line(&mut first).ok().filter(|read| *read > 0)?;
    let path = first.split(' ').nth(1)?.to_owned();
    let (mut length, mut authorization) = (0, None);
    loop {
        let mut line = String::new();
        lines.read_line(&mut line).ok()?;
        let line = line.trim_end();
        if line.is_empty() {
            break;
        }
        let (name, value) = line.split_once(':')?;
        match name.to_ascii_lowercase().as_str() {
            "content-length" => length = value.trim().parse().ok()?,
            "authorization" => authorization = Some(value.trim().to_owned()),
            _ => {}
        }
    }
    let mut body = vec![0; length];
    lines.read_exact(&mut body).ok()?;
    let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
    Some(Got { path, authorization, body })
}

fn respond(out: &mut TcpStream, status: &str, body: &Value) -> Option<()> {
    let body = body.to_string();
    let mut head = format!("HTTP/1.1 {status}\r\ncontent-type: application/json\r\n");
    write!(head, "content-length: {}\r\n\r\n{body}", body.len()).ok()?;
    out.write_all(head.as_bytes()).ok()
}

fn head(out: &mut TcpStream, content_type: &str) -> Option<()> {
    let head = format!("HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\n");
    out.write_all(format!("{head}transfer-encoding: chunked\r\n\r\n").as_bytes()).ok()
}

/// Sends an event in two pieces, the first of which ends inside of the data.
fn event(out: &mut TcpStream, data: &str) -> Option<()> {
    let event = format!("data: {data}\n\n");
    let (one, other) = event.as_bytes().split_at(event.len() / 2);
    for part in [one, other] {
        let chunk = [format!("{:x}\r\n", part.len()).as_bytes(), part, b"\r\n"].concat();
        out.write_all(&chunk).ok()?;
    }
    Some(())
}
