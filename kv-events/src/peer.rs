//! One connection: a thread that reads what the peer wants, and one that writes to it.
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{io, thread};

use crate::outbox::{Outbox, Outgoing};
use crate::zmtp::{Input, Parser, frame};

/// The longest time from the connection to the end of the handshake.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// The longest time of one write, after which the thread looks whether it is to end.
const WRITE: Duration = Duration::from_secs(1);
/// The most subscriptions of a peer.
const SUBSCRIPTIONS: usize = 64;
/// The stack of a thread of a peer, whose buffers are on the heap.
const STACK_BYTES: usize = 256 << 10;

/// What a socket is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// PUB: batches, to peers that subscribe.
    Events,
    /// ROUTER: batches of the past, to peers that ask.
    Replay,
}

impl Role {
    fn socket_type(self) -> &'static str {
        match self {
            Self::Events => "PUB",
            Self::Replay => "ROUTER",
        }
    }

    fn takes(self, socket_type: &[u8]) -> bool {
        match self {
            Self::Events => matches!(socket_type, b"SUB" | b"XSUB"),
            Self::Replay => matches!(socket_type, b"REQ" | b"DEALER" | b"ROUTER"),
        }
    }
}

/// What a peer asks the publisher for.
#[derive(Debug)]
pub(crate) enum Wish {
    /// Batches from now on.
    Subscribed,
    /// A message, frame by frame.
    Request(Vec<Vec<u8>>),
}

/// One connection.
#[derive(Debug)]
pub(crate) struct Peer {
    stream: TcpStream,
    pub(crate) outbox: Outbox,
    /// Topics begin with one of these.
    subscriptions: Mutex<Vec<Vec<u8>>>,
}

/// Why a connection ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// The peer or the server ended it.
    Closed,
    /// The peer broke the protocol or a bound, or took too long.
    Fault,
}

