"""Tensors on a CUDA device, without a card.

The emulated device computes: its memory is memory of this process, so producers of DLPack are made
by hand, and tensors of torch say that they are on a device. A driver that runs nothing writes down
what a cache submits to which stream.
"""

import contextlib
import ctypes
import gc
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import types
import unittest
import weakref
from unittest import mock

import kvblock
import numpy

#: The argument of the process that submits to the driver of the test. It has no torch.
SUBMIT = "--submit"

try:
    if SUBMIT in sys.argv:
        raise ImportError
    import torch
except ImportError:
    torch = None

LAYERS, HEADS, KV_HEADS, DIM = 2, 4, 2, 16
CPU, CUDA, OPENCL = 1, 2, 4
#: Name of a type: code and bits in DLPack, type of the memory in numpy, which has no bfloat16.
TYPES = {
    "float64": (2, 64, "f8"),
    "float32": (2, 32, "f4"),
    "float16": (2, 16, "f2"),
    "bfloat16": (4, 16, "u2"),
}
PROMPTS = {0: 5, 1: 2, 2: 3}
DRIVER = pathlib.Path(__file__).parents[2] / "kv-cuda/tests/failing_driver/driver.cpp"
COMPILER = shutil.which(os.environ.get("CXX", "g++"))
IS_EMULATED = "emulated" in kvblock.features()


class Descriptor(ctypes.Structure):
    """``DLManagedTensor``."""


