//! What `kv bench` says, for programs and for people.
use serde::Serialize;

use super::clock::gb_per_s;
use super::work::{Operation, Shape, Work};
use crate::memory::Bytes;
use crate::output;
use kv_runner::stored::Stored;

/// The part of the plain copy's rate that decoding is to reach on a card.
const GOAL: f64 = 0.5;

/// What a device says of itself.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Facts {
    pub(super) device: String,
    /// Discrete, integrated, or whatever it is.
    pub(super) kind: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) driver: Option<String>,
    pub(super) runs_on: RunsOn,
}

/// What does the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum RunsOn {
    /// The CPU, with kernels made for it.
    Cpu,
    /// A card, where memory is what limits decoding: it is to reach [`GOAL`].
    Card,
    /// A CPU that stands for a card.
    Software,
}

/// Everything there is to say.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    backend: String,
    #[serde(flatten)]
    facts: Facts,
    /// What the figures are worth, where that is not plain.
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<&'static str>,
    #[serde(flatten)]
    shape: Shape,
    lines: Vec<Line>,
}

pub(super) const SOFTWARE: &str = "A CPU runs the shaders of this adapter: what follows is the \
                                   speed of a driver in software, and says nothing of a card.";

const LEGEND: &str = "\
decode         attention of one token a sequence, in all layers: reads K and V of all contexts
append         K and V of one token a sequence, in all layers: reads bf16 rows, writes stored ones
append-prompt  the same for one prompt as long as a context
copy           the blocks of one sequence to those of another: reads and writes stored rows
plain copy     (copy us, copy GB/s) as many bytes as the operation reads, from one buffer to
               another, in the same rounds
GB/s counts 10^9 bytes, read and written alike; of copy is the one rate divided by the other.
";

/// One operation in one stored format. Times are medians of one run.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Line {
    operation: &'static str,
    format: String,
    bytes_read: u64,
    bytes_written: u64,
    us: f64,
    gb_per_s: f64,
    /// Bytes that the plain copy takes from one buffer to another; it reads and writes as many.
    copy_bytes: u64,
    copy_us: f64,
    copy_gb_per_s: f64,
    /// The one rate as a part of the other.
    of_copy: f64,
}

