"""Copies of a cache: forks, files, rows as tensors. Needs torch and transformers."""

import copy
import gc
import pickle
import unittest
import weakref

import kvblock
from models import VERSION, model, torch

if torch is not None:
    from kvblock.transformers import NAME, KvCache, register
    from transformers import DynamicCache

RAGGED = [[5, 9, 3, 7, 11, 2, 8, 20], [0, 0, 0, 4, 6, 9, 30, 31]]


def run(of, cache, ids):
    """Runs a batch that is padded on the left, and returns the logits after it."""
    ids = torch.tensor(ids)
    mask = torch.ones(ids.shape[0], cache.get_seq_length() + ids.shape[1], dtype=torch.long)
    if ids.shape[1] > 1:
        mask = (ids != 0).long()
    elif cache.get_seq_length() >= 8:
        mask[1:, :3] = 0
    with torch.no_grad():
        return of(ids, attention_mask=mask, past_key_values=cache, use_cache=True).logits[:, -1]


@unittest.skipIf(torch is None, "torch or transformers is not installed")
class Copies(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        register()

    def model(self, family="llama"):
        of = model(family)
        of.set_attn_implementation(NAME)
        return of

    def test_a_pickled_cache_goes_on_as_the_first(self):
        for family, settings in (
            ("llama", {}),
            ("llama", dict(format="int8/l4")),
            ("gemma2", dict(block_size=4)),
            ("llama", dict(mode="gather")),
        ):
            with self.subTest(family, **settings):
                of = self.model(family)
                if settings.get("mode") == "gather":
                    of.set_attn_implementation("eager")
                cache = KvCache(of.config, num_blocks=64, **settings)
                self.assertEqual(pickle.loads(pickle.dumps(cache)).get_seq_length(), 0)
                run(of, cache, RAGGED)
                run(of, cache, [[3], [12]])
                saved = pickle.dumps(cache)
                expected = [run(of, cache, [[token], [token + 1]]) for token in (4, 5, 6)]
                for _ in range(2):
                    loaded = pickle.loads(saved)
                    self.assertEqual(loaded.get_seq_length(), 9)
                    self.assertIsNot(loaded.blocks, cache.blocks)
                    for token, logits in zip((4, 5, 6), expected):
                        got = run(of, loaded, [[token], [token + 1]])
                        self.assertTrue(torch.equal(got, logits))

    def test_a_damaged_pickle_is_refused(self):
        of = self.model()
        cache = KvCache(of.config, num_blocks=64)
        run(of, cache, RAGGED)
        state = cache.__getstate__()
        row = bytearray(state["_rows"][0])
        row[len(row) // 2] ^= 1
        state["_rows"][0] = bytes(row)
        with self.assertRaises(kvblock.SessionError):
            KvCache.__new__(KvCache).__setstate__(state)

    def test_rows_of_a_layer_are_those_of_dynamic_cache(self):
        for family in ("llama", "gemma2"):
            of = self.model(family)
            cache = KvCache(of.config, num_blocks=64)
            self.assertIsNone(cache.layers[0].keys)
            run(of, cache, RAGGED)
            of.set_attn_implementation("eager")
            other = DynamicCache(config=of.config)
            run(of, other, RAGGED)
            self.assertEqual(len(cache), len(other))
            for ours, theirs in zip(cache.layers, other.layers):
                for plane in ("keys", "values"):
                    got, expected = getattr(ours, plane), getattr(theirs, plane)
                    if got.shape[2] != expected.shape[2]:
                        # A window: both drop what no token will see.
                        self.assertEqual(family, "gemma2")
                        got = got[:, :, -expected.shape[2] :]
                    self.assertTrue(torch.allclose(got[0], expected[0], atol=1e-5))
                    # Padding is stored nowhere.
                    last = got[1, :, -5:], expected[1, :, -5:]
                    self.assertTrue(torch.allclose(*(x[:, -4:] for x in last), atol=1e-5))

    def test_a_fork_and_its_origin_write_apart(self):
        of = self.model()
        cache = KvCache(of.config, num_blocks=64)
        run(of, cache, RAGGED)
        fork = copy.deepcopy(cache)
        used = cache.blocks.usage()["blocks_used"]
        self.assertEqual(used, 2)
        apart = [run(of, one, [[3], [token]]) for one, token in ((cache, 12), (fork, 13))]
        fresh = KvCache(of.config, num_blocks=64)
        run(of, fresh, RAGGED)
        expected = run(of, fresh, [[3], [13]])
        self.assertTrue(torch.allclose(apart[1], expected, atol=1e-5))
        self.assertFalse(torch.allclose(apart[0][1], expected[1], atol=1e-3))

    def test_a_cache_is_freed_with_its_last_user(self):
        of = self.model()
        cache = KvCache(of.config, num_blocks=64)
        blocks = None
        with torch.no_grad():
            ids = torch.tensor([[1, 5, 9]])
            of.generate(
                ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=3
            )
        blocks, gone = cache.blocks, weakref.ref(cache)
        self.assertEqual(blocks.usage()["blocks_used"], 1)
        del cache
        gc.collect()
        self.assertIsNone(gone())
        self.assertEqual(blocks.usage()["blocks_used"], 0)

    def test_one_prompt_is_repeated_without_a_copy(self):
        of = self.model()
        cache = KvCache(of.config, num_blocks=64)
        with torch.no_grad():
            of(torch.tensor([[5, 9, 3, 7, 11]]), past_key_values=cache, use_cache=True)
        cache.batch_repeat_interleave(4)
        self.assertEqual(cache.blocks.usage()["blocks_used"], 1)
        self.assertEqual(cache.layers[0].batch_size, 4)
        got = run(of, cache, [[3], [4], [3], [6]])
        self.assertTrue(torch.equal(got[0], got[2]))
        cache.batch_select_indices(torch.tensor([1, 3]))
        self.assertEqual(cache.layers[0].batch_size, 2)
        self.assertEqual(cache.blocks.usage()["sequences"], 2)


@unittest.skipIf(torch is None, "torch or transformers is not installed")
class Complaints(unittest.TestCase):
    """What people report about other caches; the numbers are those of transformers."""

    @classmethod
    def setUpClass(cls):
        register()

    def setUp(self):
        self.of = model()
        self.of.set_attn_implementation(NAME)

    def generate(self, ids, cache, **options):
        ids = torch.tensor(ids)
        options = dict(max_new_tokens=8, do_sample=False) | options
        options.setdefault("attention_mask", (ids != 0).long())
        with torch.no_grad():
            return self.of.generate(ids, past_key_values=cache, **options).tolist()

    def test_a_text_does_not_depend_on_its_neighbours(self):  # 30670
        together = self.generate(RAGGED, KvCache(self.of.config, num_blocks=64))
        alone = self.generate([RAGGED[1][3:]], KvCache(self.of.config, num_blocks=64))
        self.assertEqual(together[1][3:], alone[0])

    def test_the_next_batch_may_be_of_another_size(self):  # 42454, 46424, 46700
        cache = KvCache(self.of.config, num_blocks=64)
        for rows in (3, 1, 5):
            ids = [[5, 9, 3 + row] for row in range(rows)]
            got = self.generate(ids, cache, min_new_tokens=8)
            alone = (KvCache(self.of.config, num_blocks=8) for _ in ids)
            expected = [
                self.generate([row], one, min_new_tokens=8)[0] for row, one in zip(ids, alone)
            ]
            self.assertEqual(got, expected)
            self.assertEqual(cache.blocks.usage()["blocks_total"], 64)
            blocks = cache.blocks
            cache.reset()
            self.assertIs(cache.blocks, blocks)

    def test_a_window_holds_what_it_sees(self):  # 37269
        of = model("mistral")
        of.set_attn_implementation(NAME)
        cache = KvCache(of.config, num_blocks=64, block_size=4)
        ids = torch.tensor([[1, 5, 9]])
        with torch.no_grad():
            of.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=cache,
                max_new_tokens=60,
                min_new_tokens=60,
            )
        # A window of 5 tokens lies in at most 3 blocks of 4.
        self.assertLessEqual(cache.blocks.usage()["blocks_used"], 3)

    def test_few_bits_survive_beams_and_crops(self):  # 45510, 48700
        for name in ("int8", "l4", "int8/l4"):
            cache = KvCache(self.of.config, num_blocks=64, format=name)
            run(self.of, cache, RAGGED)
            plain = copy.deepcopy(cache)
            run(self.of, cache, [[40], [41]])
            cache.crop(-1 if VERSION >= (5, 16) else 8)
            cache.reorder_cache(torch.tensor([0, 1]))
            expected = run(self.of, plain, [[3], [12]])
            self.assertTrue(torch.equal(run(self.of, cache, [[3], [12]]), expected), name)
            cache.reorder_cache(torch.tensor([0, 0]))
            ids = torch.tensor([[6], [6]])
            with torch.no_grad():
                same = self.of(ids, past_key_values=cache, use_cache=True).logits
            self.assertTrue(torch.equal(same[0], same[1]), name)

    def test_crop_removes_what_it_says(self):  # 47433, 47977
        cache = KvCache(self.of.config, num_blocks=64)
        with torch.no_grad():
            self.of(torch.tensor([[5, 9, 3]]), past_key_values=cache, use_cache=True)
        cache.crop(0)
        self.assertEqual(cache.get_seq_length(), 3)
        with self.assertRaises(ValueError):
            cache.crop(-5)
        self.assertEqual(cache.get_seq_length(), 3)
        cache.crop(-3)
        self.assertEqual(cache.get_seq_length(), 0)
        self.assertEqual(cache.blocks.usage()["tokens"], 0)

    def test_assisted_decoding_over_a_window(self):  # 47447, 48280, 45745
        of = model("mistral")
        ids = torch.tensor([[1, 5, 9, 5, 9, 5, 9, 5]])
        options = dict(max_new_tokens=30, do_sample=False, attention_mask=torch.ones_like(ids))
        of.set_attn_implementation("eager")
        with torch.no_grad():
            expected = of.generate(ids, **options).tolist()
            of.set_attn_implementation(NAME)
            slack = {} if VERSION >= (5, 16) else dict(window_slack=16)
            cache = KvCache(of.config, num_blocks=64, **slack)
            got = of.generate(
                ids, past_key_values=cache, prompt_lookup_num_tokens=4, **options
            ).tolist()
        self.assertEqual(got, expected)

    def test_going_back_too_far_over_a_window_names_the_slack(self):
        of = model("mistral")
        of.set_attn_implementation(NAME)
        cache = KvCache(of.config, num_blocks=64, block_size=4)
        with torch.no_grad():
            for ids in (list(range(1, 41)), [7]):
                of(torch.tensor([ids]), past_key_values=cache, use_cache=True)
        cache.activate_past_recording()
        with self.assertRaisesRegex(RuntimeError, "window_slack="):
            cache.crop(-30 if VERSION >= (5, 16) else 11)
        self.assertEqual(cache.get_seq_length(), 41)

    def test_a_crop_changes_all_rows_or_none(self):
        of = model("mistral")
        of.set_attn_implementation(NAME)
        cache = KvCache(of.config, num_blocks=64, block_size=4)
        ids = torch.tensor([list(range(1, 41)), [0] * 32 + list(range(1, 9))])
        mask = (ids != 0).long()
        with torch.no_grad():
            of(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
            mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
            one = torch.tensor([[7], [7]])
            of(one, attention_mask=mask, past_key_values=cache, use_cache=True)
        # The long row has left what it would go back to, the short one has not.
        cache.reorder_cache(torch.tensor([1, 0]))
        before = cache.blocks.usage()
        with self.assertRaisesRegex(RuntimeError, "window_slack="):
            cache.crop(-7 if VERSION >= (5, 16) else 34)
        self.assertEqual(cache.get_seq_length(), 41)
        after = cache.blocks.usage()
        for name in ("sequences", "tokens", "blocks_used"):
            self.assertEqual(after[name], before[name])

    def test_many_beams(self):
        ids = [[5, 9, 3 + row] for row in range(8)]
        expected = self.of.set_attn_implementation("eager")
        expected = self.generate(ids, DynamicCache(config=self.of.config), num_beams=6)
        self.of.set_attn_implementation(NAME)
        cache = KvCache(self.of.config, num_blocks=512)
        self.assertEqual(self.generate(ids, cache, num_beams=6), expected)
        self.assertEqual(cache.blocks.usage()["sequences"], 48)

    def test_a_second_turn_on_a_padded_batch(self):  # 3021, 18104
        cache = KvCache(self.of.config, num_blocks=64)
        first = self.generate(RAGGED, cache, min_new_tokens=8)
        turn = [row + [44, 45] for row in first]
        mask = torch.tensor([[int(at >= 3 * row) for at in range(18)] for row in range(2)])
        got = self.generate(turn, cache, attention_mask=mask)
        for row, padding in ((0, 0), (1, 3)):
            one = KvCache(self.of.config, num_blocks=64)
            text = turn[row][padding:]
            expected = self.generate([text], one, attention_mask=torch.ones(1, len(text)))
            self.assertEqual(got[row][padding:], expected[0])

    def test_latent_keys_run_in_gather_mode_alone(self):
        of = model("deepseek_v3")
        of.set_attn_implementation("eager")
        ids = [[5, 9, 3, 7]]
        self.of = of
        expected = self.generate(ids, DynamicCache(config=of.config))
        got = self.generate(ids, KvCache(of.config, num_blocks=64, mode="gather"))
        self.assertEqual(got, expected)


if __name__ == "__main__":
    unittest.main()
