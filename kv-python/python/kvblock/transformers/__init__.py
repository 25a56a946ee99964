"""Models of Hugging Face transformers over a :class:`kvblock.Cache`.

    from kvblock.transformers import Engine, KvCache, register

    register()
    model.set_attn_implementation("kvblock")
    model.generate(**inputs, past_key_values=KvCache(model.config, memory="1GiB"))
    texts = Engine(model, memory="1GiB").generate(prompts, max_new_tokens=64)

A :class:`KvCache` with ``mode="attend"`` runs attention over the blocks, in the attention function
that :func:`register` gives to transformers. With ``mode="gather"`` every layer gets all its rows
back as tensors, so that any attention works: it saves memory and no time. An :class:`Engine` runs
many prompts in continuous batches. Recurrent states of hybrid models are in slots, beside the
blocks.

What a version of transformers wants is read from the call or from a signature, in one place each:

======  ==========================================================  ===============================
since   change                                                      read in
======  ==========================================================  ===============================
4.57.6  ``get_mask_sizes(cache_position, ..)``                      ``KvCache.get_mask_sizes``
5.4     ``get_mask_sizes(query_length, ..)``; ``cache_position``    ``KvCache.get_mask_sizes``
        is gone
5.14    ``get_max_length`` for ``get_max_cache_shape``              ``KvLayer``
5.16    ``crop(-n)`` alone; ``activate_past_recording``             ``KvCache.crop``
5.24    ``cache=`` for ``past_key_values=``                         ``Engine``
5.24    ``get_conv_state``: models ask the cache for states, which  ``states.CAN_KEEP``
        are in slots since: of a ``KvCache`` and of an ``Engine``
======  ==========================================================  ===============================
"""

try:
    import torch as _torch
    import transformers as _transformers
except ImportError as error:
    raise ImportError(
        "kvblock.transformers needs torch and transformers: pip install 'kvblock[transformers]'"
    ) from error

from kvblock.transformers.attention import NAME, register
from kvblock.transformers.cache import KvCache, calibrate
from kvblock.transformers.engine import Engine

__all__ = ["NAME", "Engine", "KvCache", "calibrate", "register"]
