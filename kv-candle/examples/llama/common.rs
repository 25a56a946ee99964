//! Parts of the example: the command line, a model's folder, and greedy decoding.
pub(crate) mod folder;
pub(crate) mod generate;

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use candle_core::{Device, Tensor};
use clap::Parser;
use clap::error::ErrorKind;
use kv_candle::kv::spec::Determinism;
use kv_candle::kv::{CacheSpec, KvFormat};
use kv_candle::{CandleCache, CandleStep};

pub(crate) use folder::Folder;
use generate::generate;

/// Options of the example.
#[derive(Debug, Clone, Parser)]
pub(crate) struct Options {
    /// Directory with config.json, model.safetensors (or its index and shards) and tokenizer.json
    #[arg(long, value_name = "DIR")]
    pub(crate) model: PathBuf,

    /// Text to continue
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "Once upon a time",
        allow_hyphen_values = true
    )]
    pub(crate) prompt: String,

    /// Tokens to generate
    #[arg(long, value_name = "N", default_value_t = 128)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_new_tokens: u32,

    /// Stored format of K and V, such as f32, bf16, int8 or l4
    #[arg(long, value_name = "NAME", default_value = "f32")]
    pub(crate) format: KvFormat,
}

/// A model whose attention is [`CandleStep::attend`]: takes the token ids of a step, `[1, t]`, and
/// returns the logits of the last token of each sequence, `[b, vocab]`.
pub(crate) trait Model: Fn(&Tensor, &CandleStep<'_>) -> candle_core::Result<Tensor> {}

impl<F: Fn(&Tensor, &CandleStep<'_>) -> candle_core::Result<Tensor>> Model for F {}

/// The layers of a model, which its cache needs to know.
#[derive(Debug, Clone)]
pub(crate) struct Geometry {
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) layers: usize,
}

impl Geometry {
    /// Returns the spec of a cache.
    pub(crate) fn spec(
        &self,
        format: KvFormat,
        tokens: u32,
        blocks: u32,
    ) -> anyhow::Result<CacheSpec> {
        // Formats of few bits lose least if the first tokens, which all others attend to, keep 16.
        let full_precision = if format.is_for_transformed() { 4 } else { 0 };
        let builder = CacheSpec::builder()
            .layers(self.layers.try_into().context("too many layers")?)
            .kv_heads(self.kv_heads.try_into().context("too many heads")?)
            .head_dim(self.head_dim.try_into().context("too wide heads")?)
            .format(format)
            .full_precision_prefix(full_precision)
            .max_seq_len(tokens)
            // The text of a sequence does not depend on those beside it.
            .determinism(Determinism::BatchInvariant)
            .paged(BLOCK_SIZE, blocks);
        Ok(builder.build()?)
    }
}

/// Parses the command line, runs the example and prints its text; an error is one line.
#[expect(clippy::print_stderr, reason = "a program for a terminal")]
pub(crate) fn main<O: Parser>(run: impl FnOnce(&O) -> anyhow::Result<String>) -> ExitCode {
    let message = match O::try_parse() {
        Ok(options) => match run(&options) {
            Ok(text) => match writeln!(io::stdout(), "{text}") {
                // A reader that has seen enough is none of our business.
                Err(error) if error.kind() != io::ErrorKind::BrokenPipe => error.to_string(),
                _ => return ExitCode::SUCCESS,
            },
            Err(error) => format!("{error:#}"),
        },
        Err(help) if [ErrorKind::DisplayHelp, ErrorKind::DisplayVersion].contains(&help.kind()) => {
            help.exit()
        }
        Err(error) => {
            let text = error.to_string();
            let message = text.split("\n\nUsage:").next().unwrap_or_default();
            let message = message.split("\n\nFor more information").next().unwrap_or_default();
            format!("{} (see --help)", message.strip_prefix("error: ").unwrap_or(message))
        }
    };
    eprintln!("error: {}", message.split_whitespace().collect::<Vec<_>>().join(" "));
    ExitCode::FAILURE
}

/// Continues the prompt of the command line. Returns the whole text.
pub(crate) fn continue_prompt(
    options: &Options,
    folder: &Folder,
    geometry: &Geometry,
    model: impl Model,
) -> anyhow::Result<String> {
    let prompt = folder.encode(&options.prompt)?;
    let limits = folder.limits(options.max_new_tokens);
    let mut cache = open_cache(geometry, options.format, 1, limits.longest(&prompt))?;
    let new = generate(&mut cache, &model, &prompt, &limits)?;
    Ok(format!("{}{}", options.prompt, folder.text_after(&prompt, &new)?))
}

/// Tokens of a block.
pub(crate) const BLOCK_SIZE: u32 = 16;

/// Allocates a cache for `sequences` sequences of at most `tokens` tokens.
pub(crate) fn open_cache(
    geometry: &Geometry,
    format: KvFormat,
    sequences: u32,
    tokens: u32,
) -> anyhow::Result<CandleCache> {
    let smallest = geometry.spec(format, tokens, 1)?;
    let blocks = smallest.groups().iter().map(|group| group.slot_map().blocks_reserved(tokens));
    let blocks = blocks.max().unwrap_or(0) * sequences;
    Ok(CandleCache::new(&Device::Cpu, geometry.spec(format, tokens, blocks)?)?)
}