impl Line {
    /// `seconds`: of the operation, and of the plain copy beside it.
    pub(super) fn new(
        operation: Operation,
        stored: &Stored,
        work: Work,
        [seconds, copy_seconds]: [f64; 2],
    ) -> Self {
        let rate = gb_per_s(work.bytes(), seconds);
        let copy_rate = gb_per_s(work.copied().saturating_mul(2), copy_seconds);
        Self {
            operation: operation.name(),
            format: stored.formats(),
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
    pub(super) fn new(backend: String, facts: Facts, shape: Shape, mut lines: Vec<Line>) -> Self {
        // Formats of one operation beside each other.
        let place =
            |line: &Line| Operation::FOUR.iter().position(|one| one.name() == line.operation);
        lines.sort_by_key(place);
        Self {
            backend,
            note: (facts.runs_on == RunsOn::Software).then_some(SOFTWARE),
            facts,
            shape,
            lines,
        }
    }

    pub(super) fn show(&self) -> String {
        let Self { backend, facts, shape, .. } = self;
        let Shape { context, q_heads, kv_heads, head_dim, block_size, block_order, .. } = shape;
        let Facts { device, kind, driver, .. } = facts;
        let driver = driver.as_ref().map(|driver| format!(", driver {driver}"));
        let driver = driver.unwrap_or_default();
        let note = self.note.map(|note| format!("{note}\n")).unwrap_or_default();
        format!(
            "{backend}: {device}; {kind}{driver}\n\
             {note}\
             {} of {context} tokens, {}, {q_heads} query heads on {kv_heads} kv heads of \
             {head_dim}, blocks of {block_size}{}; medians of {}\n\
             \n{}\n\
             {}{}",
            count(shape.batch, "sequence"),
            count(shape.layers.into(), "layer"),
            block_order.suffix(),
            count(shape.rounds, "round"),
            output::table(&self.table()),
            LEGEND,
            self.verdict().unwrap_or_default()
        )
    }

    fn table(&self) -> Vec<Vec<String>> {
        let heading = [
            "operation",
            "format",
            "reads",
            "writes",
            "us",
            "GB/s",
            "copy us",
            "copy GB/s",
            "of copy",
        ];
        let mut rows = vec![heading.map(str::to_owned).to_vec()];
        rows.extend(self.lines.iter().map(|line| {
            vec![
                line.operation.to_owned(),
                line.format.clone(),
                Bytes(line.bytes_read).to_string(),
                Bytes(line.bytes_written).to_string(),
                format!("{:.1}", line.us),
                figure(line.gb_per_s),
                format!("{:.1}", line.copy_us),
                figure(line.copy_gb_per_s),
                figure(line.of_copy),
            ]
        }));
        rows
    }

    /// Whether decoding is as fast as it is to be.
    fn verdict(&self) -> Option<String> {
        if self.facts.runs_on != RunsOn::Card {
            return None;
        }
        let decodes = self.lines.iter().filter(|line| line.operation == Operation::Decode.name());
        let slow: Vec<_> = decodes
            .filter(|line| line.of_copy < GOAL)
            .map(|line| format!("{} ({})", line.format, figure(line.of_copy)))
            .collect();
        Some(if slow.is_empty() {
            format!("Decode reaches {GOAL} of the plain copy's rate in every format.\n")
        } else {
            format!("Decode stays below {GOAL} of the plain copy's rate in {}.\n", slow.join(", "))
        })
    }
}

/// A number of any size in three digits or more.
pub(super) fn figure(number: f64) -> String {
    let decimals = match number {
        small if small < 0.01 => 6,
        small if small < 1.0 => 4,
        _ => 2,
    };
    format!("{number:.decimals$}")
}

/// `1 layer`, `2 layers`.
pub(super) fn count(number: u32, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use clap::Parser;

    fn report(runs_on: RunsOn, formats: &[(&str, f64)]) -> Report {
        let cli = Cli::try_parse_from(["kv", "bench"]).expect("arguments");
        let Command::Bench(args) = cli.command else { panic!("another command") };
        let facts = Facts {
            device: "a card".to_owned(),
            kind: "Vulkan".to_owned(),
            driver: Some("1.2".to_owned()),
            runs_on,
        };
        let lines = formats.iter().flat_map(|(format, seconds)| {
            let stored: Stored = format.parse().expect("a format");
            Operation::FOUR.map(|operation| {
                let work = Work { read: 2_000_000_000, ..Work::default() };
                Line::new(operation, &stored, work, [*seconds, 2.0])
            })
        });
        let shape = Shape::new(&args, runs_on);
        Report::new("wgpu:0".to_owned(), facts, shape, lines.collect())
    }

    #[test]
    fn a_rate_counts_what_is_read_and_written() {
        let stored: Stored = "l4".parse().expect("a format");
        let work = Work { read: 3_000_000_002, written: 1_000_000_000, flops: 0 };
        let line = Line::new(Operation::Append, &stored, work, [2.0, 4.0]);
        assert_eq!((line.bytes_read, line.bytes_written), (3_000_000_002, 1_000_000_000));
        assert_eq!(line.copy_bytes, 3_000_000_004, "whole words");
        assert!((line.gb_per_s - 2.000_000_001).abs() < 1e-12);
        assert!((line.copy_gb_per_s - 1.500_000_002).abs() < 1e-12);
        assert!((line.of_copy - line.gb_per_s / line.copy_gb_per_s).abs() < 1e-12);
        assert!((line.us - 2e6).abs() < 1e-6 && (line.copy_us - 4e6).abs() < 1e-6);
        let none = Line::new(Operation::Append, &stored, work, [0.0, 0.0]);
        let rates = [none.gb_per_s, none.copy_gb_per_s, none.of_copy];
        assert_eq!(rates.map(f64::to_bits), [0; 3]);
    }

    #[test]
    fn small_figures_keep_their_digits() {
        let shown = [0.000_123_4, 0.5, 0.9999, 1.0, 3210.987].map(figure);
        assert_eq!(shown, ["0.000123", "0.5000", "0.9999", "1.00", "3210.99"]);
    }

    #[test]
    fn formats_of_one_operation_stand_together() {
        let report = report(RunsOn::Card, &[("bf16", 1.0), ("l4", 1.0)]);
        let order: Vec<_> =
            report.lines.iter().map(|line| (line.operation, line.format.as_str())).collect();
        assert_eq!(order[..3], [("decode", "bf16"), ("decode", "l4"), ("append", "bf16")]);
    }

    #[test]
    fn a_card_is_judged_and_a_driver_in_software_is_named() {
        // The copy moves 2 GB/s.
        let shown = report(RunsOn::Card, &[("bf16", 1.0), ("int8", 2.0)]).show();
        assert!(shown.contains("a card; Vulkan, driver 1.2\n16 sequences"), "{shown}");
        assert!(shown.ends_with("Decode reaches 0.5 of the plain copy's rate in every format.\n"));
        let shown = report(RunsOn::Card, &[("bf16", 1.0), ("l4", 4.0)]).show();
        assert!(
            shown.ends_with("Decode stays below 0.5 of the plain copy's rate in l4 (0.2500).\n")
        );
        let shown = report(RunsOn::Software, &[("bf16", 1.0)]).show();
        assert!(shown.contains(SOFTWARE) && !shown.contains("Decode "), "{shown}");
        let shown = report(RunsOn::Cpu, &[("bf16", 1.0)]).show();
        assert!(!shown.contains(SOFTWARE) && !shown.contains("Decode "), "{shown}");
    }
}
