//! Files of hybrid models whose keys and tensors contradict each other.
use candle_core::quantized::gguf_file::Value;

use super::{CASES, Contents};

type Change = fn(&mut Contents);

fn n(number: u32) -> Value {
    Value::U32(number)
}

fn list(numbers: &[i32]) -> Value {
    Value::Array(numbers.iter().copied().map(Value::I32).collect())
}

#[test]
fn files_that_contradict_themselves_are_refused_by_name() {
    let cases: [(&str, Change, &str); 12] = [
        ("lfm2", |of| of.set("shortconv.l_cache", None), "lfm2.shortconv.l_cache is missing"),
        (
            "lfm2",
            |of| of.put("shortconv.l_cache", Value::U32(1)),
            "lfm2.shortconv.l_cache is 1: a convolution sees at least 2",
        ),
        (
            "lfm2",
            |of| of.put("shortconv.l_cache", Value::U32(4)),
            "model.layers.0.conv.conv.weight",
        ),
        (
            "lfm2",
            |of| of.put("attention.sliding_window", Value::U32(4)),
            "lfm2.attention.sliding_window is 4, but no layer of lfm2 has a window",
        ),
        (
            "lfm2",
            |of| of.put("attention.causal", Value::Bool(false)),
            "lfm2.attention.causal is false",
        ),
        (
            "lfm2",
            |of| {
                let (name, ..) = of.tensor("blk.0.shortconv.conv.weight");
                "blk.0.shortconv.c.weight".clone_into(name);
            },
            "model.layers.0.conv.conv.weight",
        ),
        (
            "granitemoehybrid",
            |of| of.put("ssm.time_step_rank", Value::U32(5)),
            "ssm.inner_size 96 is not a multiple of ssm.time_step_rank 5",
        ),
        (
            "granitemoehybrid",
            |of| of.put("ssm.group_count", Value::U32(4)),
            "ssm.time_step_rank 6 is not a multiple of ssm.group_count 4",
        ),
        (
            "granitemoehybrid",
            |of| of.set("ssm.state_size", None),
            "granitehybrid.ssm.state_size is missing",
        ),
        (
            "granitemoehybrid",
            |of| of.put("expert_count", Value::U32(4)),
            "granitehybrid.expert_used_count is 0, at least 1 is needed",
        ),
        (
            "granitemoehybrid",
            |of| of.tensor("blk.0.ssm_a").2[1] = 0.5,
            "a decay of 0.5: a number below 0 is expected",
        ),
        (
            "granitemoehybrid",
            |of| "blk.0.ffn".clone_into(&mut of.tensor("blk.0.ffn_up.weight").0),
            "model.layers.0.mlp.up_proj.weight",
        ),
    ];
    for (name, change, words) in cases {
        let known = CASES.iter().find(|(known, _)| *known == name);
        let (_, mut contents) = Contents::of(name, known.expect("a case").1);
        change(&mut contents);
        let error = contents.decoder().expect_err(words);
        assert!(error.contains(words), "{error}");
    }
}

/// Requires that every change of a converted model is refused with these words.
fn check_refusals(name: &str, architecture: &'static str, cases: &[(Change, &str)]) {
    for (change, words) in cases {
        let (_, mut contents) = Contents::of(name, architecture);
        change(&mut contents);
        let error = contents.decoder().expect_err(words);
        assert!(error.contains(words), "{architecture}, {words}: {error}");
    }
}

#[test]
fn linear_attention_that_does_not_fit_is_refused() {
    let cases: [(Change, &str); 17] = [
        (|of| of.set("ssm.conv_kernel", None), "qwen35.ssm.conv_kernel is missing"),
        (|of| of.put("ssm.conv_kernel", n(1)), "is 1: a convolution sees at least 2"),
        (|of| of.put("ssm.state_size", n(0)), "qwen35.ssm.state_size is 0"),
        (
            |of| of.put("ssm.time_step_rank", n(5)),
            "ssm.inner_size 48 is not a multiple of ssm.time_step_rank 5",
        ),
        (
            |of| of.put("ssm.group_count", n(3)),
            "ssm.time_step_rank 4 is not a multiple of ssm.group_count 3",
        ),
        (|of| of.put("ssm.inner_size", n(1 << 21)), "ssm.inner_size is 2097152, at most"),
        (|of| of.put("ssm.state_size", n(9)), "linear_attn.in_proj_qkv.weight"),
        (|of| of.put("ssm.state_size", n(400)), "1600 rows of Q and K are expected"),
        (|of| of.put("full_attention_interval", n(0)), "qwen35.full_attention_interval is 0"),
        (|of| of.put("full_attention_interval", n(3)), "layers.2.self_attn.q_proj.weight"),
        (
            |of| of.put("attention.recurrent_layers", list(&[1, 0, 1])),
            "qwen35.attention.recurrent_layers has 3 entries for 4 layers",
        ),
        (
            |of| of.put("attention.recurrent_layers", Value::Bool(true)),
            "qwen35.attention.recurrent_layers is not a list with one entry per layer",
        ),
        (
            |of| of.put("nextn_predict_layers", n(4)),
            "qwen35.nextn_predict_layers is 4, but block_count is 4",
        ),
        (
            |of| of.put("attention.sliding_window", n(8)),
            "qwen35.attention.sliding_window is 8, but no layer of qwen3_5_text has a window",
        ),
        (|of| of.put("expert_count", n(8)), "qwen35.expert_count is 8: a mixture of experts"),
        (|of| of.tensor("blk.1.ssm_a").2[0] = 0.0, "a decay of 0: a number below 0 is expected"),
        (
            |of| drop(of.remove("blk.2.ssm_beta.weight")),
            "model.layers.2.linear_attn.in_proj_b.weight",
        ),
    ];
    check_refusals("qwen3_5_text", "qwen35", &cases);
}