DELETER = ctypes.CFUNCTYPE(None, ctypes.POINTER(Descriptor))
Descriptor._fields_ = [
    ("data", ctypes.c_void_p),
    ("device_type", ctypes.c_int32),
    ("device_id", ctypes.c_int32),
    ("ndim", ctypes.c_int32),
    ("code", ctypes.c_uint8),
    ("bits", ctypes.c_uint8),
    ("lanes", ctypes.c_uint16),
    ("shape", ctypes.POINTER(ctypes.c_int64)),
    ("strides", ctypes.POINTER(ctypes.c_int64)),
    ("byte_offset", ctypes.c_uint64),
    ("manager_ctx", ctypes.c_void_p),
    ("deleter", DELETER),
]
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Produced:
    """A tensor as a library on CUDA hands it out: ``memory`` is what it has on the device."""

    def __init__(self, memory, dtype="float32", device=(CUDA, 0), imported_as=None):
        self.memory, self.dtype, self.shape = memory, dtype, memory.shape
        self.device, self.imported_as = device, imported_as or device
        #: The streams that were asked for, and how many descriptors were given back.
        self.streams, self.given_back, self._alive = [], 0, []

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        self.streams.append(stream)
        code, bits, _ = TYPES[self.dtype]
        memory, numbers = self.memory, ctypes.c_int64 * self.memory.ndim
        strides = numbers(*(stride // memory.itemsize for stride in memory.strides))
        place, shape = self.imported_as, numbers(*memory.shape)
        descriptor = Descriptor(memory.ctypes.data, *place, memory.ndim, code, bits, 1, shape)
        descriptor.strides, descriptor.deleter = strides, DELETER(self._deleted)
        self._alive.append(descriptor)
        return new_capsule(ctypes.addressof(descriptor), b"dltensor", None)

    def _deleted(self, _descriptor):
        self.given_back += 1


def device_memory(shape, dtype, offset=0):
    """Memory that begins at a multiple of 64, or ``offset`` bytes after one."""
    size = int(numpy.prod(shape)) * numpy.dtype(dtype).itemsize
    raw = numpy.zeros(size + 128, dtype="u1")
    begin = -raw.ctypes.data % 64 + offset
    return raw[begin : begin + size].view(dtype).reshape(shape)


def encoded(values, dtype):
    """Values in a type, bfloat16 as its bits."""
    if dtype != "bfloat16":
        return values.astype(dtype)
    return (values.astype("f4").view("u4") >> 16).astype("u2")


def decoded(memory, dtype):
    if dtype != "bfloat16":
        return memory.astype("f4")
    return (memory.astype("u4") << 16).view("f4")


def put(values, dtype="float32", **options):
    """Copies values into the device's memory, with the order of their axes in memory."""
    order = sorted(range(values.ndim), key=lambda axis: -values.strides[axis])
    memory = device_memory([values.shape[axis] for axis in order], TYPES[dtype][2])
    memory = memory.transpose(numpy.argsort(order))
    memory[...] = encoded(values, dtype)
    return Produced(memory, dtype, **options)


def arranged(values, axes):
    """Rows ``[tokens, heads, dim]`` of one sequence, as a model has them in this order."""
    if axes == "thd":
        return values
    if axes == "sbhd":
        return values[:, None]
    return values[None] if axes == "bshd" else values[None].swapaxes(1, 2)


def cache(**settings):
    given = dict(layers=LAYERS, kv_heads=KV_HEADS, head_dim=DIM, format="f32", block_size=4)
    given |= dict(num_blocks=64, device="emulated")
    return kvblock.Cache(**(given | settings))


def rows(seed, tokens, heads):
    return numpy.random.default_rng(seed).standard_normal((tokens, heads, DIM)).astype("f4")


def batch(of, dtype, place):
    """A ragged batch, then a token each; returns all outputs and all gathered rows."""
    for seq in PROMPTS:
        of.start(seq)
    outputs = []
    for number, counts in enumerate((list(PROMPTS.values()), [1] * len(PROMPTS))):
        tokens = sum(counts)
        with of.step(list(zip(PROMPTS, counts))) as step:
            for layer in range(LAYERS):
                seed = [number, layer]
                q = place(rows(seed + [0], tokens, HEADS), dtype)
                k, v = (place(rows(seed + [n], tokens, KV_HEADS), dtype) for n in (1, 2))
                out = place(numpy.full((tokens, HEADS, DIM), 7, dtype="f4"), dtype)
                assert step.attend(layer, q, k, v, out=out) is out
                outputs.append(decoded(out.memory, dtype))
            last = place(numpy.zeros((len(PROMPTS), 8, KV_HEADS, DIM), dtype="f4"), dtype)
            step.gather(0, "v", last)
            outputs.append(decoded(last.memory, dtype))
    for seq, count in PROMPTS.items():
        for layer in range(LAYERS):
            out = place(numpy.zeros((1, count + 1, KV_HEADS, DIM), dtype="f4"), dtype)
            of.gather(seq, layer, "k", out)
            outputs.append(decoded(out.memory, dtype))
    return outputs


def put_on_host(values, dtype="float32"):
    return put(values, dtype, device=(CPU, 0))


@unittest.skipUnless(IS_EMULATED, "this build has no emulated device")
class Placed(unittest.TestCase):
    def test_a_batch_is_that_of_the_host_bit_by_bit(self):
        for dtype, error in (("float32", 1e-5), ("float16", 4e-3), ("bfloat16", 3e-2)):
            for stored in ("f32", "bf16"):
                on_card = batch(cache(format=stored), dtype, put)
                from_host = batch(cache(format=stored), dtype, put_on_host)
                on_cpu = batch(cache(format=stored, device="cpu"), dtype, put_on_host)
                for card, host, cpu in zip(on_card, from_host, on_cpu, strict=True):
                    numpy.testing.assert_array_equal(card, host)
                    numpy.testing.assert_allclose(card, cpu, rtol=error, atol=error)

    def test_every_order_of_axes_is_used_in_place(self):
        tokens = 6
        q, k, v = rows(1, tokens, HEADS), rows(2, tokens, KV_HEADS), rows(3, tokens, KV_HEADS)
        expected = None
        for axes in ("thd", "bshd", "sbhd", "bhsd"):
            of = cache(layers=1)
            of.start(0)
            placed = [put(arranged(x, axes)) for x in (q, k, v)]
            out = put(arranged(numpy.full_like(q, 7), axes))
            with of.step([(0, tokens)]) as step:
                step.attend(0, *placed, out, axes=axes)
            back = out.memory.swapaxes(1, 2) if axes == "bhsd" else out.memory
            if expected is None:
                expected = back.copy()
                self.assertFalse((expected == 7).any())
            numpy.testing.assert_array_equal(back.reshape(expected.shape), expected)

    def test_a_fused_projection_is_used_in_place(self):
        tokens = 5
        fused = device_memory((tokens, HEADS + 2 * KV_HEADS, DIM), "f4")
        fused[...] = rows(4, tokens, HEADS + 2 * KV_HEADS)
        q, k, v = (Produced(x) for x in numpy.split(fused, [HEADS, HEADS + KV_HEADS], axis=1))
        apart = [put(numpy.ascontiguousarray(x.memory)) for x in (q, k, v)]
        outputs = []
        for given in ((q, k, v), apart):
            of = cache(layers=1)
            of.start(0)
            out = put(numpy.zeros((tokens, HEADS, DIM), dtype="f4"))
            with of.step([(0, tokens)]) as step:
                step.attend(0, *given, out)
            outputs.append(out.memory)
        numpy.testing.assert_array_equal(*outputs)

    def test_tensors_of_both_places_mix(self):
        of = cache(layers=1)
        of.start(0)
        q, k = rows(1, 3, HEADS), rows(2, 3, KV_HEADS)
        with of.step([(0, 3)]) as step:
            of_host = step.attend(0, q, k, k)
            self.assertIsInstance(of_host, numpy.ndarray)
            out = put(numpy.zeros_like(q))
            step.attend(0, q, put(k), k, out)
            numpy.testing.assert_array_equal(out.memory, of_host)
            host_out = numpy.zeros_like(q)
            step.attend(0, put(q), out=host_out)
            numpy.testing.assert_array_equal(host_out, of_host)
        # Into host memory, which a gather fills before it returns.
        numpy.testing.assert_array_equal(of.gather(0, 0, "k")[0], k)

    def test_memory_is_given_back_after_the_call(self):
        of = cache(layers=1)
        of.start(0)
        q, k = put(rows(1, 3, HEADS)), put(rows(2, 3, KV_HEADS))
        out = put(rows(3, 3, HEADS))
        with of.step([(0, 3)]) as step:
            step.attend(0, q, k, k, out)
            self.assertEqual([x.given_back for x in (q, k, out)], [1, 2, 1])
            with self.assertRaises(kvblock.PlanError):
                step.attend(9, q, k, k, out)
            self.assertEqual([x.given_back for x in (q, k, out)], [2, 4, 2])
        self.assertEqual(of.seq_len(0), 3)

    def test_states_are_used_in_place(self):
        shape = (3, 5)  # No multiple of 16 bytes: entries begin anywhere.
        states = kvblock.States(layers=[0], parts=[(shape, "float32")], slots=8, snapshots=4)
        values = numpy.arange(2 * 15, dtype="f4").reshape(2, *shape)
        for dtype in ("float32", "float16", "bfloat16"):
            of = cache(layers=1, states=[states])
            for seq in (0, 1):
                of.start(seq, [seq, 2, 3])
            inputs = [(seq, [seq, 2, 3]) for seq in (0, 1)]
            given, out = put(values, dtype), put(numpy.full_like(values, 7), dtype)
            with of.step(inputs) as step:
                self.assertIs(step.read_state(0, 0, out), out)
                self.assertEqual(decoded(out.memory, dtype).max(), 0)
                step.write_state(0, 0, given)
                apart = Produced(given.memory.swapaxes(1, 2), dtype)
                there = put(values, dtype, device=(CUDA, 1))
                for tensor, why in ((apart, "strides"), (there, "cuda:1, the cache on emulated")):
                    with self.assertRaisesRegex(ValueError, why):
                        step.write_state(0, 0, tensor)
            self.assertEqual([x.given_back for x in (given, out)], [1, 1])
            step = of.step([(seq, [4]) for seq in (1, 0)])
            step.read_state(0, 0, out)
            numpy.testing.assert_array_equal(decoded(out.memory, dtype), values[::-1])
            step.roll_back()
            # Through a snapshot, into host memory.
            of.release(1)
            self.assertEqual(of.start(2, [1, 2, 3, 9]), 3)
            step = of.step([(2, [9])])
            numpy.testing.assert_array_equal(step.read_state(0, 0)[0], values[1])

    def test_an_output_without_rows_is_refused_by_the_plan(self):
        of = cache(layers=1)
        of.start(0)
        with of.step([(0, 1)]) as step:
            step.write(0, put(rows(1, 1, KV_HEADS)), put(rows(1, 1, KV_HEADS)))
            out = Produced(device_memory((1, 0, KV_HEADS, DIM), "f4"))
            with self.assertRaises(kvblock.PlanError):
                step.gather(0, "k", out)


@unittest.skipUnless(IS_EMULATED, "this build has no emulated device")
class Refused(unittest.TestCase):
    def setUp(self):
        self.cache = cache(layers=1)
        self.cache.start(0)
        self.step = self.cache.step([(0, 3)])
        self.q, self.k = put(rows(1, 3, HEADS)), put(rows(2, 3, KV_HEADS))
        self.out = put(rows(3, 3, HEADS))

    def refuses(self, error, words, q=None, k=None, out=None, step=None):
        q, k, out = q or self.q, k or self.k, out or self.out
        before = out.memory.copy()
        with self.assertRaisesRegex(error, words):
            (step or self.step).attend(0, q, k, self.k, out)
        numpy.testing.assert_array_equal(out.memory, before)

    def test_another_device(self):
        there = put(rows(1, 3, HEADS), device=(CUDA, 1))
        self.refuses(ValueError, "q is on cuda:1, the cache on emulated", q=there)
        self.refuses(ValueError, "out is on cuda:1, the cache on emulated", out=there)
        opencl = put(rows(2, 3, KV_HEADS), device=(OPENCL, 0))
        self.refuses(TypeError, "k is on a device of type 4 of DLPack", k=opencl)
        on_cpu = cache(layers=1, device="cpu")
        on_cpu.start(0)
        with on_cpu.step([(0, 3)]) as step:
            self.refuses(ValueError, "q is on cuda:0, the cache on cpu", step=step)
            step.write(0, rows(1, 3, KV_HEADS), rows(1, 3, KV_HEADS))

    def test_a_producer_that_contradicts_itself(self):
        for said, given in (((CUDA, 0), (CPU, 0)), ((CPU, 0), (CUDA, 0)), ((CUDA, 0), (CUDA, 1))):
            q = put(rows(1, 3, HEADS), device=said, imported_as=given)
            self.refuses((TypeError, ValueError), "device", q=q)

    def test_one_that_does_not_say_where_it_is(self):
        class Old:
            shape = self.q.shape

            def __dlpack__(this):
                return self.q.__dlpack__()

        self.refuses(TypeError, "not where its __dlpack_device__ says", q=Old())

    def test_an_address_that_kernels_cannot_read(self):
        for offset in (4, 8):
            q = Produced(device_memory((3, HEADS, DIM), "f4", offset))
            self.refuses(ValueError, f"q begins at 0x[0-9a-f]*{offset}: .* multiple of 16", q=q)
            self.refuses(ValueError, f"out begins at 0x[0-9a-f]*{offset}: ", out=q)

    def test_rows_that_lie_apart(self):
        apart = put(rows(1, HEADS, 3).swapaxes(0, 1))
        self.refuses(ValueError, "q: the heads of a token are 48 elements apart", q=apart)
        self.refuses(ValueError, "out: the heads of a token are 48 ", out=apart)

    def test_an_output_that_nothing_here_can_allocate(self):
        with self.assertRaisesRegex(TypeError, "out= is expected: q is on a device"):
            self.step.attend(0, self.q, self.k, self.k)

    def test_an_output_that_is_an_input(self):
        with self.assertRaisesRegex(ValueError, "shares memory"):
            self.step.attend(0, self.q, self.k, self.k, Produced(self.q.memory))

    def test_wrong_types_and_shapes(self):
        wide = Produced(device_memory((3, KV_HEADS, DIM), "f4"), "float64")
        self.refuses(TypeError, "k has type float64", k=wide)
        self.refuses(ValueError, "q has shape", q=Produced(device_memory((3, DIM), "f4")))
        self.refuses(kvblock.PlanError, "", q=put(rows(1, 2, HEADS)))


@unittest.skipUnless(IS_EMULATED, "this build has no emulated device")
class Streams(unittest.TestCase):
    def test_a_producer_is_told_the_stream(self):
        for settings, handle, said in (({}, 0, 1), ({"stream": 1}, 0, 1), ({"stream": 77}, 77, 77)):
            of = cache(layers=1, **settings)
            self.assertEqual(of.stream, handle)
            of.start(0)
            k = put(rows(1, 3, KV_HEADS))
            with of.step([(0, 3)]) as step:
                step.write(0, k, k)
            self.assertEqual(k.streams, [said, said])
            out = put(numpy.zeros((1, 3, KV_HEADS, DIM), dtype="f4"))
            of.gather(0, 0, "v", out)
            self.assertEqual(out.streams, [said])
            numpy.testing.assert_array_equal(out.memory[0], k.memory)

    def test_host_memory_has_no_stream(self):
        of = cache(layers=1)
        of.start(0)
        k = put_on_host(rows(1, 3, KV_HEADS))
        with of.step([(0, 3)]) as step:
            step.write(0, k, k)
        self.assertEqual(k.streams, [None, None])

    def test_a_stream_is_an_object_or_a_handle(self):
        class Protocol:
            def __cuda_stream__(self):
                return (0, 0x30)

        of_torch, of_cupy = types.SimpleNamespace(cuda_stream=16), types.SimpleNamespace(ptr=32)
        for stream, handle in ((of_torch, 16), (of_cupy, 32), (Protocol(), 0x30), (64, 64), (0, 0)):
            self.assertEqual(cache(stream=stream).stream, handle)

    def test_a_stream_stays_open_as_long_as_the_cache(self):
        class Stream:
            ptr = 32

        stream = Stream()
        alive, of = weakref.ref(stream), cache(stream=stream)
        del stream
        gc.collect()
        self.assertIsNotNone(alive())
        del of
        gc.collect()
        self.assertIsNone(alive())

    def test_what_is_no_stream_is_refused(self):
        for stream, error, words in (
            (2, ValueError, "per-thread"),
            (types.SimpleNamespace(cuda_stream=2), ValueError, "per-thread"),
            (-1, ValueError, "stream=-1"),
            (1 << 64, ValueError, "stream=18446744073709551616"),
            ("fast", TypeError, "stream=fast: a stream of torch or cupy"),
            (1.5, TypeError, "stream=1.5"),
        ):
            with self.assertRaisesRegex(error, words):
                cache(stream=stream)
        with self.assertRaisesRegex(ValueError, "the cache is on cpu"):
            cache(device="cpu", stream=0)
        self.assertIsNone(cache(device="cpu").stream)


if torch is not None:

    class OnCard(torch.Tensor):
        """A tensor of torch that says that it is on a device."""

        index, copies = 0, 0
        is_cpu, is_cuda = False, True

        @property
        def device(self):
            return torch.device("cuda", self.index)

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function in (torch.Tensor.clone, torch.Tensor.contiguous):
                OnCard.copies += 1
            return super().__torch_function__(function, types, args, kwargs or {})

    class OnNext(OnCard):
        index = 1


class Card:
    """What torch knows of CUDA."""

    def __init__(self, stream=0, is_capturing=False, is_initialized=True):
        self.stream, self.is_capturing, self.asked = stream, is_capturing, []
        self.patches = [
            mock.patch("torch.cuda.current_stream", self.current_stream),
            mock.patch("torch.cuda.is_current_stream_capturing", lambda: self.is_capturing),
            mock.patch("torch.cuda.is_initialized", lambda: is_initialized),
        ]

    def current_stream(self, device):
        self.asked.append(device)
        return types.SimpleNamespace(cuda_stream=self.stream)

    def __enter__(self):
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *_):
        for patch in self.patches:
            patch.stop()


@unittest.skipUnless(IS_EMULATED and torch, "no emulated device in this build, or no torch")
class Torch(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(1)
        OnCard.copies = 0
        self.card = Card()
        for context in (torch.no_grad(), self.card):
            context.__enter__()
            self.addCleanup(context.__exit__, None, None, None)

    def one(self, tokens=4, dtype=None, **settings):
        of = cache(layers=1, **settings)
        of.start(0)
        heads = (HEADS, KV_HEADS, KV_HEADS)
        return of, [torch.randn(tokens, number, DIM, dtype=dtype) for number in heads]

    def test_outputs_are_on_the_device_of_q(self):
        for dtype, error in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)):
            for axes in (None, "bhsd", "bshd", "sbhd"):
                of, (q, k, v) = self.one(dtype=dtype)
                if axes:
                    q, k, v = (x[:, None] if axes == "sbhd" else x[None] for x in (q, k, v))
                if axes == "bhsd":
                    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
                with of.step([(0, 4)]) as step:
                    out = step.attend(0, *(x.as_subclass(OnCard) for x in (q, k, v)), axes=axes)
                self.assertIs(type(out), OnCard)
                self.assertEqual((out.shape, out.dtype), (q.shape, dtype))
                on_cpu, _ = self.one(device="cpu")
                with on_cpu.step([(0, 4)]) as step:
                    expected = step.attend(0, q, k, v, axes=axes)
                out = out.as_subclass(torch.Tensor)
                torch.testing.assert_close(out, expected, rtol=error, atol=error)
        self.assertEqual(OnCard.copies, 0)

    def test_rows_are_copied_where_they_cannot_be_used(self):
        of, (q, k, v) = self.one(tokens=3)
        with of.step([(0, 3)]) as step:
            expected = step.attend(0, q, k, v)
            memory = torch.zeros(q.numel() + 1)
            odd = memory[1:].view(q.shape)
            odd.copy_(q)
            self.assertNotEqual(odd.data_ptr() % 16, 0)
            apart = q.transpose(0, 1).contiguous().transpose(0, 1)
            for number, given in enumerate((odd, apart), 1):
                out = torch.zeros_like(q).as_subclass(OnCard)
                self.assertIs(step.attend(0, given.as_subclass(OnCard), out=out), out)
                torch.testing.assert_close(out.as_subclass(torch.Tensor), expected, rtol=0, atol=0)
                self.assertEqual(OnCard.copies, number)
            for wrong, words in ((odd, "out begins at 0x"), (apart, "out: the heads of a")):
                with self.assertRaisesRegex(ValueError, words):
                    step.attend(0, q, out=wrong.as_subclass(OnCard))

    def test_another_current_stream_is_ordered(self):
        for current, settings in ((0, {}), (9, {}), (9, {"stream": 9}), (7, {"stream": 9})):
            of, (q, k, v) = self.one(**settings)
            self.card.stream, self.card.asked = current, []
            with of.step([(0, 4)]) as step:
                out = step.attend(0, *(x.as_subclass(OnCard) for x in (q, k, v)))
                step.write(0, *(x.as_subclass(OnCard) for x in (k, v)))
                torch.testing.assert_close(step.attend(0, q), out.as_subclass(torch.Tensor))
                with self.assertRaises(kvblock.PlanError):
                    step.attend(1, q.as_subclass(OnCard))
            back = torch.zeros(1, 4, KV_HEADS, DIM)
            of.gather(0, 0, "k", back.as_subclass(OnCard))
            torch.testing.assert_close(back[0], k, rtol=0, atol=0)
            # Tensors in host memory ask for none.
            self.assertEqual(self.card.asked, [0] * 4)
            self.card.stream = 0

    def test_a_cache_works_on_the_stream_of_its_maker(self):
        for current, named, handle in ((5, None, 5), (1, None, 0), (5, 6, 6)):
            self.card.stream = current
            self.assertEqual(cache(stream=named).stream, handle)
        self.card.stream = 2
        with self.assertRaisesRegex(ValueError, "per-thread"):
            cache()
        with Card(stream=5, is_initialized=False):
            self.assertEqual(cache().stream, 0)

    def test_captures_are_refused(self):
        of, (q, k, v) = self.one()
        on_card = [x.as_subclass(OnCard) for x in (q, k, v)]
        with of.step([(0, 4)]) as step:
            self.card.is_capturing = True
            for call in (
                lambda: step.attend(0, *on_card),
                lambda: step.write(0, *on_card[1:]),
                lambda: step.gather(0, "k", torch.zeros(1, 4, KV_HEADS, DIM).as_subclass(OnCard)),
            ):
                with self.assertRaisesRegex(kvblock.StateError, "captures a CUDA graph"):
                    call()
            self.card.is_capturing = False
            step.attend(0, *on_card)

    def test_devices_are_compared(self):
        of, (q, k, v) = self.one()
        with of.step([(0, 4)]) as step:
            with self.assertRaisesRegex(ValueError, "v is on cuda:1, the cache on emulated"):
                step.write(0, k, v.as_subclass(OnNext))
            with self.assertRaisesRegex(TypeError, "q is on meta: .* on the CUDA device"):
                step.attend(0, torch.empty(4, HEADS, DIM, device="meta"), k, v)
            step.write(0, k, v)
        of, _ = self.one(device="cpu")
        with of.step([(0, 4)]) as step:
            with self.assertRaisesRegex(ValueError, "k is on cuda:0, the cache on cpu"):
                step.write(0, k.as_subclass(OnCard), v)
            step.write(0, k, v)

    def test_only_tensors_of_torch_are_used_by_address(self):
        of, (q, k, v) = self.one()
        like = types.SimpleNamespace(
            is_cpu=False, is_cuda=True, device=torch.device("cuda", 0), dtype=torch.float32,
            shape=(4, HEADS, DIM), stride=q.stride, data_ptr=q.data_ptr, requires_grad=False,
        )
        with of.step([(0, 4)]) as step:
            with self.assertRaisesRegex(TypeError, "q is a SimpleNamespace"):
                step.attend(0, like, k, v)
            step.write(0, k, v)


