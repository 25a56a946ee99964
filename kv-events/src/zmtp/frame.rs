//! What the server writes: its greeting, commands and messages.

/// Flags of a frame: more frames of the message follow; the length has 8 bytes; it is a command.
pub(crate) const MORE: u8 = 1;
pub(crate) const LONG: u8 = 2;
pub(crate) const COMMAND: u8 = 4;

/// Bytes of a greeting.
pub(crate) const GREETING_BYTES: usize = 64;
/// The name of the mechanism in a greeting, padded.
pub(crate) const MECHANISM: [u8; 20] = *b"NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";

/// Returns the greeting of a server of version 3.1.
pub(crate) fn greeting() -> Vec<u8> {
    let mut bytes = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 1];
    bytes.extend(MECHANISM);
    bytes.resize(GREETING_BYTES, 0);
    bytes
}

/// Appends a frame.
pub(crate) fn frame(out: &mut Vec<u8>, flags: u8, body: &[u8]) {
    if let Ok(len) = u8::try_from(body.len()) {
        out.extend([flags, len]);
    } else {
        out.push(flags | LONG);
        out.extend(u64::try_from(body.len()).unwrap_or(u64::MAX).to_be_bytes());
    }
    out.extend(body);
}

/// Returns a message of some frames.
pub(crate) fn message(frames: &[&[u8]]) -> Vec<u8> {
    let mut out = Vec::new();
    for (index, body) in frames.iter().enumerate() {
        frame(&mut out, if index + 1 < frames.len() { MORE } else { 0 }, body);
    }
    out
}

/// Returns a command. Names are short.
pub(crate) fn command(name: &str, body: &[u8]) -> Vec<u8> {
    let mut inside = vec![u8::try_from(name.len()).unwrap_or(u8::MAX)];
    inside.extend(name.as_bytes());
    inside.extend(body);
    let mut out = Vec::new();
    frame(&mut out, COMMAND, &inside);
    out
}

/// Returns the command READY of a socket of a type.
pub(crate) fn ready(socket_type: &str) -> Vec<u8> {
    let mut body = Vec::new();
    for (name, value) in [("Socket-Type", socket_type), ("Identity", "")] {
        body.push(u8::try_from(name.len()).unwrap_or(u8::MAX));
        body.extend(name.as_bytes());
        body.extend(u32::try_from(value.len()).unwrap_or(u32::MAX).to_be_bytes());
        body.extend(value.as_bytes());
    }
    command("READY", &body)
}

/// Returns the command ERROR with a short reason.
pub(crate) fn error(reason: &str) -> Vec<u8> {
    let mut body = vec![u8::try_from(reason.len()).unwrap_or(u8::MAX)];
    body.extend(reason.bytes().take(usize::from(u8::MAX)));
    command("ERROR", &body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_have_short_and_long_lengths() {
        let greeting = greeting();
        assert_eq!((greeting.len(), &greeting[10..16]), (64, &b"\x03\x01NULL"[..]));
        assert_eq!(message(&[b"a", b""]), b"\x01\x01a\x00\x00");
        let long = message(&[&[7; 300]]);
        assert_eq!((&long[..9], long.len()), (&[LONG, 0, 0, 0, 0, 0, 0, 1, 44][..], 309));
        assert_eq!(command("PONG", b"x"), b"\x04\x06\x04PONGx");
        assert_eq!(error("no"), b"\x04\x09\x05ERROR\x02no");
        let expected = b"\x04\x26\x05READY\x0bSocket-Type\0\0\0\x03PUB\x08Identity\0\0\0\0";
        assert_eq!(ready("PUB"), expected);
    }
}
