//! The results of [`measure`](super::measure).
use kv::BlockOrder;
use serde::{Serialize, Serializer};

use super::clock::gb_per_s;
use super::options::Formats;
use super::work::{Operation, Shape, Work};

/// Facts about a device.
#[derive(Debug, Clone, Serialize)]
#[expect(clippy::exhaustive_structs, reason = "a report shows each of them")]
pub struct Facts {
    /// Its name, or its instruction set and threads.
    pub device: String,
    /// Its kind, such as discrete or integrated.
    pub kind: String,
    /// The version of its driver, if it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// The hardware that does the work.
    pub runs_on: RunsOn,
}

/// The hardware that does the work of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[expect(clippy::exhaustive_enums, reason = "each is measured in a way of its own")]
pub enum RunsOn {
    /// The CPU, with kernels made for it.
    Cpu,
    /// A GPU, on which decode is memory-bound.
    Card,
    /// A CPU that emulates a GPU.
    Software,
}

/// Four operations in a few stored formats on one device.
#[derive(Debug, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// Name of the device.
    pub backend: String,
    /// Facts about the device.
    #[serde(flatten)]
    pub facts: Facts,
    /// A caveat about the figures, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<&'static str>,
    /// The shape of all measurements.
    #[serde(flatten)]
    pub shape: Shape,
    /// Lines in the order of operations, formats of one operation next to each other.
    pub lines: Vec<Line>,
}

/// The caveat for a driver in software.
const SOFTWARE: &str = "A CPU runs the shaders of this adapter: the figures are those of a \
                        software driver and say nothing about a card.";

impl RunsOn {
    /// Returns the caveat about figures of such a device, if there is one.
    pub fn note(self) -> Option<&'static str> {
        (self == Self::Software).then_some(SOFTWARE)
    }
}

/// One operation in one stored format. Times are medians of one run.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct Line {
    /// Name of the operation.
    pub operation: &'static str,
    /// Formats of K and V.
    pub format: String,
    /// Bytes read.
    pub bytes_read: u64,
    /// Bytes written.
    pub bytes_written: u64,
    /// Microseconds.
    pub us: f64,
    /// 10^9 bytes per second, read and written together.
    pub gb_per_s: f64,
    /// Bytes of the plain copy's source; it writes the same number.
    pub copy_bytes: u64,
    /// Microseconds of the plain copy.
    pub copy_us: f64,
    /// 10^9 bytes per second of the plain copy.
    pub copy_gb_per_s: f64,
    /// The operation's rate over the plain copy's.
    pub of_copy: f64,
}

impl Line {
    /// Makes a line from the seconds of the operation and of the plain copy.
    pub fn new(
        operation: Operation,
        stored: Formats,
        work: Work,
        [seconds, copy_seconds]: [f64; 2],
    ) -> Self {
        let rate = gb_per_s(work.bytes(), seconds);
        let copy_rate = gb_per_s(work.copied() * 2, copy_seconds);
        Self {
            operation: operation.name(),
            format: stored.to_string(),
            bytes_read: work.read,
            bytes_written: work.written,
            us: seconds * 1e6,
            gb_per_s: rate,
            copy_bytes: work.copied(),
            copy_us: copy_seconds * 1e6,
            copy_gb_per_s: copy_rate,
            of_copy: if copy_rate > 0.0 { rate / copy_rate } else { 0.0 },
        }
    }
}

impl Report {
    /// Makes a report from lines in any order.
    pub fn new(backend: String, facts: Facts, shape: Shape, mut lines: Vec<Line>) -> Self {
        let place =
            |line: &Line| Operation::FOUR.iter().position(|one| one.name() == line.operation);
        lines.sort_by_key(place);
        Self { backend, note: facts.runs_on.note(), facts, shape, lines }
    }
}

/// Serialises a block order by its name.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands over a reference")]
pub(super) fn order<S: Serializer>(order: &BlockOrder, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&format!("{order:?}").to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_counts_what_is_read_and_written() {
        let stored: Formats = "l4".parse().expect("a format");
        let work = Work { read: 3_000_000_002, written: 1_000_000_000, flops: 0 };
        let line = Line::new(Operation::Append, stored, work, [2.0, 4.0]);
        assert_eq!((line.bytes_read, line.bytes_written), (3_000_000_002, 1_000_000_000));
        assert_eq!(line.copy_bytes, 3_000_000_004, "whole words");
        assert!((line.gb_per_s - 2.000_000_001).abs() < 1e-12);
        assert!((line.copy_gb_per_s - 1.500_000_002).abs() < 1e-12);
        assert!((line.of_copy - line.gb_per_s / line.copy_gb_per_s).abs() < 1e-12);
        assert!((line.us - 2e6).abs() < 1e-6 && (line.copy_us - 4e6).abs() < 1e-6);
        let none = Line::new(Operation::Append, stored, work, [0.0, 0.0]);
        let rates = [none.gb_per_s, none.copy_gb_per_s, none.of_copy];
        assert_eq!(rates.map(f64::to_bits), [0; 3]);
    }

    #[test]
    fn formats_of_one_operation_stand_together() {
        let facts = Facts {
            device: "a card".to_owned(),
            kind: "Vulkan".to_owned(),
            driver: None,
            runs_on: RunsOn::Card,
        };
        let shape = Shape::new(&super::super::Options::default(), RunsOn::Card);
        let lines = ["bf16", "l4"].iter().flat_map(|format| {
            let stored: Formats = format.parse().expect("a format");
            Operation::FOUR.map(|one| Line::new(one, stored, Work::default(), [1.0, 1.0]))
        });
        let report = Report::new("wgpu:0".to_owned(), facts, shape, lines.collect());
        let order: Vec<_> =
            report.lines.iter().map(|line| (line.operation, line.format.as_str())).collect();
        assert_eq!(order[..3], [("decode", "bf16"), ("decode", "l4"), ("append", "bf16")]);
    }
}
