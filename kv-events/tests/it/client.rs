//! A peer of ZMTP, written from its specification, that can be told to misbehave.
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use crate::value::Value;

/// Patience for what must come.
const PATIENCE: Duration = Duration::from_secs(10);

pub(crate) struct Client {
    pub(crate) stream: TcpStream,
    /// The server's greeting and its type of socket.
    pub(crate) greeting: [u8; 64],
    pub(crate) socket_type: String,
}

/// One batch as it came.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Batch {
    pub(crate) topic: Vec<u8>,
    pub(crate) number: u64,
    pub(crate) payload: Vec<u8>,
}

impl Batch {
    pub(crate) fn of(frames: &[Vec<u8>]) -> Self {
        let [topic, number, payload] = frames else { panic!("{} frames", frames.len()) };
        let number = u64::from_be_bytes(number.as_slice().try_into().unwrap());
        Self { topic: topic.clone(), number, payload: payload.clone() }
    }

    pub(crate) fn events(&self) -> Vec<Value> {
        let batch = Value::read(&self.payload);
        let [Value::Float(time), events, Value::Uint(_)] = batch.items() else {
            panic!("{batch:?}")
        };
        assert!(*time > 1.6e9, "seconds since 1970");
        events.items().to_vec()
    }
}

pub(crate) fn greeting(minor: u8) -> Vec<u8> {
    let mut bytes = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, minor];
    bytes.extend(b"NULL");
    bytes.resize(64, 0);
    bytes
}

pub(crate) fn frame(flags: u8, body: &[u8]) -> Vec<u8> {
    if let Ok(len) = u8::try_from(body.len()) {
        return [&[flags, len], body].concat();
    }
    let len = u64::try_from(body.len()).unwrap().to_be_bytes();
    [&[flags | 2], len.as_slice(), body].concat()
}

pub(crate) fn command(name: &str, body: &[u8]) -> Vec<u8> {
    let len = u8::try_from(name.len()).unwrap();
    frame(4, &[&[len], name.as_bytes(), body].concat())
}

pub(crate) fn ready(socket_type: &str) -> Vec<u8> {
    let len = u8::try_from(socket_type.len()).unwrap();
    let value = [&[0, 0, 0, len], socket_type.as_bytes()].concat();
    command("READY", &[b"\x0bSocket-Type", value.as_slice()].concat())
}

pub(crate) fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

impl Client {
    /// Shakes hands as a socket of a type, of a minor version.
    pub(crate) fn new(address: SocketAddr, socket_type: &str, minor: u8) -> Self {
        let mut stream = connect(address);
        stream.write_all(&greeting(minor)).unwrap();
        stream.write_all(&ready(socket_type)).unwrap();
        let mut greeting = [0; 64];
        stream.read_exact(&mut greeting).unwrap();
        let mut client = Self { stream, greeting, socket_type: String::new() };
        let (flags, body) = client.frame();
        assert_eq!((flags, &body[..6]), (4, &b"\x05READY"[..]));
        assert_eq!(&body[6..18], b"\x0bSocket-Type");
        let len = usize::from(body[21]);
        client.socket_type = String::from_utf8(body[22..22 + len].to_vec()).unwrap();
        client
    }

    /// Subscribes to topics of a prefix.
    pub(crate) fn subscriber(address: SocketAddr, prefix: &[u8]) -> Self {
        let mut client = Self::new(address, "SUB", 1);
        client.send(&command("SUBSCRIBE", prefix));
        client
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    pub(crate) fn frame(&mut self) -> (u8, Vec<u8>) {
        let mut head = [0; 2];
        self.stream.read_exact(&mut head).unwrap();
        let len = if head[0] & 2 == 0 {
            u64::from(head[1])
        } else {
            let mut rest = [0; 7];
            self.stream.read_exact(&mut rest).unwrap();
            u64::from_be_bytes([&head[1..], &rest].concat().try_into().unwrap())
        };
        let mut body = vec![0; usize::try_from(len).unwrap()];
        self.stream.read_exact(&mut body).unwrap();
        (head[0] & !2, body)
    }

    pub(crate) fn message(&mut self) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        loop {
            let (flags, body) = self.frame();
            assert_eq!(flags & 4, 0, "a command");
            frames.push(body);
            if flags & 1 == 0 {
                return frames;
            }
        }
    }

    pub(crate) fn batch(&mut self) -> Batch {
        Batch::of(&self.message())
    }

    /// Asks for the batches from a number on, behind an envelope; returns those before the end.
    pub(crate) fn replay(&mut self, envelope: &[&[u8]], start: u64) -> Vec<Batch> {
        let mut request: Vec<u8> = envelope.iter().flat_map(|part| frame(1, part)).collect();
        request.extend(frame(0, &start.to_be_bytes()));
        self.send(&request);
        let mut batches = Vec::new();
        loop {
            let answer = self.message();
            let (before, frames) = answer.split_at(envelope.len());
            assert_eq!(before, envelope);
            let batch = Batch::of(frames);
            if batch.number == u64::MAX {
                assert_eq!(batch.payload, b"");
                return batches;
            }
            batches.push(batch);
        }
    }

    /// Waits until the server has closed the connection, whatever it sends before.
    pub(crate) fn wait_for_end(stream: &mut TcpStream) {
        let mut rest = Vec::new();
        match stream.read_to_end(&mut rest) {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
        }
    }
}
