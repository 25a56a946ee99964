//! Finds the layers of a model with attention, and those of them with a window.
use serde_json::Value;

use super::{CHUNKED, COUNT_MAX, LEN_MAX, bounded, divide, is_last, per_layer};
use crate::error::ConfigError;
use crate::num::{to_u32, to_usize};
use crate::object::{Object, whole, wrong};

/// The use of the cache by one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    /// Attention over all tokens, or over the last `window`.
    Attention { window: Option<u32> },
    /// A recurrence, whose state does not grow.
    Recurrent,
    /// Neither: no memory, or one that is not known.
    None,
}

/// The kind of a layer in a list of layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ListedKind {
    Full,
    Sliding,
    Chunked,
    /// Attention, with a window or not.
    Attention,
    Recurrent,
    Other,
}

/// Returns the uses of all layers.
pub(crate) fn uses(
    keys: &Object<'_>,
    architecture: &str,
    num_layers: u32,
    notes: &mut Vec<String>,
) -> Result<Vec<Use>, ConfigError> {
    let listed_kinds = match listed_kinds(keys, num_layers)? {
        Some(listed_kinds) => listed_kinds,
        None => by_rule(keys, architecture, num_layers)?,
    };
    let windows = Windows::read(keys, architecture, notes)?;
    if listed_kinds.contains(&ListedKind::Chunked) && windows.chunk.is_some() {
        notes.push(CHUNKED.to_owned());
    }
    let uses: Vec<_> = listed_kinds
        .iter()
        .zip(0..)
        .map(|(layer, index)| match layer {
            ListedKind::Full => Use::Attention { window: None },
            ListedKind::Sliding => Use::Attention { window: windows.size },
            ListedKind::Chunked => Use::Attention { window: windows.chunk.or(windows.size) },
            ListedKind::Attention => Use::Attention { window: windows.of(index) },
            ListedKind::Recurrent => Use::Recurrent,
            ListedKind::Other => Use::None,
        })
        .collect();
    Ok(uses)
}

