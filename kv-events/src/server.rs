//! The sockets of a publisher: who is connected, and what all of them share.
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::inbox::Inbox;
use crate::options::{BindError, PublisherOptions, resolve};
use crate::outbox::Outgoing;
use crate::peer::{End, Peer, Role, Wish, spawn};
use crate::replay;
use crate::stats::Counters;
use crate::store::Store;
use crate::zmtp::frame;

/// The most peers of a socket.
const PEERS: usize = 16;
/// The time between two looks for new connections.
const ACCEPT: Duration = Duration::from_millis(20);

/// What the threads of a publisher share.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) inbox: Inbox,
    pub(crate) counters: Counters,
    store: Mutex<Store>,
    topic: Vec<u8>,
    has_replay: bool,
    room: usize,
    peers: Mutex<Vec<(Role, Arc<Peer>)>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    is_over: AtomicBool,
}

impl Server {
    /// Begins with batch `first`.
    pub(crate) fn new(options: &PublisherOptions, first: u64) -> Self {
        Self {
            inbox: Inbox::new(options.queued_events),
            counters: Counters::default(),
            store: Mutex::new(Store::new(first, options.kept_batches, options.kept_bytes)),
            topic: options.topic.clone(),
            has_replay: options.replay_endpoint.is_some(),
            room: options.subscriber_bytes,
            peers: Mutex::default(),
            threads: Mutex::default(),
            is_over: AtomicBool::new(false),
        }
    }

    /// Numbers a batch, keeps it and sends it to everybody who wants it.
    pub(crate) fn send(&self, payload: &[u8]) {
        let mut store = lock(&self.store);
        let number = store.next().to_be_bytes();
        let batch: Arc<[u8]> = frame::message(&[&self.topic, &number, payload]).into();
        store.push(Arc::clone(&batch));
        drop(store);
        for (_, peer) in lock(&self.peers).iter().filter(|(role, _)| *role == Role::Events) {
            if peer.wants(&self.topic) {
                let batch = Outgoing { head: Vec::new(), body: Arc::clone(&batch) };
                if !peer.outbox.offer(batch) && !peer.outbox.is_closed() {
                    self.counters.dropped_messages.add(1);
                }
            }
        }
    }

    pub(crate) fn store(&self) -> MutexGuard<'_, Store> {
        lock(&self.store)
    }

    pub(crate) fn subscribers(&self) -> usize {
        lock(&self.peers).iter().filter(|(_, peer)| peer.is_subscribed()).count()
    }

    /// Takes new connections until the end.
    pub(crate) fn accept(self: &Arc<Self>, listeners: &[(Role, TcpListener)]) {
        while !self.is_over.load(Ordering::Acquire) {
            let mut is_idle = true;
            for (role, listener) in listeners {
                if let Ok((stream, _)) = listener.accept() {
                    is_idle = false;
                    self.admit(*role, stream);
                }
            }
            if is_idle {
                thread::sleep(ACCEPT);
            }
        }
    }

    fn admit(self: &Arc<Self>, role: Role, stream: TcpStream) {
        let mut peers = lock(&self.peers);
        if peers.iter().filter(|(of, _)| *of == role).count() >= PEERS {
            self.counters.refused_peers.add(1);
            return;
        }
        let Ok(peer) = Peer::new(stream, self.room) else { return };
        let peer = Arc::new(peer);
        peers.push((role, Arc::clone(&peer)));
        drop(peers);
        let server = Arc::clone(self);
        let of_thread = Arc::clone(&peer);
        let thread = spawn(move || {
            let end = of_thread.serve(role, |peer, wish| server.grant(peer, wish));
            if matches!(end, Ok(End::Fault)) {
                server.counters.faulty_peers.add(1);
            }
            server.forget(&of_thread);
        });
        if let Ok(thread) = thread {
            let mut threads = lock(&self.threads);
            threads.retain(|thread| !thread.is_finished());
            threads.push(thread);
        } else {
            self.counters.refused_peers.add(1);
            self.forget(&peer);
        }
    }

    /// Does what a peer wants; `false` refuses it.
    fn grant(&self, peer: &Peer, wish: Wish) -> bool {
        match wish {
            Wish::Subscribed => {
                // Nothing else tells a late subscriber of the past.
                if !self.has_replay {
                    self.inbox.want_snapshot();
                }
                true
            }
            Wish::Request(frames) => replay::answer(self, peer, &frames),
        }
    }

    fn forget(&self, peer: &Arc<Peer>) {
        peer.close();
        lock(&self.peers).retain(|(_, known)| !Arc::ptr_eq(known, peer));
    }

    /// Lets [`Self::accept`] return.
    pub(crate) fn end(&self) {
        self.is_over.store(true, Ordering::Release);
    }

    /// Ends all connections, after [`Self::accept`] has returned.
    pub(crate) fn disconnect(&self) {
        for (_, peer) in lock(&self.peers).iter() {
            peer.close();
        }
        let threads = std::mem::take(&mut *lock(&self.threads));
        for thread in threads {
            // A panic of a peer's thread is of no consequence to others.
            let _ = thread.join();
        }
    }
}

/// Opens the socket of an endpoint.
pub(crate) fn listen(endpoint: &str) -> Result<(TcpListener, SocketAddr), BindError> {
    let addresses = resolve(endpoint)?;
    let open = || {
        let listener = TcpListener::bind(addresses.as_slice())?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        Ok((listener, address))
    };
    open().map_err(|source| BindError::Bind { endpoint: endpoint.into(), source })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
