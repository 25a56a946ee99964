//! Peers that are Python packages: a child process that answers each line of JSON with another.
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{self, ChildStdin, ChildStdout, Command, Stdio};
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::Contender;
use super::case::{Case, Description};

/// The process, and the peers it found.
pub(crate) struct Child {
    process: process::Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    pub(crate) hello: Hello,
}

/// The peers that the child can run.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Hello {
    pub(crate) versions: BTreeMap<String, String>,
    /// Peers that cannot be imported, each with the reason.
    pub(crate) absent: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct Prepared {
    contenders: Vec<String>,
    refused: BTreeMap<String, String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Ran {
    Done { ns: Vec<u64> },
    Refused { error: String },
}

impl Child {
    /// Starts the server of `kv-bench/peers/python`.
    pub(crate) fn start(python: &Path, threads: usize) -> Result<Self> {
        let server = Path::new(env!("CARGO_MANIFEST_DIR")).join("python").join("serve.py");
        let mut process = Command::new(python)
            .arg("-B")
            .arg(server)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", python.display()))?;
        let to = process.stdin.take().context("the child has no input")?;
        let from = process.stdout.take().context("the child has no output")?;
        let (from, hello) = (BufReader::new(from), Hello::default());
        let mut child = Self { process, to, from, hello };
        child.hello = child.ask(&json!({ "threads": threads }))?;
        Ok(child)
    }

    fn ask<T: DeserializeOwned>(&mut self, request: &Value) -> Result<T> {
        writeln!(self.to, "{request}").context("the child reads no more")?;
        self.to.flush()?;
        let mut line = String::new();
        let read = self.from.read_line(&mut line)?;
        anyhow::ensure!(read > 0, "the child ended at {request}");
        serde_json::from_str(&line).with_context(|| format!("the child answered {line:?}"))
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // The child has no state to save; waiting for it leaves no zombie.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The contenders that the child offers for a case, and those it cannot run, with reasons.
pub(crate) struct Offer {
    pub(crate) contenders: Vec<Remote>,
    pub(crate) refused: BTreeMap<String, String>,
}

pub(crate) fn prepare(child: &Rc<RefCell<Child>>, case: &Case, folder: &Path) -> Result<Offer> {
    let request = json!({ "case": Description::new(case, folder) });
    let Prepared { contenders, refused } = child.borrow_mut().ask(&request)?;
    let contenders = contenders
        .into_iter()
        .map(|name| Remote { name, child: Rc::clone(child), out: folder.join("out") })
        .collect();
    Ok(Offer { contenders, refused })
}

/// A contender in the child.
pub(crate) struct Remote {
    pub(crate) name: String,
    child: Rc<RefCell<Child>>,
    out: PathBuf,
}

impl Remote {
    fn run(&self, request: &Value) -> Result<Vec<Duration>> {
        match self.child.borrow_mut().ask(request)? {
            Ran::Done { ns } => Ok(ns.into_iter().map(Duration::from_nanos).collect()),
            Ran::Refused { error } => anyhow::bail!(error),
        }
    }
}

impl Contender for Remote {
    fn round(&mut self, times: usize) -> Result<Vec<Duration>> {
        self.run(&json!({ "run": self.name, "times": times }))
    }

    fn output(&mut self) -> Result<Vec<f32>> {
        self.run(&json!({ "run": self.name, "times": 1, "out": self.out }))?;
        let bytes = std::fs::read(&self.out).context("the child left no outputs")?;
        let value = |bytes: &[u8]| bytemuck::pod_read_unaligned::<f32>(bytes);
        Ok(bytes.chunks_exact(4).map(value).collect())
    }
}
