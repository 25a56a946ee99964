//! Llama and models of its shape: `--prompt TEXT` continues one text, `--requests FILE` serves a
//! batch of them.
pub(crate) mod common;
pub(crate) mod model;
pub(crate) mod serve;

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use candle_core::Tensor;
use candle_transformers::models::llama::LlamaConfig;
use clap::Parser;
use common::{Folder, Geometry, Options};
use kv_candle::CandleStep;
use model::Llama;

/// Continues text with a Llama, over a cache of kv.
#[derive(Debug, Parser)]
pub(crate) struct Arguments {
    #[command(flatten)]
    options: Options,

    /// File with one prompt a line, all of which run at once
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    requests: Option<PathBuf>,

    /// Text before each request, on a line of its own; it is computed once
    #[arg(long, value_name = "TEXT", requires = "requests", allow_hyphen_values = true)]
    system: Option<String>,

    /// Sequences that run at once
    #[arg(long, value_name = "N", default_value_t = 64, requires = "requests")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    max_batch: u32,

    /// Print to standard error how much was reused
    #[arg(long, requires = "requests")]
    stats: bool,
}

fn main() -> ExitCode {
    common::main(run)
}

/// Runs the example and returns its text.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<String> {
    let folder = Folder::open(&arguments.options.model)?;
    let config = folder.config::<LlamaConfig>()?.into_config(false);
    let head_dim = config.hidden_size.checked_div(config.num_attention_heads);
    let geometry = Geometry {
        kv_heads: config.num_key_value_heads,
        head_dim: head_dim.context("num_attention_heads is 0")?,
        layers: config.num_hidden_layers,
    };
    let model = Llama::load(folder.weights()?, &config)?;
    let forward = |ids: &Tensor, step: &CandleStep<'_>| model.forward(ids, step);
    let Some(file) = &arguments.requests else {
        return common::continue_prompt(&arguments.options, &folder, &geometry, forward);
    };
    let text = fs::read_to_string(file).with_context(|| file.display().to_string())?;
    let requests: Vec<_> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    answer(arguments, &folder, &geometry, forward, &requests)
}

/// Continues all requests. Returns each with its text, in their order.
#[expect(clippy::print_stderr, reason = "what --stats is for")]
fn answer(
    arguments: &Arguments,
    folder: &Folder,
    geometry: &Geometry,
    model: impl common::Model,
    requests: &[&str],
) -> anyhow::Result<String> {
    let with_system = |request: &&str| match &arguments.system {
        Some(system) => format!("{system}\n{request}"),
        None => (*request).to_owned(),
    };
    let prompts = requests.iter().map(|request| folder.encode(&with_system(request)));
    let prompts = prompts.collect::<anyhow::Result<Vec<_>>>()?;
    let limits = folder.limits(arguments.options.max_new_tokens);
    let longest = prompts.iter().map(|prompt| limits.longest(prompt)).max();
    let longest = longest.context("there are no requests")?;
    let batch = arguments.max_batch.min(requests.len().try_into()?);
    let mut cache = common::open_cache(geometry, arguments.options.format, batch, longest)?;
    let served = serve::serve(&mut cache, &model, &prompts, &limits, batch.try_into()?)?;
    if arguments.stats {
        eprintln!(
            "{} requests in {} steps, at most {} at once; {} of {} prompt tokens reused",
            requests.len(),
            served.steps,
            served.batch,
            served.reused_tokens,
            served.prompt_tokens,
        );
    }
    let mut texts = Vec::new();
    for ((request, prompt), new) in requests.iter().zip(&prompts).zip(&served.new) {
        texts.push(format!("{request}{}\n", folder.text_after(prompt, new)?));
    }
    Ok(texts.join("\n"))
}
