//! Reads a `config.json` field by field, by the rules of its architecture.
// Reads files that may be anything.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
use serde_json::Value;

use super::{
    Architecture, Biases, ConfigError, ExpertsConfig, LayerKind, ModelConfig, Multipliers,
    Recurrence, positive, recurrent, rope,
};
use crate::geometry::layers::{Windows, rotating};
use crate::geometry::{ModelGeometry, config, non_zero};
use crate::num::to_usize;
use crate::object::{Agreed, Object, field_error};

/// Multimodal models whose text model can be run; its configuration is under `text_config`.
const WRAPPERS: [&str; 2] = ["mistral3", "qwen3_5"];

/// Reads the configuration.
pub(super) fn model(file: &Object<'_>) -> Result<ModelConfig, ConfigError> {
    let text = text_part(file)?;
    // Before the fields, so that an unsupported model is refused by its name.
    let architecture = architecture(&text)?;
    let text = text.with_defaults(config::defaults(architecture.name(), false));
    refuse_quantised(file)?;
    let act: Option<&str> = text.get("hidden_act")?;
    if let Some(act) = act.filter(|act| !["silu", "swish"].contains(act)) {
        let (field, got) = ("hidden_act", act.to_owned());
        return Err(ConfigError::Unsupported { field, got, expected: "silu" });
    }
    let count = |field: &'static str| non_zero(field, text.required(field)?);
    let hidden = count("hidden_size")?;
    let intermediate = recurrent::intermediate(&text, architecture)?;
    let heads = count("num_attention_heads")?;
    let vocab = count("vocab_size")?;
    let recurrence = Recurrence::read(&text, architecture, hidden)?;
    let geometry = config::of_decoder(&text, architecture.name())?;
    // Before the rows, so that a list of layers is refused by its name.
    let layer_kinds = layer_kinds(&text, architecture, &geometry)?;
    let layer = geometry.uniform(text.name("v_head_dim"))?;
    let head_dim = layer.head_dim_k;
    let (rope, context) = rope::read(&text, architecture, head_dim)?;
    let (norm_eps_name, norm_eps) = match architecture {
        Architecture::Phi3 | Architecture::Olmo2 => ("rms_norm_eps", 1e-5),
        Architecture::Lfm2 => ("norm_eps", 1e-5),
        _ => ("rms_norm_eps", 1e-6),
    };
    let tied = match file.get("tie_word_embeddings")? {
        Some(tied) => Some(tied),
        None => text.get("tie_word_embeddings")?.or(text.get("tie_embedding")?),
    };
    let ids = |key| {
        let ids = text.ids(key)?.map_or_else(|| file.ids(key), |ids| Ok(Some(ids)))?;
        Ok(ids.unwrap_or_default())
    };
    ModelConfig {
        architecture,
        layer_kinds,
        hidden,
        intermediate,
        heads,
        kv_heads: layer.kv_heads,
        head_dim,
        vocab,
        context,
        norm_eps: text.get(norm_eps_name)?.unwrap_or(norm_eps),
        tied: tied.unwrap_or(matches!(architecture, Architecture::SmolLm3 | Architecture::Lfm2)),
        biases: biases(&text, architecture)?,
        multipliers: multipliers(&text, architecture)?,
        rope,
        recurrence,
        experts: ExpertsConfig::read(&text, architecture, geometry.num_layers)?,
        states: geometry.states,
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
        Architecture::Phi3 | Architecture::Lfm2 => Biases::default(),
        Architecture::Qwen3
        | Architecture::Olmo2
        | Architecture::Qwen35
        | Architecture::Qwen3Next
        | Architecture::GraniteHybrid => Biases { qkv: attention, out: attention, mlp: false },
        Architecture::Llama
        | Architecture::Mistral
        | Architecture::Granite
        | Architecture::SmolLm3 => Biases { qkv: attention, out: attention, mlp },
    })
}

