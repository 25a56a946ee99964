"""The calls of TransformerEngine on a CUDA device, without a card. Needs torch.

The emulated device has its memory in this process. torch takes the capsules of the planes itself,
after the test has read them and has called the device a CPU; the tensors that come of it say that
they are on CUDA, as all others do that are made there.
"""

import ctypes
import functools
import gc
import itertools
import multiprocessing
import os
import pathlib
import re
import types
import unittest
import weakref
from unittest import mock

import kvblock
from test_cuda import CUDA, IS_EMULATED, Descriptor, put, torch

if torch is not None:
    from kvblock.te import InferenceParams, KVCacheManager
    from te_steps import (
        DIM_K,
        DIM_V,
        FORMATS,
        KV_HEADS,
        MAX_BATCH,
        MAX_SEQ,
        PAGE,
        PAGES,
        Chosen,
        Model,
        addressed,
        feed,
        pack,
        rows,
        settings,
    )
    from test_cuda import Card, OnCard, OnNext
    from test_te_lockstep import Original, wheels
    from torch.overrides import TorchFunctionMode

    class OnDevice(TorchFunctionMode):
        """Makes the tensors of a CUDA device in host memory."""

        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            device = kwargs.get("device")
            if device is None or torch.device(device).type != "cuda":
                return function(*args, **kwargs)
            kwargs["device"] = "cpu"
            return function(*args, **kwargs).as_subclass(OnCard)


ROOT = pathlib.Path(__file__).parents[2]


