"""The calls of TransformerEngine's KV cache, for programs and layers that make them.

    from kvblock.te import InferenceParams

    params = InferenceParams(8, 4096, num_heads_kv=8, head_dim_k=128, dtype=torch.bfloat16)
    params.allocate_memory(1)
    with params.pre_step(OrderedDict([(seq, tokens)])):  # rolled back if an exception leaves
        params.step(1, k, v, "thd")
        out = params.attend(1, q)

``InferenceParams`` takes the place of TransformerEngine's class of that name. ``KVCacheManager`` is
for the original: ``InferenceParams(.., custom_cache_manager=KVCacheManager)`` of TransformerEngine.

Row ``i`` of every tensor is entry ``i`` of the step, in its order, and a sequence may bring any
number of tokens. ``step`` returns K and V of a layer, which ``page_table`` addresses; ``attend``
reads the cache itself.

On the CPU, ``step`` returns copies of the rows. With ``device="cuda:0"`` it returns the memory of
the cache as tensors, the same ones in every step: a tensor that is kept shows the rows of later
steps, as TransformerEngine's own do, and keeps the memory of its layer. It is only to be read. A
tensor of ``step`` belongs to torch's current stream at the time of the call.
"""

from __future__ import annotations

import itertools
import logging
import operator
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping

import kvblock
from kvblock import _kvblock

try:
    import torch
except ImportError as error:
    raise ImportError("kvblock.te needs torch: pip install 'kvblock[te]'") from error

from kvblock._torch import FORMATS

__all__ = ["InferenceParams", "KVCacheManager", "PreparedStep"]

#: Sequences that no number names have numbers from here on.
FIRST_NAMELESS = 1 << 63

#: Axes of the caller's tensors, and of what ``step`` returns with them.
OUTPUT_FORMATS = {"bshd": "bshd", "sbhd": "sbhd_2bshd", "thd": "thd_2bshd"}


class _Guard:
    """A lock that a fork of its process refuses: there, nobody would ever unlock it."""

    def __init__(self):
        self._lock, self._process = threading.RLock(), os.getpid()

    def __enter__(self):
        if os.getpid() != self._process:
            error = kvblock.ForkedError(
                f"the cache belongs to process {self._process}, whose threads this fork of it does "
                "not have: make a new cache here"
            )
            error.parent = self._process
            raise error
        self._lock.acquire()

    def __exit__(self, *_error):
        self._lock.release()


