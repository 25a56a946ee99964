//! The results, as text and as JSON.
use std::fmt::Write as _;
use std::time::Duration;

use kv_bench::chunks::Chunks;
use serde::Serialize;

use super::{Contender, Options, THREADS};

/// One round of one contender.
#[derive(Debug)]
pub(super) struct Sample {
    pub(super) write: Duration,
    pub(super) read: Duration,
    pub(super) write_cpu: Duration,
    pub(super) read_cpu: Duration,
}

/// All contenders, ours first.
#[derive(Serialize)]
pub(crate) struct Report {
    dir: String,
    threads: u32,
    chunk_bytes: u64,
    /// Bytes of a pass.
    bytes: u64,
    rounds: u32,
    contenders: Vec<Line>,
}

#[derive(Serialize)]
struct Line {
    name: &'static str,
    note: &'static str,
    #[serde(flatten)]
    figures: Figures,
    #[serde(skip)]
    samples: Vec<Sample>,
}

/// Medians of a contender.
#[derive(Debug, Default, Clone, Copy, PartialEq, Serialize)]
struct Figures {
    write_gib_s: f64,
    read_gib_s: f64,
    /// Our rate over the contender's: above 1, ours is faster.
    write_ratio: f64,
    read_ratio: f64,
    /// CPU time of this process.
    write_cpu_s_per_gib: f64,
    read_cpu_s_per_gib: f64,
}

impl Report {
    pub(super) fn new(options: &Options, chunks: &Chunks, contenders: &[Contender]) -> Self {
        let line = |contender: &Contender| Line {
            name: contender.name,
            note: contender.note,
            figures: Figures::default(),
            samples: Vec::new(),
        };
        let chunk_bytes = chunks.chunk_bytes();
        Self {
            dir: options.dir.display().to_string(),
            threads: THREADS,
            chunk_bytes,
            bytes: chunk_bytes * u64::try_from(chunks.count()).unwrap_or(u64::MAX),
            rounds: options.rounds,
            contenders: contenders.iter().map(line).collect(),
        }
    }

    /// Adds a round of contender `at`.
    pub(super) fn push(&mut self, at: usize, sample: Sample) {
        if let Some(line) = self.contenders.get_mut(at) {
            line.samples.push(sample);
        }
        let ours = self.contenders.first().map(|line| figures(&line.samples, self.bytes));
        for line in &mut self.contenders {
            let theirs = figures(&line.samples, self.bytes);
            let ours = ours.unwrap_or_default();
            line.figures = Figures {
                write_ratio: ours.write_gib_s / theirs.write_gib_s,
                read_ratio: ours.read_gib_s / theirs.read_gib_s,
                ..theirs
            };
        }
    }

    pub(crate) fn text(&self) -> String {
        let Self { dir, threads, chunk_bytes, bytes, rounds, contenders } = self;
        let mut text = format!(
            "chunks on a disk, {dir}: {bytes} bytes in chunks of {chunk_bytes}, {threads} at once, \
             medians of {rounds} rounds\n{:<24}{:>12}{:>8}{:>12}{:>8}{:>24}\n",
            "GiB/s", "write", "kv is", "read", "kv is", "CPU s/GiB, write read"
        );
        for Line { name, figures, .. } in contenders {
            let Figures { write_gib_s, read_gib_s, write_ratio, read_ratio, .. } = figures;
            let _ = writeln!(
                text,
                "{name:<24}{write_gib_s:>12.2}{write_ratio:>7.2}x{read_gib_s:>12.2}\
                 {read_ratio:>7.2}x{:>17.2}{:>7.2}",
                figures.write_cpu_s_per_gib, figures.read_cpu_s_per_gib
            );
        }
        for Line { name, note, .. } in contenders {
            let _ = writeln!(text, "{name}: {note}");
        }
        text
    }
}

/// Returns the medians of samples, without ratios.
fn figures(samples: &[Sample], bytes: u64) -> Figures {
    #[expect(clippy::cast_precision_loss, reason = "figures for people")]
    let gib = bytes as f64 / f64::from(1 << 30);
    let median = |of: fn(&Sample) -> Duration| {
        let mut times: Vec<_> = samples.iter().map(of).collect();
        times.sort();
        let at = |at: usize| times.get(at).copied().unwrap_or_default().as_secs_f64();
        f64::midpoint(at(times.len().saturating_sub(1) / 2), at(times.len() / 2))
    };
    Figures {
        write_gib_s: gib / median(|sample| sample.write),
        read_gib_s: gib / median(|sample| sample.read),
        write_ratio: 1.0,
        read_ratio: 1.0,
        write_cpu_s_per_gib: median(|sample| sample.write_cpu) / gib,
        read_cpu_s_per_gib: median(|sample| sample.read_cpu) / gib,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_medians_and_ratios_are_ours_over_theirs() {
        let chunks = Chunks::new(0).unwrap();
        let contender = |name| Contender {
            name,
            note: "",
            checks: super::super::Checks::Store,
            open: |_, _| anyhow::bail!("it is not opened"),
        };
        let options = Options::default();
        let mut report = Report::new(&options, &chunks, &[contender("a"), contender("b")]);
        report.bytes = 2 << 30;
        let seconds = |at: usize, seconds: [u64; 3], report: &mut Report| {
            for seconds in seconds {
                let [read, write] = [seconds, 2 * seconds].map(Duration::from_secs);
                report.push(at, Sample { write, read, write_cpu: read, read_cpu: write });
            }
        };
        seconds(0, [9, 1, 2], &mut report);
        seconds(1, [4, 100, 1], &mut report);
        let [a, b] = &report.contenders[..] else { panic!("two contenders") };
        let expected = |read: f64, ratio| Figures {
            write_gib_s: read / 2.0,
            read_gib_s: read,
            write_ratio: ratio,
            read_ratio: ratio,
            write_cpu_s_per_gib: 1.0 / read,
            read_cpu_s_per_gib: 2.0 / read,
        };
        assert_eq!((a.figures, b.figures), (expected(1.0, 1.0), expected(0.5, 2.0)));
    }
}
