//! One connection: a socket with a deadline, the handshake, commands out and replies in.
// Reads replies that may be anything.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
use std::io::{self, BufRead as _, BufReader, Read, Write as _};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs as _};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use redis::{ServerError, ServerErrorKind, Value};

use super::RedisWarning;
use super::address::Settings;
use crate::store::{StoreError, StoreErrorKind};

/// The reason for which an exchange failed.
#[derive(Debug)]
pub(super) enum Fault {
    /// The socket failed or timed out.
    Io(io::Error),
    /// The server refused a command.
    Server(ServerError),
    /// The bytes are not a reply, or a reply to another question.
    Reply(String),
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl Fault {
    /// Adds the operation.
    pub(super) fn into_error(self, operation: &str) -> StoreError {
        match self {
            Self::Io(error) => {
                let kind = match error.kind() {
                    io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => StoreErrorKind::Timeout,
                    _ => StoreErrorKind::Unavailable,
                };
                StoreError::new(kind, operation).with_source(error)
            }
            Self::Server(error) => StoreError::new(kind(&error), operation).with_source(error),
            Self::Reply(problem) => {
                StoreError::new(StoreErrorKind::Corrupt, format!("{operation}: {problem}"))
            }
        }
    }
}

/// Returns the kind of a server's refusal.
fn kind(error: &ServerError) -> StoreErrorKind {
    match error.kind() {
        Some(ServerErrorKind::NoPerm | ServerErrorKind::ReadOnly) => return StoreErrorKind::Denied,
        Some(
            ServerErrorKind::BusyLoading
            | ServerErrorKind::ClusterDown
            | ServerErrorKind::MasterDown
            | ServerErrorKind::TryAgain,
        ) => return StoreErrorKind::Unavailable,
        _ => {}
    }
    match error.code() {
        "OOM" => StoreErrorKind::Full,
        "NOAUTH" | "WRONGPASS" | "DENIED" | "MISCONF" => StoreErrorKind::Denied,
        "WRONGTYPE" => StoreErrorKind::Corrupt,
        "BUSY" => StoreErrorKind::Unavailable,
        // A connection too many has no code of its own.
        "ERR"
            if error.details().is_some_and(|words| words.starts_with("max number of clients")) =>
        {
            StoreErrorKind::Unavailable
        }
        _ => StoreErrorKind::Other,
    }
}

/// A reply, or the beginning of one.
#[derive(Debug)]
pub(super) enum Reply {
    Okay,
    Nil,
    Integer(i64),
    /// This number of bytes follows, for [`Connection::read_bulk`].
    Bulk(u64),
    Other(Value),
}

impl Reply {
    /// Says that the reply answers no question of this store.
    pub(super) fn unexpected(self, expected: &str) -> Fault {
        let reply = match self {
            Self::Okay => "OK".to_owned(),
            Self::Nil => "nothing".to_owned(),
            Self::Integer(number) => format!("the number {number}"),
            Self::Bulk(length) => format!("{length} bytes"),
            Self::Other(value) => format!("{value:?}"),
        };
        Fault::Reply(format!("expected {expected}, the reply is {reply}"))
    }
}

/// A connection on which replies are in step with commands.
#[derive(Debug)]
pub(super) struct Connection {
    reader: BufReader<Socket>,
}

impl Connection {
    /// Connects, authenticates, and reads the settings of the server that matter to a cache.
    pub(super) fn open(
        settings: &Settings,
        deadline: Instant,
    ) -> Result<(Self, Vec<RedisWarning>), Fault> {
        let stream = connect(&settings.host, settings.port, deadline)?;
        stream.set_nodelay(true)?;
        let reader = BufReader::with_capacity(BUFFER_BYTES, Socket { stream, deadline });
        let mut connection = Self { reader };
        let mut commands = Vec::new();
        let mut replies = 0_u32;
        if let Some(credentials) = settings.credentials() {
            redis::cmd("AUTH").arg(credentials).write_packed_command(&mut commands);
            replies = replies.saturating_add(1);
        }
        if settings.db != 0 {
            redis::cmd("SELECT").arg(settings.db).write_packed_command(&mut commands);
            replies = replies.saturating_add(1);
        }
        redis::cmd("INFO").arg("memory").write_packed_command(&mut commands);
        connection.write(&[&commands])?;
        for _ in 0..replies {
            match connection.read_reply()? {
                Reply::Okay => {}
                other => return Err(other.unexpected("OK")),
            }
        }
        let warnings = match connection.read_info() {
            Ok(info) => warnings(&info, settings.ttl_ms.is_some()),
            // A user without a right to it can still use the store.
            Err(Fault::Server(error)) if is_not_allowed(&error) => Vec::new(),
            Err(fault) => return Err(fault),
        };
        Ok((connection, warnings))
    }

