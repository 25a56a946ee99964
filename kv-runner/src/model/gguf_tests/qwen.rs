//! Converts recorded models of Qwen3-Next and Qwen3.5 as llama.cpp's converter does.
use std::collections::BTreeMap;

use candle_core::quantized::gguf_file::Value;

use super::Contents;
use super::converter::{fields, named, number, real};
use crate::model::recorded::Recorded;
use crate::num::to_usize;

/// Sizes of linear attention.
struct Sizes {
    k_heads: usize,
    /// Heads of V for each head of K.
    shared: usize,
    k_dim: usize,
    v_dim: usize,
    hidden: usize,
    /// Whether the heads of V take turns.
    takes_turns: bool,
}

impl Sizes {
    /// Puts heads of V, of `extent` values each, from groups into turns.
    fn turns(&self, values: &[f32], extent: usize) -> Vec<f32> {
        if !self.takes_turns {
            return values.to_vec();
        }
        let heads: Vec<_> = values.chunks(extent).collect();
        assert_eq!(heads.len(), self.k_heads * self.shared);
        let order = (0..self.shared)
            .flat_map(|own| (0..self.k_heads).map(move |group| group * self.shared + own));
        order.flat_map(|head| heads[head].iter().copied()).collect()
    }

    /// Does so for what is behind Q and K, in rows of `width` values.
    fn turns_behind(&self, values: &[f32], width: usize) -> Vec<f32> {
        let (keys, rest) = values.split_at(2 * self.k_heads * self.k_dim * width);
        [keys.to_vec(), self.turns(rest, self.v_dim * width)].concat()
    }

    /// Splits rows of which each head of K has some of every part.
    fn parts(&self, values: &[f32], rows: &[usize]) -> Vec<Vec<f32>> {
        let mut parts = vec![Vec::new(); rows.len()];
        for mut group in values.chunks(values.len() / self.k_heads) {
            for (part, rows) in parts.iter_mut().zip(rows) {
                let (own, rest) = group.split_at(rows * self.hidden);
                part.extend_from_slice(own);
                group = rest;
            }
            assert!(group.is_empty());
        }
        parts
    }
}

/// Converts a recorded model.
pub(super) fn contents(case: &Recorded, architecture: &'static str) -> Contents {
    let size = |field| to_usize(number(case, field));
    let (k_heads, v_heads) = (size("linear_num_key_heads"), size("linear_num_value_heads"));
    let sizes = Sizes {
        k_heads,
        shared: v_heads / k_heads,
        k_dim: size("linear_key_head_dim"),
        v_dim: size("linear_value_head_dim"),
        hidden: size("hidden_size"),
        takes_turns: architecture != "qwen3next",
    };
    let mut tensors = Vec::new();
    // By layer and kind.
    let mut experts: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for (name, shape, values) in case.weights() {
        // Images have a file of their own.
        if name.starts_with("model.visual.") {
            continue;
        }
        let name = name.replacen("language_model.", "", 1);
        let whole = match name.as_str() {
            "model.embed_tokens.weight" => Some("token_embd.weight"),
            "lm_head.weight" => Some("output.weight"),
            _ => None,
        };
        if let Some(whole) = whole {
            tensors.push((whole.to_owned(), shape.to_vec(), values));
        } else if name == "model.norm.weight" {
            let values = values.iter().map(|x| x + 1.0).collect();
            tensors.push(("output_norm.weight".to_owned(), shape.to_vec(), values));
        } else {
            let rest = name.strip_prefix("model.layers.").expect("a layer");
            let (layer, part) = rest.split_once('.').expect("a part");
            if let Some(expert) = part.strip_prefix("mlp.experts.") {
                let (index, kind) = expert.split_once('.').expect("a kind");
                let kind = kind.strip_suffix("_proj.weight").expect("a matrix").to_owned();
                let of = experts.entry((layer.to_owned(), kind)).or_default();
                of.push((index.parse::<u32>().expect("an index"), shape.to_vec(), values));
                continue;
            }
            for (own, shape, values) in converted(&sizes, part, shape, values) {
                tensors.push((format!("blk.{layer}.{own}"), shape, values));
            }
        }
    }
    for ((layer, kind), mut of) in experts {
        of.sort_by_key(|(index, ..)| *index);
        let shape = [&[of.len()], of[0].1.as_slice()].concat();
        let values = of.into_iter().flat_map(|(.., values)| values).collect();
        tensors.push((format!("blk.{layer}.ffn_{kind}_exps.weight"), shape, values));
    }
    let keys = keys(case, architecture);
    Contents { architecture, keys, tensors, is_quantised: false }
}

