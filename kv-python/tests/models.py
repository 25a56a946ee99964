"""Tiny models of transformers with random weights, where torch and transformers are installed."""

try:
    import torch
    import transformers
except ImportError:
    torch = transformers = None
    VERSION = (0, 0)
else:
    # The models are tiny: threads would wait for each other longest of all.
    torch.set_num_threads(1)
    VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])

SMALL = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]

#: A tiny model of each family: settings beside those of SMALL.
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "smollm3": {},
    "olmo2": {},
    "granite": {},
    "phi3": {},
    "mistral": dict(sliding_window=5),
    "gemma2": dict(sliding_window=5, layer_types=SLIDING, query_pre_attn_scalar=8),
    "gemma3_text": dict(sliding_window=5, layer_types=SLIDING, query_pre_attn_scalar=8),
    "gpt_oss": dict(
        sliding_window=5, layer_types=SLIDING, num_local_experts=4, num_experts_per_tok=2
    ),
    "cohere2": dict(sliding_window=5, layer_types=SLIDING),
    "gpt_neox": {},
    "gpt2": dict(n_embd=32, n_layer=3, n_head=4, n_positions=256),
    "opt": dict(ffn_dim=48, word_embed_proj_dim=32),
    "gemma3n_text": dict(
        sliding_window=5,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        laurel_rank=4,
        altup_num_inputs=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=97,
        activation_sparsity_pattern=None,
    ),
}

#: Layers without attention, or with one that no block table has.
OTHERS = {
    "qwen3_next": dict(
        num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    "lfm2": dict(layer_types=["conv", "full_attention", "conv"], block_multiple_of=8),
    "llama4_text": dict(
        num_hidden_layers=4,
        layer_types=["chunked_attention", "full_attention"] * 2,
        attention_chunk_size=5,
        num_local_experts=2,
        intermediate_size_mlp=48,
    ),
}

TURNS = dict(num_hidden_layers=4, layer_types=["linear_attention", "full_attention"] * 2)
DELTA = dict(
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)
SCAN = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_chunk_size=8)

#: Layers with recurrent states, whose objects newer versions of transformers ask of a cache.
RECURRENT = {
    "qwen3_5_text": TURNS | DELTA,
    "granitemoehybrid": TURNS | SCAN | dict(num_local_experts=0, shared_intermediate_size=48),
    "bamba": SCAN | dict(num_hidden_layers=4, attn_layer_indices=[1, 3]),
    "nemotron_h": dict(
        num_hidden_layers=4,
        layers_block_type=["mamba", "attention", "mlp", "mamba"],
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=8,
        n_groups=2,
        chunk_size=8,
    ),
    "jamba": dict(
        num_hidden_layers=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=8,
        mamba_dt_rank=4,
        num_experts=2,
        num_experts_per_tok=1,
        use_mamba_kernels=False,
    ),
    # Attention and a state in one layer.
    "falcon_h1": SCAN | dict(mamba_d_ssm=32, mamba_d_head=8),
    "zamba2": dict(
        num_hidden_layers=4,
        layers_block_type=["linear_attention", "hybrid"] * 2,
        mamba_d_state=8,
        n_mamba_heads=4,
        mamba_headdim=16,
        chunk_size=8,
        mamba_ngroups=1,
        num_mem_blocks=1,
    ),
    "zamba": dict(
        num_hidden_layers=4,
        layers_block_type=["linear_attention", "hybrid"] * 2,
        mamba_d_state=8,
        mamba_dt_rank=4,
        n_mamba_heads=2,
    ),
    "olmo_hybrid": TURNS | DELTA,
    "lfm2_moe": dict(
        layer_types=["conv", "full_attention", "conv"],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        num_dense_layers=1,
    ),
}

#: Keys change between the cache and the attention.
LATENT = {
    "deepseek_v3": dict(
        num_key_value_heads=4,
        head_dim=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    ),
    # With recurrent states in other layers.
    "kimi_linear": TURNS
    | dict(
        num_key_value_heads=4,
        head_dim=4,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        linear_head_dim=8,
        linear_num_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        model_max_length=256,
    ),
}

#: The first version in which a family takes its mask from the attention.
SINCE = {"opt": (5, 4)}


def model(family="llama", seed=0):
    return tiny(family, seed=seed, **(FAMILIES | OTHERS | RECURRENT | LATENT)[family])


def tiny(family, kind="CausalLM", seed=0, **settings):
    config = transformers.AutoConfig.for_model(family, **(SMALL | settings))
    torch.manual_seed(seed)
    made = getattr(transformers, f"AutoModelFor{kind}").from_config(config).eval().float()
    # Assisted decoding of older versions wants one.
    made.generation_config.eos_token_id = 96
    made.generation_config.pad_token_id = 0
    return made
