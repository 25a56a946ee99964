//! A client of HTTP/1.1 that can also misbehave: it sends any bytes, and breaks off where it wants.
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::{Value, json};

/// Longest pause of a server that is busy.
const PATIENCE: Duration = Duration::from_mins(2);

pub(crate) struct Answer {
    pub(crate) status: u16,
    head: String,
    body: Vec<u8>,
}

impl Answer {
    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.body.clone()).expect("UTF-8")
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("JSON: {}", self.text()))
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let lines = self.head.lines().filter_map(|line| line.split_once(':'));
        let mut found = lines.filter(|(key, _)| key.eq_ignore_ascii_case(name));
        found.next().map(|(_, value)| value.trim())
    }

    /// Checks the shape of an error; returns the object.
    pub(crate) fn error(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{}", self.text());
        let error = self.json()["error"].take();
        assert!(error["message"].is_string() && error["type"].is_string(), "{error}");
        let fields = error.as_object().expect("an object");
        assert!(fields.contains_key("param") && fields.contains_key("code"), "{error}");
        error
    }
}

/// One connection.
pub(crate) struct Connection(BufReader<TcpStream>);

impl Connection {
    pub(crate) fn open(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).expect("a connection");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        stream.set_write_timeout(Some(PATIENCE)).expect("a timeout");
        stream.set_nodelay(true).expect("no delay");
        Self(BufReader::new(stream))
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0.get_mut().write_all(bytes)
    }

    pub(crate) fn socket(&self) -> &TcpStream {
        self.0.get_ref()
    }

    /// Reads the head of an answer; `None` if the server has closed the connection.
    fn read_head(&mut self) -> io::Result<Option<String>> {
        let mut head = String::new();
        loop {
            let start = head.len();
            if self.0.read_line(&mut head)? == 0 {
                return if head.is_empty() {
                    Ok(None)
                } else {
                    Err(io::ErrorKind::UnexpectedEof.into())
                };
            }
            if head[start..].trim_end().is_empty() {
                return Ok(Some(head));
            }
        }
    }

    /// Reads one answer; `None` if the server has closed the connection.
    pub(crate) fn read(&mut self) -> io::Result<Option<Answer>> {
        let Some(head) = self.read_head()? else { return Ok(None) };
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        let mut answer = Answer { status: status.expect("a status"), head, body: Vec::new() };
        if answer.status == 100 {
            return Ok(Some(answer));
        }
        if answer.header("transfer-encoding").is_some() {
            Chunked::new(&mut self.0).read_to_end(&mut answer.body)?;
        } else if let Some(length) = answer.header("content-length") {
            answer.body.resize(length.parse().expect("a length"), 0);
            self.0.read_exact(&mut answer.body)?;
        } else {
            self.0.read_to_end(&mut answer.body)?;
        }
        Ok(Some(answer))
    }

    /// Reads one answer that must come.
    pub(crate) fn answer(&mut self) -> Answer {
        self.read().expect("an answer").expect("an open connection")
    }

    /// Reads an answer as a stream of events.
    pub(crate) fn into_events(mut self) -> Events {
        let head = self.read_head().expect("a head").expect("an open connection");
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        assert!(head.to_lowercase().contains("content-type: text/event-stream"), "{head}");
        Events { lines: BufReader::new(Chunked::new(self.0)), is_done: false }
    }
}

/// The body of an answer in chunks.
struct Chunked<R> {
    reader: R,
    /// Bytes of the chunk that are not read yet.
    left: usize,
    is_over: bool,
}

impl<R: BufRead> Chunked<R> {
    fn new(reader: R) -> Self {
        Self { reader, left: 0, is_over: false }
    }

    fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        if self.reader.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(line.trim_end().to_owned())
    }
}

