"""The cache with tensors of torch, against torch's own attention. Needs torch."""

import unittest

import kvblock

try:
    import torch
except ImportError:
    torch = None

LAYERS, HEADS, KV_HEADS, DIM = 2, 4, 2, 16


def cache(**settings):
    given = dict(layers=LAYERS, kv_heads=KV_HEADS, head_dim=DIM, format="f32", num_blocks=64)
    return kvblock.Cache(**(given | settings))


@unittest.skipIf(torch is None, "torch is not installed")
class Tensors(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(1)
        self.no_grad = torch.no_grad()
        self.no_grad.__enter__()

    def tearDown(self):
        self.no_grad.__exit__(None, None, None)

    def test_attention_is_that_of_torch(self):
        for dtype, error in ((torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.float16, 5e-3)):
            of = cache()
            seqs = [0, 1, 2]
            for seq in seqs:
                of.start(seq)
            past = [None] * LAYERS
            for new in (7, 1, 1, 3):
                with of.step([(seq, new) for seq in seqs]) as step:
                    for layer in range(LAYERS):
                        # As a model makes them: projections, transposed to [b, heads, s, dim].
                        q, k, v = (
                            torch.randn(3, new, heads, DIM, dtype=dtype).transpose(1, 2)
                            for heads in (HEADS, KV_HEADS, KV_HEADS)
                        )
                        if past[layer] is None:
                            past[layer] = (k, v)
                        else:
                            past[layer] = tuple(
                                torch.cat([old, x], dim=2) for old, x in zip(past[layer], (k, v))
                            )
                        out = step.attend(layer, q, k, v, axes="bhsd")
                        self.assertEqual((out.shape, out.dtype), (q.shape, dtype))
                        all_k, all_v = past[layer]
                        n = all_k.shape[2]
                        mask = torch.ones(n, n, dtype=torch.bool).tril()[n - new :]
                        expected = torch.nn.functional.scaled_dot_product_attention(
                            q, all_k, all_v, attn_mask=mask, enable_gqa=True
                        )
                        self.assertLess((out - expected).abs().max().item(), error)

    def test_rows_are_used_in_place_where_they_can_be(self):
        of = cache(layers=1)
        of.start(0)
        fused = torch.randn(5, HEADS + 2 * KV_HEADS, DIM)
        q, k, v = fused.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        with of.step([(0, 5)]) as step:
            out = torch.empty(5, HEADS, DIM)
            self.assertIs(step.attend(0, q, k, v, out=out), out)
            apart = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
            torch.testing.assert_close(step.attend(0, *apart), out)
            for wrong in (out.transpose(0, 1), torch.empty(5, DIM, HEADS).transpose(1, 2)):
                with self.assertRaises((ValueError, kvblock.PlanError)):
                    step.attend(0, q, out=wrong)
            positions = torch.tensor(step.positions)
            self.assertEqual(positions.tolist(), [0, 1, 2, 3, 4])

    def test_heads_before_tokens_in_memory_are_copied(self):
        of = cache(layers=1)
        for seq in (0, 1):
            of.start(seq)
        q, k, v = (torch.randn(2, heads, 5, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        with of.step([(0, 5), (1, 5)]) as step:
            out = step.attend(0, q, k, v, axes="bhsd")
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)

    def test_what_cannot_be_used_has_a_name(self):
        of = cache(layers=1)
        of.start(0)
        q = torch.randn(1, HEADS, DIM)
        k = torch.randn(1, KV_HEADS, DIM)
        with of.step([(0, 1)]) as step:
            with torch.enable_grad(), self.assertRaisesRegex(TypeError, "q records gradients"):
                step.attend(0, q.clone().requires_grad_(), k, k)
            for wrong, words in (
                (q.double(), "q has type torch.float64"),
                (q.int(), "q has type torch.int32"),
                (torch.empty(1, HEADS, DIM, device="meta"), "q is on meta"),
            ):
                with self.assertRaisesRegex(TypeError, words):
                    step.attend(0, wrong, k, k)
            step.attend(0, q, k, k)

    def test_a_row_repeated_in_memory_is_copied(self):
        of = cache(layers=1)
        of.start(0)
        k = torch.randn(1, KV_HEADS, DIM)
        many = k.expand(4, KV_HEADS, DIM)
        q = torch.randn(4, HEADS, DIM)
        with of.step([(0, 4)]) as step:
            out = step.attend(0, q, many, many)
        mean = k[0].repeat_interleave(HEADS // KV_HEADS, dim=0)
        torch.testing.assert_close(out, mean.expand(4, HEADS, DIM))

    def test_gather_fills_a_tensor(self):
        of = cache(layers=1, format="bf16")
        of.start(0)
        k = torch.randn(9, KV_HEADS, DIM)
        with of.step([(0, 9)]) as step:
            step.write(0, k, k)
        out = of.gather(0, 0, "k", out=torch.empty(1, 9, KV_HEADS, DIM, dtype=torch.bfloat16))
        torch.testing.assert_close(out[0], k.bfloat16(), rtol=0, atol=0)


if __name__ == "__main__":
    unittest.main()
