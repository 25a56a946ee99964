"""Records what Hugging Face transformers computes for tiny models of each architecture.

Usage: python make_models.py [NAME ...]

Writes models/NAME.json for every case (or for those named): the config.json that transformers
saved, the names and shapes of the tensors it saved, a prompt with its tokens, the tokens that
greedy decoding goes on with, and logits of a few vocabulary entries behind every token.

Weights come from a formula of the tensor's name and the index of the value, which the tests
compute too, so that no weights are stored. Models run in f64 (transformers itself keeps norms,
softmax and angles in f32) and without a cache: every step computes the whole text again. Where the
rotary embedding depends on the length of the text, tokens go in one by one through the cache of
transformers instead, as the case says ("token_by_token").

Recorded with torch 2.15.0 (CPU) and transformers 5.24.0.
"""

import json
import math
import os
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
    LlamaConfig,
    Mistral3Config,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PixtralVisionConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

HERE = os.path.dirname(os.path.abspath(__file__))
PROMPT = (
    "Once upon a time there was a little girl named Lily. She loved to play outside in the park "
    "with her red ball."
)
NEW_TOKENS = 20
VOCAB = 512
# Entries of the vocabulary whose logits are kept.
KEPT = [0, 7, 64, 131, 263, 305, 404, 511]


def values(name, shape):
    """The weights of one tensor: a hash of its name and of the index, scaled by what it is."""
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
        result = 1.0 + 0.25 * unit
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


LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.5],
    "long_factor": [1.0, 4.0, 16.0],
    "original_max_position_embeddings": 64,
}
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
}


def record(name, config):
    family = AutoModelForImageTextToText if name == "mistral3" else AutoModelForCausalLM
    model = family.from_config(config, attn_implementation="eager").eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with open(os.path.join(folder, "config.json")) as file:
            saved = json.load(file)
        with safe_open(os.path.join(folder, "model.safetensors"), "pt") as file:
            tensors = {key: list(file.get_slice(key).get_shape()) for key in sorted(file.keys())}
        # Loaded back from the formula's weights, under the names they are saved with.
        filled = {key: torch.from_numpy(values(key, shape)) for key, shape in tensors.items()}
        save_file(filled, os.path.join(folder, "model.safetensors"), {"format": "pt"})
        model = family.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    model = model.double().eval()

    tokenizer = Tokenizer.from_file(os.path.join(HERE, "../../../models/stories260K/tokenizer.json"))
    prompt = tokenizer.encode(PROMPT).ids
    ids = list(prompt)
    rows = []
    by_token = "dynamic" in name
    margin = math.inf
    with torch.no_grad():
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
    for name in sys.argv[1:] or CASES:
        record(name, CASES[name]())


if __name__ == "__main__":
    main()
