"""The calls of TransformerEngine, against a plain model and TransformerEngine itself. Needs torch.

The lockstep needs wheels of transformer-engine (`pip download --no-deps transformer-engine==2.20.2`,
pure Python) in the folder KVBLOCK_TE_WHEELS names, `target/te` unless set. KVBLOCK_TE_STEPS and
KVBLOCK_TE_SEEDS make it longer.
"""

import contextlib
import gc
import itertools
import logging
import multiprocessing
import os
import pathlib
import random
import re
import sys
import threading
import types
import unittest
import warnings
import weakref
import zipfile
from collections import OrderedDict
from unittest import mock

import kvblock

try:
    import torch
except ImportError:
    torch = None
else:
    from kvblock.te import InferenceParams, KVCacheManager
    from torch.overrides import TorchFunctionMode

ROOT = pathlib.Path(__file__).parents[2]
WHEELS = pathlib.Path(os.environ.get("KVBLOCK_TE_WHEELS", ROOT / "target" / "te"))
STEPS = int(os.environ.get("KVBLOCK_TE_STEPS", "25"))
SEEDS = int(os.environ.get("KVBLOCK_TE_SEEDS", "1"))
FORMATS = ("bshd", "sbhd", "thd")

MAX_BATCH, MAX_SEQ, PAGE, KV_HEADS, DIM_K, DIM_V = 5, 24, 4, 2, 4, 3
PAGES = MAX_BATCH * MAX_SEQ // PAGE

#: What TransformerEngine's layers, and programs over them, read from outside: of the parameters, of
#: their cache manager, and of the latter where it is paged. The lockstep looks for more in a wheel.
NAMES = {
    "params": {
        "attributes": """max_batch_size max_sequence_length num_heads_kv head_dim_k head_dim_v dtype
            is_paged total_num_pages page_size max_ctx_len cache_manager cache_qkv_format
            input_qkv_format output_qkv_format sequences sequences_pre_step batch_size cu_seqlens_q
            cu_seqlens_kv pre_step_seqlens""",
        "methods": """allocate_memory pre_step get_seqlens_pre_step convert_paged_to_nonpaged step
            reset""",
    },
    "manager": {
        "attributes": """max_batch_size max_seqlen num_heads head_dim_k head_dim_v dtype cache
            sequences batch_indices_post_step""",
        "methods": "allocate_memory pre_step step reset",
    },
    "paged": {
        "attributes": "total_num_pages page_size max_pages_per_seq page_table",
        "methods": """print_cache get_sequence_count get_sequence_lengths has_free_page
            get_page_count get_page_list get_page_table""",
    },
}


def settings(paged, /, **changes):
    given = dict(
        max_batch_size=MAX_BATCH,
        max_sequence_length=MAX_SEQ,
        num_heads_kv=KV_HEADS,
        head_dim_k=DIM_K,
        head_dim_v=DIM_V,
        dtype=torch.float32,
        max_ctx_len=MAX_SEQ,
    )
    if paged:
        given |= dict(is_paged=True, page_size=PAGE, total_num_pages=PAGES)
    return given | changes


def rows(tokens, dtype, generator):
    """Keys and values of new tokens: any numbers, all different."""
    return tuple(
        torch.randn(tokens, KV_HEADS, dim, generator=generator).to(dtype) for dim in (DIM_K, DIM_V)
    )


def pack(of_rows, qkv_format, batch=None):
    """One tensor of the rows of each sequence; what is padding is not a number."""
    of_rows = list(of_rows)
    if qkv_format == "thd":
        return torch.cat(of_rows)
    longest = max(map(len, of_rows))
    padded = of_rows[0].new_full(
        (batch or len(of_rows), longest, *of_rows[0].shape[1:]), float("nan")
    )
    for row, own in enumerate(of_rows):
        padded[row, : len(own)] = own
    return padded if qkv_format == "bshd" else padded.transpose(0, 1).contiguous()


