"""Times PyTorch's attention, and FlashInfer's where it is installed, on the shapes of
examples/gpu: `python3 peers.py FILE` writes a JSON object a line. Inputs are random, and as many
as the L2 does not hold; a time is the median of samples, each of many calls that are waited for
together. Names are those of the measures they are put beside."""
import json
import statistics
import sys
import time

import torch
import torch.nn.functional as functional

DIM, KV_HEADS = 128, 8
ROTATED = 512 << 20
# What is worth most first: the program may be ended.
BATCHES, CONTEXTS, GROUPS = (64, 1, 256, 4, 16), (1 << 13, 1 << 10, 1 << 15, 1 << 17), (8, 4, 1, 16)
PROMPTS = (1 << 12, 1 << 14, 1 << 10, 1 << 11, 1 << 13)


def micros(call, repeats=21, sample=2e-3):
    """Median time of one call; `call` takes its number."""
    def run(count, first):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for index in range(count):
            call(first + index)
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    run(1, 0)
    one = max(run(1, 1), 1e-7)
    count = max(1, min(1000, int(sample / one) + 1))
    run(count, 0)
    return statistics.median(run(count, 0) / count for _ in range(repeats)) * 1e6


def room():
    """Bytes that a case may take."""
    return torch.cuda.mem_get_info()[0] * 7 // 10


def random(*dims):
    return torch.empty(*dims, dtype=torch.bfloat16, device="cuda").uniform_(-1, 1)


def sdpa_decode(batch, context, groups):
    one = 2 * batch * context * KV_HEADS * DIM * 2
    copies = min(64, max(1, -(-ROTATED // one)))
    if one * copies > room():
        return
    cached = [[random(batch, KV_HEADS, context, DIM) for _ in "kv"] for _ in range(copies)]
    for group in groups:
        q = random(batch, KV_HEADS * group, 1, DIM)

        def call(index):
            k, v = cached[index % copies]
            functional.scaled_dot_product_attention(q, k, v, enable_gqa=group > 1)

        yield f"decode/bf16/block16/gqa{group}/b{batch}/c{context}", micros(call)


def sdpa_prefill(tokens, group=4):
    q = random(1, KV_HEADS * group, tokens, DIM)
    k, v = (random(1, KV_HEADS, tokens, DIM) for _ in "kv")

    def call(_):
        functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    yield f"prefill/bf16/gqa{group}/t{tokens}", micros(call)


def flashinfer_decode(flashinfer, batch, context, groups, block):
    pages = -(-context // block)
    one = 2 * batch * pages * block * KV_HEADS * DIM * 2
    copies = min(64, max(1, -(-ROTATED // one)))
    if one * copies > room():
        return
    cached = [random(batch * pages, 2, block, KV_HEADS, DIM) for _ in range(copies)]
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * pages
    table = torch.arange(batch * pages, dtype=torch.int32, device="cuda")
    last = torch.full((batch,), (context - 1) % block + 1, dtype=torch.int32, device="cuda")
    work = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for group in groups:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            work, "NHD", use_tensor_cores=group > 1)
        wrapper.plan(starts, table, last, KV_HEADS * group, KV_HEADS, DIM, block,
                     q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
        q = random(batch, KV_HEADS * group, DIM)
        name = f"decode/bf16/block{block}/gqa{group}/b{batch}/c{context}"
        yield name, micros(lambda index: wrapper.run(q, cached[index % copies]))


def flashinfer_prefill(flashinfer, tokens, group=4):
    q = random(tokens, KV_HEADS * group, DIM)
    k, v = (random(tokens, KV_HEADS, DIM) for _ in "kv")
    call = lambda _: flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True)
    yield f"prefill/bf16/gqa{group}/t{tokens}", micros(call)


def cases(flashinfer):
    """Who, and what gives its names and times."""
    for tokens in PROMPTS:
        yield "SDPA", sdpa_prefill(tokens)
        if flashinfer:
            yield "FlashInfer", flashinfer_prefill(flashinfer, tokens)
    for batch in BATCHES:
        for context in CONTEXTS:
            yield "SDPA", sdpa_decode(batch, context, GROUPS)
            for block in (16, 64) if flashinfer else ():
                yield "FlashInfer", flashinfer_decode(flashinfer, batch, context, GROUPS, block)


def main():
    if not torch.cuda.is_available():
        sys.exit("PyTorch sees no card")
    try:
        import flashinfer
    except ImportError:
        flashinfer = None
    with open(sys.argv[1], "w", encoding="utf-8") as out:
        def put(**record):
            out.write(json.dumps(record) + "\n")
            out.flush()

        put(kind="fact", name="PyTorch", value=torch.__version__)
        found = getattr(flashinfer, "__version__", "?") if flashinfer else "not at hand"
        put(kind="fact", name="FlashInfer", value=found)
        failed = 0
        for peer, timed in cases(flashinfer):
            # A case that its author's code refuses leaves an empty cell, and is told.
            try:
                for name, us in timed:
                    put(kind="peer", name=name, peer=peer, us=us)
            except (RuntimeError, ValueError, TypeError) as error:
                failed += 1
                print(f"{peer}: {error}", file=sys.stderr)
            torch.cuda.empty_cache()
        put(kind="fact", name="cases that peers refused", value=failed)


if __name__ == "__main__":
    main()
