"""Recurrent states of hybrid models in slots. Needs torch and transformers."""

import copy
import pickle
import threading
import unittest

import kvblock
from models import RECURRENT, model, tiny, torch

if torch is not None:
    from kvblock.transformers import NAME, Engine, KvCache, register
    from kvblock.transformers.states import CAN_KEEP, Part, check_parts
    from transformers import DynamicCache
else:
    CAN_KEEP = False

ONE = [[1, 5, 9, 3, 7, 11, 4, 8]]
RAGGED = [[1, 5, 9, 3, 7, 11], [0, 0, 0, 1, 8, 4]]
#: A model whose states are written by calls, one with convolutions alone, and one that writes them
#: in place.
KINDS = ("qwen3_5_text", "lfm2", "granitemoehybrid")
#: Attention and a state in one layer.
BOTH = "falcon_h1"


def generate(of, cache, ids, **options):
    ids = torch.tensor(ids)
    options = dict(max_new_tokens=6, do_sample=False) | options
    with torch.no_grad():
        mask = (ids != 0).long()
        return of.generate(ids, past_key_values=cache, attention_mask=mask, **options).tolist()


def logits(of, cache, ids, mask=None):
    with torch.no_grad():
        out = of(torch.tensor(ids), attention_mask=mask, past_key_values=cache, use_cache=True)
    return out.logits[:, -1]


def fill(cache):
    return cache.blocks.usage()["states"][0]


