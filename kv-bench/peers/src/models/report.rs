//! The results, as text and as JSON.
use std::fmt::Write as _;
use std::time::Duration;

use kv::KvFormat;
use serde::Serialize;

use super::Entry;
use super::case::{Case, Shape};

/// Goals: what is said of a step's time and of the cache's memory.
const FASTER_AT: &str = "b16/c4096";
const FASTER_GOAL: f64 = 2.0;
const MEMORY_GOAL: f64 = 0.55;

/// All cases of a run.
#[derive(Serialize)]
pub(crate) struct Report {
    threads: usize,
    pub(crate) cases: Vec<Measured>,
}

/// One case, all formats.
#[derive(Serialize)]
pub(crate) struct Measured {
    shape: Shape,
    batch: usize,
    context: usize,
    pub(super) lines: Vec<Line>,
    /// Formats without a time, each with the reason.
    refused: Vec<(String, String)>,
}

/// One format beside candle, in the same turns.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Line {
    name: String,
    format: String,
    kv: Figures,
    candle: Figures,
    candle_flash: Figures,
    /// The time of the faster way of candle over ours: above 1, ours is faster.
    ratio: f64,
    /// Bytes of our cache over those of candle's.
    memory: f64,
}

#[derive(Debug, Clone, Serialize)]
struct Figures {
    median_ms: f64,
    /// Number of timed steps.
    samples: usize,
    /// Norm of the difference from candle's logits over the norm of candle's logits.
    error: f64,
    cache_bytes: u64,
    /// Of the cache and a step.
    peak_bytes: Option<u64>,
}

impl Figures {
    fn new(entry: &Entry) -> Self {
        let mut samples = entry.samples.clone();
        samples.sort();
        let at = |at: usize| samples.get(at).copied().unwrap_or(Duration::MAX).as_secs_f64();
        let median = f64::midpoint(at(samples.len().saturating_sub(1) / 2), at(samples.len() / 2));
        Self {
            median_ms: median * 1e3,
            samples: samples.len(),
            error: entry.error,
            cache_bytes: entry.bytes,
            peak_bytes: entry.peak,
        }
    }

    fn cache_mib(&self) -> f64 {
        mib(self.cache_bytes)
    }

    fn peak_mib(&self) -> String {
        self.peak_bytes.map_or("-".to_owned(), |bytes| format!("{:.1}", mib(bytes)))
    }
}

#[expect(clippy::cast_precision_loss, reason = "a figure for people")]
fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

impl Line {
    /// Compares our entry with the two ways of candle.
    pub(super) fn new(case: &Case, format: KvFormat, ours: &Entry, candle: [&Entry; 2]) -> Self {
        let kv = Figures::new(ours);
        let [candle, candle_flash] = candle.map(Figures::new);
        let memory = kv.cache_mib() / candle.cache_mib();
        let ratio = candle.median_ms.min(candle_flash.median_ms) / kv.median_ms;
        let (name, format) = (case.name(format), format.to_string());
        Self { name, format, kv, candle, candle_flash, ratio, memory }
    }
}

impl Measured {
    pub(super) fn new(case: &Case) -> Self {
        let Case { shape, batch, context, .. } = *case;
        Self { shape, batch, context, lines: Vec::new(), refused: Vec::new() }
    }

    pub(super) fn refuse(&mut self, name: String, reason: String) {
        self.refused.push((name, reason));
    }

    /// Formats a row for each format.
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        for line in &self.lines {
            let Line { name, kv, candle, candle_flash: flash, ratio, memory, .. } = line;
            let _ = writeln!(
                text,
                "{name:<26}{:>9.1}{:>9.1}{:>9.1}{ratio:>8.2}x{:>9.1}{:>9.1}{memory:>7.3}{:>9}{:>9}\
                 {:>9}{:>8.0e}",
                kv.median_ms,
                candle.median_ms,
                flash.median_ms,
                kv.cache_mib(),
                candle.cache_mib(),
                kv.peak_mib(),
                candle.peak_mib(),
                flash.peak_mib(),
                kv.error
            );
        }
        for (name, reason) in &self.refused {
            let _ = writeln!(text, "{name:<26}not timed: {reason}");
        }
        text
    }
}

