//! `kv plan`: what a model's cache takes, without a weight being read.
use anyhow::Context;
use kv::{CacheSpec, KvFormat, SpecError};
use serde::Serialize;

use crate::args::PlanArgs;
use crate::config::ModelConfig;
use crate::memory::Bytes;
use crate::{bundled, output};

#[derive(Debug, Serialize)]
struct Report {
    model: String,
    layers: u16,
    kv_heads: u32,
    head_dim: u32,
    context: u32,
    block_size: u32,
    memory_bytes: u64,
    formats: Vec<Line>,
}

#[derive(Debug, Serialize)]
struct Line {
    format: String,
    bytes_per_token: u64,
    /// Of one sequence at the context, in whole blocks.
    sequence_bytes: u64,
    /// Tokens that fit the memory, in whole blocks.
    tokens: u64,
    sequences: u32,
}

pub(crate) fn run(args: &PlanArgs) -> anyhow::Result<()> {
    let dir = bundled::model_or_bundled(args.model.as_deref())?;
    let config = ModelConfig::read(&dir)?;
    let context = args.context.unwrap_or(config.context);
    let given = if args.format.is_empty() { KvFormat::PLAIN } else { &args.format };
    let line = |format: &KvFormat| line(&config, args, context, *format);
    let report = Report {
        model: dir.display().to_string(),
        layers: config.layers,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        context,
        block_size: args.block_size,
        memory_bytes: args.memory.0,
        formats: given.iter().map(line).collect::<anyhow::Result<_>>()?,
    };
    if args.json {
        return output::json(&report);
    }
    output::text(&show(&report))
}

fn line(
    config: &ModelConfig,
    args: &PlanArgs,
    context: u32,
    format: KvFormat,
) -> anyhow::Result<Line> {
    let model = || {
        let builder = CacheSpec::builder().layers(config.layers).kv_heads(config.kv_heads);
        builder.head_dim(config.head_dim).format(format)
    };
    let block = model().paged(args.block_size, 1).build()?.memory();
    let blocks = u64::from(context.div_ceil(args.block_size));
    let sequence_bytes =
        block.bytes_total.checked_mul(blocks).context("a sequence's bytes overflow")?;
    let (tokens, sequences) = match model().paged_within(args.block_size, args.memory.0).build() {
        Ok(spec) => {
            // A sequence is as long as it is asked for, whatever the model was trained on.
            let blocks = spec.groups().iter().map(kv::GroupSpec::num_blocks).min().unwrap_or(0);
            let sequences = blocks.checked_div(context.div_ceil(args.block_size)).unwrap_or(0);
            (spec.memory().tokens, sequences)
        }
        // Not one block fits.
        Err(SpecError::Zero { .. }) => (0, 0),
        Err(error) => return Err(error.into()),
    };
    let format = format.to_string();
    let bytes_per_token = block.bytes_per_token;
    Ok(Line { format, bytes_per_token, sequence_bytes, tokens, sequences })
}

fn show(report: &Report) -> String {
    let Report { model, layers, kv_heads, head_dim, context, block_size, .. } = report;
    let heading = ["format", "bytes/token", "a sequence", "tokens", "sequences"];
    let mut rows = vec![heading.map(str::to_owned).to_vec()];
    rows.extend(report.formats.iter().map(|line| {
        vec![
            line.format.clone(),
            line.bytes_per_token.to_string(),
            Bytes(line.sequence_bytes).to_string(),
            line.tokens.to_string(),
            line.sequences.to_string(),
        ]
    }));
    format!(
        "{model}: {layers} layers, {kv_heads} kv heads of {head_dim}\n\
         in {}, sequences of {context} tokens, blocks of {block_size}:\n{}",
        Bytes(report.memory_bytes),
        output::table(&rows)
    )
}