    /// Sets the deadline of the next operations.
    pub(super) fn set_deadline(&mut self, deadline: Instant) {
        self.reader.get_mut().deadline = deadline;
    }

    /// Returns whether the server has sent nothing since the last reply, and has not closed the
    /// connection.
    pub(super) fn is_quiet(&self) -> bool {
        let stream = &self.reader.get_ref().stream;
        let peek = || {
            stream.set_nonblocking(true)?;
            let peeked = stream.peek(&mut [0]);
            stream.set_nonblocking(false)?;
            peeked
        };
        let is_silent = peek().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock);
        self.reader.buffer().is_empty() && is_silent
    }

    /// Writes commands.
    pub(super) fn write(&mut self, parts: &[&[u8]]) -> Result<(), Fault> {
        parts.iter().try_for_each(|part| Ok(self.reader.get_mut().write_all(part)?))
    }

    /// Reads a reply, a bulk string without its bytes.
    pub(super) fn read_reply(&mut self) -> Result<Reply, Fault> {
        let line = self.read_line()?;
        match line.strip_prefix(b"$") {
            Some(b"-1\r\n") => Ok(Reply::Nil),
            Some(length) => {
                let digits =
                    length.strip_suffix(b"\r\n").and_then(|text| str::from_utf8(text).ok());
                let length = digits.and_then(|text| text.parse().ok());
                length.map(Reply::Bulk).ok_or_else(|| not_a_reply(&line))
            }
            // Only what fits on a line: the parser would make room for all elements of an array.
            None if !line.starts_with(b"+")
                && !line.starts_with(b":")
                && !line.starts_with(b"-") =>
            {
                Err(not_a_reply(&line))
            }
            None => match redis::parse_redis_value(&line) {
                Ok(Value::Okay) => Ok(Reply::Okay),
                Ok(Value::Int(number)) => Ok(Reply::Integer(number)),
                Ok(Value::Nil) => Ok(Reply::Nil),
                Ok(Value::ServerError(error)) => Err(Fault::Server(error)),
                Ok(other) => Ok(Reply::Other(other)),
                Err(_) => Err(not_a_reply(&line)),
            },
        }
    }

    /// Reads a reply that must be a number.
    pub(super) fn read_integer(&mut self) -> Result<i64, Fault> {
        match self.read_reply()? {
            Reply::Integer(number) => Ok(number),
            other => Err(other.unexpected("a number")),
        }
    }

    /// Reads the bytes of a bulk string to the beginning of `into`.
    pub(super) fn read_bulk(&mut self, length: u64, into: &mut [u8]) -> Result<usize, Fault> {
        let room = into.len();
        let part = usize::try_from(length).ok().and_then(|length| into.get_mut(..length));
        let Some(part) = part else {
            return Err(Fault::Reply(format!("{length} bytes, there is room for {room}")));
        };
        self.reader.read_exact(part)?;
        let mut end = [0; 2];
        self.reader.read_exact(&mut end)?;
        if end != *b"\r\n" {
            return Err(Fault::Reply(format!("the value is longer than its {length} bytes")));
        }
        Ok(part.len())
    }

    /// Reads the reply to a `SCAN`: the next cursor, and keys. Those that are not UTF-8 are of
    /// others.
    pub(super) fn read_scan(&mut self) -> Result<(String, Vec<String>), Fault> {
        if self.read_array()? != 2 {
            return Err(Fault::Reply("expected a cursor and keys".to_owned()));
        }
        let cursor = String::from_utf8(self.read_short_bulk()?);
        let cursor = cursor.map_err(|bad| not_a_reply(bad.as_bytes()))?;
        let count = self.read_array()?;
        let mut keys = Vec::new();
        for _ in 0..count {
            keys.extend(String::from_utf8(self.read_short_bulk()?).ok());
        }
        Ok((cursor, keys))
    }

