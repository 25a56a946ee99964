//! Metrics for Prometheus.
use std::time::Duration;

use anyhow::Context;
use kv::backend::AnyBackend;
use kv::engine::Finish;
use kv::{KvCache, Stats};
use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};

use super::engine::Refused;
use super::vllm_metrics::{self, VllmMetrics};
use super::watch::FAILURES;
use crate::num::{to_f64, to_u64};

/// The metrics of one server.
#[derive(Debug)]
pub(super) struct Metrics {
    blocks: [Gauge; 3],
    sequences: [Gauge; 2],
    /// Prompts that are accepted, find the queue full, come too late, or never fit.
    prompts: [Counter; 4],
    /// Texts that stop, reach their length, or are cancelled.
    texts: [Counter; 3],
    prompt_tokens: Counter,
    hit_tokens: [Counter; 4],
    generated_tokens: Counter,
    evictions: Counter,
    /// Tokens without a state, and evicted snapshots.
    states: [Counter; 2],
    preemptions: Counter,
    step_seconds: Histogram,
    first_token_seconds: Histogram,
    /// What routers read.
    vllm: VllmMetrics,
}

/// Upper bounds of the histograms, in seconds.
const STEP_SECONDS: [f64; 11] = [1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0];
const FIRST_TOKEN_SECONDS: [f64; 11] =
    [5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0];

const STEP: &str = "kv_step_seconds";
const STATELESS: &str = "kv_stateless_tokens_total";
const SNAPSHOT_EVICTIONS: &str = "kv_snapshot_evictions_total";
const FIRST_TOKEN: &str = "kv_time_to_first_token_seconds";

/// Installs the recorder of this process; returns the renderer of its text.
pub(super) fn install(model: &str) -> anyhow::Result<(Metrics, PrometheusHandle)> {
    let builder = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Full(STEP.to_owned()), &STEP_SECONDS)
        .and_then(|builder| {
            let [own, vllm] =
                [FIRST_TOKEN, vllm_metrics::FIRST_TOKEN].map(|name| Matcher::Full(name.to_owned()));
            let builder = builder.set_buckets_for_metric(own, &FIRST_TOKEN_SECONDS)?;
            builder.set_buckets_for_metric(vllm, &FIRST_TOKEN_SECONDS)
        });
    let recorder = builder.context("the bounds of a histogram")?.build_recorder();
    let handle = recorder.handle();
    metrics::set_global_recorder(recorder).context("a second recorder of metrics")?;
    describe();
    let metrics = Metrics {
        blocks: ["used", "cached", "total"].map(|state| gauge!(format!("kv_blocks_{state}"))),
        sequences: ["running", "waiting"].map(|state| gauge!(format!("kv_requests_{state}"))),
        prompts: ["accepted", "queue_full", "stopping", "too_large"]
            .map(|outcome| counter!("kv_requests_total", "outcome" => outcome)),
        texts: ["stop", "length", "cancelled"]
            .map(|finish| counter!("kv_texts_total", "finish" => finish)),
        prompt_tokens: counter!("kv_prompt_tokens_total"),
        hit_tokens: ["device", "host", "disk", "store"]
            .map(|tier| counter!("kv_hit_tokens_total", "tier" => tier)),
        generated_tokens: counter!("kv_generated_tokens_total"),
        evictions: counter!("kv_evictions_total"),
        states: [STATELESS, SNAPSHOT_EVICTIONS].map(|name| counter!(name)),
        preemptions: counter!("kv_preemptions_total"),
        step_seconds: histogram!(STEP),
        first_token_seconds: histogram!(FIRST_TOKEN),
        vllm: VllmMetrics::new(model),
    };
    Ok((metrics, handle))
}

fn describe() {
    use metrics::{describe_counter, describe_gauge, describe_histogram};
    describe_gauge!("kv_blocks_used", "Blocks that sequences hold.");
    describe_gauge!("kv_blocks_cached", "Free blocks whose content can be reused.");
    describe_gauge!("kv_blocks_total", "Blocks of the pool.");
    describe_gauge!("kv_requests_running", "Texts that run.");
    describe_gauge!("kv_requests_waiting", "Texts that wait.");
    describe_counter!(
        "kv_prompt_tokens_total",
        "Prompt tokens that were looked up, those of resumed texts too."
    );
    describe_counter!("kv_hit_tokens_total", "Prompt tokens that were reused, by tier.");
    describe_counter!("kv_generated_tokens_total", "Generated tokens.");
    describe_counter!("kv_evictions_total", "Evicted blocks.");
    describe_counter!(
        STATELESS,
        "Prompt tokens whose rows were cached and were computed again for lack of a state."
    );
    describe_counter!(SNAPSHOT_EVICTIONS, "Evicted snapshots of recurrent states.");
    describe_counter!("kv_preemptions_total", "Preempted sequences.");
    describe_counter!(FAILURES, "Failures of tiers, by store and cause; the texts are right.");
    describe_counter!("kv_requests_total", "Prompts by what became of them at arrival.");
    describe_counter!(
        "kv_texts_total",
        "Texts by their end: at an end of text or stop string, at their length, or cancelled."
    );
    describe_histogram!(STEP, "Seconds of a step.");
    describe_histogram!(FIRST_TOKEN, "Seconds from a prompt's arrival to its first token.");
}