impl Report {
    pub(super) fn new(threads: usize) -> Self {
        Self { threads, cases: Vec::new() }
    }

    /// Formats what is printed before the cases.
    pub(super) fn head(&self) -> String {
        format!(
            "a decode step, {} threads, medians; candle {} in f32\n\
             {:<26}{:>27}{:>9}{:>25}{:>27}\n\
             {:<26}{:>9}{:>9}{:>9}{:>9}{:>9}{:>9}{:>7}{:>9}{:>9}{:>9}{:>8}\n",
            self.threads,
            crate::candle_version(),
            "",
            "step, ms",
            "kv is",
            "cache, MiB",
            "cache and step, MiB",
            "model/batch/context/format",
            "kv",
            "candle",
            "flash",
            "faster",
            "kv",
            "candle",
            "part",
            "kv",
            "candle",
            "flash",
            "error",
        )
    }

    /// Formats the goals and what was reached.
    pub(crate) fn goals(&self) -> String {
        let lines: Vec<_> = self.cases.iter().flat_map(|case| &case.lines).collect();
        let mut text = String::new();
        let least = |lines: &mut dyn Iterator<Item = &Line>| {
            lines.min_by(|a, b| a.ratio.total_cmp(&b.ratio)).cloned()
        };
        if let Some(line) = least(&mut lines.iter().copied()) {
            let slower = lines.iter().filter(|line| line.ratio < 1.0).count();
            let _ = writeln!(
                text,
                "goal: never slower than the faster way of candle: slower in {slower} of {}, at \
                 least {:.2}x ({})",
                lines.len(),
                line.ratio,
                line.name
            );
        }
        let mut at = lines.iter().copied().filter(|line| line.name.contains(FASTER_AT));
        if let Some(line) = least(&mut at) {
            let _ = writeln!(
                text,
                "goal: {FASTER_GOAL}x at {FASTER_AT}: at least {:.2}x ({})",
                line.ratio, line.name
            );
        }
        let bf16 = lines.iter().filter(|line| line.format == "bf16");
        if let Some(line) = bf16.max_by(|a, b| a.memory.total_cmp(&b.memory)) {
            let _ = writeln!(
                text,
                "goal: at most {MEMORY_GOAL} of candle's cache in bf16: at most {:.3} ({})",
                line.memory, line.name
            );
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::Who;
    use crate::models::candle::Way;
    use crate::models::case::WIDE;

    fn entry(who: Who, bytes: u64, millis: &[u64]) -> Entry {
        let samples = millis.iter().map(|millis| Duration::from_millis(*millis)).collect();
        let (first, error, peak) = (Duration::ZERO, 0.0, Some(bytes));
        Entry { who, first, error, bytes, peak, samples }
    }

    #[test]
    fn goals_compare_medians_with_the_faster_way() {
        let candle = entry(Who::Candle(Way::Matmul), 200, &[30, 90, 10]);
        let flash = entry(Who::Candle(Way::Flash), 200, &[20, 24]);
        let mut report = Report::new(2);
        for (context, ours) in [(4096, [11, 11]), (512, [44, 44])] {
            let case = Case { shape: WIDE, batch: 16, context, formats: Vec::new() };
            let mut measured = Measured::new(&case);
            let ours = entry(Who::Ours(0), 101, &ours);
            measured.lines.push(Line::new(&case, KvFormat::Bf16, &ours, [&candle, &flash]));
            measured.refuse(case.name(KvFormat::F32), "too large".to_owned());
            assert!(measured.text().contains("not timed: too large"));
            report.cases.push(measured);
        }
        let goals = report.goals();
        for expected in [
            "slower in 1 of 2, at least 0.50x (wide/b16/c512/bf16)",
            "at least 2.00x (wide/b16/c4096/bf16)",
            "at most 0.505 (",
        ] {
            assert!(goals.contains(expected), "{goals}");
        }
    }
}