    /// Reads the number of elements of an array, which follow.
    fn read_array(&mut self) -> Result<u32, Fault> {
        let line = self.read_line()?;
        if line.starts_with(b"-")
            && let Ok(Value::ServerError(error)) = redis::parse_redis_value(&line)
        {
            return Err(Fault::Server(error));
        }
        let digits = line.strip_prefix(b"*").and_then(|rest| rest.strip_suffix(b"\r\n"));
        let digits = digits.and_then(|text| str::from_utf8(text).ok());
        let count = digits.and_then(|text| text.parse().ok());
        count.filter(|count| *count <= KEYS_MAX).ok_or_else(|| not_a_reply(&line))
    }

    fn read_short_bulk(&mut self) -> Result<Vec<u8>, Fault> {
        match self.read_reply()? {
            Reply::Bulk(length) if length <= LINE_BYTES_MAX => {
                let mut bytes = vec![0; usize::try_from(length).unwrap_or_default()];
                self.read_bulk(length, &mut bytes)?;
                Ok(bytes)
            }
            other => Err(other.unexpected("a cursor or a key")),
        }
    }

    fn read_info(&mut self) -> Result<String, Fault> {
        match self.read_reply()? {
            Reply::Bulk(length) if length <= INFO_BYTES_MAX => {
                let mut bytes = vec![0; usize::try_from(length).unwrap_or_default()];
                self.read_bulk(length, &mut bytes)?;
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            other => Err(other.unexpected("a section of INFO")),
        }
    }

    /// Reads up to the end of a line, which belongs to the result.
    fn read_line(&mut self) -> Result<Vec<u8>, Fault> {
        let mut line = Vec::new();
        let read = (&mut self.reader).take(LINE_BYTES_MAX).read_until(b'\n', &mut line)?;
        if line.ends_with(b"\r\n") {
            return Ok(line);
        }
        if read == 0 || (!line.ends_with(b"\n") && line.len() < LINE_LENGTH_MAX) {
            return Err(Fault::Io(io::ErrorKind::UnexpectedEof.into()));
        }
        Err(not_a_reply(&line))
    }
}

fn not_a_reply(line: &[u8]) -> Fault {
    let shown = line.get(..SHOWN_BYTES).unwrap_or(line);
    Fault::Reply(format!("not a reply of Redis: \"{}\"", shown.escape_ascii()))
}

/// Returns whether a user may not run a command, or the server does not have it.
fn is_not_allowed(error: &ServerError) -> bool {
    error.kind() == Some(ServerErrorKind::NoPerm)
        || error.details().is_some_and(|words| words.starts_with("unknown command"))
}

/// Finds settings with which a cache works badly.
fn warnings(info: &str, has_ttl: bool) -> Vec<RedisWarning> {
    let setting = |name: &str| {
        info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
    };
    let mut found = Vec::new();
    let keeps_all =
        |policy: &str| policy == "noeviction" || (policy.starts_with("volatile-") && !has_ttl);
    if let Some(policy) = setting("maxmemory_policy").filter(|policy| keeps_all(policy)) {
        found.push(RedisWarning::NoEviction { policy: policy.to_owned() });
    }
    if setting("maxmemory") == Some("0") {
        found.push(RedisWarning::NoMemoryLimit);
    }
    found
}

/// Connects to the first address of a host that answers.
fn connect(host: &str, port: u16, deadline: Instant) -> Result<TcpStream, Fault> {
    let addresses = resolve(host, port, deadline)?;
    let mut error = io::Error::from(io::ErrorKind::NotFound);
    for (index, address) in addresses.iter().enumerate() {
        let others = addresses.len().saturating_sub(index);
        let share = time_left(deadline)?.checked_div(u32::try_from(others).unwrap_or(u32::MAX));
        match TcpStream::connect_timeout(address, share.unwrap_or(SHORTEST).max(SHORTEST)) {
            Ok(stream) => return Ok(stream),
            Err(failure) => error = failure,
        }
    }
    Err(Fault::Io(error))
}

/// Looks a name up. The system's resolver has no deadline, so it runs on a thread that is left
/// alone when it takes too long.
fn resolve(host: &str, port: u16, deadline: Instant) -> Result<Vec<SocketAddr>, Fault> {
    if let Ok(address) = host.parse() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    let (sender, receiver) = mpsc::channel();
    let name = host.to_owned();
    thread::Builder::new().name("kv-tier resolver".to_owned()).spawn(move || {
        let found = (name.as_str(), port).to_socket_addrs().map(Vec::from_iter);
        // Nobody listens after the deadline.
        let _ = sender.send(found);
    })?;
    match receiver.recv_timeout(time_left(deadline)?) {
        Ok(found) => Ok(found?),
        Err(_) => Err(Fault::Io(io::ErrorKind::TimedOut.into())),
    }
}

fn time_left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// A socket whose reads and writes end at one deadline together.
#[derive(Debug)]
struct Socket {
    stream: TcpStream,
    deadline: Instant,
}

impl Read for Socket {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(time_left(self.deadline)?))?;
        self.stream.read(into)
    }
}

