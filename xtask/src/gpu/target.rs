//! Performance targets on an H200.
use super::record::Measure;

/// A part of the name of the card that targets are set for.
pub(super) const CARD: &str = "H200";

/// Dense bf16 rate of the card's data sheet, in TFLOP/s.
const PEAK: f64 = 989.0;
/// Tokens in a batch from which decode must reach the rate of a copy.
const MANY_TOKENS: u64 = 256 << 10;

/// One target.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Target {
    pub(super) text: String,
    pub(super) is_met: bool,
}

/// Returns the targets of one measurement.
pub(super) fn targets(measure: &Measure) -> Vec<Target> {
    let at_least = |least: f64, value: Option<f64>, of: &str| {
        let is_met = value.is_some_and(|value| value >= least);
        Target { text: format!(">= {least:.2} of {of}"), is_met }
    };
    let within =
        |most: f64| Target { text: format!("<= {most} us"), is_met: measure.micros <= most };
    let parts: Vec<&str> = measure.name.split('/').collect();
    let mut targets = Vec::new();
    match parts.as_slice() {
        ["decode", format, "block16", "gqa8", batch, context]
            if tokens(batch, context).is_some_and(|tokens| tokens >= MANY_TOKENS) =>
        {
            match *format {
                "bf16" => targets.push(at_least(0.90, measure.of_copy, "copy")),
                "fp8-e4m3" => targets.push(at_least(0.85, measure.of_copy, "copy")),
                _ => {}
            }
        }
        ["append", _, "b1", new] if number(new).is_some_and(|new| new > 4096) => {
            targets.push(at_least(0.60, measure.of_copy, "copy"));
        }
        ["append", _, "b64", "t1", "alone"] => targets.push(within(5.0)),
        ["begin_step", "b256"] => targets.push(within(10.0)),
        ["prefill", "bf16", _, "t64", "c32768"] => targets.push(within(150.0)),
        ["prefill", ..] => {
            let share = measure.tflop_per_s.map(|rate| rate / PEAK);
            targets.push(at_least(0.60, share, "989 TFLOP/s"));
        }
        _ => {}
    }
    for (peer, micros) in &measure.peers {
        let text = format!("not slower than {peer}");
        targets.push(Target { text, is_met: measure.micros <= *micros });
    }
    targets
}

fn tokens(batch: &str, context: &str) -> Option<u64> {
    number(batch)?.checked_mul(number(context)?)
}

/// Returns the number after a letter.
fn number(part: &str) -> Option<u64> {
    part.get(1..)?.parse().ok()
}
