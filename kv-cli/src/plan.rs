//! `kv plan`: what a model's cache takes, without a weight being read.
use anyhow::Context;
use kv::{KvFormat, SpecError};
use serde::Serialize;

use crate::args::PlanArgs;
use crate::config::ModelConfig;
use crate::memory::Bytes;
use crate::stored::{Stored, bits_per_value};
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
    /// Stored bits a value, scales included; the mean of K and V.
    bits_per_value: f64,
    /// First tokens of a sequence that stay in 16 bits.
    sinks: u32,
    bytes_per_token: u64,
    /// Of one sequence at the context, with its tokens in 16 bits, in whole blocks.
    sequence_bytes: u64,
    /// Tokens that fit the memory as one sequence, in whole blocks.
    tokens: u64,
    sequences: u32,
}

pub(crate) fn run(args: &PlanArgs) -> anyhow::Result<()> {
    let dir = bundled::model_or_bundled(args.model.as_deref())?;
    let config = ModelConfig::read(&dir)?;
    let context = args.context.unwrap_or(config.context);
    let all: Vec<_> = KvFormat::all().map(Stored::plain).collect();
    let given = if args.format.is_empty() { &all } else { &args.format };
    let line = |stored: &Stored| line(&config, args, context, stored);
    let report = Report {
        model: dir.display().to_string(),
        layers: config.layers(),
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
    stored: &Stored,
) -> anyhow::Result<Line> {
    let few = stored.few_blocks(config, args.block_size)?;
    let group = few.groups().first().context("a cache has a group")?;
    let memory = few.memory();
    let block = memory.bytes_total.checked_div(group.num_blocks().into()).unwrap_or(0);
    let blocks = u64::from(group.blocks_to_grow(context));
    let sequence_bytes = block.checked_mul(blocks).context("a sequence's bytes overflow")?;
    let bytes = args.memory.0.saturating_sub(memory.bytes_constants);
    let within = stored.spec(config, |cache| cache.paged_within(args.block_size, bytes));
    let (tokens, sequences) = match within {
        Ok(spec) => (spec.memory().tokens, spec.sequences_that_fit(context)),
        // Not one block fits, or not one tail.
        Err(SpecError::Zero { .. } | SpecError::Conflict { what: "tail", .. }) => (0, 0),
        Err(error) => return Err(error.into()),
    };
    Ok(Line {
        format: stored.to_string(),
        bits_per_value: bits_per_value(&few),
        sinks: group.slot_map().sinks(),
        bytes_per_token: memory.bytes_per_token,
        sequence_bytes,
        tokens,
        sequences,
    })
}

fn show(report: &Report) -> String {
    let Report { model, layers, kv_heads, head_dim, context, block_size, .. } = report;
    let heading =
        ["format", "bits/value", "sinks", "bytes/token", "a sequence", "tokens", "sequences"];
    let mut rows = vec![heading.map(str::to_owned).to_vec()];
    rows.extend(report.formats.iter().map(|line| {
        vec![
            line.format.clone(),
            format!("{:.3}", line.bits_per_value),
            line.sinks.to_string(),
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