impl Peer {
    pub(crate) fn new(stream: TcpStream, room: usize) -> io::Result<Self> {
        // Accepted sockets inherit it from the listener on some systems.
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(WRITE))?;
        Ok(Self { stream, outbox: Outbox::new(room), subscriptions: Mutex::default() })
    }

    /// Returns whether the peer wants messages of a topic.
    pub(crate) fn wants(&self, topic: &[u8]) -> bool {
        self.subscriptions().iter().any(|prefix| topic.starts_with(prefix))
    }

    /// Returns whether the peer has a subscription.
    pub(crate) fn is_subscribed(&self) -> bool {
        !self.subscriptions().is_empty()
    }

    /// Ends both threads of the peer.
    pub(crate) fn close(&self) {
        self.outbox.close();
        // Fails if the peer closed it first.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Serves the peer until one of both ends it; `wish` returns `false` for what it refuses.
    pub(crate) fn serve(
        self: &Arc<Self>,
        role: Role,
        wish: impl FnMut(&Self, Wish) -> bool,
    ) -> io::Result<End> {
        let writer = Arc::clone(self);
        let builder = thread::Builder::new().name("kv-events-write".into());
        let writer = builder.stack_size(STACK_BYTES).spawn(move || writer.write());
        let writer = writer.inspect_err(|_| self.close())?;
        let end = self.read(role, wish);
        self.close();
        // A panic of the writer is of no consequence to others.
        let _ = writer.join();
        Ok(end)
    }

    fn write(&self) {
        while let Some(message) = self.outbox.take() {
            if self.write_all(&message.head).and_then(|()| self.write_all(&message.body)).is_err() {
                self.close();
            }
            self.outbox.written(&message);
        }
    }

    fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match (&self.stream).write(bytes) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(written) => bytes = bytes.get(written..).unwrap_or_default(),
                // A stopped peer takes nothing for as long as it likes.
                Err(error) if is_timeout(&error) && !self.outbox.is_closed() => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn read(&self, role: Role, mut wish: impl FnMut(&Self, Wish) -> bool) -> End {
        let end_of_handshake = Instant::now() + HANDSHAKE;
        let mut parser = Parser::new();
        let (mut is_ready, mut ttl) = (false, None);
        let mut buffer = vec![0; 8 << 10];
        self.outbox.offer(Outgoing::own(frame::greeting()));
        loop {
            let patience = if is_ready {
                ttl
            } else {
                Some(end_of_handshake.saturating_duration_since(Instant::now()))
            };
            if patience.is_some_and(|left| left.is_zero()) {
                return End::Fault;
            }
            let read = self.stream.set_read_timeout(patience);
            let len = match read.and_then(|()| (&self.stream).read(&mut buffer)) {
                Ok(0) => return End::Closed,
                Ok(len) => len,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if is_timeout(&error) => return End::Fault,
                Err(_) => return End::Closed,
            };
            parser.feed(buffer.get(..len).unwrap_or_default());
            loop {
                let input = match parser.next() {
                    Ok(Some(input)) => input,
                    Ok(None) => break,
                    Err(_) => return End::Fault,
                };
                match input {
                    Input::Greeting { .. } => {
                        let ready = frame::ready(role.socket_type());
                        self.outbox.offer(Outgoing::own(ready));
                    }
                    Input::Ready { socket_type } if role.takes(&socket_type) => is_ready = true,
                    Input::Ready { .. } => {
                        let error = frame::error("the type of the socket does not fit");
                        self.outbox.offer(Outgoing::own(error));
                        self.drain();
                        return End::Fault;
                    }
                    Input::Ping { ttl: tenths, context } => {
                        ttl = (tenths > 0).then(|| Duration::from_millis(100) * u32::from(tenths));
                        self.outbox.offer(Outgoing::own(frame::command("PONG", &context)));
                    }
                    Input::Error(_) => return End::Closed,
                    input => {
                        if !self.traffic(role, input, &mut wish) {
                            return End::Fault;
                        }
                    }
                }
            }
        }
    }

    /// Does what a peer wants; `false` refuses it.
    fn traffic(
        &self,
        role: Role,
        input: Input,
        wish: &mut impl FnMut(&Self, Wish) -> bool,
    ) -> bool {
        let (is_wanted, prefix) = match (role, input) {
            (Role::Events, Input::Subscribe(prefix)) => (true, prefix),
            (Role::Events, Input::Cancel(prefix)) => (false, prefix),
            // Version 3.0 subscribes by messages.
            (Role::Events, Input::Message(frames)) => match frames.as_slice() {
                [one] => match one.split_first() {
                    Some((1, prefix)) => (true, prefix.to_vec()),
                    Some((0, prefix)) => (false, prefix.to_vec()),
                    _ => return true,
                },
                _ => return true,
            },
            (Role::Replay, Input::Message(frames)) => return wish(self, Wish::Request(frames)),
            _ => return false,
        };
        let mut subscriptions = self.subscriptions();
        if !is_wanted {
            if let Some(at) = subscriptions.iter().position(|known| *known == prefix) {
                subscriptions.swap_remove(at);
            }
            return true;
        }
        if subscriptions.len() >= SUBSCRIPTIONS {
            return false;
        }
        subscriptions.push(prefix);
        drop(subscriptions);
        wish(self, Wish::Subscribed)
    }

    /// Waits a moment for the writer, so that the peer learns why it is refused.
    fn drain(&self) {
        let _ = self.stream.set_read_timeout(Some(Duration::from_millis(100)));
        let _ = (&self.stream).read(&mut [0]);
    }

    fn subscriptions(&self) -> MutexGuard<'_, Vec<Vec<u8>>> {
        self.subscriptions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Starts the thread that serves a peer.
pub(crate) fn spawn(run: impl FnOnce() + Send + 'static) -> io::Result<thread::JoinHandle<()>> {
    thread::Builder::new().name("kv-events-read".into()).stack_size(STACK_BYTES).spawn(run)
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}
