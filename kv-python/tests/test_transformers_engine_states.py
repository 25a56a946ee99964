"""The engine over hybrid models of Hugging Face. Needs torch and transformers."""

import threading
import unittest

import kvblock
from models import RECURRENT, model, tiny, torch

if torch is not None:
    from kvblock.transformers import NAME, Engine, KvCache, register
    from kvblock.transformers.entries import Group, PerEntry, joined, picked
    from kvblock.transformers.states import CAN_KEEP
    from transformers import DynamicCache
else:
    CAN_KEEP = False

#: Of several lengths, two of which begin alike.
PROMPTS = [
    [5, 9, 3, 7, 11, 2, 8, 20, 33, 41],
    [4, 6],
    [5, 9, 3, 7, 11, 2, 50],
    list(range(30, 48)),
]
#: A model whose states are written by calls, one with convolutions alone, one that writes them in
#: place, and one with attention and a state in one layer.
KINDS = ("qwen3_5_text", "lfm2", "granitemoehybrid", "falcon_h1")
FAMILIES = (*RECURRENT, "qwen3_next", "lfm2")


def generate(of, prompt, new, **options):
    """Returns the new tokens of ``generate`` with the cache of transformers."""
    of.set_attn_implementation("eager")
    ids = torch.tensor([prompt])
    options = dict(max_new_tokens=new, do_sample=False) | options
    with torch.no_grad():
        cache = DynamicCache(config=of.config)
        mask = torch.ones_like(ids)
        out = of.generate(ids, attention_mask=mask, past_key_values=cache, **options)
    of.set_attn_implementation(NAME)
    return out[0, len(prompt) :].tolist()


class Watched:
    """Notes the logits that an engine computes for each request, and the tokens of its steps."""

    def __init__(self, engine):
        self.engine, self.logits, self.chunks = engine, {}, []
        self.forward = engine._forward
        engine._forward = self

    def __call__(self, batch):
        logits = self.forward(batch)
        self.chunks.append(batch.chunks)
        first = 0
        for request, _, _, rows in batch.chunks:
            self.logits.setdefault(request, []).extend(logits[first : first + rows])
            first += rows
        return logits

    @property
    def computed(self):
        return sum(tokens for chunks in self.chunks for _, tokens, *_ in chunks)


