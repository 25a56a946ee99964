//! What the parser takes, refuses and bounds.
use super::*;
use crate::zmtp::frame;

fn greeted() -> Parser {
    let mut parser = Parser::new();
    parser.feed(&frame::greeting());
    assert_eq!(parser.next(), Ok(Some(Input::Greeting { minor: 1 })));
    parser
}

fn ready() -> Parser {
    let mut parser = greeted();
    parser.feed(&frame::ready("SUB"));
    let socket_type = b"SUB".to_vec();
    assert_eq!(parser.next(), Ok(Some(Input::Ready { socket_type })));
    parser
}

/// Feeds bytes in pieces of `piece` and returns everything until the end or the first fault.
fn all(parser: &mut Parser, bytes: &[u8], piece: usize) -> Result<Vec<Input>, Fault> {
    let mut inputs = Vec::new();
    for piece in bytes.chunks(piece) {
        parser.feed(piece);
        while let Some(input) = parser.next()? {
            inputs.push(input);
        }
    }
    Ok(inputs)
}

#[test]
fn pieces_of_any_size_give_the_same() {
    let mut bytes = frame::greeting();
    bytes.extend(frame::ready("DEALER"));
    bytes.extend(frame::command("SUBSCRIBE", b"kv@"));
    bytes.extend(frame::command("UNKNOWN", b"1"));
    bytes.extend(frame::command("CANCEL", b"kv@"));
    bytes.extend(frame::command("PING", b"\x00\x14ctx"));
    bytes.extend(frame::message(&[b"", &[5; 300]]));
    bytes.extend(frame::error("bye"));
    let expected = [
        Input::Greeting { minor: 1 },
        Input::Ready { socket_type: b"DEALER".to_vec() },
        Input::Subscribe(b"kv@".to_vec()),
        Input::Cancel(b"kv@".to_vec()),
        Input::Ping { ttl: 20, context: b"ctx".to_vec() },
        Input::Message(vec![vec![], vec![5; 300]]),
        Input::Error(b"\x03bye".to_vec()),
    ];
    for piece in [1, 2, 3, 7, 64, 65, 10_000] {
        assert_eq!(all(&mut Parser::new(), &bytes, piece).unwrap(), expected, "{piece}");
    }
}

#[test]
fn greetings_of_others_are_refused_at_their_first_wrong_byte() {
    for (bytes, fault) in [
        (b"GET / HTTP/1.1\r\n".to_vec(), Fault::Greeting),
        (vec![0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7e], Fault::Greeting),
        (vec![0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 1], Fault::Greeting),
        (
            {
                let mut plain = frame::greeting();
                plain[12..17].copy_from_slice(b"PLAIN");
                plain
            },
            Fault::Mechanism,
        ),
    ] {
        let mut parser = Parser::new();
        assert_eq!(all(&mut parser, &bytes, 1), Err(fault));
        assert_eq!(parser.next(), Err(fault), "a fault remains");
    }
}

#[test]
fn lengths_are_bounded_before_anything_is_kept() {
    let giant = [[LONG].as_slice(), &(1_u64 << 30).to_be_bytes()].concat();
    assert_eq!(all(&mut ready(), &giant, 9), Err(Fault::TooLong));
    let more = [[LONG | MORE].as_slice(), &(1_u64 << 63).to_be_bytes()].concat();
    assert_eq!(all(&mut ready(), &more, 9), Err(Fault::TooLong));
    let most = frame::message(&[&vec![1; FRAME_BYTES]]);
    assert_eq!(all(&mut ready(), &most, 4096).unwrap().len(), 1);
    let over = frame::message(&[&vec![1; FRAME_BYTES], &[1]]);
    assert_eq!(all(&mut ready(), &over, 4096), Err(Fault::TooLong));
    assert_eq!(all(&mut ready(), &frame::message(&[&b""[..]; 17]), 3), Err(Fault::TooLong));
    assert_eq!(all(&mut ready(), &frame::message(&[&b""[..]; 16]), 3).unwrap().len(), 1);
}

#[test]
fn commands_come_in_order_and_whole() {
    let cases = [
        (frame::command("PING", b"\x00"), Fault::Command),
        (frame::command("PING", &[0; 19]), Fault::Command),
        (vec![COMMAND, 0], Fault::Command),
        (vec![COMMAND, 2, 9, b'P'], Fault::Command),
        (frame::ready("SUB"), Fault::Order),
        ([vec![MORE, 0], frame::command("PING", b"\0\0")].concat(), Fault::Order),
        (vec![8, 0], Fault::Flags),
        (vec![COMMAND | MORE, 0], Fault::Flags),
    ];
    for (bytes, fault) in cases {
        assert_eq!(all(&mut ready(), &bytes, 100), Err(fault), "{bytes:?}");
    }
    assert_eq!(all(&mut greeted(), &frame::message(&[b"\x01"]), 100), Err(Fault::Order));
    assert_eq!(all(&mut greeted(), &frame::command("PING", b"\0\0"), 100), Err(Fault::Order));
    assert_eq!(all(&mut greeted(), &frame::command("READY", b""), 100), Err(Fault::Command));
    let cut = frame::command("READY", b"\x0bSocket-Type\0\0\0\x09SUB");
    assert_eq!(all(&mut greeted(), &cut, 100), Err(Fault::Command));
}

/// Random bytes after a right start of random length: nothing panics, and nothing grows.
#[test]
fn random_bytes_do_no_harm() {
    let mut start = frame::greeting();
    start.extend(frame::ready("SUB"));
    start.extend(frame::command("SUBSCRIBE", b""));
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let (mut faults, mut inputs) = (0, 0);
    for _ in 0..2000 {
        let keep = usize::try_from(random()).unwrap() % (start.len() + 1);
        let mut bytes = start[..keep].to_vec();
        // Small numbers make flags and lengths that are right.
        bytes.extend((0..random() % 400).map(|_| u8::try_from(random() % 9).unwrap()));
        bytes.extend((0..random() % 40).map(|_| u8::try_from(random() % 256).unwrap()));
        let mut parser = Parser::new();
        let piece = usize::try_from(random() % 50).unwrap() + 1;
        for piece in bytes.chunks(piece) {
            parser.feed(piece);
            while let Ok(Some(_)) = parser.next() {
                inputs += 1;
            }
            assert!(parser.bytes.len() <= FRAME_BYTES + piece.len());
            if parser.next().is_err() {
                faults += 1;
                break;
            }
        }
    }
    assert!(faults > 500 && inputs > 1000, "{faults} {inputs}");
}
