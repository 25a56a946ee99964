//! The results, as text and as JSON.
use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use serde::Serialize;

use super::case::Case;
use super::child::Hello;

/// Name of this library among the contenders.
pub(crate) const OURS: &str = "kv";

/// Peers by the first word of a contender's name.
const PEERS: [&str; 3] = ["torch", "candle", "ggml"];

/// All cases of a run.
#[derive(Serialize)]
pub(crate) struct Report {
    threads: usize,
    versions: BTreeMap<String, String>,
    /// Peers that are not installed, each with the reason.
    absent: BTreeMap<String, String>,
    pub(crate) cases: Vec<Measured>,
}

impl Report {
    pub(crate) fn new(threads: usize) -> Self {
        let versions = BTreeMap::from([("candle".to_owned(), crate::candle_version().to_owned())]);
        Self { threads, versions, absent: BTreeMap::new(), cases: Vec::new() }
    }

    pub(crate) fn python(&mut self, hello: &Hello) {
        self.versions.extend(hello.versions.clone());
        self.absent.extend(hello.absent.clone());
    }

    pub(crate) fn no_python(&mut self, reason: &anyhow::Error) {
        for peer in ["torch", "ggml"] {
            self.absent.insert(peer.to_owned(), format!("{reason:#}"));
        }
    }

    /// Formats what is printed before the cases.
    pub(crate) fn head(&self) -> String {
        let versions: Vec<_> =
            self.versions.iter().map(|(peer, version)| format!("{peer} {version}")).collect();
        let mut text = format!(
            "attention, {} threads, medians; beside {}\n",
            self.threads,
            versions.join(", ")
        );
        for (peer, reason) in &self.absent {
            let _ = writeln!(text, "absent: {peer}: {reason}");
        }
        text
    }

    /// Formats the table: our time, the best time of each peer, and the ratio.
    pub(crate) fn table(&self) -> String {
        let mut text = format!("{:<34}{:>14}", "case, times in ns", OURS);
        for peer in PEERS {
            let _ = write!(text, "{peer:>14}");
        }
        text.push_str("   ratio to the fastest\n");
        for case in &self.cases {
            let _ = write!(text, "{:<34}", case.name);
            for peer in [OURS].into_iter().chain(PEERS) {
                let best =
                    case.best(peer).map_or("-".to_owned(), |best| best.median_ns.to_string());
                let _ = write!(text, "{best:>14}");
            }
            let _ = match (case.ratio, &case.fastest) {
                (Some(ratio), Some(fastest)) => writeln!(text, "{ratio:>8.2} {fastest}"),
                _ => writeln!(text, "{:>8}", "-"),
            };
        }
        let ratios = || self.cases.iter().filter_map(|case| case.ratio);
        let (slower, all) = (ratios().filter(|ratio| *ratio < 1.0).count(), ratios().count());
        let _ = writeln!(text, "slower than the fastest peer in {slower} of {all} cases");
        text
    }
}

/// One case, all contenders.
#[derive(Serialize)]
pub(crate) struct Measured {
    name: String,
    batch: u32,
    context: u32,
    q_len: u32,
    q_heads: u32,
    kv_heads: u32,
    head_dim: u32,
    format: String,
    /// Bytes of K and V, each read at least once.
    bytes: u64,
    flop: u64,
    /// Contenders, ours first.
    contenders: Vec<Timed>,
    /// Contenders without a time, each with the reason.
    refused: BTreeMap<String, String>,
    /// The fastest peer.
    fastest: Option<String>,
    /// The fastest peer's time over ours: above 1, ours is faster.
    ratio: Option<f64>,
    is_decode: bool,
    #[serde(skip)]
    flop_f64: f64,
}

/// One contender of a case.
#[derive(Serialize)]
pub(crate) struct Timed {
    name: String,
    median_ns: u64,
    best_ns: u64,
    /// Number of timed runs.
    samples: usize,
    /// Norm of the difference from our outputs over the norm of our outputs.
    error: f64,
}

