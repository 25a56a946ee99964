"""Records what Hugging Face transformers computes for tiny models of each architecture.

Usage: python make_models.py [NAME ...]
       python make_models.py --long
       python make_models.py --write FOLDER NAME

Writes models/NAME.json for every case (or for those named): the config.json that transformers
saved, the names and shapes of the tensors it saved, a prompt with its tokens, the tokens that
greedy decoding goes on with, and logits of a few vocabulary entries behind every token.

With --long, writes long.json: a longer text, and logits behind a few of its tokens, of every model
with recurrent states.

With --write, writes a recorded model as a folder that `kv generate --model FOLDER` runs:
config.json, model.safetensors, and the tokenizer of models/stories260K.

Weights come from a formula of the tensor's name and the index of the value, which the tests
compute too, so that no weights are stored. Models run in f64 (transformers itself keeps norms,
softmax and angles in f32) and without a cache: every step computes the whole text again. Where the
rotary embedding depends on the length of the text, tokens go in one by one through the cache of
transformers instead, as the case says ("token_by_token"). In models with recurrent states, the
casts to f32 of their file are casts to f64, so that recurrences, norms and angles are in f64 too.

Recorded with torch 2.15.0 (CPU) and transformers 5.24.0.
"""

import contextlib
import json
import math
import os
import shutil
import sys
import tempfile

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GraniteConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    LlamaConfig,
    Mistral3Config,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PixtralVisionConfig,
    Qwen2Config,
    Qwen3_5Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
    SmolLM3Config,
)

HERE = os.path.dirname(os.path.abspath(__file__))
TOKENIZER = os.path.join(HERE, "../../../models/stories260K/tokenizer.json")
PROMPT = (
    "Once upon a time there was a little girl named Lily. She loved to play outside in the park "
    "with her red ball."
)
NEW_TOKENS = 20
VOCAB = 512
# Entries of the vocabulary whose logits are kept.
KEPT = [0, 7, 64, 131, 263, 305, 404, 511]
# A text of any tokens, longer than two chunks of transformers' recurrences, and those of its tokens
# behind which logits are kept.
LONG_TEXT = [(7 * at * at + 3 * at + 11) % VOCAB for at in range(140)]
LONG_KEPT = [0, 62, 63, 64, 65, 126, 127, 128, 129, 139]


def values(name, shape, less_one=False):
    """The weights of one tensor: a hash of its name and of the index, scaled by what it is.

    With `less_one`, norms are kept less one, except those of the delta rule.
    """
    mask = (1 << 64) - 1
    seed = 0xCBF29CE484222325
    for byte in name.encode():
        seed = ((seed ^ byte) * 0x100000001B3) & mask
    count = math.prod(shape)
    x = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    unit = (x >> np.uint64(40)).astype(np.float64) / 2.0**23 - 1.0
    if name.endswith("norm.weight"):
        is_less = less_one and not name.endswith("linear_attn.norm.weight")
        result = 0.25 * unit if is_less else 1.0 + 0.25 * unit
    elif name.endswith(".bias"):
        result = 0.25 * unit
    elif "embed_tokens" in name:
        result = unit
    else:
        gain = 3.0 if "lm_head" in name else 1.5
        result = gain * math.sqrt(3.0 / shape[-1]) * unit
    return result.astype(np.float32).reshape(shape)


SMALL = dict(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=None,
    tie_word_embeddings=False,
    rms_norm_eps=1e-5,
)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}


def rope(parameters, theta=10000.0):
    return {**parameters, "rope_theta": theta}


def small(config, **changes):
    return config(**{**SMALL, **changes})


def mistral3():
    text = small(MistralConfig, head_dim=16, sliding_window=None)
    vision = PixtralVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        image_size=28,
        patch_size=14,
    )
    return Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=False)


# A delta rule may give rows near zero, whose rounding errors their norm magnifies: a larger eps keeps
# those of f32 as small as in the other models.
DELTA = dict(
    rms_norm_eps=1e-2,
    num_hidden_layers=4,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
)


def qwen3_5():
    text = small(Qwen3_5TextConfig, **DELTA, layer_types=["linear_attention", "full_attention"] * 2)
    vision = dict(
        hidden_size=16, intermediate_size=16, depth=1, num_heads=1, out_hidden_size=48, patch_size=4
    )
    return Qwen3_5Config(
        text_config=text.to_dict(), vision_config=vision, tie_word_embeddings=False
    )


LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.5],
    "long_factor": [1.0, 4.0, 16.0],
    "original_max_position_embeddings": 64,
}
PARTIAL = {"partial_rotary_factor": 0.5}
DENSE = dict(num_local_experts=0, num_experts_per_tok=0)
MAMBA = dict(
    num_hidden_layers=4,
    shared_intermediate_size=80,
    mamba_n_heads=6,
    mamba_d_head=16,
    mamba_d_state=12,
    mamba_expand=2,
)


def lfm2(**changes):
    options = {key: value for key, value in SMALL.items() if key != "rms_norm_eps"}
    return Lfm2Config(**{**options, "num_hidden_layers": 4, "norm_eps": 1e-5, **changes})


CASES = {
    "llama": lambda: small(LlamaConfig, head_dim=16, attention_bias=True, mlp_bias=True),
    "llama-tied": lambda: small(
        LlamaConfig, num_key_value_heads=4, tie_word_embeddings=True, rope_parameters=rope({}, 5e5)
    ),
    "llama-linear": lambda: small(
        LlamaConfig, rope_parameters=rope({"rope_type": "linear", "factor": 2.5})
    ),
    "llama-dynamic": lambda: small(
        LlamaConfig, max_position_embeddings=32, rope_parameters=rope(DYNAMIC)
    ),
    "llama-yarn": lambda: small(LlamaConfig, rope_parameters=rope(YARN)),
    "llama-yarn-options": lambda: small(
        LlamaConfig,
        head_dim=32,
        rope_parameters=rope(
            {
                **YARN,
                "beta_fast": 8,
                "beta_slow": 0.5,
                "mscale": 0.8,
                "mscale_all_dim": 0.4,
                "truncate": False,
            }
        ),
    ),
    "llama-yarn-attention-factor": lambda: small(
        LlamaConfig, rope_parameters=rope({**YARN, "attention_factor": 1.25}, 1e6)
    ),
    "llama-llama3": lambda: small(LlamaConfig, head_dim=16, rope_parameters=rope(LLAMA3, 5e5)),
    "mistral": lambda: small(MistralConfig, head_dim=16, sliding_window=12),
    "mistral-yarn": lambda: small(
        MistralConfig, head_dim=32, sliding_window=None, rope_parameters=rope(YARN, 1e6)
    ),
    "qwen2": lambda: small(
        Qwen2Config,
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=10,
        max_window_layers=2,
    ),
    "qwen2-yarn": lambda: small(
        Qwen2Config, tie_word_embeddings=True, rope_parameters=rope(YARN, 1e6)
    ),
    "qwen3": lambda: small(Qwen3Config, head_dim=16, tie_word_embeddings=True),
    "qwen3-layer-types": lambda: small(
        Qwen3Config,
        head_dim=16,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "qwen3-dynamic": lambda: small(
        Qwen3Config, head_dim=16, max_position_embeddings=32, rope_parameters=rope(DYNAMIC, 1e6)
    ),
    "phi3": lambda: small(Phi3Config, sliding_window=20),
    "phi3-longrope": lambda: small(
        Phi3Config,
        num_attention_heads=6,
        num_key_value_heads=3,
        original_max_position_embeddings=64,
        rope_parameters={**rope(LONG), "partial_rotary_factor": 0.75},
    ),
    "olmo2": lambda: small(Olmo2Config),
    "olmo2-yarn": lambda: small(Olmo2Config, rope_parameters=rope(YARN, 5e5)),
    "granite": lambda: small(
        GraniteConfig,
        embedding_multiplier=2.0,
        attention_multiplier=0.1,
        residual_multiplier=0.7,
        logits_scaling=2.0,
        mlp_bias=True,
    ),
    "granite-llama3": lambda: small(
        GraniteConfig,
        attention_multiplier=0.25,
        logits_scaling=0.5,
        attention_bias=True,
        rope_parameters=rope(LLAMA3, 1e6),
    ),
    "smollm3": lambda: small(SmolLM3Config, num_hidden_layers=4, tie_word_embeddings=True),
    "smollm3-windows": lambda: small(
        SmolLM3Config,
        num_hidden_layers=4,
        no_rope_layer_interval=2,
        use_sliding_window=True,
        sliding_window=11,
        rope_parameters=rope({"rope_type": "linear", "factor": 2.0}, 2e6),
    ),
    "mistral3": mistral3,
    "qwen3_5_text": lambda: small(Qwen3_5TextConfig, **DELTA, linear_conv_kernel_dim=4),
    "qwen3_5_text-options": lambda: small(
        Qwen3_5TextConfig,
        **{**DELTA, "linear_num_value_heads": 2},
        linear_conv_kernel_dim=2,
        layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention"],
        attention_bias=True,
        tie_word_embeddings=True,
        rope_parameters={**rope({"rope_type": "linear", "factor": 2.0}, 1e6), **PARTIAL},
    ),
    "qwen3_5": qwen3_5,
    "qwen3_next-dense": lambda: small(Qwen3NextConfig, **DELTA, num_experts=0),
    "qwen3_next": lambda: small(
        Qwen3NextConfig,
        **DELTA,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=28,
        mlp_only_layers=[1],
    ),
    "qwen3_next-experts": lambda: small(
        Qwen3NextConfig,
        **DELTA,
        num_experts=5,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=28,
        norm_topk_prob=False,
        decoder_sparse_step=2,
    ),
    "lfm2": lambda: lfm2(
        layer_types=["conv", "full_attention", "conv", "conv"],
        block_auto_adjust_ff_dim=False,
    ),
    "lfm2-options": lambda: lfm2(
        full_attn_idxs=[0, 3],
        block_multiple_of=16,
        block_ffn_dim_multiplier=1.3,
        conv_bias=True,
        conv_L_cache=4,
        tie_word_embeddings=False,
        rope_parameters=rope({}, 1e4),
    ),
    "granitemoehybrid": lambda: small(
        GraniteMoeHybridConfig,
        **{**MAMBA, **DENSE},
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        mamba_n_groups=1,
        embedding_multiplier=2.0,
        attention_multiplier=0.1,
        residual_multiplier=0.7,
        logits_scaling=2.0,
        tie_word_embeddings=True,
    ),
    "granitemoehybrid-options": lambda: small(
        GraniteMoeHybridConfig,
        **{**MAMBA, **DENSE},
        layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention"],
        mamba_n_groups=2,
        mamba_d_conv=3,
        mamba_conv_bias=False,
        mamba_proj_bias=True,
        attention_multiplier=0.25,
        position_embedding_type="rope",
    ),
    "granitemoehybrid-experts": lambda: small(
        GraniteMoeHybridConfig,
        **{**MAMBA, "shared_intermediate_size": 28},
        intermediate_size=20,
        layer_types=["linear_attention", "full_attention", "full_attention", "linear_attention"],
        num_local_experts=5,
        num_experts_per_tok=2,
        attention_multiplier=0.2,
    ),
}
# Models with recurrent states.
RECURRENT = ("qwen3_5", "qwen3_next", "lfm2", "granitemoehybrid")
# Models that keep the weights of norms less one.
LESS_ONE = ("qwen3_5", "qwen3_next")


class Doubled:
    """torch, with f64 under the name of f32."""

    def __getattr__(self, name):
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)