/// Converts a tensor of a layer.
fn converted(
    sizes: &Sizes,
    part: &str,
    shape: &[usize],
    mut values: Vec<f32>,
) -> Vec<(String, Vec<usize>, Vec<f32>)> {
    let Sizes { hidden, shared, k_dim, v_dim, .. } = *sizes;
    let matrix = |name: &str, values: Vec<f32>| {
        (name.to_owned(), vec![values.len() / hidden, hidden], values)
    };
    let mut shape = shape.to_vec();
    match part {
        "linear_attn.in_proj_qkvz.weight" => {
            let parts = sizes.parts(&values, &[k_dim, k_dim, shared * v_dim, shared * v_dim]);
            let qkv = sizes.turns_behind(&parts[..3].concat(), hidden);
            let z = sizes.turns(&parts[3], v_dim * hidden);
            return vec![matrix("attn_qkv.weight", qkv), matrix("attn_gate.weight", z)];
        }
        "linear_attn.in_proj_ba.weight" if sizes.takes_turns => {
            let parts = sizes.parts(&values, &[shared, shared]);
            let [b, a] = [&parts[0], &parts[1]].map(|part| sizes.turns(part, hidden));
            return vec![matrix("ssm_beta.weight", b), matrix("ssm_alpha.weight", a)];
        }
        "linear_attn.A_log" => {
            let decays: Vec<_> = values.iter().map(|x| -x.exp()).collect();
            values = sizes.turns(&decays, 1);
        }
        "linear_attn.dt_bias" => values = sizes.turns(&values, 1),
        "linear_attn.conv1d.weight" => {
            shape.remove(1);
            values = sizes.turns_behind(&values, shape[1]);
        }
        "linear_attn.in_proj_qkv.weight" => values = sizes.turns_behind(&values, hidden),
        "linear_attn.in_proj_z.weight" => values = sizes.turns(&values, v_dim * hidden),
        "linear_attn.in_proj_a.weight" | "linear_attn.in_proj_b.weight" => {
            values = sizes.turns(&values, hidden);
        }
        "linear_attn.out_proj.weight" => {
            let rows = values.chunks(shape[1]);
            values = rows.flat_map(|row| sizes.turns(row, v_dim)).collect();
        }
        "linear_attn.norm.weight" => {}
        norm if norm.ends_with("norm.weight") => values.iter_mut().for_each(|x| *x += 1.0),
        _ => {}
    }
    vec![(name(part), shape, values)]
}

/// Returns the name of a tensor of a layer.
fn name(part: &str) -> String {
    let (start, kind) = part.rsplit_once('.').expect("a kind");
    let known = match start {
        "linear_attn" if kind == "A_log" => return "ssm_a".to_owned(),
        "linear_attn" if kind == "dt_bias" => return "ssm_dt.bias".to_owned(),
        "linear_attn.conv1d" => "ssm_conv1d",
        "linear_attn.in_proj_qkv" => "attn_qkv",
        "linear_attn.in_proj_z" => "attn_gate",
        "linear_attn.in_proj_a" => "ssm_alpha",
        "linear_attn.in_proj_b" => "ssm_beta",
        "linear_attn.in_proj_ba" => "ssm_ba",
        "linear_attn.norm" => "ssm_norm",
        "linear_attn.out_proj" => "ssm_out",
        "input_layernorm" => "attn_norm",
        "post_attention_layernorm" => "post_attention_norm",
        "self_attn.q_proj" => "attn_q",
        "self_attn.k_proj" => "attn_k",
        "self_attn.v_proj" => "attn_v",
        "self_attn.o_proj" => "attn_output",
        "self_attn.q_norm" => "attn_q_norm",
        "self_attn.k_norm" => "attn_k_norm",
        "mlp.gate_proj" => "ffn_gate",
        "mlp.up_proj" => "ffn_up",
        "mlp.down_proj" => "ffn_down",
        "mlp.gate" => "ffn_gate_inp",
        "mlp.shared_expert_gate" => "ffn_gate_inp_shexp",
        "mlp.shared_expert.gate_proj" => "ffn_gate_shexp",
        "mlp.shared_expert.up_proj" => "ffn_up_shexp",
        "mlp.shared_expert.down_proj" => "ffn_down_shexp",
        other => panic!("{other}"),
    };
    format!("{known}.{kind}")
}

