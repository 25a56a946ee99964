//! What `kv bench --suite` says, for programs and for people.
use serde::Serialize;

use super::clock::gb_per_s;
use super::grid::Case;
use super::report::{Facts, RunsOn, SOFTWARE, count, figure};
use super::work::Operation;
use crate::args::{BlockOrder, BlockSize};
use crate::memory::Bytes;
use crate::output;

const LEGEND: &str = "\
decode         attention of one token a sequence: reads K and V of all contexts
prefill        attention of whole prompts: K and V, queries and outputs count
append         K and V of one token a sequence: reads bf16 rows, writes stored ones
append-prompt  the same for one prompt as long as the context
gather         K and V of all contexts, decoded: reads stored rows, writes bf16 ones
copy           blocks of sequences to those of others: reads and writes stored rows
plan           a step of one token a sequence, begun and dropped: no device, no limit
Figures are of one layer and medians. GB/s counts 10^9 bytes, read and written alike.
";

/// What the rate of an operation is compared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum LimitKind {
    /// Reading memory; on a card, copying it.
    Read,
    /// Copying as many bytes.
    Copy,
}

/// What one case took.
#[derive(Debug, Clone, Copy)]
pub(super) struct Measured {
    /// Of one layer.
    pub(super) seconds: f64,
    /// Its kind, and 10^9 bytes a second.
    pub(super) limit: Option<(LimitKind, f64)>,
    pub(super) rounds: u32,
}

/// One case, as JSON has it: the first sixteen fields in this order are what others read.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Line {
    pub(super) case: &'static str,
    backend: String,
    isa: Option<String>,
    threads: Option<u32>,
    pub(super) format: String,
    batch: u32,
    context: u32,
    q_heads: u32,
    kv_heads: u32,
    head_dim: u32,
    /// Slots of a block; of a contiguous cache those of a sequence.
    block_size: u32,
    /// Of one layer.
    pub(super) ns: f64,
    /// Read and written.
    pub(super) bytes: u64,
    gbps: f64,
    pub(super) limit_gbps: Option<f64>,
    fraction: Option<f64>,
    pub(super) limit: Option<LimitKind>,
    /// 10^9 operations a second, where there is arithmetic to count.
    gflops: Option<f64>,
    bytes_read: u64,
    bytes_written: u64,
    contiguous: bool,
    block_order: BlockOrder,
    layers: u16,
    rounds: u32,
}

impl Line {
    fn new(backend: &str, choice: Option<&(String, u32)>, case: &Case, took: Measured) -> Self {
        let Case { operation, stored, shape, block_size, work, .. } = case;
        let gbps = gb_per_s(work.bytes(), took.seconds);
        let limit_gbps = took.limit.map(|(_, rate)| rate);
        Self {
            case: operation.name(),
            backend: backend.to_owned(),
            isa: choice.map(|(isa, _)| isa.clone()),
            threads: choice.map(|(_, threads)| *threads),
            format: stored.formats(),
            batch: shape.batch,
            context: shape.context,
            q_heads: shape.q_heads,
            kv_heads: shape.kv_heads,
            head_dim: shape.head_dim,
            block_size: *block_size,
            ns: took.seconds * 1e9,
            bytes: work.bytes(),
            gbps,
            limit_gbps,
            fraction: limit_gbps.map(|limit| if limit > 0.0 { gbps / limit } else { 0.0 }),
            limit: took.limit.map(|(kind, _)| kind),
            gflops: (work.flops > 0).then(|| gb_per_s(work.flops, took.seconds)),
            bytes_read: work.read,
            bytes_written: work.written,
            contiguous: shape.block_size == BlockSize::Contiguous,
            block_order: shape.block_order,
            layers: shape.layers,
            rounds: took.rounds,
        }
    }

    /// The size of a block, and the order in it where that is not the usual one.
    fn block(&self) -> String {
        let size = if self.contiguous { "contiguous" } else { &self.block_size.to_string() };
        format!("{size}{}", self.block_order.suffix())
    }

