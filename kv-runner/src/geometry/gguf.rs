//! Reads the geometry of a GGUF file from its metadata.
use super::{
    CHUNKED, COUNT_MAX, Kept, LAYERS_MAX, LEN_MAX, ModelGeometry, Rows, bounded, check_attention,
    divide, is_last, note_of_others, note_of_shared, per_layer, states,
};
use crate::error::ConfigError;
use crate::gguf::Metadata;
use crate::num::to_usize;
use crate::object::field_error;

/// Architectures without attention whose states are known.
const RECURRENT: [&str; 2] = ["mamba", "mamba2"];

/// Architectures without attention whose states are not known.
const STATE_SPACE: &str = "rwkv6 rwkv6qwen2 rwkv7 arwkv7 rwkv";

/// Encoders, which read a whole text at once.
const ENCODERS: &str = "
    bert nomic-bert nomic-bert-moe neo-bert jina-bert-v2 jina-bert-v3 modern-bert t5encoder";

/// Architectures with a window in all layers but the last of every period of this length, for which
/// there is no key.
const RUNS: [(&str, u32); 10] = [
    ("gemma2", 2),
    ("gemma3", 6),
    ("gemma3n", 5),
    ("gpt-oss", 2),
    ("cohere2", 4),
    ("exaone4", 4),
    ("llama4", 4),
    ("olmo2", 4),
    ("smallthinker", 4),
    ("afmoe", 4),
];

/// Chunk length of Llama 4 if the file does not give it.
const LLAMA4_CHUNK: u32 = 8192;

/// Architectures with attention in some layers and a gated delta rule in the others.
const HYBRIDS: [&str; 3] = ["qwen3next", "qwen35", "qwen35moe"];

/// Returns the number of layers that a file has.
fn blocks(metadata: &Metadata<'_>) -> Result<u32, ConfigError> {
    let blocks = metadata.required("block_count")?;
    bounded(&metadata.key("block_count"), blocks.into(), LAYERS_MAX)
}

/// Returns the number of layers that a token passes; hybrid models may have some behind these,
/// which predict tokens further ahead.
pub(crate) fn layers(metadata: &Metadata<'_>) -> Result<u32, ConfigError> {
    const AHEAD: &str = "nextn_predict_layers";
    let blocks = blocks(metadata)?;
    let is_hybrid = HYBRIDS.contains(&metadata.architecture());
    let ahead = metadata.count(AHEAD)?.filter(|_| is_hybrid).unwrap_or(0);
    blocks.checked_sub(ahead).filter(|layers| *layers > 0).ok_or_else(|| {
        let problem = format!("is {ahead}, but block_count is {blocks}");
        field_error(metadata.key(AHEAD), problem)
    })
}

/// Makes a note about layers that predict tokens further ahead.
fn note_of_ahead(num_layers: u32, blocks: u32) -> Option<String> {
    let ahead = blocks.checked_sub(num_layers).filter(|ahead| *ahead > 0);
    ahead.map(|ahead| {
        format!("the last {ahead} of {blocks} layers predict tokens further ahead: not counted")
    })
}

/// Reads the geometry; an error names the architecture.
pub(crate) fn geometry(metadata: &Metadata<'_>) -> Result<ModelGeometry, ConfigError> {
    read(metadata).map_err(|error| ConfigError::Model {
        model: format!("general.architecture {:?}", metadata.architecture()),
        source: Box::new(error),
    })
}

