"""The engine over models of Hugging Face, against ``generate``. Needs torch and transformers."""

import threading
import unittest

import kvblock
from models import FAMILIES, SINCE, VERSION, model, torch, transformers

if torch is not None:
    from kvblock.transformers import NAME, Engine, KvCache, register

#: Of several lengths, two of which begin alike.
PROMPTS = [
    [5, 9, 3, 7, 11, 2, 8, 20, 33, 41],
    [4, 6],
    [5, 9, 3, 7, 11, 2, 50],
    [30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47],
]


def alone(of, prompt, new):
    """Returns the new tokens of ``generate`` with a cache of its own."""
    of.set_attn_implementation("eager")
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = of.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False
        )
    of.set_attn_implementation(NAME)
    return out[0, len(prompt) :].tolist()


@unittest.skipIf(torch is None, "torch or transformers is not installed")
class Engines(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        register()

    def test_texts_of_every_family(self):
        known = 0
        for family in FAMILIES:
            if VERSION < SINCE.get(family, VERSION):
                continue
            with self.subTest(family):
                try:
                    of = model(family)
                except Exception as error:
                    print(f"{family} has no config in {transformers.__version__}: {error}")
                    continue
                known += 1
                expected = [alone(of, prompt, 10) for prompt in PROMPTS]
                engine = Engine(of, num_blocks=128, block_size=4, max_step_tokens=7, context=64)
                self.assertEqual(engine.generate(PROMPTS, 10), expected)
        self.assertGreater(known, len(FAMILIES) - 4)

    def test_a_system_prompt_is_computed_once(self):
        of = model()
        of.set_attn_implementation(NAME)
        engine = Engine(of, num_blocks=64)
        system = list(range(10, 42))
        first, second = engine.generate([system + [1, 2], system + [3]], 6)
        self.assertEqual((first, second), (alone(of, system + [1, 2], 6), alone(of, system + [3], 6)))
        self.assertEqual(engine.stats()["hit_tokens"], len(system))

    def test_salts_share_nothing(self):
        of = model()
        of.set_attn_implementation(NAME)
        engine = Engine(of, num_blocks=64)
        prompt = list(range(10, 42))
        for salt, hits in ((b"one", 0), (b"two", 0), (b"one", 31)):
            before = engine.stats()["hit_tokens"]
            engine.generate([prompt], 2, salt=salt)
            self.assertEqual(engine.stats()["hit_tokens"] - before, hits)

    def test_streams_of_many_threads(self):
        of = model("mistral")
        of.set_attn_implementation(NAME)
        engine = Engine(of, num_blocks=128, max_batch=3)
        expected = [alone(of, prompt, 8) for prompt in PROMPTS]
        texts = {}

        def read(at):
            texts[at] = list(engine.stream(PROMPTS[at % len(PROMPTS)], 8))

        threads = [threading.Thread(target=read, args=(at,)) for at in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual([texts[at] for at in range(12)], expected * 3)
        self.assertFalse(engine.has_work)
        self.assertEqual(engine.cache.usage()["blocks_used"], 0)

    def test_a_stream_that_is_closed_ends_its_request(self):
        of = model()
        of.set_attn_implementation(NAME)
        engine = Engine(of, num_blocks=64)
        stream = engine.stream(PROMPTS[0], 30)
        begun = [next(stream), next(stream)]
        self.assertEqual(begun, alone(of, PROMPTS[0], 2))
        stream.close()
        self.assertFalse(engine.has_work)
        self.assertEqual(engine.cache.usage()["blocks_used"], 0)
        with self.assertRaises(ValueError):
            next(engine.stream([1], 1, n=2))

    def test_requests_by_hand(self):
        of = model()
        of.set_attn_implementation(NAME)
        engine = Engine(of, num_blocks=64, stop=[])
        (one,) = engine.submit(torch.tensor([PROMPTS[0]]), 4)
        (other,) = engine.submit(PROMPTS[1], 9)
        tokens = {one: [], other: []}
        while engine.has_work:
            for event in engine.step():
                if event["kind"] == "token":
                    tokens[event["request"]].append(event["token"])
            if len(tokens[other]) == 5:
                self.assertEqual(engine.cancel(other)["tokens"], tokens[other])
        of.generation_config.eos_token_id = None
        self.assertEqual(tokens[one], alone(of, PROMPTS[0], 4))
        self.assertEqual(tokens[other], alone(of, PROMPTS[1], 5))

    def test_layers_with_windows_share_prompts_too(self):  # 42094, 42877
        of = model("gemma2")
        of.set_attn_implementation(NAME)
        engine = Engine(of, num_blocks=64, block_size=4)
        system = list(range(10, 42))
        for call, question in enumerate(([1, 2], [3], [1, 2])):  # 45943: a second call, same ids
            prompt = system + question
            self.assertEqual(engine.generate([prompt], 5), [alone(of, prompt, 5)])
            self.assertEqual(engine.stats()["hit_tokens"] > 0, call > 0)
        self.assertGreaterEqual(engine.stats()["hit_tokens"], 2 * len(system))

    def test_logits_are_computed_where_they_are_needed(self):  # 46434
        of = model()
        of.set_attn_implementation(NAME)
        engine = Engine(of, num_blocks=64, max_step_tokens=64)
        rows = []
        of.lm_head.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].shape[1]))
        engine.generate(PROMPTS, 3)
        self.assertEqual(rows, [4, 4, 4])

    def test_a_model_that_fails_is_asked_again(self):
        of = model()
        of.set_attn_implementation(NAME)
        engine = Engine(of, num_blocks=64)
        expected = alone(of, PROMPTS[0], 5)
        for layer in range(3):

            def fail(*args):
                raise OSError("a layer that fails")

            hook = of.model.layers[layer].register_forward_pre_hook(fail)
            stream = engine.stream(PROMPTS[0], 5)
            with self.assertRaises(OSError):
                next(stream)
            hook.remove()
            self.assertFalse(engine.has_work)
        self.assertEqual(engine.generate([PROMPTS[0]], 5), [expected])
        self.assertEqual(engine.cache.usage()["blocks_used"], 0)

    def test_a_few_bits_and_a_few_blocks(self):
        of = model()
        of.set_attn_implementation(NAME)
        engine = Engine(of, num_blocks=9, format="int8")
        texts = engine.generate(PROMPTS * 2, 20)
        self.assertEqual([len(text) for text in texts], [20] * 8)
        self.assertEqual(texts[:4], texts[4:])
        with self.assertRaises(kvblock.RequestError) as refused:
            engine.submit(list(range(50)), 180)
        self.assertGreater(refused.exception.needed, refused.exception.available)
        with self.assertRaises(kvblock.RequestError):
            engine.submit([97], 1)
        engine.close()
        with self.assertRaises(kvblock.StateError):
            engine.generate([[1]], 1)

    def test_the_model_stays_that_of_others(self):
        of = model()
        of.set_attn_implementation(NAME)
        expected = alone(of, PROMPTS[0], 6)
        engine = Engine(of, num_blocks=64)
        stream = engine.stream(PROMPTS[1], 6)
        begun = [next(stream)]
        # While the engine runs, the model also serves a cache of its own.
        cache = KvCache(of.config, num_blocks=16)
        ids = torch.tensor([PROMPTS[0]])
        with torch.no_grad():
            out = of.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=cache,
                max_new_tokens=6,
                do_sample=False,
            )
        self.assertEqual(out[0, ids.shape[1] :].tolist(), expected)
        self.assertEqual(begun + list(stream), alone(of, PROMPTS[1], 6))

    def test_what_cannot_run_is_refused(self):
        of = model()
        of.set_attn_implementation("eager")
        with self.assertRaisesRegex(ValueError, "set_attn_implementation"):
            Engine(of, num_blocks=8)
        of.set_attn_implementation(NAME)
        with self.assertRaises(TypeError):
            Engine(of, no_such_setting=1)


if __name__ == "__main__":
    unittest.main()
