//! The geometry of a GGUF file, from its metadata.
use std::path::Path;

use anyhow::Context;
use candle_core::quantized::gguf_file::Value;

use super::geometry::{
    COUNT_MAX, Geometry, GeometryError, LAYERS_MAX, LayerKind, bounded, divide, note_of_others,
};
use crate::gguf::{Metadata, first_part};
use crate::num::to_usize;

/// Architectures without attention.
const STATE_SPACE: [&str; 7] =
    ["mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7", "rwkv"];

/// Architectures that read a whole text at once.
const ENCODERS: [&str; 8] = [
    "bert",
    "nomic-bert",
    "nomic-bert-moe",
    "neo-bert",
    "jina-bert-v2",
    "jina-bert-v3",
    "modern-bert",
    "t5encoder",
];

/// Architectures whose layers slide, but for the last of every run of so many; no key says it.
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

/// Tokens of a chunk of Llama 4 where the file does not say it.
const LLAMA4_CHUNK: u32 = 8192;

pub(super) fn read(path: &Path) -> anyhow::Result<Geometry> {
    let part = first_part(path)?;
    let metadata = Metadata::new(&part.content);
    let name = metadata.architecture();
    let geometry = geometry(&metadata).with_context(|| format!("general.architecture {name:?}"));
    geometry.with_context(|| path.display().to_string())
}

fn geometry(metadata: &Metadata<'_>) -> anyhow::Result<Geometry> {
    let architecture = metadata.architecture();
    if architecture.is_empty() {
        return Err(GeometryError::Missing { field: "general.architecture" }.into());
    }
    if STATE_SPACE.contains(&architecture) {
        let why = "the model has no attention, what it keeps of a sequence does not grow";
        return Err(GeometryError::NoCache { why }.into());
    }
    if ENCODERS.contains(&architecture) {
        return Err(GeometryError::NoCache { why: "the model is an encoder" }.into());
    }
    let mut notes = Vec::new();
    let blocks = metadata.required("block_count")?;
    let num_layers = bounded(&metadata.key("block_count"), blocks.into(), LAYERS_MAX)?;
    let rows = rows(metadata, num_layers)?;
    let windows = windows(metadata, num_layers)?;
    if architecture == "llama4" {
        notes.push("chunked attention is counted as a window as long as a chunk".to_owned());
    }
    let has_attention = attention_layers(metadata)?;
    let shared = metadata.count("attention.shared_kv_layers")?.unwrap_or(0);
    if shared > 0 {
        notes.push(format!(
            "the last {shared} of {num_layers} layers read what earlier ones keep: not counted"
        ));
    }
    let mut layers = Vec::new();
    for index in 0..num_layers.saturating_sub(shared) {
        let heads = rows.kv_heads(index);
        if heads > 0 && has_attention.is_none_or(|period| is_last(index, period)) {
            let window = windows.get(to_usize(index)).copied().flatten();
            let (head_dim_k, head_dim_v) = (rows.dim_k, rows.dim_v);
            let is_latent = rows.is_latent;
            layers.push(LayerKind { kv_heads: heads, head_dim_k, head_dim_v, window, is_latent });
        }
    }
    if layers.is_empty() {
        let why = "no layer of the model has attention with a cache of its own";
        return Err(GeometryError::NoCache { why }.into());
    }
    if architecture == "falcon-h1" {
        let text = "every layer has a state-space part too: it does not grow and is not counted";
        notes.push(text.to_owned());
    }
    let without_shared = num_layers.saturating_sub(shared);
    let others = "state-space layers or have no attention";
    notes.extend(note_of_others(layers.len(), without_shared, others));
    if metadata.value("decoder_block_count").is_some() || architecture == "t5" {
        notes.push("an encoder and a decoder: cross attention is not counted".to_owned());
    }
    let context = metadata.count("context_length")?.filter(|context| *context > 0);
    let context = context.map(|context| context.min(u32::MAX >> 2));
    let architecture = architecture.to_owned();
    Ok(Geometry { architecture, num_layers, layers, context, notes })
}

/// Rows that layers with attention keep.
struct Rows {
    /// K and V heads of every layer, or one number for all.
    heads: Vec<u32>,
    dim_k: u32,
    dim_v: u32,
    is_latent: bool,
}

impl Rows {
    fn kv_heads(&self, index: u32) -> u32 {
        match self.heads.as_slice() {
            [one] => *one,
            list => list.get(to_usize(index)).copied().unwrap_or(0),
        }
    }
}