class Versioned(ctypes.Structure):
    """``DLManagedTensorVersioned``, up to its tensor."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    ]


name_of = ctypes.pythonapi.PyCapsule_GetName
name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def opened(capsule):
    """The tensor of a capsule, which begins as an unversioned one, and the head of a versioned."""
    name = name_of(capsule)
    address = pointer_of(capsule, name)
    if name == b"dltensor":
        return Descriptor.from_address(address), None
    assert name == b"dltensor_versioned", name
    tensor = Descriptor.from_address(address + ctypes.sizeof(Versioned))
    return tensor, Versioned.from_address(address)


def on_cpu(x):
    return x.as_subclass(torch.Tensor)


def on_card(x):
    return x.as_subclass(OnCard)


@unittest.skipUnless(IS_EMULATED and torch, "no emulated device in this build, or no torch")
class Case(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(1)
        self.card, self.imported = Card(), []
        of_torch = torch._C._from_dlpack

        def from_dlpack(capsule, *rest):
            tensor, _ = opened(capsule)
            self.assertEqual((tensor.device_type, tensor.device_id), (CUDA, 0))
            tensor.device_type = 1
            self.imported.append(tensor.data)
            return of_torch(capsule, *rest).as_subclass(OnCard)

        for context in (
            torch.no_grad(),
            self.card,
            OnDevice(),
            mock.patch("torch._C._from_dlpack", from_dlpack),
        ):
            context.__enter__()
            self.addCleanup(context.__exit__, None, None, None)

    def params(self, is_paged=True, layers=(1,), **changes):
        params = InferenceParams(**settings(is_paged, device="emulated", **changes))
        for layer in layers:
            params.allocate_memory(layer)
        return params

    def fed(self, is_paged=True, **changes):
        """A cache whose layer 1 has rows of two sequences, and the model of it."""
        params, model = self.params(is_paged, **changes), Model((1,), torch.float32, 1)
        feed(self, params, model, {0: 6, 1: 3}, "thd", place=on_card)
        return params, model


class Steps(Case):
    def test_random_steps_follow_the_model(self):
        dtypes = (torch.float32, torch.float16, torch.bfloat16)
        cases = itertools.product((False, True), FORMATS)
        for seed, (is_paged, qkv_format) in enumerate(cases):
            layers, dtype = (3, 1), dtypes[seed % 3]
            params = self.params(is_paged, layers, dtype=dtype)
            chosen, model = Chosen(seed), Model(layers, dtype, seed)
            for number in range(12):
                if number == 8:
                    params.reset()
                    self.assertEqual(params.cu_seqlens_kv.tolist(), [0] * (MAX_BATCH + 1))
                    model.cached, chosen.lengths = {}, {}
                place = on_cpu if number % 4 == 3 else on_card  # Rows of both places.
                batch = chosen.random.choice((None, MAX_BATCH))
                feed(self, params, model, chosen.step(), qkv_format, batch, place)

    def test_attention_is_that_of_the_cpu(self):
        for is_paged, qkv_format in itertools.product((False, True), FORMATS):
            on = self.params(is_paged), InferenceParams(**settings(is_paged))
            on[1].allocate_memory(1)
            for step in ({4: 5, 2: 9}, {2: 1, 4: 1, 8: 3}, {4: 4, 8: 1}):
                new = [rows(n, torch.float32, torch.default_generator) for n in step.values()]
                k, v = (pack([of[i] for of in new], qkv_format) for i in (0, 1))
                q = pack([torch.randn(n, 4, DIM_K) for n in step.values()], qkv_format)
                outputs = []
                for params, place in zip(on, (on_card, on_cpu)):
                    params.pre_step(step)
                    params.step(1, place(k), place(v), qkv_format)
                    outputs.append(params.attend(1, place(q), window=7))
                out, expected = outputs
                self.assertIs(type(out), OnCard)
                torch.testing.assert_close(on_cpu(out), expected, rtol=1e-5, atol=1e-5)
                given = on_card(torch.zeros_like(expected))
                self.assertIs(on[0].attend(1, on_card(q), given, window=7), given)
                self.assertTrue(torch.equal(given, out))

    def test_arrays_are_on_the_device_and_never_move(self):
        params = self.params()
        manager = params.cache_manager
        of_params = "cu_seqlens_q", "cu_seqlens_kv", "pre_step_seqlens"
        of_manager = "page_table", "batch_indices_post_step"

        def arrays():
            both = (params, of_params), (manager, of_manager)
            return [getattr(of, name) for of, names in both for name in names]

        before = arrays()
        addresses = [array.data_ptr() for array in before]
        self.assertEqual(params.device, torch.device("cuda", 0))
        self.assertEqual(manager.device, torch.device("cuda", 0))
        self.assertEqual(manager.batch_indices_post_step.tolist(), [0, 1, 2, 3, 4])
        for step in ({0: 6, 1: 3}, {1: 1}):
            params.pre_step(step)
            params.step(1, *rows(sum(step.values()), torch.float32, None), "thd")
        for array, old, address in zip(arrays(), before, addresses):
            self.assertIs(array, old)
            self.assertEqual((array.data_ptr(), array.device.type), (address, "cuda"))
            self.assertEqual((array.dtype, type(array)), (torch.int32, OnCard))
        self.assertEqual(params.cu_seqlens_kv.tolist(), [0] + [4] * MAX_BATCH)
        self.assertEqual(params.pre_step_seqlens.tolist(), [3, 0, 0, 0, 0])
        self.assertEqual(manager.page_table[0, :1].tolist(), manager.get_page_list(1))

    def test_sums_on_the_device_are_not_read(self):
        manager = KVCacheManager(
            max_batch_size=2, max_seqlen=8, num_heads=1, head_dim_k=4, dtype=torch.float32,
            device="emulated",
        )
        manager.allocate_memory(1)
        manager.pre_step({5: 3})
        k, wrong = torch.randn(3, 1, 4), torch.tensor([0, 2, 3], dtype=torch.int32)
        with mock.patch.object(OnCard, "tolist", side_effect=AssertionError("the device waits")):
            manager.step(1, on_card(k), on_card(k), on_card(wrong), on_card(wrong), "thd")
        with self.assertRaisesRegex(kvblock.PlanError, "cu_new_seqlens"):
            manager.step(1, on_card(k), on_card(k), wrong, wrong, "thd")

    def test_the_original_makes_a_manager_by_partial(self):
        make = functools.partial(KVCacheManager, device="emulated")
        params = self.params(custom_cache_manager=make)
        model = Model((1,), torch.float32, 1)
        feed(self, params, model, {0: 6, 1: 3}, "thd", place=on_card)
        planes = params.cache_manager.cache[1]
        self.assertEqual(self.imported, [plane.data_ptr() for plane in planes])
        for wrong in (KVCacheManager, functools.partial(KVCacheManager, device="cpu")):
            with self.assertRaisesRegex(ValueError, "the cache manager is on cpu"):
                self.params(custom_cache_manager=wrong)

    def test_the_class_of_the_original_takes_this_manager(self):
        make = functools.partial(KVCacheManager, device="emulated")
        found = wheels()
        if not found:
            self.skipTest("no wheels of TransformerEngine")
        cases = itertools.product(found.values(), (False, True), FORMATS)
        for seed, (wheel, is_paged, qkv_format) in enumerate(cases):
            original = Original(wheel)
            with original.on_cpu():
                given = settings(is_paged, qkv_format=qkv_format, custom_cache_manager=make)
                params = original.names.InferenceParams(**given)
                if not is_paged:
                    # It gathers where it is paged alone.
                    manager = params.cache_manager
                    params.convert_paged_to_nonpaged = manager.convert_paged_to_nonpaged
                model, chosen = Model((1, 2), torch.float32, seed), Chosen(seed)
                for layer in model.layers:
                    params.allocate_memory(layer)
                for _ in range(10):
                    feed(self, params, model, chosen.step(), qkv_format, place=on_card)

    def test_the_guide_runs(self):
        text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
        section = text.split("## Calls of TransformerEngine\n")[1].split("\n## ")[0]
        section = section.split("\nOn the CPU ")[1]
        names = dict(InferenceParams=InferenceParams, torch=torch)
        for block in re.findall(r"```py\n(.*?)```", section, re.DOTALL):
            exec(compile(block.replace("cuda:0", "emulated"), "docs/python.md", "exec"), names)
        shape = dict(max_batch_size=2, max_seqlen=8, num_heads=1, head_dim_k=4)
        of_partial = names["manager"](**shape, dtype=torch.float32)
        for on_device in (names["params"], of_partial):
            self.assertEqual(on_device.device, torch.device("cuda", 0))


class Planes(Case):
    def test_a_step_returns_the_memory_itself(self):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            params, model = self.params(dtype=dtype), Model((1,), dtype, 1)
            params.pre_step({0: 6, 1: 3})
            new = model.step({0: 6, 1: 3})[1]
            k, v = (torch.cat([new[seq][i] for seq in (0, 1)]) for i in (0, 1))
            first = params.step(1, on_card(k), on_card(v), "thd")
            whole = params.convert_paged_to_nonpaged(1)
            table = params.cache_manager.page_table
            for plane, gathered, dim in zip(first, whole, (DIM_K, DIM_V)):
                self.assertIs(type(plane), OnCard)
                self.assertEqual((plane.shape, plane.dtype), ((PAGES, PAGE, KV_HEADS, dim), dtype))
                self.assertTrue(plane.is_contiguous())
                for row, found in enumerate(addressed(plane, table, [6, 3])):
                    self.assertTrue(torch.equal(found, gathered[row, : len(found)]))
            # One tensor for all steps, which shows the last of them.
            kept = first[0].clone()
            params.pre_step({0: 1, 1: 1})
            later = [torch.randn(2, KV_HEADS, dim, dtype=dtype) for dim in (DIM_K, DIM_V)]
            second = params.step(1, *map(on_card, later), "thd")
            for one, other, cached in zip(first, second, params.cache_manager.cache[1]):
                self.assertIs(one, other)
                self.assertIs(one, cached)
            page = params.cache_manager.get_page_list(0)[1]
            self.assertTrue(torch.equal(first[0][page, 2], later[0][0]))
            self.assertFalse(torch.equal(first[0], kept))
        self.assertEqual(len(self.imported), 6)

    def test_rows_that_are_not_paged_are_in_place_as_long_as_they_are_in_order(self):
        params, model = self.fed(is_paged=False)
        planes = params.cache_manager.cache[1]
        self.assertEqual(planes[0].shape, (MAX_BATCH, MAX_SEQ, KV_HEADS, DIM_K))
        k, v = rows(2, torch.float32, model.generator)
        for step, is_in_place in (
            ({0: 1, 1: 1}, True),
            ({1: 1, 0: 1}, False),
            ({0: 1, 1: 1}, True),
            ({1: 2}, False),  # In slot 1, not 0.
        ):
            params.pre_step(step)
            model.step(step)
            out, _, *_ = params.step(1, k, v, "thd")
            is_same = out.data_ptr() == planes[0].data_ptr()
            self.assertEqual(is_same, is_in_place, step)
            for row, tokens in enumerate(params.sequences.values()):
                whole, _ = params.convert_paged_to_nonpaged(1)
                self.assertTrue(torch.equal(out[row, :tokens], whole[row, :tokens]))
        params.pre_step({1: 1, 2: 1})
        small = on_card(k[:, None]), on_card(v[:, None])
        self.assertEqual(params.step(1, *small, "bshd")[0].shape[0], 2)

    def test_inference_mode_may_come_and_go(self):
        with torch.inference_mode():
            params, model = self.fed()
        feed(self, params, model, {0: 1}, "thd", place=on_card)
        self.assertFalse(params.cache_manager.cache[1][0].is_inference())
        self.assertFalse(params.cu_seqlens_q.is_inference())

    def test_a_tensor_outlives_its_cache(self):
        params, _ = self.fed()
        expected = [on_cpu(plane).clone() for plane in params.cache_manager.cache[1]]
        kept, gone = params.cache_manager.cache[1], []
        weakref.finalize(params.cache_manager._blocks, gone.append, True)
        del params
        gc.collect()
        self.assertEqual(gone, [True])
        others = [self.fed() for _ in range(3)]  # Memory that was freed would be used again.
        for plane, right in zip(kept, expected):
            self.assertTrue(torch.equal(plane, right))
        planes = itertools.chain(*(other.cache_manager.cache[1] for other, _ in others))
        addresses = {plane.data_ptr() for plane in planes}
        self.assertTrue(addresses.isdisjoint(plane.data_ptr() for plane in kept))

    @unittest.skipUnless(hasattr(os, "fork"), "no fork on this system")
    def test_a_forked_child_may_drop_tensors(self):
        params, _ = self.fed()
        kept = [[params, *params.cache_manager.cache[1]]]
        plane = params.cache_manager._blocks.planes(1)[0]
        kept[0].append(plane.__dlpack__())
        expected = on_cpu(kept[0][1]).clone()

        def in_child(answers):
            try:
                plane.__dlpack__(stream=9)
            except kvblock.ForkedError as error:
                answers.put(error.parent)
            kept.clear()
            gc.collect()
            answers.put("dropped")

        context = multiprocessing.get_context("fork")
        answers = context.Queue()
        child = context.Process(target=in_child, args=(answers,))
        child.start()
        self.assertEqual([answers.get(timeout=20) for _ in range(2)], [os.getpid(), "dropped"])
        child.join(20)
        self.assertEqual(child.exitcode, 0)
        self.assertTrue(torch.equal(kept[0][1], expected))

    def test_a_plane_is_a_tensor_of_every_library(self):
        params, _ = self.fed()
        blocks = params.cache_manager._blocks
        whole = [on_cpu(plane) for plane in params.cache_manager.cache[1]]
        for plane, expected in zip(blocks.planes(1), whole):
            dim = expected.shape[3]
            self.assertEqual(plane.__dlpack_device__(), (CUDA, 0))
            self.assertEqual(plane.shape, (PAGES, PAGE, KV_HEADS, dim))
            self.assertEqual(repr(plane), f"CachePlane([30, 4, 2, {dim}], f32, cuda:0)")
            for version, is_versioned in ((None, False), ((0, 8), False), ((1, 0), True)):
                capsule = plane.__dlpack__(max_version=version)
                tensor, head = opened(capsule)
                self.assertEqual(head is not None, is_versioned)
                if head:
                    self.assertEqual((head.major, head.flags), (1, 0))
                self.assertEqual(tensor.data, expected.data_ptr())
                self.assertEqual((tensor.device_type, tensor.device_id), (CUDA, 0))
                self.assertEqual((tensor.code, tensor.bits, tensor.lanes), (2, 32, 1))
                self.assertEqual(tensor.shape[: tensor.ndim], [PAGES, PAGE, KV_HEADS, dim])
                strides = [PAGE * KV_HEADS * dim, KV_HEADS * dim, dim, 1]
                self.assertEqual(tensor.strides[: tensor.ndim], strides)
                self.assertEqual(tensor.byte_offset, 0)

    def test_types_of_16_bits(self):
        for dtype, numbers in ((torch.float16, (2, 16, 1)), (torch.bfloat16, (4, 16, 1))):
            blocks = self.params(dtype=dtype).cache_manager._blocks
            for plane in blocks.planes(1):
                tensor, _ = opened(plane.__dlpack__())
                self.assertEqual((tensor.code, tensor.bits, tensor.lanes), numbers)

    def test_a_capsule_that_nobody_takes_keeps_the_memory_and_gives_it_back(self):
        params, _ = self.fed()
        plane, gone = params.cache_manager._blocks.planes(1)[0], []
        weakref.finalize(params.cache_manager._blocks, gone.append, True)
        expected = on_cpu(params.cache_manager.cache[1][0]).clone()
        capsules = [plane.__dlpack__(), plane.__dlpack__(max_version=(1, 0))]
        del params
        gc.collect()
        self.assertEqual(gone, [])  # A plane can be asked for more capsules.
        del plane
        self.assertEqual(gone, [True])
        for capsule in capsules:
            memory = ctypes.string_at(opened(capsule)[0].data, expected.numel() * 4)
            self.assertEqual(memory, expected.numpy().tobytes())
        del capsules

    def test_the_stream_of_a_consumer_is_ordered(self):
        params, _ = self.fed(stream=7)
        self.assertEqual((params.cache_manager.stream, params.cache_manager._blocks.stream), (7, 7))
        plane, _ = params.cache_manager._blocks.planes(1)
        as_torch, as_cupy = types.SimpleNamespace(__cuda_stream__=9), lambda: 9
        for stream in (None, -1, 1, 2, 7, 9, as_torch):
            self.assertIsNotNone(plane.__dlpack__(stream=stream))
        for wrong in (0, -2, "fast", as_cupy):
            with self.assertRaises(ValueError):
                plane.__dlpack__(stream=wrong)

    def test_another_current_stream_is_ordered_in_every_step(self):
        params, model = self.fed()
        for place in (on_card, on_cpu):
            self.card.stream, self.card.asked = 9, []
            feed(self, params, model, {0: 1, 1: 1}, "thd", place=place)
            # Whatever the rows are, the memory may be read on torch's stream.
            self.assertGreaterEqual(len(self.card.asked), 1)
        self.card.stream = 0

    def test_what_a_plane_is_not_is_refused(self):
        params, _ = self.fed()
        blocks = params.cache_manager._blocks
        plane, _ = blocks.planes(1)
        for request, words in (
            (dict(copy=True), "zero-copy"),
            (dict(dl_device=(1, 0)), "cross-device"),
            (dict(dl_device=(CUDA, 1)), "cross-device"),
        ):
            with self.assertRaisesRegex(BufferError, words):
                plane.__dlpack__(**request)
        plane.__dlpack__(dl_device=(CUDA, 0), copy=False)
        with self.assertRaisesRegex(kvblock.PlanError, "2"):
            blocks.planes(2)
        with self.assertRaises(KeyError):
            params.cache_manager.cache[2]


class Refused(Case):
    def setUp(self):
        super().setUp()
        self.of, self.model = self.fed()
        self.k, self.v = (on_card(x) for x in rows(2, torch.float32, self.model.generator))
        self.q = on_card(torch.randn(2, 4, DIM_K))
        self.of.pre_step({0: 1, 1: 1})

    def test_tensors_of_another_place_or_type(self):
        there = self.v.as_subclass(OnNext)
        k, q = self.k, self.q
        meta = torch.empty(2, KV_HEADS, DIM_V, device="meta")
        for arguments, error, words in (
            ((k, there), ValueError, "v is on cuda:1, the cache on emulated"),
            ((k, meta), TypeError, "v is on meta: .* on the CUDA device of the cache"),
            ((on_card(on_cpu(k).double()), self.v), TypeError, "k has type torch.float64"),
            ((on_card(on_cpu(k).half()), self.v), kvblock.PlanError, "element type"),
            ((self.v, k), kvblock.PlanError, ""),
        ):
            with self.assertRaisesRegex(error, words):
                self.of.step(1, *arguments, "thd")
        self.of.step(1, k, self.v, "thd")
        with self.assertRaisesRegex(ValueError, "q is on cuda:1"):
            self.of.attend(1, q.as_subclass(OnNext))
        with self.assertRaisesRegex(ValueError, "out is on cuda:1"):
            self.of.attend(1, q, torch.empty(2, 4, DIM_V).as_subclass(OnNext))
        with self.assertRaisesRegex(TypeError, "out= is expected: q is on a device"):
            self.of.attend(1, put(q.numpy()))
        on_host = InferenceParams(**settings(True))
        on_host.allocate_memory(1)
        on_host.pre_step({0: 2})
        with self.assertRaisesRegex(ValueError, "k is on cuda:0, the cache on cpu"):
            on_host.step(1, k, self.v, "thd")

    def test_tensors_over_the_cache(self):
        planes = self.of.cache_manager.cache[1]
        before = [on_cpu(plane).clone() for plane in planes]
        k, v = (plane[2].flatten(0, 0)[:2] for plane in planes)
        for arguments, name in (((k, self.v), "k"), ((self.k, v), "v")):
            with self.assertRaisesRegex(ValueError, f"{name} shares memory with the cache"):
                self.of.step(1, *arguments, "thd")
        self.of.step(1, self.k, self.v, "thd")
        out = planes[1][8:].flatten()[: 2 * 4 * DIM_V].view(2, 4, DIM_V)
        with self.assertRaisesRegex(ValueError, "out shares memory with the cache"):
            self.of.attend(1, self.q, out)
        blocks, gathered = self.of.cache_manager._blocks, torch.zeros(2, 8, KV_HEADS, DIM_V)
        over = planes[0][8:].flatten()[: 2 * 8 * KV_HEADS * DIM_K].view(2, 8, KV_HEADS, DIM_K)
        with self.assertRaisesRegex(ValueError, "k shares memory with the cache"):
            blocks.gather(1, over, gathered)
        # Nothing was written but the step.
        changed = sum((on_cpu(new) != old).any((2, 3)).sum() for new, old in zip(planes, before))
        self.assertEqual(changed, 4)

    def test_captures(self):
        blocks = self.of.cache_manager._blocks
        plane, _ = blocks.planes(1)
        self.card.is_capturing = True
        host = [on_cpu(x) for x in (self.k, self.v)]
        for call in (
            lambda: self.of.step(1, self.k, self.v, "thd"),
            lambda: self.of.step(1, *host, "thd"),
            lambda: self.of.attend(1, self.q, qkv_format="thd"),
            plane.__dlpack__,
        ):
            with self.assertRaisesRegex(kvblock.StateError, "captures a CUDA graph"):
                call()
        self.card.is_capturing = False
        self.of.step(1, self.k, self.v, "thd")

    def test_streams_and_devices(self):
        for stream, error, words in ((2, ValueError, "per-thread"), ("x", TypeError, "stream=x")):
            with self.assertRaisesRegex(error, words):
                self.params(stream=stream)
        self.card.stream = 5
        self.assertEqual(self.params().cache_manager.stream, 5)

    @unittest.skipIf(torch is not None and torch.cuda.is_available(), "there is a card")
    def test_a_device_that_is_not_there(self):
        for device in ("cuda:0", "cuda:3", "cuda", *([torch.device("cuda", 0)] if torch else [])):
            with (
                mock.patch("torch.cuda.current_device", lambda: 0),
                self.assertRaisesRegex(kvblock.DeviceError, "(?i)cuda"),
            ):
                InferenceParams(**settings(True, device=device))


if __name__ == "__main__":
    unittest.main()
