"""llama.cpp's attention on the CPU: ggml's operations, from the libraries of `llama-cpp-python`."""
import ctypes
import importlib.metadata
import importlib.util
import os
from ctypes import POINTER, c_bool, c_float, c_int, c_int64, c_size_t, c_void_p
from typing import Any

import numpy

from case import Case, Prepared, aligned

# enum ggml_type
TYPES = {"f32": 0, "f16": 1, "q8_0": 8, "bf16": 30}
# What llama.cpp stores a case's K and V in: 16 bits may be f16 too, its own default.
STORED = {"f32": ("f32",), "bf16": ("f16", "bf16"), "q8_0": ("q8_0",)}
NODES = 512


class InitParams(ctypes.Structure):
    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


def load() -> tuple[Any, Any]:
    """ggml's own part and its CPU backend, with the types of what is called."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise ImportError("No module named 'llama_cpp'")
    folder = os.path.join(os.path.dirname(spec.origin), "lib")
    base = ctypes.CDLL(os.path.join(folder, "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
    cpu = ctypes.CDLL(os.path.join(folder, "libggml-cpu.so"))
    p, f = c_void_p, c_float
    for library, name, result, arguments in (
        (base, "ggml_init", p, [InitParams]),
        (base, "ggml_free", None, [p]),
        (base, "ggml_tensor_overhead", c_size_t, []),
        (base, "ggml_graph_overhead_custom", c_size_t, [c_size_t, c_bool]),
        (base, "ggml_row_size", c_size_t, [c_int, c_int64]),
        (base, "ggml_nbytes", c_size_t, [p]),
        (base, "ggml_new_tensor", p, [p, c_int, c_int, POINTER(c_int64)]),
        (base, "ggml_flash_attn_ext", p, [p, p, p, p, p, f, f, f]),
        (base, "ggml_mul_mat", p, [p, p, p]),
        (base, "ggml_soft_max_ext", p, [p, p, p, f, f]),
        (base, "ggml_new_graph_custom", p, [p, c_size_t, c_bool]),
        (base, "ggml_build_forward_expand", None, [p, p]),
        (base, "ggml_quantize_chunk", c_size_t, [c_int, p, p, c_int64, c_int64, c_int64, p]),
        (base, "ggml_backend_cpu_buffer_from_ptr", p, [p, c_size_t]),
        (base, "ggml_backend_tensor_alloc", c_int, [p, p, p]),
        (base, "ggml_backend_alloc_ctx_tensors", p, [p, p]),
        (base, "ggml_backend_buffer_free", None, [p]),
        (base, "ggml_backend_tensor_get", None, [p, p, c_size_t, c_size_t]),
        (base, "ggml_backend_graph_compute", c_int, [p, p]),
        (cpu, "ggml_backend_cpu_init", p, []),
        (cpu, "ggml_backend_cpu_set_n_threads", None, [p, c_int]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return base, cpu


class Graph:
    """Operations over arrays of ours, and memory for what they give."""

    def __init__(self, base: Any, backend: int, case: Case) -> None:
        self.base, self.backend, self.case = base, backend, case
        size = base.ggml_tensor_overhead() * NODES
        size += base.ggml_graph_overhead_custom(NODES, False)
        self.context = base.ggml_init(InitParams(size, None, True))
        self.arrays: list[Any] = []
        self.buffers: list[int] = []
        self.outputs: list[int] = []
        self.graph = 0

    def tensor(self, kind: str, array: Any, dims: tuple[int, ...]) -> int:
        """A tensor in place; `dims` are innermost last, as numpy has them."""
        shape = (c_int64 * 4)(*reversed(dims))
        tensor = self.base.ggml_new_tensor(self.context, TYPES[kind], 4, shape)
        assert self.base.ggml_nbytes(tensor) == array.nbytes
        buffer = self.base.ggml_backend_cpu_buffer_from_ptr(array.ctypes.data, array.nbytes)
        self.base.ggml_backend_tensor_alloc(buffer, tensor, array.ctypes.data)
        self.arrays.append(array)
        self.buffers.append(buffer)
        return tensor

    def finish(self, outputs: list[int]) -> "Graph":
        self.outputs = outputs
        self.graph = self.base.ggml_new_graph_custom(self.context, NODES, False)
        for output in outputs:
            self.base.ggml_build_forward_expand(self.graph, output)
        self.buffers.append(self.base.ggml_backend_alloc_ctx_tensors(self.context, self.backend))
        if not self.buffers[-1]:
            raise MemoryError("no memory for the operations' results")
        return self

    def run(self) -> None:
        if self.base.ggml_backend_graph_compute(self.backend, self.graph) != 0:
            raise RuntimeError("ggml could not compute the graph")

    def result(self) -> Any:
        parts = []
        for output in self.outputs:
            part = numpy.empty(self.base.ggml_nbytes(output) // 4, dtype=numpy.float32)
            self.base.ggml_backend_tensor_get(output, part.ctypes.data, 0, part.nbytes)
            parts.append(part)
        return numpy.concatenate(parts)

    def __del__(self) -> None:
        for buffer in self.buffers:
            self.base.ggml_backend_buffer_free(buffer)
        self.base.ggml_free(self.context)


class Flash(Graph):
    """`ggml_flash_attn_ext`, whose results are [batch, q_len, q_heads, head_dim]."""

    def output(self) -> Any:
        return self.result()


class Products(Graph):
    """Two products and a softmax; results are [batch, q_heads, q_len, head_dim]."""

    def output(self) -> Any:
        case = self.case
        out = self.result().reshape(case.batch, case.q_heads, case.q_len, case.head_dim)
        return out.transpose(0, 2, 1, 3)


class Peer:
    def __init__(self, threads: int) -> None:
        self.base, cpu = load()
        self.version = "of llama-cpp-python " + importlib.metadata.version("llama-cpp-python")
        self.backend = cpu.ggml_backend_cpu_init()
        cpu.ggml_backend_cpu_set_n_threads(self.backend, threads)

    def prepare(self, case: Case, arrays: dict[str, Any]) -> Prepared:
        q = widened(arrays["q"], case.dtype)
        for kind in STORED[case.format]:
            k, v = (self.stored(case, arrays[name], kind) for name in "kv")
            yield f"ggml {kind}", lambda: self.flash(case, kind, q, k, v, 1)
            # One sequence at a time: ggml cuts a context in parts only for one alone.
            if case.batch > 1 and kind in ("f32", "f16"):
                yield f"ggml {kind} each", lambda: self.flash(case, kind, q, k, v, case.batch)
            if kind != "q8_0" and case.scores_fit(4):
                yield f"ggml {kind} matmul", lambda: self.products(case, kind, q, k, v)

    def stored(self, case: Case, array: Any, kind: str) -> Any:
        """K or V in another type: [rows, head_dim] as ggml lays it out."""
        if kind == case.dtype:
            return array
        values = widened(array, case.dtype)
        rows = values.nbytes // (4 * case.head_dim)
        row_bytes = self.base.ggml_row_size(TYPES[kind], case.head_dim)
        stored = aligned(rows * row_bytes)
        self.base.ggml_quantize_chunk(
            TYPES[kind], values.ctypes.data, stored.ctypes.data, 0, rows, case.head_dim, None
        )
        return stored

    def mask(self, case: Case, graph: Graph) -> int | None:
        if not case.is_causal:
            return None
        seen = numpy.tri(case.q_len, case.context, case.context - case.q_len, dtype=bool)
        mask = aligned(seen.size * 2).view(numpy.float16).reshape(seen.shape)
        mask[:] = numpy.where(seen, 0, -numpy.inf)
        return graph.tensor("f16", mask, (1, 1, *seen.shape))

    def flash(self, case: Case, kind: str, q: Any, k: Any, v: Any, parts: int) -> Flash:
        graph = Flash(self.base, self.backend, case)
        mask = self.mask(case, graph)
        outputs = []
        for part in range(parts):
            tensors = []
            for name, stored, array in (("q", "f32", q), ("k", kind, k), ("v", kind, v)):
                dims = (case.batch // parts, *case.dims(name)[1:])
                size = array.nbytes // parts
                tensors.append(graph.tensor(stored, array[part * size : (part + 1) * size], dims))
            outputs.append(
                self.base.ggml_flash_attn_ext(graph.context, *tensors, mask, case.scale, 0.0, 0.0)
            )
        graph.finish(outputs)
        return graph

    def products(self, case: Case, kind: str, q: Any, k: Any, v: Any) -> Products:
        graph = Products(self.base, self.backend, case)
        mask = self.mask(case, graph)
        width = numpy.dtype(numpy.uint32 if kind == "f32" else numpy.uint16)
        turned = aligned(v.nbytes)
        shape = case.dims("v")
        turned.view(width).reshape(*shape[:2], shape[3], shape[2])[:] = (
            v.view(width).reshape(shape).swapaxes(2, 3)
        )
        k_tensor = graph.tensor(kind, k, case.dims("k"))
        q_tensor = graph.tensor("f32", q, case.dims("q"))
        v_tensor = graph.tensor(kind, turned, (*shape[:2], shape[3], shape[2]))
        base, context = self.base, graph.context
        scores = base.ggml_mul_mat(context, k_tensor, q_tensor)
        weights = base.ggml_soft_max_ext(context, scores, mask, case.scale, 0.0)
        graph.finish([base.ggml_mul_mat(context, v_tensor, weights)])
        return graph


def widened(array: Any, dtype: str) -> Any:
    """The bytes of an array's values in f32."""
    if dtype == "f32":
        return array
    wide = aligned(array.nbytes * 2)
    numpy.left_shift(array.view(numpy.uint16), 16, out=wide.view(numpy.uint32), dtype=numpy.uint32)
    return wide