fn rows(metadata: &Metadata<'_>, num_layers: u32) -> anyhow::Result<Rows> {
    let count = |key: &str| -> anyhow::Result<Option<u32>> {
        let count = metadata.count(key)?.filter(|count| *count > 0);
        let checked = count.map(|count| bounded(&metadata.key(key), count.into(), COUNT_MAX));
        Ok(checked.transpose()?)
    };
    if let Some(rank) = count("attention.kv_lora_rank")? {
        let rope = metadata.required("rope.dimension_count")?;
        let rope = bounded(&metadata.key("rope.dimension_count"), rope.into(), COUNT_MAX)?;
        let dim_k = rank.saturating_add(rope);
        // Layers without attention have no heads.
        let heads = by_layer(metadata, "attention.head_count_kv", num_layers)?;
        let heads = heads.unwrap_or_else(|| vec![1]).into_iter().map(|heads| heads.min(1));
        return Ok(Rows { heads: heads.collect(), dim_k, dim_v: rank, is_latent: true });
    }
    let query_heads = by_layer(metadata, "attention.head_count", num_layers)?;
    let query_heads =
        query_heads.ok_or(GeometryError::Missing { field: "attention.head_count" })?;
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
    let dim_k = match count("attention.key_length")? {
        Some(dim) => dim,
        None => {
            let hidden = metadata.required("embedding_length")?;
            divide(("embedding_length", hidden), ("attention.head_count", most))?
        }
    };
    let dim_v = count("attention.value_length")?.unwrap_or(dim_k);
    Ok(Rows { heads, dim_k, dim_v, is_latent: false })
}

/// One number, or one for each layer.
fn by_layer(
    metadata: &Metadata<'_>,
    key: &str,
    num_layers: u32,
) -> anyhow::Result<Option<Vec<u32>>> {
    let Some(list) = metadata.counts(key)? else {
        return Ok(None);
    };
    let is_list = matches!(metadata.value(key), Some(Value::Array(_)));
    if is_list && list.len() != to_usize(num_layers) {
        let (field, got) = (metadata.key(key), list.len());
        return Err(GeometryError::Entries { field, got, expected: num_layers }.into());
    }
    // A number of 0 heads is that of a model without attention.
    match list.as_slice() {
        [0] if !is_list => Err(GeometryError::Zero { field: metadata.key(key) }.into()),
        _ => Ok(Some(list)),
    }
}

/// Every how many layers the last one has attention, where the others have none.
fn attention_layers(metadata: &Metadata<'_>) -> anyhow::Result<Option<u32>> {
    let given = metadata.count("full_attention_interval")?.filter(|period| *period > 0);
    let is_hybrid = ["qwen3next", "qwen35", "qwen35moe"].contains(&metadata.architecture());
    Ok(given.or(is_hybrid.then_some(4)))
}

/// Whether the layer is the last of its run of `period`.
fn is_last(index: u32, period: u32) -> bool {
    index.saturating_add(1).checked_rem(period) == Some(0)
}