/// Reads the geometry.
pub(crate) fn read(metadata: &Metadata<'_>) -> Result<ModelGeometry, ConfigError> {
    let architecture = metadata.architecture();
    if architecture.is_empty() {
        return Err(ConfigError::Missing { field: "general.architecture" });
    }
    check_attention(architecture, STATE_SPACE, ENCODERS)?;
    let mut notes = Vec::new();
    let (num_layers, blocks) = (layers(metadata)?, blocks(metadata)?);
    notes.extend(note_of_ahead(num_layers, blocks));
    let is_recurrent = RECURRENT.contains(&architecture);
    let rows = (!is_recurrent).then(|| rows(metadata, blocks)).transpose()?;
    let windows = windows(metadata, blocks)?;
    if architecture == "llama4" {
        notes.push(CHUNKED.to_owned());
    }
    let attending = Attending::read(metadata, blocks)?;
    let shared = metadata.count("attention.shared_kv_layers")?.unwrap_or(0);
    notes.extend(note_of_shared(shared, num_layers));
    let is_idle = idle_layers(metadata, blocks)?;
    let without_shared = num_layers.saturating_sub(shared);
    let layer = |layer| {
        let index = to_usize(layer);
        let window = windows.get(index).copied().flatten();
        let rows = rows.as_ref().filter(|_| attending.has(layer));
        let rows = rows.and_then(|rows| rows.layer(index, window));
        (layer, rows, rows.is_none() && is_idle.get(index) != Some(&true))
    };
    let found = states::of_gguf(metadata)?;
    let kept = Kept::of((0..without_shared).map(layer), found.as_ref());
    kept.check()?;
    if found.is_none() {
        let others = "state-space layers or have no attention";
        notes.extend(note_of_others(kept.rows.len(), without_shared, others));
    }
    if metadata.has("decoder_block_count") || architecture == "t5" {
        notes.push("an encoder and a decoder: cross attention is not counted".to_owned());
    }
    let context = metadata.count("context_length")?.filter(|context| *context > 0);
    let context = context.map(|context| context.min(LEN_MAX));
    Ok(kept.into_geometry(architecture.to_owned(), num_layers, context, notes))
}

/// Returns the layers that are an MLP alone, in models that have such layers.
fn idle_layers(metadata: &Metadata<'_>, num_layers: u32) -> Result<Vec<bool>, ConfigError> {
    let architecture = metadata.architecture();
    if !["nemotron_h", "nemotron_h_moe"].contains(&architecture) {
        return Ok(Vec::new());
    }
    let widths = by_layer(metadata, "feed_forward_length", num_layers)?;
    let widths = widths.ok_or(ConfigError::Missing { field: "feed_forward_length" })?;
    Ok(widths.into_iter().map(|width| width > 0).collect())
}

fn rows(metadata: &Metadata<'_>, num_layers: u32) -> Result<Rows, ConfigError> {
    let count = |key: &str| -> Result<Option<u32>, ConfigError> {
        let count = metadata.count(key)?.filter(|count| *count > 0);
        let checked = count.map(|count| bounded(&metadata.key(key), count.into(), COUNT_MAX));
        checked.transpose()
    };
    if let Some(rank) = count("attention.kv_lora_rank")? {
        let rope = metadata.required("rope.dimension_count")?;
        let rope = bounded(&metadata.key("rope.dimension_count"), rope.into(), COUNT_MAX)?;
        let dim_k = rank + rope;
        // Layers without attention have no heads.
        let heads = by_layer(metadata, "attention.head_count_kv", num_layers)?;
        let heads = heads.unwrap_or_else(|| vec![1]).into_iter().map(|heads| heads.min(1));
        let (kv_heads, global) = (heads.collect(), (None, None));
        return Ok(Rows { kv_heads, dim_k, dim_v: rank, is_latent: true, global });
    }
    let query_heads = by_layer(metadata, "attention.head_count", num_layers)?;
    let query_heads = query_heads.ok_or(ConfigError::Missing { field: "attention.head_count" })?;
    let most = query_heads.iter().copied().max().unwrap_or(0);
    let most = bounded(&metadata.key("attention.head_count"), most.into(), COUNT_MAX)?;
    let heads = by_layer(metadata, "attention.head_count_kv", num_layers)?;
    let heads = heads.unwrap_or_else(|| query_heads.clone());
    for (kv_heads, index) in heads.iter().zip(0..) {
        let kv_heads = bounded("head_count_kv", u64::from(*kv_heads).max(1), COUNT_MAX)?;
        let of_layer =
            if query_heads.len() == 1 { query_heads.first() } else { query_heads.get(index) };
        let queries = of_layer.copied().filter(|queries| *queries > 0).unwrap_or(kv_heads);
        divide(("head_count", queries), ("head_count_kv", kv_heads))?;
    }
    let dim_k = if let Some(dim) = count("attention.key_length")? {
        dim
    } else {
        let hidden = metadata.required("embedding_length")?;
        divide(("embedding_length", hidden), ("attention.head_count", most))?
    };
    let dim_v = count("attention.value_length")?.unwrap_or(dim_k);
    Ok(Rows { kv_heads: heads, dim_k, dim_v, is_latent: false, global: (None, None) })
}