impl<R: BufRead> Read for Chunked<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 && !self.is_over {
            let size = self.line()?;
            self.left = usize::from_str_radix(&size, 16).map_err(io::Error::other)?;
            if self.left == 0 {
                self.is_over = true;
                self.line()?;
            }
        }
        let most = self.left.min(buffer.len());
        let read = self.reader.read(&mut buffer[..most])?;
        if read == 0 && most > 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.left -= read;
        if self.left == 0 && !self.is_over {
            self.line()?;
        }
        Ok(read)
    }
}

/// Events of a stream, up to `[DONE]`.
pub(crate) struct Events {
    lines: BufReader<Chunked<BufReader<TcpStream>>>,
    is_done: bool,
}

impl Events {
    /// Reads to the end; returns the text and the reason of the only choice.
    pub(crate) fn finish(mut self) -> (String, String) {
        let (mut text, mut reason) = (String::new(), None);
        for event in self.by_ref() {
            if let Some(choice) = event["choices"].get(0) {
                text.push_str(choice["text"].as_str().expect("text"));
                reason = choice["finish_reason"].as_str().map(str::to_owned).or(reason);
            }
        }
        assert!(self.is_done, "no [DONE]");
        (text, reason.expect("a reason"))
    }
}

impl Iterator for Events {
    type Item = Value;

    fn next(&mut self) -> Option<Value> {
        let mut line = String::new();
        while !self.is_done {
            line.clear();
            assert!(self.lines.read_line(&mut line).expect("an event") > 0, "no [DONE]");
            let line = line.trim_end();
            // Blank between events; a comment keeps the connection alive.
            if line.is_empty() || line.starts_with(':') {
                continue;
            }
            let data = line.strip_prefix("data: ").unwrap_or_else(|| panic!("no data: {line}"));
            if data != "[DONE]" {
                return Some(serde_json::from_str(data).expect("JSON"));
            }
            self.is_done = true;
        }
        None
    }
}

/// Makes the bytes of a request.
pub(crate) fn request(path: &str, body: &Value) -> Vec<u8> {
    let body = body.to_string();
    let length = body.len();
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: kv\r\nContent-Type: application/json\r\n\
         Content-Length: {length}\r\n\r\n"
    );
    (head + &body).into_bytes()
}

pub(crate) fn get(address: SocketAddr, path: &str) -> Answer {
    let mut connection = Connection::open(address);
    let head = format!("GET {path} HTTP/1.1\r\nHost: kv\r\nConnection: close\r\n\r\n");
    connection.send(head.as_bytes()).expect("a request");
    connection.answer()
}

pub(crate) fn post(address: SocketAddr, path: &str, body: &Value) -> Answer {
    let mut connection = Connection::open(address);
    connection.send(&request(path, body)).expect("a request");
    connection.answer()
}

/// Path of completions.
pub(crate) const COMPLETIONS: &str = "/v1/completions";

/// Makes the body of a completion at temperature 0.
pub(crate) fn greedy(prompt: &str, max_tokens: u32) -> Value {
    json!({"prompt": prompt, "max_tokens": max_tokens, "temperature": 0})
}

/// Makes the body of a stream that is `max_tokens` long, whatever is generated.
pub(crate) fn long_stream(prompt: &str, max_tokens: u32) -> Value {
    let mut body = greedy(prompt, max_tokens);
    body["ignore_eos"] = true.into();
    body["stream"] = true.into();
    body
}

/// Returns the only text of an answer, and the reason of its end.
pub(crate) fn text_of(answer: &Answer) -> (String, String) {
    assert_eq!(answer.status, 200, "{}", answer.text());
    let choice = &answer.json()["choices"][0];
    let field = |name: &str| choice[name].as_str().expect("text").to_owned();
    (field("text"), field("finish_reason"))
}

/// Opens a stream and hands its events over.
pub(crate) fn open_stream(address: SocketAddr, body: &Value) -> Events {
    let mut connection = Connection::open(address);
    connection.send(&request(COMPLETIONS, body)).expect("a request");
    connection.into_events()
}
