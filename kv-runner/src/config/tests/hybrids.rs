//! Configurations of hybrid models: their recurrences, their experts, and what is refused.
use kv::KvFormat;
use kv::quant::Stored;
use kv::spec::StateFormat;

use super::*;
use crate::cache::{CacheOptions, Layout, StateOptions};

const QWEN: &str = "qwen3_5_text";

/// Returns `GOOD` as a hybrid model, whose last layer attends, with other fields.
fn hybrid(name: &str, changes: &Value) -> Value {
    let recurrent = if name == "lfm2" { "conv" } else { "linear_attention" };
    let mut types = vec![recurrent; 5];
    types[4] = "full_attention";
    let mut all = json!({
        "model_type": name, "layer_types": types, "num_local_experts": 0, "num_experts": 0,
        "mamba_n_heads": 4, "mamba_d_state": 8
    });
    let fields = all.as_object_mut().expect("object");
    fields.extend(changes.as_object().expect("object").clone());
    all
}

#[test]
fn sizes_of_recurrences_are_those_of_the_file_or_of_transformers() {
    let of = |name: &str, changes: Value| config(&hybrid(name, &changes)).recurrence;
    let Some(Recurrence::Delta(delta)) = of(QWEN, json!({})) else { panic!("a delta rule") };
    assert_eq!((delta.k_heads, delta.v_heads, delta.k_dim, delta.v_dim), (16, 32, 128, 128));
    assert_eq!((delta.kernel, delta.channels, delta.is_fused), (4, 8192, false));
    let Some(Recurrence::Delta(delta)) = of("qwen3_next", json!({"linear_num_key_heads": 8}))
    else {
        panic!("a delta rule")
    };
    assert_eq!((delta.k_heads, delta.channels, delta.is_fused), (8, 6144, true));
    let conv = ConvConfig { channels: 64, kernel: 3, has_bias: false };
    assert_eq!(of("lfm2", json!({})), Some(Recurrence::ShortConv(conv)));
    let Some(Recurrence::Mamba2(mamba)) =
        of("granitemoehybrid", json!({"mamba_d_head": "auto", "time_step_limit": null}))
    else {
        panic!("Mamba 2")
    };
    assert_eq!((mamba.heads, mamba.head_dim, mamba.width), (4, 32, 128));
    assert_eq!((mamba.channels, mamba.kernel), (144, 4));
    assert_eq!((mamba.has_conv_bias, mamba.has_bias), (true, false));
    assert_eq!(config(&json!({})).recurrence, None);
}

#[test]
fn widths_of_mlps_are_adjusted_as_in_transformers() {
    let of = |changes: Value| config(&hybrid("lfm2", &changes)).intermediate;
    assert_eq!(of(json!({})), 256, "two thirds of 172, up to a multiple of 256");
    assert_eq!(of(json!({"block_multiple_of": 10})), 120);
    assert_eq!(of(json!({"block_ff_dim": 300, "block_multiple_of": 1})), 200);
    let scaled = json!({"block_ffn_dim_multiplier": 1.5, "block_multiple_of": 1});
    assert_eq!(of(scaled), 171);
    assert_eq!(of(json!({"block_ffn_dim_multiplier": null})), 114);
    assert_eq!(of(json!({"block_auto_adjust_ff_dim": false})), 172);
    let granite = |changes: Value| config(&hybrid("granitemoehybrid", &changes)).intermediate;
    assert_eq!(granite(json!({"shared_intermediate_size": 99})), 99);
    assert_eq!(granite(json!({})), 1024);
}

#[test]
fn layers_attend_and_rotate_as_the_file_says() {
    let kinds = |name: &str, changes: Value| {
        let kinds = config(&hybrid(name, &changes)).layer_kinds;
        kinds.iter().map(|kind| (kind.attends, kind.rotates)).collect::<Vec<_>>()
    };
    let [none, plain, rotated] = [(false, false), (true, false), (true, true)];
    assert_eq!(kinds(QWEN, json!({})), [none, none, none, none, rotated]);
    // Every fourth layer attends unless there is a list.
    let all = json!({"layer_types": null});
    assert_eq!(kinds(QWEN, all), [none, none, none, rotated, none]);
    let granite = |changes| kinds("granitemoehybrid", changes);
    assert_eq!(granite(json!({})), [none, none, none, none, plain]);
    let old = json!({
        "layer_types": null, "position_embedding_type": "rope",
        "layers_block_type": ["mamba", "attention", "mamba", "mamba", "attention"]
    });
    assert_eq!(granite(old), [none, rotated, none, none, rotated]);
}

#[test]
fn experts_are_those_of_the_layers_that_have_some() {
    let of = |changes: Value| config(&hybrid("qwen3_next", &changes)).experts;
    assert_eq!(of(json!({})), None);
    let few = json!({
        "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 2,
        "mlp_only_layers": [3], "norm_topk_prob": false
    });
    let experts = of(few).expect("experts");
    assert_eq!(experts.layers, [false, true, false, false, false]);
    assert_eq!((experts.count, experts.per_token, experts.width), (8, 2, 512));
    assert!(!experts.is_normalised);
    let granite = json!({"num_local_experts": null, "shared_intermediate_size": 12});
    let experts = config(&hybrid("granitemoehybrid", &granite)).experts.expect("experts");
    assert_eq!((experts.count, experts.per_token), (8, 2));
    assert_eq!((experts.width, experts.shared_width, experts.layers), (172, 12, vec![true; 5]));
}

