//! Connections: how many, how slow, and how they end.
use std::io;
use std::net::TcpListener as StdListener;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{self, Poll};
use std::time::Duration;

use anyhow::Context;
use axum::Router;
use axum::response::Response;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::Service;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, oneshot};
use tokio::time::Instant;
use tokio_io_timeout::TimeoutStream;
use tower_http::cors::AllowOrigin;

use super::time::Deadline;
use super::{Server, api};
use crate::args::ServeArgs;
use crate::num::to_usize;

/// Longest that a client may take to send the head of a request, or to accept bytes of an answer.
const HEAD: Duration = Duration::from_secs(10);
const WRITE: Duration = Duration::from_secs(30);
/// Most bytes of a head, and of a body that are read at once, for each connection.
const READ_BYTES_MAX: usize = 32 << 10;
/// Longest that answers may take to leave once the engine has ended.
const LAST_ANSWERS: Duration = Duration::from_secs(5);
/// Pause after the system had no room for another connection.
const NO_ROOM: Duration = Duration::from_millis(100);

/// Limits of connections and requests.
#[derive(Debug, Clone)]
pub(super) struct Options {
    connections: usize,
    /// Longest that a request may take, from its first byte on.
    timeout: Duration,
    pub(super) api_key: Option<String>,
    /// Whose pages may send requests.
    pub(super) origins: Option<AllowOrigin>,
}

impl Options {
    pub(super) fn new(args: &ServeArgs, api_key: Option<String>) -> Self {
        Self {
            connections: to_usize(args.max_connections),
            timeout: args.request_timeout,
            api_key,
            origins: args.origins(),
        }
    }
}

/// Answers requests until the engine has ended. A signal stops the engine; while its last texts
/// run, new requests learn that it is stopping.
pub(super) async fn serve(
    listener: StdListener,
    signals: Signals,
    options: Options,
    server: Arc<Server>,
    mut engine_ended: oneshot::Receiver<()>,
) -> anyhow::Result<()> {
    listener.set_nonblocking(true).context("the address")?;
    let listener = TcpListener::from_std(listener).context("the address")?;
    tokio::spawn(stop_on_signal(signals, Arc::clone(&server)));
    let app = api::router(Arc::clone(&server), &options);
    let places = Arc::new(Semaphore::new(options.connections));
    let open = GracefulShutdown::new();
    let mut builder = http1::Builder::new();
    builder.max_buf_size(READ_BYTES_MAX);
    builder.timer(TokioTimer::new()).header_read_timeout(HEAD.min(options.timeout));
    loop {
        let accepted = async {
            // The semaphore is never closed.
            let place = Arc::clone(&places).acquire_owned().await;
            (place, listener.accept().await)
        };
        let (place, accepted) = tokio::select! {
            accepted = accepted => accepted,
            _ = &mut engine_ended => break,
        };
        let Ok((stream, _)) = accepted else {
            // Such as too many open files: connections that end make room.
            tokio::time::sleep(NO_ROOM).await;
            continue;
        };
        // Tokens are small and shall not wait for each other.
        let _ = stream.set_nodelay(true);
        let begun = Begun::default();
        let mut stream = TimeoutStream::new(Timed { stream, begun: begun.clone() });
        stream.set_write_timeout(Some(WRITE));
        let routes = TowerToHyperService::new(app.clone());
        let service = WithDeadline { routes, begun, timeout: options.timeout };
        let connection = builder.serve_connection(TokioIo::new(Box::pin(stream)), service);
        let connection = open.watch(connection);
        tokio::spawn(async move {
            // A client that breaks off is no error of the server.
            let _ = connection.await;
            drop(place);
        });
    }
    drop(listener);
    let _ = tokio::time::timeout(LAST_ANSWERS, open.shutdown()).await;
    Ok(())
}

/// Arrival of the first byte of a connection's present request; `None` between requests.
#[derive(Debug, Clone, Default)]
struct Begun(Arc<Mutex<Option<Instant>>>);

impl Begun {
    fn set(&self, begun: Option<Instant>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = begun;
    }

    /// Returns the time, which is now if nothing of the request has been seen.
    fn get(&self) -> Instant {
        let mut begun = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *begun.get_or_insert_with(Instant::now)
    }
}

/// The routes, for requests that get a deadline.
#[derive(Clone)]
struct WithDeadline {
    routes: TowerToHyperService<Router>,
    begun: Begun,
    timeout: Duration,
}

impl Service<Request<Incoming>> for WithDeadline {
    type Response = Response;
    type Error = std::convert::Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response, Self::Error>> + Send>>;

    fn call(&self, mut request: Request<Incoming>) -> Self::Future {
        let begun = self.begun.clone();
        let start = begun.get();
        let deadline = start.checked_add(self.timeout).unwrap_or(start);
        request.extensions_mut().insert(Deadline(deadline));
        let answer = self.routes.call(request);
        Box::pin(async move {
            let answer = answer.await;
            // Later bytes belong to the next request.
            begun.set(None);
            answer
        })
    }
}

/// A connection that notes when a request begins.
#[derive(Debug)]
struct Timed {
    stream: TcpStream,
    begun: Begun,
}

impl AsyncRead for Timed {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut task::Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        if buffer.filled().len() > before {
            // Notes the time of the first byte alone.
            self.begun.get();
        }
        read
    }
}

impl AsyncWrite for Timed {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut task::Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(
        mut self: Pin<&mut Self>,
        context: &mut task::Context<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(
        mut self: Pin<&mut Self>,
        context: &mut task::Context<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut task::Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

/// Stops the engine at the first signal; a second one ends the process at once.
async fn stop_on_signal(mut signals: Signals, server: Arc<Server>) {
    signals.next().await;
    server.engine.stop();
    signals.next().await;
    std::process::exit(1);
}

/// SIGTERM and Ctrl-C.
#[cfg(unix)]
pub(super) struct Signals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

#[cfg(unix)]
impl Signals {
    /// Registers the handlers, so that signals no longer end the process. A reader of the server's
    /// address may send one at once: this comes before the address is printed. Needs a runtime.
    pub(super) fn register() -> io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        let (terminate, interrupt) = (SignalKind::terminate(), SignalKind::interrupt());
        Ok(Self { terminate: signal(terminate)?, interrupt: signal(interrupt)? })
    }

    /// Waits for the next one.
    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// Ctrl-C.
#[cfg(not(unix))]
pub(super) struct Signals;

#[cfg(not(unix))]
impl Signals {
    /// Does nothing: Ctrl-C is received from the first wait on.
    pub(super) fn register() -> io::Result<Self> {
        Ok(Self)
    }

    /// Waits for Ctrl-C.
    async fn next(&mut self) {
        let _ = tokio::signal::ctrl_c().await;
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    /// Without [`Signals`], the signal ends this process.
    #[tokio::test]
    async fn a_signal_before_the_first_wait_is_received() {
        let mut signals = Signals::register().expect("handlers");
        let pid = std::process::id().to_string();
        let sent = std::process::Command::new("kill").args(["-TERM", &pid]).status();
        assert!(sent.expect("kill").success());
        let received = tokio::time::timeout(Duration::from_mins(1), signals.next());
        received.await.expect("a signal");
    }
}
