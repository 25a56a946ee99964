//! The output of `kv load`, as JSON and as text.
use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

use super::drive::{Measured, Sample};
use super::measure::{Percentiles, milliseconds};
use crate::chart::{Axis, Chart, Mark, Series};
use crate::num::{to_f64, to_u64};
use crate::output;

/// Requests whose 99th percentile is later than this, in milliseconds, were not the given load.
const LATE_MS: f64 = 10.0;

/// A kind of failure.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct FailureLine {
    /// The status of the answer, or connection, timeout, stream, protocol.
    pub(super) kind: String,
    pub(super) count: u64,
    /// The message of the first failure.
    pub(super) message: String,
}

/// The object that `--json` prints.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Report {
    url: String,
    model: String,
    sent: u64,
    pub(super) succeeded: u64,
    pub(super) failed: u64,
    /// Requests of the workload that had no end when Ctrl-C was pressed.
    unfinished: u64,
    pub(super) failures: Vec<FailureLine>,
    /// Succeeded requests whose answers do not say their tokens, which are counted nowhere below.
    #[serde(skip_serializing_if = "is_0")]
    without_usage: u64,
    /// From the first request to the end of the last one.
    seconds: f64,
    /// Succeeded requests.
    requests_per_second: f64,
    prompt_tokens: u64,
    cached_tokens: u64,
    completion_tokens: u64,
    /// Cached tokens of all prompt tokens.
    hit_ratio: f64,
    prompt_tokens_per_second: f64,
    completion_tokens_per_second: f64,
    /// Most requests at once.
    running_max: u64,
    time_to_first_token_ms: Option<Percentiles>,
    time_between_tokens_ms: Option<Percentiles>,
    request_ms: Option<Percentiles>,
    /// Delay after its due time with which a request was sent.
    lateness_ms: Option<Percentiles>,
    is_late: bool,
}

impl Report {
    /// Sums up the measurements of the planned requests.
    pub(super) fn new(url: String, model: String, planned: usize, measured: &Measured) -> Self {
        let Measured { samples, gaps, elapsed } = measured;
        let succeeded = || samples.iter().filter(|sample| sample.result.is_ok());
        let usages = || samples.iter().filter_map(|sample| sample.result.as_ref().ok()?.as_ref());
        let seconds = elapsed.as_secs_f64();
        let per_second = |count: u64| to_f64(count) / seconds.max(1e-9);
        let prompt_tokens = usages().map(|usage| usage.prompt).sum();
        let cached_tokens = usages().map(|usage| usage.cached).sum();
        let completion_tokens = usages().map(|usage| usage.completion).sum();
        let lateness = Percentiles::of(samples.iter().map(|sample| sample.late).collect());
        let (sent, good) = (to_u64(samples.len()), to_u64(succeeded().count()));
        Self {
            url,
            model,
            sent,
            succeeded: good,
            failed: sent - good,
            unfinished: to_u64(planned) - sent,
            failures: failures(samples),
            without_usage: good.saturating_sub(to_u64(usages().count())),
            seconds,
            requests_per_second: per_second(good),
            prompt_tokens,
            cached_tokens,
            completion_tokens,
            hit_ratio: to_f64(cached_tokens) / to_f64(prompt_tokens.max(1)),
            prompt_tokens_per_second: per_second(prompt_tokens),
            completion_tokens_per_second: per_second(completion_tokens),
            running_max: running_max(samples),
            time_to_first_token_ms: Percentiles::of(
                succeeded().filter_map(|sample| sample.first).collect(),
            ),
            time_between_tokens_ms: Percentiles::of(gaps.clone()),
            request_ms: Percentiles::of(succeeded().map(|sample| sample.whole).collect()),
            lateness_ms: lateness,
            is_late: lateness.is_some_and(|lateness| lateness.p99 > LATE_MS),
        }
    }

