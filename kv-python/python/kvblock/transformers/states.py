"""The recurrent states of a model: in slots of its cache, and in tensors while a layer computes.

A model reads the states of a layer before it computes, and writes them by a call or in place. Such
a write shows itself to nobody: a layer is done when the next one begins, and a forward pass when
the next call comes that asks for its result.
"""

from __future__ import annotations

import typing
import weakref

import kvblock
import torch
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin

#: The layers of transformers whose states move to slots. Before models asked the cache for states,
#: they took them from the objects of transformers, and there they stay.
_Theirs = getattr(cache_utils, "LinearAttentionLayer", None)
CAN_KEEP = _Theirs is not None and hasattr(Cache, "get_conv_state")

#: The layers that attend and have a state.
_BOTH = tuple(
    getattr(cache_utils, f"LinearAttentionAnd{attention}Layer", None)
    for attention in ("FullAttention", "SlidingWindowAttention")
)

#: Names of states in a layer of transformers.
KINDS = ("conv", "recurrent")

#: Slots for each row of the first batch, and at least: for the rows, the next states, and forks.
SLOTS_OF_ROW, SLOTS_MIN = 4, 8

EAGER = torch.compiler.disable(reason="states are read from slots and written to them")


class Part(typing.NamedTuple):
    """A tensor of every layer's state: its kind, its index in the layer, and an empty one."""

    kind: str
    index: int
    like: torch.Tensor


class StateLayer(_Theirs if CAN_KEEP else object):
    """A layer with linear attention or a convolution. It has tensors during a forward pass only."""

    is_compileable = False
    is_croppable = False

    def __init__(self, number_of_states=1):
        super().__init__(number_of_states=number_of_states)
        #: What a model has asked for and may still write to.
        self._lent = []

    def clear(self):
        """Drops the tensors: the layer begins, or its state is in a slot."""
        super().__init__(number_of_states=self.number_of_states)

    def load(self, states):
        """Takes the states of a batch, pairs of a part and its tensor."""
        for (kind, index, _), tensor in states:
            getattr(self, f"{kind}_states")[index] = tensor
            getattr(self, f"is_{kind}_states_initialized")[index] = True
            self.has_previous_state[index] = True
            self.device, self.dtype = tensor.device, tensor.dtype
            if kind == "conv":
                self.conv_kernel_size[index] = tensor.shape[-1]

    def states(self):
        """Lists the parts that the layer has, with their tensors."""
        found = []
        for index in range(self.number_of_states):
            for kind in KINDS:
                tensor = getattr(self, f"{kind}_states")[index]
                if tensor is not None:
                    found.append((Part(kind, index, tensor[:0].clone()), tensor))
        return found

    def lend(self, kind, index):
        """Returns a state to a model, which may write to it until nobody has the tensor any more;
        ``None`` in front of the first token.
        """
        tensor = getattr(self, f"{kind}_states")[index]
        if not self.has_previous_state[index] or tensor is None:
            return None
        tensor = tensor.detach()
        self._lent = [lent for lent in self._lent if lent() is not None]
        self._lent.append(weakref.ref(tensor))
        return tensor

    @property
    def is_lent(self):
        return any(lent() is not None for lent in self._lent)

    def offload(self):
        raise NotImplementedError("KvCache offloads no states")

    prefetch = offload

    def reorder_cache(self, beam_idx):
        raise NotImplementedError("KvCache reorders all layers at once")

    crop = reset = activate_past_recording = reorder_cache


def has_both(layer):
    """Returns whether a layer of transformers attends and has a state."""
    return isinstance(layer, CacheLayerMixin) and hasattr(layer, "conv_states")


def places_of_states(layers, first):
    """Returns the layers whose states move to slots, with their numbers in the cache from ``first``
    on: none where transformers keeps states for its models.
    """
    if not CAN_KEEP:
        return {}
    kept = (_Theirs, *_BOTH)
    found = [index for index, layer in enumerate(layers) if type(layer) in kept]
    return {index: first + place for place, index in enumerate(found)}


def settings_of_states(places, parts, rows, slots, snapshots):
    """Makes the setting ``states`` of a cache for a batch of some rows."""
    if slots is None:
        slots = max(SLOTS_OF_ROW * rows, SLOTS_MIN)
    # A row that is loaded from a pickle begins with one.
    snapshots = max(rows, 1) if snapshots is None else snapshots
    return states_of(places, parts, slots=slots, snapshots=snapshots)