@unittest.skipUnless(CAN_KEEP, "torch or transformers is not installed, or keeps states itself")
class Hybrids(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        register()

    def model(self, family="qwen3_5_text"):
        of = model(family)
        of.set_attn_implementation(NAME)
        return of

    def engine(self, of, **settings):
        return Engine(of, **(dict(num_blocks=128, block_size=4, context=96) | settings))

    def assert_logits(self, of, prompt, new, rows):
        """Compares logits with those of the model over the whole text, without a cache."""
        of.set_attn_implementation("eager")
        with torch.no_grad():
            expected = of(torch.tensor([prompt + new]), use_cache=False).logits[0]
        of.set_attn_implementation(NAME)
        expected = expected[len(prompt) - 1 : -1]
        self.assertEqual(len(rows), len(expected))
        off = (torch.stack(rows) - expected).abs().max()
        self.assertLess(off.item(), 1e-4 * expected.abs().max().item())

    def test_texts_and_logits_of_every_family(self):
        for family in FAMILIES:
            of = self.model(family)
            expected = [generate(of, prompt, 8) for prompt in PROMPTS]
            for most in (7, 64) if family in KINDS else (9,):
                with self.subTest(family, max_step_tokens=most):
                    engine = self.engine(of, max_step_tokens=most)
                    watched = Watched(engine)
                    self.assertEqual(engine.generate(PROMPTS, 8), expected)
                    self.assertGreater(max(map(len, watched.chunks)), 2)
                    for request, prompt in enumerate(PROMPTS):
                        rows = watched.logits[request]
                        self.assert_logits(of, prompt, expected[request], rows)

    def test_the_same_prompt_computes_one_token_and_the_next_turn_its_own(self):
        for family in KINDS:
            of = self.model(family)
            engine = self.engine(of)
            prompt = PROMPTS[3]
            expected = generate(of, prompt, 6)
            for turn, computed in enumerate((len(prompt), 1)):
                watched = Watched(engine)
                self.assertEqual(engine.generate([prompt], 6), [expected])
                self.assertEqual(watched.computed, computed + 5)
                self.assert_logits(of, prompt, expected, watched.logits[turn])
            # The last token of a text was never computed.
            turn = prompt + expected + [44, 45]
            watched = Watched(engine)
            self.assertEqual(engine.generate([turn], 6), [generate(of, turn, 6)])
            self.assertEqual(watched.computed, 3 + 5)

    def test_prompts_that_begin_alike_compute_their_beginning_once(self):
        for family in KINDS:
            of = self.model(family)
            system = list(range(10, 42))
            prompts = [system + own for own in ([1, 2, 3], [4], [5, 6])]
            engine = self.engine(of)
            watched = Watched(engine)
            self.assertEqual(engine.generate(prompts, 5), [generate(of, p, 5) for p in prompts])
            self.assertEqual(engine.stats()["hit_tokens"], 2 * len(system))
            self.assertEqual(watched.computed, len(system) + 3 + 1 + 2 + 3 * 4)
            before = engine.stats()["hit_tokens"]
            engine.generate(prompts[:1], 2, salt=b"tenant")
            self.assertEqual(engine.stats()["hit_tokens"], before)

    def test_stops_serve_prompts_with_another_end(self):
        of = self.model()
        text, engine = list(range(30, 60)), self.engine(of)
        engine.generate([text + [1, 2, 3]], 2, stops=[30])
        other = text + [7, 8]
        self.assertEqual(engine.generate([other], 4), [generate(of, other, 4)])
        self.assertEqual(engine.stats()["hit_tokens"], 30)
        with self.assertRaises(kvblock.RequestError):
            engine.submit(text, 2, stops=[31])

    def test_few_blocks_and_few_slots_preempt(self):
        for family in KINDS:
            of = self.model(family)
            engine = self.engine(of, num_blocks=14, slots=6, snapshots=3, max_step_tokens=9)
            expected = [generate(of, prompt, 20) for prompt in PROMPTS]
            self.assertEqual(engine.generate(PROMPTS, 20), expected)
            self.assertGreater(engine.stats()["preemptions"], 0)
            self.assertEqual(engine.cache.usage()["states"][0]["slots_used"], 0)

    def test_without_snapshots_no_prompt_is_reused(self):
        of = self.model()
        engine = self.engine(of, snapshots=0)
        for _ in range(2):
            self.assertEqual(engine.generate(PROMPTS[:1], 4), [generate(of, PROMPTS[0], 4)])
        self.assertEqual(engine.stats()["hit_tokens"], 0)

    def test_drafts_keep_the_state_behind_each(self):
        for family in KINDS:
            of = self.model(family)
            # Texts of tiny models repeat themselves: some drafts are right.
            engine = self.engine(of, draft_tokens=3)
            prompts = [prompt * 2 for prompt in PROMPTS]
            watched = Watched(engine)
            expected = [generate(of, prompt, 24) for prompt in prompts]
            self.assertEqual(engine.generate(prompts, 24), expected)
            stats = engine.stats()
            self.assertGreater(stats["accepted_tokens"], 0)
            self.assertGreater(stats["drafted_tokens"], stats["accepted_tokens"])
            self.assertTrue(any(len(chunks) > 1 for chunks in watched.chunks))

    def test_choices_and_beams_fork_the_states(self):
        for family in KINDS:
            of = self.model(family)
            engine = self.engine(of)
            texts = engine.generate(PROMPTS[:2], 5, n=2)
            alone = [generate(of, prompt, 5) for prompt in PROMPTS[:2]]
            self.assertEqual(texts, [alone[0]] * 2 + [alone[1]] * 2)
            sampled = engine.generate(PROMPTS[:1], 8, n=3, temperature=1.5, seed=7)
            self.assertGreater(len(set(map(tuple, sampled))), 1)
            again = engine.generate(PROMPTS[:1], 8, n=3, temperature=1.5, seed=7)
            self.assertEqual(again, sampled)
            for prompt in PROMPTS:
                beams = generate(of, prompt, 6, num_beams=3)
                self.assertEqual(engine.generate([prompt], 6, num_beams=3), [beams])

    def test_streams_of_many_threads_and_two_engines(self):
        of = self.model("granitemoehybrid")
        expected = [generate(of, prompt, 6) for prompt in PROMPTS]
        engines, texts = [self.engine(of, max_batch=3) for _ in range(2)], {}

        def read(at):
            prompt = PROMPTS[at % len(PROMPTS)]
            texts[at] = list(engines[at % 3 % 2].stream(prompt, 6))

        threads = [threading.Thread(target=read, args=(at,)) for at in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual([texts[at] for at in range(12)], expected * 3)
        self.assertFalse(any("forward" in vars(module) for module in of.modules()))

    def test_the_model_stays_that_of_others(self):
        of = self.model("lfm2")
        engine = self.engine(of)
        expected = [generate(of, prompt, 6) for prompt in PROMPTS[:2]]
        conv = of.model.layers[0].conv
        before, calls, seen = conv.forward, [], []
        cache = KvCache(of.config, num_blocks=16)
        ids = torch.tensor(PROMPTS[:1])

        def own(*args, **kwargs):
            calls.append(kwargs["hidden_states"].shape[:2])
            return before(*args, **kwargs)

        def other(*_args):
            if not seen:
                # The model of the step serves another cache too.
                seen.append(None)
                mask = torch.ones_like(ids)
                options = dict(attention_mask=mask, max_new_tokens=6, do_sample=False)
                seen[0] = of.generate(ids, past_key_values=cache, **options)
                self.assertIsInstance(conv.forward, PerEntry)

        conv.forward = own
        hook = of.model.layers[1].register_forward_pre_hook(other)
        self.assertEqual(engine.generate([PROMPTS[1], PROMPTS[1] + [3]], 6)[0], expected[1])
        hook.remove()
        self.assertEqual(seen[0][0, ids.shape[1] :].tolist(), expected[0])
        self.assertIs(conv.forward, own)
        # Two texts in one batch, without padding.
        self.assertIn((2, 1), calls)

    def test_a_model_that_fails_is_asked_again(self):
        def fail(*_args):
            raise OSError("a layer that fails")

        for family in KINDS:
            of = self.model(family)
            engine = self.engine(of)
            expected = generate(of, PROMPTS[0], 5)
            for layer in of.model.layers:
                for tokens in (0, 2):
                    stream = engine.stream(PROMPTS[0], 5)
                    begun = [next(stream) for _ in range(tokens)]
                    hook = layer.register_forward_pre_hook(fail)
                    with self.assertRaises(OSError):
                        next(stream)
                    hook.remove()
                    self.assertEqual(begun, expected[:tokens])
            self.assertEqual(engine.generate([PROMPTS[0]], 5), [expected])
            self.assertEqual(engine.cache.usage()["states"][0]["slots_used"], 0)
            self.assertFalse(any("forward" in vars(module) for module in of.modules()))

    def test_a_compiled_model_runs_its_states_outside_of_the_graphs(self):
        layers = dict(num_hidden_layers=2, layer_types=["conv", "full_attention"])
        of = tiny("lfm2", block_multiple_of=8, **layers)
        of.set_attn_implementation(NAME)
        expected = [generate(of, prompt, 3) for prompt in PROMPTS[:2]]
        of.forward = torch.compile(of.forward, backend="eager", dynamic=True)
        self.assertEqual(self.engine(of).generate(PROMPTS[:2], 3), expected)

    def test_a_layer_of_attention_may_come_first(self):
        settings = RECURRENT["qwen3_5_text"] | dict(
            layer_types=["full_attention", "linear_attention"] * 2
        )
        of = tiny("qwen3_5_text", **settings)
        of.set_attn_implementation(NAME)
        engine = self.engine(of)
        self.assertEqual(engine.generate(PROMPTS, 6), [generate(of, p, 6) for p in PROMPTS])
        self.assertEqual(engine.cache.usage()["states"][0]["slots_total"], 16)

    def test_what_cannot_run_is_refused_by_name(self):
        of = self.model("falcon_h1")
        mamba = of.model.layers[1].mamba
        # A module that the layer does not call as one.
        inlined = type("Inlined", (type(mamba),), dict(__call__=type(mamba).forward))
        mamba.__class__ = inlined
        with self.assertRaisesRegex(NotImplementedError, "layer 1 works on its state in no module"):
            self.engine(of)
        mamba.__class__ = inlined.__base__
        mamba.forward = lambda hidden_states, **_: hidden_states
        with self.assertRaisesRegex(NotImplementedError, "layer 1 never asks"):
            self.engine(of)
        del mamba.forward
        with self.assertRaisesRegex(kvblock.SpecError, "slots"):
            self.engine(of, slots=1)
        with self.assertRaisesRegex(kvblock.RequestError, "room for 2"):
            self.engine(of, slots=4).submit(PROMPTS[0], 4, num_beams=3)
        self.assertEqual(self.engine(of).generate(PROMPTS[:1], 4), [generate(of, PROMPTS[0], 4)])

    def test_a_module_that_works_elsewhere_later_is_refused(self):
        of = self.model()
        engine = self.engine(of)
        # A module in front of it asks for the state of the layer.
        hook = of.model.layers[0].input_layernorm.register_forward_pre_hook(
            lambda *_: engine._seen.get_conv_state(0)
        )
        with self.assertRaisesRegex(RuntimeError, "layer 0 works on its state where it did not"):
            engine.generate(PROMPTS[:1], 2)
        hook.remove()
        self.assertEqual(engine.generate(PROMPTS[:1], 2), [generate(of, PROMPTS[0], 2)])

    def test_tensors_of_another_shape_are_refused(self):
        places = torch.tensor([[0, 1], [3, 4]])
        of = torch.arange(10).reshape(1, 5, 2)
        given = picked(dict(own=(of, None, 3)), places, 5)["own"]
        self.assertEqual(given[0].tolist(), [[[0, 1], [2, 3]], [[6, 7], [8, 9]]])
        self.assertEqual(given[1:], (None, 3))
        with self.assertRaisesRegex(NotImplementedError, "which entry"):
            picked([of[0]], places, 5)
        groups = [Group([0, 2], places, [2, 2], True), Group([1], torch.tensor([[2]]), [1], False)]
        parts = [picked(of, group.places, 5) for group in groups]
        self.assertTrue(torch.equal(joined(parts, groups, 5), of))
        both, nothing = joined([(part, None) for part in parts], groups, 5)
        self.assertTrue(torch.equal(both, of))
        self.assertIsNone(nothing)
        for wrong in ([part[:, :1, 0] for part in parts[::-1]], ["one", "two"]):
            with self.assertRaisesRegex(NotImplementedError, "entries and tokens"):
                joined(wrong, groups, 5)


if __name__ == "__main__":
    unittest.main()
