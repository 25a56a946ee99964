//! Reads the geometry of a `config.json`, by the field names and rules of published models.
//!
//! Lenient in fields that a plan does not depend on (rotary embeddings, activations, experts),
//! exact in the others. A model of an unknown type is planned from the usual fields, with a note.
mod types;

use serde_json::Value;

use super::layers::{self, Use};
use super::{
    COUNT_MAX, Kept, LAYERS_MAX, LEN_MAX, LayerGeometry, ModelGeometry, Rows, bounded,
    check_attention, divide, note_of_others, note_of_shared, per_layer, states,
};
use crate::error::{ConfigError, Error};
use crate::num::to_usize;
use crate::object::{Object, whole};
pub(crate) use types::defaults;
use types::{ENCODERS, KNOWN, STATE_SPACE};

/// Field names of the number of layers, query heads, kv heads, and of the hidden size.
pub(super) const LAYERS: [&str; 5] =
    ["num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers"];
const HEADS: [&str; 5] =
    ["num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"];
const KV_HEADS: [&str; 5] =
    ["num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads", "multi_query_group_num"];
const HIDDEN: [&str; 5] = ["hidden_size", "n_embd", "n_embed", "d_model", "model_dim"];
const HEAD_DIM: [&str; 4] = ["head_dim", "attention_head_dim", "kv_channels", "d_kv"];
/// The first one that exists is used: files have several that differ.
const CONTEXT: [&str; 10] = [
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "max_target_positions",
    "max_context_length",
    "model_max_length",
    "max_decoder_position_embeddings",
];

/// Objects of the text decoder in multimodal models.
const TEXT_PARTS: [&str; 6] =
    ["text_config", "llm_config", "language_config", "thinker_config", "text_model", "llm"];

/// Reads the object of a file.
pub(super) fn geometry(outer: Object<'_>) -> Result<ModelGeometry, ConfigError> {
    let text = text_part(outer)?;
    let architecture = name(&text).or_else(|| name(&outer)).unwrap_or_default().to_owned();
    check_attention(&architecture, STATE_SPACE, ENCODERS)?;
    let mut notes = Vec::new();
    let text = text.with_defaults(defaults(&architecture, has_text_part(&outer)));
    let is_t5 = architecture.ends_with("t5") || text.has("num_decoder_layers");
    let is_pair = text.flag("is_encoder_decoder")?.unwrap_or(false) || text.has("decoder_layers");
    let (num_layers, kept) = if is_t5 || is_pair {
        notes.push(
            "an encoder and a decoder: self-attention of the decoder is counted; what its cross \
             attention keeps grows with the input and is not"
                .to_owned(),
        );
        encoder_decoder(&text, &architecture, is_t5, &mut notes)?
    } else {
        decoder(&text, &architecture, &mut notes)?
    };
    kept.check()?;
    if architecture.is_empty() {
        notes.push("the file names no model_type: planned from its fields".to_owned());
    } else if !(is_t5 || is_pair || KNOWN.split_whitespace().any(|name| name == architecture)) {
        notes.push(format!("model_type {architecture:?} is unknown: planned from its fields"));
    }
    let context = context(&text)?.or(context(&outer)?);
    Ok(kept.into_geometry(architecture, num_layers, context, notes))
}

/// Reads the object that describes a decoder of a known architecture.
pub(crate) fn of_decoder(
    text: &Object<'_>,
    architecture: &str,
) -> Result<ModelGeometry, ConfigError> {
    let mut notes = Vec::new();
    let (num_layers, kept) = decoder(text, architecture, &mut notes)?;
    Ok(kept.into_geometry(architecture.to_owned(), num_layers, context(text)?, notes))
}

fn name<'a>(keys: &Object<'a>) -> Option<&'a str> {
    keys.text("model_type").filter(|name| !name.is_empty())
}

fn has_text_part(outer: &Object<'_>) -> bool {
    outer.first(&TEXT_PARTS).is_some()
}

