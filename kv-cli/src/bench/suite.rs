//! The output of `kv bench --suite`.
use kv::tier::Bytes;
use kv_bench::measure::{
    CaseLine, Facts, Operation, Part, RooflineKind, RunsOn, SuiteReport, middle,
};

use super::report::{count, figure};
use super::suffix;
use crate::chart::{Axis, Chart, Mark, Series};
use crate::num::{to_f64, to_u32};
use crate::output;

const LEGEND: &str = "\
decode         attention of one token per sequence: reads K and V of all contexts
prefill        attention of whole prompts: counts K and V, queries and outputs
append         K and V of one token per sequence: reads bf16 rows, writes stored ones
append-prompt  the same for one prompt as long as the context
gather         K and V of all contexts, decoded: reads stored rows, writes bf16 ones
copy           blocks of sequences to those of others: reads and writes stored rows
plan           a step of one token per sequence, begun and dropped: no device, no limit
Figures are of one layer and medians. GB/s counts 10^9 bytes, read and written together.
";

/// Formats the report as text.
pub(super) fn show(report: &SuiteReport) -> String {
    let parts = report.parts.iter().map(|part| show_part(&report.backend, part));
    let parts: String = parts.collect();
    format!("{parts}{LEGEND}")
}

fn show_part(backend: &str, part: &Part) -> String {
    let Facts { device, kind, driver, runs_on } = &part.facts;
    let driver = driver.as_ref().map(|driver| format!(", driver {driver}"));
    let note = runs_on.note().map(|note| format!("{note}\n"));
    let mut rows = vec![HEADING.map(str::to_owned).to_vec()];
    rows.extend(part.lines.iter().map(cells));
    format!(
        "{backend}: {device}; {kind}{}\n{}{}, limits: {}\n\n{}\n",
        driver.unwrap_or_default(),
        note.unwrap_or_default(),
        count(to_u32(part.lines.len()), "case"),
        limits(part),
        output::table(&rows)
    )
}

/// Formats the rooflines, each the median of its kind.
fn limits(part: &Part) -> String {
    let said = |(kind, what): (RooflineKind, &str)| {
        middle(&part.lines, kind).map(|rate| format!("{what} {} GB/s", figure(rate)))
    };
    let card = match part.facts.runs_on {
        RunsOn::Cpu => "reading",
        RunsOn::Card | RunsOn::Software => "a plain copy",
    };
    let limits: Vec<_> = [(RooflineKind::Read, card), (RooflineKind::Copy, "copies (median)")]
        .into_iter()
        .filter_map(said)
        .collect();
    if limits.is_empty() { "none".to_owned() } else { limits.join(", ") }
}

const HEADING: [&str; 13] = [
    "case", "format", "batch", "context", "heads", "dim", "block", "bytes", "us", "GB/s", "limit",
    "fraction", "GFLOP/s",
];

/// Formats the block size, and the block order if it is not the default.
fn block(line: &CaseLine) -> String {
    let size = if line.contiguous { "contiguous" } else { &line.block_size.to_string() };
    format!("{size}{}", suffix(line.block_order))
}

fn cells(line: &CaseLine) -> Vec<String> {
    let or_none = |figure: Option<String>| figure.unwrap_or_else(|| "-".to_owned());
    let is_plan = line.case == Operation::Plan.name();
    vec![
        line.case.to_owned(),
        line.format.clone(),
        line.batch.to_string(),
        line.context.to_string(),
        format!("{}/{}", line.q_heads, line.kv_heads),
        line.head_dim.to_string(),
        block(line),
        or_none((!is_plan).then(|| Bytes(line.bytes).to_string())),
        format!("{:.1}", line.ns / 1e3),
        or_none((!is_plan).then(|| figure(line.gbps))),
        or_none(line.limit_gbps.map(figure)),
        or_none(line.fraction.map(|fraction| format!("{fraction:.3}"))),
        or_none(line.gflops.map(figure)),
    ]
}

/// Charts bytes against time: every case, and the median of each kind of limit.
pub(super) fn chart(lines: &[&CaseLine]) -> Chart {
    let name = |line: &CaseLine| format!("{} {}", line.case, line.format);
    let points = lines.iter().map(|line| (name(line), (to_f64(line.bytes), line.ns / 1e3)));
    let mut series = Series::by_name(Mark::Points, points);
    let bytes = lines.iter().map(|line| line.bytes).filter(|bytes| *bytes > 0);
    let ends = [bytes.clone().min(), bytes.max()].map(|bytes| to_f64(bytes.unwrap_or(0)));
    for (kind, name) in [(RooflineKind::Read, "read limit"), (RooflineKind::Copy, "copy limit")] {
        if let Some(rate) = middle(lines.iter().copied(), kind).filter(|rate| *rate > 0.0) {
            // 10^9 bytes per second are 10^3 per microsecond.
            let points = ends.map(|bytes| (bytes, bytes / (rate * 1e3)));
            let name = format!("{name} {rate:.1} GB/s");
            series.push(Series::new(name, Mark::Line, points.to_vec()));
        }
    }
    let title = "Bytes against time, and the limits";
    Chart { title, x: Axis::Log("bytes of one layer"), y: Axis::Log("us of one layer"), series }
}

#[cfg(test)]
mod tests {
    use kv_bench::measure::{Options, Suite};

    use super::*;
    use crate::chart::svg;

    fn report(suites: &[Suite], formats: &[&str]) -> SuiteReport {
        let formats = formats.iter().map(|name| name.parse().expect("a format")).collect();
        let options = Options { suites: suites.to_vec(), formats, ..Options::default() };
        SuiteReport::half_of_limits(&options).expect("cases")
    }

    #[test]
    fn the_table_has_a_row_for_every_case() {
        let report = report(&[Suite::Decode, Suite::Append, Suite::Plan], &["bf16", "l4"]);
        let text = show(&report);
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

    #[test]
    fn every_case_is_a_point_and_every_limit_a_line() {
        let report = report(&[Suite::Decode, Suite::Append, Suite::Plan], &["bf16", "int8/l4"]);
        let svg = svg(&[chart(&report.lines())]).expect("a chart");
        assert_eq!(svg.matches("<circle ").count(), report.lines().len());
        for name in ["decode bf16", "append int8/l4", "plan bf16", "read limit 20.0 GB/s"] {
            assert!(svg.contains(&format!("\n{name}\n")), "{name}: {svg}");
        }
        let plans = self::report(&[Suite::Plan], &[]);
        let is_line = |series: &Series| series.mark == Mark::Line;
        assert!(!chart(&plans.lines()).series.iter().any(is_line), "plans have no bytes");
    }
}