    fn cells(&self) -> Vec<String> {
        let or_none = |figure: Option<String>| figure.unwrap_or_else(|| "-".to_owned());
        let is_plan = self.case == Operation::Plan.name();
        vec![
            self.case.to_owned(),
            self.format.clone(),
            self.batch.to_string(),
            self.context.to_string(),
            format!("{}/{}", self.q_heads, self.kv_heads),
            self.head_dim.to_string(),
            self.block(),
            or_none((!is_plan).then(|| Bytes(self.bytes).to_string())),
            format!("{:.1}", self.ns / 1e3),
            or_none((!is_plan).then(|| figure(self.gbps))),
            or_none(self.limit_gbps.map(figure)),
            or_none(self.fraction.map(|fraction| format!("{fraction:.3}"))),
            or_none(self.gflops.map(figure)),
        ]
    }
}

const HEADING: [&str; 13] = [
    "case", "format", "batch", "context", "heads", "dim", "block", "bytes", "us", "GB/s", "limit",
    "fraction", "GFLOP/s",
];

/// All cases on one device, in the order of the grid.
#[derive(Debug)]
struct Part {
    facts: Facts,
    choice: Option<(String, u32)>,
    lines: Vec<Line>,
}

/// All devices, one after the other.
#[derive(Debug)]
pub(super) struct Report {
    backend: String,
    parts: Vec<Part>,
}

impl Report {
    pub(super) fn new(backend: String) -> Self {
        Self { backend, parts: Vec::new() }
    }

    /// Begins with another device; `choice` are its instruction set and its threads.
    pub(super) fn device(&mut self, facts: Facts, choice: Option<(String, u32)>) {
        self.parts.push(Part { facts, choice, lines: Vec::new() });
    }

    /// Adds a case on the device that came last.
    pub(super) fn push(&mut self, case: &Case, took: Measured) {
        if let Some(part) = self.parts.last_mut() {
            let line = Line::new(&self.backend, part.choice.as_ref(), case, took);
            part.lines.push(line);
        }
    }

    pub(super) fn lines(&self) -> Vec<&Line> {
        self.parts.iter().flat_map(|part| &part.lines).collect()
    }

    pub(super) fn show(&self) -> String {
        let parts: String = self.parts.iter().map(|part| self.show_part(part)).collect();
        format!("{parts}{LEGEND}")
    }

    fn show_part(&self, part: &Part) -> String {
        let Facts { device, kind, driver, runs_on } = &part.facts;
        let driver = driver.as_ref().map(|driver| format!(", driver {driver}"));
        let note =
            if *runs_on == RunsOn::Software { format!("{SOFTWARE}\n") } else { String::new() };
        let mut rows = vec![HEADING.map(str::to_owned).to_vec()];
        rows.extend(part.lines.iter().map(Line::cells));
        format!(
            "{}: {device}; {kind}{}\n{note}{}, limits: {}\n\n{}\n",
            self.backend,
            driver.unwrap_or_default(),
            count(crate::num::to_u32(part.lines.len()), "case"),
            part.limits(),
            output::table(&rows)
        )
    }
}

impl Part {
    /// The rates that operations are held to, each the middle one of its kind.
    fn limits(&self) -> String {
        let said = |(kind, what): (LimitKind, &str)| {
            middle(&self.lines, kind).map(|rate| format!("{what} {} GB/s", figure(rate)))
        };
        let card = match self.facts.runs_on {
            RunsOn::Cpu => "reading",
            RunsOn::Card | RunsOn::Software => "a plain copy",
        };
        let limits: Vec<_> =
            [(LimitKind::Read, card), (LimitKind::Copy, "copies (the middle one)")]
                .into_iter()
                .filter_map(said)
                .collect();
        if limits.is_empty() { "none".to_owned() } else { limits.join(", ") }
    }
}

/// The middle one of all limits of one kind.
pub(super) fn middle<'a>(
    lines: impl IntoIterator<Item = &'a Line>,
    kind: LimitKind,
) -> Option<f64> {
    let is_its = |line: &&Line| line.limit == Some(kind);
    let mut rates: Vec<_> =
        lines.into_iter().filter(is_its).filter_map(|line| line.limit_gbps).collect();
    rates.sort_by(f64::total_cmp);
    rates.get(rates.len().div_euclid(2)).copied()
}

