//! Bytes of a hostile peer: nothing panics, pieces of any size give the same, and no input is
//! larger than the bound of a message.
//!
//! The first byte chooses what the fuzzer need not find: a greeting and the end of the handshake.
#![no_main]

use kv_events::zmtp::{Fault, Input, Parser};
use libfuzzer_sys::fuzz_target;

const BYTES_MAX: usize = 64 << 10;

fn greeting() -> Vec<u8> {
    let mut bytes = b"\xff\0\0\0\0\0\0\0\0\x7f\x03\x01NULL".to_vec();
    bytes.resize(64, 0);
    bytes
}

fn all(bytes: &[u8], piece: usize) -> (Vec<Input>, Option<Fault>) {
    let (mut parser, mut inputs) = (Parser::new(), Vec::new());
    for piece in bytes.chunks(piece) {
        parser.feed(piece);
        loop {
            match parser.next() {
                Ok(Some(input)) => inputs.push(input),
                Ok(None) => break,
                Err(fault) => return (inputs, Some(fault)),
            }
        }
    }
    (inputs, None)
}

fuzz_target!(|bytes: &[u8]| {
    let Some((mode, bytes)) = bytes.split_first() else { return };
    let mut sent = Vec::new();
    if mode & 1 != 0 {
        sent.extend(greeting());
    }
    if mode & 2 != 0 {
        sent.extend(b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB");
    }
    sent.extend(bytes);
    let (inputs, fault) = all(&sent, sent.len().max(1));
    for piece in [1, 7] {
        assert_eq!(all(&sent, piece), (inputs.clone(), fault));
    }
    for input in inputs {
        if let Input::Message(frames) = input {
            assert!(frames.iter().map(Vec::len).sum::<usize>() <= BYTES_MAX);
        }
    }
});