@contextlib.contextmanager
def doubled(name, model):
    """Makes the casts to f32 of a model with recurrent states casts to f64."""
    if not name.startswith(RECURRENT):
        yield
        return
    module = sys.modules[type(model).__module__]
    single = torch.Tensor.float
    module.torch, torch.Tensor.float = Doubled(), torch.Tensor.double
    try:
        yield
    finally:
        module.torch, torch.Tensor.float = torch, single


def save_weights(name, tensors, folder):
    less_one = name.startswith(LESS_ONE)
    filled = {key: torch.from_numpy(values(key, of, less_one)) for key, of in tensors.items()}
    save_file(filled, os.path.join(folder, "model.safetensors"), {"format": "pt"})


def write(folder, name):
    """Writes the folder of a recorded model."""
    with open(os.path.join(HERE, "models", f"{name}.json")) as file:
        case = json.load(file)
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(case["config"], file, indent=2)
        file.write("\n")
    save_weights(name, case["tensors"], folder)
    shutil.copy(TOKENIZER, os.path.join(folder, "tokenizer.json"))


def load(name, config):
    """Returns the model in f64, its saved config, and the shapes of its tensors."""
    is_wrapped = name in ("mistral3", "qwen3_5")
    family = AutoModelForImageTextToText if is_wrapped else AutoModelForCausalLM
    model = family.from_config(config, attn_implementation="eager").eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with open(os.path.join(folder, "config.json")) as file:
            saved = json.load(file)
        with safe_open(os.path.join(folder, "model.safetensors"), "pt") as file:
            tensors = {key: list(file.get_slice(key).get_shape()) for key in sorted(file.keys())}
        # Loaded back from the formula's weights, under the names they are saved with.
        save_weights(name, tensors, folder)
        model = family.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    # The grouped products of experts are not made for f64.
    model.set_experts_implementation("eager")
    return model.double().eval(), saved, tensors


