//! Connections: how many, how slow, and how they end.
use std::net::TcpListener as StdListener;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, oneshot};
use tokio_io_timeout::TimeoutStream;

use super::{Server, api};
use crate::args::ServeArgs;
use crate::num::to_usize;

/// Longest that a client may take to send the head of a request, or to accept bytes of an answer.
const HEAD: Duration = Duration::from_secs(10);
const WRITE: Duration = Duration::from_secs(30);
/// Longest pause while the body of a request is sent.
pub(super) const BODY_PAUSE: Duration = Duration::from_secs(30);
/// Longest that answers may take to leave once the engine has ended.
const LAST_ANSWERS: Duration = Duration::from_secs(5);
/// Pause after the system had no room for another connection.
const NO_ROOM: Duration = Duration::from_millis(100);

/// Limits of connections and requests.
#[derive(Debug, Clone)]
pub(super) struct Options {
    connections: usize,
    pub(super) api_key: Option<String>,
}

impl Options {
    pub(super) fn new(args: &ServeArgs) -> Self {
        Self { connections: to_usize(args.max_connections), api_key: args.api_key.clone() }
    }
}

/// Answers requests until the engine has ended. A signal stops the engine; while its last texts
/// run, new requests learn that it is stopping.
pub(super) async fn serve(
    listener: StdListener,
    options: Options,
    server: Arc<Server>,
    mut engine_ended: oneshot::Receiver<()>,
) -> anyhow::Result<()> {
    listener.set_nonblocking(true).context("the address")?;
    let listener = TcpListener::from_std(listener).context("the address")?;
    tokio::spawn(stop_on_signal(Arc::clone(&server)));
    let app = api::router(Arc::clone(&server), &options);
    let places = Arc::new(Semaphore::new(options.connections));
    let open = GracefulShutdown::new();
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEAD);
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
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(WRITE));
        let service = TowerToHyperService::new(app.clone());
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

/// Stops the engine at the first signal; a second one ends the process at once.
async fn stop_on_signal(server: Arc<Server>) {
    signalled().await;
    server.engine.stop();
    signalled().await;
    std::process::exit(1);
}

/// Waits for SIGTERM or Ctrl-C.
#[cfg(unix)]
async fn signalled() {
    use tokio::signal::unix::{SignalKind, signal};
    let terminate = async {
        match signal(SignalKind::terminate()) {
            Ok(mut terminate) => _ = terminate.recv().await,
            Err(_) => std::future::pending().await,
        }
    };
    tokio::select! {
        () = terminate => {}
        _ = tokio::signal::ctrl_c() => {}
    }
}

/// Waits for Ctrl-C.
#[cfg(not(unix))]
async fn signalled() {
    let _ = tokio::signal::ctrl_c().await;
}