impl Timed {
    pub(crate) fn new(name: String, error: f64, mut samples: Vec<Duration>) -> Self {
        samples.sort();
        let [median_ns, best_ns] = [samples.len() / 2, 0].map(|at| {
            samples.get(at).map_or(0, |took| u64::try_from(took.as_nanos()).unwrap_or(u64::MAX))
        });
        Self { name, median_ns, best_ns, samples: samples.len(), error }
    }
}

impl Measured {
    pub(crate) fn new(
        case: &Case,
        contenders: Vec<Timed>,
        refused: BTreeMap<String, String>,
    ) -> Self {
        let ours = contenders.iter().find(|timed| timed.name == OURS);
        let peers = contenders.iter().filter(|timed| timed.name != OURS);
        let fastest = peers.min_by_key(|timed| timed.median_ns);
        let ratio = ours.zip(fastest).map(|(ours, fastest)| {
            Duration::from_nanos(fastest.median_ns).as_secs_f64()
                / Duration::from_nanos(ours.median_ns).as_secs_f64()
        });
        Self {
            name: case.to_string(),
            batch: case.batch,
            context: case.context,
            q_len: case.q_len,
            q_heads: case.q_heads,
            kv_heads: case.kv_heads,
            head_dim: case.head_dim,
            format: case.format.to_string(),
            bytes: case.bytes(),
            flop: case.flop(),
            fastest: fastest.map(|timed| timed.name.clone()),
            ratio,
            contenders,
            refused,
            is_decode: case.is_decode(),
            flop_f64: case.flop_f64(),
        }
    }

    /// Contenders without a time, each with the reason.
    #[cfg(test)]
    pub(super) fn refused(&self) -> &BTreeMap<String, String> {
        &self.refused
    }

    /// Returns contenders that took at least `times` times as long as the fastest, each with its
    /// seconds per floating-point operation.
    pub(super) fn slower(&self, times: f64) -> impl Iterator<Item = (&str, f64)> {
        let seconds = |timed: &Timed| Duration::from_nanos(timed.median_ns).as_secs_f64();
        let least = self.contenders.iter().map(seconds).fold(f64::INFINITY, f64::min);
        let flop = self.flop_f64;
        let slower = self.contenders.iter().filter(move |timed| seconds(timed) > least * times);
        slower.map(move |timed| (timed.name.as_str(), seconds(timed) / flop))
    }

    /// Returns the fastest contender of a peer, or ours.
    fn best(&self, peer: &str) -> Option<&Timed> {
        let forms =
            self.contenders.iter().filter(|timed| timed.name.split(' ').next() == Some(peer));
        forms.min_by_key(|timed| timed.median_ns)
    }

    /// Formats a line for the case with the ratio, and one per contender.
    pub(crate) fn text(&self) -> String {
        let ratio = match (&self.fastest, self.ratio) {
            (Some(fastest), Some(ratio)) => format!("{ratio:.2} times the fastest ({fastest})"),
            _ => "no peer".to_owned(),
        };
        let mut text = format!("{}: {ratio}\n", self.name);
        let ours = self.contenders.first().map_or(0, |ours| ours.median_ns);
        for timed in &self.contenders {
            let seconds = Duration::from_nanos(timed.median_ns).as_secs_f64();
            let by_ours = seconds / Duration::from_nanos(ours).as_secs_f64();
            let (work, unit) = if self.is_decode {
                (self.bytes, "GB/s of K and V")
            } else {
                (self.flop, "GFLOP/s")
            };
            let work = u32::try_from(work / 1024).map_or(0.0, |kib| f64::from(kib) * 1024.0);
            let rate = work / seconds / 1e9;
            let is_ours = timed.name == OURS;
            let off = if is_ours { String::new() } else { format!(", {:.0e} off", timed.error) };
            let _ = writeln!(
                text,
                "    {:<18}{:>14} ns{by_ours:>8.2}{rate:>9.2} {unit}{off}",
                timed.name, timed.median_ns
            );
        }
        for (name, reason) in &self.refused {
            let _ = writeln!(text, "    {name:<18}not timed: {reason}");
        }
        text
    }
}