fn keys(case: &Recorded, architecture: &str) -> Vec<(String, Value)> {
    let config = fields(case);
    let count = |field| Value::U32(number(case, field));
    let rope = &config["rope_parameters"];
    let part = rope["partial_rotary_factor"].as_f64().expect("a part");
    let rotated = (1..=number(case, "head_dim"))
        .find(|dim| f64::from(*dim) >= part * f64::from(number(case, "head_dim")));
    let inner = number(case, "linear_value_head_dim") * number(case, "linear_num_value_heads");
    let mut keys = vec![
        ("embedding_length", count("hidden_size")),
        ("block_count", count("num_hidden_layers")),
        ("attention.head_count", count("num_attention_heads")),
        ("attention.head_count_kv", count("num_key_value_heads")),
        ("attention.key_length", count("head_dim")),
        ("attention.value_length", count("head_dim")),
        ("attention.layer_norm_rms_epsilon", real(&config["rms_norm_eps"])),
        ("feed_forward_length", count("intermediate_size")),
        ("context_length", count("max_position_embeddings")),
        ("rope.freq_base", real(&rope["rope_theta"])),
        ("rope.dimension_count", Value::U32(rotated.expect("a part of a head"))),
        ("ssm.conv_kernel", count("linear_conv_kernel_dim")),
        ("ssm.state_size", count("linear_key_head_dim")),
        ("ssm.group_count", count("linear_num_key_heads")),
        ("ssm.time_step_rank", count("linear_num_value_heads")),
        ("ssm.inner_size", Value::U32(inner)),
    ];
    if architecture != "qwen3next" {
        let sections = [11, 11, 10, 0].map(Value::I32).to_vec();
        keys.push(("rope.dimension_sections", Value::Array(sections)));
    }
    if rope["rope_type"] == "linear" {
        keys.push(("rope.scaling.type", Value::String("linear".to_owned())));
        keys.push(("rope.scaling.factor", real(&rope["factor"])));
    }
    let layers = config["layer_types"].as_array().expect("layers");
    let is_recurrent: Vec<_> = layers.iter().map(|name| name == "linear_attention").collect();
    let first = is_recurrent.iter().position(|is_recurrent| !is_recurrent).expect("attention");
    let is_regular = (0..layers.len()).all(|at| is_recurrent[at] == ((at + 1) % (first + 1) != 0));
    if is_regular {
        let interval = u32::try_from(first + 1).expect("small");
        keys.push(("full_attention_interval", Value::U32(interval)));
    } else {
        let list = is_recurrent.into_iter().map(Value::Bool).collect();
        keys.push(("attention.recurrent_layers", Value::Array(list)));
    }
    if config["num_experts"].as_u64().is_some_and(|count| count > 0) {
        keys.extend([
            ("expert_count", count("num_experts")),
            ("expert_used_count", count("num_experts_per_tok")),
            ("expert_feed_forward_length", count("moe_intermediate_size")),
            ("expert_shared_feed_forward_length", count("shared_expert_intermediate_size")),
        ]);
        if config["norm_topk_prob"] == false {
            keys.push(("expert_weights_norm", Value::Bool(false)));
        }
    }
    named(architecture, keys)
}
