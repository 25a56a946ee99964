//! `kv load`: an open-loop load on a server with OpenAI's API, and how long its answers take.
//!
//! Open loop: when a request is sent depends on the workload alone. A server that is too slow gets
//! more and more requests at once, as it would from people, and the times say so.
mod address;
mod client;
mod drive;
mod measure;
mod report;
mod sse;
mod tokens;
mod wire;
mod workload;

use std::sync::Arc;

use anyhow::{Context, bail};
use tokio::runtime::Builder;

pub(crate) use self::address::Address;
pub(crate) use self::workload::{Arrivals, Synthetic, TraceOptions, Vocabulary};
use crate::args::LoadArgs;
use crate::num::{to_u64, to_usize};
use crate::{chart, output, progress};
use client::{Client, ClientOptions};
use drive::Measured;
use report::Report;
use workload::Workload;

pub(crate) fn run(args: &LoadArgs) -> anyhow::Result<()> {
    if let Some(path) = &args.plot {
        output::check_writable(path)?;
    }
    let workload = match &args.trace {
        Some(path) => Workload::of_trace(path, &args.trace_options(), args.vocabulary())?,
        None => Workload::synthetic(&args.synthetic(), args.vocabulary())?,
    };
    let planned = workload.planned().len();
    let runtime = Builder::new_multi_thread()
        .thread_name("load")
        .enable_all()
        .build()
        .context("start of the threads for requests")?;
    let loaded = runtime.block_on(load(args, workload));
    // After Ctrl-C there are requests without an end.
    runtime.shutdown_background();
    let (model, measured) = loaded?;
    let report = Report::new(args.url.to_string(), model, planned, &measured);
    if args.json {
        output::json(&report)?;
    } else {
        output::text(&report.show())?;
    }
    if let Some(path) = &args.plot {
        chart::write(path, &report::charts(&measured))?;
    }
    match report.failures.first() {
        Some(most) if report.succeeded == 0 => {
            bail!("no request succeeded: {}: {}", most.kind, most.message)
        }
        _ => Ok(()),
    }
}

/// Requests the model, then sends the workload; returns the model and the measurements.
async fn load(args: &LoadArgs, workload: Workload) -> anyhow::Result<(String, Measured)> {
    let options = ClientOptions {
        api_key: args.api_key.clone(),
        cache_salt: args.cache_salt.clone(),
        timeout: args.timeout,
    };
    let client = Arc::new(Client::new(&args.url, options)?);
    let model = match &args.model {
        Some(model) => {
            client.check_reachable().await.with_context(|| args.url.to_string())?;
            model.clone()
        }
        None => client.model().await.with_context(|| args.url.to_string())?,
    };
    let bar = progress::requests(to_u64(workload.planned().len()));
    let connections = args.connections.map(to_usize);
    let name = Arc::from(model.as_str());
    let measured = drive::drive(Arc::new(workload), client, name, connections, &bar).await;
    bar.finish_and_clear();
    Ok((model, measured?))
}
