//! `kv serve`: a model over HTTP, as load on the cache.
//!
//! One thread owns the scheduler ([`engine`]); requests are read, checked and answered on two
//! others ([`http`], [`api`]). They share the immutable [`Server`].
mod answer;
mod api;
mod body;
mod chat;
mod completions;
mod engine;
mod error;
mod fields;
mod fleet;
mod http;
mod leaks;
mod metrics;
mod prepare;
mod publish;
mod request;
mod stops;
mod template;
mod text;
mod time;
mod unsupported;
mod vllm_metrics;
mod watch;

use std::net::TcpListener;
use std::sync::Arc;

use anyhow::{Context, bail};
use kv::engine::{Engine as Scheduler, Limits};
use kv::quant::Source;
use kv_runner::{CacheOptions, Layout, ModelConfig, StateOptions, Tokenizer, calibrate};
use metrics_exporter_prometheus::PrometheusHandle;
use tokio::runtime::Builder;
use tokio::sync::{Semaphore, oneshot};

use crate::args::{Paged, ServeArgs};
use crate::job::{self, BLOCK_SIZE};
use crate::loaded::Loaded;
use crate::num::to_usize;
use crate::{output, tiers};
use body::Bodies;
use engine::{Engine, EngineOptions};
use http::Signals;
use template::ChatTemplate;
use watch::TierWatch;

/// The state that all requests share.
#[derive(Debug)]
pub(crate) struct Server {
    engine: Engine,
    /// Name of the model, as requests give it.
    model: String,
    config: ModelConfig,
    tokenizer: Arc<Tokenizer>,
    /// Whether the model keeps recurrent states, so that lengths of prompts matter.
    has_states: bool,
    /// Makes prompts of chats.
    template: ChatTemplate,
    metrics: PrometheusHandle,
    /// The memory of bodies that are read.
    bodies: Bodies,
    /// Places of requests that are prepared.
    preparing: Arc<Semaphore>,
    /// What routers ask: where events are published, of each rank.
    sources: serde_json::Value,
    /// Tokens of a block.
    block_size: u32,
    /// Tokens that the cache has room for.
    capacity: u32,
    /// Seconds since 1970 at the start.
    created: u64,
}

/// Threads that read requests and write answers.
const HTTP_THREADS: usize = 2;

pub(crate) fn run(args: &ServeArgs) -> anyhow::Result<()> {
    // First, because a model may take minutes to read.
    let api_key = args.api_key()?;
    let listener = TcpListener::bind(&*args.addr.0).with_context(|| args.addr.to_string())?;
    let address = listener.local_addr().context("the address")?;
    let loaded = Loaded::open(&args.engine.model)?;
    let template = ChatTemplate::find(args, &loaded)?;
    let scheduler = open(args, &loaded)?;
    let publisher = publish::bind(&args.events, scheduler.cache().state().spec())?;
    let (metrics, handle) = metrics::install(&loaded.name)?;
    let metrics = Arc::new(metrics);
    let (engine, inbox) = Engine::new(to_usize(args.max_queue), Arc::clone(&metrics));
    let server = Arc::new(Server {
        engine,
        model: loaded.name.clone(),
        config: loaded.model.config().clone(),
        tokenizer: Arc::clone(&loaded.tokenizer),
        has_states: !scheduler.cache().state().spec().states().is_empty(),
        template,
        metrics: handle,
        bodies: Bodies::new(),
        preparing: prepare::places(),
        sources: publish::sources(&args.events, publisher.as_ref()),
        block_size: block_size(&scheduler),
        capacity: capacity(&scheduler),
        created: time::unix_time(),
    });
    let options = EngineOptions {
        context: loaded.model.config().context(),
        drain: args.drain,
        eos: loaded.model.config().eos().to_vec(),
    };
    let runtime = Builder::new_multi_thread()
        .worker_threads(HTTP_THREADS)
        .thread_name("http")
        .enable_all()
        .build()
        .context("start of the threads for requests")?;
    let signals = {
        let _inside = runtime.enter();
        Signals::register().context("handlers of signals")?
    };
    let http = http::Options::new(args, api_key);
    let (engine_ended, until_ended) = oneshot::channel();
    let requests = http::serve(listener, signals, http, Arc::clone(&server), until_ended);
    let serving = runtime.spawn(requests);
    let blocks = scheduler.cache().state().usage().blocks_total;
    metrics.note_pool(server.block_size, blocks);
    let model = &server.model;
    output::note(&format!("{model} on http://{address}, {blocks} blocks of the cache"))?;
    if let ChatTemplate::Broken(why) = &server.template {
        output::note(&format!("{why}; /v1/chat/completions is not served"))?;
    }
    let watch = TierWatch::new(tiers::store_names(&args.engine));
    let of_engine =
        engine::run((scheduler, &loaded.model), &inbox, options, (&metrics, watch, publisher));
    // It may have failed, and not been stopped.
    server.engine.stop();
    let _ = engine_ended.send(());
    let of_requests = runtime.block_on(serving).context("a thread for requests")?;
    runtime.shutdown_timeout(args.drain);
    of_engine.and(of_requests)
}

/// Returns the tokens of a block of the layers that attend to all tokens, or of the first.
fn block_size(scheduler: &Scheduler) -> u32 {
    let groups = scheduler.cache().state().spec().groups();
    let group = groups.iter().find(|group| group.window().is_none()).or_else(|| groups.first());
    group.map_or(BLOCK_SIZE, kv::spec::GroupSpec::block_size)
}

/// Returns the tokens of a sequence that has all blocks.
fn capacity(scheduler: &Scheduler) -> u32 {
    let tokens = |group: &kv::spec::GroupSpec| {
        let blocks = group.num_blocks();
        blocks * group.block_size()
    };
    scheduler.cache().state().spec().groups().iter().map(tokens).min().unwrap_or(u32::MAX)
}

fn open(args: &ServeArgs, loaded: &Loaded) -> anyhow::Result<Scheduler> {
    let events = if args.events.is_on() { publish::EVENTS } else { 0 };
    let args = &args.engine;
    let calibration = match &args.format.calibration {
        Some(Source::File(path)) => Some(calibrate::load(path, &loaded.model)?),
        Some(Source::Online) => bail!("calib=online needs a prompt: use calib=FILE"),
        None => {
            args.format.check_scales("calib=FILE")?;
            None
        }
    };
    let (block_size, num_blocks) = match args.paged {
        Some(Paged { block_size, num_blocks }) => (block_size, num_blocks),
        None => (BLOCK_SIZE, job::affordable_blocks(args, loaded, args.max_batch)?),
    };
    let options = CacheOptions {
        layout: Layout::Paged { block_size, num_blocks },
        stored: args.format.clone(),
        reuse: true,
        tiers: !args.tier.is_empty(),
        events,
        states: StateOptions::for_sequences(args.max_batch, 0),
    };
    let limits = Limits {
        max_batch: args.max_batch,
        max_step_tokens: args.max_step_tokens,
        ..loaded.model.config().limits()
    };
    let digest = if options.tiers { Some(tiers::digest(&loaded.path)?) } else { None };
    job::engine(args, loaded, (calibration.as_ref(), digest), &options, limits)
}