class InferenceParams:
    """A KV cache that one call a step and one call a layer drive, as TransformerEngine's.

    The arguments are those of the original; ``total_num_pages`` may be any number of pages.
    ``custom_cache_manager`` makes an object with the methods of :class:`KVCacheManager`.

    ``device`` is the CPU or a CUDA device, where the arrays of the step are, too. There all work of
    the cache is submitted to ``stream``, torch's current one unless given; :class:`kvblock.Cache`
    says more. ``threads`` are those of the CPU, torch's unless given.

    All calls may come from any thread.
    """

    def __init__(
        self,
        max_batch_size: int,
        max_sequence_length: int,
        num_heads_kv: int | None = None,
        head_dim_k: int | None = None,
        dtype: torch.dtype | None = None,
        head_dim_v: int | None = None,
        is_paged: bool = False,
        total_num_pages: int | None = None,
        page_size: int | None = None,
        max_ctx_len: int | None = None,
        qkv_format: str = "bshd",
        custom_cache_manager: Callable | None = None,
        *,
        device: str | torch.device = "cpu",
        threads: int | None = None,
        stream=None,
    ):
        config = _config(
            max_batch_size=max_batch_size,
            max_sequence_length=max_sequence_length,
            num_heads_kv=num_heads_kv,
            head_dim_k=head_dim_k,
            dtype=dtype,
            head_dim_v=head_dim_v,
            is_paged=is_paged,
            total_num_pages=total_num_pages,
            page_size=page_size,
            max_ctx_len=max_ctx_len,
            qkv_format=qkv_format,
        )
        self.device: torch.device = _place(device)[1]
        self.max_batch_size: int = config.max_batch_size
        self.max_sequence_length: int = config.max_sequence_length
        self.num_heads_kv: int = config.num_heads_kv
        self.head_dim_k: int = config.head_dim_k
        self.head_dim_v: int = config.head_dim_v
        self.dtype: torch.dtype = dtype
        self.is_paged: bool = config.is_paged
        #: ``None`` when not paged.
        self.total_num_pages: int | None = config.total_num_pages
        self.page_size: int | None = config.page_size
        self.max_ctx_len: int | None = config.max_ctx_len
        settings = dict(
            max_batch_size=self.max_batch_size,
            max_seqlen=self.max_sequence_length,
            num_heads=self.num_heads_kv,
            head_dim_k=self.head_dim_k,
            dtype=self.dtype,
            head_dim_v=self.head_dim_v,
        )
        if self.is_paged:
            settings |= dict(total_num_pages=self.total_num_pages, page_size=self.page_size)
        if custom_cache_manager is None:
            settings |= dict(device=device, threads=threads, stream=stream)
            self.cache_manager = KVCacheManager(**settings)
        elif threads is not None or stream is not None:
            raise TypeError("threads= and stream= are for the built-in cache manager")
        else:
            self.cache_manager = custom_cache_manager(**settings)
            is_own = isinstance(self.cache_manager, KVCacheManager)
            if is_own and self.cache_manager.device != self.device:
                raise ValueError(
                    f"device={device!r}, the cache manager is on {self.cache_manager.device}: "
                    "functools.partial gives it another device="
                )

        self.cache_qkv_format = "bshd"
        self.input_qkv_format = qkv_format
        self.output_qkv_format = OUTPUT_FORMATS[qkv_format]
        #: The batch in the order of the step: tokens after it, and before it.
        self.sequences: OrderedDict = OrderedDict()
        self.sequences_pre_step: OrderedDict = OrderedDict()
        self.batch_size = 0
        # Programs keep these tensors: their memory never moves.
        self.cu_seqlens_q = _zeros(self.max_batch_size + 1, device=self.device)
        self.cu_seqlens_kv = _zeros(self.max_batch_size + 1, device=self.device)
        self.pre_step_seqlens = _zeros(self.max_batch_size, device=self.device)
        self._guard, self._number = _Guard(), 0

    def __repr__(self) -> str:
        if self.is_paged:
            size = f"total_pages={self.total_num_pages}, page_size={self.page_size}"
        else:
            size = f"max_batch_size={self.max_batch_size}, max_seqlen={self.max_sequence_length}"
        return (
            f"dtype={self.dtype}, is_paged={self.is_paged}, {size}, "
            f"num_heads={self.num_heads_kv}, head_dim_k={self.head_dim_k}, "
            f"head_dim_v={self.head_dim_v}"
        )

    def allocate_memory(self, layer_number: int):
        """Gives a layer its memory, zeroed. One that has memory keeps it and its rows."""
        with self._guard:
            return self.cache_manager.allocate_memory(layer_number)

    def pre_step(self, step_dict: Mapping) -> PreparedStep:
        """Ends the step before and prepares the next: ``{sequence: new tokens}``, by row.

        Sequences that ``step_dict`` does not name are finished, unknown ones begin. A call that is
        refused has changed nothing. The answer may be used as a context: an exception that leaves
        it rolls the step back.
        """
        with self._guard:
            step = _entries(step_dict)
            is_own = isinstance(self.cache_manager, KVCacheManager)
            if not is_own:
                self._check(step)
            try:
                rows = OrderedDict(self.cache_manager.pre_step(step))
            except kvblock.DeviceError:
                if is_own:
                    self._clear(self.cache_manager.sequences)
                raise
            before = {id: rows[id] - tokens for id, tokens in step.items() if id in rows}
            if list(rows) != list(step) or any(
                len != self.sequences.get(id, 0) for id, len in before.items()
            ):
                raise kvblock.PlanError(
                    f"{type(self.cache_manager).__name__}.pre_step has answered {dict(rows)} to "
                    f"{dict(step)} after {dict(self.sequences)}: the rows of a step are its "
                    "entries, in their order"
                )
            self.sequences, self.sequences_pre_step = rows, OrderedDict(before)
            self.batch_size = len(step)
            self._fill(step.values())
            self._number += 1
            return PreparedStep(self, self._number)

    def _check(self, step):
        """Refuses a step that the arrays have no room for, for managers that do not."""
        if len(step) > self.max_batch_size:
            raise kvblock.PlanError(
                f"{len(step)} sequences in a step, {self.max_batch_size} is the most"
            )
        for id, tokens in step.items():
            before = self.sequences.get(id, 0)
            if before + tokens > self.max_sequence_length:
                raise kvblock.PlanError(
                    f"sequence {id!r} has {before} tokens and cannot take {tokens} more: "
                    f"{self.max_sequence_length} is the most"
                )

    def _fill(self, tokens):
        """Writes the arrays of a step; past the batch, sums repeat and lengths are 0."""
        rest = self.max_batch_size - self.batch_size
        for sums, lengths in (
            (self.cu_seqlens_q, tokens),
            (self.cu_seqlens_kv, self.sequences.values()),
        ):
            values = [0, *itertools.accumulate(lengths)]
            _fill(sums, values + values[-1:] * rest)
        _fill(self.pre_step_seqlens, [*self.sequences_pre_step.values(), *[0] * rest])

    def _clear(self, sequences):
        """Shows a cache without a step."""
        self.sequences, self.sequences_pre_step = sequences, OrderedDict()
        self.batch_size = len(sequences)
        for array in (self.cu_seqlens_q, self.cu_seqlens_kv, self.pre_step_seqlens):
            array.zero_()
        self._number += 1

    def get_seqlens_pre_step(self) -> torch.Tensor:
        """Returns the tokens of every row before the step: where rotary embeddings start."""
        return self.pre_step_seqlens

    def step(
        self, layer_number: int, new_k: torch.Tensor, new_v: torch.Tensor, qkv_format: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, str]:
        """Writes the keys and values of the step's tokens into one layer.

        ``qkv_format`` names the axes of ``new_k`` and ``new_v``: ``"bshd"``, ``"sbhd"``, both
        padded at the end of a row, or ``"thd"``. Returns K and V, ``cu_seqlens_q``,
        ``cu_seqlens_kv``, ``max_sequence_length`` and the format of queries and cache. K is
        ``[total_num_pages, page_size, heads, dim]`` when paged, where ``cache_manager.page_table``
        has the pages of each row, else ``[batch, max_sequence_length, heads, dim]``.

        In host memory K is a copy of the rows, and zero where the batch has no token. On CUDA it is
        the memory of the cache, with rows of other steps where the batch has no token. When not
        paged, sequences that are not in the order in which they lie are copied there, too.
        """
        with self._guard:
            output = _output_format(qkv_format)
            k, v = self.cache_manager.step(
                layer_number, new_k, new_v, self.cu_seqlens_q, self.cu_seqlens_kv, qkv_format
            )
            self.input_qkv_format, self.output_qkv_format = qkv_format, output
            sums = self.cu_seqlens_q, self.cu_seqlens_kv
            return k, v, *sums, self.max_sequence_length, output

    def attend(
        self,
        layer_number: int,
        q: torch.Tensor,
        out: torch.Tensor | None = None,
        *,
        qkv_format: str | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: list[float] | None = None,
        window: int | None = None,
        causal: bool = True,
    ) -> torch.Tensor:
        """Attends the step's queries over all rows of a layer, this step's included.

        Returns ``out``, a new tensor like ``q`` unless one is given. The axes are those of the last
        ``step`` unless ``qkv_format`` names them. ``scale`` is ``1 / sqrt(head_dim_k)`` unless
        given; ``window`` is the number of tokens before a token's own that it sees.
        """
        with self._guard:
            attend = getattr(self.cache_manager, "attend", None)
            if attend is None:
                name = type(self.cache_manager).__name__
                raise NotImplementedError(f"{name} has no attend(): attend over what step returns")
            options = dict(scale=scale, softcap=softcap, sinks=sinks, window=window, causal=causal)
            return attend(layer_number, q, out, qkv_format or self.input_qkv_format, **options)

    def convert_paged_to_nonpaged(self, layer_number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns K and V of the batch, ``[batch, max_sequence_length, heads, dim]``, paged or not.

        Rows past a length are zero with the built-in cache manager.
        """
        with self._guard:
            if isinstance(self.cache_manager, KVCacheManager):
                return self.cache_manager.convert_paged_to_nonpaged(layer_number)
            planes, batch = self.cache_manager.cache[layer_number], self.batch_size
            if not self.is_paged:
                return tuple(plane[:batch].contiguous() for plane in planes)
            pages = self.cache_manager.page_table[:batch].flatten()
            return tuple(plane[pages].reshape(batch, -1, *plane.shape[2:]) for plane in planes)

    def roll_back(self):
        """Takes the prepared step back: lengths are those before it.

        Sequences it finished stay finished; those it began stay, with length 0, until the next step
        names them or not.
        """
        with self._guard:
            roll_back = getattr(self.cache_manager, "roll_back", None)
            if roll_back is None:
                name = type(self.cache_manager).__name__
                raise NotImplementedError(f"{name} has no roll_back(): reset() ends all sequences")
            roll_back()
            self._clear(OrderedDict(self.cache_manager.sequences))

    def _abandon(self, number):
        """Rolls a step back that its block has left by an exception."""
        with self._guard:
            if number == self._number and hasattr(self.cache_manager, "roll_back"):
                self.roll_back()

    def reset(self):
        """Forgets every sequence. Layers keep their memory, the arrays of the step become zero."""
        with self._guard:
            self.cache_manager.reset()
            self._clear(OrderedDict())


class PreparedStep:
    """A step from ``pre_step`` on: as a context, it is rolled back if an exception leaves it.

    Without an exception nothing happens at its end: the next ``pre_step`` ends the step.
    """

    def __init__(self, params: InferenceParams, number: int):
        self._params, self._number = params, number

    def __enter__(self) -> InferenceParams:
        return self._params

    def __exit__(self, kind, error, trace):
        if kind is not None:
            try:
                self._params._abandon(self._number)
            except kvblock.ForkedError:
                pass  # The step is the parent's, which goes on with it.


class KVCacheManager:
    """What stores K and V, for ``custom_cache_manager=`` of TransformerEngine's InferenceParams.

    Paged where ``page_size`` and ``total_num_pages`` are given. A custom manager has the methods up
    to ``step``, and those after it as far as its programs need them.

    TransformerEngine gives a manager no device: ``functools.partial(KVCacheManager,
    device="cuda:0")`` is one on CUDA, for the original and its layers. ``device``, ``threads`` and
    ``stream`` are those of :class:`InferenceParams`.
    """

    def __init__(
        self,
        *,
        max_batch_size: int,
        max_seqlen: int,
        num_heads: int,
        head_dim_k: int,
        dtype: torch.dtype,
        head_dim_v: int | None = None,
        total_num_pages: int | None = None,
        page_size: int | None = None,
        device: str | torch.device = "cpu",
        threads: int | None = None,
        stream=None,
    ):
        config = _config(
            max_batch_size=max_batch_size,
            max_sequence_length=max_seqlen,
            num_heads_kv=num_heads,
            head_dim_k=head_dim_k,
            dtype=dtype,
            head_dim_v=head_dim_v,
            is_paged=page_size is not None or total_num_pages is not None,
            total_num_pages=total_num_pages,
            page_size=page_size,
        )
        name, self.device = _place(device)
        threads = torch.get_num_threads() if threads is None else threads
        self._blocks = _kvblock.InferenceParams(
            config, device=name, threads=threads, stream=stream
        )
        self.max_batch_size: int = config.max_batch_size
        self.max_seqlen: int = config.max_sequence_length
        self.num_heads: int = config.num_heads_kv
        self.head_dim_k: int = config.head_dim_k
        self.head_dim_v: int = config.head_dim_v
        self.dtype: torch.dtype = dtype
        self.total_num_pages: int | None = config.total_num_pages
        self.page_size: int | None = config.page_size
        self.max_pages_per_seq: int = config.max_pages_per_seq
        #: The batch in the order of the step: tokens after it.
        self.sequences: OrderedDict = OrderedDict()
        #: The layers that have memory: ``cache[layer]`` is K and V, as of ``step``.
        self.cache: _Layers = _Layers(self)
        #: Pages of every row in what ``step`` returns; row ``i`` lies at ``i`` when not paged.
        shape = self.max_batch_size, self.max_pages_per_seq
        self.page_table = _zeros(*shape, device=self.device)
        self.batch_indices_post_step = _zeros(self.max_batch_size, device=self.device)
        _fill(self.batch_indices_post_step, [*range(self.max_batch_size)])
        if not config.is_paged:
            self.page_table += self.batch_indices_post_step[:, None]
        #: The caller's names of the numbers in the cache; new tokens of each row.
        self._names, self._tokens = {}, []
        self._nameless = itertools.count(FIRST_NAMELESS)
        #: K and V of layers as tensors over the memory of a device, which never moves.
        self._planes = {}
        #: Whether row ``i`` lies in slot ``i``, when not paged.
        self._is_in_order = True
        self._guard = _Guard()

    @property
    def stream(self) -> int | None:
        """The handle of the stream on which a cache on CUDA works, ``None`` on the CPU."""
        return self._blocks.stream

    def allocate_memory(self, layer_number: int) -> bool:
        """Gives a layer its memory, zeroed; ``False``, and it keeps its rows, if it has some."""
        layer = _layer(layer_number)
        with self._guard:
            is_new = self._blocks.allocate_memory(layer)
            self.cache._numbers[layer] = None
            return is_new

    def reset(self):
        """Forgets every sequence; layers keep their memory."""
        with self._guard:
            self._blocks.reset()
            self._names, self._tokens = {}, []
            self._follow()

    def pre_step(self, step_dict: Mapping) -> OrderedDict:
        """Ends the step before and prepares the next. Returns the tokens of each row after it."""
        with self._guard:
            step, names = _entries(step_dict), {}
            numbers = {name: number for number, name in self._names.items()}
            for name in step:
                number = _number(name)
                if number is None:
                    number = numbers.get(name)
                if number is None:
                    number = next(self._nameless)
                if number in names:
                    raise kvblock.PlanError(f"sequence {name!r} is named twice in a step")
                names[number] = name
            try:
                self._blocks.pre_step(list(zip(names, step.values())))
            except kvblock.PlanError as error:
                text = str(error)
                for number, name in names.items():
                    if number >= FIRST_NAMELESS:
                        text = text.replace(str(number), repr(name))
                raise kvblock.PlanError(text) from None
            except kvblock.DeviceError:
                self._names |= names
                self._tokens = []
                self._follow()
                raise
            self._names, self._tokens = names, list(step.values())
            self._follow()
            return self.sequences

    def _follow(self):
        """Shows the sequences and the pages that the cache has now."""
        rows = self._blocks.sequences()
        self.sequences = OrderedDict((self._names[number], len) for number, _, len in rows)
        table = torch.frombuffer(self._blocks.page_table(), dtype=torch.int32)
        if self.page_size is not None:
            _copy_to(self.page_table, table.view(self.page_table.shape))
            return
        slots = zip(table.tolist(), self.sequences.values())
        self._is_in_order = all(not len or row == slot for row, (slot, len) in enumerate(slots))

    def step(
        self,
        layer_number: int,
        new_k: torch.Tensor,
        new_v: torch.Tensor,
        cu_new_seqlens: torch.Tensor | None,
        cu_cached_seqlens: torch.Tensor | None,
        qkv_format: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the step's tokens into a layer. Returns K and V as ``InferenceParams.step``.

        Sums in host memory are compared with the step. Those on a device are not: the comparison
        would wait for it.
        """
        layer = _layer(layer_number)
        with self._guard:
            _output_format(qkv_format)
            # A step that was not prepared has no sums: the cache says so.
            if self._tokens:
                _check_sums("cu_new_seqlens", cu_new_seqlens, self._tokens)
                _check_sums("cu_cached_seqlens", cu_cached_seqlens, self.sequences.values())
            self._blocks.step(layer, new_k, new_v, qkv_format)
            axis = {"bshd": 0, "sbhd": 1}.get(qkv_format)
            return self._rows(layer, self.max_batch_size if axis is None else new_k.shape[axis])

    def attend(self, layer_number, q, out=None, qkv_format="bshd", **options) -> torch.Tensor:
        """Attends as ``InferenceParams.attend``."""
        with self._guard:
            layer = _layer(layer_number)
            return self._blocks.attend(layer, q, out, qkv_format=qkv_format, **options)

    def convert_paged_to_nonpaged(self, layer_number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns K and V of the batch, ``[batch, max_seqlen, heads, dim]``; zero past a length."""
        layer = _layer(layer_number)
        with self._guard:
            return self._gather(layer, len(self.sequences), self.max_seqlen)

    def roll_back(self):
        """Takes the prepared step back, as ``InferenceParams.roll_back``."""
        with self._guard:
            self._blocks.roll_back()
            self._tokens = []
            self._follow()

    def _rows(self, layer, batch):
        """Returns K and V of a layer, with its rows where ``page_table`` says."""
        if self.device.type == "cpu":
            return self._copy(layer, batch)
        if self.page_size is None and not self._is_in_order:
            return self._gather(layer, batch, self.max_seqlen)
        if layer not in self._planes:
            # As `_zeros`: one tensor for all modes of torch.
            with torch.inference_mode(False):
                planes = self._blocks.planes(layer)
                self._planes[layer] = tuple(torch.from_dlpack(plane) for plane in planes)
        planes = self._planes[layer]
        return planes if self.page_size is not None else tuple(plane[:batch] for plane in planes)

    def _copy(self, layer, batch):
        """Copies K and V of a layer to where ``page_table`` says their rows are.

        The memory of the cache has a gate that a tensor over it would walk around.
        """
        if self.page_size is None:
            return self._gather(layer, batch, self.max_seqlen)
        counts = [-(-len // self.page_size) for len in self.sequences.values()]
        rows, pages = len(counts), max(counts, default=0)
        gathered = self._gather(layer, rows, pages * self.page_size)
        held = torch.arange(pages) < torch.tensor(counts, dtype=torch.int64)[:, None]
        used = self.page_table[:rows, :pages][held].long()
        pools = self._new(self.total_num_pages, self.page_size, torch.zeros)
        for pool, plane in zip(pools, gathered):
            pool[used] = plane.view(rows, pages, self.page_size, *plane.shape[2:])[held]
        return pools

    def _gather(self, layer, batch, tokens):
        k, v = self._new(batch, tokens, torch.empty)
        self._blocks.gather(layer, k, v)
        return k, v

    def _new(self, outer, tokens, make):
        return tuple(
            make(outer, tokens, self.num_heads, dim, dtype=self.dtype, device=self.device)
            for dim in (self.head_dim_k, self.head_dim_v)
        )

    def get_sequence_count(self) -> int:
        """Returns the number of sequences."""
        return len(self.sequences)

    def get_sequence_lengths(self) -> list[int]:
        """Returns the tokens of each row."""
        return list(self.sequences.values())

    def has_free_page(self) -> bool:
        """Returns whether there is a page that no sequence has; a row when not paged."""
        return self._blocks.num_free_pages() > 0

    def get_page_count(self, seq) -> int:
        """Returns the number of pages of a sequence, 0 for an unknown one."""
        return len(self.get_page_list(seq))

    def get_page_list(self, seq) -> list[int]:
        """Returns the pages of a sequence in token order, none for an unknown one."""
        with self._guard:
            number = _number(seq)
            if number is None:
                numbers = (number for number, name in self._names.items() if name == seq)
                number = next(numbers, None)
            return [] if number is None else self._blocks.pages(number)

    def get_page_table(self, sequences=None) -> torch.Tensor:
        """Returns the page table of the batch, which ``pre_step`` has written."""
        return self.page_table

    def print_cache(self):
        """Logs what is in use, at the level of debugging."""
        logger = logging.getLogger("kvblock.te")
        if not logger.isEnabledFor(logging.DEBUG):
            return
        with self._guard:
            lists = [self.get_page_list(seq) for seq in self.sequences]
            used, free = sum(map(len, lists)), self._blocks.num_free_pages()
            logger.debug("Cache status:")
            logger.debug("  total pages:     %s (used %s, free %s)", used + free, used, free)
            logger.debug("  total sequences: %s", len(self.sequences))
            for row, ((seq, tokens), pages) in enumerate(zip(self.sequences.items(), lists)):
                logger.debug(
                    "  >> batch index %s: seq_id %s, num_tokens %s, num_pages %s, page_list %s",
                    row,
                    seq,
                    tokens,
                    len(pages),
                    pages,
                )

    def __repr__(self) -> str:
        return f"KVCacheManager({self._blocks!r})"


class _Layers(Mapping):
    """The layers of a cache manager that have memory. An item is K and V, as of ``step``."""

    def __init__(self, manager):
        # A cycle would keep the memory of a cache that nobody has any more.
        self._owner, self._numbers = weakref.ref(manager), {}

    def __contains__(self, layer):
        return layer in self._numbers

    def __iter__(self):
        return iter(list(self._numbers))

    def __len__(self):
        return len(self._numbers)

    def __getitem__(self, layer):
        if layer not in self._numbers:
            raise KeyError(layer)
        manager = self._owner()
        if manager is None:
            raise ReferenceError("the cache manager of these layers is gone")
        with manager._guard:
            return manager._rows(_layer(layer), manager.max_batch_size)

    def __repr__(self):
        return f"<layers {list(self)}>"


def _config(*, dtype, is_paged, **arguments):
    """Checks the arguments of a cache."""
    if dtype is not None:
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype={dtype!r}: a torch.dtype is expected")
        if dtype not in FORMATS:
            names = ", ".join(str(known) for known in FORMATS)
            raise kvblock.SpecError(f"dtype={dtype}: one of {names} is expected")
        dtype = FORMATS[dtype]
    return _kvblock.InferenceConfig(dtype=dtype, is_paged=bool(is_paged), **arguments)


def _place(device):
    """Returns the name of a device, and torch's device for tensors there."""
    if device == "emulated":
        return device, torch.device("cuda", 0)
    try:
        place = torch.device(device)
    except RuntimeError:
        place = None  # A name that torch does not know.
    if place is not None and place.type == "cpu":
        return "cpu", torch.device("cpu")
    if place is not None and place.type == "cuda":
        index = torch.cuda.current_device() if place.index is None else place.index
        return f"cuda:{index}", torch.device("cuda", index)
    raise NotImplementedError(
        f"device={device!r}: kvblock.te has its tensors in host memory, device='cpu', or on CUDA, "
        "device='cuda:0'"
    )


def _zeros(*shape, device):
    """Makes an array that may be written under any mode of torch."""
    with torch.inference_mode(False):
        return torch.zeros(*shape, dtype=torch.int32, device=device)


def _fill(array, numbers):
    """Writes numbers into an array, wherever it is."""
    _copy_to(array, torch.tensor(numbers, dtype=torch.int32, device="cpu"))


def _copy_to(array, values):
    """Copies values from host memory, in the order of torch's current stream."""
    # Nobody waits for the device: of memory that is not pinned, the driver has a copy of its own
    # when the call returns.
    array.copy_(values, non_blocking=True)


def _output_format(qkv_format):
    output = OUTPUT_FORMATS.get(qkv_format)
    if output is None:
        names = ", ".join(OUTPUT_FORMATS)
        raise kvblock.PlanError(f"qkv_format={qkv_format!r}: one of {names} is expected")
    return output


def _entries(step_dict):
    """Reads the entries of a step: numbers of tokens may be any integers."""
    step = OrderedDict()
    for name, tokens in dict(step_dict).items():
        try:
            count = operator.index(tokens)
        except TypeError:
            kind = type(tokens).__name__
            message = f"sequence {name!r} brings {tokens!r}, a {kind}: an integer is expected"
            raise TypeError(message) from None
        if not 0 <= count < 1 << 32:
            raise kvblock.PlanError(f"sequence {name!r} brings {count} tokens")
        step[name] = count
    return step


def _number(name):
    """Returns the number that a name of a sequence is, ``None`` for any other name."""
    try:
        number = operator.index(name)
    except TypeError:
        return None
    return number if 0 <= number < FIRST_NAMELESS else None


def _layer(layer_number):
    try:
        layer = operator.index(layer_number)
    except TypeError:
        kind = type(layer_number).__name__
        raise TypeError(f"layer {layer_number!r} is a {kind}: an integer is expected") from None
    if not 0 <= layer < 1 << 63:
        raise kvblock.PlanError(f"layer {layer}: a number from 0 on is expected")
    return layer


def _check_sums(name, given, lengths):
    """Refuses prefix sums that are not those of the prepared step."""
    expected = [0, *itertools.accumulate(lengths)]
    is_known = given is not None and given.device.type == "cpu"
    if is_known and given[: len(expected)].tolist() != expected:
        raise kvblock.PlanError(
            f"{name} is {given.tolist()}, the sums of the prepared step are {expected}"
        )
