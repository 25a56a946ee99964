//! Values of `model_type`: the known ones, those without a cache, and defaults of absent fields.

/// Models without attention whose states are not known.
pub(super) const STATE_SPACE: &str = "
    rwkv rwkv4 rwkv5 rwkv6 rwkv7 xlstm retnet striped_hyena
    gated_deltanet";

/// Encoders, which read a whole text at once.
pub(super) const ENCODERS: &str = "
    albert bert camembert clip clip_text_model deberta deberta-v2 distilbert electra
    modernbert nomic_bert roberta siglip xlm-roberta";

/// Types whose fields were checked; others are planned with a note.
pub(super) const KNOWN: &str = "
    afmoe apertus arcee aya_vision baichuan bamba bitnet bloom chatglm codegen cohere cohere2
    dbrx deci deepseek deepseek_v2 deepseek_v3 deepseek_v32 dots1 ernie4_5 ernie4_5_moe exaone
    exaone4 falcon falcon_h1 falcon_mamba gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text
    glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj granite granitemoe
    granitemoehybrid granitemoeshared helium internlm2 internlm3 jamba kimi_k2 kimi_linear lfm2
    lfm2_moe llama llama4 llama4_text mamba mamba2 minicpm minicpm3 minimax minimax_text_01
    ministral ministral3 mistral mistral3 mixtral mllama_text_model mpt nemotron nemotron-nas
    nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe openelm opt persimmon phi phi3 phi4_multimodal
    phi4mm phimoe qwen qwen2 qwen2_5_vl_text qwen2_moe qwen2_vl qwen2_vl_text qwen3 qwen3_5
    qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next recurrent_gemma seed_oss
    smollm3 stablelm starcoder2 zamba2";

/// Returns transformers' defaults of fields that inner objects of published files leave out.
pub(crate) fn defaults(architecture: &str, is_inner: bool) -> &'static [(&'static str, u32)] {
    match architecture {
        "mistral" if !is_inner => &[("sliding_window", 4096)],
        _ if !is_inner => &[],
        "gemma3_text" => &[
            ("num_hidden_layers", 26),
            ("num_attention_heads", 8),
            ("num_key_value_heads", 4),
            ("head_dim", 256),
            ("sliding_window", 4096),
            ("max_position_embeddings", 131_072),
        ],
        "gemma3n_text" => &[
            ("num_hidden_layers", 35),
            ("num_attention_heads", 8),
            ("num_key_value_heads", 2),
            ("head_dim", 256),
            ("sliding_window", 512),
            ("num_kv_shared_layers", 15),
            ("max_position_embeddings", 32_768),
        ],
        "llama" => &[
            ("num_hidden_layers", 32),
            ("num_attention_heads", 32),
            ("hidden_size", 4096),
            ("max_position_embeddings", 2048),
        ],
        "qwen2" => &[
            ("num_hidden_layers", 32),
            ("num_attention_heads", 32),
            ("num_key_value_heads", 32),
            ("hidden_size", 4096),
            ("max_position_embeddings", 32_768),
        ],
        "mistral" => &[
            ("num_hidden_layers", 32),
            ("num_attention_heads", 32),
            ("num_key_value_heads", 8),
            ("hidden_size", 4096),
            ("sliding_window", 4096),
            ("max_position_embeddings", 131_072),
        ],
        _ => &[],
    }
}
