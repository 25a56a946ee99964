//! Starts `kv serve`, reads its metrics, and ends it.
use std::fs;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::client;

/// Longest that anything may take on a machine that is busy.
const PATIENCE: Duration = Duration::from_mins(1);

pub(crate) struct Server {
    child: Child,
    address: SocketAddr,
    /// Collects the rest of the standard error.
    log: Option<JoinHandle<String>>,
    is_over: bool,
}

impl Server {
    /// Starts the program on a free port, and waits until it listens.
    pub(crate) fn start(args: &[&str]) -> Self {
        Self::start_at("127.0.0.1:0", args)
    }

    /// The same on another address.
    pub(crate) fn start_at(address: &str, args: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kv"));
        command.args(["serve", "--addr", address]).args(args);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.env_remove("KV_API_KEY").spawn().expect("the program starts");
        let mut stderr = BufReader::new(child.stderr.take().expect("standard error"));
        let mut line = String::new();
        stderr.read_line(&mut line).expect("standard error");
        let address = parse_address(&line).unwrap_or_else(|| panic!("it does not listen: {line}"));
        let log = thread::spawn(move || collect(stderr));
        Self { child, address, log: Some(log), is_over: false }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn metrics(&self) -> Metrics {
        let answer = client::get(self.address, "/metrics");
        assert_eq!(answer.status, 200, "{}", answer.text());
        Metrics(answer.text())
    }

    /// Waits until the metrics are so.
    pub(crate) fn wait_until(&self, what: &str, is_so: impl Fn(&Metrics) -> bool) {
        let end = Instant::now() + PATIENCE;
        loop {
            let metrics = self.metrics();
            if is_so(&metrics) {
                return;
            }
            assert!(Instant::now() < end, "never {what}:\n{}", metrics.0);
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until no text waits or runs, and no block is used.
    pub(crate) fn wait_until_idle(&self) {
        let names = ["kv_blocks_used", "kv_requests_running", "kv_requests_waiting"];
        self.wait_until("idle", |metrics| names.iter().all(|name| metrics.sum(name) == 0));
    }

    /// Returns the resident memory, in KiB.
    pub(crate) fn memory(&self) -> u64 {
        self.status("VmRSS:")
    }

    /// Returns the most resident memory that there was since [`Self::forget_peak`], in KiB.
    pub(crate) fn peak(&self) -> u64 {
        self.status("VmHWM:")
    }

    /// Makes the present memory the peak.
    pub(crate) fn forget_peak(&self) {
        fs::write(format!("/proc/{}/clear_refs", self.child.id()), "5").expect("the process runs");
    }

    fn status(&self, name: &str) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id()));
        let status = status.expect("the process runs");
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let number = line.and_then(|line| line.split_whitespace().next()).expect(name);
        number.parse().expect("a number")
    }

    /// Sends SIGTERM.
    pub(crate) fn terminate(&self) {
        let pid = self.child.id().to_string();
        let status = Command::new("kill").args(["-TERM", &pid]).status().expect("kill");
        assert!(status.success(), "the server ended before");
    }

    /// Ends the server; it must end well, and have nothing to say.
    pub(crate) fn end(self) {
        self.terminate();
        self.wait_for_end();
    }

    /// Waits for the end of a server that was told to end.
    pub(crate) fn wait_for_end(self) {
        assert_eq!(self.wait_for_log(), "");
    }

    /// Ends the server; it must end well. Returns what it has said since it listened.
    pub(crate) fn end_with_log(self) -> String {
        self.terminate();
        self.wait_for_log()
    }

    fn wait_for_log(mut self) -> String {
        let end = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("a process") {
                break status;
            }
            assert!(Instant::now() < end, "it does not end");
            thread::sleep(Duration::from_millis(5));
        };
        self.is_over = true;
        let log = self.log.take().expect("a log").join().expect("standard error");
        assert_eq!(status.code(), Some(0), "{log}");
        log
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if !self.is_over {
            // It has ended otherwise.
            let _ = self.child.kill();
            let _ = self.child.wait();
            if let Some(Ok(log)) = self.log.take().map(JoinHandle::join) {
                println!("standard error of the server: {log}");
            }
        }
    }
}

/// Parses `kv: MODEL on http://ADDRESS, N blocks of the cache`.
fn parse_address(line: &str) -> Option<SocketAddr> {
    let (_, rest) = line.split_once(" on http://")?;
    rest.split_once(',')?.0.parse().ok()
}

fn collect(stderr: BufReader<ChildStderr>) -> String {
    let lines = stderr.lines().map_while(Result::ok);
    lines.collect::<Vec<_>>().join("\n")
}

/// The text of `/metrics`.
pub(crate) struct Metrics(String);

impl Metrics {
    /// Returns a metric, summed over its labels; 0 before it has been counted once.
    pub(crate) fn sum(&self, name: &str) -> u64 {
        self.lines(name).map(|(_, value)| value).sum()
    }

    /// Returns the metric with this label, such as `tier="disk"`.
    pub(crate) fn labelled(&self, name: &str, label: &str) -> u64 {
        let found = self.lines(name).filter(|(labels, _)| labels.contains(label));
        found.map(|(_, value)| value).sum()
    }

    fn lines(&self, name: &str) -> impl Iterator<Item = (&str, u64)> {
        self.0.lines().filter_map(move |line| {
            let rest = line.strip_prefix(name)?;
            let (labels, value) = rest.rsplit_once(' ')?;
            let is_whole = labels.is_empty() || labels.starts_with('{');
            is_whole.then(|| (labels, value.parse().expect("a whole number")))
        })
    }
}

/// Makes a folder with links to the bundled model, and a chat template.
pub(crate) fn chat_model() -> TempDir {
    let folder = TempDir::new().expect("a folder");
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/stories260K");
    let model = model.canonicalize().expect("the bundled model");
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        std::os::unix::fs::symlink(model.join(file), folder.path().join(file)).expect(file);
    }
    let template = "{{ bos_token }}{% for message in messages %}{{ message.role.title() }}: \
        {{ message.content.strip() }}\n{% endfor %}\
        {% if add_generation_prompt %}Assistant:{% endif %}";
    fs::write(folder.path().join("chat_template.jinja"), template).expect("a file");
    folder
}

/// Returns the path of a script beside this file.
pub(crate) fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/serve").join(name)
}
