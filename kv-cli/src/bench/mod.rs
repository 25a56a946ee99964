//! `kv bench`: the operations of a cache on a device, next to a plain copy of memory, and stores of
//! lower tiers, next to plain clients; measured by `kv-bench`.
mod report;
mod suite;
mod tier;

use anyhow::ensure;
use indicatif::ProgressBar;
use kv::BlockOrder;
use kv::tier::Bytes;
use kv_bench::measure::{self, LeftOut, Options, Progress};

use crate::args::BenchArgs;
use crate::{chart, failure, output, progress};

pub(crate) fn run(args: &BenchArgs) -> anyhow::Result<()> {
    if args.is_tier() {
        return tier::run(args);
    }
    let options = args.options();
    let mut bar = Bar(ProgressBar::hidden());
    if args.suite.is_empty() {
        let report = measure::measure(&options, &mut bar)?;
        bar.0.finish_and_clear();
        return if args.json {
            output::json(&report)
        } else {
            output::text(&report::show(&report))
        };
    }
    if args.explain {
        let lines = measure::explain(&options, &mut bar)?;
        ensure!(!lines.is_empty(), "--explain needs the suite decode or prefill");
        return output::text(&lines.join("\n"));
    }
    run_suites(args, &options, &mut bar)
}

fn run_suites(args: &BenchArgs, options: &Options, bar: &mut Bar) -> anyhow::Result<()> {
    if let Some(path) = &args.plot {
        output::check_writable(path)?;
    }
    let report = measure::measure_suites(options, bar)?;
    bar.0.finish_and_clear();
    if let Some(path) = &args.plot {
        chart::write(path, &[suite::chart(&report.lines())])?;
    }
    if args.json {
        return output::json(&report.lines());
    }
    output::text(&suite::show(&report))
}

/// A progress bar of rounds; cases that are left out are printed above it, on standard error.
struct Bar(ProgressBar);

impl Progress for Bar {
    fn begin(&mut self, rounds: u64) {
        self.0 = progress::rounds(rounds);
    }

    fn advance(&mut self, rounds: u64) {
        self.0.inc(rounds);
    }

    fn left_out(&mut self, case: &str, why: &LeftOut) {
        let line = format!("left out: {case}: {}", reason(why));
        // A measurement continues without standard error.
        let _ = self.0.suspend(|| output::note(&line));
    }
}

fn reason(why: &LeftOut) -> String {
    match why {
        LeftOut::Memory { needed, allowed } => {
            format!("{} of memory, {} are allowed", Bytes(*needed), Bytes(*allowed))
        }
        LeftOut::Arithmetic { flops } => {
            format!("{} GFLOP; give --context to measure it", flops.div_euclid(1_000_000_000))
        }
        LeftOut::Device(error) => failure::chain(error),
        _ => "it cannot be measured".to_owned(),
    }
}

/// Returns the text for a block order after the block size: empty for the default order.
fn suffix(order: BlockOrder) -> &'static str {
    match order {
        BlockOrder::Nhd => " nhd",
        _ => "",
    }
}
