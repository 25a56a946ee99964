//! What a peer sends, byte by byte: a greeting, commands and messages.
use crate::zmtp::frame::{COMMAND, GREETING_BYTES, LONG, MECHANISM, MORE};

/// The longest frame that a peer may send, and the longest message, in bytes.
pub(crate) const FRAME_BYTES: usize = 64 << 10;
/// The most frames of a message that a peer may send.
const MESSAGE_FRAMES: usize = 16;
/// The longest context of a PING.
const CONTEXT_BYTES: usize = 16;

/// One thing that a peer sent.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Input {
    /// The greeting of a peer that speaks ZMTP 3.
    Greeting {
        /// The minor version.
        minor: u8,
    },
    /// The end of the handshake.
    Ready {
        /// The type of the peer's socket, such as `SUB`.
        socket_type: Vec<u8>,
    },
    /// The peer wants messages whose topic begins with this.
    Subscribe(Vec<u8>),
    /// The peer takes one such wish back.
    Cancel(Vec<u8>),
    /// The peer asks whether the connection is alive.
    Ping {
        /// Tenths of a second without a word from the peer after which it is gone; 0 for never.
        ttl: u16,
        /// What the answer must contain.
        context: Vec<u8>,
    },
    /// The peer refuses the connection.
    Error(Vec<u8>),
    /// A message, frame by frame.
    Message(Vec<Vec<u8>>),
}

/// What a peer must not send. The connection is of no use any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// The first bytes are not those of ZMTP 3.
    #[error("not a greeting of ZMTP 3")]
    Greeting,
    /// The peer wants another mechanism than NULL.
    #[error("the mechanism is not NULL")]
    Mechanism,
    /// A frame or a message is longer than 64 KiB, or has more than 16 frames.
    #[error("a frame or a message is too long")]
    TooLong,
    /// Flags of a frame that have no meaning.
    #[error("a frame has unknown flags")]
    Flags,
    /// A command without a name, or with other contents than its own.
    #[error("a command is malformed")]
    Command,
    /// READY twice or not first, or a command inside a message.
    #[error("a command or message at the wrong time")]
    Order,
}

/// What comes next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Greeting,
    Handshake,
    Traffic,
    Failed(Fault),
}

/// Reads what a peer sends. Keeps at most one message of 64 KiB beside the bytes of the last
/// [`Self::feed`].
///
/// ```
/// use kv_events::zmtp::{Fault, Input, Parser};
///
/// let mut parser = Parser::new();
/// let mut greeting = *b"\xff\0\0\0\0\0\0\0\0\x7f\x03\x01NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\
///     \0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
/// parser.feed(&greeting);
/// assert_eq!(parser.next(), Ok(Some(Input::Greeting { minor: 1 })));
/// assert_eq!(parser.next(), Ok(None));
///
/// greeting[0] = b'G'; // such as "GET / HTTP/1.1"
/// let mut parser = Parser::new();
/// parser.feed(&greeting);
/// assert_eq!(parser.next(), Err(Fault::Greeting));
/// ```
#[derive(Debug)]
pub struct Parser {
    state: State,
    bytes: Vec<u8>,
    /// Bytes that are read already.
    read: usize,
    frames: Vec<Vec<u8>>,
}

impl Default for Parser {
    fn default() -> Self {
        Self::new()
    }
}

impl Parser {
    /// Begins before the greeting.
    pub fn new() -> Self {
        Self { state: State::Greeting, bytes: Vec::new(), read: 0, frames: Vec::new() }
    }

