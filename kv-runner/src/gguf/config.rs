//! Converts the metadata of a GGUF file to a configuration.
// Reads files that may be anything.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
use candle_core::quantized::gguf_file::{Content, Value};

use super::experts::{self, Mixture};
use super::metadata::{Metadata, whole};
use super::{recurrence, rope};
use crate::config::{Architecture, Biases, ExpertsConfig, LayerKind, ModelConfig, Multipliers};
use crate::error::ConfigError;
use crate::geometry::{self, ModelGeometry, bounded};
use crate::num::to_u64;
use crate::rope::{Pairing, RopeConfig};

/// Keys of tokens that end a text, a turn or a message.
const END_KEYS: [&str; 8] = [
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eos_token_ids",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
    "tokenizer.ggml.eog_token_ids",
    "tokenizer.ggml.fim_pad_token_id",
    "tokenizer.ggml.fim_rep_token_id",
    "tokenizer.ggml.fim_sep_token_id",
];

/// The architectures that run, by their names, and whether their models have experts. Mistral's
/// files have the architecture llama.
const ARCHITECTURES: [(&str, Architecture, Mixture); 12] = [
    ("llama", Architecture::Llama, Mixture::Refused),
    ("qwen2", Architecture::Qwen2, Mixture::Refused),
    ("qwen3", Architecture::Qwen3, Mixture::Refused),
    ("phi3", Architecture::Phi3, Mixture::Refused),
    ("olmo2", Architecture::Olmo2, Mixture::Refused),
    ("granite", Architecture::Granite, Mixture::Refused),
    ("smollm3", Architecture::SmolLm3, Mixture::Refused),
    ("qwen35", Architecture::Qwen35, Mixture::Refused),
    ("qwen35moe", Architecture::Qwen35, Mixture::Required),
    ("qwen3next", Architecture::Qwen3Next, Mixture::Possible),
    ("lfm2", Architecture::Lfm2, Mixture::Refused),
    ("granitehybrid", Architecture::GraniteHybrid, Mixture::Possible),
];

/// Their names, for errors.
const NAMES: &str = "llama, qwen2, qwen3, phi3, olmo2, granite, smollm3, qwen35, qwen35moe, \
                     qwen3next, lfm2 or granitehybrid";

/// Texts of tokens that llama.cpp treats as ends, whatever the keys say.
const END_TEXTS: [&str; 17] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<\u{ff5c}end\u{2581}of\u{2581}sentence\u{ff5c}>",
];

/// Returns the configuration, with the factors of `rope_factors_short.weight` if the file has them.
///
/// `contents` are those of all parts; the first one describes the model.
pub(super) fn config(
    contents: &[&Content],
    short: Option<Vec<f64>>,
) -> Result<ModelConfig, ConfigError> {
    let first = contents.first().ok_or(ConfigError::Missing { field: "general.architecture" })?;
    let tensor = |name: &str| contents.iter().find_map(|content| content.tensor_infos.get(name));
    let metadata = Metadata::new(first);
    let (architecture, mixture) = architecture(&metadata)?;
    refuse_encoder(&metadata)?;
    let is_hybrid = !architecture.recurrent_layers().is_empty();
    let hidden = metadata.required("embedding_length")?;
    let heads = metadata.required("attention.head_count")?;
    if !is_hybrid {
        // A list that differs by layer is refused by its name; layers with a state have no heads.
        metadata.count("attention.head_count_kv")?;
    }
    // Before the layers, so that a file without its sizes is refused by a key.
    let has = |end: &str| {
        let mut names = contents.iter().flat_map(|content| content.tensor_infos.keys());
        names.any(|name| name.ends_with(end))
    };
    let recurrence = recurrence::read(&metadata, architecture, hidden, has)?;
    let num_layers = geometry::gguf::layers(&metadata)?;
    let experts = experts::read(&metadata, (architecture, mixture), num_layers, |name: &str| {
        tensor(name).is_some()
    })?;
    let geometry = geometry::gguf::read(&metadata)?;
    let layer = geometry.uniform(metadata.key("attention.value_length"))?;
    let head_dim = layer.head_dim_k;
    let rotary_dim = metadata.count("rope.dimension_count")?.unwrap_or(head_dim).min(head_dim);
    if architecture == Architecture::Qwen35 {
        rope::check_sections(&metadata, rotary_dim)?;
    }
    let embedding = tensor("token_embd.weight");
    let vocab = embedding.and_then(|info| info.shape.dims().first().copied());
    let context = metadata.required("context_length")?;
    let original = metadata.count("rope.scaling.original_context_length")?;
    let has_short = short.is_some();
    ModelConfig {
        architecture,
        layer_kinds: layer_kinds(&metadata, architecture, &geometry)?,
        hidden,
        intermediate: intermediate(&metadata, architecture, experts.as_ref())?,
        heads,
        kv_heads: layer.kv_heads,
        head_dim,
        vocab: bounded("vocab_size", to_u64(vocab.unwrap_or(0)), u32::MAX)?,
        // The factors per pair apply up to the original context.
        context: original.filter(|original| has_short && *original > 0).unwrap_or(context),
        norm_eps: metadata.number("attention.layer_norm_rms_epsilon")?.unwrap_or(1e-5),
        tied: tensor("output.weight").is_none(),
        // Other architectures have their biases as tensors.
        biases: Biases { qkv: architecture == Architecture::Qwen2, ..Biases::default() },
        multipliers: multipliers(&metadata, architecture)?,
        rope: RopeConfig {
            theta: metadata.positive("rope.freq_base")?.unwrap_or(10000.0),
            head_dim,
            rotary_dim,
            pairing: pairing(architecture),
            scaling: rope::scaling(&metadata, rotary_dim, context, short)?,
        },
        recurrence,
        states: if is_hybrid { geometry.states } else { Vec::new() },
        experts,
        bos: metadata.general("tokenizer.ggml.bos_token_id").and_then(whole),
        eos: ends(&metadata)?,
    }
    .check()
}