def fake_torch(stream):
    """A module that says of CUDA what torch says, without torch: its driver would be the test's."""
    module = types.ModuleType("torch")

    class Tensor:
        is_cpu, is_cuda, requires_grad = False, True, False
        device, dtype = types.SimpleNamespace(index=0), numpy.dtype("float32")

        def __init__(self, memory):
            self.memory, self.shape = memory, memory.shape

        def data_ptr(self):
            return self.memory.ctypes.data

        def stride(self):
            return [stride // self.memory.itemsize for stride in self.memory.strides]

    module.Tensor, module.float32 = Tensor, Tensor.dtype
    module.float16 = module.bfloat16 = module.contiguous_format = object()
    module.cuda = types.SimpleNamespace(
        is_initialized=lambda: True,
        is_current_stream_capturing=lambda: False,
        current_stream=lambda _device: types.SimpleNamespace(cuda_stream=stream[0]),
    )
    sys.modules["torch"] = module
    return Tensor


def submit_to_driver(log):
    """Runs in a process of its own: the driver of the test logs what each call submits."""
    current = [0]
    tensor = fake_torch(current)
    shape, kv_shape = (3, HEADS, DIM), (3, KV_HEADS, DIM)
    rows = {name: device_memory(shape, "f4") for name in ("q", "out")}
    rows |= {name: device_memory(kv_shape, "f4") for name in "kv"}
    for made_on, now, place, settings in (
        (0, 0, tensor, {}),
        (0, 9, tensor, {}),
        (9, 9, tensor, {}),
        (5, 9, tensor, {"stream": 7}),
        (0, 0, Produced, {}),
        (0, 0, Produced, {"stream": 7}),
        (0, 0, lambda memory: memory, {}),
    ):
        current[0] = made_on
        of = cache(layers=1, device="cuda:0", **settings)
        current[0] = now
        of.start(0)
        with of.step([(0, 3)]) as step:
            q, k, v, out = (place(rows[name]) for name in ("q", "k", "v", "out"))
            with open(log, "a", encoding="utf-8") as file:
                file.write("call\n")
            step.attend(0, q, k, v, out)
            with open(log, "a", encoding="utf-8") as file:
                file.write("done\n")
    submit_planes(log, current, tensor)


def submit_planes(log, current, tensor):
    """Goes on with the calls of TransformerEngine, and tensors over their cache."""

    @contextlib.contextmanager
    def noted():
        with open(log, "a", encoding="utf-8") as file:
            file.write("call\n")
        yield
        with open(log, "a", encoding="utf-8") as file:
            file.write("done\n")

    config = kvblock._kvblock.InferenceConfig(2, 8, KV_HEADS, DIM, "f32")
    rows = device_memory((3, KV_HEADS, DIM), "f4")
    for now, place in ((0, tensor), (9, tensor), (9, lambda memory: memory)):
        current[0] = 0
        of = kvblock._kvblock.InferenceParams(config, device="cuda:0")
        of.allocate_memory(1)
        of.pre_step([(0, 3)])
        current[0] = now
        with noted():
            of.step(1, place(rows), place(rows), "thd")
    k, v = of.planes(1)
    for stream in (1, None, -1, 9, 2):
        with noted():
            capsule = k.__dlpack__(stream=stream, max_version=(1, 0))
            del capsule
    kept = v.__dlpack__(stream=-1)
    del k, v
    with noted():
        del of
    with noted():
        del kept


@unittest.skipUnless(COMPILER and sys.platform == "linux", "there is no C++ compiler")
class Order(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with tempfile.TemporaryDirectory() as folder:
            library, log = f"{folder}/libcuda.so", f"{folder}/log"
            flags = ["-std=c++17", "-shared", "-fPIC", "-O1", "-o", library]
            subprocess.run([COMPILER, *flags, DRIVER], check=True)
            given = {"LD_LIBRARY_PATH": folder, "KV_TEST_LOG": log, "XDG_CACHE_HOME": folder}
            command = [sys.executable, __file__, SUBMIT, log]
            subprocess.run(command, check=True, env=os.environ | given)
            lines = pathlib.Path(log).read_text(encoding="utf-8").splitlines()
        cls.calls = []
        for line in lines:
            if line == "call":
                cls.calls.append([])
                is_noted = True
            elif line == "done":
                is_noted = False
            elif cls.calls and is_noted:
                name, *handles = line.split()
                cls.calls[-1].append((name, *map(int, handles)))

    def launches(self, number, stream):
        """Returns what a call submits before its launches, and what after; all are on a stream."""
        call = self.calls[number]
        places = [place for place, (name, *_) in enumerate(call) if name == "launch"]
        self.assertTrue(places)
        self.assertEqual({call[place] for place in places}, {("launch", stream, 0)})
        return call[: places[0]], call[places[-1] + 1 :]

    def test_work_on_the_stream_of_the_caller_needs_no_events(self):
        for number, stream in ((0, 0), (2, 9)):
            self.assertEqual(self.launches(number, stream), ([], []))

    def test_work_is_between_that_of_another_stream(self):
        for number, ours, other in ((1, 0, 9), (3, 7, 9)):
            before, after = self.launches(number, ours)
            (record, first, event), wait = before[:2]
            self.assertEqual((record, first), ("record", other))
            self.assertEqual(wait, ("wait", ours, event))
            (record, first, event), wait = after[:2]
            self.assertEqual((record, first), ("record", ours))
            self.assertEqual(wait, ("wait", other, event))
            self.assertNotIn("synchronize", {name for name, *_ in before + after})

    def test_a_call_waits_for_tensors_of_others_unless_the_stream_is_named(self):
        before, after = self.launches(4, 0)
        (record, stream, event), wait = after
        self.assertEqual((before, record, stream), ([], "record", 0))
        self.assertEqual(wait, ("synchronize", event, 0))
        self.assertEqual(self.launches(5, 7), ([], []))

    def test_a_call_waits_for_an_output_in_host_memory(self):
        _, after = self.launches(6, 0)
        self.assertEqual([name for name, *_ in after], ["record", "synchronize"])

    def test_a_write_into_memory_that_torch_reads_is_between_its_work(self):
        self.assertEqual(self.launches(7, 0), ([], []))
        # Of rows on the device, and of rows in host memory.
        for number in (8, 9):
            before, after = self.launches(number, 0)
            (record, first, event), wait = before[:2]
            self.assertEqual((record, first, wait), ("record", 9, ("wait", 0, event)))
            (record, first, event), wait = after[-2:]
            self.assertEqual((record, first, wait), ("record", 0, ("wait", 9, event)))

    def test_a_consumer_of_a_plane_is_behind_the_cache(self):
        of_same, without, of_itself, of_other, per_thread = self.calls[10:15]
        # The legacy default stream, which is the cache's own, is 1 or is not named.
        self.assertEqual((of_same, without, of_itself), ([], [], []))
        (record, stream, event), wait = of_other
        self.assertEqual((record, stream, wait), ("record", 0, ("wait", 9, event)))
        (record, stream, event), wait = per_thread
        self.assertEqual((record, stream, wait), ("record", 0, ("synchronize", event, 0)))

    def test_memory_is_freed_with_its_last_tensor_after_all_work_of_the_device(self):
        of_cache, of_tensor = ([name for name, *_ in call] for call in self.calls[15:17])
        # K is freed with the cache, V with the tensor.
        self.assertIn("free", of_cache)
        self.assertIn("finish", of_cache)
        self.assertEqual([name for name in of_tensor if name != "synchronize"], ["finish", "free"])


if __name__ == "__main__":
    if SUBMIT in sys.argv:
        submit_to_driver(sys.argv[-1])
    else:
        unittest.main()
