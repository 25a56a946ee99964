"""The calls of TransformerEngine, against a plain model of a cache. Needs torch."""

import gc
import itertools
import logging
import multiprocessing
import os
import pathlib
import random
import re
import threading
import unittest
import weakref
from collections import OrderedDict

import kvblock

try:
    import torch
except ImportError:
    torch = None
else:
    from kvblock.te import InferenceParams, KVCacheManager
    from te_steps import (
        DIM_K,
        DIM_V,
        FORMATS,
        KV_HEADS,
        MAX_BATCH,
        MAX_SEQ,
        NAMES,
        PAGE,
        PAGES,
        WRONG,
        Chosen,
        Model,
        addressed,
        feed,
        pack,
        rows,
        settings,
    )

ROOT = pathlib.Path(__file__).parents[2]


def attention(q, k, v, scale=None, window=None, causal=True):
    """Attention of the last rows of one sequence, by torch."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    new, n = q.shape[2], k.shape[2]
    at, key = torch.arange(n - new, n)[:, None], torch.arange(n)[None]
    mask = key <= at if causal else torch.ones(new, n, dtype=torch.bool)
    if window is not None:
        mask = mask & (key >= at - window)
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


@unittest.skipIf(torch is None, "torch is not installed")
class Mirror(unittest.TestCase):
    def params(self, is_paged=True, layers=(1,), **changes):
        params = InferenceParams(**settings(is_paged, **changes))
        for layer in layers:
            params.allocate_memory(layer)
        return params

    def test_recorded_steps(self):
        """Arrivals, a departure whose pages an arrival takes, a chunk; lengths, sums and rows."""
        recorded = [
            # Step, cu_seqlens_q, cu_seqlens_kv, lengths before, page table.
            ([(7, 5), (9, 3)], [0, 5, 8, 8], [0, 5, 8, 8], [0, 0, 0], [[0, 1], [2, 0], [0, 0]]),
            ([(7, 1), (9, 1)], [0, 1, 2, 2], [0, 6, 10, 10], [5, 3, 0], [[0, 1], [2, 0], [0, 0]]),
            # 7 ends; 12 is listed first; 9 verifies three tokens at once.
            ([(12, 6), (9, 3)], [0, 6, 9, 9], [0, 6, 13, 13], [0, 4, 0], None),
            ([(9, 1)], [0, 1, 1, 1], [0, 8, 8, 8], [7, 0, 0], None),
        ]
        for is_paged, qkv_format in itertools.product((False, True), FORMATS):
            pages = dict(is_paged=True, page_size=4, total_num_pages=4) if is_paged else {}
            params = InferenceParams(
                3, 8, 1, 2, torch.float32, max_ctx_len=8, qkv_format=qkv_format, **pages
            )
            params.allocate_memory(1)
            kept, held = (params.cu_seqlens_q, params.cu_seqlens_kv), {}
            for step, cu_q, cu_kv, before, table in recorded:
                params.pre_step(OrderedDict(step))
                new = {
                    seq: torch.tensor(
                        [[[float(seq), float(before[row] + i)]] for i in range(tokens)]
                    )
                    for row, (seq, tokens) in enumerate(step)
                }
                held = {s: torch.cat([held[s], x]) if s in held else x for s, x in new.items()}
                k = pack(new.values(), qkv_format)
                out = params.step(1, k, -k, qkv_format)
                self.assertEqual(out[2].tolist(), cu_q)
                self.assertEqual(out[3].tolist(), cu_kv)
                self.assertEqual(params.get_seqlens_pre_step().tolist(), before)
                if is_paged and table:
                    self.assertEqual(params.cache_manager.page_table.tolist(), table)
                lengths = list(params.sequences.values())
                for plane, sign in zip(out[:2], (1, -1)):
                    found = addressed(plane, params.cache_manager.page_table, lengths)
                    for seq, row in zip(params.sequences, found):
                        self.assertTrue(torch.equal(row, sign * held[seq]))
            self.assertIs(params.cu_seqlens_q, kept[0])
            self.assertIs(params.cu_seqlens_kv, kept[1])

    def test_random_steps_follow_the_model(self):
        dtypes = (torch.float32, torch.float16, torch.bfloat16)
        cases = itertools.product((False, True), FORMATS)
        for seed, (is_paged, qkv_format) in enumerate(cases):
            layers, chosen = (3, 1), Chosen(seed)
            dtype = dtypes[seed % 3]
            params = self.params(is_paged, layers, dtype=dtype)
            model = Model(layers, dtype, seed)
            for number in range(40):
                if number % 10 == 9:
                    params.reset()
                    self.assertEqual((params.batch_size, dict(params.sequences)), (0, {}))
                    self.assertEqual(params.cu_seqlens_kv.tolist(), [0] * (MAX_BATCH + 1))
                    model.cached, chosen.lengths = {}, {}
                    continue
                batch = chosen.random.choice((None, MAX_BATCH))
                feed(self, params, model, chosen.step(), qkv_format, batch)

    def test_where_transformer_engine_is_wrong_this_is_right(self):
        for name, steps, _, right in WRONG:
            for is_paged, qkv_format in itertools.product((False, True), FORMATS):
                with self.subTest(name, is_paged=is_paged, qkv_format=qkv_format):
                    params, model = self.params(is_paged), Model((1,), torch.float32, 1)
                    for step in steps:
                        feed(self, params, model, OrderedDict(step), qkv_format)
                    self.assertEqual(list(params.sequences.items()), right)

    def test_attention_is_that_of_torch(self):
        torch.manual_seed(1)
        for is_paged, qkv_format in itertools.product((False, True), FORMATS):
            params, model = self.params(is_paged), Model((1,), torch.float32, 2)
            for step in ({4: 5, 2: 9}, {2: 1, 4: 1, 8: 3}, {4: 4, 8: 1}):
                params.pre_step(step)
                new = model.step(step)[1]
                k, v = (pack([new[s][i] for s in step], qkv_format) for i in (0, 1))
                params.step(1, k, v, qkv_format)
                queries = [torch.randn(n, 4, DIM_K) for n in step.values()]
                q = pack(queries, qkv_format)
                for options in ({}, dict(window=2), dict(causal=False), dict(scale=0.7)):
                    out = params.attend(1, q, **options)
                    right = [
                        attention(own, *model.cached[s][1], **options)
                        for own, s in zip(queries, step)
                    ]
                    for row, own in enumerate(self.parts(out, qkv_format, step.values())):
                        torch.testing.assert_close(own, right[row], rtol=1e-5, atol=1e-5)
                given = torch.empty_like(out)
                self.assertIs(params.attend(1, q, given, qkv_format=qkv_format), given)
                capped = params.attend(1, q, softcap=1.0, sinks=[0.5] * 4)
                self.assertGreater((capped - given).abs().max().item(), 1e-4)
                same = q.flatten()[: out.numel()].view(out.shape)
                with self.assertRaisesRegex(ValueError, "shares memory"):
                    params.attend(1, q, same)

    def parts(self, out, qkv_format, tokens):
        if qkv_format == "thd":
            return out.split(list(tokens))
        out = out if qkv_format == "bshd" else out.transpose(0, 1)
        return [own[:n] for own, n in zip(out, tokens)]

    def test_all_names_are_there(self):
        for is_paged in (False, True):
            params = self.params(is_paged)
            of = [("params", params), ("manager", params.cache_manager)]
            if is_paged:
                of.append(("paged", params.cache_manager))
            for kind, object in of:
                for name in NAMES[kind]["attributes"].split():
                    self.assertTrue(hasattr(object, name), (kind, name))
                for name in NAMES[kind]["methods"].split():
                    self.assertTrue(callable(getattr(object, name)), (kind, name))

    def test_the_manager_answers_as_the_original(self):
        params = self.params(layers=(1, 4))
        manager = params.cache_manager
        self.assertEqual((list(manager.cache), len(manager.cache)), ([1, 4], 2))
        self.assertIn(4, manager.cache)
        self.assertNotIn(2, manager.cache)
        with self.assertRaises(KeyError):
            manager.cache[2]
        params.pre_step({"a": 5, 2: 0, (3, 4): 4})
        self.assertEqual(manager.get_sequence_count(), 3)
        self.assertEqual(manager.get_sequence_lengths(), [5, 0, 4])
        counts = [manager.get_page_count(seq) for seq in ("a", 2, (3, 4), 77, "b")]
        self.assertEqual(counts, [2, 0, 1, 0, 0])
        self.assertEqual(manager.get_page_table(["a"]).shape, (MAX_BATCH, MAX_SEQ // PAGE))
        self.assertEqual(manager.get_page_list("a"), manager.page_table[0, :2].tolist())
        self.assertTrue(manager.has_free_page())
        k, v = torch.randn(9, KV_HEADS, DIM_K), torch.randn(9, KV_HEADS, DIM_V)
        out = params.step(4, k, v, "thd")
        for cached, returned in zip(manager.cache[4], out[:2]):
            self.assertTrue(torch.equal(cached, returned))
        with self.assertLogs("kvblock.te", logging.DEBUG) as logs:
            manager.print_cache()
        self.assertIn("seq_id a, num_tokens 5, num_pages 2, page_list [0, 1]", "".join(logs.output))
        self.assertIn("used 3, free 27", "".join(logs.output))
        self.assertEqual(
            repr(params),
            f"dtype=torch.float32, is_paged=True, total_pages={PAGES}, page_size={PAGE}, "
            f"num_heads={KV_HEADS}, head_dim_k={DIM_K}, head_dim_v={DIM_V}",
        )
        self.assertIn("max_seqlen=24", repr(self.params(False)))
        self.assertIn("KVCacheManager(InferenceParams(", repr(manager))

    def test_nothing_keeps_a_cache_that_nobody_has(self):
        params, gone = self.params(), []
        weakref.finalize(params.cache_manager._blocks, gone.append, True)
        layers = params.cache_manager.cache
        self.assertEqual((list(layers), gone), ([1], []))
        del params
        self.assertEqual(gone, [True])
        with self.assertRaises(ReferenceError):
            layers[1]

    def test_a_layer_keeps_its_rows(self):
        params, model = self.params(), Model((1,), torch.float32, 3)
        feed(self, params, model, {0: 5}, "thd")
        self.assertFalse(params.allocate_memory(1))
        feed(self, params, model, {0: 1}, "thd")
        # Tokens from before a layer had memory are zero in it.
        k, v = rows(1, torch.float32, model.generator)
        params.pre_step({0: 1})
        self.assertTrue(params.allocate_memory(2))
        params.step(1, k, v, "thd")
        params.step(2, k, v, "thd")
        whole, _ = params.convert_paged_to_nonpaged(2)
        self.assertFalse(whole[0, :6].any())
        self.assertTrue(torch.equal(whole[0, 6:7], k))

    def test_a_pool_may_have_any_size(self):
        params = self.params(total_num_pages=3)
        params.pre_step({0: 12})
        k, v = torch.randn(12, KV_HEADS, DIM_K), torch.randn(12, KV_HEADS, DIM_V)
        self.assertEqual(params.step(1, k, v, "thd")[0].shape, (3, PAGE, KV_HEADS, DIM_K))
        with self.assertRaises(kvblock.Exhausted) as full:
            params.pre_step({0: 1})
        self.assertEqual((full.exception.needed, full.exception.free), (1, 0))
        self.assertEqual(dict(params.sequences), {0: 12})
        params.pre_step({1: 12})
        self.assertEqual(dict(params.sequences), {1: 12})

    def test_arguments_are_checked(self):
        of = lambda **changes: InferenceParams(**settings(True, **changes))
        for changes, words in (
            (dict(num_heads_kv=None), "num_heads_kv"),
            (dict(head_dim_k=None), "head_dim_k"),
            (dict(dtype=None), "dtype"),
            (dict(dtype=torch.float64), "dtype=torch.float64"),
            (dict(max_batch_size=0), "max_batch_size"),
            (dict(page_size=None), "page_size"),
            (dict(page_size=0), "page_size"),
            (dict(page_size=7), "page_size"),
            (dict(total_num_pages=None), "total_num_pages"),
            (dict(max_ctx_len=99), "max_ctx_len"),
            (dict(max_ctx_len=None, qkv_format="thd"), "max_ctx_len"),
            (dict(max_sequence_length=1 << 31, total_num_pages=1 << 30), "tokens of a batch"),
        ):
            with self.subTest(**changes), self.assertRaisesRegex(kvblock.SpecError, words):
                of(**changes)
        with self.assertRaisesRegex(kvblock.PlanError, "bhsd"):
            of(qkv_format="bhsd")
        for device in ("wgpu", "meta", "cuda0", torch.device("meta")):
            with self.assertRaisesRegex(NotImplementedError, "device=.*(wgpu|meta|cuda0)"):
                of(device=device)
        for stream in (0, 16):
            with self.assertRaisesRegex(ValueError, "stream= is one of a CUDA device"):
                of(stream=stream)
        for changes in (dict(dtype="f32"), dict(num_heads_kv="2"), dict(head_dim_k=4.0)):
            with self.subTest(**changes), self.assertRaises(TypeError):
                of(**changes)
        # What counts as an integer or a truth value, and what is ignored.
        numbers = dict(max_batch_size=torch.tensor(5), is_paged=1, head_dim_v=None, threads=1)
        params = of(**numbers)
        self.assertIs(params.is_paged, True)
        self.assertEqual((params.max_batch_size, params.head_dim_v), (5, DIM_K))
        plain = InferenceParams(**settings(True, is_paged=0))
        self.assertEqual((plain.is_paged, plain.page_size), (False, None))
        for device in ("cpu", "cpu:0", torch.device("cpu")):
            on_cpu = of(device=device)
            self.assertEqual((on_cpu.device.type, on_cpu.cache_manager.stream), ("cpu", None))
            with self.assertRaisesRegex(ValueError, "planes of a cache on cpu"):
                on_cpu.cache_manager._blocks.planes(1)

    def test_numbers_of_tokens_may_be_any_integers(self):
        numpy = numpy_or_skip()
        params = self.params(layers=())
        params.pre_step({numpy.int64(3): numpy.int32(5), 1: torch.tensor(2), True + 1: True})
        self.assertEqual(list(params.sequences.items()), [(3, 5), (1, 2), (2, 1)])
        self.assertTrue(all(type(tokens) is int for tokens in params.sequences.values()))
        for wrong, kind in ((1.0, TypeError), ("1", TypeError), (-1, kvblock.PlanError)):
            with self.assertRaises(kind):
                params.pre_step({3: 1, 1: wrong})
        with self.assertRaises(kvblock.PlanError):
            params.pre_step({3: 1 << 32})
        with self.assertRaisesRegex(kvblock.PlanError, "twice"):
            params.pre_step({3: 1, torch.tensor(3): 1})
        self.assertEqual(list(params.sequences.items()), [(3, 5), (1, 2), (2, 1)])

    def test_names_that_are_no_numbers(self):
        params, model = self.params(), Model((1,), torch.float32, 4)
        for step in ({"a": 3, 0: 2, -1: 1}, {-1: 2, "a": 1}, {"b": 4, "a": 1}, {"a": 1}):
            feed(self, params, model, step, "thd")

    def test_a_refused_step_changes_nothing(self):
        params, model = self.params(), Model((1,), torch.float32, 5)
        feed(self, params, model, {0: 20, 1: 3}, "thd")

        def seen():
            arrays = params.cu_seqlens_q, params.cu_seqlens_kv, params.pre_step_seqlens
            lists = [array.tolist() for array in (*arrays, params.cache_manager.page_table)]
            manager = params.cache_manager
            return lists, params.sequences, params.batch_size, manager.sequences, manager._names

        before, rows_before = seen(), params.convert_paged_to_nonpaged(1)
        for wrong in ({0: 5}, {1: 25}, {n: 1 for n in range(6)}, {7: 21, 8: 24, 9: 24, 1: 25}):
            with self.subTest(wrong), self.assertRaises(kvblock.PlanError):
                params.pre_step(wrong)
            self.assertEqual(seen(), before)
        for old, new in zip(rows_before, params.convert_paged_to_nonpaged(1)):
            self.assertTrue(torch.equal(old, new))
        feed(self, params, model, {1: 1, 0: 1}, "thd")

    def test_a_step_is_refused_by_name(self):
        params = self.params(layers=(1, 2))
        k, v = torch.randn(3, KV_HEADS, DIM_K), torch.randn(3, KV_HEADS, DIM_V)
        with self.assertRaises(kvblock.PlanError):
            params.step(1, k, v, "thd")
        with self.assertRaises(kvblock.PlanError):
            params.attend(1, k, qkv_format="thd")
        with self.assertRaises(kvblock.PlanError):
            params.convert_paged_to_nonpaged(1)
        with self.assertRaises(kvblock.PlanError):
            params.cache_manager.cache[1]
        params.pre_step({0: 3})
        for arguments, error, words in (
            ((9, k, v, "thd"), kvblock.PlanError, "9"),
            ((-1, k, v, "thd"), kvblock.PlanError, "-1"),
            (("1", k, v, "thd"), TypeError, "layer '1'"),
            ((1, k.half(), v.half(), "thd"), kvblock.PlanError, "element type"),
            ((1, k.double(), v, "thd"), TypeError, "float64"),
            ((1, k, v, "thd_2bshd"), kvblock.PlanError, "thd_2bshd"),
            ((1, k, v, "bhsd"), kvblock.PlanError, "bhsd"),
            ((1, k, v, "bshd"), ValueError, "shape"),
            ((1, k[:2], v[:2], "thd"), kvblock.PlanError, ""),
            ((1, v, k, "thd"), kvblock.PlanError, ""),
            ((1, k[:, :1], v[:, :1], "thd"), kvblock.PlanError, ""),
            ((1, k.expand(MAX_BATCH + 1, *k.shape), v.expand(MAX_BATCH + 1, *v.shape), "bshd"),
             kvblock.PlanError, "batch entries"),
            ((1, k.clone().requires_grad_(), v, "thd"), TypeError, "gradients"),
            ((1, torch.empty(3, KV_HEADS, DIM_K, device="meta"), v, "thd"), TypeError, "meta"),
        ):
            with self.subTest(words), self.assertRaisesRegex(error, words):
                params.step(*arguments)
        with self.assertRaises(kvblock.PlanError):
            params.attend(1, k, qkv_format="thd")
        params.step(1, k, v, "thd")
        with self.assertRaisesRegex(kvblock.PlanError, "2"):
            params.pre_step({0: 1})  # Layer 2 was not written.
        params.step(2, k, v, "thd")
        params.pre_step({0: 1})
        self.assertEqual(dict(params.sequences), {0: 4})

    def test_a_batch_of_another_size(self):
        params = self.params(False)
        params.pre_step({0: 2, 1: 1})
        small = torch.randn(1, 2, KV_HEADS, DIM_K), torch.randn(1, 2, KV_HEADS, DIM_V)
        with self.assertRaises(kvblock.PlanError):
            params.step(1, *small, "bshd")
        large = [x.expand(4, -1, -1, -1).contiguous() for x in small]
        self.assertEqual(params.step(1, *large, "bshd")[0].shape[0], 4)
        self.assertFalse(params.step(1, *large, "bshd")[0][2:].any())

    def test_sums_of_another_step_are_refused(self):
        manager = KVCacheManager(
            max_batch_size=2, max_seqlen=8, num_heads=1, head_dim_k=2, dtype=torch.float32
        )
        manager.allocate_memory(1)
        self.assertEqual(manager.pre_step({5: 3}), {5: 3})
        k, sums = torch.randn(3, 1, 2), torch.tensor([0, 3, 3])
        for wrong in (sums[:1], sums - 1, torch.tensor([0, 2, 3])):
            with self.assertRaisesRegex(kvblock.PlanError, "cu_new_seqlens"):
                manager.step(1, k, k, wrong, sums, "thd")
        with self.assertRaisesRegex(kvblock.PlanError, "cu_cached_seqlens"):
            manager.step(1, k, k, sums, wrong, "thd")
        for right in (sums, None):
            rows_of, _ = manager.step(1, k, k, right, right, "thd")
            self.assertTrue(torch.equal(rows_of[0, :3], k))
        with self.assertRaises(kvblock.SpecError):
            KVCacheManager(
                max_batch_size=2,
                max_seqlen=8,
                num_heads=1,
                head_dim_k=2,
                dtype=torch.float32,
                page_size=4,
            )

    def test_an_exception_rolls_the_step_back(self):
        params, model = self.params(layers=(1, 2)), Model((1, 2), torch.float32, 6)
        feed(self, params, model, {0: 3, 1: 2}, "thd")
        k, v = torch.randn(5, KV_HEADS, DIM_K), torch.randn(5, KV_HEADS, DIM_V)
        with self.assertRaisesRegex(RuntimeError, "out of luck"):
            with params.pre_step({1: 1, 0: 4}) as same:
                self.assertIs(same, params)
                params.step(1, k, v, "thd")
                raise RuntimeError("out of luck")
        self.assertEqual(dict(params.sequences), {0: 3, 1: 2})
        self.assertEqual(params.cu_seqlens_kv.tolist(), [0] * (MAX_BATCH + 1))
        with self.assertRaises(kvblock.PlanError):
            params.step(1, k, v, "thd")
        feed(self, params, model, {1: 1, 0: 4}, "bshd")
        # A step that goes on is the caller's to give up.
        with params.pre_step({0: 1, 1: 1}):
            pass
        with self.assertRaisesRegex(kvblock.PlanError, "layer"):
            params.pre_step({0: 1, 1: 1})
        params.roll_back()
        feed(self, params, model, {0: 1, 1: 1}, "sbhd")
        # One that has ended in the meantime is not rolled back.
        with self.assertRaises(ZeroDivisionError):
            with params.pre_step({0: 0, 1: 0}):
                feed(self, params, model, {0: 1, 1: 1}, "thd")
                raise ZeroDivisionError
        self.assertEqual(list(params.sequences.values()), model.lengths())
        feed(self, params, model, {}, "thd")
        self.assertEqual(params.batch_size, 0)

    def test_inference_mode_may_come_and_go(self):
        with torch.inference_mode():
            params, model = self.params(), Model((1,), torch.float32, 7)
            feed(self, params, model, {0: 3}, "thd")
        feed(self, params, model, {0: 1}, "thd")
        with torch.inference_mode():
            feed(self, params, model, {0: 1, 1: 2}, "bshd")

    def test_a_manager_of_the_callers_own(self):
        class Counting(KVCacheManager):
            steps = 0

            def pre_step(self, step_dict):
                self.steps += 1
                return super().pre_step(step_dict)

        params, model = self.params(custom_cache_manager=Counting), Model((1,), torch.float32, 8)
        feed(self, params, model, {0: 3}, "thd")
        self.assertEqual(params.cache_manager.steps, 1)
        for given in (dict(threads=1), dict(stream=0)):
            with self.assertRaisesRegex(TypeError, "threads= and stream="):
                self.params(custom_cache_manager=Counting, **given)

        class Plain:
            """Pages in tensors: the interface of TransformerEngine and nothing else."""

            answer = None

            def __init__(self, **settings):
                self.settings, self.cache, self.sequences = settings, {}, OrderedDict()
                self.page_table = torch.arange(PAGES).view(MAX_BATCH, -1)

            def allocate_memory(self, layer):
                shape = [PAGES, PAGE, KV_HEADS]
                self.cache[layer] = torch.zeros(*shape, DIM_K), torch.zeros(*shape, DIM_V)

            def pre_step(self, step):
                lengths = ((seq, self.sequences.get(seq, 0) + n) for seq, n in step.items())
                self.sequences = OrderedDict(lengths)
                return self.answer or self.sequences

            def step(self, layer, new_k, new_v, cu_new, cu_cached, qkv_format):
                at = [int(len) - 1 for len in self.sequences.values()]
                for plane, new in zip(self.cache[layer], (new_k, new_v)):
                    for row, position in enumerate(at):
                        page = self.page_table[row, position // PAGE]
                        plane[page, position % PAGE] = new[row]
                return self.cache[layer]

            def reset(self):
                self.sequences = OrderedDict()

        params, model = self.params(custom_cache_manager=Plain), Model((1,), torch.float32, 9)
        self.assertEqual(params.cache_manager.settings["total_num_pages"], PAGES)
        for _ in range(3):
            feed_plain(self, params, model, {0: 1, 1: 1})
        for call in (lambda: params.attend(1, torch.randn(2, 4, DIM_K)), params.roll_back):
            with self.assertRaisesRegex(NotImplementedError, "Plain has no"):
                call()
        for wrong in ({0: 22, 1: 1}, {n: 1 for n in range(6)}):
            with self.assertRaises(kvblock.PlanError):
                params.pre_step(wrong)
        self.assertEqual(params.cache_manager.sequences, {0: 3, 1: 3})
        with self.assertRaisesRegex(kvblock.PlanError, "qkv_format"):
            params.step(1, None, None, "foo")
        for answer in ({1: 4, 0: 4}, {0: 4}, {0: 4, 1: 5}):
            params.cache_manager.answer = answer
            with self.assertRaisesRegex(kvblock.PlanError, "Plain.pre_step"):
                params.pre_step({0: 1, 1: 1})
        params.reset()
        self.assertEqual(params.batch_size, 0)


def feed_plain(case, params, model, step):
    """Runs a step of single tokens over a manager that cannot gather."""
    params.pre_step(step)
    new = model.step(step)[1]
    k, v = (torch.cat([new[s][i] for s in step]) for i in (0, 1))
    params.step(1, k, v, "thd")
    lengths = model.lengths()
    for plane, whole in enumerate(params.convert_paged_to_nonpaged(1)):
        for row, cached in enumerate(model.cached.values()):
            case.assertTrue(torch.equal(whole[row, : lengths[row]], cached[1][plane]))


def numpy_or_skip():
    try:
        import numpy
    except ImportError:
        raise unittest.SkipTest("numpy is not installed") from None
    return numpy


def in_child(params, answers):
    # One of the parent's that nobody has: its threads are not here, and not waited for.
    gc.collect()
    calls = (
        lambda: params.pre_step({0: 1}),
        lambda: params.cache_manager.pre_step({0: 1}),
        params.reset,
        params.roll_back,
        lambda: params.cache_manager._blocks.sequences(),
    )
    for call in calls:
        try:
            call()
            answers.put("no error")
        except kvblock.ForkedError as error:
            answers.put(error.parent)


@unittest.skipIf(torch is None, "torch is not installed")
class Threads(unittest.TestCase):
    def test_eight_threads_share_one_object(self):
        params, failures, done = InferenceParams(**settings(True)), [], [0] * 8
        params.allocate_memory(1)

        def work(number):
            draw = random.Random(number)
            k, v = torch.randn(2, KV_HEADS, DIM_K), torch.randn(2, KV_HEADS, DIM_V)
            calls = (
                lambda: params.pre_step({0: 1, 1: 1}),
                lambda: params.step(1, k, v, "thd"),
                lambda: params.attend(1, k, qkv_format="thd"),
                lambda: params.convert_paged_to_nonpaged(1),
                lambda: params.cache_manager.cache[1],
                params.roll_back,
                params.reset,
                lambda: params.allocate_memory(draw.randint(1, 2)),
                lambda: (repr(params), params.cache_manager.print_cache()),
                lambda: params.cache_manager.get_page_list(1),
            )
            for _ in range(60):
                try:
                    draw.choice(calls)()
                except kvblock.Error:
                    pass
                except BaseException as error:
                    failures.append(error)
                done[number] += 1

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        self.assertFalse(any(thread.is_alive() for thread in threads))
        self.assertEqual((failures, done), ([], [60] * 8))
        params.reset()
        layers = tuple(params.cache_manager.cache)
        feed(self, params, Model(layers, torch.float32, 1), {0: 3}, "thd")

    @unittest.skipUnless(hasattr(os, "fork"), "no fork on this system")
    def test_a_forked_child_is_refused(self):
        params = InferenceParams(**settings(True))
        params.allocate_memory(1)
        context = multiprocessing.get_context("fork")
        answers = context.Queue()
        gc.disable()
        self.addCleanup(gc.enable)
        garbage = [InferenceParams(**settings(False, threads=2))]
        garbage.append(garbage)
        del garbage
        # The lock is held when the process forks: the child refuses before it waits.
        with params._guard, params.cache_manager._guard:
            child = context.Process(target=in_child, args=(params, answers))
            child.start()
        self.assertEqual([answers.get(timeout=20) for _ in range(5)], [os.getpid()] * 5)
        child.join(20)
        self.assertEqual(child.exitcode, 0)
        feed(self, params, Model((1,), torch.float32, 1), {0: 3}, "thd")


@unittest.skipIf(torch is None, "torch is not installed")
class Guide(unittest.TestCase):
    def test_the_guide_runs(self):
        text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
        section = text.split("## Calls of TransformerEngine\n")[1].split("\n## ")[0]
        # What is on a card is not run here.
        section = section.split("\nOn the CPU ")[0]
        names = {}
        for block in re.findall(r"```py\n(.*?)```", section, re.DOTALL):
            exec(compile(block, "docs/python.md", "exec"), names)
        self.assertEqual(dict(names["params"].sequences), {"a": 7})


if __name__ == "__main__":
    unittest.main()
