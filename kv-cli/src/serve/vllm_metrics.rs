//! The metrics that routers read, under the names of vLLM.
use std::time::Duration;

use kv::engine::Finish;
use kv::{Stats, Usage};
use metrics::{Counter, Gauge, Histogram, Label, counter, gauge, histogram};

/// The histogram of the time to the first token.
pub(super) const FIRST_TOKEN: &str = "vllm:time_to_first_token_seconds";

const RUNNING: &str = "vllm:num_requests_running";
const WAITING: &str = "vllm:num_requests_waiting";
const USAGE: &str = "vllm:kv_cache_usage_perc";
const CONFIG: &str = "vllm:cache_config_info";
const ADAPTERS: &str = "vllm:lora_requests_info";
const QUERIES: &str = "vllm:prefix_cache_queries_total";
const HITS: &str = "vllm:prefix_cache_hits_total";
const PROMPTS: &str = "vllm:prompt_tokens_total";
const GENERATED: &str = "vllm:generation_tokens_total";
const SUCCESS: &str = "vllm:request_success_total";

/// The metrics of one server, with the labels `model_name` and `engine`.
#[derive(Debug)]
pub(super) struct VllmMetrics {
    labels: Vec<Label>,
    sequences: [Gauge; 2],
    usage: Gauge,
    /// Tokens that were looked up, and those that were found.
    prefix: [Counter; 2],
    prompt_tokens: Counter,
    generated_tokens: Counter,
    /// Texts that stop, reach their length, or are cancelled.
    texts: [Counter; 3],
    first_token: Histogram,
}

impl VllmMetrics {
    /// Registers the metrics with the recorder of this process.
    pub(super) fn new(model: &str) -> Self {
        describe();
        let labels = vec![Label::new("model_name", model.to_owned()), Label::new("engine", "0")];
        let own = || labels.clone();
        let with = |name: &'static str, value: &'static str| {
            labels.iter().cloned().chain([Label::new(name, value)]).collect::<Vec<_>>()
        };
        let finish = ["stop", "length", "abort"].map(|end| with("finished_reason", end));
        // There are no adapters: a router that counts them reads 0 of 0.
        gauge!(ADAPTERS, with("max_lora", "0")).set(0.0);
        Self {
            sequences: [gauge!(RUNNING, own()), gauge!(WAITING, own())],
            usage: gauge!(USAGE, own()),
            prefix: [counter!(QUERIES, own()), counter!(HITS, own())],
            prompt_tokens: counter!(PROMPTS, own()),
            generated_tokens: counter!(GENERATED, own()),
            texts: finish.map(|labels| counter!(SUCCESS, labels)),
            first_token: histogram!(FIRST_TOKEN, own()),
            labels,
        }
    }

    /// Publishes the size of the pool.
    pub(super) fn note_pool(&self, block_size: u32, blocks: u32) {
        let mut labels = self.labels.clone();
        labels.push(Label::new("block_size", block_size.to_string()));
        labels.push(Label::new("num_gpu_blocks", blocks.to_string()));
        gauge!(CONFIG, labels).set(1.0);
    }

    pub(super) fn note_first_token(&self, took: Duration) {
        self.first_token.record(took.as_secs_f64());
    }

    pub(super) fn note_token(&self) {
        self.generated_tokens.increment(1);
    }

    pub(super) fn note_end(&self, finish: Finish) {
        let [stop, length, abort] = &self.texts;
        let counter = match finish {
            Finish::Stop => stop,
            Finish::Length | Finish::Context => length,
            Finish::Cancelled => abort,
        };
        counter.increment(1);
    }

    /// Publishes the texts that run, and those that wait.
    pub(super) fn note_queued(&self, counts: [f64; 2]) {
        self.sequences.iter().zip(counts).for_each(|(gauge, count)| gauge.set(count));
    }

    /// Publishes the cache's own counts.
    pub(super) fn note_cache(&self, usage: &Usage, stats: &Stats) {
        self.usage.set(f64::from(usage.blocks_used) / f64::from(usage.blocks_total.max(1)));
        let [queries, hits] = &self.prefix;
        queries.absolute(stats.query_tokens + stats.resumed_query_tokens);
        hits.absolute(stats.hit_tokens + stats.resumed_hit_tokens);
        self.prompt_tokens.absolute(stats.query_tokens);
    }
}

fn describe() {
    use metrics::{describe_counter, describe_gauge, describe_histogram};
    describe_gauge!(RUNNING, "Texts that run.");
    describe_gauge!(WAITING, "Texts that wait.");
    describe_gauge!(USAGE, "Blocks that sequences hold, of all: from 0 to 1.");
    describe_gauge!(CONFIG, "The pool: tokens of a block, and blocks.");
    describe_gauge!(ADAPTERS, "Adapters: none.");
    describe_counter!(QUERIES, "Prompt tokens that were looked up.");
    describe_counter!(HITS, "Prompt tokens that were reused.");
    describe_counter!(PROMPTS, "Tokens of prompts.");
    describe_counter!(GENERATED, "Generated tokens.");
    describe_counter!(SUCCESS, "Texts by their end.");
    describe_histogram!(FIRST_TOKEN, "Seconds from a prompt's arrival to its first token.");
}