/// Returns the object that describes the text decoder.
fn text_part(outer: Object<'_>) -> Result<Object<'_>, ConfigError> {
    let Some((key, _)) = outer.first(&TEXT_PARTS) else {
        return Ok(outer);
    };
    let Some(inner) = outer.object(key)? else {
        return Ok(outer);
    };
    if has_text_part(&inner) {
        // One more level, as in a model with separate text and speech parts.
        return text_part(inner);
    }
    let has_layers = inner.first(&LAYERS).is_some();
    let has_defaults = name(&inner).is_some_and(|name| !defaults(name, true).is_empty());
    let is_outside = outer.first(&LAYERS).is_some() && !has_layers;
    Ok(if is_outside || !(has_layers || has_defaults) { outer } else { inner })
}

fn context(keys: &Object<'_>) -> Result<Option<u32>, ConfigError> {
    let Some((key, value)) = keys.first(&CONTEXT) else {
        return keys.count(&["max_position_embeddings"], &mut Vec::new());
    };
    bounded(key, whole(keys.name(key), value)?, LEN_MAX).map(Some)
}

/// The number of layers, and what they keep.
type Layers = (u32, Kept);

fn encoder_decoder(
    keys: &Object<'_>,
    architecture: &str,
    is_t5: bool,
    notes: &mut Vec<String>,
) -> Result<Layers, ConfigError> {
    let (layers, heads): (&[_], _) = if is_t5 {
        (&["num_decoder_layers", "num_layers", "num_hidden_layers"], &HEADS[..])
    } else {
        (&["decoder_layers", "num_hidden_layers"], &["decoder_attention_heads"][..])
    };
    let (field, value) = keys.first(layers).ok_or(ConfigError::Missing {
        field: if is_t5 { "num_decoder_layers" } else { "decoder_layers" },
    })?;
    let num_layers = bounded(field, whole(keys.name(field), value)?, LAYERS_MAX)?;
    let heads = keys.required_count(heads, notes)?;
    let dim = head_dim(keys, architecture, heads, notes)?;
    let kind = LayerGeometry {
        kv_heads: heads,
        head_dim_k: dim,
        head_dim_v: dim,
        window: None,
        is_latent: false,
    };
    let rows = (0..num_layers).map(|layer| (layer, kind)).collect();
    Ok((num_layers, Kept { rows, states: Vec::new() }))
}

fn decoder(
    keys: &Object<'_>,
    architecture: &str,
    notes: &mut Vec<String>,
) -> Result<Layers, ConfigError> {
    let num_layers = keys.required_count(&LAYERS, notes)?;
    let num_layers = bounded("num_hidden_layers", num_layers.into(), LAYERS_MAX)?;
    let mut uses = layers::uses(keys, architecture, num_layers, notes)?;
    let has_attention = |layer: &Use| matches!(layer, Use::Attention { .. });
    let attention = uses.iter().filter(|layer| has_attention(layer)).count();
    // A model without attention needs no heads.
    let rows = (attention > 0).then(|| Rows::read(keys, architecture, num_layers, notes));
    let rows = rows.transpose()?;
    let found = states::of_config(keys, architecture, notes)?;
    if found.is_none() {
        notes.extend(note_of_others(attention, num_layers, layers::others(keys, architecture)));
    }
    let shared = match keys.number("num_kv_shared_layers")? {
        Some(shared) => shared,
        None => keys.count(&["num_kv_shared_layers"], notes)?.unwrap_or(0),
    };
    notes.extend(note_of_shared(shared, num_layers));
    uses.truncate(to_usize(num_layers.saturating_sub(shared)));
    let kept = uses.iter().zip(0_u32..).map(|(layer, index)| match layer {
        Use::Attention { window } => {
            let layer = rows.as_ref().and_then(|rows| rows.layer(to_usize(index), *window));
            (index, layer, false)
        }
        Use::Recurrent => (index, None, true),
        Use::None => (index, None, false),
    });
    Ok((num_layers, Kept::of(kept, found.as_ref())))
}

impl Rows {
    fn read(
        keys: &Object<'_>,
        architecture: &str,
        num_layers: u32,
        notes: &mut Vec<String>,
    ) -> Result<Self, ConfigError> {
        // Files of models without MLA have 0 or null.
        let is_latent = keys.flag("use_mla")?.unwrap_or(true);
        let rank = keys.number("kv_lora_rank")?.filter(|rank| *rank > 0 && is_latent);
        if let Some(rank) = rank {
            let rope = keys.required_count(&["qk_rope_head_dim"], notes)?;
            let rank = bounded("kv_lora_rank", rank.into(), COUNT_MAX)?;
            let dim_k = rank + rope;
            let global = (None, None);
            return Ok(Self { kv_heads: vec![1], dim_k, dim_v: rank, is_latent: true, global });
        }
        let (kv_heads, heads) = kv_heads(keys, architecture, num_layers, notes)?;
        let dim_k = match heads {
            Some(heads) => head_dim(keys, architecture, heads, notes)?,
            None => keys.required_count(&HEAD_DIM, notes)?,
        };
        if let ([kv_heads], Some(heads)) = (kv_heads.as_slice(), heads) {
            divide(("num_attention_heads", heads), ("num_key_value_heads", *kv_heads))?;
        }
        let dim_v = match keys.number("v_head_dim")?.filter(|dim| *dim > 0) {
            Some(dim) => bounded("v_head_dim", dim.into(), COUNT_MAX)?,
            None => dim_k,
        };
        let global = (
            keys.count(&["num_global_key_value_heads"], notes)?,
            keys.count(&["global_head_dim"], notes)?,
        );
        Ok(Self { kv_heads, dim_k, dim_v, is_latent: false, global })
    }
}

/// Returns the kv heads, one number or one per layer, and the query heads if one number has both.
fn kv_heads(
    keys: &Object<'_>,
    architecture: &str,
    num_layers: u32,
    notes: &mut Vec<String>,
) -> Result<(Vec<u32>, Option<u32>), ConfigError> {
    if let Some(blocks) = keys.list("block_configs")? {
        let heads = keys.required_count(&HEADS, notes)?;
        let list = blocks.iter().map(|block| layers::heads_of_block(block, heads));
        let list = list.collect::<Result<Vec<_>, _>>()?;
        return per_layer(keys.name("block_configs"), list, num_layers)
            .map(|list| (list, Some(heads)));
    }
    for key in ["num_kv_heads", "num_key_value_heads", "num_key_value_heads_per_layer"] {
        if keys.value(key).is_some_and(Value::is_array) {
            let list = keys.numbers(key)?.unwrap_or_default();
            for count in &list {
                bounded(key, u64::from(*count).max(1), COUNT_MAX)?;
            }
            let heads = keys.first(&HEADS).filter(|(_, value)| !value.is_array());
            let heads = if heads.is_some() { keys.count(&HEADS, notes)? } else { None };
            return per_layer(keys.name(key), list, num_layers).map(|list| (list, heads));
        }
    }
    let heads = keys.required_count(&HEADS, notes)?;
    let given = match keys.object("attn_config")? {
        Some(attention) if keys.text("attn_type").is_none() => {
            let is_multi_query = attention.text("attn_type") == Some("multiquery_attention");
            if is_multi_query { Some(1) } else { attention.count(&KV_HEADS, notes)? }
        }
        _ => None,
    };
    let multi_query = |default| Ok(keys.flag("multi_query")?.unwrap_or(default));
    let kv_heads = match architecture {
        "gpt_bigcode" if multi_query(true)? => 1,
        "gpt_bigcode" => heads,
        "falcon" | "RefinedWeb" | "RefinedWebModel" => {
            let is_new = keys.flag("new_decoder_architecture")?.unwrap_or(false)
                || architecture == "RefinedWeb";
            if multi_query(!is_new)? && !is_new {
                1
            } else {
                keys.count(&KV_HEADS, notes)?.unwrap_or(heads)
            }
        }
        "chatglm" if !keys.flag("multi_query_attention")?.unwrap_or(false) => heads,
        _ => match given {
            Some(given) => given,
            None => keys.count(&KV_HEADS, notes)?.unwrap_or(heads),
        },
    };
    Ok((vec![kv_heads], Some(heads)))
}

/// Returns the head dim: given, or a share of the hidden size.
fn head_dim(
    keys: &Object<'_>,
    architecture: &str,
    heads: u32,
    notes: &mut Vec<String>,
) -> Result<u32, ConfigError> {
    if let Some(dim) = keys.count(&HEAD_DIM, notes)? {
        return Ok(dim);
    }
    // Configurations of these types leave it out if it has the usual value.
    let usual = match architecture {
        "qwen3" | "qwen3_moe" if !keys.has("head_dim") => Some(128),
        "gemma" | "gemma2" | "gemma3_text" | "gemma3n_text" | "qwen3_next" | "qwen3_5"
        | "qwen3_5_text" | "qwen3_5_moe" | "qwen3_5_moe_text" => Some(256),
        _ => None,
    };
    if let Some(dim) = usual {
        notes.push(format!("head_dim is not in the file: {dim}, as models of this type have it"));
        return Ok(dim);
    }
    let hidden = match keys.value("attention_hidden_size") {
        Some(_) => keys.required_count(&["attention_hidden_size"], notes)?,
        None => keys.required_count(&HIDDEN, notes)?,
    };
    divide(("hidden_size", hidden), ("num_attention_heads", heads))
}

/// Reads the text of a file.
pub(super) fn parse(text: &str) -> Result<ModelGeometry, Error> {
    let value = serde_json::from_str(text)?;
    let file = Object::new("", &value)?;
    let geometry = geometry(file).map_err(|error| {
        let none = "no model_type".to_owned();
        let model = name(&file).map_or(none, |name| format!("model_type {name:?}"));
        ConfigError::Model { model, source: Box::new(error) }
    });
    Ok(geometry?)
}