def record_long():
    """Records the longer text."""
    models = {}
    for name in CASES:
        if name.startswith(RECURRENT):
            model, *_ = load(name, CASES[name]())
            with torch.no_grad(), doubled(name, model):
                rows = model(torch.tensor([LONG_TEXT]), use_cache=False).logits[0]
            kept = [[round(float(rows[at][i]), 5) for i in KEPT] for at in LONG_KEPT]
            largest = max(abs(x) for row in kept for x in row)
            print(f"{name}: {len(LONG_TEXT)} tokens, largest logit {largest:.2f}")
            models[name] = kept
    case = {"tokens": LONG_TEXT, "after": LONG_KEPT, "kept": KEPT, "logits": models}
    with open(os.path.join(HERE, "long.json"), "w") as file:
        json.dump(case, file, separators=(",", ":"))
        file.write("\n")


def record(name, config):
    model, saved, tensors = load(name, config)
    tokenizer = Tokenizer.from_file(TOKENIZER)
    prompt = tokenizer.encode(PROMPT).ids
    ids = list(prompt)
    rows = []
    by_token = "dynamic" in name
    margin = math.inf
    with torch.no_grad(), doubled(name, model):
        if by_token:
            past = None
            while len(ids) < len(prompt) + NEW_TOKENS or len(rows) < len(ids):
                token = torch.tensor([[ids[len(rows)]]])
                position = torch.tensor([[len(rows)]])
                out = model(token, position_ids=position, cache=past, use_cache=True)
                past = out.cache
                rows.append(out.logits[0, -1])
                if len(rows) == len(ids) and len(ids) < len(prompt) + NEW_TOKENS:
                    top = torch.topk(rows[-1], 2)
                    margin = min(margin, float(top.values[0] - top.values[1]))
                    ids.append(int(top.indices[0]))
        else:
            while True:
                out = model(torch.tensor([ids]), use_cache=False)
                rows = list(out.logits[0])
                if len(ids) == len(prompt) + NEW_TOKENS:
                    break
                top = torch.topk(rows[-1], 2)
                margin = min(margin, float(top.values[0] - top.values[1]))
                ids.append(int(top.indices[0]))
    case = {
        "config": saved,
        "tensors": tensors,
        "prompt": PROMPT,
        "prompt_ids": prompt,
        "output_ids": ids[len(prompt) :],
        "token_by_token": by_token,
        **({"norms_less_one": True} if name.startswith(LESS_ONE) else {}),
        "kept": KEPT,
        "logits": [[round(float(row[i]), 5) for i in KEPT] for row in rows],
    }
    with open(os.path.join(HERE, "models", f"{name}.json"), "w") as file:
        json.dump(case, file, separators=(",", ":"))
        file.write("\n")
    largest = max(abs(x) for row in case["logits"] for x in row)
    print(f"{name}: {len(prompt)} tokens, margin {margin:.4f}, largest logit {largest:.2f}")


def main():
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--write"]:
        if len(sys.argv) != 4 or sys.argv[3] not in CASES:
            sys.exit(f"usage: --write FOLDER NAME, with a name of {', '.join(CASES)}")
        write(sys.argv[2], sys.argv[3])
        return
    if sys.argv[1:] == ["--long"]:
        record_long()
        return
    for name in sys.argv[1:] or CASES:
        record(name, CASES[name]())


if __name__ == "__main__":
    main()