fn architecture(metadata: &Metadata<'_>) -> Result<(Architecture, Mixture), ConfigError> {
    let name = metadata.architecture();
    let known = ARCHITECTURES.iter().find(|(known, ..)| *known == name);
    known.map(|(_, known, mixture)| (*known, *mixture)).ok_or_else(|| ConfigError::Unsupported {
        field: "general.architecture",
        got: name.to_owned(),
        expected: NAMES,
    })
}

/// Refuses a model whose tokens see those behind them.
fn refuse_encoder(metadata: &Metadata<'_>) -> Result<(), ConfigError> {
    match metadata.value("attention.causal") {
        Some(Value::Bool(false)) => {
            let problem = "is false: a model without a cache, which this program does not run";
            Err(metadata.wrong("attention.causal", problem.to_owned()))
        }
        _ => Ok(()),
    }
}

/// Returns the width of the MLP.
fn intermediate(
    metadata: &Metadata<'_>,
    architecture: Architecture,
    experts: Option<&ExpertsConfig>,
) -> Result<u32, ConfigError> {
    const SHARED: &str = "expert_shared_feed_forward_length";
    match experts {
        Some(of) if architecture == Architecture::GraniteHybrid => return Ok(of.shared_width),
        // Without a layer that has an MLP alone, its width need not be known.
        Some(of) if !metadata.has("feed_forward_length") && of.layers.iter().all(|has| *has) => {
            return Ok(of.shared_width);
        }
        _ => {}
    }
    // The MLP of a model without experts is the shared one of a model with some.
    match metadata.count(SHARED)? {
        Some(width) if width > 0 && architecture == Architecture::GraniteHybrid => Ok(width),
        _ => metadata.required("feed_forward_length"),
    }
}

/// Returns the order in which the converter left the rows of Q and K.
fn pairing(architecture: Architecture) -> Pairing {
    match architecture {
        Architecture::Llama
        | Architecture::Mistral
        | Architecture::Granite
        | Architecture::GraniteHybrid
        | Architecture::SmolLm3 => Pairing::Interleaved,
        _ => Pairing::Half,
    }
}

fn layer_kinds(
    metadata: &Metadata<'_>,
    architecture: Architecture,
    geometry: &ModelGeometry,
) -> Result<Vec<LayerKind>, ConfigError> {
    let window = metadata.count("attention.sliding_window")?.filter(|window| *window > 0);
    if !architecture.recurrent_layers().is_empty() {
        if let Some(window) = window {
            let problem = format!("is {window}, but no layer of {architecture} has a window");
            return Err(metadata.wrong("attention.sliding_window", problem));
        }
        // Granite rotates Q and K only where this key says so.
        let is_tuned = matches!(metadata.value("rope.scaling.finetuned"), Some(Value::Bool(true)));
        return Ok(geometry.hybrid_kinds(architecture != Architecture::GraniteHybrid || is_tuned));
    }
    if let (Some(window), Architecture::Olmo2) = (window, architecture) {
        let problem = format!("is {window}: a model of olmo3, which this program does not run");
        return Err(metadata.wrong("attention.sliding_window", problem));
    }
    // Every fourth layer of smollm3 has no positions; no key says so.
    let rotates = |n: u32| architecture != Architecture::SmolLm3 || n.checked_rem(4) != Some(3);
    Ok(geometry.layer_kinds((0..geometry.num_layers).map(rotates)))
}

fn multipliers(
    metadata: &Metadata<'_>,
    architecture: Architecture,
) -> Result<Multipliers, ConfigError> {
    if !matches!(architecture, Architecture::Granite | Architecture::GraniteHybrid) {
        return Ok(Multipliers::default());
    }
    let number = |key| Ok::<_, ConfigError>(metadata.positive(key)?.unwrap_or(1.0));
    Ok(Multipliers {
        embedding: number("embedding_scale")?,
        attention: metadata.positive("attention.scale")?,
        residual: number("residual_scale")?,
        logits: number("logit_scale")?,
    })
}

/// Returns all tokens that end a text, each once.
fn ends(metadata: &Metadata<'_>) -> Result<Vec<u32>, ConfigError> {
    let mut ends = Vec::new();
    for key in END_KEYS {
        let values = match metadata.general(key) {
            None => continue,
            Some(Value::Array(values)) => values.as_slice(),
            Some(one) => std::slice::from_ref(one),
        };
        for value in values {
            // -1 means none.
            if matches!(value, Value::I32(-1) | Value::I64(-1) | Value::U32(u32::MAX)) {
                continue;
            }
            ends.push(whole(value).ok_or_else(|| ConfigError::Field {
                field: key.to_owned(),
                problem: "is not a token id, or a list of them".to_owned(),
            })?);
        }
    }
    if let Some(Value::Array(tokens)) = metadata.general("tokenizer.ggml.tokens") {
        let is_end = |token: &Value| match token {
            Value::String(text) => END_TEXTS.contains(&text.as_str()),
            _ => false,
        };
        let of_text = tokens.iter().zip(0_u32..).filter(|(token, _)| is_end(token));
        ends.extend(of_text.map(|(_, id)| id));
    }
    ends.sort_unstable();
    ends.dedup();
    Ok(ends)
}