#[cfg(test)]
pub(super) mod tests {
    use clap::Parser;

    use super::super::grid;
    use super::*;
    use crate::args::{BenchArgs, Cli, Command};

    pub(in super::super) fn args(args: &[&str]) -> BenchArgs {
        let cli = Cli::try_parse_from([&["kv", "bench"], args].concat()).expect("arguments");
        let Command::Bench(args) = cli.command else { panic!("another command") };
        args
    }

    /// Every case of a suite at half of its limit, 20 GB/s.
    pub(in super::super) fn report(given: &[&str]) -> Report {
        let facts = Facts {
            device: "avx2 kernels, 2 threads".to_owned(),
            kind: "CPU".to_owned(),
            driver: None,
            runs_on: RunsOn::Cpu,
        };
        let mut report = Report::new("cpu".to_owned());
        report.device(facts, Some(("avx2".to_owned(), 2)));
        for case in grid::cases(&args(given), RunsOn::Cpu).expect("cases") {
            let (seconds, limit) = match case.operation {
                Operation::Plan => (1e-6, None),
                Operation::Decode | Operation::Prefill => {
                    (crate::num::to_f64(case.work.bytes()) / 10e9, Some((LimitKind::Read, 20.0)))
                }
                _ => (crate::num::to_f64(case.work.bytes()) / 10e9, Some((LimitKind::Copy, 20.0))),
            };
            report.push(&case, Measured { seconds, limit, rounds: 7 });
        }
        report
    }

    #[test]
    fn json_has_the_keys_that_others_read_first_and_in_order() {
        let report = report(&["--suite", "decode,plan"]);
        let keys = "case backend isa threads format batch context q_heads kv_heads head_dim \
                    block_size ns bytes gbps limit_gbps fraction";
        for line in report.lines() {
            let text = serde_json::to_string(line).expect("JSON");
            let at = |key: &str| text.find(&format!("\"{key}\":")).expect(key);
            let places: Vec<_> = keys.split_whitespace().map(at).collect();
            assert!(places.is_sorted(), "{text}");
            assert!(places.first() == Some(&1) && at("limit") > places[15], "{text}");
            let value: serde_json::Value = serde_json::from_str(&text).expect("JSON");
            assert_eq!((&value["isa"], &value["threads"]), (&"avx2".into(), &2.into()));
            let is_plan = value["case"] == "plan";
            for key in ["limit_gbps", "fraction", "limit", "gflops"] {
                assert_eq!(value[key].is_null(), is_plan, "{key}: {text}");
            }
        }
    }

    #[test]
    fn a_fraction_is_the_rate_by_its_limit() {
        let report = report(&["--suite", "decode,gather", "--batch", "2", "--context", "8"]);
        for line in report.lines() {
            assert!((line.fraction.expect("a limit") - 0.5).abs() < 1e-12, "{line:?}");
            assert!((line.gbps - 10.0).abs() < 1e-9, "{line:?}");
            assert_eq!(line.bytes, line.bytes_read + line.bytes_written);
        }
    }

    #[test]
    fn the_table_has_a_row_for_every_case() {
        let report = report(&["--suite", "decode,append,plan", "--formats", "bf16,l4"]);
        let text = report.show();
        let lines = report.lines();
        assert!(text.starts_with("cpu: avx2 kernels, 2 threads; CPU\n"), "{text}");
        let cases = format!("\n{} cases, limits: reading 20.00 GB/s, copies", lines.len());
        let says_cases = text.contains(cases.trim_start());
        assert!(says_cases, "{text}");
        let is_row = |row: &&str| row.contains("bf16  ") || row.contains("l4  ");
        assert_eq!(text.lines().filter(is_row).count(), lines.len(), "{text}");
        assert!(text.contains("contiguous") && text.contains("0.500"), "{text}");
        assert!(text.ends_with(LEGEND), "{text}");
    }
}