def states_of(places, parts, **settings):
    """Makes the setting ``states`` of a cache, with bits that stay the same in snapshots."""
    if not places:
        return None
    parts = [(part.like.shape[1:], str(part.like.dtype).split(".")[-1]) for part in parts]
    layers = list(places.values())
    return [kvblock.States(layers=layers, parts=parts, snapshot_format="same", **settings)]


class Recurrent:
    """The half of a :class:`KvCache` that has states."""

    #: The numbers of layers with states in the blocks, and the parts of each.
    _states: dict[int, int]
    _parts: list[Part] | None

    def _clear_states(self):
        """Begins a forward pass: no layer has been asked for its state."""
        #: Calls of the pass, and layers in their order: those whose states are not stored yet.
        self._calls, self._computed, self._unstored = set(), set(), []

    @EAGER
    def _touch(self, index, *call):
        """Notes that a model asks for a state; the first time, it is read from its slot.

        A call that repeats is one of the next forward pass.
        """
        if (index, *call) in self._calls:
            self._end()
        if not self._calls and not self._seen:
            self._pool.settle()
        self._calls.add((index, *call))
        if index in self._computed:
            return
        self._store()
        layer = self.layers[index]
        layer.clear()
        if self._columns and self._rows is not None:
            layer.load(self._read(index))
        self._computed.add(index)
        self._unstored.append(index)

    def _read(self, index):
        """Reads the states of a layer, as they were before this forward pass."""
        step = self._step
        if step is None:
            # The mask, and with it the tokens of the step, come with the first attention. This
            # step only reads.
            step = self._pool.open(self, [(row, 1) for row in self._rows])
        try:
            states = []
            for place, part in enumerate(self._parts):
                out = part.like.new_empty(len(self._rows), *part.like.shape[1:])
                states.append((part, step.read_state(self._states[index], place, out)))
            return states
        finally:
            if self._step is None:
                step.roll_back()

    def _store(self, running=None):
        """Writes the states of layers that are done to the slots of the step, once there is one.

        The layer that runs may not have computed its state yet.
        """
        if self._step is None:
            return
        while self._unstored and self._unstored[0] != running:
            index = self._unstored[0]
            states = self.layers[index].states()
            check_parts(index, [part for part, _ in states], self._parts)
            for place, (_, tensor) in enumerate(states):
                self._step.write_state(self._states[index], place, tensor)
            self.layers[index].clear()
            del self._unstored[0]

    def _drop_states(self):
        """Forgets what a forward pass has left in layers."""
        for index in self._computed:
            self.layers[index].clear()
        self._clear_states()

    def _note_parts(self):
        """Takes the parts of a state from the first layer that has computed one."""
        if self._states and self._parts is None:
            if not self._computed:
                raise NotImplementedError(
                    "a layer attends before the first state is known: use DynamicCache"
                )
            self._parts = [part for part, _ in self.layers[min(self._computed)].states()]

    @property
    def _is_lent(self):
        return any(self.layers[index].is_lent for index in self._states)

    # What a model calls.

    def get_conv_state(self, layer_idx, state_idx=0):
        if layer_idx not in self._states:
            return super().get_conv_state(layer_idx, state_idx)
        return self._get("conv", layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx, state_idx=0):
        if layer_idx not in self._states:
            return super().get_recurrent_state(layer_idx, state_idx)
        return self._get("recurrent", layer_idx, state_idx)

    @EAGER
    def _get(self, kind, index, of):
        self._touch(index, "get", kind, of)
        return self.layers[index].lend(kind, of)

    def update_conv_state(self, conv_states, layer_idx, *args, **kwargs):
        if layer_idx in self._states:
            self._check_rows(conv_states.shape[0])
            self._touch(layer_idx, "update", "conv", *args, *kwargs.items())
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def update_recurrent_state(self, recurrent_states, layer_idx, *args, **kwargs):
        if layer_idx in self._states:
            self._check_rows(recurrent_states.shape[0])
            self._touch(layer_idx, "update", "recurrent", *args, *kwargs.items())
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)

    def has_previous_state(self, *args, **kwargs):
        if not self._states:
            return super().has_previous_state(*args, **kwargs)
        return self.get_seq_length() > 0


def check_parts(layer, parts, first):
    """Refuses a layer whose state has other parts than that of the first."""
    kept, given = (
        [(kind, index, tuple(like.shape[1:]), like.dtype) for kind, index, like in all]
        for all in (first, parts)
    )
    if given != kept:
        raise NotImplementedError(
            f"layer {layer} has a state of {given}, the first layer of {kept}: slots have one "
            "shape for all"
        )
