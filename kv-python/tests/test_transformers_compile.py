"""Compiled models over the cache. Needs torch and transformers."""

import unittest

from models import model, torch

if torch is not None:
    import torch._dynamo
    from kvblock.transformers import NAME, Engine, KvCache, register

PROMPT = [5, 9, 3, 7, 11, 2, 8]


class Graphs:
    """Counts the graphs that a backend of torch.compile gets."""

    def __init__(self, backend="aot_eager"):
        self.count, self.backend = 0, torch._dynamo.lookup_backend(backend)

    def __call__(self, graph, inputs):
        self.count += 1
        return self.backend(graph, inputs)


def logits(run, cache, chunks):
    """Returns the logits of the last token of each chunk."""
    out = []
    with torch.no_grad():
        for chunk in chunks:
            out.append(run(torch.tensor([chunk] * 2), past_key_values=cache).logits[:, -1])
    return torch.stack(out)


@unittest.skipIf(torch is None, "torch or transformers is not installed")
class Compiled(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        register()

    def setUp(self):
        torch._dynamo.reset()

    def test_a_model_compiles_whole_and_for_every_length(self):
        for family, backend in (("llama", "aot_eager"), ("gemma2", "eager")):
            with self.subTest(family):
                of = model(family)
                of.set_attn_implementation(NAME)
                chunks = [PROMPT, [4], [6], [30], [31, 32], [33]]
                expected = logits(of, KvCache(of.config, num_blocks=32), chunks)
                graphs = Graphs(backend)
                compiled = torch.compile(of, backend=graphs, fullgraph=True, dynamic=True)
                counts = []
                for _ in range(2):
                    got = logits(compiled, KvCache(of.config, num_blocks=32), chunks)
                    far = (got - expected).abs().max() / expected.abs().max()
                    self.assertLess(far.item(), 2e-5)
                    counts.append(graphs.count)
                # A first chunk, a token after others, and several tokens after others.
                self.assertLessEqual(counts[0], 3)
                self.assertEqual(counts[1], counts[0])

    def test_generate_compiles_with_padding_and_beams(self):
        of = model()
        of.set_attn_implementation(NAME)
        ids = torch.tensor([[5, 9, 3, 7, 11], [0, 0, 4, 6, 9]])

        def generate(**options):
            cache = KvCache(of.config, num_blocks=64)
            options = dict(max_new_tokens=6, do_sample=False, attention_mask=ids != 0) | options
            with torch.no_grad():
                return of.generate(ids, past_key_values=cache, **options).tolist()

        expected = [generate(), generate(num_beams=3)]
        engine = Engine(of, num_blocks=64).generate([PROMPT, [4, 6]], 6)
        graphs = Graphs("eager")
        of.forward = torch.compile(of.forward, backend=graphs, fullgraph=True, dynamic=True)
        self.assertEqual([generate(), generate(num_beams=3)], expected)
        self.assertEqual(graphs.count, 2)
        self.assertEqual(Engine(of, num_blocks=64).generate([PROMPT, [4, 6]], 6), engine)

    def test_gather_mode_is_no_part_of_a_graph(self):
        of = model()
        of.set_attn_implementation("eager")
        ids = torch.tensor([PROMPT])
        with torch.no_grad():
            expected = of(ids).logits
            compiled = torch.compile(of, backend="eager")
            cache = KvCache(of.config, num_blocks=32, mode="gather")
            got = compiled(ids, past_key_values=cache).logits
            self.assertLess((got - expected).abs().max().item(), 1e-4)
            torch._dynamo.reset()
            whole = torch.compile(of, backend="eager", fullgraph=True)
            cache = KvCache(of.config, num_blocks=32, mode="gather")
            with self.assertRaisesRegex(Exception, "another size in each step"):
                whole(ids, past_key_values=cache)

    def test_the_operation_has_a_schema_and_a_fake(self):
        of = model()
        cache = KvCache(of.config, num_blocks=32)
        cache.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), 0)
        q, k, v = (torch.randn(1, heads, 3, 8) for heads in (4, 2, 2))
        out = torch.empty(1, 3, 4, 8)
        arguments = (q, k, v, out, None, cache.handle, 0, 0, 0.3, None, None, None)
        cache.reset()
        torch.library.opcheck(
            torch.ops.kvblock.attend.default,
            arguments,
            test_utils=("test_schema", "test_faketensor"),
        )


if __name__ == "__main__":
    unittest.main()