def addressed(plane, table, lengths):
    """The rows of each sequence in what ``step`` has returned, found by the page table."""
    found = []
    for row, length in enumerate(lengths):
        pages = table[row, : -(-length // plane.shape[1])].long()
        found.append(plane[pages].flatten(0, 1)[:length])
    return found


class Model:
    """What a cache has to hold: the rows of every sequence, by layer and plane."""

    def __init__(self, layers, dtype, seed):
        self.layers, self.dtype = layers, dtype
        self.generator = torch.Generator().manual_seed(seed)
        self.cached = {}

    def step(self, step):
        """Ends and begins sequences. Returns the new rows: ``[layer][sequence] = (k, v)``."""
        self.cached = {seq: self.cached.get(seq, {}) for seq in step}
        new = {layer: {} for layer in self.layers}
        for layer, (seq, tokens) in itertools.product(self.layers, step.items()):
            new[layer][seq] = rows(tokens, self.dtype, self.generator)
            old = self.cached[seq].get(layer)
            both = new[layer][seq] if old is None else map(torch.cat, zip(old, new[layer][seq]))
            self.cached[seq][layer] = tuple(both)
        return new

    def lengths(self):
        return [len(cached[self.layers[0]][0]) for cached in self.cached.values()]

    def check(self, case, params, layer, output):
        """Compares what ``step`` returns with what is cached."""
        lengths = self.lengths()
        planes = output[:2]
        table = params.cache_manager.page_table
        whole = params.convert_paged_to_nonpaged(layer)
        for plane, (rows_of, converted) in enumerate(zip(planes, whole)):
            case.assertEqual(converted.shape[:2], (len(lengths), MAX_SEQ))
            found = addressed(rows_of, table, lengths)
            for row, (seq, cached) in enumerate(self.cached.items()):
                right = cached[layer][plane]
                case.assertTrue(torch.equal(found[row], right), (seq, layer, plane))
                case.assertTrue(torch.equal(converted[row, : len(right)], right), (seq, layer))
                if isinstance(params, InferenceParams):
                    case.assertFalse(converted[row, len(right) :].any())
        sums = [0, *itertools.accumulate(lengths)]
        case.assertEqual(output[3].tolist(), sums + sums[-1:] * (MAX_BATCH - len(lengths)))


def feed(case, params, model, step, qkv_format, batch=None):
    """Runs a step over all layers, and compares each with the model."""
    before = dict(zip(model.cached, model.lengths())) if model.cached else {}
    params.pre_step(OrderedDict(step))
    new = model.step(step)
    case.assertEqual(list(params.sequences), list(step))
    case.assertEqual(list(params.sequences.values()), model.lengths())
    pre = [before.get(seq, 0) for seq in step]
    case.assertEqual(list(params.sequences_pre_step.values()), pre)
    case.assertEqual(params.get_seqlens_pre_step().tolist()[: len(pre)], pre)
    case.assertEqual(params.batch_size, len(step))
    sums = [0, *itertools.accumulate(step.values())]
    for layer in model.layers:
        if not step:
            break
        k, v = (pack([new[layer][s][i] for s in step], qkv_format, batch) for i in (0, 1))
        output = params.step(layer, k, v, qkv_format)
        case.assertEqual(output[2].tolist(), sums + sums[-1:] * (MAX_BATCH - len(step)))
        case.assertEqual(output[4], MAX_SEQ)
        expected = {"bshd": "bshd", "sbhd": "sbhd_2bshd", "thd": "thd_2bshd"}[qkv_format]
        case.assertEqual((output[5], params.output_qkv_format), (expected, expected))
        outer = [PAGES, PAGE]
        if not params.is_paged:
            outer = [MAX_BATCH if qkv_format == "thd" else batch or len(step), MAX_SEQ]
        shapes = [list(plane.shape) for plane in output[:2]]
        case.assertEqual(shapes, [[*outer, KV_HEADS, dim] for dim in (DIM_K, DIM_V)])
        model.check(case, params, layer, output)


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


class Chosen:
    """Random steps: arrivals, departures, chunks of a prompt, single tokens, none."""

    def __init__(self, seed):
        self.random, self.next, self.lengths = random.Random(seed), 0, {}

    def step(self, most=MAX_BATCH, in_order=False, least=0):
        draw = self.random
        stay = [s for s in self.lengths if draw.random() < 0.8 and self.lengths[s] < MAX_SEQ]
        tokens = {s: 1 for s in stay[:most]}
        for seq in tokens:
            if draw.random() < 0.25:
                room = MAX_SEQ - self.lengths[seq]
                tokens[seq] = draw.randint(0 if in_order is False else 1, min(room, 7))
        while len(tokens) < most and (len(tokens) < least or draw.random() < 0.4):
            self.next += draw.randint(1, 3)
            tokens[self.next] = draw.randint(1, MAX_SEQ // 2)
        entries = list(tokens.items())
        if not in_order:
            draw.shuffle(entries)
        self.lengths = {s: self.lengths.get(s, 0) + n for s, n in entries}
        return OrderedDict(entries)


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
            for number in range(STEPS):
                if number % 10 == 9:
                    params.reset()
                    self.assertEqual((params.batch_size, dict(params.sequences)), (0, {}))
                    self.assertEqual(params.cu_seqlens_kv.tolist(), [0] * (MAX_BATCH + 1))
                    model.cached, chosen.lengths = {}, {}
                    continue
                batch = chosen.random.choice((None, MAX_BATCH))
                feed(self, params, model, chosen.step(), qkv_format, batch)

    def test_where_transformer_engine_is_wrong_this_is_right(self):
        for name, steps, _ in WRONG:
            for is_paged, qkv_format in itertools.product((False, True), FORMATS):
                with self.subTest(name, is_paged=is_paged, qkv_format=qkv_format):
                    params, model = self.params(is_paged), Model((1,), torch.float32, 1)
                    for step in steps:
                        feed(self, params, model, OrderedDict(step), qkv_format)

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
        self.assertEqual([manager.get_page_count(s) for s in ("a", 2, (3, 4), 77, "b")], [2, 0, 1, 0, 0])
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
        with self.assertRaisesRegex(NotImplementedError, "cuda:0"):
            of(device="cuda:0")
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
        with self.assertRaisesRegex(TypeError, "threads"):
            self.params(custom_cache_manager=Counting, threads=1)

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

    @unittest.skipIf(sys.platform == "win32", "there is no fork")
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


#: Steps whose rows TransformerEngine has wrong, and how: the sequences of its rows after the last
#: step, with their lengths. The right answer is the step itself: row ``i`` is entry ``i``, a length
#: grows by the tokens that came.
WRONG = [
    ("arrivals follow a hash set: 7, 9", [[(7, 5), (9, 3)]], [(9, 3), (7, 5)]),
    ("arrivals follow a hash set: 6, 7, 8", [[(6, 2), (7, 3), (8, 4)]], [(8, 4), (6, 2), (7, 3)]),
    ("arrivals follow a hash set: 5, 2", [[(5, 1), (2, 3)]], [(2, 3), (5, 1)]),
    (
        "live sequences in another order",
        [[(1, 3), (2, 5)], [(2, 1), (1, 1)]],
        [(1, 4), (2, 6)],
    ),
    (
        "an arrival before a live sequence",
        [[(2, 3), (3, 2)], [(0, 10), (2, 1), (3, 1)]],
        [(2, 4), (3, 3), (0, 10)],
    ),
    ("a live sequence with four tokens", [[(0, 3)], [(0, 4)]], [(0, 4)]),
    ("a live sequence without a token", [[(0, 3), (1, 2)], [(0, 0), (1, 1)]], [(0, 4), (1, 3)]),
]


def wheels():
    """The wheels of TransformerEngine, by version."""
    found = {}
    for path in sorted(WHEELS.glob("transformer_engine-*.whl")):
        found[path.name.split("-")[1]] = path
    return found


def copy_to_kv_cache(
    new_k, new_v, k_cache, v_cache, table, cu_new, cu_cached, qkv_format, *sizes_and_reindex
):
    """What TransformerEngine's kernel of this name does, from its signature."""
    *_, max_pages, must_reindex = sizes_and_reindex
    cu_new, cu_cached, is_paged = cu_new.tolist(), cu_cached.tolist(), max_pages > 1
    if not is_paged and must_reindex:
        # Slots of the step before, finished sequences last.
        for row, slot in enumerate(table.tolist()[: len(cu_new) - 1]):
            for cache in (k_cache, v_cache):
                cache[row] = cache[slot].clone()
    for row in range(len(cu_new) - 1):
        count, end = cu_new[row + 1] - cu_new[row], cu_cached[row + 1] - cu_cached[row]
        for token in range(count):
            at = end - count + token
            source = [(row, token), (token, row), (cu_new[row] + token,)][qkv_format]
            target = (row, at)
            if is_paged:
                page = k_cache.shape[1]
                target = (int(table[row, at // page]), at % page)
            k_cache[target], v_cache[target] = new_k[source], new_v[source]


class Original:
    """TransformerEngine's inference module of a wheel, on the CPU.

    Replaced are the kernel that copies rows, einops, and the device.
    """

    def __init__(self, wheel):
        name = "transformer_engine/pytorch/attention/"
        with zipfile.ZipFile(wheel) as archive:
            source = archive.read(name + "inference.py").decode()
            self.others = "".join(
                archive.read(entry).decode()
                for entry in archive.namelist()
                if entry.endswith(".py") and not entry.endswith("attention/inference.py")
            )
        numbers = dict(zip(FORMATS, range(3)))
        stubs = {
            "transformer_engine_torch": dict(copy_to_kv_cache=copy_to_kv_cache),
            "transformer_engine": {},
            "transformer_engine.pytorch": {},
            "transformer_engine.pytorch.cpp_extensions": {},
            "transformer_engine.pytorch.cpp_extensions.fused_attn": dict(QKVFormat=numbers),
            "transformer_engine.pytorch.attention": {},
            "transformer_engine.pytorch.attention.custom_ops": dict(
                copy_to_kv_cache=copy_to_kv_cache, QKV_FORMAT_VALUE=numbers
            ),
            "einops": dict(rearrange=lambda x, pattern, b: x.reshape(b, -1, *x.shape[2:])),
        }
        modules = {}
        for module, contents in stubs.items():
            modules[module] = types.ModuleType(module)
            vars(modules[module]).update(contents)
        names = {"__name__": "inference"}
        with mock.patch.dict(sys.modules, modules):
            exec(compile(source, "inference.py", "exec"), names)
        self.names = types.SimpleNamespace(**names)

    @contextlib.contextmanager
    def on_cpu(self):
        class OnCpu(TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                kwargs = dict(kwargs or {})
                if kwargs.get("device") is not None:
                    kwargs["device"] = "cpu"
                return function(*args, **kwargs)

        with (
            mock.patch("torch.cuda.current_device", lambda: "cpu"),
            warnings.catch_warnings(),
            OnCpu(),
        ):
            warnings.simplefilter("ignore", UserWarning)
            yield


class Walk:
    """One random walk of TransformerEngine and of the mirror, step by step.

    TransformerEngine counts one token for a live sequence and orders arrivals by a hash set. A
    chunk is an arrival with its whole text there, and steps have the order of its rows.
    """

    def __init__(self, case, original, is_paged, qkv_format, seed):
        self.case, self.original, self.qkv_format = case, original, qkv_format
        dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
        given = settings(is_paged, dtype=dtype, qkv_format=qkv_format)
        self.of = InferenceParams(**given)
        with original.on_cpu():
            self.te = original.names.InferenceParams(**given)
        case.assertEqual(repr(self.of), repr(self.te))
        self.chosen, self.model = Chosen(seed), Model((1, 2), dtype, seed)
        for layer in self.model.layers:
            self.of.allocate_memory(layer)
            self.te.allocate_memory(layer)
        #: The names of the sequences there.
        self.aliases, self.fresh = {}, itertools.count(1)
        self.steps = self.chunks = self.resets = 0

    def step(self):
        draw = self.chosen.random
        if draw.random() < 0.04:
            self.resets += 1
            self.of.reset()
            self.te.reset()
            self.model.cached, self.chosen.lengths, self.aliases = {}, {}, {}
            return
        # Where it is paged, TransformerEngine takes no empty step.
        before = dict(self.chosen.lengths)
        step = self.chosen.step(in_order=True, least=int(self.of.is_paged))
        step = self.arrange(step, before)
        # The numbers of the chosen sequences in the order of the rows.
        self.chosen.lengths = {seq: self.chosen.lengths[seq] for seq in step}
        of_te = OrderedDict()
        for seq, tokens in step.items():
            is_chunk = seq in before and tokens != 1
            self.chunks += is_chunk
            of_te[self.aliases[seq]] = tokens + (before[seq] if is_chunk else 0)
        self.te.pre_step(of_te)
        self.case.assertEqual(list(self.te.sequences), list(of_te), "the walk chose a wrong order")
        self.run(step, of_te, draw)
        self.steps += 1

    def arrange(self, step, before):
        """Orders a step as the rows of TransformerEngine will be, and names its sequences there."""
        tracked = self.te.cache_manager.sequences
        kept = {self.aliases[seq]: seq for seq in step if seq in before and step[seq] == 1}
        live = [kept[alias] for alias in tracked if alias in kept]
        new = [seq for seq in step if seq not in live]
        aliases = {seq: self.aliases[seq] for seq in live}
        left = OrderedDict.fromkeys(name for name in tracked if name in aliases.values())
        while True:
            # Some numbers have no order that their set keeps.
            names = [next(self.fresh) for _ in new]
            for order in itertools.permutations(names):
                entries = OrderedDict.fromkeys([*aliases.values(), *order])
                if list(entries.keys() - left.keys()) == list(order):
                    self.aliases = aliases | dict(zip(new, order))
                    return OrderedDict((seq, step[seq]) for seq in [*live, *new])

    def run(self, step, of_te, draw):
        case, of, te, model = self.case, self.of, self.te, self.model
        batch = draw.choice((None, MAX_BATCH))
        feed(case, of, model, step, self.qkv_format, batch)
        count = len(step)
        case.assertEqual(list(of.sequences.values()), list(te.sequences.values()))
        case.assertEqual(of.cu_seqlens_kv.tolist(), te.cu_seqlens_kv.tolist())
        same = [row for row, pair in enumerate(zip(step.values(), of_te.values())) if pair[0] == pair[1]]
        for ours, theirs in (
            (of.cu_seqlens_q.diff(), te.cu_seqlens_q.diff()),
            (of.get_seqlens_pre_step(), te.get_seqlens_pre_step()),
        ):
            case.assertEqual(ours[same].tolist(), theirs[same].tolist())
        if len(same) == count:
            case.assertEqual(of.cu_seqlens_q.tolist(), te.cu_seqlens_q.tolist())
        if of.is_paged:
            manager = te.cache_manager
            pages = [manager.get_page_count(alias) for alias in of_te]
            case.assertEqual([of.cache_manager.get_page_count(seq) for seq in step], pages)
            case.assertEqual(of.cache_manager.has_free_page(), manager.has_free_page())
        for layer in model.layers if step else ():
            self.compare(layer, step, of_te, batch)

    def compare(self, layer, step, of_te, batch):
        """Steps a layer of TransformerEngine, and compares what both return."""
        case, of, te, model = self.case, self.of, self.te, self.model
        tensors = []
        for plane in (0, 1):
            new = [
                model.cached[seq][layer][plane][-tokens:]
                for seq, tokens in zip(step, of_te.values())
            ]
            tensors.append(pack(new, self.qkv_format, batch))
        theirs = te.step(layer, *tensors, self.qkv_format)
        # The step may be repeated.
        own = [
            pack(
                [model.cached[s][layer][i][len(model.cached[s][layer][i]) - n :] for s, n in step.items()],
                self.qkv_format,
                batch,
            )
            for i in (0, 1)
        ]
        ours = of.step(layer, *own, self.qkv_format)
        case.assertEqual([x.shape for x in ours[:4]], [x.shape for x in theirs[:4]])
        case.assertEqual([x.dtype for x in ours[:4]], [x.dtype for x in theirs[:4]])
        case.assertEqual(ours[4:], theirs[4:])
        lengths = model.lengths()
        if of.is_paged:
            tables = of.cache_manager.page_table, te.cache_manager.page_table
            case.assertEqual(*[(table.shape, table.dtype) for table in tables])
            whole = of.convert_paged_to_nonpaged(layer), te.convert_paged_to_nonpaged(layer)
        else:
            slots = of.cache_manager, te.cache_manager
            tables = [of.batch_indices_post_step[:, None] for of in slots]
            case.assertTrue(torch.equal(*tables))
            whole = ours, theirs
        for plane in (0, 1):
            found = [addressed(x[plane], table, lengths) for x, table in zip((ours, theirs), tables)]
            case.assertTrue(all(map(torch.equal, *found)))
            for row, length in enumerate(lengths):
                pair = [x[plane][row, :length] for x in whole]
                case.assertTrue(torch.equal(*pair))


@unittest.skipIf(torch is None, "torch is not installed")
class Lockstep(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.originals = {version: Original(wheel) for version, wheel in wheels().items()}
        if not cls.originals:
            raise unittest.SkipTest(f"there is no wheel of transformer-engine in {WHEELS}")

    def each(self, call):
        """Calls with every version, form and seed, and adds what is returned."""
        totals = {version: [] for version in self.originals}
        of = itertools.product(self.originals.items(), (False, True), FORMATS, range(SEEDS))
        for (version, original), is_paged, qkv_format, seed in of:
            with self.subTest(version, is_paged=is_paged, qkv_format=qkv_format, seed=seed):
                with original.on_cpu():
                    totals[version].append(call(original, is_paged, qkv_format, seed))
        if "KVBLOCK_TE_STEPS" in os.environ:
            for version, counts in totals.items():
                print(f"{self.id()}, {version}: {[sum(count) for count in zip(*counts)]}")

    def test_random_steps_agree(self):
        def run(*of):
            walk = Walk(self, *of)
            while walk.steps < STEPS:
                walk.step()
            return walk.steps, walk.chunks, walk.resets

        self.each(run)

    def test_its_class_takes_this_manager(self):
        def run(original, is_paged, qkv_format, seed):
            params = original.names.InferenceParams(
                **settings(is_paged, qkv_format=qkv_format, custom_cache_manager=KVCacheManager)
            )
            if not is_paged:
                # It gathers where it is paged alone.
                manager = params.cache_manager
                params.convert_paged_to_nonpaged = manager.convert_paged_to_nonpaged
            model, chosen = Model((1, 2), torch.float32, seed), Chosen(1000 + seed)
            for layer in model.layers:
                self.assertNotIn(layer, params.cache_manager.cache)
                params.allocate_memory(layer)
                self.assertIn(layer, params.cache_manager.cache)
            for number in range(STEPS):
                if number % 20 == 19:
                    params.reset()
                    model.cached, chosen.lengths = {}, {}
                batch = chosen.random.choice((None, MAX_BATCH))
                feed(self, params, model, chosen.step(), qkv_format, batch)
            return (STEPS,)

        self.each(run)

    def test_it_is_wrong_where_the_list_says(self):
        for version, original in self.originals.items():
            for (name, steps, answer), is_paged in itertools.product(WRONG, (False, True)):
                with self.subTest(name, version=version, is_paged=is_paged), original.on_cpu():
                    params = original.names.InferenceParams(**settings(is_paged))
                    for step in steps:
                        params.pre_step(OrderedDict(step))
                    self.assertEqual(list(params.sequences.items()), answer)
                    right, lengths = steps[-1], {}
                    for step in steps:
                        lengths = {seq: lengths.get(seq, 0) + tokens for seq, tokens in step}
                    self.assertNotEqual(answer, [(seq, lengths[seq]) for seq, _ in right])

    def test_all_that_its_layers_read_is_there(self):
        for version, original in self.originals.items():
            read = {
                "params": set(re.findall(r"\binference_params\.(\w+)", original.others)),
                "manager": set(re.findall(r"\bcache_manager\.(\w+)", original.others)),
            }
            self.assertTrue({"step", "is_paged"} <= read["params"], version)
            self.assertTrue({"cache", "page_table"} <= read["manager"], version)
            params = InferenceParams(**settings(True))
            for kind, object in (("params", params), ("manager", params.cache_manager)):
                for name in read[kind]:
                    self.assertTrue(hasattr(object, name), (version, name))


@unittest.skipIf(torch is None, "torch is not installed")
class Guide(unittest.TestCase):
    def test_the_guide_runs(self):
        text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
        section = text.split("## Calls of TransformerEngine\n")[1].split("\n## ")[0]
        names = {}
        for block in re.findall(r"```py\n(.*?)```", section, re.DOTALL):
            exec(compile(block, "docs/python.md", "exec"), names)
        self.assertEqual(dict(names["params"].sequences), {"a": 7})


if __name__ == "__main__":
    unittest.main()