@unittest.skipUnless(CAN_KEEP, "torch or transformers is not installed, or keeps states itself")
class Kept(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        register()

    def model(self, family="qwen3_5_text"):
        of = model(family)
        of.set_attn_implementation(NAME)
        return of

    def cache(self, of, **settings):
        return KvCache(of.config, **(dict(num_blocks=64) | settings))

    def theirs(self, of, ids, *more):
        """Returns the logits of DynamicCache after each of some passes."""
        of.set_attn_implementation("eager")
        cache = DynamicCache(config=of.config)
        found = [logits(of, cache, ids) for ids in (ids, *more)]
        of.set_attn_implementation(NAME)
        return found

    def assert_close(self, got, expected):
        self.assertLess((got - expected).abs().max().item(), 1e-5 * expected.abs().max().item())

    def both(self, of, modes, ids, **options):
        """Generates with DynamicCache and with ours, and compares all tokens."""
        of.set_attn_implementation("eager")
        theirs = DynamicCache(config=of.config)
        expected = generate(of, theirs, ids, **options)
        for mode in modes:
            of.set_attn_implementation(NAME if mode == "attend" else "eager")
            cache = self.cache(of, mode=mode)
            self.assertEqual(generate(of, cache, ids, **options), expected)
            self.assertGreater(fill(cache)["slots_used"], 0)
            self.assertEqual(cache.get_seq_length(), theirs.get_seq_length())

    def test_families_give_the_tokens_of_dynamic_cache(self):
        for family in KINDS:
            of = model(family)
            for ids, options in ((ONE, {}), (RAGGED, {}), (ONE, dict(num_beams=3))):
                with self.subTest(family, **options):
                    self.both(of, ("attend", "gather"), ids, **options)
        for family in RECURRENT:
            if family not in KINDS:
                with self.subTest(family):
                    self.both(model(family), ("attend",), RAGGED)

    def test_latent_keys_beside_states_run_in_gather_mode_alone(self):
        of = model("kimi_linear")
        for ids, options in ((ONE, {}), (RAGGED, {}), (ONE, dict(num_beams=3))):
            self.both(of, ("gather",), ids, **options)
        of.set_attn_implementation(NAME)
        for run in (lambda: generate(of, self.cache(of), ONE), lambda: Engine(of, num_blocks=64)):
            with self.assertRaisesRegex(RuntimeError, 'mode="gather" for models that change keys'):
                run()

    def test_logits_are_those_of_dynamic_cache(self):
        # A token may be right by chance; a state that is one token late is not.
        passes = (ONE, [[3]], [[6, 7, 8]], [[9]])
        for family in (*KINDS, BOTH):
            of = self.model(family)
            cache = self.cache(of)
            for ids, expected in zip(passes, self.theirs(of, *passes)):
                self.assert_close(logits(of, cache, ids), expected)
            self.assertEqual(fill(cache)["slots_used"], 1)
            for layer in cache._states:
                self.assertEqual(cache.layers[layer].states(), [])

    def test_prompts_in_chunks_and_second_turns(self):
        for family in KINDS:
            of = self.model(family)
            expected = generate(of, self.cache(of), ONE)
            self.assertEqual(generate(of, self.cache(of), ONE, prefill_chunk_size=3), expected)
            cache = self.cache(of)
            turn = generate(of, cache, ONE)
            more = generate(of, cache, [turn[0] + [44, 45]])
            of.set_attn_implementation("eager")
            theirs = DynamicCache(config=of.config)
            turn = generate(of, theirs, ONE)
            self.assertEqual(generate(of, theirs, [turn[0] + [44, 45]]), more)

    def test_padded_rows_go_on_in_chunks(self):
        ragged = [[0] * 3 + [1, 8, 4, 6, 7, 9], [1, 5, 9, 3, 7, 11, 12, 13, 14]]
        for family in KINDS:
            of = self.model(family)
            texts = []
            for cache, name in ((DynamicCache(config=of.config), "eager"), (self.cache(of), NAME)):
                of.set_attn_implementation(name)
                texts.append(generate(of, cache, ragged, prefill_chunk_size=4))
            self.assertEqual(texts[0], texts[1])

    def test_forks_share_a_slot_until_one_goes_on(self):
        for family in KINDS:
            of = self.model(family)
            expected = {n: self.theirs(of, ONE, [[n]])[1] for n in (3, 4)}
            cache = self.cache(of)
            logits(of, cache, ONE)
            forks = {n: copy.deepcopy(cache) for n in (3, 4)}
            self.assertEqual(fill(cache)["slots_used"], 1)
            for n, fork in forks.items():
                self.assert_close(logits(of, fork, [[n]]), expected[n])
            self.assertEqual(fill(cache)["slots_used"], 3)
            del fork, forks
            self.assertEqual(fill(cache)["slots_used"], 1)
            self.assert_close(logits(of, cache, [[4]]), expected[4])

    def test_rows_are_chosen_and_repeated(self):
        for family in KINDS:
            of = self.model(family)
            cache = self.cache(of)
            logits(of, cache, ONE)
            cache.batch_repeat_interleave(3)
            self.assertEqual(fill(cache)["slots_used"], 1)
            apart = logits(of, cache, [[3], [4], [5]])
            for row, n in enumerate((3, 4, 5)):
                self.assert_close(apart[row], self.theirs(of, ONE, [[n]])[1][0])
            cache.batch_select_indices(torch.tensor([2, 0]))
            cache.reorder_cache(torch.tensor([1, 1]))
            got = logits(of, cache, [[9], [9]])
            self.assert_close(got[0], self.theirs(of, ONE, [[3]], [[9]])[2][0])
            self.assert_close(got[1], got[0])

    def test_a_pickled_cache_goes_on_as_the_first(self):
        for family in (*KINDS, BOTH):
            of = self.model(family)
            cache = self.cache(of)
            generate(of, cache, RAGGED)
            saved = pickle.dumps(cache)
            mask = torch.ones(2, cache.get_seq_length() + 1, dtype=torch.long)
            mask[1, :3] = 0
            expected = logits(of, cache, [[3], [12]], mask)
            for _ in range(2):
                loaded = pickle.loads(saved)
                self.assertEqual(loaded.get_seq_length(), 11)
                again = pickle.loads(pickle.dumps(loaded))
                for one in (loaded, again):
                    got = logits(of, one, [[3], [12]], mask)
                    self.assertTrue(torch.equal(got, expected))

    def test_rows_without_a_snapshot_are_not_loaded(self):
        of = self.model()
        cache = self.cache(of, snapshots=1)
        generate(of, cache, RAGGED)
        with self.assertRaisesRegex(kvblock.SessionError, "no room"):
            pickle.loads(pickle.dumps(cache))

    def test_states_do_not_go_back(self):
        of = self.model()
        cache = self.cache(of)
        logits(of, cache, ONE)
        with self.assertRaisesRegex(NotImplementedError, "does not go back"):
            cache.crop(-1)
        with self.assertRaisesRegex(NotImplementedError, "before the tokens come"):
            cache.activate_past_recording()
        cache.crop(0)
        self.assert_close(logits(of, cache, [[3]]), self.theirs(of, ONE, [[3]])[1])
        with self.assertRaisesRegex(ValueError, r"crop\(-99\)"):
            cache.crop(-99)
        self.assertFalse(cache.is_croppable)

    def test_convolutions_go_back_in_objects_of_transformers(self):
        of = model("lfm2")
        of.set_attn_implementation("eager")
        options = dict(prompt_lookup_num_tokens=2)
        expected = generate(of, DynamicCache(config=of.config), ONE, **options)
        of.set_attn_implementation(NAME)
        cache = self.cache(of)
        self.assertEqual(generate(of, cache, ONE, **options), expected)
        self.assertNotIn("states", cache.blocks.usage())
        # A cache that had slots before makes blocks without them.
        cache = self.cache(of)
        generate(of, cache, ONE)
        cache.reset()
        self.assertEqual(generate(of, cache, ONE, **options), expected)
        self.assertNotIn("states", cache.blocks.usage())

    def test_without_slots_states_stay_in_objects_of_transformers(self):
        of = self.model()
        cache, kept = self.cache(of, slots=0), self.cache(of)
        self.assertEqual(generate(of, cache, ONE), generate(of, kept, ONE))
        self.assertNotIn("states", cache.blocks.usage())
        self.assertEqual(fill(kept)["slots_total"], 8)

    def test_attention_and_a_state_in_one_layer_need_slots(self):
        of = self.model(BOTH)
        with self.assertRaisesRegex(NotImplementedError, "falcon_h1 .*in one layer"):
            self.cache(of, slots=0)
        cache = self.cache(of)
        with self.assertRaisesRegex(NotImplementedError, "falcon_h1 .*in one layer"):
            cache.activate_past_recording()
        self.assertEqual(cache.is_linear, [False] * 3)
        expected = self.theirs(of, ONE)[0]
        self.assert_close(logits(of, cache, ONE), expected)
        fork = copy.deepcopy(cache)
        fork.batch_repeat_interleave(2)
        expected = self.theirs(of, ONE, [[3]])[1]
        self.assert_close(logits(of, fork, [[3], [3]])[1:], expected)
        self.assert_close(logits(of, cache, [[3]]), expected)
        self.assertEqual(cache.layers[1].keys.shape, (1, 2, 9, 8))
        cache.reset()
        self.assert_close(logits(of, cache, ONE), self.theirs(of, ONE)[0])

    def test_a_state_that_comes_after_the_keys_of_its_layer_is_refused(self):
        of = self.model(BOTH)
        cache = self.cache(of)
        key = torch.zeros(1, 2, 1, 8)
        with self.assertRaisesRegex(NotImplementedError, "before the first state is known"):
            cache.update(key, key, 0)

    def test_a_layer_of_attention_before_all_states_keeps_them_where_they_were(self):
        of = self.model()
        of.config.layer_types = ["full_attention", "linear_attention"] * 2
        self.assertEqual(self.cache(of)._states, {})

    def test_reset_begins_anew(self):
        for family in KINDS:
            of = self.model(family)
            cache = self.cache(of)
            expected = generate(of, cache, ONE)
            self.assertTrue(cache.has_previous_state())
            cache.reset()
            self.assertFalse(cache.has_previous_state())
            self.assertEqual(fill(cache)["slots_used"], 0)
            self.assertEqual(generate(of, cache, ONE), expected)
            cache.reset()
            self.assertEqual(generate(of, cache, RAGGED), generate(of, self.cache(of), RAGGED))

    def test_a_pass_that_fails_in_any_layer_leaves_the_states(self):
        def fail(*_args):
            raise RuntimeError("out of luck")

        for family in KINDS:
            of = self.model(family)
            expected = self.theirs(of, ONE, [[3]])
            layers = of.model.layers
            for begun in (False, True):
                for layer in layers:
                    cache = self.cache(of)
                    if begun:
                        logits(of, cache, ONE)
                    ids = [[3]] if begun else ONE
                    hook = layer.register_forward_pre_hook(fail)
                    with self.assertRaisesRegex(RuntimeError, "out of luck"):
                        logits(of, cache, ids)
                    hook.remove()
                    self.assertEqual(cache.get_seq_length(), 8 if begun else 0)
                    self.assert_close(logits(of, cache, ids), expected[begun])

    def test_a_cache_goes_from_thread_to_thread(self):
        of = self.model("granitemoehybrid")
        expected = self.theirs(of, ONE, [[3]], [[4]])
        cache, found = self.cache(of), []

        def on_another_thread(call):
            thread = threading.Thread(target=lambda: found.append(call()))
            thread.start()
            thread.join()
            return found.pop()

        on_another_thread(lambda: logits(of, cache, ONE))
        fork = copy.deepcopy(cache)
        on_another_thread(lambda: logits(of, fork, [[3]]))
        # The other fork ends the pass, whose layers are done.
        self.assert_close(logits(of, cache, [[3]]), expected[1])
        self.assert_close(logits(of, fork, [[4]]), expected[2])

    def test_a_layer_that_computes_on_another_thread_is_not_disturbed(self):
        of = tiny("bamba", **RECURRENT["bamba"] | dict(num_hidden_layers=3, attn_layer_indices=[1]))
        of.set_attn_implementation(NAME)
        cache = self.cache(of)
        logits(of, cache, ONE)
        fork = copy.deepcopy(cache)
        begun, go_on, seen = threading.Event(), threading.Event(), []

        def wait(*_args):
            begun.set()
            go_on.wait(10)

        last = of.model.layers[2].mamba.in_proj
        hook = last.register_forward_pre_hook(wait)
        thread = threading.Thread(target=lambda: seen.append(logits(of, fork, [[3]])))
        thread.start()
        begun.wait(10)
        hook.remove()
        self.assertEqual(fork.get_seq_length(), 8)
        with self.assertRaisesRegex(kvblock.StateError, "step is open"):
            logits(of, cache, [[3]])
        go_on.set()
        thread.join()
        self.assertEqual(fork.get_seq_length(), 9)
        self.assert_close(logits(of, cache, [[3]]), seen[0])

    def test_a_cache_that_is_gone_leaves_no_step_and_no_slot(self):
        of = self.model("granitemoehybrid")
        cache = self.cache(of)
        logits(of, cache, ONE)
        fork = copy.deepcopy(cache)
        logits(of, fork, [[3]])
        del fork
        self.assertEqual(fill(cache)["slots_used"], 1)
        self.assert_close(logits(of, cache, [[3]]), self.theirs(of, ONE, [[3]])[1])

    def test_too_few_slots_say_so_and_the_cache_goes_on(self):
        of = self.model()
        cache = self.cache(of, slots=3)
        logits(of, cache, ONE)
        forks = [copy.deepcopy(cache) for _ in range(2)]
        logits(of, forks[0], [[3]])
        logits(of, forks[1], [[3]])
        with self.assertRaises(kvblock.Exhausted) as full:
            logits(of, cache, [[3]])
        self.assertEqual((full.exception.needed, full.exception.free), (1, 0))
        del forks
        self.assert_close(logits(of, cache, [[3]]), self.theirs(of, ONE, [[3]])[1])

    def test_another_batch_is_refused(self):
        for family in KINDS:
            of = self.model(family)
            cache = self.cache(of)
            logits(of, cache, ONE)
            with self.assertRaisesRegex(ValueError, "the batch has 2 rows"):
                logits(of, cache, RAGGED)
            self.assertEqual(cache.get_seq_length(), 8)

    def test_states_of_two_shapes_are_refused_by_name(self):
        parts = [[Part("conv", 0, torch.zeros(0, 4, n))] for n in (3, 5)]
        check_parts(2, parts[0], parts[0])
        with self.assertRaisesRegex(NotImplementedError, "layer 2 has a state of .*5"):
            check_parts(2, parts[1], parts[0])

    def test_inference_mode(self):
        of = self.model("granitemoehybrid")
        cache = self.cache(of)
        with torch.inference_mode():
            for ids, expected in zip((ONE, [[3]], [[4]]), self.theirs(of, ONE, [[3]], [[4]])):
                out = of(torch.tensor(ids), past_key_values=cache, use_cache=True)
                self.assert_close(out.logits[:, -1], expected)


if __name__ == "__main__":
    unittest.main()
