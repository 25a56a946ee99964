"""``KvCache``: the cache of a model of transformers, in blocks."""

from __future__ import annotations

import copy
import itertools
import os
import secrets
import tempfile
import threading
import weakref

import kvblock
import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin

from kvblock._torch import FORMATS
from kvblock.transformers.attention import NAME, Attending
from kvblock.transformers.states import (
    EAGER,
    Recurrent,
    StateLayer,
    has_both,
    places_of_states,
    settings_of_states,
)

#: Sequences below this number are free for a caller of the same cache.
FIRST_SEQUENCE = 1 << 32

#: Tokens that a window keeps beyond its own for a model that goes back, as assisted decoding does.
SLACK = 64

#: Layers without attention, for which newer versions of transformers have objects of their own.
STATES = ("linear_attention", "conv", "mamba")

#: What keys that no attention function has seen mean.
UNATTENDED = (
    "keys were never attended to: a KvCache in attend mode needs "
    f'attn_implementation="{NAME}", and mode="gather" where a model has no such setting'
)


class Layers:
    """The layers of a model: which are attention, their places in the cache, and their windows.

    Refused are models whose layers a cache in blocks cannot hold.
    """

    def __init__(self, config):
        #: A new object of transformers for each layer.
        self.layers = DynamicCache(config=config).layers
        if not self.layers:
            raise NotImplementedError("this version of transformers makes no layers of a config")
        kind, types = config.model_type, getattr(config, "layer_types", None) or ()
        if getattr(config, "cross_attention_layers", None):
            raise NotImplementedError(f"{kind} has layers of cross-attention: use DynamicCache")
        own = []
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, CacheLayerMixin):
                continue
            if index < len(types) and types[index] in STATES:
                raise NotImplementedError(
                    f"{kind} has a cache of its own in this version of transformers"
                )
            if hasattr(layer, "update_indexer"):
                raise NotImplementedError(f"{kind} caches keys of an index: use DynamicCache")
            own.append(index)
        if not own:
            raise NotImplementedError(f"{kind} has no layers of attention: use DynamicCache")
        #: Whether a layer attends in chunks, which are no windows.
        self.has_chunks = "chunked_attention" in types
        #: The number of layers that attend to the keys of an earlier one.
        self.shared = getattr(config, "num_kv_shared_layers", None) or 0
        self.places = {index: place for place, index in enumerate(own)}
        #: Layers whose recurrent states a cache in blocks has, with their numbers there.
        self.states = places_of_states(self.layers, len(own))
        #: Whether keys come before all states.
        self.attends_first = bool(self.states) and own[0] < min(self.states)
        self.kind, self.have_both = kind, any(map(has_both, self.layers))
        if not self.states:
            self.check_apart()
        windows = ((index, getattr(self.layers[index], "sliding_window", None)) for index in own)
        #: Windows of the layers that have one, as Hugging Face counts: with the token itself.
        self.windows = {index: window for index, window in windows if window is not None}

    def check_apart(self):
        """Refuses layers of transformers that attend and have a state: blocks have their rows."""
        if self.have_both:
            raise NotImplementedError(
                f"{self.kind} has attention and another state in one layer, which slots alone "
                "keep apart: use DynamicCache"
            )


def cache_of(
    key, value, layers, format, has_windows=True, states=None, **settings
) -> kvblock.Cache:
    """Makes the cache in blocks: the first keys say what no config says alike for all models."""
    if "memory" not in settings and "num_blocks" not in settings:
        settings["memory"] = "1GiB"
    if key.device.type == "cpu":
        settings.setdefault("threads", torch.get_num_threads())
    elif key.device.type == "cuda":
        settings.setdefault("device", f"cuda:{key.device.index}")
    windows = {layers.places[layer]: window - 1 for layer, window in layers.windows.items()}
    return kvblock.Cache(
        layers=len(layers.places) + sum(len(of.layers) for of in states or ()),
        kv_heads=key.shape[1],
        head_dim=key.shape[3],
        head_dim_v=value.shape[3],
        format=format or FORMATS[key.dtype],
        states=states,
        windows=windows if has_windows else {},
        **settings,
    )


