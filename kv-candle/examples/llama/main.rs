//! Llama and models of its shape: `--prompt TEXT` continues one text, `--requests FILE` serves a
//! batch of them.
#[path = "../common/mod.rs"]
mod common;
#[rustfmt::skip]
#[allow(warnings, reason = "kept as candle-transformers has it")]
mod model;
mod serve;

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use candle_core::{DType, Device, Tensor};
use clap::Parser;
use common::{Folder, Options};
use kv_candle::CandleStep;
use kv_candle::kv::spec::CacheSpecBuilder;
use model::{Cache, Llama, LlamaConfig};

/// Continues text with a Llama, over a cache of kv.
#[derive(Debug, Parser)]
struct Arguments {
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
    common::main(|arguments: &Arguments| {
        let folder = Folder::open(&arguments.options.model)?;
        let config = folder.config::<LlamaConfig>()?.into_config(false);
        let head_dim = config.hidden_size.checked_div(config.num_attention_heads);
        let head_dim = head_dim.context("num_attention_heads is 0")?;
        let model = Llama::load(folder.weights()?, &config)?;
        let rope = Cache::new(DType::F32, &config, &Device::Cpu)?;
        let spec = common::spec(config.num_hidden_layers, config.num_key_value_heads, head_dim)?;
        let forward = |ids: &Tensor, step: &CandleStep<'_>| model.forward(ids, &rope, step);
        match &arguments.requests {
            None => common::print(&arguments.options, &folder, spec, forward),
            Some(file) => {
                let text = fs::read_to_string(file).with_context(|| file.display().to_string())?;
                let requests: Vec<_> =
                    text.lines().filter(|line| !line.trim().is_empty()).collect();
                answer(arguments, &folder, spec, forward, &requests)
            }
        }
    })
}

/// Continues all requests and prints each with its text, in their order.
#[expect(clippy::print_stdout, clippy::print_stderr, reason = "what the program is for")]
fn answer(
    arguments: &Arguments,
    folder: &Folder,
    spec: CacheSpecBuilder,
    model: impl common::Model,
    requests: &[&str],
) -> anyhow::Result<()> {
    let with_system = |request: &&str| match &arguments.system {
        Some(system) => format!("{system}\n{request}"),
        None => (*request).to_owned(),
    };
    let prompts = requests.iter().map(|request| folder.encode(&with_system(request)));
    let prompts = prompts.collect::<anyhow::Result<Vec<_>>>()?;
    let limits = folder.limits(arguments.options.max_new_tokens);
    let longest = prompts.iter().map(|prompt| limits.longest(prompt)).max().unwrap_or(1);
    let batch = arguments.max_batch.min(requests.len().try_into()?);
    let mut cache = common::open_cache(spec, arguments.options.format, batch, longest)?;
    let served = serve::serve(&mut cache, &model, &prompts, &limits, batch.try_into()?)?;
    for ((request, prompt), new) in requests.iter().zip(&prompts).zip(&served.new) {
        println!("{request}{}\n", folder.text_after(prompt, new)?);
    }
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
    Ok(())
}
