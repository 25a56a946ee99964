"""Models of Hugging Face over the cache, against DynamicCache. Needs torch and transformers."""

import copy
import tempfile
import unittest
from unittest import mock

import kvblock
from models import FAMILIES, SINCE, SMALL, VERSION, model, torch, transformers

if torch is not None:
    from kvblock.transformers import NAME, KvCache, calibrate, register
    from transformers import DynamicCache


@unittest.skipIf(torch is None, "torch or transformers is not installed")
class Models(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        register()

    def generate(self, of, cache, attention, ids, **options):
        of.set_attn_implementation(attention)
        options.setdefault("attention_mask", torch.ones_like(ids))
        options = dict(max_new_tokens=12, do_sample=False) | options
        with torch.no_grad():
            return of.generate(ids, past_key_values=cache, **options).tolist()

    def both(self, of, ids, forms=("attend", "gather"), **options):
        """Generates with DynamicCache and with ours, and compares all tokens."""
        config = of.config
        expected = self.generate(of, DynamicCache(config=config), "eager", ids, **options)
        for mode in forms:
            attention = NAME if mode == "attend" else "eager"
            cache = KvCache(config, mode=mode, num_blocks=512)
            got = self.generate(of, cache, attention, ids, **options)
            self.assertEqual(got, expected, f"{config.model_type}, {mode}")
            self.assertEqual(cache.get_seq_length(), len(got[0]) - 1)
        return expected

    def test_logits_of_every_family(self):
        known = 0
        for family, settings in FAMILIES.items():
            if VERSION < SINCE.get(family, VERSION):
                continue
            try:
                transformers.AutoConfig.for_model(family, **(SMALL | settings))
            except Exception as error:
                # Some versions check the types of a few configs wrongly.
                print(f"{family} has no config in {transformers.__version__}: {error}")
                continue
            known += 1
            with self.subTest(family):
                logits = {mode: self.logits(family, mode) for mode in (None, "attend", "gather")}
                for mode in ("attend", "gather"):
                    far = (logits[mode] - logits[None]).abs().max() / logits[None].abs().max()
                    self.assertLess(far.item(), 2e-5, mode)
        self.assertGreater(known, len(FAMILIES) - 4)

    def logits(self, family, mode):
        """Returns logits of a ragged prompt and of five tokens after it."""
        of = model(family)
        of.set_attn_implementation(NAME if mode == "attend" else "eager")
        cache = DynamicCache(config=of.config)
        if mode is not None:
            cache = KvCache(of.config, mode=mode, num_blocks=64)
        ids = torch.tensor([[5, 9, 3, 7, 11, 2, 8, 20], [0, 0, 0, 4, 6, 9, 30, 31]])
        mask = torch.tensor([[1] * 8, [0] * 3 + [1] * 5])
        logits = []
        with torch.no_grad():
            for _ in range(6):
                positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
                out = of(
                    ids,
                    attention_mask=mask,
                    position_ids=positions,
                    past_key_values=cache,
                    use_cache=True,
                )
                logits.append(out.logits[:, -1])
                ids = torch.tensor([[3], [12]])
                mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
        return torch.stack(logits)

    def test_generate_gives_the_same_tokens(self):
        one = torch.tensor([[1, 5, 9, 3, 7, 11]])
        for family in ("llama", "gemma2", "mistral"):
            of = model(family)
            self.both(of, one)
            ragged = torch.tensor([[1, 5, 9, 3, 7, 11], [0, 0, 0, 1, 8, 4], [0, 1, 8, 4, 2, 2]])
            mask = (ragged != 0).long()
            self.both(of, ragged, attention_mask=mask)
            self.both(of, one, num_beams=3)
            self.both(of, one, num_return_sequences=3, num_beams=3)

    def test_models_that_go_back(self):
        of = model()
        ids = torch.tensor([[1, 5, 9, 5, 9, 5, 9, 5]])
        self.both(of, ids, prompt_lookup_num_tokens=3)
        self.both(of, ids, assistant_model=model(seed=0), forms=("attend",))
        # DynamicCache itself goes back over a window since 5.16 only.
        of = model("mistral")
        expected = self.generate(of, DynamicCache(config=of.config), "eager", ids)
        for lookup in (1, 3):
            cache = KvCache(of.config, num_blocks=512, window_slack=8)
            got = self.generate(of, cache, NAME, ids, prompt_lookup_num_tokens=lookup)
            self.assertEqual(got, expected)

    def test_a_second_turn_goes_on(self):
        of = model()
        first = torch.tensor([[1, 5, 9, 3]])
        for mode in ("attend", "gather"):
            attention = NAME if mode == "attend" else "eager"
            texts = []
            for cache, name in (
                (DynamicCache(config=of.config), "eager"),
                (KvCache(of.config, mode=mode, num_blocks=64), attention),
            ):
                turn = self.generate(of, cache, name, first)
                more = torch.tensor([turn[0] + [44, 45]])
                texts.append(self.generate(of, cache, name, more))
            self.assertEqual(texts[0], texts[1])

    def test_a_prompt_that_is_computed_once(self):
        of = model()
        of.set_attn_implementation(NAME)
        system = torch.tensor([[1, 5, 9, 3, 7, 8, 2, 4]])
        cache = KvCache(of.config, num_blocks=64)
        with torch.no_grad():
            of(system, past_key_values=cache, use_cache=True)
        used = cache.blocks.usage()["blocks_used"]
        for question in ([6, 7], [60, 61]):
            ids = torch.tensor([system[0].tolist() + question])
            fork = copy.deepcopy(cache)
            got = self.generate(of, fork, NAME, ids)
            expected = self.generate(of, DynamicCache(config=of.config), "eager", ids)
            self.assertEqual(got, expected)
            of.set_attn_implementation(NAME)
            del fork
            self.assertEqual(cache.blocks.usage()["blocks_used"], used)
        self.assertEqual(cache.get_seq_length(), 8)

    def test_prompts_in_chunks(self):
        of = model()
        ids = torch.tensor([[1, 5, 9, 3, 7, 11, 12, 13, 14, 15]])
        self.both(of, ids, prefill_chunk_size=4)

    def test_few_bits_stay_near(self):
        of = model()
        of.set_attn_implementation(NAME)
        ids = torch.tensor([[1, 5, 9, 3, 7, 11]])
        with torch.no_grad():
            cache = KvCache(of.config, num_blocks=64)
            exact = of(ids, past_key_values=cache, use_cache=True).logits
            for name, far in (("bf16", 0.01), ("int8", 0.02), ("int8/l4", 0.2)):
                cache = KvCache(of.config, format=name, num_blocks=64)
                got = of(ids, past_key_values=cache, use_cache=True).logits
                self.assertLess(((got - exact).abs().max() / exact.abs().max()).item(), far, name)

    def test_constants_are_measured_on_a_text(self):
        of = model("gemma2")
        of.set_attn_implementation(NAME)
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/constants"
            prompts = [[(7 * n + at) % 97 for n in range(40)] for at in range(3)]
            self.assertEqual(calibrate(of, prompts, path, name="tiny"), 3 * 36)
            ids = torch.tensor([[1, 5, 9, 3, 7, 11]])
            with torch.no_grad():
                cache = KvCache(of.config, num_blocks=64)
                exact = of(ids, past_key_values=cache, use_cache=True).logits
                cache = KvCache(of.config, num_blocks=64, format="int8-head", calibration=path)
                got = of(ids, past_key_values=cache, use_cache=True).logits
            self.assertLess(((got - exact).abs().max() / exact.abs().max()).item(), 0.05)
            with self.assertRaisesRegex(ValueError, "one prompt"):
                calibrate(of, [], path)

    def test_what_would_be_wrong_is_refused(self):
        of = model()
        ids = torch.tensor([[1, 5, 9]])
        cache = KvCache(of.config, num_blocks=64)
        of.set_attn_implementation("eager")
        with torch.no_grad():
            with self.assertRaisesRegex(RuntimeError, "never attended to"):
                of(ids, past_key_values=cache, use_cache=True)
            of.set_attn_implementation(NAME)
            with self.assertRaisesRegex(RuntimeError, "no cache in attend mode"):
                of(ids, past_key_values=DynamicCache(config=of.config), use_cache=True)
            with self.assertRaisesRegex(RuntimeError, "no cache in attend mode"):
                of(ids, use_cache=False)
            # After a refusal the cache goes on.
            cache.reset()
            expected = self.generate(of, DynamicCache(config=of.config), "eager", ids)
            self.assertEqual(self.generate(of, cache, NAME, ids), expected)
            with self.assertRaisesRegex(ValueError, "the batch has 2 rows"):
                of(torch.cat([ids, ids]), past_key_values=cache, use_cache=True)
            right = torch.tensor([[1, 5, 0], [1, 5, 9]])
            with self.assertRaisesRegex(NotImplementedError, "padding behind"):
                of(
                    right,
                    attention_mask=(right != 0).long(),
                    past_key_values=KvCache(of.config, num_blocks=64),
                    use_cache=True,
                )
            hidden = torch.tensor([[1] * 2 + [0] + [1] * 3])
            begun = KvCache(of.config, num_blocks=64)
            of(ids, past_key_values=begun, use_cache=True)
            with self.assertRaisesRegex(NotImplementedError, "cannot be hidden later"):
                of(ids, attention_mask=hidden, past_key_values=begun, use_cache=True)
            with self.assertRaisesRegex(ValueError, "crop"):
                cache.crop(-1000)
        with self.assertRaisesRegex(ValueError, "mode="):
            KvCache(of.config, mode="both")

    def test_the_blocks_are_on_the_device_of_the_keys(self):
        config = transformers.AutoConfig.for_model("llama", **SMALL)
        for place, settings, device in (
            ("cuda:1", {}, "cuda:1"),
            ("cuda:1", {"device": "cpu"}, "cpu"),
            ("cpu", {}, None),
        ):
            key = mock.MagicMock(device=torch.device(place), dtype=torch.float16, shape=(1, 2, 3, 8))
            with mock.patch("kvblock.Cache") as made:
                KvCache(config, **settings)._make(key, key)
            self.assertEqual(made.call_args.kwargs.get("device"), device)

    def test_a_pool_that_is_too_small_says_so_and_goes_on(self):
        of = model()
        ids = torch.tensor([[1, 5, 9, 3, 7, 11]])
        cache = KvCache(of.config, num_blocks=2, block_size=8, max_seq_len=256)
        with self.assertRaises((kvblock.Exhausted, kvblock.PlanError)):
            self.generate(of, cache, NAME, ids, max_new_tokens=40)
        cache.reset()
        expected = self.generate(of, DynamicCache(config=of.config), "eager", ids, max_new_tokens=4)
        self.assertEqual(self.generate(of, cache, NAME, ids, max_new_tokens=4), expected)

    def test_an_exception_in_any_layer_leaves_no_step(self):
        of = model()
        of.set_attn_implementation(NAME)
        ids = torch.tensor([[1, 5, 9, 3]])
        cache = KvCache(of.config, num_blocks=64)
        expected = self.generate(of, DynamicCache(config=of.config), "eager", ids)
        of.set_attn_implementation(NAME)

        def fail(*_args):
            raise RuntimeError("out of luck")

        for layer in of.model.layers:
            hook = layer.mlp.register_forward_hook(fail)
            with torch.no_grad(), self.assertRaisesRegex(RuntimeError, "out of luck"):
                of(ids, past_key_values=cache, use_cache=True)
            hook.remove()
        cache.reset()
        self.assertEqual(self.generate(of, cache, NAME, ids), expected)


if __name__ == "__main__":
    unittest.main()
