//! Reads a `config.json` field by field, by the rules of its architecture.
// Reads files that may be anything.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
use serde_json::Value;

use super::object::{Agreed, Object, field_error};
use super::{
    Architecture, Biases, ConfigError, LayerKind, ModelConfig, Multipliers, bounded, divide,
    layers, non_zero, positive, rope,
};

/// Multimodal models whose text model can be run; its configuration is under `text_config`.
const WRAPPERS: [&str; 1] = ["mistral3"];

/// Reads the configuration.
pub(super) fn model(file: &Object<'_>) -> Result<ModelConfig, ConfigError> {
    let text = text_part(file)?;
    // Before the fields, so that an unsupported model is refused by its name.
    let architecture = architecture(&text)?;
    refuse_quantised(file)?;
    let act: Option<&str> = text.get("hidden_act")?;
    if let Some(act) = act.filter(|act| !["silu", "swish"].contains(act)) {
        let (field, got) = ("hidden_act", act.to_owned());
        return Err(ConfigError::Unsupported { field, got, expected: "silu" });
    }
    let count = |field: &'static str| non_zero(field, text.required(field)?);
    let hidden = count("hidden_size")?;
    let intermediate = count("intermediate_size")?;
    let num_layers = layers("num_hidden_layers", count("num_hidden_layers")?)?;
    let heads = count("num_attention_heads")?;
    let kv_heads = text.get("num_key_value_heads")?.unwrap_or(heads);
    let kv_heads = non_zero("num_key_value_heads", kv_heads)?;
    let vocab = count("vocab_size")?;
    let head_dim = match text.get("head_dim")? {
        Some(dim) => dim,
        None if architecture == Architecture::Qwen3 && !text.has("head_dim") => 128,
        None => divide("hidden_size", hidden, heads)?,
    };
    bounded("head_dim", head_dim)?;
    divide("num_attention_heads", heads, kv_heads)?;
    let (rope, context) = rope::read(&text, architecture, head_dim)?;
    let norm_eps = match architecture {
        Architecture::Phi3 | Architecture::Olmo2 => 1e-5,
        _ => 1e-6,
    };
    let tied = match file.get("tie_word_embeddings")? {
        Some(tied) => Some(tied),
        None => text.get("tie_word_embeddings")?,
    };
    let ids = |key| {
        let ids = text.ids(key)?.map_or_else(|| file.ids(key), |ids| Ok(Some(ids)))?;
        Ok(ids.unwrap_or_default())
    };
    ModelConfig {
        architecture,
        layer_kinds: layer_kinds(&text, architecture, num_layers)?,
        hidden,
        intermediate,
        heads,
        kv_heads,
        head_dim,
        vocab,
        context,
        norm_eps: text.get("rms_norm_eps")?.unwrap_or(norm_eps),
        tied: tied.unwrap_or(architecture == Architecture::SmolLm3),
        biases: biases(&text, architecture)?,
        multipliers: multipliers(&text, architecture)?,
        rope,
        bos: ids("bos_token_id")?.first().copied(),
        eos: ids("eos_token_id")?,
    }
    .check()
}

/// Returns the object that describes the text model.
fn text_part<'a>(file: &Object<'a>) -> Result<Object<'a>, ConfigError> {
    let outer: Option<&str> = file.get("model_type")?;
    let Some(text) = file.object("text_config")? else {
        return Ok(*file);
    };
    if let Some(outer) = outer.filter(|outer| !WRAPPERS.contains(outer)) {
        return Err(unsupported("model_type", outer));
    }
    // Some files repeat fields of the text model.
    for key in SHAPE {
        let agreed = Agreed::none().with(file.name(key), file.value(key))?;
        agreed.with(text.name(key), text.value(key))?;
    }
    Ok(text)
}

/// Fields of a text model that must be the same if the file around it repeats them.
const SHAPE: [&str; 10] = [
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rope_theta",
    "sliding_window",
];

fn unsupported(field: &'static str, got: &str) -> ConfigError {
    ConfigError::Unsupported { field, got: got.to_owned(), expected: Architecture::NAMES }
}

/// Returns the architecture: by `model_type`, or without one by the class under `architectures`.
fn architecture(text: &Object<'_>) -> Result<Architecture, ConfigError> {
    if let Some(name) = text.get("model_type")? {
        let known = Architecture::of_model_type(name);
        return known.ok_or_else(|| unsupported("model_type", name));
    }
    let classes: Vec<&str> = text.get("architectures")?.unwrap_or_default();
    match classes.first() {
        Some(class) => {
            let known = Architecture::of_class(class);
            known.ok_or_else(|| unsupported("architectures", class))
        }
        // Files of the first llama models name none.
        None => Ok(Architecture::Llama),
    }
}

/// Refuses quantised weights, with the name of the method.
fn refuse_quantised(file: &Object<'_>) -> Result<(), ConfigError> {
    let Some(quantisation) = file.object("quantization_config")? else {
        return Ok(());
    };
    let method: Option<&str> = quantisation.get("quant_method")?;
    let got = method.unwrap_or("without a method").to_owned();
    let (field, expected) = ("quantization_config", "f32, f16 or bf16 weights");
    Err(ConfigError::Unsupported { field, got, expected })
}