#[test]
fn sections_that_leave_out_a_pair_are_refused() {
    const KEY: &str = "rope.dimension_sections";
    let cases: [(Change, &str); 6] = [
        (|of| of.put(KEY, list(&[2, 2])), "qwen35.rope.dimension_sections has 2 entries"),
        (|of| of.put(KEY, list(&[1, 1, 1, 1, 1])), "has 5 entries, 3 or 4 are expected"),
        (|of| of.put(KEY, list(&[0, 0, 0])), "is [0, 0, 0]: pair 0 of 2 has no axis"),
        (|of| of.put(KEY, list(&[1, 0, 1, 0])), "is [1, 0, 1, 0]: pair 1 of 2 has no axis"),
        (|of| of.put(KEY, list(&[0, 0, 0, 2])), "pair 0 of 2 has no axis"),
        (|of| of.put(KEY, list(&[1, -1, 1])), "is not one whole number, or a list of them"),
    ];
    check_refusals("qwen3_5_text", "qwen35", &cases);
    // With the two pairs of the model, the sections of one pair each suffice; a text has no others.
    let some = [&[1, 1, 0, 0][..], &[1, 1, 1], &[24, 20, 20]].map(list);
    for sections in std::iter::once(None).chain(some.map(Some)) {
        let (_, mut contents) = Contents::of("qwen3_5_text", "qwen35");
        contents.set(KEY, sections);
        contents.decoder().expect("a model");
    }
}

#[test]
fn experts_that_do_not_fit_are_refused() {
    let cases: [(Change, &str); 15] = [
        (|of| of.set("expert_count", None), "qwen35moe.expert_count is missing"),
        (|of| of.put("expert_count", n(0)), "qwen35moe.expert_count is 0"),
        (|of| of.put("expert_count", n(u32::MAX)), "expert_count is 4294967295, at most 1048576"),
        (|of| of.put("expert_count", n(7)), "mlp.experts.gate_proj.weight"),
        (|of| of.set("expert_used_count", None), "qwen35moe.expert_used_count is missing"),
        (|of| of.put("expert_used_count", n(7)), "expert_used_count is 7, at most 6 is possible"),
        (
            |of| of.set("expert_feed_forward_length", None),
            "qwen35moe.expert_feed_forward_length is missing",
        ),
        (|of| of.put("expert_feed_forward_length", n(21)), "mlp.experts.gate_proj.weight"),
        (
            |of| of.put("expert_shared_feed_forward_length", n(0)),
            "qwen35moe.expert_shared_feed_forward_length is 0",
        ),
        (
            |of| of.put("expert_gating_func", n(2)),
            "expert_gating_func is 2, this program runs the softmax of all experts",
        ),
        (
            |of| of.put("expert_group_count", n(2)),
            "expert_group_count is 2, this program runs one group of experts",
        ),
        (
            |of| of.put("expert_weights_scale", Value::F32(2.5)),
            "expert_weights_scale is 2.5, this program runs shares that are not scaled",
        ),
        (|of| of.put("expert_weights_norm", n(1)), "expert_weights_norm is neither true nor false"),
        (
            |of| drop(of.remove("blk.0.ffn_down_exps.weight")),
            "model.layers.0.mlp.experts.down_proj.weight",
        ),
        // Without a router, a layer has an MLP.
        (|of| drop(of.remove("blk.0.ffn_gate_inp.weight")), "model.layers.0.mlp.gate_proj.weight"),
    ];
    check_refusals("qwen3_next", "qwen35moe", &cases);
    let cases: [(Change, &str); 4] = [
        (|of| of.put("expert_used_count", n(6)), "expert_used_count is 6, at most 5 is possible"),
        (
            |of| of.set("expert_shared_feed_forward_length", None),
            "granitehybrid.expert_shared_feed_forward_length is missing",
        ),
        (|of| of.put("feed_forward_length", n(10)), "model.layers.0.block_sparse_moe.gate.weight"),
        (
            |of| drop(of.remove("blk.3.ffn_gate_inp.weight")),
            "model.layers.3.block_sparse_moe.router.layer.weight",
        ),
    ];
    check_refusals("granitemoehybrid-experts", "granitehybrid", &cases);
}

#[test]
fn the_width_of_an_mlp_is_needed_where_a_layer_has_one() {
    let (_, mut contents) = Contents::of("qwen3_next", "qwen35moe");
    contents.set("feed_forward_length", None);
    let error = contents.decoder().expect_err("the second layer has an MLP");
    assert!(error.contains("qwen35moe.feed_forward_length is missing"), "{error}");
    // The same layer with the experts of the first.
    for (name, shape, values) in contents.tensors.clone() {
        if let Some(part) = name.strip_prefix("blk.0.ffn_") {
            contents.tensors.push((format!("blk.1.ffn_{part}"), shape, values));
        }
    }
    contents.decoder().expect("no layer has an MLP");
}
