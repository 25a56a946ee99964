//! The results of [`measure_suites`](super::measure_suites).
use kv::BlockOrder;
use serde::Serialize;

use super::clock::gb_per_s;
use super::error::Error;
use super::grid::{Case, cases};
use super::options::{BlockSize, Options};
use super::report::{Facts, RunsOn, order};
use super::work::Operation;
use crate::num::to_f64;

/// The roofline that the rate of an operation is compared with: the highest rate of the device's
/// memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[expect(clippy::exhaustive_enums, reason = "each is shown in a way of its own")]
pub enum RooflineKind {
    /// The rate of reading memory; on a card, of copying it.
    Read,
    /// The rate of copying the same number of bytes.
    Copy,
}

/// The measurement of one case.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::exhaustive_structs, reason = "a literal names each of the numbers")]
pub struct Measured {
    /// Seconds per layer.
    pub seconds: f64,
    /// The kind of its roofline, and 10^9 bytes per second.
    pub limit: Option<(RooflineKind, f64)>,
    /// Rounds after the warm-up.
    pub rounds: u32,
}

/// One case as a JSON object. Other programs read the first sixteen fields, in this order.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct CaseLine {
    /// Name of the operation.
    pub case: &'static str,
    /// Name of the device.
    pub backend: String,
    /// Instruction set of a CPU.
    pub isa: Option<String>,
    /// Threads of a CPU.
    pub threads: Option<u32>,
    /// Formats of K and V.
    pub format: String,
    /// Number of sequences.
    pub batch: u32,
    /// Tokens per sequence.
    pub context: u32,
    /// Number of query heads.
    pub q_heads: u32,
    /// Number of kv heads.
    pub kv_heads: u32,
    /// Head dim.
    pub head_dim: u32,
    /// Slots per block; of a contiguous cache, per sequence.
    pub block_size: u32,
    /// Nanoseconds per layer.
    pub ns: f64,
    /// Bytes read and written.
    pub bytes: u64,
    /// 10^9 bytes per second.
    pub gbps: f64,
    /// 10^9 bytes per second of the roofline.
    pub limit_gbps: Option<f64>,
    /// The rate over the roofline's.
    pub fraction: Option<f64>,
    /// The kind of the roofline.
    pub limit: Option<RooflineKind>,
    /// 10^9 floating-point operations per second, for attention.
    pub gflops: Option<f64>,
    /// Bytes read.
    pub bytes_read: u64,
    /// Bytes written.
    pub bytes_written: u64,
    /// Whether each sequence is one block.
    pub contiguous: bool,
    /// Order of axes inside a block.
    #[serde(serialize_with = "order")]
    pub block_order: BlockOrder,
    /// Layers per step.
    pub layers: u16,
    /// Rounds after the warm-up.
    pub rounds: u32,
}

impl CaseLine {
    fn new(backend: &str, choice: Option<&(String, u32)>, case: &Case, took: Measured) -> Self {
        let Case { operation, stored, shape, block_size, work, .. } = case;
        let gbps = gb_per_s(work.bytes(), took.seconds);
        let limit_gbps = took.limit.map(|(_, rate)| rate);
        Self {
            case: operation.name(),
            backend: backend.to_owned(),
            isa: choice.map(|(isa, _)| isa.clone()),
            threads: choice.map(|(_, threads)| *threads),
            format: stored.to_string(),
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
}

/// All cases on one device, in the order of the grid.
#[derive(Debug)]
#[non_exhaustive]
pub struct Part {
    /// Facts about the device.
    pub facts: Facts,
    /// Its instruction set and its number of threads, if there is a choice.
    pub choice: Option<(String, u32)>,
    /// One line per case.
    pub lines: Vec<CaseLine>,
}

/// The results of all devices.
#[derive(Debug)]
#[non_exhaustive]
pub struct SuiteReport {
    /// Name of the device.
    pub backend: String,
    /// One part per instruction set and number of threads.
    pub parts: Vec<Part>,
}

impl SuiteReport {
    /// Makes a report without devices.
    pub fn new(backend: String) -> Self {
        Self { backend, parts: Vec::new() }
    }

    /// Adds a device; `choice` is its instruction set and number of threads.
    pub fn device(&mut self, facts: Facts, choice: Option<(String, u32)>) {
        self.parts.push(Part { facts, choice, lines: Vec::new() });
    }

    /// Adds a case of the last device.
    ///
    /// # Panics
    /// Before the first device.
    pub fn push(&mut self, case: &Case, took: Measured) {
        let part = self.parts.last_mut();
        let part = part.unwrap_or_else(|| unreachable!("a case is measured on a device"));
        part.lines.push(CaseLine::new(&self.backend, part.choice.as_ref(), case, took));
    }

    /// Makes a report in which a CPU runs every case at half of its roofline, 20 GB/s: for tests of
    /// what shows reports.
    ///
    /// # Errors
    /// Those of the list of cases.
    pub fn half_of_limits(options: &Options) -> Result<Self, Error> {
        let facts = Facts {
            device: "avx2 kernels, 2 threads".to_owned(),
            kind: "CPU".to_owned(),
            driver: None,
            runs_on: RunsOn::Cpu,
        };
        let mut report = Self::new("cpu".to_owned());
        report.device(facts, Some(("avx2".to_owned(), 2)));
        for case in cases(options, RunsOn::Cpu)? {
            let kind = match case.operation {
                Operation::Plan => None,
                Operation::Decode | Operation::Prefill => Some(RooflineKind::Read),
                _ => Some(RooflineKind::Copy),
            };
            let seconds = kind.map_or(1e-6, |_| to_f64(case.work.bytes()) / 10e9);
            let limit = kind.map(|kind| (kind, 20.0));
            report.push(&case, Measured { seconds, limit, rounds: 7 });
        }
        Ok(report)
    }

    /// Returns the cases of all devices.
    pub fn lines(&self) -> Vec<&CaseLine> {
        self.parts.iter().flat_map(|part| &part.lines).collect()
    }
}

/// Returns the median of all rooflines of one kind, in 10^9 bytes per second.
pub fn middle<'a>(
    lines: impl IntoIterator<Item = &'a CaseLine>,
    kind: RooflineKind,
) -> Option<f64> {
    let is_its = |line: &&CaseLine| line.limit == Some(kind);
    let mut rates: Vec<_> =
        lines.into_iter().filter(is_its).filter_map(|line| line.limit_gbps).collect();
    rates.sort_by(f64::total_cmp);
    rates.get(rates.len().div_euclid(2)).copied()
}

#[cfg(test)]
mod tests {
    use super::super::options::Suite;
    use super::*;

    #[test]
    fn json_has_the_keys_that_others_read_first_and_in_order() {
        let suites = vec![Suite::Decode, Suite::Plan];
        let options = Options { suites, ..Options::default() };
        let report = SuiteReport::half_of_limits(&options).expect("cases");
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
        let (suites, batch) = (vec![Suite::Decode, Suite::Gather], vec![2]);
        let few = Options { suites, batch, context: vec![8], ..Options::default() };
        let report = SuiteReport::half_of_limits(&few).expect("cases");
        for line in report.lines() {
            assert!((line.fraction.expect("a limit") - 0.5).abs() < 1e-12, "{line:?}");
            assert!((line.gbps - 10.0).abs() < 1e-9, "{line:?}");
            assert_eq!(line.bytes, line.bytes_read + line.bytes_written);
        }
    }
}
