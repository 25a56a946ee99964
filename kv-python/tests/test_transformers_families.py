"""Families whose layers differ, against DynamicCache. Needs torch and transformers."""

import copy
import pickle
import unittest

from models import FAMILIES, SMALL, VERSION, model, tiny, torch, transformers

if torch is not None:
    from kvblock.transformers import NAME, Engine, KvCache, register
    from transformers import DynamicCache, EncoderDecoderCache

ONE = [[1, 5, 9, 3, 7, 11, 4, 8]]
RAGGED = [[1, 5, 9, 3, 7, 11], [0, 0, 0, 1, 8, 4]]


@unittest.skipIf(torch is None, "torch or transformers is not installed")
class Families(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        register()

    def generate(self, of, cache, ids, **options):
        ids = torch.tensor(ids)
        options = dict(max_new_tokens=12, do_sample=False) | options
        mask = (ids != 0).long()
        with torch.no_grad():
            return of.generate(ids, past_key_values=cache, attention_mask=mask, **options).tolist()

    def both(self, of, modes, ids, **options):
        """Generates with DynamicCache and with ours, and compares all tokens."""
        of.set_attn_implementation("eager")
        expected = self.generate(of, DynamicCache(config=of.config), ids, **options)
        for mode in modes:
            of.set_attn_implementation(NAME if mode == "attend" else "eager")
            cache = KvCache(of.config, mode=mode, num_blocks=256)
            self.assertEqual(self.generate(of, cache, ids, **options), expected, mode)
        return cache, expected

    def test_layers_that_share_keys(self):
        of = model("gemma3n_text")
        for ids, options in ((ONE, {}), (RAGGED, {}), (ONE, dict(num_beams=3))):
            cache, _ = self.both(of, ("gather", "attend"), ids, **options)
            self.assertEqual(cache.blocks.layers, 2)
        cache = pickle.loads(pickle.dumps(cache))
        self.assertEqual(cache.get_seq_length(), 19)

    @unittest.skipIf(VERSION < (5, 14), "a model leaves shared keys in the cache")
    def test_shared_keys_that_the_config_does_not_tell_of(self):
        of = model("gemma3n_text")
        of.set_attn_implementation(NAME)
        cache = KvCache(of.config, num_blocks=64)
        cache._all_layers = 2
        with self.assertRaisesRegex(NotImplementedError, "layer 2 attends to the keys of layer 0"):
            self.generate(of, cache, ONE)

    @unittest.skipIf(VERSION < (5, 14), "linear attention has a cache of its own")
    def test_layers_with_linear_attention_go_on(self):
        for family in ("qwen3_next", "lfm2"):
            with self.subTest(family):
                of = model(family)
                for ids, options in ((ONE, {}), (RAGGED, {}), (ONE, dict(num_beams=3))):
                    cache, _ = self.both(of, ("gather", "attend"), ids, **options)
                for copied in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
                    ids = torch.tensor([[3]] * 3)
                    with torch.no_grad():
                        got = of(ids, past_key_values=copied, use_cache=True).logits
                        fork = copy.deepcopy(cache)
                        expected = of(ids, past_key_values=fork, use_cache=True).logits
                    self.assertTrue(torch.allclose(got, expected, atol=1e-5))
                cache.reset()
                again = self.generate(of, cache, ONE)
                fresh = self.generate(of, KvCache(of.config, num_blocks=64), ONE)
                self.assertEqual(again, fresh)

    @unittest.skipIf(VERSION < (5, 16), "linear attention does not go back")
    def test_convolutions_go_back_and_recurrent_states_do_not(self):
        self.both(model("lfm2"), ("gather", "attend"), ONE, prompt_lookup_num_tokens=2)
        of = model("qwen3_next")
        of.set_attn_implementation(NAME)
        cache = KvCache(of.config, num_blocks=64)
        cache.activate_past_recording()
        self.generate(of, cache, ONE)
        with self.assertRaisesRegex(NotImplementedError, "does not go back"):
            cache.crop(-1)
        # Nothing is removed, and nothing has to come back.
        cache.crop(0)
        with self.assertRaisesRegex(NotImplementedError, "no such call"):
            cache.batch_repeat_interleave(2)
        self.assertEqual(cache.get_seq_length(), 19)
        self.assertEqual(cache.layers[1].batch_size, 1)
        cache = KvCache(of.config, num_blocks=64, slots=0)
        self.generate(of, cache, ONE)
        with self.assertRaisesRegex(RuntimeError, "activate_past_recording"):
            cache.crop(0)

    def test_chunks_run_in_gather_mode_alone(self):
        of = model("llama4_text")
        for ids, options in ((ONE, {}), (RAGGED, {}), (ONE, dict(num_beams=3))):
            self.both(of, ("gather",), ids, **options)
        with self.assertRaisesRegex(NotImplementedError, 'in chunks: use mode="gather"'):
            KvCache(of.config)
        of.set_attn_implementation(NAME)
        with self.assertRaisesRegex(NotImplementedError, "in chunks"):
            Engine(of, num_blocks=64)

    def test_latent_keys_are_refused_by_name(self):
        of = model("deepseek_v3")
        if VERSION < (5, 16):
            # Whole keys are cached.
            self.both(of, ("gather", "attend"), RAGGED)
            return
        of.set_attn_implementation(NAME)
        with self.assertRaisesRegex(RuntimeError, 'mode="gather" for models that change keys'):
            self.generate(of, KvCache(of.config, num_blocks=64), ONE)
        with self.assertRaisesRegex(RuntimeError, 'mode="gather" for models that change keys'):
            Engine(of, num_blocks=64)

    def test_a_model_with_attention_of_its_own_is_refused_at_once(self):
        of = tiny("bloom", n_layer=3, n_head=4)
        self.both(of, ("gather",), ONE, num_beams=2)
        of.config._attn_implementation = NAME
        for options in ({}, dict(num_beams=2), dict(prompt_lookup_num_tokens=2)):
            cache = KvCache(of.config, num_blocks=64)
            # In some versions the first layer does not take the mask.
            with self.assertRaisesRegex(RuntimeError, "never attended to|must match"):
                self.generate(of, cache, ONE, max_new_tokens=1, **options)
        with self.assertRaisesRegex(NotImplementedError, "position_ids"):
            Engine(of, num_blocks=64)

    def test_one_layer_without_attention_is_refused_before_rows_change(self):
        of = tiny("llama", num_hidden_layers=1)
        of.set_attn_implementation("eager")
        for change in (
            lambda cache: cache.reorder_cache(torch.tensor([0])),
            lambda cache: cache.batch_repeat_interleave(2),
            lambda cache: cache.crop(0),
        ):
            cache = KvCache(of.config, num_blocks=64)
            with torch.no_grad():
                of(torch.tensor(ONE), past_key_values=cache, use_cache=True)
            with self.assertRaisesRegex(RuntimeError, "never attended to"):
                change(cache)

    @unittest.skipIf(VERSION < (5, 16), "the families are newer")
    def test_layers_that_blocks_cannot_hold_are_refused_by_name(self):
        latent = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=4)
        for family, settings, why in (
            ("falcon_h1", dict(mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8), "in one layer"),
            ("mamba", dict(state_size=4), "no layers of attention"),
            ("deepseek_v32", latent, "keys of an index"),
        ):
            config = transformers.AutoConfig.for_model(family, **(SMALL | settings))
            for mode in ("attend", "gather"):
                with self.assertRaisesRegex(NotImplementedError, f"{family} .*{why}"):
                    KvCache(config, mode=mode, slots=0)

    def test_text_of_models_with_images(self):
        vision = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1)
        vision |= dict(num_attention_heads=4, image_size=16, patch_size=8)
        sliding = FAMILIES["gemma3_text"]
        for family, text, vision in (
            ("gemma3", sliding | dict(model_type="gemma3_text"), vision),
            ("llava", dict(model_type="llama"), vision | dict(model_type="clip_vision_model")),
        ):
            settings = dict(text_config=SMALL | text, vision_config=vision)
            of = tiny(family, "ImageTextToText", **settings)
            with self.subTest(family):
                _, expected = self.both(of, ("gather", "attend"), ONE)
                of.set_attn_implementation(NAME)
                engine = Engine(of, num_blocks=64, max_step_tokens=5, context=64)
                self.assertEqual([ONE[0] + engine.generate(ONE, 12)[0]], expected)

    def test_layers_of_cross_attention_are_refused_by_name(self):
        config = transformers.AutoConfig.for_model("mllama", text_config=dict(rope_scaling=None))
        for mode in ("attend", "gather"):
            with self.assertRaisesRegex(NotImplementedError, "mllama.* cross-attention"):
                KvCache(config, mode=mode)

    def test_prefixes_that_are_not_causal_run_in_gather_mode(self):
        vision = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1)
        vision |= dict(num_attention_heads=4, image_size=16, patch_size=8)
        vision |= dict(model_type="siglip_vision_model")
        text = SMALL | dict(model_type="gemma")
        settings = dict(text_config=text, vision_config=vision, projection_dim=32)
        of = tiny("paligemma", "ImageTextToText", **settings)
        self.both(of, ("gather",), ONE)
        of.set_attn_implementation(NAME)
        with self.assertRaises(NotImplementedError):
            self.generate(of, KvCache(of.config, num_blocks=64), ONE)

    @unittest.skipIf(VERSION < (5, 16), "the family is newer")
    def test_heads_of_two_shapes_are_refused_by_name(self):
        of = tiny(
            "gemma4_text",
            layer_types=["sliding_attention", "full_attention", "full_attention"],
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=97,
            num_kv_shared_layers=0,
            global_head_dim=16,
        )
        for mode in ("attend", "gather"):
            of.set_attn_implementation(NAME if mode == "attend" else "eager")
            with self.assertRaisesRegex(NotImplementedError, "layer 1 has 2 heads of 16"):
                self.generate(of, KvCache(of.config, mode=mode, num_blocks=64), ONE)
        of.set_attn_implementation(NAME)
        with self.assertRaisesRegex(NotImplementedError, "layer 1 has 2 heads of 16"):
            Engine(of, num_blocks=64)

    def test_rows_are_chosen_as_torch_does(self):
        of = model()
        of.set_attn_implementation(NAME)
        for indices in ((0, 2), [0, -1], torch.tensor([True, False, True]), torch.tensor([0, 2])):
            cache = KvCache(of.config, num_blocks=64)
            cache.batch_select_indices(indices)
            with torch.no_grad():
                of(torch.tensor([[5, 9], [4, 6], [7, 8]]), past_key_values=cache, use_cache=True)
            before = cache.layers[0].keys
            cache.batch_select_indices(indices)
            self.assertTrue(torch.equal(cache.layers[0].keys, before[[0, 2]]))
            for change, wrong in ((cache.batch_select_indices, [2]), (cache.reorder_cache, [9])):
                with self.assertRaises(IndexError):
                    change(wrong)
            self.assertTrue(torch.equal(cache.layers[0].keys, before[[0, 2]]))

    def test_encoders_and_decoders_run_in_gather_mode(self):
        t5 = dict(d_model=32, d_ff=48, d_kv=8, num_decoder_layers=3, num_heads=4)
        bart = dict(d_model=32, encoder_layers=3, decoder_layers=3, max_position_embeddings=64)
        bart |= {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
        bart |= {f"{side}_ffn_dim": 48 for side in ("encoder", "decoder")}
        whisper = bart | dict(num_mel_bins=8, max_source_positions=20, max_target_positions=64)
        text = dict(
            input_ids=torch.tensor([[5, 9, 3, 7, 11], [4, 6, 8, 0, 0]]),
            attention_mask=torch.tensor([[1] * 5, [1, 1, 1, 0, 0]]),
        )
        torch.manual_seed(1)
        sound = dict(input_features=torch.randn(1, 8, 40))
        for family, settings, inputs in (
            ("t5", t5, text),
            ("bart", bart, text),
            ("whisper", whisper, sound),
        ):
            with self.subTest(family):
                kind = "SpeechSeq2Seq" if family == "whisper" else "Seq2SeqLM"
                settings = settings | dict(decoder_start_token_id=1, forced_eos_token_id=None)
                of = tiny(family, kind, **settings)
                of.set_attn_implementation("eager")
                for options in ({}, dict(num_beams=3)):
                    self.check_both_sides(of, inputs, **options)
                with self.assertRaisesRegex(NotImplementedError, 'encoder: use mode="gather"'):
                    KvCache(of.config)

    def check_both_sides(self, of, inputs, **options):
        def own():
            return KvCache(of.config, mode="gather", num_blocks=64)

        def theirs():
            return DynamicCache(config=of.config)

        texts = []
        for make in ((theirs, theirs), (own, theirs), (own, own)):
            cache = EncoderDecoderCache(*(side() for side in make))
            with torch.no_grad():
                out = of.generate(
                    **inputs, past_key_values=cache, max_new_tokens=12, do_sample=False, **options
                )
            texts.append(out.tolist())
        self.assertEqual(texts[1], texts[0])
        self.assertEqual(texts[2], texts[0])


if __name__ == "__main__":
    unittest.main()