/// Windows of all layers.
fn windows(metadata: &Metadata<'_>, num_layers: u32) -> anyhow::Result<Vec<Option<u32>>> {
    let architecture = metadata.architecture();
    let given = metadata.count("attention.sliding_window")?.filter(|window| *window > 0);
    let chunk = metadata.count("attention.chunk_size")?.filter(|chunk| *chunk > 0);
    let default = (architecture == "llama4").then_some(LLAMA4_CHUNK);
    let size = given.or(chunk).or(default).map(|size| size.min(u32::MAX >> 2));
    let pattern = "attention.sliding_window_pattern";
    let slides: Vec<bool> = match metadata.value(pattern) {
        Some(Value::Array(list)) => {
            let slides = list.iter().map(|value| match value {
                Value::Bool(slides) => Ok(*slides),
                other => crate::gguf::whole(other).map(|n| n != 0).ok_or_else(|| {
                    metadata.wrong(pattern, "is not a list of true and false".to_owned())
                }),
            });
            let slides = slides.collect::<Result<Vec<_>, _>>()?;
            if slides.len() != to_usize(num_layers) {
                let (field, got) = (metadata.key(pattern), slides.len());
                return Err(GeometryError::Entries { field, got, expected: num_layers }.into());
            }
            slides
        }
        _ => {
            let known = RUNS.iter().find(|(name, _)| *name == architecture);
            let period = metadata.count(pattern)?.or(known.map(|(_, period)| *period));
            let slides = |index| period.is_none_or(|period| !is_last(index, period));
            (0..num_layers).map(slides).collect()
        }
    };
    Ok(slides.into_iter().map(|slides| size.filter(|_| slides)).collect())
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use candle_core::quantized::gguf_file::{Content, VersionedMagic};

    use super::*;

    /// Metadata of this architecture, its own keys without the name in front.
    fn content(architecture: &str, keys: &[(&str, Value)]) -> Content {
        let own = keys.iter().map(|(key, value)| (format!("{architecture}.{key}"), value.clone()));
        let name = Value::String(architecture.to_owned());
        let metadata = own.chain([("general.architecture".to_owned(), name)]).collect();
        let tensor_infos = HashMap::new();
        Content { magic: VersionedMagic::GgufV3, metadata, tensor_infos, tensor_data_offset: 0 }
    }

    fn read(architecture: &str, keys: &[(&str, Value)]) -> anyhow::Result<Geometry> {
        geometry(&Metadata::new(&content(architecture, keys)))
    }

    fn list(counts: &[u32]) -> Value {
        Value::Array(counts.iter().copied().map(Value::U32).collect())
    }

    /// Values that all layers keep of a token.
    fn values(geometry: &Geometry) -> u64 {
        let values = |kind: &LayerKind| {
            let dims =
                if kind.is_latent { kind.head_dim_k } else { kind.head_dim_k + kind.head_dim_v };
            u64::from(kind.kv_heads) * u64::from(dims)
        };
        geometry.layers.iter().map(values).sum()
    }

    #[test]
    fn every_kind_of_file_gives_its_rows() {
        let n = Value::U32;
        let llama = [
            ("block_count", n(32)),
            ("embedding_length", n(4096)),
            ("attention.head_count", n(32)),
            ("attention.head_count_kv", n(8)),
            ("context_length", n(8192)),
        ];
        let geometry = read("llama", &llama).expect("llama");
        assert_eq!((values(&geometry), geometry.context), (32 * 2 * 8 * 128, Some(8192)));
        assert!(geometry.notes.is_empty(), "{:?}", geometry.notes);
        let gemma3 = [
            ("block_count", n(34)),
            ("attention.head_count", n(8)),
            ("attention.head_count_kv", n(4)),
            ("attention.key_length", n(256)),
            ("attention.value_length", n(256)),
            ("attention.sliding_window", n(1024)),
        ];
        let geometry = read("gemma3", &gemma3).expect("gemma3");
        let slides: Vec<_> = geometry.layers.iter().map(|layer| layer.window.is_some()).collect();
        assert_eq!(slides[..12], [true, true, true, true, true, false].repeat(2)[..]);
        assert_eq!(values(&geometry), 34 * 2 * 4 * 256);
        let deepseek = [
            ("block_count", n(61)),
            ("attention.head_count", n(128)),
            ("attention.head_count_kv", n(1)),
            ("attention.key_length", n(576)),
            ("attention.value_length", n(512)),
            ("attention.kv_lora_rank", n(512)),
            ("rope.dimension_count", n(64)),
        ];
        assert_eq!(values(&read("deepseek2", &deepseek).expect("deepseek2")), 61 * 576);
        // Heads by layer, 0 for one without attention.
        let jamba = [
            ("block_count", n(4)),
            ("embedding_length", n(4096)),
            ("attention.head_count", n(32)),
            ("attention.head_count_kv", list(&[0, 8, 0, 4])),
        ];
        let geometry = read("jamba", &jamba).expect("jamba");
        assert_eq!((values(&geometry), geometry.layers.len()), (2 * 128 * 12, 2));
        assert!(geometry.notes[0].starts_with("2 of 4 layers are state-space"));
    }

    #[test]
    fn what_has_no_cache_and_what_cannot_be_is_refused() {
        let n = Value::U32;
        for (architecture, keys, words) in [
            ("mamba", &[][..], "no attention"),
            ("bert", &[], "an encoder"),
            ("llama", &[], "llama.block_count is missing"),
            ("llama", &[("block_count", n(0))], "llama.block_count is 0"),
            ("llama", &[("block_count", n(1))], "attention.head_count is missing"),
            (
                "llama",
                &[
                    ("block_count", n(1)),
                    ("attention.head_count", n(3)),
                    ("embedding_length", n(8)),
                ],
                "embedding_length 8 is not a multiple of attention.head_count 3",
            ),
            (
                "llama",
                &[("block_count", n(3)), ("attention.head_count", list(&[4, 4]))],
                "llama.attention.head_count has 2 entries for 3 layers",
            ),
            (
                "x",
                &[
                    ("block_count", n(1)),
                    ("attention.head_count", n(6)),
                    ("attention.head_count_kv", n(4)),
                ],
                "head_count 6 is not a multiple of head_count_kv 4",
            ),
            ("", &[], "general.architecture is missing"),
        ] {
            let error = format!("{:#}", read(architecture, keys).expect_err(words));
            assert!(error.contains(words), "{architecture}: {error}");
        }
    }
}
