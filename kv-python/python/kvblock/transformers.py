"""Models of Hugging Face transformers over a :class:`kvblock.Cache`.

    from kvblock.transformers import KvCache, register

    register()
    model.set_attn_implementation("kvblock")
    model.generate(**inputs, past_key_values=KvCache(model.config, memory="1GiB"))

With ``mode="attend"`` attention runs over the blocks, in the attention function that ``register``
gives to transformers. With ``mode="gather"`` every layer gets all its rows back as tensors, so that
any attention works: it saves memory and no time.
"""

from __future__ import annotations

import copy
import itertools
import math
import weakref

import kvblock
import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask
from transformers.modeling_utils import AttentionInterface

__all__ = ["NAME", "KvCache", "register"]

#: The name of the attention, for ``attn_implementation=`` and ``set_attn_implementation``.
NAME = "kvblock"

#: Sequences below this number are free for a caller of the same cache.
FIRST_SEQUENCE = 1 << 32

#: Tokens that a window keeps beyond its own for a model that goes back, as assisted decoding does.
SLACK = 64

#: What an attention function is given and cannot be computed here.
REFUSED = ("position_bias", "indices", "block_indices", "head_mask")

_FORMATS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def register() -> None:
    """Gives the attention ``"kvblock"`` to transformers, with the mask that it reads."""
    AttentionInterface.register(NAME, attention)
    # Without it the mask is None, and padded rows would be attended to.
    AttentionMaskInterface.register(NAME, flash_attention_mask)


def attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """The attention function of the name ``"kvblock"``, for a key that comes from ``KvCache``."""
    cache = getattr(key, "_kvblock", None)
    if cache is None:
        raise RuntimeError(
            f'attention "{NAME}" got keys that no KvCache in attend mode handed through: pass '
            'past_key_values=KvCache(..), and mode="gather" for models that change keys after it'
        )
    for name in REFUSED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f'attention "{NAME}" does not know {name}')
    if getattr(module, "is_causal", True) is False:
        raise NotImplementedError(f'attention "{NAME}" is causal')
    if dropout:
        raise NotImplementedError(f'attention "{NAME}" has no dropout: call model.eval()')
    sinks = kwargs.get("s_aux")
    out = cache._attend(
        module.layer_idx,
        (query, key, value),
        attention_mask,
        scaling if scaling is not None else 1 / math.sqrt(query.shape[-1]),
        kwargs.get("softcap"),
        None if sinks is None else sinks.float().tolist(),
        kwargs.get("sliding_window"),
    )
    return out, None


