"""PyTorch's attention on the CPU, in the forms that are worth comparing with."""
from typing import Any, Callable

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from case import Case, Prepared

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


class Form:
    def __init__(self, case: Case, compute: Callable[[], torch.Tensor]) -> None:
        self.case, self.compute = case, compute
        self.out = torch.empty(0)

    def run(self) -> None:
        with torch.inference_mode():
            self.out = self.compute()

    def output(self) -> Any:
        case = self.case
        out = self.out.reshape(case.batch, case.q_heads, case.q_len, case.head_dim)
        rows = out.permute(0, 2, 1, 3).reshape(-1, case.q_heads, case.head_dim)
        return rows.float().contiguous().numpy()


class Peer:
    version = torch.__version__

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)

    def prepare(self, case: Case, arrays: dict[str, Any]) -> Prepared:
        if case.format not in DTYPES:
            return
        q, k, v = (
            torch.from_numpy(arrays[name]).view(DTYPES[case.dtype]).view(case.dims(name))
            for name in "qkv"
        )
        group = case.q_heads // case.kv_heads
        causal, scale = case.is_causal, case.scale

        def gqa() -> torch.Tensor:
            return sdpa(q, k, v, is_causal=causal, scale=scale, enable_gqa=group > 1)

        yield "torch sdpa", lambda: Form(case, gqa)
        # Heads of a group as queries of one head: they read the same keys. Only where none of them
        # is masked.
        folded_dims = (case.batch, case.kv_heads, group * case.q_len, case.head_dim)
        folded = q.view(folded_dims)
        if group > 1 and not causal:
            yield "torch folded", lambda: Form(case, lambda: sdpa(folded, k, v, scale=scale))
        # Heads of a group side by side, over views of K and V that repeat without a copy.
        if group > 1 and causal and case.batch == 1:
            apart = q.view(case.kv_heads, group, case.q_len, case.head_dim)
            k_views, v_views = (x.transpose(0, 1).expand(-1, group, -1, -1) for x in (k, v))
            yield "torch views", lambda: Form(
                case, lambda: sdpa(apart, k_views, v_views, is_causal=True, scale=scale)
            )
        if not case.scores_fit(q.element_size()):
            return
        mask = None
        if causal:
            seen = torch.ones(case.q_len, case.context, dtype=torch.bool)
            seen = seen.tril(case.context - case.q_len)
            mask = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, -torch.inf)

        def matmul() -> torch.Tensor:
            scores = torch.matmul(folded * scale, k.transpose(-1, -2))
            if mask is not None:
                scores.view(case.batch, case.q_heads, case.q_len, case.context).add_(mask)
            return torch.matmul(scores.softmax(-1), v)

        yield "torch matmul", lambda: Form(case, matmul)