def check_window(layer, window, windows):
    """Refuses an attention function that is called with another window than the cache keeps."""
    if window != windows.get(layer):
        raise NotImplementedError(
            f"layer {layer} attends with a window of {window} tokens, its config says "
            f'{windows.get(layer)}: a KvCache with mode="gather" takes any'
        )


class Pool:
    """The blocks that a cache and its forks share, and the names of what is in them.

    A model's cache sees no token ids: numbers that no other text has name the rows instead, so that
    they can be saved and loaded.
    """

    def __init__(self, blocks=None, salt=None, next_name=0):
        #: ``None`` before the first keys have come.
        self.blocks: kvblock.Cache | None = blocks
        self.salt = salt or secrets.token_bytes(16)
        self._numbers = itertools.count(FIRST_SEQUENCE)
        self._names = itertools.count(next_name)
        self._opener, self._thread = lambda: None, None
        #: Sequences of caches that are gone, while a step was open.
        self._gone = []

    def names(self, count):
        """Returns names for new rows."""
        return [next(self._names) % 2**32 for _ in range(count)]

    def start(self, text=()):
        """Starts a sequence, and returns its number and the rows of its text that are there."""
        number = next(self._numbers)
        return number, self.blocks.start(number, list(text), salt=self.salt)

    def fork(self, number):
        child = next(self._numbers)
        self.blocks.fork(number, child)
        return child

    def release(self, numbers):
        """Ends sequences: now, or before the next step if one is open."""
        self._gone += numbers
        while self._gone:
            try:
                self.blocks.release(self._gone[-1])
            except kvblock.StateError:
                return
            self._gone.pop()

    def open(self, cache, inputs):
        """Opens the step of a forward pass of a cache."""
        self.release([])
        step = self.blocks.step(inputs)
        self._opener, self._thread = weakref.ref(cache), threading.get_ident()
        return step

    @property
    def is_of_this_thread(self):
        """Whether this thread has opened the last step."""
        return self._thread == threading.get_ident()

    def settle(self):
        """Ends the forward pass of whichever fork it was: one that has failed on this thread is
        rolled back.

        One that runs on another thread goes on, and the next call says that its step is open.
        """
        opener = self._opener()
        if opener is None:
            return
        if self.is_of_this_thread:
            opener._end()
        else:
            opener._finish_done()


def check_shape(layer, tensors, first):
    """Refuses keys and values of a layer that have other heads than those of the first layer."""
    for new, like in zip(tensors, first):
        if (new.shape[1], new.shape[3]) != (like.shape[1], like.shape[3]):
            raise NotImplementedError(
                f"layer {layer} has {new.shape[1]} heads of {new.shape[3]}, the first layer "
                f"{like.shape[1]} of {like.shape[3]}: a cache in blocks has one shape for all"
            )


def check_source(layer, source, step):
    """Refuses a layer that attends to the keys of another one after the step has ended."""
    if layer != source and step is None:
        raise NotImplementedError(
            f"layer {layer} attends to the keys of layer {source}: the config has no "
            "num_kv_shared_layers"
        )


def has_recurrent_state(layer):
    """Returns whether a layer of transformers has computed a state that no crop brings back."""
    states = getattr(layer, "is_recurrent_states_initialized", False)
    return any(states.values()) if isinstance(states, dict) else states


