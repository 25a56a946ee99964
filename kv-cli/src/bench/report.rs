//! The output of `kv bench` without a suite.
use kv::tier::Bytes;
use kv_bench::measure::{Facts, Operation, Report, RunsOn, Shape};

use super::suffix;
use crate::output;

/// Share of the plain copy's rate that decode should reach on a card, where it is memory-bound.
const GOAL: f64 = 0.5;

const LEGEND: &str = "\
decode         attention of one token per sequence, in all layers: reads K and V of all contexts
append         K and V of one token per sequence, in all layers: reads bf16 rows, writes stored ones
append-prompt  the same for one prompt as long as a context
copy           the blocks of one sequence to those of another: reads and writes stored rows
plain copy     (copy us, copy GB/s) the bytes that the operation reads, from one buffer to
               another, in the same rounds
GB/s counts 10^9 bytes, read and written together; of copy is the operation's rate over that of the
plain copy.
";

/// Formats the report as text.
pub(super) fn show(report: &Report) -> String {
    let Report { backend, facts, shape, .. } = report;
    let Shape { context, q_heads, kv_heads, head_dim, block_size, .. } = shape;
    let Facts { device, kind, driver, .. } = facts;
    let driver = driver.as_ref().map(|driver| format!(", driver {driver}"));
    let driver = driver.unwrap_or_default();
    let note = report.note.map(|note| format!("{note}\n")).unwrap_or_default();
    format!(
        "{backend}: {device}; {kind}{driver}\n\
         {note}\
         {} of {context} tokens, {}, {q_heads} query heads on {kv_heads} kv heads of \
         {head_dim}, blocks of {block_size}{}; medians of {}\n\
         \n{}\n\
         {}{}",
        count(shape.batch, "sequence"),
        count(shape.layers.into(), "layer"),
        suffix(shape.block_order),
        count(shape.rounds, "round"),
        output::table(&table(report)),
        LEGEND,
        verdict(report).unwrap_or_default()
    )
}

fn table(report: &Report) -> Vec<Vec<String>> {
    let heading =
        ["operation", "format", "reads", "writes", "us", "GB/s", "copy us", "copy GB/s", "of copy"];
    let mut rows = vec![heading.map(str::to_owned).to_vec()];
    rows.extend(report.lines.iter().map(|line| {
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

/// Says whether decode reaches its goal.
fn verdict(report: &Report) -> Option<String> {
    if report.facts.runs_on != RunsOn::Card {
        return None;
    }
    let decodes = report.lines.iter().filter(|line| line.operation == Operation::Decode.name());
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

/// Formats a number of any size with at least three digits.
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
    use kv_bench::measure::{Line, Options, Work};

    use super::*;

    fn report(runs_on: RunsOn, formats: &[(&str, f64)]) -> Report {
        let facts = Facts {
            device: "a card".to_owned(),
            kind: "Vulkan".to_owned(),
            driver: Some("1.2".to_owned()),
            runs_on,
        };
        let lines = formats.iter().flat_map(|(format, seconds)| {
            let stored = format.parse().expect("a format");
            Operation::FOUR.map(|operation| {
                let work = Work { read: 2_000_000_000, ..Work::default() };
                Line::new(operation, stored, work, [*seconds, 2.0])
            })
        });
        let shape = Shape::new(&Options::default(), runs_on);
        Report::new("wgpu:0".to_owned(), facts, shape, lines.collect())
    }

    #[test]
    fn small_figures_keep_their_digits() {
        let shown = [0.000_123_4, 0.5, 0.9999, 1.0, 3210.987].map(figure);
        assert_eq!(shown, ["0.000123", "0.5000", "0.9999", "1.00", "3210.99"]);
    }

    #[test]
    fn a_card_has_a_goal_and_a_software_driver_a_caveat() {
        // The copy moves 2 GB/s.
        let shown = show(&report(RunsOn::Card, &[("bf16", 1.0), ("int8", 2.0)]));
        assert!(shown.contains("a card; Vulkan, driver 1.2\n16 sequences"), "{shown}");
        assert!(shown.ends_with("Decode reaches 0.5 of the plain copy's rate in every format.\n"));
        let shown = show(&report(RunsOn::Card, &[("bf16", 1.0), ("l4", 4.0)]));
        assert!(
            shown.ends_with("Decode stays below 0.5 of the plain copy's rate in l4 (0.2500).\n")
        );
        let note = RunsOn::Software.note().expect("a note");
        let shown = show(&report(RunsOn::Software, &[("bf16", 1.0)]));
        assert!(shown.contains(note) && !shown.contains("Decode "), "{shown}");
        let shown = show(&report(RunsOn::Cpu, &[("bf16", 1.0)]));
        assert!(!shown.contains(note) && !shown.contains("Decode "), "{shown}");
    }
}