impl io::Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(time_left(self.deadline)?))?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

const BUFFER_BYTES: usize = 16 << 10;
/// Longest line of a reply.
const LINE_LENGTH_MAX: usize = 4 << 10;
const LINE_BYTES_MAX: u64 = 4 << 10;
/// Most keys of one reply, many times the number that is requested.
const KEYS_MAX: u32 = 1 << 17;
const INFO_BYTES_MAX: u64 = 1 << 20;
/// Bytes of a strange line in a message.
const SHOWN_BYTES: usize = 64;
/// A timeout of zero is refused by the standard library.
const SHORTEST: Duration = Duration::from_millis(1);

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(line: &str) -> ServerError {
        match redis::parse_redis_value(format!("-{line}\r\n").as_bytes()) {
            Ok(Value::ServerError(error)) => error,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn refusals_have_kinds() {
        for (line, expected) in [
            ("OOM command not allowed when used memory > 'maxmemory'.", StoreErrorKind::Full),
            ("NOAUTH Authentication required.", StoreErrorKind::Denied),
            ("WRONGPASS invalid username-password pair", StoreErrorKind::Denied),
            ("NOPERM this user has no permissions", StoreErrorKind::Denied),
            ("READONLY You can't write against a read only replica.", StoreErrorKind::Denied),
            ("DENIED Redis is running in protected mode", StoreErrorKind::Denied),
            ("WRONGTYPE Operation against a key", StoreErrorKind::Corrupt),
            ("LOADING Redis is loading the dataset in memory", StoreErrorKind::Unavailable),
            ("ERR max number of clients reached", StoreErrorKind::Unavailable),
            ("MOVED 3999 127.0.0.1:6381", StoreErrorKind::Other),
            ("ERR syntax error", StoreErrorKind::Other),
        ] {
            assert_eq!(kind(&refusal(line)), expected, "{line}");
        }
    }

    #[test]
    fn settings_that_lose_or_refuse_chunks_are_reported() {
        let found = |policy: &str, limit: u64, has_ttl| {
            let info = format!(
                "# Memory\r\nmaxmemory:{limit}\r\nmaxmemory_human:1K\r\n\
                 maxmemory_policy:{policy}\r\n"
            );
            warnings(&info, has_ttl)
        };
        let none = |policy: &str| RedisWarning::NoEviction { policy: policy.to_owned() };
        assert_eq!(found("allkeys-lru", 1024, false), []);
        assert_eq!(found("volatile-lru", 1024, true), []);
        assert_eq!(found("volatile-lru", 1024, false), [none("volatile-lru")]);
        assert_eq!(found("noeviction", 1024, true), [none("noeviction")]);
        assert_eq!(
            found("noeviction", 0, false),
            [none("noeviction"), RedisWarning::NoMemoryLimit]
        );
        assert_eq!(warnings("", false), []);
    }
}