    /// Formats the report as text.
    pub(super) fn show(&self) -> String {
        let Self { url, model, sent, succeeded, failed, seconds, .. } = self;
        let mut lines = vec![format!(
            "{model} on {url}: {sent} requests sent, {succeeded} succeeded, {failed} failed, \
             {seconds:.1} s, {} at once at most",
            self.running_max
        )];
        if self.unfinished > 0 {
            lines.push(format!("stopped: {} requests have no end", self.unfinished));
        }
        lines.extend(self.failures.iter().map(|FailureLine { kind, count, message }| {
            format!("failed, {kind}: {count}, the first one: {message}")
        }));
        if self.without_usage > 0 {
            let count = self.without_usage;
            lines.push(format!("no usage in {count} answers: their tokens are not counted"));
        }
        lines.push(format!(
            "{:.1} requests/s, {:.0} generated tokens/s, {:.0} prompt tokens/s; {} of {} prompt \
             tokens were cached, {:.1} %\n",
            self.requests_per_second,
            self.completion_tokens_per_second,
            self.prompt_tokens_per_second,
            self.cached_tokens,
            self.prompt_tokens,
            self.hit_ratio * 100.0
        ));
        let heading = ["ms", "p50", "p90", "p99", "max"].map(str::to_owned).to_vec();
        let rows = [
            ("time to first token", self.time_to_first_token_ms),
            ("time between tokens", self.time_between_tokens_ms),
            ("whole request", self.request_ms),
            ("lateness", self.lateness_ms),
        ];
        let rows = rows.into_iter().filter_map(|(name, percentiles)| {
            let Percentiles { p50, p90, p99, max } = percentiles?;
            let cells = [p50, p90, p99, max].map(|ms| format!("{ms:.1}"));
            Some(std::iter::once(name.to_owned()).chain(cells).collect())
        });
        lines.push(output::table(&std::iter::once(heading).chain(rows).collect::<Vec<_>>()));
        if self.is_late {
            lines.push(
                "Requests were sent late, so the load was not the given one: this machine or \
                 --connections held them back.\n"
                    .to_owned(),
            );
        }
        lines.join("\n")
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
fn is_0(count: &u64) -> bool {
    *count == 0
}

/// Counts failures by their kind, the most frequent one first.
fn failures(samples: &[Sample]) -> Vec<FailureLine> {
    let mut kinds: BTreeMap<String, FailureLine> = BTreeMap::new();
    for failure in samples.iter().filter_map(|sample| sample.result.as_ref().err()) {
        let kind = failure.kind();
        let line = kinds.entry(kind).or_insert_with_key(|kind| {
            let message = crate::failure::one_line(&failure.to_string());
            FailureLine { kind: kind.clone(), count: 0, message }
        });
        line.count += 1;
    }
    let mut lines: Vec<_> = kinds.into_values().collect();
    lines.sort_by_key(|line| std::cmp::Reverse(line.count));
    lines
}

/// Returns how many requests ran at once at most.
fn running_max(samples: &[Sample]) -> u64 {
    // At equal times an end comes first, so that every request takes some time.
    let end = |sample: &Sample| sample.at + sample.whole.max(Duration::from_nanos(1));
    let mut changes: Vec<(Duration, bool)> =
        samples.iter().flat_map(|sample| [(sample.at, true), (end(sample), false)]).collect();
    changes.sort_unstable();
    let (mut running, mut most) = (0_u64, 0);
    for (_, is_begin) in changes {
        running = if is_begin { running + 1 } else { running - 1 };
        most = running.max(most);
    }
    most
}

/// Charts time to first token over the load, and the distributions of times.
pub(super) fn charts(measured: &Measured) -> [Chart; 2] {
    let samples = || measured.samples.iter();
    let good = || samples().filter(|sample| sample.result.is_ok());
    let first = |sample: &Sample| Some((sample.at.as_secs_f64(), milliseconds(sample.first?)));
    let failed = samples().filter(|sample| sample.result.is_err());
    let failed = failed.map(|sample| (sample.at.as_secs_f64(), 0.0));
    let curve = |name, times| Series::new(name, Mark::Line, cumulative(times));
    let over_time = Chart {
        title: "Time to first token",
        x: Axis::Linear("sent at, s"),
        y: Axis::Linear("ms"),
        series: vec![
            Series::new("succeeded", Mark::Points, good().filter_map(first).collect()),
            Series::new("failed", Mark::Crosses, failed.collect()),
        ],
    };
    let distributions = Chart {
        title: "Share of times up to a length",
        x: Axis::Log("ms"),
        y: Axis::Linear("share"),
        series: vec![
            curve("time to first token", good().filter_map(|sample| sample.first).collect()),
            curve("time between tokens", measured.gaps.clone()),
            curve("whole request", good().map(|sample| sample.whole).collect()),
        ],
    };
    [over_time, distributions]
}

/// Returns points of the distribution: milliseconds, and the share of times up to there.
fn cumulative(mut times: Vec<Duration>) -> Vec<(f64, f64)> {
    times.sort_unstable();
    let count = to_f64(to_u64(times.len()));
    let ranks = times.iter().zip(1_u64..);
    ranks.map(|(time, rank)| (milliseconds(*time), to_f64(rank) / count)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::client::Failure;
    use super::super::wire::Usage;
    use super::*;
    use crate::chart::svg;

    /// Makes a sample of the time at which it was sent, its time to first token and its whole time.
    fn sample(at: u64, first: u64, whole: u64) -> Sample {
        let ms = Duration::from_millis;
        Sample {
            at: ms(at),
            late: ms(1),
            first: Some(ms(first)),
            whole: ms(whole),
            result: Ok(Some(Usage { prompt: 100, cached: 25, completion: 10 })),
        }
    }

    fn failed(at: u64, failure: Failure) -> Sample {
        Sample { first: None, result: Err(failure), ..sample(at, 0, 5) }
    }

    fn status(status: u16, message: &str) -> Failure {
        Failure::Status { status, message: message.to_owned() }
    }

    fn report(samples: Vec<Sample>) -> Report {
        let gaps = vec![Duration::from_millis(3); 18];
        let measured = Measured { samples, gaps, elapsed: Duration::from_secs(2) };
        Report::new("http://a".to_owned(), "m".to_owned(), 7, &measured)
    }

    #[test]
    fn everything_is_counted() {
        let report = report(vec![
            sample(0, 20, 100),
            sample(50, 40, 100),
            failed(60, Failure::Timeout(Duration::from_secs(1))),
            failed(70, status(429, "full")),
            failed(80, status(429, "still full")),
        ]);
        assert_eq!((report.sent, report.succeeded, report.failed, report.unfinished), (5, 2, 3, 2));
        let line = |kind: &str, count, message: &str| {
            let (kind, message) = (kind.to_owned(), message.to_owned());
            FailureLine { kind, count, message }
        };
        let expected = [line("429", 2, "full"), line("timeout", 1, "no end after 1s")];
        assert_eq!(report.failures, expected);
        assert_eq!((report.prompt_tokens, report.cached_tokens), (200, 50));
        assert_eq!(report.completion_tokens, 20);
        let rates = [report.hit_ratio, report.requests_per_second].map(f64::to_bits);
        assert_eq!(rates, [0.25, 1.0].map(f64::to_bits));
        assert_eq!(report.running_max, 3, "the third one ends before the fourth begins");
        let first = report.time_to_first_token_ms.expect("two");
        assert_eq!((first.p50, first.max), (20.0, 40.0), "of those that succeeded");
        let text = report.show();
        for words in ["5 requests sent, 2 succeeded, 3 failed", "failed, 429: 2", "25.0 %"] {
            assert!(text.contains(words), "{words}: {text}");
        }
        assert!(!report.is_late && !text.contains("sent late"), "{text}");
    }

    #[test]
    fn an_answer_without_usage_has_succeeded() {
        let unknown = Sample { result: Ok(None), ..sample(0, 20, 100) };
        let report = report(vec![sample(0, 20, 100), unknown]);
        assert_eq!((report.succeeded, report.failed, report.without_usage), (2, 0, 1));
        assert_eq!((report.prompt_tokens, report.completion_tokens), (100, 10));
        assert!(report.show().contains("no usage in 1 answers"), "{}", report.show());
    }

    #[test]
    fn a_late_load_is_said() {
        let late = Sample { late: Duration::from_millis(11), ..sample(0, 1, 2) };
        let report = report(vec![late]);
        assert!(report.is_late && report.show().contains("sent late"));
    }

    #[test]
    fn a_load_without_success_has_no_percentiles() {
        let measured = Measured { samples: vec![failed(0, status(500, "no"))], ..<_>::default() };
        let report = Report::new(String::new(), String::new(), 1, &measured);
        assert_eq!((report.time_to_first_token_ms, report.time_between_tokens_ms), (None, None));
        assert_eq!((report.requests_per_second, report.hit_ratio), (0.0, 0.0));
        assert!(report.show().contains("failed, 500: 1"));
    }

    #[test]
    fn requests_that_take_no_time_run_one_by_one() {
        let samples = [sample(0, 0, 0), sample(5, 0, 0), sample(9, 0, 0)];
        assert_eq!(running_max(&samples), 1);
    }

    #[test]
    fn every_request_is_a_mark_and_every_time_a_curve() {
        let late = failed(1500, Failure::Timeout(Duration::from_secs(1)));
        let samples = vec![sample(0, 5, 9), sample(1000, 7, 20), late, sample(2000, 6, 8)];
        let gaps = vec![Duration::from_millis(1), Duration::ZERO];
        let charts = charts(&Measured { samples, gaps, elapsed: Duration::from_secs(3) });
        let all = || charts.iter().flat_map(|chart| &chart.series);
        let crosses: Vec<_> = all().filter(|series| series.mark == Mark::Crosses).collect();
        assert_eq!(crosses.iter().map(|series| series.points.len()).sum::<usize>(), 1);
        let svg = svg(&charts).expect("a chart");
        assert_eq!(svg.matches("<circle ").count(), 3, "{svg}");
        for words in ["time to first token", "time between tokens", "whole request", "failed"] {
            assert!(svg.contains(&format!("\n{words}\n")), "{words}: {svg}");
        }
    }

    #[test]
    fn a_load_without_success_has_charts() {
        assert!(!svg(&charts(&Measured::default())).expect("a chart").contains("NaN"));
        let ms = Duration::from_millis;
        assert_eq!(cumulative(vec![ms(4), ms(0)]), [(0.0, 0.5), (4.0, 1.0)]);
    }
}
