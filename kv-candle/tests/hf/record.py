"""Records what Hugging Face transformers computes for tiny models, with eager attention and the
recurrences that are written in PyTorch.

Usage: python record.py [NAME ...]

Writes NAME.safetensors for every model (or for those named): weights, angles of RoPE per position,
and for each of three sequences its tokens (a prompt and greedily decoded ones) and the logits after
every token. The sequences are one batch with padding at the left: a prefill, then decode steps
through the cache of transformers.

Weights are random bf16 numbers, large enough that attention matters. The model runs in f64
throughout: where transformers itself goes back to f32 (norms, softmax, angles, recurrences), f32 is
replaced by f64, so that the recorded logits have no rounding of their own. How far the same model
in f32 is from that is in the metadata as "f32_error": the rounding that a test must allow for.

Recorded with torch 2.15.0 (CPU) and transformers 5.24.0, seed 44.
"""

import contextlib
import copy
import json
import os
import sys
from unittest import mock

import torch
import transformers
from safetensors.torch import save_file
from transformers import (
    BambaConfig,
    DynamicCache,
    FalconH1Config,
    Gemma2Config,
    GptOssConfig,
    KimiLinearConfig,
    Mamba2Config,
    MistralConfig,
    NemotronHConfig,
)

HERE = os.path.dirname(os.path.abspath(__file__))
SEED = 44
NEW_TOKENS = 8
PROMPTS = [
    [5, 61, 17, 8, 90, 33, 2, 74, 49, 26, 12],
    [21, 88, 3],
    [31, 7, 55, 70, 14, 96, 40],
]
# Two tokens whose logits are closer than this could change places by rounding.
MARGIN_MIN = 1e-2

SMALL = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    sliding_window=6,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
# Without a window.
PLAIN = {key: value for key, value in SMALL.items() if key != "sliding_window"}
PLAIN["intermediate_size"] = 32
# A limit of time steps that no step reaches, and that JSON can hold.
TIME_STEP_LIMIT = (0.0, 1e9)
MAMBA = dict(
    mamba_n_heads=4,
    mamba_d_head=8,
    mamba_n_groups=2,
    mamba_d_state=8,
    mamba_d_conv=4,
    mamba_expand=1,
    mamba_chunk_size=4,
    time_step_limit=TIME_STEP_LIMIT,
)
CASES = {
    # Every layer has a state, and none attends.
    "mamba2": Mamba2Config(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=4,
        num_heads=4,
        head_dim=16,
        expand=2,
        state_size=8,
        n_groups=2,
        conv_kernel=4,
        chunk_size=4,
        time_step_limit=TIME_STEP_LIMIT,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    # One layer attends, with RoPE on half of a head.
    "bamba": BambaConfig(**copy.deepcopy(PLAIN), **MAMBA, attn_layer_indices=[2]),
    # Every layer does both, on one input, with factors everywhere.
    "falcon_h1": FalconH1Config(
        **(PLAIN | dict(num_hidden_layers=3)),
        **MAMBA,
        mamba_d_ssm=32,
        mamba_rms_norm=False,
        embedding_multiplier=2.0,
        lm_head_multiplier=2.0,
        key_multiplier=0.75,
        attention_in_multiplier=1.25,
        attention_out_multiplier=0.75,
        ssm_in_multiplier=1.25,
        ssm_out_multiplier=0.5,
        ssm_multipliers=[0.75, 1.25, 0.5, 1.5, 0.875],
        mlp_multipliers=[1.25, 0.75],
    ),
    # A layer is a recurrence, attention without RoPE, or a network.
    "nemotron_h": NemotronHConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        mamba_num_heads=4,
        mamba_head_dim=12,
        ssm_state_size=8,
        n_groups=2,
        conv_kernel=4,
        chunk_size=8,
        # A step below the minimum would be clamped in prompts and not in decoding.
        time_step_min=1e-9,
        time_step_limit=TIME_STEP_LIMIT,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    # One layer has latent attention without RoPE, the others a delta rule with a decay per channel.
    "kimi_linear": KimiLinearConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=4,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        mlp_layer_types=["dense"] * 4,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        linear_head_dim=8,
        linear_num_heads=4,
        linear_conv_kernel_dim=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    # Every layer has the window.
    "mistral": MistralConfig(**SMALL),
    # Every other layer has the window, all have the cap; the scale is not that of the head.
    "gemma2": Gemma2Config(
        **SMALL,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=20.0,
    ),
    # Every other layer has the window and other angles; the scale is not that of the head.
    # Every other layer has the window, all have sink logits; one expert.
    "gpt_oss": GptOssConfig(**SMALL, num_local_experts=1, num_experts_per_tok=1),
}


@contextlib.contextmanager
def only_doubles():
    """Makes f64 of every f32 that a model asks for by name."""
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch, "float", torch.float64),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield


def fill(model):
    """Gives every parameter random values that bf16 can hold."""
    generator = torch.Generator().manual_seed(SEED)
    is_centred_at_one = not model.config.model_type.startswith("gemma")
    for name, parameter in sorted(model.named_parameters()):
        values = torch.randn(parameter.shape, generator=generator)
        if "norm" in name.split(".")[-2]:
            values = 0.25 * values + (1.0 if is_centred_at_one else 0.0)
        elif name.endswith("sinks"):
            values = 2.0 + values
        elif name.endswith("bias"):
            values = 0.25 * values
        elif name.endswith("A_log"):
            # Most of a state is left after a dozen tokens.
            values = values - 3.0
        elif name.endswith(".D"):
            pass
        elif "embed" not in name:
            # Experts are stored as inputs by outputs, the other matrices as outputs by inputs.
            inputs = parameter.shape[-2 if "experts" in name else -1]
            values = 1.5 * values / inputs**0.5
        parameter.data.copy_(values.bfloat16())


def decode(model, forced=None):
    """Runs the batch, with given tokens if there are any: tokens, and logits after every token."""
    longest = max(map(len, PROMPTS))
    x = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    sequences = [list(prompt) for prompt in PROMPTS]
    logits = [[] for _ in PROMPTS]
    cache = DynamicCache(config=model.config)
    for step in range(NEW_TOKENS + 1):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -x.shape[1] :]
        out = model(x, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True)
        for at, prompt in enumerate(PROMPTS):
            logits[at].append(out.logits[at, -len(prompt) :] if step == 0 else out.logits[at])
        if step == NEW_TOKENS:
            break
        for at, sequence in enumerate(sequences):
            last = out.logits[at, -1]
            sequence.append(forced[at][len(sequence)] if forced else int(last.argmax()))
        x = torch.tensor([sequence[-1:] for sequence in sequences])
        mask = torch.cat([mask, torch.ones(len(sequences), 1, dtype=mask.dtype)], 1)
    return sequences, [torch.cat(parts) for parts in logits]


def difference(one, other):
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(one, other))


@torch.no_grad()
def record(name, config):
    family = transformers.AutoModelForCausalLM
    eager = dict(attn_implementation="eager", experts_implementation="eager")
    model = family.from_config(config, **eager).float().eval()
    fill(model)
    rotary = getattr(model.base_model, "rotary_emb", torch.nn.Module())
    # None, one, or one for each type of layers.
    frequencies = {
        key: value.clone()
        for key, value in rotary.named_buffers()
        if key.endswith("inv_freq") and "original" not in key
    }
    for key in frequencies:
        assert getattr(rotary, key.replace("inv_freq", "attention_scaling")) == 1.0
    tensors = {
        key: value.bfloat16()
        for key, value in model.state_dict().items()
        if not (key == "lm_head.weight" and config.tie_word_embeddings)
    }
    tensors.update(frequencies)

    model.double()
    # Frequencies are numbers of f32, as in every model that is not made of doubles.
    for key, value in frequencies.items():
        assert torch.equal(getattr(rotary, key), value.double())
    with only_doubles():
        sequences, logits = decode(model)
        for sequence, recorded in zip(sequences, logits):
            # Neither padding nor cache: each sequence alone, all tokens at once.
            alone = model(torch.tensor([sequence]), use_cache=False).logits
            assert difference(alone, [recorded]) < 1e-11, name
    assert all(values.dtype == torch.float64 for values in logits)

    model.float()
    _, rounded = decode(model, forced=sequences)
    f32_error = difference(rounded, logits)
    tops = [torch.topk(values[-NEW_TOKENS - 1 :], 2).values for values in logits]
    margin = min(float((top[:, 0] - top[:, 1]).min()) for top in tops)
    assert margin > MARGIN_MIN, f"{name}: margin {margin}"

    for at, (sequence, values) in enumerate(zip(sequences, logits)):
        tensors[f"sequences.{at}.tokens"] = torch.tensor(sequence, dtype=torch.int64)
        tensors[f"sequences.{at}.logits"] = values.contiguous()
    recording = {
        "config": config.to_dict(),
        "new_tokens": NEW_TOKENS,
        "f32_error": f32_error,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "seed": SEED,
    }
    path = os.path.join(HERE, f"{name}.safetensors")
    # One entry, so that the file is the same every time: the order of entries is random.
    save_file(tensors, path, {"recording": json.dumps(recording, sort_keys=True)})
    largest = max(float(values.abs().max()) for values in logits)
    print(
        f"{name}: {os.path.getsize(path)} bytes, f32 error {f32_error:.1e}, "
        f"margin {margin:.3f}, largest logit {largest:.2f}"
    )


def main():
    torch.set_num_threads(1)
    for name in sys.argv[1:] or CASES:
        record(name, CASES[name])


if __name__ == "__main__":
    main()