class KvLayer(CacheLayerMixin):
    """One layer of a :class:`KvCache`, as transformers asks about it.

    Lengths are columns of the batch, padding included.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: KvCache, index: int):
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
        return self._cache.get_seq_length() + new, 0

    def get_seq_length(self, *args):
        return self._cache.get_seq_length()

    def get_max_length(self):
        return -1

    # Its name before transformers 5.14.
    get_max_cache_shape = get_max_length

    @property
    def keys(self):
        """A copy of all keys, ``[batch, heads, columns, head_dim]``, zero where padding is."""
        return self._cache._gathered(self._index, "k")

    @property
    def values(self):
        """A copy of all values; see ``keys``."""
        return self._cache._gathered(self._index, "v")

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


class BothLayer(KvLayer, StateLayer):
    """A layer that attends and has a state."""

    is_croppable = False

    def __init__(self, cache, index, number_of_states):
        KvLayer.__init__(self, cache, index)
        StateLayer.__init__(self, number_of_states)

    def lazy_initialization(self, *args, **kwargs):
        # Of states alone: the blocks have the rows.
        StateLayer.lazy_initialization(self, *args, **kwargs)


class KvCache(Recurrent, Cache, Attending):
    """The cache of a model of transformers, in blocks.

    ``format`` is the stored format of K and V, the type of the keys unless given. ``memory`` or
    ``num_blocks`` is the size, 1 GiB unless given. ``settings`` are further arguments of
    :class:`kvblock.Cache`, which is made when the first keys come. ``mode`` is ``"attend"`` or
    ``"gather"``.

    ``copy.deepcopy`` forks: both caches share their blocks until one of them writes. ``pickle``
    saves the rows of this cache as they are stored; they load into a cache of their own.

    Recurrent states of layers with linear attention or convolutions are kept in ``slots`` beside
    the blocks, 4 for each row of the first batch and 8 at least unless given: a row takes one, and
    one more in a forward pass, and forks share theirs until one of them goes on. ``snapshots`` is
    the number of rows that can be loaded from a pickle, those of the first batch unless given.
    With ``slots=0``, and in versions of transformers that ask no cache for states, they stay in
    objects of transformers.
    """

    def __init__(
        self, config, *, format=None, mode="attend", slots=None, snapshots=None, **settings
    ):
        if mode not in ("attend", "gather"):
            raise ValueError(f'mode={mode!r}: "attend" or "gather" is expected')
        self._own = Layers(config.get_text_config(decoder=True))
        if mode == "attend":
            for is_refused, what in (
                (getattr(config, "is_encoder_decoder", False), "attends to an encoder"),
                (self._own.has_chunks, "attends in chunks"),
            ):
                if is_refused:
                    raise NotImplementedError(f'{config.model_type} {what}: use mode="gather"')
        layers = copy.deepcopy(self._own.layers)
        for index in self._own.places:
            layers[index] = KvLayer(self, index)
        # The cache is made when the first keys come: the states have to be known by then.
        has_slots = slots != 0 and not self._own.attends_first
        self._states, self._parts = self._own.states if has_slots else {}, None
        self._of_states = dict(slots=slots, snapshots=snapshots)
        if not self._states:
            self._own.check_apart()
        for index in self._states:
            layers[index] = self._own_layer(index)
        Cache.__init__(self, layers=layers)
        Attending.__init__(self)
        self._format, self._mode = format, mode
        #: The number of layers that are done in a step.
        self._all_layers = len(self._own.places) + (self._own.shared if mode == "attend" else 0)
        # A session, as pickle saves one, wants the name of a model.
        self._settings = dict(model="kvblock.transformers") | settings
        self._slack = self._settings.pop("window_slack", 0)
        self._pool = Pool()
        #: An empty key and an empty value of the model.
        self._like = None
        #: A sequence for each row of the batch; columns so far.
        self._rows, self._columns = None, 0
        self._clear_step()

    def _clear_step(self):
        #: The step of the forward pass that runs, its layers, its columns and its real tokens.
        self._step, self._seen, self._new, self._real = None, set(), 0, None
        #: Layers whose keys were handed through and not attended to.
        self._pending = set()
        self._clear_states()

    @property
    def blocks(self) -> kvblock.Cache | None:
        """The cache in blocks, ``None`` before the first keys have come."""
        self._finish_done()
        return self._pool.blocks

    def stats(self) -> dict:
        """Returns :meth:`kvblock.Cache.stats`, empty before the first keys have come."""
        return {} if self.blocks is None else self.blocks.stats()

    # What a model calls.

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if layer_idx in self._own.places:
            return self._update(layer_idx, key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def _update(self, layer, key, value):
        if self._mode == "gather":
            return self._gather(layer, key, value)
        # A compiled graph begins the step in its attention operation.
        if not torch.compiler.is_compiling():
            self._begin(layer, key, value)
            self._pending.add(layer)
        # Nothing touches the tensor between here and the attention function.
        key._kvblock = (self, layer)
        return key, value

    def _begin(self, layer, key, value):
        """Notes that keys of a layer have come."""
        if layer in self._seen:
            # The forward pass before has ended, or failed half-way.
            self._end()
        if not self._seen and not self._computed:
            self._pool.settle()
        # A layer attends before the next one has keys.
        self._check_attended()
        if self.blocks is None:
            self._note_parts()
            self._make(key, value, key.shape[0])
        if self._rows is None:
            self._rows = [self._pool.start()[0] for _ in range(key.shape[0])]
        self._check_rows(key.shape[0])
        check_shape(layer, (key, value), self._like)
        self._new = key.shape[2]

    def _check_rows(self, rows):
        """Refuses a batch of another number of rows than the cache has."""
        if self._rows is not None and rows != len(self._rows):
            raise ValueError(
                f"the batch has {rows} rows, the cache {len(self._rows)}: reset() begins another "
                "batch"
            )

    def _check_attended(self):
        if self._pending:
            self._abandon()
            raise RuntimeError(UNATTENDED)

    def _make(self, key, value, rows=1):
        # Rows that are handed back are masked by the model.
        settings = dict(self._settings, has_windows=self._mode == "attend")
        settings["states"] = settings_of_states(
            self._states, self._parts, rows, **self._of_states
        )
        self._pool.blocks = cache_of(
            key, value, self._own, self._format, window_slack=self._slack, **settings
        )
        self._like = (key[:0, :, :0].clone(), value[:0, :, :0].clone())

    def _open(self, counts):
        names = map(self._pool.names, counts)
        self._step = self._pool.open(self, list(zip(self._rows, names)))

    def _close(self, layer):
        """Notes that a layer is done, and commits the step after the last one."""
        self._seen.add(layer)
        self._pending.discard(layer)
        self._store(running=layer)
        # States are done when the next call comes: models write them in place.
        if not self._states and self._is_done:
            self._finish()

    @property
    def _is_done(self):
        """Whether a forward pass has come to all layers."""
        if self._step is None or len(self._seen) != self._all_layers:
            return False
        return len(self._computed) == len(self._states)

    def _finish(self):
        """Commits the step of the forward pass that has come to all layers."""
        try:
            self._store()
            # A commit ends the step, also one that is refused.
            step, self._step = self._step, None
            step.commit()
        except BaseException:
            self._abandon()
            raise
        columns = self._columns + self._new
        if self._mode == "attend":
            # Before transformers 5.14 a model leaves the keys that layers share here.
            vars(self).pop("shared_layers", None)
        self._clear_step()
        self._columns = columns
        # Rows of caches that are gone, which the step kept.
        self._pool.release([])

    @property
    def _may_finish(self):
        """Whether a forward pass is over: on another thread its last layer may still compute."""
        return self._is_done and (self._pool.is_of_this_thread or not self._is_lent)

    def _finish_done(self):
        if self._may_finish:
            self._finish()

    def _end(self):
        """Ends the forward pass before: one that has not come to all layers has failed."""
        self._finish_done()
        self._abandon()

    def _abandon(self):
        if self._step is not None:
            self._step.roll_back()
        self._drop_states()
        self._clear_step()

    def _settle(self):
        """Ends what a forward pass has left, of this cache or of a fork."""
        self._end()
        self._pool.settle()

    @torch.compiler.disable(reason='mode="gather" makes tensors of another size in each step')
    def _gather(self, layer, key, value):
        self._begin(layer, key, value)
        place = self._own.places[layer]
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

    def attend(self, layer, source, tensors, mask, options, out=None):
        query, key, value = tensors
        scale, softcap, sinks, window = options
        check_window(source, window, self._own.windows)
        check_source(layer, source, self._step)
        if layer in self._pending:
            self._pending.discard(layer)
        elif layer == source:
            self._begin(layer, key, value)
        batch, heads, new, _ = query.shape
        if out is None:
            out = query.new_empty(batch, new, heads, value.shape[3])
        if self._step is None:
            self._real = _real_tokens(mask, batch, new)
            counts = [new] * batch if self._real is None else self._real.sum(1).tolist()
            self._check_cached(mask, counts)
            self._open(counts)
        sinks = None if sinks is None else sinks.float().tolist()
        options = dict(scale=scale, softcap=softcap, sinks=sinks)
        place = self._own.places[source]
        # Keys that are shared are written already.
        new = tensors if layer == source else (query,)
        if self._real is None:
            options |= dict(out=out.transpose(1, 2), axes="bhsd")
            self._step.attend(place, *new, **options)
        else:
            # Rows are packed: padding is on the left here, and nowhere in the cache.
            packed = (x.transpose(1, 2)[self._real] for x in new)
            rows = self._step.attend(place, *packed, **options)
            out.zero_()[self._real] = rows
        self._close(layer)
        return out

    def _check_cached(self, mask, counts):
        """Refuses a mask that hides tokens which are in the cache, or shows padding which is not."""
        lengths = [self.blocks.seq_len(number) for number in self._rows]
        shown = [self._columns] * len(lengths)
        if mask is not None:
            shown = [all - new for all, new in zip(mask.sum(1).tolist(), counts)]
        if shown != lengths:
            raise NotImplementedError(
                f"the mask shows {shown} cached tokens of the rows, the cache has {lengths}: a "
                "token that was computed cannot be hidden later. If generate() made the mask of "
                "padding tokens in the text, pass attention_mask="
            )

    def get_seq_length(self, layer_idx=0):
        # Of all passes that have ended: one that has failed counts nowhere.
        return self._length() if self._states else self._columns

    @EAGER
    def _length(self):
        return self._columns + (self._new if self._may_finish else 0)

    def get_mask_sizes(self, query_length, layer_idx=0):
        # The positions of the queries before transformers 5.4, their number since.
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.get_seq_length() + new, 0

    @property
    def is_sliding(self):
        return [False] * len(self.layers)

    # What ``generate`` calls.

    def reset(self):
        """Ends all sequences: the next batch begins anew."""
        self._settle()
        self._pool.release(self._rows or [])
        self._rows, self._columns = None, 0
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, (KvLayer, StateLayer)):
                # Those of transformers would keep the number of rows.
                self.layers[index] = copy.deepcopy(self._own.layers[index])

    def crop(self, tokens):
        """Removes the last ``-tokens`` columns; before transformers 5.16, all after ``tokens``."""
        tokens = int(tokens)
        self._finish_done()
        remove = -tokens if tokens < 0 else max(self._columns - tokens, 0) if tokens else 0
        if remove > self._columns:
            raise ValueError(f"crop({tokens}) of {self._columns} tokens")
        self._check_attended()
        if remove and self._states:
            raise NotImplementedError(
                f"crop({tokens}): a state that is the result of all tokens does not go back; "
                "convolutions do after activate_past_recording() before the tokens come"
            )
        others = self._others("crop")
        for layer in others:
            if remove and has_recurrent_state(layer):
                raise NotImplementedError(f"crop: a {type(layer).__name__} does not go back")
            if not getattr(layer, "record_past", True):
                raise RuntimeError("crop: activate_past_recording() before the tokens come")
        self._settle()
        try:
            self._truncate(remove)
        except kvblock.PlanError as error:
            raise RuntimeError(
                f"crop({tokens}): {error}; window_slack= says how far a model goes back"
            ) from error
        for layer in others:
            layer.crop(-remove)
        self._columns -= remove

    def _truncate(self, tokens):
        """Removes the last tokens of all rows, or of none: a row may have left its window alone."""
        rows, shorter = self._rows or [], []
        try:
            for row in rows:
                shorter.append(self._pool.fork(row))
                # The last columns are tokens in every row: padding is on the left.
                self.blocks.truncate(shorter[-1], self.blocks.seq_len(row) - tokens)
        except kvblock.Error:
            self._pool.release(shorter)
            raise
        if rows:
            self._rows = shorter
            self._pool.release(rows)

    def activate_past_recording(self, *args, **kwargs):
        """Notes that the model will go back: windows keep some tokens more."""
        self._slack = max(self._slack, SLACK)
        if self._states:
            self._leave_states()
        for layer in self.layers + self._own.layers:
            if not isinstance(layer, KvLayer) and hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording(*args, **kwargs)

    def _leave_states(self):
        """Gives the states to objects of transformers: those of convolutions alone go back."""
        self._finish_done()
        self._own.check_apart()
        if self._rows is not None and self._columns:
            raise NotImplementedError(
                "activate_past_recording() before the tokens come: slots have the last states alone"
            )
        self.reset()
        for index in self._states:
            self.layers[index] = copy.deepcopy(self._own.layers[index])
        # Blocks with slots want states.
        self._pool, self._like = Pool(), None
        self._states, self._parts = {}, None

    def reorder_cache(self, beam_idx):
        beams = torch.as_tensor(beam_idx, device="cpu")
        self._replace("reorder_cache", beams, lambda rows: rows.index_select(0, beams))

    def batch_select_indices(self, indices):
        kept = torch.as_tensor(indices, device="cpu")
        self._replace("batch_select_indices", kept, lambda rows: rows[kept])

    def batch_repeat_interleave(self, repeats):
        self._replace(
            "batch_repeat_interleave", repeats, lambda rows: rows.repeat_interleave(repeats)
        )

    def _others(self, call):
        """Returns the layers that are objects of transformers; refuses those without a call."""
        own = (KvLayer, StateLayer)
        others = [layer for layer in self.layers if not isinstance(layer, own)]
        for layer in others:
            if not hasattr(layer, call):
                raise NotImplementedError(f"{call}: a {type(layer).__name__} has no such call")
        return others

    def _replace(self, call, argument, choose):
        """Continues the rows that are chosen; a row may come several times, or not at all.

        ``call`` with its argument does the same to layers of transformers.
        """
        self._finish_done()
        if self._rows is None:
            return
        self._check_attended()
        others, indices = self._others(call), choose(torch.arange(len(self._rows))).tolist()
        self._settle()
        for layer in others:
            getattr(layer, call)(argument)
        before, taken = self._rows, set()
        self._rows = []
        for index in indices:
            if index in taken:
                self._rows.append(self._pool.fork(before[index]))
            else:
                taken.add(index)
                self._rows.append(before[index])
        self._pool.release([n for index, n in enumerate(before) if index not in taken])

    # Copies.

    def _gathered(self, layer, plane):
        """Returns all rows of a layer as tensors, ``None`` before there are any."""
        self._finish_done()
        if self._rows is None:
            return None
        place, like = self._own.places[layer], self._like["kv".index(plane)]
        rows, heads, dim = len(self._rows), like.shape[1], like.shape[3]
        out = like.new_zeros(rows, self._columns, heads, dim)
        for row, number in zip(out, self._rows):
            tokens = self.blocks.seq_len(number)
            if tokens:
                self.blocks.gather(number, place, plane, row[None, self._columns - tokens :])
        return out.transpose(1, 2)

    def __deepcopy__(self, memo):
        self._check_no_step()
        fork = KvCache.__new__(KvCache)
        memo[id(self)] = fork
        for name, value in vars(self).items():
            setattr(fork, name, value)
        Attending.__init__(fork)
        fork.layers = [
            fork._own_layer(index) or copy.deepcopy(layer, memo)
            for index, layer in enumerate(self.layers)
        ]
        if self.blocks is None:
            fork._pool = Pool()
        if self._rows is not None:
            fork._rows = [self._pool.fork(number) for number in self._rows]
        fork._clear_step()
        return fork

    def _own_layer(self, index):
        """Makes the layer of an index, ``None`` for one that is an object of transformers."""
        attends, of = index in self._own.places, self._own.layers[index]
        if index not in self._states:
            return KvLayer(self, index) if attends else None
        return (
            BothLayer(self, index, of.number_of_states)
            if attends
            else StateLayer(of.number_of_states)
        )

    def _check_no_step(self):
        self._finish_done()
        if self._step is not None:
            raise RuntimeError(
                "a forward pass runs, or has failed: copy the cache before it or after it; crop(0) "
                "ends one that has failed"
            )
        self._pool.settle()

    def __getstate__(self):
        self._check_no_step()
        state = dict(vars(self))
        state.pop("shared_layers", None)
        for name in ("handle", "_pool"):
            del state[name]
        state["_named"] = (self._pool.salt, self._pool.names(1)[0])
        state["layers"] = [
            None if isinstance(layer, (KvLayer, StateLayer)) else layer for layer in self.layers
        ]
        if self._rows is not None:
            state["_rows"] = [self._saved(number) for number in self._rows]
            state["_lengths"] = [self.blocks.seq_len(number) for number in self._rows]
        return state

    def _saved(self, number):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "row")
            self.blocks.keep_state(number)
            self.blocks.save(number, path)
            with open(path, "rb") as file:
                return file.read()

    def __setstate__(self, state):
        self._pool = Pool(None, *state.pop("_named"))
        lengths = state.pop("_lengths", ())
        vars(self).update(state)
        Attending.__init__(self)
        self.layers = [
            self._own_layer(index) or layer for index, layer in enumerate(self.layers)
        ]
        if self._like is not None:
            self._make(*self._like, len(lengths))
        if self._rows is not None:
            saved, self._rows = self._rows, []
            for row, length in zip(saved, lengths, strict=True):
                self._rows.append(self._loaded(row, length))

    def _loaded(self, row, length):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "row")
            with open(path, "wb") as file:
                file.write(row)
            text, _ = self.blocks.load(path, salt=self._pool.salt)
        # One more than the text, all of which is then reused.
        number, reused = self._pool.start(text + self._pool.names(1))
        if reused != length:
            raise kvblock.SessionError(f"{reused} of {length} tokens of a row were loaded")
        return number

    def __del__(self):
        try:
            # A step ends with its last owner.
            self._step = None
            self._pool.release(self._rows or [])
        except Exception:  # Python ends, the cache is closed, or this is a child of its process.
            pass

    def __repr__(self):
        rows = len(self._rows or ())
        return f"KvCache({rows} rows, {self._columns} columns, mode={self._mode!r}, {self.blocks!r})"


class _Observed(KvCache):
    """A cache that shows its tokens to a calibrator."""

    def __init__(self, config, calibrator=None):
        super().__init__(config, format="f32")
        self.calibrator = calibrator

    def attend(self, layer, source, tensors, mask, options, out=None):
        if layer == source:
            self._observe(layer, *tensors)
        return super().attend(layer, source, tensors, mask, options, out)

    def _observe(self, layer, query, key, value):
        if self.calibrator is None:
            self.calibrator = kvblock.Calibrator(
                layers=len(self._own.places),
                kv_heads=key.shape[1],
                head_dim=key.shape[3],
                head_dim_v=value.shape[3],
            )
        rows = (x.transpose(1, 2)[0].float().cpu().contiguous() for x in (query, key, value))
        self.calibrator.observe(self._own.places[layer], *rows, first_position=self._columns)


def calibrate(model, prompts, path, *, name="") -> int:
    """Writes the constants of stored formats to a file, for ``KvCache(.., calibration=path)``.

    The model computes ``prompts``, lists of token ids: a few hundred tokens of ordinary text, of
    which the first four of each prompt do not count. ``name`` names the weights in the file. Returns
    the number of tokens that counted.
    """
    calibrator = None
    for prompt in prompts:
        cache = _Observed(model.config, calibrator)
        ids = torch.as_tensor(prompt, device=model.device).reshape(1, -1)
        with torch.no_grad():
            model(ids, past_key_values=cache, use_cache=True)
        calibrator = cache.calibrator
    if calibrator is None:
        raise ValueError("calibrate: at least one prompt is expected")
    calibrator.write(path, model=name)
    return calibrator.tokens


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
