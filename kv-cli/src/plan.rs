//! `kv plan`: the memory of a model's cache, without reading a weight.
#[cfg(test)]
mod tests;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use kv::quant::{Stored, bits_per_value};
use kv::spec::GroupSpec;
use kv::tier::Bytes;
use kv::{CacheSpec, KvFormat};
use kv_runner::gguf::is_further_part;
use kv_runner::{LayerGeometry, ModelGeometry};
use serde::Serialize;

use crate::args::PlanArgs;
use crate::{bundled, output};

/// Tokens per sequence if the file does not give it.
const CONTEXT: u32 = 2048;

/// Longest sequence of a cache whose layers all have windows.
const LEN_MAX: u32 = u32::MAX >> 2;

/// Largest size of a configuration file, far more than any has.
const CONFIG_BYTES_MAX: u64 = 16 << 20;

#[derive(Debug, Serialize)]
struct Report {
    model: String,
    /// `model_type` or `general.architecture`; empty if the file names none.
    architecture: String,
    /// Number of layers, including those without a KV cache.
    layers: u32,
    /// Layers with their own KV cache.
    attention_layers: u32,
    /// kv heads of the first kind of layers.
    kv_heads: u32,
    head_dim: u32,
    /// Layers that keep the same rows per token.
    kinds: Vec<Kind>,
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
    /// Bytes of one sequence of the full context, with its tokens in 16 bits, in whole blocks.
    sequence_bytes: u64,
    /// Tokens that fit into the memory as one sequence, in whole blocks.
    tokens: u64,
    sequences: u32,
}

pub(crate) fn run(args: &PlanArgs) -> anyhow::Result<()> {
    let path = bundled::model_or_bundled(args.model.as_deref())?;
    let geometry = read(&path)?;
    let kinds = geometry.kinds();
    let ModelGeometry { architecture, num_layers, context, mut notes, .. } = geometry;
    if args.context.is_none() && context.is_none() {
        notes.push(format!("the file gives no context: {CONTEXT} tokens; --context N sets it"));
    }
    let context = args.context.or(context).unwrap_or(CONTEXT);
    let all: Vec<_> = KvFormat::all().map(Stored::plain).collect();
    let given = if args.format.is_empty() { &all } else { &args.format };
    let line = |stored: &Stored| Plan::new(&kinds, args.block_size, stored)?.line(args, context);
    let formats = given.iter().map(line).collect::<anyhow::Result<Vec<_>>>()?;
    if kinds.iter().any(|(kind, _)| kind.is_latent) {
        notes.push(latent_note(&formats));
    }
    let first = kinds.first().map(|(kind, _)| *kind).context("a geometry has a layer")?;
    let attention_layers = kinds.iter().map(|(_, layers)| layers).sum();
    let kinds = kinds.into_iter().map(|(layer, layers)| Kind { layers, layer }).collect();
    let report = Report {
        model: path.display().to_string(),
        architecture,
        layers: num_layers,
        attention_layers,
        kv_heads: first.kv_heads,
        head_dim: first.head_dim_k,
        kinds,
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

/// Reads a directory, a GGUF file or a `config.json`.
fn read(path: &Path) -> anyhow::Result<ModelGeometry> {
    let file = if path.is_dir() { description(path)? } else { path.to_owned() };
    let is_gguf = file.extension().is_some_and(|ext| ext.eq_ignore_ascii_case("gguf"));
    if is_gguf || begins_with(&file, b"GGUF")? {
        return Ok(ModelGeometry::read_gguf(&file)?);
    }
    let describe = || file.display().to_string();
    let bytes = fs::metadata(&file).with_context(describe)?.len();
    if bytes > CONFIG_BYTES_MAX {
        bail!("{}: {bytes} bytes are neither a config.json nor a GGUF file", describe());
    }
    Ok(ModelGeometry::read_config(&file)?)
}

/// Returns the file of a directory that describes its model.
fn description(dir: &Path) -> anyhow::Result<PathBuf> {
    let config = dir.join("config.json");
    if config.is_file() {
        return Ok(config);
    }
    let describe = || dir.display().to_string();
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).with_context(describe)? {
        let path = entry.with_context(describe)?.path();
        let is_gguf = path.extension().is_some_and(|ext| ext.eq_ignore_ascii_case("gguf"));
        if is_gguf && !is_further_part(&path) {
            files.push(path);
        }
    }
    files.sort();
    match files.as_slice() {
        [one] => Ok(one.clone()),
        [first, second, ..] => bail!(
            "{}: no config.json, and several GGUF files, such as {} and {}: give one of them",
            describe(),
            first.display(),
            second.display()
        ),
        // An error will name the missing file.
        [] => Ok(config),
    }
}

fn begins_with(path: &Path, magic: &[u8]) -> anyhow::Result<bool> {
    use std::io::Read;

    let describe = || path.display().to_string();
    let mut start = Vec::new();
    let length = u64::try_from(magic.len())?;
    let file = fs::File::open(path).with_context(describe)?;
    file.take(length).read_to_end(&mut start).with_context(describe)?;
    Ok(start == magic)
}

/// The smallest cache of one format for a model, to ask it for sizes.
struct Plan<'a> {
    stored: &'a Stored,
    spec: CacheSpec,
    kinds: &'a [(LayerGeometry, u32)],
}

