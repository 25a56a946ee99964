//! `kv plan`: the memory of a model's cache, without reading a weight.
mod file;
mod show;
mod sizes;
#[cfg(test)]
mod tests;

use anyhow::{Context, bail};
use kv::KvFormat;
use kv::quant::Stored;
use kv_runner::{LayerGeometry, ModelGeometry, StatePart};
use serde::Serialize;

use self::sizes::{Kept, Plan, dtype};
use crate::args::{PlanArgs, StateSettings, type_name};
use crate::{bundled, output};

/// Tokens per sequence if the file does not give it.
const CONTEXT: u32 = 2048;

#[derive(Debug, Serialize)]
struct Report {
    model: String,
    /// `model_type` or `general.architecture`; empty if the file names none.
    architecture: String,
    /// Number of layers, including those without a KV cache.
    layers: u32,
    /// Layers with their own KV cache.
    attention_layers: u32,
    /// kv heads of the first kind of layers; 0 in a model without attention.
    kv_heads: u32,
    head_dim: u32,
    /// Layers that keep the same rows per token.
    kinds: Vec<Kind>,
    /// Recurrent states, if layers have them.
    #[serde(skip_serializing_if = "Option::is_none")]
    states: Option<States>,
    context: u32,
    block_size: u32,
    memory_bytes: u64,
    formats: Vec<Line>,
    notes: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Kind {
    layers: u32,
    #[serde(flatten)]
    layer: LayerGeometry,
}

/// The recurrent states of a sequence.
#[derive(Debug, Serialize)]
struct States {
    kinds: Vec<StateKind>,
    /// Bytes of one state of all layers.
    bytes: u64,
    /// Bytes of one snapshot of all layers.
    snapshot_bytes: u64,
    /// States that the memory holds if it holds nothing else.
    fit: u64,
}

/// Layers that keep the same parts of a state.
#[derive(Debug, Serialize)]
struct StateKind {
    layers: usize,
    parts: Vec<Part>,
}

#[derive(Debug, Serialize)]
struct Part {
    name: &'static str,
    shape: Vec<u32>,
    dtype: &'static str,
}

/// The sizes of the pools that share the memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Pools {
    /// Blocks by kind of layers.
    blocks: Vec<u64>,
    /// Slots of running states, without the one of zeros.
    slots: u64,
    snapshots: u64,
    /// Whether slots and snapshots leave memory for blocks.
    #[serde(skip)]
    fit: bool,
}

#[derive(Debug, Serialize)]
struct Line {
    format: String,
    /// Stored bits per value, with scales; the mean of K and V.
    bits_per_value: f64,
    /// First tokens of a sequence that stay in 16 bits.
    full_precision_prefix: u32,
    /// Bytes that the model needs per token inside every window.
    bytes_per_token: u64,
    /// Bytes that this cache stores per token: more if V is a part of K.
    stored_bytes_per_token: u64,
    /// `bytes_per_token` by kind of layers.
    kind_bytes_per_token: Vec<u64>,
    /// Bytes of one sequence of the full context, with its tokens in 16 bits, in whole blocks, and
    /// its slots.
    sequence_bytes: u64,
    /// Tokens that fit into the memory as one sequence, in whole blocks; `None` without a limit.
    tokens: Option<u64>,
    sequences: u32,
    pools: Pools,
}

pub(crate) fn run(args: &PlanArgs) -> anyhow::Result<()> {
    let path = bundled::model_or_bundled(args.model.as_deref())?;
    let geometry = file::read(&path)?;
    let kinds = geometry.kinds();
    let state_kinds = geometry.state_kinds();
    let has_rows = !kinds.is_empty();
    if let Some(option) = args.states.first_given().filter(|_| state_kinds.is_empty()) {
        bail!("{option}: {} has no recurrent states that are known", path.display());
    }
    let kept = Kept { kinds: &kinds, states: &state_kinds };
    let settings = args.states.settings();
    let states = states(kept, settings, args)?;
    let ModelGeometry { architecture, num_layers, context, notes, .. } = &geometry;
    let mut notes = notes.clone();
    if args.context.is_none() && context.is_none() {
        notes.push(format!("the file gives no context: {CONTEXT} tokens; --context N sets it"));
    }
    let context = args.context.or(*context).unwrap_or(CONTEXT);
    // Without rows, all formats are the same.
    let all = if has_rows { KvFormat::all().collect() } else { vec![KvFormat::F16] };
    let all: Vec<_> = all.into_iter().map(Stored::plain).collect();
    let given = if args.format.is_empty() { &all } else { &args.format };
    let line = |stored: &Stored| {
        Plan::new(kept, args.block_size, stored, settings)?.line(args.memory.0, context)
    };
    let formats = given.iter().map(line).collect::<anyhow::Result<Vec<_>>>()?;
    if states.is_some() && formats.iter().any(|line| !line.pools.fit) {
        notes.push("slots and snapshots leave no memory for blocks".to_owned());
    }
    if kinds.iter().any(|(kind, _)| kind.is_latent) {
        notes.push(latent_note(&formats));
    }
    let first = kinds.first().map(|(kind, _)| *kind);
    let attention_layers = kinds.iter().map(|(_, layers)| layers).sum();
    let kinds = kinds.into_iter().map(|(layer, layers)| Kind { layers, layer }).collect();
    let report = Report {
        model: path.display().to_string(),
        architecture: architecture.clone(),
        layers: *num_layers,
        attention_layers,
        kv_heads: first.map_or(0, |first| first.kv_heads),
        head_dim: first.map_or(0, |first| first.head_dim_k),
        kinds,
        states,
        context,
        block_size: args.block_size,
        memory_bytes: args.memory.0,
        formats,
        notes,
    };
    if args.json {
        return output::json(&report);
    }
    output::text(&report.show())
}

/// Describes the bytes that the cache stores beyond the model's needs.
fn latent_note(formats: &[Line]) -> String {
    let of = |line: &Line| {
        let (needed, stored) = (line.bytes_per_token, line.stored_bytes_per_token);
        let times = crate::num::to_f64(stored) / crate::num::to_f64(needed.max(1));
        format!("{needed} bytes per token, {times:.1} times that ({stored}) are stored")
    };
    let first = formats.first().map(of).unwrap_or_default();
    format!(
        "multi-head latent attention: the model needs {first} until this cache reads V as a part \
         of K; sequences and tokens are counted as stored"
    )
}

/// Describes the states of a model, `None` if no layer has one.
fn states(
    kept: Kept<'_>,
    settings: StateSettings,
    args: &PlanArgs,
) -> anyhow::Result<Option<States>> {
    if kept.states.is_empty() {
        return Ok(None);
    }
    let part = |part: &StatePart| Part {
        name: part.name,
        shape: part.shape.clone(),
        dtype: type_name(dtype(part, &settings)),
    };
    let kind = |(parts, layers): &(&[StatePart], Vec<u32>)| StateKind {
        layers: layers.len(),
        parts: parts.iter().map(part).collect(),
    };
    // They do not depend on the format of rows.
    let stored = Stored::plain(KvFormat::F16);
    let plan = Plan::new(kept, args.block_size, &stored, settings)?;
    let bytes = plan.state_bytes();
    Ok(Some(States {
        kinds: kept.states.iter().map(kind).collect(),
        bytes,
        snapshot_bytes: plan.snapshot_bytes(),
        fit: args.memory.0.checked_div(bytes).context("a state has bytes")?,
    }))
}
