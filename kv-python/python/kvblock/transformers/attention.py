"""The attention ``"kvblock"`` of transformers, in eager mode and under ``torch.compile``.

A cache hands new keys through, with itself as an attribute of the tensor; nothing touches the tensor
between ``Cache.update`` and the attention function. All versions of transformers pass the tensor
on, only the newest pass further arguments.
"""

from __future__ import annotations

import itertools
import math
import weakref

import torch
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

#: The name of the attention, for ``attn_implementation=`` and ``set_attn_implementation``.
NAME = "kvblock"

#: What an attention function is given and cannot be computed here.
REFUSED = ("position_bias", "indices", "block_indices", "head_mask")


def register() -> None:
    """Gives the attention ``"kvblock"`` to transformers, with the mask that it reads."""
    AttentionInterface.register(NAME, attention)
    # Without it the mask is None, and padded rows would be attended to.
    AttentionMaskInterface.register(NAME, padding_mask)


def padding_mask(*args, kv_length, attention_mask=None, **kwargs):
    """Returns the mask of padding, ``[batch, columns]``: causality and windows are the cache's."""
    return None if attention_mask is None else attention_mask[:, -kv_length:]


def attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """The attention function of the name ``"kvblock"``, for keys that a cache handed through."""
    cache, source = getattr(key, "_kvblock", (None, None))
    if cache is None:
        raise RuntimeError(
            f'attention "{NAME}" got keys that no cache in attend mode handed through: pass '
            'past_key_values=KvCache(..), and mode="gather" for models that change keys after it'
        )
    for name in REFUSED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f'attention "{NAME}" does not know {name}')
    if getattr(module, "is_causal", True) is False:
        raise NotImplementedError(f'attention "{NAME}" is causal: mode="gather" takes any')
    if dropout:
        raise NotImplementedError(f'attention "{NAME}" has no dropout: call model.eval()')
    # One attention for several layers has no place of its own.
    own = getattr(module, "layer_idx", None)
    layer = source if own is None or own < 0 else own
    options = (
        scaling if scaling is not None else 1 / math.sqrt(query.shape[-1]),
        kwargs.get("softcap"),
        kwargs.get("s_aux"),
        kwargs.get("sliding_window"),
    )
    if torch.compiler.is_compiling():
        batch, heads, new, _ = query.shape
        out = query.new_empty(batch, new, heads, value.shape[3])
        mask, handle = attention_mask, cache.handle
        torch.ops.kvblock.attend(query, key, value, out, mask, handle, layer, source, *options)
        return out, None
    return cache.attend(layer, source, (query, key, value), attention_mask, options), None


class Attending:
    """A cache that computes attention.

    ``handle`` is a tensor, so that a compiled graph takes another cache without compiling again.
    """

    _all = weakref.WeakValueDictionary()
    _numbers = itertools.count()

    def __init__(self):
        number = next(self._numbers)
        self._all[number] = self
        self.handle = torch.tensor(number)

    def attend(self, layer, source, tensors, mask, options, out=None):
        """Attends in one layer, and returns ``[batch, tokens, heads, head_dim]``.

        ``source`` is the layer whose keys these are, another one where layers share them.
        ``tensors`` are query, key and value, ``[batch, heads, tokens, head_dim]``; ``options`` are
        scale, soft cap, sink logits and the window as Hugging Face counts it.
        """
        raise NotImplementedError


# Only while a graph is compiled: a call through the dispatcher takes longer than a plain one.
_LIBRARY = torch.library.Library("kvblock", "DEF")
_LIBRARY.define(
    "attend(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor? mask, Tensor cache, int layer, "
    "int source, float scale, float? softcap, Tensor? sinks, int? window) -> ()"
)


def _attend(q, k, v, out, mask, cache, layer, source, scale, softcap, sinks, window):
    attending = Attending._all[cache.item()]
    attending.attend(layer, source, (q, k, v), mask, (scale, softcap, sinks, window), out)


_LIBRARY.impl("attend", _attend, "CompositeExplicitAutograd")
torch.library.register_fake("kvblock::attend", lambda *args: None, lib=_LIBRARY)
