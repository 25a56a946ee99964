//! A TCP proxy that spoils answers of a server: it delays, stalls, cuts, resets, trickles or
//! corrupts the bytes on their way to the client. Knows no protocol.
use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// A fault in the bytes from the server to the client. Bytes are counted from the call of
/// [`FaultProxy::set`] on, over all connections. A fault at a place happens once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProxyFault {
    /// Each piece waits.
    Delay(Duration),
    /// Bytes come one at a time, each after this pause.
    Trickle(Duration),
    /// After this number of bytes nothing comes any more, and the connection stays open.
    Stall(u64),
    /// The connection is closed after this number of bytes.
    Cut(u64),
    /// The connection is reset after this number of bytes.
    Reset(u64),
    /// All bits of the byte at this place are flipped.
    Corrupt(u64),
}

/// A proxy in front of a server.
#[derive(Debug)]
pub struct FaultProxy {
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    server: SocketAddr,
    fault: Mutex<Option<ProxyFault>>,
    /// Both ends of all connections, to end them with the proxy.
    ends: Mutex<Vec<TcpStream>>,
    stopped: AtomicBool,
}

impl FaultProxy {
    /// Starts a proxy on a free loopback port, without a fault.
    ///
    /// # Errors
    /// If the system gives no port or no thread.
    pub fn start(server: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            server,
            fault: Mutex::new(None),
            ends: Mutex::new(Vec::new()),
            stopped: AtomicBool::new(false),
        });
        let accepting = Arc::clone(&shared);
        thread::Builder::new().name("fault proxy".into()).spawn(move || {
            for client in listener.incoming() {
                if accepting.stopped.load(Ordering::Acquire) {
                    break;
                }
                // A server that refuses shows to the client as a connection that ends.
                let _ = client.and_then(|client| accepting.connect(client));
            }
        })?;
        Ok(Self { address, shared })
    }

    /// Returns the address for clients.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sets the fault of the bytes from now on.
    pub fn set(&self, fault: Option<ProxyFault>) {
        *lock(&self.shared.fault) = fault;
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::Release);
        for end in lock(&self.shared.ends).iter() {
            let _ = end.shutdown(Shutdown::Both);
        }
        // Wakes the thread that accepts.
        let _ = TcpStream::connect(self.address);
    }
}

impl Shared {
    fn connect(self: &Arc<Self>, client: TcpStream) -> io::Result<()> {
        let server = TcpStream::connect(self.server)?;
        client.set_nodelay(true)?;
        server.set_nodelay(true)?;
        lock(&self.ends).extend([client.try_clone()?, server.try_clone()?]);
        let (questions, to_server) = (client.try_clone()?, server.try_clone()?);
        let gone = Arc::new(AtomicBool::new(false));
        let client_gone = Arc::clone(&gone);
        thread::Builder::new().spawn(move || {
            let _ = io::copy(&mut &questions, &mut &to_server);
            let _ = to_server.shutdown(Shutdown::Write);
            client_gone.store(true, Ordering::Release);
        })?;
        let shared = Arc::clone(self);
        thread::Builder::new().spawn(move || {
            let _ = shared.answer(&server, &client, &gone);
            let _ = server.shutdown(Shutdown::Both);
            let _ = client.shutdown(Shutdown::Both);
        })?;
        Ok(())
    }

    /// Passes on the server's bytes until one side ends; `gone` is set when the client did.
    fn answer(
        &self,
        mut server: &TcpStream,
        mut client: &TcpStream,
        gone: &AtomicBool,
    ) -> io::Result<()> {
        let mut buffer = vec![0; 64 << 10];
        loop {
            let count = server.read(&mut buffer)?;
            if count == 0 {
                return Ok(());
            }
            let piece = &mut buffer[..count];
            match self.fault_in(count as u64) {
                None => client.write_all(piece)?,
                Some(ProxyFault::Delay(pause)) => {
                    thread::sleep(pause);
                    client.write_all(piece)?;
                }
                Some(ProxyFault::Trickle(pause)) => {
                    for byte in &*piece {
                        thread::sleep(pause);
                        client.write_all(&[*byte])?;
                    }
                }
                Some(ProxyFault::Corrupt(place)) => {
                    piece[place as usize] ^= 0xff;
                    client.write_all(piece)?;
                }
                Some(ProxyFault::Cut(place)) => {
                    return client.write_all(&piece[..place as usize]);
                }
                Some(ProxyFault::Reset(place)) => {
                    client.write_all(&piece[..place as usize])?;
                    // Disconnects without the exchange that ends a connection: the client gets an
                    // error, whoever else holds the socket.
                    return Ok(rustix::net::connect_unspec(client)?);
                }
                Some(ProxyFault::Stall(place)) => {
                    client.write_all(&piece[..place as usize])?;
                    // Also if the server ends meanwhile.
                    while !gone.load(Ordering::Acquire) {
                        thread::sleep(POLL);
                    }
                    return Ok(());
                }
            }
        }
    }

    /// Returns the fault of a piece of `count` bytes, its place counted from the piece's beginning.
    fn fault_in(&self, count: u64) -> Option<ProxyFault> {
        use ProxyFault::{Corrupt, Cut, Delay, Reset, Stall, Trickle};
        let mut fault = lock(&self.fault);
        match fault.as_mut()? {
            Delay(_) | Trickle(_) => *fault,
            Stall(place) | Cut(place) | Reset(place) | Corrupt(place) if *place < count => {
                fault.take()
            }
            Stall(place) | Cut(place) | Reset(place) | Corrupt(place) => {
                *place -= count;
                None
            }
        }
    }
}

const POLL: Duration = Duration::from_millis(2);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