/// Names the kind of the layers whose memory is not counted.
pub(crate) fn others(keys: &Object<'_>, architecture: &str) -> &'static str {
    match architecture {
        "mllama_text_model" => "cross attention to pictures",
        _ if keys.has("block_configs") => "without attention",
        _ => "state-space layers or have no attention",
    }
}

/// Reads the kinds of the layers from a list in the file.
fn listed_kinds(
    keys: &Object<'_>,
    num_layers: u32,
) -> Result<Option<Vec<ListedKind>>, ConfigError> {
    let check = |key: &str, list| per_layer(keys.name(key), list, num_layers).map(Some);
    for key in ["layer_types", "layers_block_type", "attention_layers"] {
        if let Some(list) = keys.list(key)? {
            let list = list.iter().map(|value| layer_type(key, value));
            return check(key, list.collect::<Result<_, _>>()?);
        }
    }
    // Repeated over the layers.
    if let Some(list) = keys.list("block_types")?.filter(|list| !list.is_empty()) {
        let list = list.iter().map(|value| layer_type("block_types", value));
        let list = list.collect::<Result<Vec<_>, _>>()?;
        return Ok(Some(list.into_iter().cycle().take(to_usize(num_layers)).collect()));
    }
    if let Some(pattern) = keys.text("hybrid_override_pattern") {
        let layer = |letter| match letter {
            '*' => ListedKind::Full,
            'M' => ListedKind::Recurrent,
            // An MLP, or experts.
            _ => ListedKind::Other,
        };
        return check("hybrid_override_pattern", pattern.chars().map(layer).collect());
    }
    if let Some(list) = keys.numbers("attn_type_list")? {
        let layer = |kind| if kind == 1 { ListedKind::Attention } else { ListedKind::Recurrent };
        return check("attn_type_list", list.into_iter().map(layer).collect());
    }
    if let Some(types) = keys.list("attention_types")? {
        return check("attention_types", repeated(types, num_layers)?);
    }
    layers_by_index(keys, num_layers)
}

/// Reads the kind of one layer.
fn layer_type(key: &str, value: &Value) -> Result<ListedKind, ConfigError> {
    match value.as_str() {
        Some("full_attention" | "global_attention" | "global" | "self_attention" | "full") => {
            Ok(ListedKind::Full)
        }
        Some("sliding_attention" | "local" | "sliding" | "local_attention") => {
            Ok(ListedKind::Sliding)
        }
        Some("chunked_attention") => Ok(ListedKind::Chunked),
        Some("attention" | "hybrid" | "attn") => Ok(ListedKind::Attention),
        Some("linear_attention" | "mamba" | "mamba2" | "conv" | "recurrent" | "ssm" | "m") => {
            Ok(ListedKind::Recurrent)
        }
        Some("moe" | "mlp") => Ok(ListedKind::Other),
        _ => {
            Err(wrong(key.to_owned(), value, "the name of a kind of layer, such as full_attention"))
        }
    }
}

/// Reads lists of kinds with their numbers of repetitions: `[[["global", "local"], 12]]`.
fn repeated(types: &[Value], num_layers: u32) -> Result<Vec<ListedKind>, ConfigError> {
    let key = "attention_types";
    let mut layers = Vec::new();
    for part in types {
        let Some([Value::Array(kinds), times]) = part.as_array().map(Vec::as_slice) else {
            return Err(wrong(
                key.to_owned(),
                part,
                "a list of kinds and how often it is repeated",
            ));
        };
        let kinds = kinds.iter().map(|kind| layer_type(key, kind));
        let kinds = kinds.collect::<Result<Vec<_>, _>>()?;
        let times = bounded(key, whole(key.to_owned(), times)?, COUNT_MAX)?;
        // One extra layer is enough to detect too many.
        let most = (to_usize(num_layers) + 1).saturating_sub(layers.len());
        // A file may have any list.
        let all = kinds.len().saturating_mul(to_usize(times));
        layers.extend(kinds.into_iter().cycle().take(most.min(all)));
    }
    Ok(layers)
}

/// Reads the layers with attention by their indices, or by their period.
fn layers_by_index(
    keys: &Object<'_>,
    num_layers: u32,
) -> Result<Option<Vec<ListedKind>>, ConfigError> {
    let all = 0..num_layers;
    let of_two = |has: &dyn Fn(u32) -> bool, yes, no| {
        Some(all.clone().map(|index| if has(index) { yes } else { no }).collect())
    };
    let of = |has: &dyn Fn(u32) -> bool, yes| of_two(has, yes, ListedKind::Recurrent);
    for key in ["attn_layer_indices", "full_attn_idxs", "hybrid_layer_ids"] {
        if let Some(list) = keys.numbers(key)? {
            return Ok(of(&|index| list.contains(&index), ListedKind::Attention));
        }
    }
    if let Some(list) = keys.numbers("cross_attention_layers")? {
        let is_own = |index| !list.contains(&index);
        return Ok(of_two(&is_own, ListedKind::Full, ListedKind::Other));
    }
    if let Some(linear) = keys.object("linear_attn_config")? {
        // Numbered from 1.
        if let Some(list) = linear.numbers("full_attn_layers")? {
            return Ok(of(&|index| list.contains(&(index + 1)), ListedKind::Full));
        }
    }
    if let Some(period) = keys.number("attn_layer_period")? {
        let period = bounded("attn_layer_period", period.into(), COUNT_MAX)?;
        let offset = keys.number("attn_layer_offset")?.unwrap_or(0);
        let rest = |n: u32| n.checked_rem(period).unwrap_or(0);
        return Ok(of(&|index| rest(index) == offset, ListedKind::Attention));
    }
    if let Some(interval) = keys.number("full_attention_interval")? {
        let interval = bounded("full_attention_interval", interval.into(), COUNT_MAX)?;
        return Ok(of(&|index| is_last(index, interval), ListedKind::Full));
    }
    Ok(None)
}

/// Returns whether models of this architecture use a window only if `use_sliding_window` says so.
fn is_optional(architecture: &str) -> bool {
    architecture.starts_with("qwen") || architecture == "smollm3"
}

/// Applies the rule of the model's type, if no list names the layers.
fn by_rule(
    keys: &Object<'_>,
    architecture: &str,
    num_layers: u32,
) -> Result<Vec<ListedKind>, ConfigError> {
    let all = 0..num_layers;
    let by_rotation = |without, with| {
        let kind = |rotates| if rotates { with } else { without };
        Ok::<_, ConfigError>(rotating(keys, num_layers)?.into_iter().map(kind).collect())
    };
    Ok(match architecture {
        "qwen3_next" | "qwen3_5" | "qwen3_5_text" | "qwen3_5_moe" | "qwen3_5_moe_text"
        | "olmo_hybrid" => {
            let kind = |i| if is_last(i, 4) { ListedKind::Full } else { ListedKind::Recurrent };
            all.map(kind).collect()
        }
        "mamba" | "mamba2" | "falcon_mamba" => all.map(|_| ListedKind::Recurrent).collect(),
        // Layers without a rotary embedding see all tokens, the others their chunk.
        "llama4_text" | "llama4" => by_rotation(ListedKind::Full, ListedKind::Chunked)?,
        "smollm3" => by_rotation(ListedKind::Sliding, ListedKind::Full)?,
        _ => all.map(|_| ListedKind::Attention).collect(),
    })
}

/// Returns which layers rotate Q and K, in models some of whose layers do not.
pub(crate) fn rotating(keys: &Object<'_>, num_layers: u32) -> Result<Vec<bool>, ConfigError> {
    if let Some(mut list) = keys.numbers("no_rope_layers")?.filter(|list| !list.is_empty()) {
        list.truncate(to_usize(num_layers));
        let list = per_layer(keys.name("no_rope_layers"), list, num_layers)?;
        // 1 means that the layer rotates, whatever the field's name suggests.
        return Ok(list
            .into_iter()
            .take(to_usize(num_layers))
            .map(|rotates| rotates != 0)
            .collect());
    }
    let interval = keys.number("no_rope_layer_interval")?.unwrap_or(4);
    let interval = bounded("no_rope_layer_interval", interval.into(), COUNT_MAX)?;
    Ok((0..num_layers).map(|index| !is_last(index, interval)).collect())
}

/// Windows of layers without a list of kinds.
pub(crate) struct Windows {
    /// Whether the model uses the window of its file.
    pub(crate) are_used: bool,
    size: Option<u32>,
    chunk: Option<u32>,
    rule: Rule,
}

/// The layers with the window.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Rule {
    All,
    /// All but the last of every period of this length.
    AllButLastOf(u32),
    From(u32),
    /// Whether each layer has the property; the list is repeated.
    Pattern(Vec<bool>),
}