#[test]
fn hybrids_that_cannot_be_run_are_refused() {
    let granite = "granitemoehybrid";
    for (name, changes, words) in [
        (
            granite,
            json!({"num_local_experts": 4, "num_experts_per_tok": 5}),
            "num_experts_per_tok is 5, at most 4 is possible",
        ),
        (granite, json!({"mamba_d_head": 16}), "mamba_d_head is 16, but 4 heads share 128 values"),
        (granite, json!({"mamba_n_groups": 3}), "mamba_n_heads 4 is not a multiple of mamba_n_gr"),
        (granite, json!({"mamba_d_conv": 1}), "mamba_d_conv is 1: a convolution sees at least 2"),
        (granite, json!({"time_step_limit": [0.0, 1.0]}), "time_step_limit is [0.0,1.0], expected"),
        (granite, json!({"time_step_limit": 3}), "time_step_limit is 3, expected two numbers"),
        (
            granite,
            json!({"position_embedding_type": "alibi"}),
            "position_embedding_type \"alibi\" is not supported, expected rope, nope or null",
        ),
        (QWEN, json!({"linear_num_value_heads": 24}), "linear_num_value_heads 24 is not a mult"),
        (QWEN, json!({"linear_key_head_dim": 0}), "linear_key_head_dim is 0, at least 1"),
        (QWEN, json!({"layer_types": vec!["conv"; 5]}), "layer_types \"conv\" is not supported"),
        (QWEN, json!({"layer_types": ["full_attention"]}), "layer_types has 1 entries for 5"),
        (
            QWEN,
            json!({"use_sliding_window": true, "sliding_window": 8, "max_window_layers": 0,
                "layer_types": vec!["sliding_attention"; 5]}),
            "layer_types \"sliding_attention\" is not supported",
        ),
        ("lfm2", json!({"conv_L_cache": 1}), "conv_L_cache is 1: a convolution sees at least 2"),
        ("lfm2", json!({"block_ffn_dim_multiplier": -1.0}), "block_ffn_dim_multiplier is -1"),
        (
            "qwen3_next",
            json!({"num_experts": 4, "num_experts_per_tok": 5}),
            "num_experts_per_tok is 5, at most 4 is possible",
        ),
        ("lfm2_moe", json!({}), "model_type \"lfm2_moe\" is not supported, expected llama, "),
    ] {
        let error = refusal(&hybrid(name, &changes));
        assert!(error.contains(words), "{name} {changes}: {error}");
    }
}

#[test]
fn caches_have_the_states_that_their_options_say() {
    let model = config(&hybrid(QWEN, &json!({})));
    let layout = Layout::Contiguous { sequences: 3, tokens: 64 };
    let mut options = CacheOptions::new(layout);
    let spec = options.spec(&model).expect("a spec");
    let [states] = spec.states() else { panic!("one group") };
    let layers: Vec<_> = states.layers().iter().map(|layer| layer.0).collect();
    assert_eq!(layers, [0, 1, 2, 3]);
    assert_eq!(spec.groups()[0].layers(), [kv::LayerId(4)]);
    let parts: Vec<_> = states.parts().iter().map(|part| part.shape().to_string()).collect();
    assert_eq!(parts, ["[8192, 3]", "[32, 128, 128]"]);
    assert!(states.parts().iter().all(|part| part.dtype() == kv::DType::F32));
    assert_eq!((states.slots(), states.drafts(), states.grid()), (9, 0, 1));
    let snapshots = states.snapshots().expect("snapshots");
    assert_eq!((snapshots.count(), snapshots.format()), (12, StateFormat::Same));

    options.reuse = false;
    assert_eq!(options.spec(&model).expect("a spec").states()[0].snapshots(), None);
    options.reuse = true;
    let format = StateFormat::F16;
    options.states = StateOptions { slots: 30, drafts: 2, snapshots: 4, format, grid: 16 };
    let spec = options.spec(&model).expect("a spec");
    let [states] = spec.states() else { panic!("one group") };
    assert_eq!((states.slots(), states.drafts(), states.grid()), (30, 2, 16));
    assert_eq!(states.snapshots().map(|of| (of.count(), of.format())), Some((4, format)));
    options.states.slots = 3;
    let refused = options.spec(&model).expect_err("too few slots").to_string();
    assert!(refused.contains("slots of states: one sequence needs 4"), "{refused}");

    let plain = CacheOptions::new(Layout::Paged { block_size: 16, num_blocks: 4 });
    assert_eq!(plain.states, StateOptions::for_sequences(4, 0));
    assert!(plain.spec(&config(&json!({}))).expect("a spec").states().is_empty());
    let one = model.spec(&Stored::plain(KvFormat::F32), |spec| spec.paged(16, 4)).expect("a spec");
    assert_eq!((one.states()[0].slots(), one.states()[0].snapshots()), (3, None));
}