class KvLayer(CacheLayerMixin):
    """One layer of a :class:`KvCache`, as transformers asks about it.

    Lengths are columns of the batch, padding included.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: KvCache, index: int):
        super().__init__()
        self.is_initialized = True
        # A cycle would keep the blocks of a cache that nobody has any more.
        self._owner = weakref.ref(cache)
        self._index = index

    @property
    def _cache(self) -> KvCache:
        cache = self._owner()
        if cache is None:
            raise ReferenceError("the KvCache of this layer is gone")
        return cache

    def lazy_initialization(self, key_states, value_states=None):
        pass

    def update(self, key_states, value_states, *args, **kwargs):
        return self._cache._update(self._index, key_states, value_states)

    def get_mask_sizes(self, query_length):
        # The positions of the queries before transformers 5.4, their number since.
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self._cache._columns + new, 0

    def get_seq_length(self, *args):
        return self._cache._columns_of(self._index)

    def get_max_length(self):
        return -1

    # Its name before transformers 5.14.
    get_max_cache_shape = get_max_length

    @property
    def batch_size(self):
        return len(self._cache._rows or ())

    def offload(self):
        raise NotImplementedError("KvCache offloads blocks to tiers=, not layers")

    prefetch = offload

    def reset(self):
        self._cache.reset()

    def reorder_cache(self, beam_idx):
        raise NotImplementedError("KvCache reorders all layers at once")

    crop = batch_repeat_interleave = batch_select_indices = reorder_cache


class KvCache(Cache):
    """The cache of a model of transformers, in blocks.

    ``format`` is the stored format of K and V, the type of the keys unless given. ``memory`` or
    ``num_blocks`` is the size, 1 GiB unless given. ``settings`` are further arguments of
    :class:`kvblock.Cache`, which is made when the first keys come. ``mode`` is ``"attend"`` or
    ``"gather"``.

    ``copy.deepcopy`` forks: both caches share their blocks until one of them writes.
    """

    def __init__(self, config, *, format=None, mode="attend", **settings):
        if mode not in ("attend", "gather"):
            raise ValueError(f'mode={mode!r}: "attend" or "gather" is expected')
        layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
        if not layers:
            raise NotImplementedError("this version of transformers makes no layers of a config")
        own = [
            index
            for index, layer in enumerate(layers)
            if isinstance(layer, CacheLayerMixin) and not hasattr(layer, "conv_states")
        ]
        self._windows = {}
        for index in own:
            window = getattr(layers[index], "sliding_window", None)
            if window is not None:
                self._windows[index] = window
            layers[index] = KvLayer(self, index)
        super().__init__(layers=layers)
        #: The place in the cache of each attention layer.
        self._own = {index: place for place, index in enumerate(own)}
        self._format, self._mode, self._settings = format, mode, settings
        self._slack = settings.pop("window_slack", 0)
        #: The cache in blocks, and the numbers of its sequences: shared with forks.
        self._blocks, self._numbers = None, itertools.count(FIRST_SEQUENCE)
        #: A sequence for each row of the batch; columns so far.
        self._rows, self._columns = None, 0
        self._clear_step()

    def _clear_step(self):
        #: The step of the forward pass that runs, its layers, its columns and its real tokens.
        self._step, self._seen, self._new, self._real = None, set(), 0, None
        #: Layers whose keys were handed through and not attended to.
        self._pending = set()

    @property
    def blocks(self) -> kvblock.Cache | None:
        """The cache in blocks, ``None`` before the first keys have come."""
        return self._blocks

    def stats(self) -> dict:
        """Returns :meth:`kvblock.Cache.stats`, empty before the first keys have come."""
        return {} if self._blocks is None else self._blocks.stats()

    # What a model calls.

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if layer_idx in self._own:
            return self._update(layer_idx, key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def _update(self, layer, key, value):
        if layer in self._pending:
            self._abandon()
            raise RuntimeError(
                "keys of the step before were never attended to: a KvCache in attend mode needs "
                f'attn_implementation="{NAME}"'
            )
        if layer in self._seen:
            # The forward pass before has failed half-way.
            self._abandon()
        self._make(key, value)
        if self._rows is None:
            self._rows = [self._start() for _ in range(key.shape[0])]
        if key.shape[0] != len(self._rows):
            raise ValueError(
                f"the batch has {key.shape[0]} rows, the cache {len(self._rows)}: reset() begins "
                "another batch"
            )
        self._new = key.shape[2]
        if self._mode == "gather":
            return self._gather(layer, key, value)
        self._pending.add(layer)
        # Nothing touches the tensor between here and the attention function.
        key._kvblock = self
        return key, value

    def _make(self, key, value):
        """Makes the cache in blocks: the first keys say what no config says alike for all models."""
        if self._blocks is not None:
            return
        settings = dict(self._settings)
        if "memory" not in settings and "num_blocks" not in settings:
            settings["memory"] = "1GiB"
        if key.device.type == "cpu":
            settings.setdefault("threads", torch.get_num_threads())
        windows = {}
        if self._mode == "attend":
            # Hugging Face counts the token itself.
            windows = {self._own[layer]: w - 1 for layer, w in self._windows.items()}
        self._blocks = kvblock.Cache(
            layers=len(self._own),
            kv_heads=key.shape[1],
            head_dim=key.shape[3],
            head_dim_v=value.shape[3],
            format=self._format or _FORMATS[key.dtype],
            windows=windows,
            window_slack=self._slack,
            **settings,
        )

    def _start(self):
        number = next(self._numbers)
        self._blocks.start(number)
        return number

    def _open(self, counts):
        self._step = self._blocks.step(list(zip(self._rows, counts)))

    def _close(self, layer):
        """Notes that a layer is done, and commits the step after the last one."""
        self._seen.add(layer)
        self._pending.discard(layer)
        if len(self._seen) == len(self._own):
            self._step.commit()
            columns = self._columns + self._new
            self._clear_step()
            self._columns = columns

    def _abandon(self):
        if self._step is not None:
            self._step.roll_back()
        self._clear_step()

    def _columns_of(self, layer):
        is_running = layer in self._seen or layer in self._pending
        return self._columns + (self._new if is_running else 0)

    def _gather(self, layer, key, value):
        place = self._own[layer]
        if self._step is None:
            # A row of padding stays a row: the mask hides it.
            self._open([self._new] * len(self._rows))
        self._step.write(place, key, value, axes="bhsd")
        out = []
        for plane, like in (("k", key), ("v", value)):
            shape = (key.shape[0], self._columns + self._new, like.shape[1], like.shape[3])
            rows = self._step.gather(place, plane, like.new_empty(shape))
            out.append(rows.transpose(1, 2))
        self._close(layer)
        return tuple(out)

    def _attend(self, layer, tensors, mask, scale, softcap, sinks, sliding_window):
        place, (query, key, value) = self._own[layer], tensors
        if sliding_window != self._windows.get(layer):
            raise NotImplementedError(
                f"layer {layer} attends with a window of {sliding_window} tokens, its config says "
                f"{self._windows.get(layer)}"
            )
        batch, heads, new, _ = query.shape
        options = dict(scale=scale, softcap=softcap, sinks=sinks)
        if self._step is None:
            self._real = _real_tokens(mask, batch, new)
            counts = [new] * batch if self._real is None else self._real.sum(1).tolist()
            self._check_cached(mask, counts)
            self._open(counts)
        if self._real is None:
            out = self._step.attend(place, query, key, value, axes="bhsd", **options)
            out = out.transpose(1, 2)
        else:
            # Rows are packed: padding is on the left here, and nowhere in the cache.
            packed = (x.transpose(1, 2)[self._real] for x in tensors)
            rows = self._step.attend(place, *packed, **options)
            out = query.new_zeros(batch, new, heads, value.shape[3])
            out[self._real] = rows
        self._close(layer)
        return out

    def _check_cached(self, mask, counts):
        """Refuses a mask that hides tokens which are in the cache, or shows padding which is not."""
        lengths = [self._blocks.seq_len(number) for number in self._rows]
        shown = [self._columns] * len(lengths)
        if mask is not None:
            shown = [all - new for all, new in zip(mask.sum(1).tolist(), counts)]
        if shown != lengths:
            raise NotImplementedError(
                f"the mask shows {shown} cached tokens of the rows, the cache has {lengths}: a "
                "token that was computed cannot be hidden later. If generate() made the mask of "
                "padding tokens in the text, pass attention_mask="
            )

    # What ``generate`` calls.

    def get_seq_length(self, layer_idx=0):
        return self._columns_of(layer_idx)

    def reset(self):
        """Ends all sequences: the next batch begins anew."""
        self._abandon()
        for number in self._rows or ():
            self._blocks.release(number)
        self._rows, self._columns = None, 0
        for layer in self.layers:
            if not isinstance(layer, KvLayer):
                layer.reset()

    def crop(self, tokens):
        """Removes the last ``-tokens`` columns; before transformers 5.16, all after ``tokens``."""
        tokens = int(tokens)
        remove = -tokens if tokens < 0 else max(self._columns - tokens, 0) if tokens else 0
        if remove > self._columns:
            raise ValueError(f"crop({tokens}) of {self._columns} tokens")
        self._abandon()
        for number in self._rows or ():
            # The last columns are tokens in every row: padding is on the left.
            self._blocks.truncate(number, self._blocks.seq_len(number) - remove)
        self._columns -= remove

    def activate_past_recording(self, *args, **kwargs):
        """Notes that the model will go back: windows keep some tokens more."""
        self._slack = max(self._slack, SLACK)

    def reorder_cache(self, beam_idx):
        self._replace(beam_idx.tolist())

    def batch_select_indices(self, indices):
        self._replace(indices.tolist())

    def batch_repeat_interleave(self, repeats):
        rows = range(len(self._rows or ()))
        self._replace([row for row in rows for _ in range(repeats)])

    def _replace(self, indices):
        """Continues the rows with these indices; a row may come several times, or not at all."""
        if self._rows is None:
            return
        self._abandon()
        before, taken = self._rows, set()
        self._rows = []
        for index in indices:
            if index in taken:
                self._rows.append(self._fork(before[index]))
            else:
                taken.add(index)
                self._rows.append(before[index])
        for index, number in enumerate(before):
            if index not in taken:
                self._blocks.release(number)

    def _fork(self, number):
        child = next(self._numbers)
        self._blocks.fork(number, child)
        return child

    def __deepcopy__(self, memo):
        if self._step is not None:
            raise RuntimeError("a forward pass runs: copy the cache before it or after it")
        fork = KvCache.__new__(KvCache)
        memo[id(self)] = fork
        for name, value in vars(self).items():
            setattr(fork, name, value)
        fork._own, fork._windows = dict(self._own), dict(self._windows)
        fork.layers = [
            KvLayer(fork, index) if isinstance(layer, KvLayer) else copy.deepcopy(layer, memo)
            for index, layer in enumerate(self.layers)
        ]
        fork._rows = None if self._rows is None else [self._fork(number) for number in self._rows]
        fork._clear_step()
        return fork

    def __del__(self):
        try:
            for number in self._rows or ():
                self._blocks.release(number)
        except Exception:  # Another cache over the same blocks has a step open, or Python ends.
            pass

    def __repr__(self):
        rows = len(self._rows or ())
        return f"KvCache({rows} rows, {self._columns} columns, mode={self._mode!r}, {self._blocks!r})"


def _real_tokens(mask, batch, new):
    """Returns which of the new columns are tokens, ``None`` if all are.

    Padding is on the left: a row of padding behind or between tokens is refused.
    """
    if mask is None:
        return None
    if mask.ndim != 2:
        raise NotImplementedError(
            f'attention "{NAME}" reads a mask of padding, [batch, tokens]: this one has '
            f"{mask.ndim} axes"
        )
    real = mask[:, -new:].bool()
    if bool(real.all()):
        return None
    if bool((real[:, :-1] & ~real[:, 1:]).any()):
        raise NotImplementedError("padding behind or between tokens: use padding_side='left'")
    return real