impl Metrics {
    pub(super) fn note_step(&self, took: Duration) {
        self.step_seconds.record(took.as_secs_f64());
    }

    pub(super) fn note_first_token(&self, took: Duration) {
        self.first_token_seconds.record(took.as_secs_f64());
        self.vllm.note_first_token(took);
    }

    pub(super) fn note_token(&self) {
        self.generated_tokens.increment(1);
        self.vllm.note_token();
    }

    pub(super) fn note_request(&self, answer: &Result<(), Refused>) {
        let [accepted, ..] = &self.prompts;
        match answer {
            Ok(()) => accepted.increment(1),
            Err(refused) => self.note_refused(refused),
        }
    }

    pub(super) fn note_refused(&self, refused: &Refused) {
        let [_, queue_full, stopping, too_large] = &self.prompts;
        let counter = match refused {
            Refused::QueueFull { .. } => queue_full,
            Refused::Stopping => stopping,
            Refused::TooLong { .. }
            | Refused::TooManyBytes { .. }
            | Refused::TooManyTexts { .. }
            | Refused::Never(_) => too_large,
        };
        counter.increment(1);
    }

    pub(super) fn note_end(&self, finish: Finish) {
        let [stop, length, cancelled] = &self.texts;
        let counter = match finish {
            Finish::Stop => stop,
            Finish::Length | Finish::Context => length,
            Finish::Cancelled => cancelled,
        };
        counter.increment(1);
        self.vllm.note_end(finish);
    }

    /// Publishes the size of the pool.
    pub(super) fn note_pool(&self, block_size: u32, blocks: u32) {
        self.vllm.note_pool(block_size, blocks);
    }

    /// Publishes the texts that wait, and those that run.
    pub(super) fn note_queued(&self, (waiting, running): (usize, usize)) {
        let counts = [running, waiting].map(|texts| to_f64(to_u64(texts)));
        self.sequences.iter().zip(counts).for_each(|(gauge, count)| gauge.set(count));
        self.vllm.note_queued(counts);
    }

    /// Publishes the cache's own counts.
    pub(super) fn note_cache(&self, cache: &KvCache<AnyBackend>) {
        let (usage, stats) = (cache.state().usage(), cache.state().stats());
        let blocks = [usage.blocks_used, usage.blocks_cached, usage.blocks_total];
        for (gauge, blocks) in self.blocks.iter().zip(blocks) {
            gauge.set(f64::from(blocks));
        }
        self.prompt_tokens.absolute(stats.query_tokens + stats.resumed_query_tokens);
        for (counter, tokens) in self.hit_tokens.iter().zip(hits(&stats)) {
            counter.absolute(tokens);
        }
        self.evictions.absolute(stats.evictions);
        let [stateless, evicted] = &self.states;
        stateless.absolute(stats.stateless_tokens);
        evicted.absolute(stats.evicted_snapshots);
        self.preemptions.absolute(stats.preemptions);
        self.vllm.note_cache(&usage, &stats);
    }
}

/// Returns the reused tokens that were on the device, and those from host memory, disk and stores.
/// The counts of lower tiers include the prompts of resumed texts. A token whose groups came from
/// different tiers counts for each of them.
fn hits(stats: &Stats) -> [u64; 4] {
    let [host, disk, store] =
        [stats.host_hit_tokens, stats.disk_hit_tokens, stats.store_hit_tokens];
    let all = stats.hit_tokens + stats.resumed_hit_tokens;
    [all.saturating_sub(host + disk + store), host, disk, store]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hits_of_resumed_texts_are_hits_too() {
        let mut stats = Stats::default();
        (stats.hit_tokens, stats.resumed_hit_tokens) = (16, 40);
        (stats.host_hit_tokens, stats.disk_hit_tokens) = (32, 8);
        assert_eq!(hits(&stats), [16, 32, 8, 0]);
    }
}