impl<'a> Plan<'a> {
    fn new(
        kinds: &'a [(LayerGeometry, u32)],
        block_size: u32,
        stored: &'a Stored,
    ) -> anyhow::Result<Self> {
        let num_layers: u32 = kinds.iter().map(|(_, layers)| layers).sum();
        let builder = CacheSpec::builder().layers(u16::try_from(num_layers)?);
        let mut builder = stored.apply(builder).paged(block_size, stored.blocks_min());
        // A group per kind, in order; the default group stays empty.
        let mut first = 0_u16;
        for (kind, layers) in kinds {
            let end = first + u16::try_from(*layers)?;
            builder = builder.group(first..end, |group| {
                let group = group.kv_heads(kind.kv_heads);
                let group = group.head_dims(kind.head_dim_k, kind.head_dim_v);
                match kind.window {
                    Some(window) => group.window_left(window.saturating_sub(1)),
                    None => group,
                }
            });
            first = end;
        }
        Ok(Self { stored, spec: builder.build()?, kinds })
    }

    fn groups(&self) -> impl Iterator<Item = (&GroupSpec, &LayerGeometry, u64)> {
        let kinds = self.spec.groups().iter().zip(self.kinds);
        kinds.map(|(group, (kind, layers))| (group, kind, u64::from(*layers)))
    }

    fn line(&self, args: &PlanArgs, context: u32) -> anyhow::Result<Line> {
        let memory = self.spec.memory();
        let sequence_bytes =
            self.sequence_bytes(context, true).context("a sequence's bytes overflow")?;
        let bytes = args.memory.0.saturating_sub(memory.bytes_constants);
        let is_too_long = context > LEN_MAX;
        let sequences =
            if is_too_long { 0 } else { bytes.checked_div(sequence_bytes).unwrap_or(0) };
        let needed: Vec<_> = self.groups().map(bytes_per_token).collect();
        let first = self.spec.groups().first().context("a cache has a group")?;
        Ok(Line {
            format: self.stored.to_string(),
            bits_per_value: bits_per_value(&self.spec),
            full_precision_prefix: first.slot_map().full_precision_prefix(),
            bytes_per_token: needed.iter().sum(),
            stored_bytes_per_token: memory.bytes_per_token,
            kind_bytes_per_token: needed,
            sequence_bytes,
            tokens: self.tokens_within(bytes),
            // More count as that many.
            sequences: u32::try_from(sequences).unwrap_or(u32::MAX),
        })
    }

    /// Returns the bytes of one sequence of this length, `None` on overflow. Unless `leaves`,
    /// tokens that left a window are counted.
    fn sequence_bytes(&self, tokens: u32, leaves: bool) -> Option<u64> {
        self.groups().try_fold(0_u64, |sum, (group, _, layers)| {
            let blocks = if leaves {
                group.blocks_to_grow(tokens)
            } else {
                group.slot_map().blocks_to_grow(tokens)
            };
            let block = group.layer_block_bytes().checked_mul(layers)?;
            sum.checked_add(block.checked_mul(u64::from(blocks))?)
        })
    }

    /// Returns the tokens of the longest sequence that fits; if every layer has a window, sequences
    /// have no limit and it returns the tokens that are kept at once.
    fn tokens_within(&self, bytes: u64) -> u64 {
        let leaves = self.groups().any(|(_, kind, _)| kind.window.is_none());
        let fits = |tokens| self.sequence_bytes(tokens, leaves).is_some_and(|all| all <= bytes);
        let (mut fitting, mut beyond) = (0, LEN_MAX);
        while fitting < beyond {
            let tokens = beyond - (beyond - fitting) / 2;
            if fits(tokens) {
                fitting = tokens;
            } else {
                beyond = tokens - 1;
            }
        }
        fitting.into()
    }
}

/// Returns the bytes that the layers of a kind need per token: for MLA, its K.
fn bytes_per_token((group, kind, layers): (&GroupSpec, &LayerGeometry, u64)) -> u64 {
    let [k, v] = group.layouts();
    let block = if kind.is_latent { k.block_bytes() } else { k.block_bytes() + v.block_bytes() };
    let all = block * layers;
    all.checked_div(group.block_size().into()).unwrap_or(0)
}

impl Kind {
    /// Formats the kind: "24 layers, 8 kv heads of 64, a window of 128".
    fn show(&self) -> String {
        let Self { layers, layer } = self;
        let LayerGeometry { kv_heads, head_dim_k, head_dim_v, window, is_latent } = layer;
        let dims = if head_dim_k == head_dim_v {
            head_dim_k.to_string()
        } else {
            format!("{head_dim_k} and {head_dim_v}")
        };
        let rows = if *is_latent {
            format!("a latent row of {head_dim_k}")
        } else {
            format!("{kv_heads} kv heads of {dims}")
        };
        let window = window.map(|window| format!(", a window of {window}")).unwrap_or_default();
        format!("{layers} layers, {rows}{window}")
    }
}

impl Report {
    fn show(&self) -> String {
        let Self { model, kinds, context, block_size, .. } = self;
        let heading = [
            "format",
            "bits/value",
            "full-precision prefix",
            "bytes/token",
            "a sequence",
            "tokens",
            "sequences",
        ];
        let mut rows = vec![heading.map(str::to_owned).to_vec()];
        rows.extend(self.formats.iter().map(|line| {
            vec![
                line.format.clone(),
                format!("{:.3}", line.bits_per_value),
                line.full_precision_prefix.to_string(),
                line.bytes_per_token.to_string(),
                Bytes(line.sequence_bytes).to_string(),
                line.tokens.to_string(),
                line.sequences.to_string(),
            ]
        }));
        let kinds: Vec<_> = kinds.iter().map(Kind::show).collect();
        let notes = self.notes.iter().flat_map(|note| ["note: ", note.as_str(), "\n"]);
        let notes: String = notes.collect();
        format!(
            "{model}: {}\n{notes}in {}, sequences of {context} tokens, blocks of {block_size}:\n{}",
            kinds.join("; "),
            Bytes(self.memory_bytes),
            output::table(&rows)
        )
    }
}