fn multipliers(text: &Object<'_>, architecture: Architecture) -> Result<Multipliers, ConfigError> {
    if !matches!(architecture, Architecture::Granite | Architecture::GraniteHybrid) {
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

/// Returns window and rotation of every layer; a list of windows must be one that the architecture
/// can have.
fn layer_kinds(
    text: &Object<'_>,
    architecture: Architecture,
    geometry: &ModelGeometry,
) -> Result<Vec<LayerKind>, ConfigError> {
    if !architecture.recurrent_layers().is_empty() {
        return hybrid_kinds(text, architecture, geometry);
    }
    let rule = Windows::read(text, architecture.name(), &mut Vec::new())?;
    if rule.are_used && text.number("sliding_window")? == Some(0) {
        return Err(ConfigError::Zero { field: text.name("sliding_window") });
    }
    let types = text.get::<Vec<&str>>("layer_types")?.unwrap_or_default();
    let is_choice =
        matches!(architecture, Architecture::Qwen2 | Architecture::Qwen3 | Architecture::SmolLm3);
    let is_other = |name: &&&str| !["full_attention", "sliding_attention"].contains(*name);
    if let Some(other) = types.iter().find(is_other) {
        let (field, got) = ("layer_types", (*other).to_owned());
        let expected = "full_attention or sliding_attention";
        return Err(ConfigError::Unsupported { field, got, expected });
    }
    for ((index, name), layer) in types.into_iter().enumerate().zip(&geometry.layers) {
        if name == "sliding_attention" && layer.window.is_none() {
            return Err(no_window(text));
        }
        let usual = rule.of(index);
        if !is_choice && layer.window != usual {
            let has = if usual.is_some() { "have" } else { "have no" };
            let problem = format!("names {name}, but all layers of {architecture} {has} windows");
            return Err(field_error(text.name("layer_types"), problem));
        }
    }
    let rotates = match architecture {
        Architecture::SmolLm3 => rotating(text, geometry.num_layers)?,
        _ => vec![true; to_usize(geometry.num_layers)],
    };
    Ok(geometry.layer_kinds(rotates))
}

/// Returns which layers of a hybrid model attend, and whether these rotate Q and K.
fn hybrid_kinds(
    text: &Object<'_>,
    architecture: Architecture,
    geometry: &ModelGeometry,
) -> Result<Vec<LayerKind>, ConfigError> {
    let listed = recurrent::layer_names(text, geometry.num_layers)?;
    let is_known = |name: &&str| {
        ["full_attention", "attention"].contains(name)
            || architecture.recurrent_layers().contains(name)
    };
    let names = listed.as_ref().map_or(&[][..], |(_, names)| names.as_slice());
    if let (Some(other), Some((field, _))) = (names.iter().find(|name| !is_known(name)), &listed) {
        let expected = "full_attention, or the name of the recurrence of the model";
        let got = (*other).to_owned();
        return Err(ConfigError::Unsupported { field, got, expected });
    }
    if geometry.layers.iter().any(|layer| layer.window.is_some()) {
        let problem = format!("is used, but no layer of {architecture} has a window");
        return Err(field_error(text.name("sliding_window"), problem));
    }
    let rotates = match text.get::<&str>("position_embedding_type")? {
        _ if architecture != Architecture::GraniteHybrid => true,
        Some("rope") => true,
        None | Some("nope") => false,
        Some(other) => {
            let (field, got) = ("position_embedding_type", other.to_owned());
            return Err(ConfigError::Unsupported { field, got, expected: "rope, nope or null" });
        }
    };
    Ok(geometry.hybrid_kinds(rotates))
}

fn no_window(text: &Object<'_>) -> ConfigError {
    let problem = match text.value("use_sliding_window") {
        Some(Value::Bool(false)) => "names sliding_attention, but use_sliding_window is false",
        _ => "names sliding_attention, but there is no sliding_window",
    };
    field_error(text.name("layer_types"), problem.to_owned())
}