fn biases(text: &Object<'_>, architecture: Architecture) -> Result<Biases, ConfigError> {
    let flag = |key| Ok(text.get(key)?.unwrap_or(false));
    let attention = flag("attention_bias")?;
    let mlp = flag("mlp_bias")?;
    Ok(match architecture {
        Architecture::Qwen2 => Biases { qkv: true, out: false, mlp: false },
        Architecture::Phi3 => Biases::default(),
        Architecture::Qwen3 | Architecture::Olmo2 => {
            Biases { qkv: attention, out: attention, mlp: false }
        }
        Architecture::Llama
        | Architecture::Mistral
        | Architecture::Granite
        | Architecture::SmolLm3 => Biases { qkv: attention, out: attention, mlp },
    })
}

fn multipliers(text: &Object<'_>, architecture: Architecture) -> Result<Multipliers, ConfigError> {
    if architecture != Architecture::Granite {
        return Ok(Multipliers::default());
    }
    let number = |field: &'static str| positive(field, text.get(field)?.unwrap_or(1.0));
    Ok(Multipliers {
        embedding: number("embedding_multiplier")?,
        attention: Some(number("attention_multiplier")?),
        residual: number("residual_multiplier")?,
        logits: number("logits_scaling")?,
    })
}

/// Returns window and rotation of every layer.
fn layer_kinds(
    text: &Object<'_>,
    architecture: Architecture,
    num_layers: u16,
) -> Result<Vec<LayerKind>, ConfigError> {
    let window_left = window_left(text, architecture)?;
    let rotates = rotating_layers(text, architecture, num_layers)?;
    let first_window: u32 = match architecture {
        Architecture::Qwen2 | Architecture::Qwen3 => text.get("max_window_layers")?.unwrap_or(28),
        _ => 0,
    };
    let mut kinds = Vec::with_capacity(rotates.len());
    for (index, rotates) in (0_u32..).zip(rotates) {
        let slides = match architecture {
            Architecture::SmolLm3 => !rotates,
            _ => index >= first_window,
        };
        kinds.push(LayerKind { window_left: window_left.filter(|_| slides), rotates });
    }
    let types: Option<Vec<&str>> = text.get("layer_types")?;
    let Some(types) = types else {
        return Ok(kinds);
    };
    if types.len() != kinds.len() {
        let problem = format!("has {} entries for {num_layers} layers", types.len());
        return Err(field_error(text.name("layer_types"), problem));
    }
    let is_choice =
        matches!(architecture, Architecture::Qwen2 | Architecture::Qwen3 | Architecture::SmolLm3);
    for (kind, name) in kinds.iter_mut().zip(types) {
        let window = match name {
            "full_attention" => None,
            "sliding_attention" => Some(window_left.ok_or_else(|| no_window(text))?),
            other => {
                let (field, got) = ("layer_types", other.to_owned());
                let expected = "full_attention or sliding_attention";
                return Err(ConfigError::Unsupported { field, got, expected });
            }
        };
        if !is_choice && window != kind.window_left {
            let has = if kind.window_left.is_some() { "have" } else { "have no" };
            let problem = format!("names {name}, but all layers of {architecture} {has} windows");
            return Err(field_error(text.name("layer_types"), problem));
        }
        kind.window_left = window;
    }
    Ok(kinds)
}

fn no_window(text: &Object<'_>) -> ConfigError {
    let problem = match text.value("use_sliding_window") {
        Some(Value::Bool(false)) => "names sliding_attention, but use_sliding_window is false",
        _ => "names sliding_attention, but there is no sliding_window",
    };
    field_error(text.name("layer_types"), problem.to_owned())
}

/// Returns the number of keys before its own position that a query sees in a layer with a window,
/// `None` if no layer has one.
fn window_left(text: &Object<'_>, architecture: Architecture) -> Result<Option<u32>, ConfigError> {
    let window: Option<u32> = match architecture {
        Architecture::Qwen2 | Architecture::Qwen3 | Architecture::SmolLm3 => {
            match text.get("use_sliding_window")? {
                Some(true) => text.get("sliding_window")?,
                _ => None,
            }
        }
        // The default of the architecture's class in transformers.
        Architecture::Mistral if !text.has("sliding_window") => Some(4096),
        Architecture::Llama | Architecture::Mistral | Architecture::Phi3 => {
            text.get("sliding_window")?
        }
        Architecture::Olmo2 | Architecture::Granite => None,
    };
    let window = window.map(|window| non_zero("sliding_window", window)).transpose()?;
    Ok(window.map(|window| window.saturating_sub(1)))
}

/// Returns which layers rotate Q and K.
fn rotating_layers(
    text: &Object<'_>,
    architecture: Architecture,
    num_layers: u16,
) -> Result<Vec<bool>, ConfigError> {
    if architecture != Architecture::SmolLm3 {
        return Ok(vec![true; usize::from(num_layers)]);
    }
    if let Some(list) = text.get::<Vec<u32>>("no_rope_layers")? {
        // 1 means that the layer rotates, whatever the field's name suggests.
        let rotates: Vec<_> = list.iter().map(|n| *n != 0).take(usize::from(num_layers)).collect();
        if rotates.len() < usize::from(num_layers) {
            let problem = format!("has {} entries for {num_layers} layers", rotates.len());
            return Err(field_error(text.name("no_rope_layers"), problem));
        }
        return Ok(rotates);
    }
    let interval = text.get("no_rope_layer_interval")?.unwrap_or(4);
    let interval = non_zero("no_rope_layer_interval", interval)?;
    let rotates = |layer: u16| !u32::from(layer).saturating_add(1).is_multiple_of(interval);
    Ok((0..num_layers).map(rotates).collect())
}