/// Reads one number, or one per layer.
fn by_layer(
    metadata: &Metadata<'_>,
    key: &str,
    num_layers: u32,
) -> Result<Option<Vec<u32>>, ConfigError> {
    let Some(list) = metadata.counts(key)? else {
        return Ok(None);
    };
    let is_list = metadata.is_list(key);
    match list.as_slice() {
        _ if is_list => per_layer(metadata.key(key), list, num_layers).map(Some),
        // 0 heads mean a model without attention.
        [0] => Err(ConfigError::Zero { field: metadata.key(key) }),
        _ => Ok(Some(list)),
    }
}

/// The layers with attention, if other layers have none.
enum Attending {
    All,
    /// The last one of every period of this length.
    Last(u32),
    Listed(Vec<bool>),
}

impl Attending {
    fn read(metadata: &Metadata<'_>, blocks: u32) -> Result<Self, ConfigError> {
        const INTERVAL: &str = "full_attention_interval";
        const LIST: &str = "attention.recurrent_layers";
        let is_hybrid = HYBRIDS.contains(&metadata.architecture());
        if is_hybrid && metadata.has(LIST) {
            let recurrent = metadata.flags(LIST)?.ok_or_else(|| {
                field_error(metadata.key(LIST), "is not a list with one entry per layer".to_owned())
            })?;
            let recurrent = per_layer(metadata.key(LIST), recurrent, blocks)?;
            return Ok(Self::Listed(recurrent.into_iter().map(|is| !is).collect()));
        }
        match metadata.count(INTERVAL)? {
            Some(0) => Err(ConfigError::Zero { field: metadata.key(INTERVAL) }),
            Some(period) => Ok(Self::Last(period)),
            None if is_hybrid => Ok(Self::Last(4)),
            None => Ok(Self::All),
        }
    }

    fn has(&self, layer: u32) -> bool {
        match self {
            Self::All => true,
            Self::Last(period) => is_last(layer, *period),
            Self::Listed(attending) => attending.get(to_usize(layer)) == Some(&true),
        }
    }
}

/// Returns the windows of all layers.
fn windows(metadata: &Metadata<'_>, num_layers: u32) -> Result<Vec<Option<u32>>, ConfigError> {
    let architecture = metadata.architecture();
    let given = metadata.count("attention.sliding_window")?.filter(|window| *window > 0);
    let chunk = metadata.count("attention.chunk_size")?.filter(|chunk| *chunk > 0);
    let default = (architecture == "llama4").then_some(LLAMA4_CHUNK);
    let size = given.or(chunk).or(default).map(|size| size.min(LEN_MAX));
    let pattern = "attention.sliding_window_pattern";
    let slides = if let Some(slides) = metadata.flags(pattern)? {
        per_layer(metadata.key(pattern), slides, num_layers)?
    } else {
        let known = RUNS.iter().find(|(name, _)| *name == architecture);
        let period = metadata.count(pattern)?.or(known.map(|(_, period)| *period));
        let slides = |index| period.is_none_or(|period| !is_last(index, period));
        (0..num_layers).map(slides).collect()
    };
    Ok(slides.into_iter().map(|slides| size.filter(|_| slides)).collect())
}

#[cfg(test)]
mod tests;