    /// Appends bytes of the peer. Call [`Self::next`] until it has nothing more before the next
    /// call.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.read);
        self.read = 0;
        self.bytes.extend(bytes);
    }

    /// Returns the next thing that the peer sent; `None` if bytes are missing.
    ///
    /// # Errors
    /// A [`Fault`] of the peer, and the same for ever after.
    #[expect(clippy::should_implement_trait, reason = "an iterator would not be asked again")]
    pub fn next(&mut self) -> Result<Option<Input>, Fault> {
        let next = self.step();
        if let Err(fault) = next {
            self.state = State::Failed(fault);
        }
        next
    }

    fn step(&mut self) -> Result<Option<Input>, Fault> {
        match self.state {
            State::Failed(fault) => return Err(fault),
            State::Greeting => return self.greeting(),
            State::Handshake | State::Traffic => {}
        }
        while let Some((flags, body)) = self.frame()? {
            if flags & COMMAND != 0 {
                if let Some(input) = self.command(&body)? {
                    return Ok(Some(input));
                }
                continue;
            }
            if self.state == State::Handshake {
                return Err(Fault::Order);
            }
            let bytes: usize = self.frames.iter().map(Vec::len).sum();
            if bytes + body.len() > FRAME_BYTES || self.frames.len() >= MESSAGE_FRAMES {
                return Err(Fault::TooLong);
            }
            self.frames.push(body);
            if flags & MORE == 0 {
                return Ok(Some(Input::Message(std::mem::take(&mut self.frames))));
            }
        }
        Ok(None)
    }

    /// Reads the greeting, and refuses what cannot become one as soon as that is known.
    fn greeting(&mut self) -> Result<Option<Input>, Fault> {
        let rest = self.rest();
        let right = |at: usize, is_right: fn(u8) -> bool| rest.get(at).is_none_or(|b| is_right(*b));
        if !right(0, |b| b == 0xff) || !right(9, |b| b == 0x7f) || !right(10, |b| b >= 3) {
            return Err(Fault::Greeting);
        }
        let Some(greeting) = rest.first_chunk::<GREETING_BYTES>() else { return Ok(None) };
        let minor = greeting[11];
        if greeting[12..32] != MECHANISM {
            return Err(Fault::Mechanism);
        }
        self.read += GREETING_BYTES;
        self.state = State::Handshake;
        Ok(Some(Input::Greeting { minor }))
    }

    /// Returns the next frame; `None` if bytes are missing.
    fn frame(&mut self) -> Result<Option<(u8, Vec<u8>)>, Fault> {
        let Some((&flags, rest)) = self.rest().split_first() else { return Ok(None) };
        if flags & !(MORE | LONG | COMMAND) != 0 || flags & (MORE | COMMAND) == MORE | COMMAND {
            return Err(Fault::Flags);
        }
        let (len, rest, head) = if flags & LONG == 0 {
            let Some((&len, rest)) = rest.split_first() else { return Ok(None) };
            (usize::from(len), rest, 2)
        } else {
            let Some((len, rest)) = rest.split_first_chunk() else { return Ok(None) };
            let len = usize::try_from(u64::from_be_bytes(*len)).map_err(|_| Fault::TooLong)?;
            (len, rest, 9)
        };
        if len > FRAME_BYTES {
            return Err(Fault::TooLong);
        }
        let Some(body) = rest.get(..len) else { return Ok(None) };
        let body = body.to_vec();
        self.read += head + len;
        Ok(Some((flags, body)))
    }

    fn rest(&self) -> &[u8] {
        self.bytes.get(self.read..).unwrap_or_default()
    }

    /// Reads a command; `None` for those that have no meaning for a server of events.
    fn command(&mut self, body: &[u8]) -> Result<Option<Input>, Fault> {
        let Some((&len, rest)) = body.split_first() else { return Err(Fault::Command) };
        let Some((name, body)) = rest.split_at_checked(usize::from(len)) else {
            return Err(Fault::Command);
        };
        if name == b"ERROR" {
            return Ok(Some(Input::Error(body.to_vec())));
        }
        if (name == b"READY") != (self.state == State::Handshake) || !self.frames.is_empty() {
            return Err(Fault::Order);
        }
        Ok(match name {
            b"READY" => {
                let socket_type = socket_type(body).ok_or(Fault::Command)?;
                self.state = State::Traffic;
                Some(Input::Ready { socket_type })
            }
            b"SUBSCRIBE" => Some(Input::Subscribe(body.to_vec())),
            b"CANCEL" => Some(Input::Cancel(body.to_vec())),
            b"PING" => {
                let Some((ttl, context)) = body.split_first_chunk() else {
                    return Err(Fault::Command);
                };
                if context.len() > CONTEXT_BYTES {
                    return Err(Fault::Command);
                }
                Some(Input::Ping { ttl: u16::from_be_bytes(*ttl), context: context.to_vec() })
            }
            _ => None,
        })
    }
}

/// Returns the type of the socket from the properties of READY; `None` if they are malformed or
/// lack it.
fn socket_type(mut properties: &[u8]) -> Option<Vec<u8>> {
    let mut found = None;
    while let Some((&len, rest)) = properties.split_first() {
        let (name, rest) = rest.split_at_checked(usize::from(len))?;
        let (len, rest) = rest.split_first_chunk()?;
        let len = usize::try_from(u32::from_be_bytes(*len)).ok()?;
        let (value, rest) = rest.split_at_checked(len)?;
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            found = Some(value.to_vec());
        }
        properties = rest;
    }
    found
}

#[cfg(test)]
#[path = "parser_tests.rs"]
mod tests;
