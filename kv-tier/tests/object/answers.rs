//! Answers of a server of the test's own: refusals, and bodies that are not as long as they say.
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::thread;

use kv_tier::{BlockStore as _, Put, StoreErrorKind};

use crate::{assert_kind, assert_timeout, chunk, open_at, soon};

pub(crate) const CASES: &[(&str, fn())] = &[
    ("a_status_has_a_kind", statuses),
    ("a_write_is_conditional_and_has_a_checksum", conditional),
    ("a_body_of_another_length_is_no_chunk", lengths),
    ("a_large_write_ends_at_its_deadline", large_write),
];

/// Answers every request alike; gives back what the first one said.
fn serve(answer: String) -> (SocketAddr, thread::JoinHandle<String>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let server = thread::spawn(move || {
        let mut stream = BufReader::new(listener.accept().unwrap().0);
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            assert_ne!(stream.read_line(&mut head).unwrap(), 0, "a whole request");
        }
        let head = head.to_ascii_lowercase();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        let mut body = vec![0; length.map_or(0, |length| length.parse().unwrap())];
        stream.read_exact(&mut body).unwrap();
        stream.get_mut().write_all(answer.as_bytes()).unwrap();
        head
    });
    (address, server)
}

fn statuses() {
    for (status, kind) in [
        ("401 Unauthorized", StoreErrorKind::Denied),
        ("403 Forbidden", StoreErrorKind::Denied),
        ("429 Too Many Requests", StoreErrorKind::Unavailable),
        ("500 Internal Server Error", StoreErrorKind::Unavailable),
        ("503 Slow Down", StoreErrorKind::Unavailable),
        ("507 Insufficient Storage", StoreErrorKind::Full),
        ("400 Bad Request", StoreErrorKind::Other),
    ] {
        let answer = format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
        let (address, server) = serve(answer.clone());
        assert_kind(open_at(address, "p").get(&chunk(1), &mut [0; 4], soon()), kind);
        server.join().unwrap();
        let (address, server) = serve(answer);
        assert_kind(open_at(address, "p").put(&chunk(1), b"x", soon()), kind);
        server.join().unwrap();
    }
}

fn conditional() {
    for (status, expected) in [
        ("200 OK", Put::New),
        ("412 Precondition Failed", Put::WasThere),
        ("409 Conflict", Put::WasThere),
    ] {
        let answer = format!(
            "HTTP/1.1 {status}\r\nETag: \"1\"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        );
        let (address, server) = serve(answer);
        assert_eq!(open_at(address, "p").put(&chunk(1), b"value", soon()).unwrap(), expected);
        let head = server.join().unwrap();
        assert!(head.contains("if-none-match: *\r\n"), "{head}");
        assert!(head.contains("x-amz-checksum-crc64nvme: "), "{head}");
        assert!(head.starts_with("put /kvcache/p/v1/0101010101010101/0101"), "{head}");
    }
}

fn lengths() {
    for (length, body, kind) in [
        ("0", "", StoreErrorKind::Corrupt),
        ("9", "123456789", StoreErrorKind::Corrupt),
        ("99999999999", "1", StoreErrorKind::Corrupt),
        ("8", "1234567", StoreErrorKind::Unavailable),
    ] {
        let (address, server) = serve(format!(
            "HTTP/1.1 200 OK\r\nETag: \"1\"\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n\
             Content-Length: {length}\r\nConnection: close\r\n\r\n{body}"
        ));
        let mut into = [0; 8];
        assert_kind(open_at(address, "p").get(&chunk(1), &mut into, soon()), kind);
        server.join().unwrap();
    }
}

/// To copy and to sign that many bytes takes longer than the deadline and what it may be exceeded
/// by.
fn large_write() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let store = open_at(listener.local_addr().unwrap(), "p");
    let value = vec![7; 300_000_000];
    assert_timeout(|deadline| store.put(&chunk(1), &value, deadline));
}