impl Windows {
    pub(crate) fn read(
        keys: &Object<'_>,
        architecture: &str,
        notes: &mut Vec<String>,
    ) -> Result<Self, ConfigError> {
        // Some files write 0 for no window.
        let given = |key: &str| -> Result<Option<u32>, ConfigError> {
            let Some(value) = keys.value(key).filter(|value| value.as_u64() != Some(0)) else {
                return Ok(None);
            };
            // A window longer than any context means none.
            let window = whole(keys.name(key), value)?.min(LEN_MAX.into());
            bounded(key, window, LEN_MAX).map(Some)
        };
        let are_used = match architecture {
            "olmo2" | "granite" => false,
            _ => keys.flag("use_sliding_window")?.unwrap_or(!is_optional(architecture)),
        };
        let mut size = None;
        for key in ["sliding_window", "attention_window_size", "window_size"] {
            // Vision encoders and others have a window_size too.
            if size.is_none() && (key != "window_size" || architecture == "gpt_neo") {
                size = given(key)?;
            }
        }
        if size.is_none() && !keys.has("sliding_window") {
            size = keys.count(&["sliding_window"], notes)?;
        }
        let (rule, chunk) = (Self::rule(keys, architecture)?, given("attention_chunk_size")?);
        Ok(Self { are_used, size: size.filter(|_| are_used), chunk, rule })
    }

    fn rule(keys: &Object<'_>, architecture: &str) -> Result<Rule, ConfigError> {
        let pattern = match keys.value("sliding_window_pattern") {
            Some(Value::String(letters)) => {
                return Ok(Rule::Pattern(letters.chars().map(|letter| letter == 'L').collect()));
            }
            Some(value) => {
                let key = "sliding_window_pattern";
                Some(bounded(key, whole(keys.name(key), value)?, COUNT_MAX)?)
            }
            None => None,
        };
        Ok(match architecture {
            "gemma2" | "gpt_oss" => Rule::AllButLastOf(pattern.unwrap_or(2)),
            "gemma3" | "gemma3_text" => Rule::AllButLastOf(pattern.unwrap_or(6)),
            "gemma3n" | "gemma3n_text" => Rule::AllButLastOf(pattern.unwrap_or(5)),
            "cohere2" | "olmo3" | "exaone4" => Rule::AllButLastOf(pattern.unwrap_or(4)),
            _ if architecture.starts_with("qwen") => {
                Rule::From(keys.number("max_window_layers")?.unwrap_or(28))
            }
            _ => pattern.map_or(Rule::All, Rule::AllButLastOf),
        })
    }

    pub(crate) fn of(&self, index: usize) -> Option<u32> {
        let number = to_u32(index);
        let has = match &self.rule {
            Rule::All => true,
            Rule::AllButLastOf(period) => !is_last(number, *period),
            Rule::From(first) => number >= *first,
            Rule::Pattern(pattern) => {
                let place = index.checked_rem(pattern.len()).unwrap_or(0);
                pattern.get(place) == Some(&true)
            }
        };
        self.size.filter(|_| has)
    }
}

/// Returns the kv heads of one entry of `block_configs`, 0 for a block without attention.
pub(crate) fn heads_of_block(block: &Value, heads: u32) -> Result<u32, ConfigError> {
    let Some(attention) = Object::new("block_configs", block)?.object("attention")? else {
        return Err(ConfigError::Missing { field: "block_configs attention" });
    };
    let is_none = |key| Ok::<_, ConfigError>(attention.flag(key)?.unwrap_or(false));
    if is_none("no_op")? || is_none("replace_with_linear")? {
        return Ok(0);
    }
    let per_group = attention.required_count(&["n_heads_in_group"], &mut Vec::new())?;
    divide(("num_attention_heads", heads), ("n_heads_in_group", per_group))
}
