"""Continuous batches for a model of transformers."""

from __future__ import annotations

import collections
import inspect
import threading

import kvblock
import torch
from transformers.cache_utils import Cache

from kvblock.transformers.attention import NAME, Attending
from kvblock.transformers.cache import Layers, cache_of, check_shape, check_window
from kvblock.transformers.entries import StepStates
from kvblock.transformers.states import StateLayer, states_of

#: Snapshots of recurrent states for each sequence that runs: behind the prompt, where it branches
#: off from another one, and behind the text.
SNAPSHOTS_OF_SEQUENCE = 4


class StepCache(StepStates, Cache, Attending):
    """The cache that a model sees in a step of an engine: keys pass through to the attention, and
    states to the modules that work on them.

    Without a step it notes the shapes of the keys and states, and attention gives zeros.
    """

    def __init__(self, config):
        self.own = own = Layers(config)
        if own.has_chunks:
            raise NotImplementedError(f"{config.model_type} attends in chunks: an engine does not")
        layers = list(own.layers)
        for index, of in enumerate(own.layers):
            if index in own.states:
                layers[index] = StateLayer(of.number_of_states)
                layers[index].is_sliding = getattr(of, "is_sliding", False)
            elif hasattr(of, "conv_states"):
                raise NotImplementedError(
                    f"{config.model_type} has layers without attention, whose states this version "
                    "of transformers keeps itself: an engine runs them since 5.24"
                )
        Cache.__init__(self, layers=layers)
        Attending.__init__(self)
        StepStates.__init__(self, own.states)
        self.first = None

    @property
    def is_linear(self):
        return [layer in self.states and layer not in self.own.places for layer in range(len(self))]

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        # Nothing touches the tensor between here and the attention function.
        key_states._kvblock = (self, layer_idx)
        return key_states, value_states

    def attend(self, layer, source, tensors, mask, options, out=None):
        query, key, value = tensors
        scale, softcap, sinks, window = options
        check_window(source, window, self.own.windows)
        if out is None:
            batch, heads, new, _ = query.shape
            out = query.new_empty(batch, new, heads, value.shape[3])
        if self.step is None:
            self.trace.note_attention()
            self.first = self.first or (key, value)
            check_shape(source, (key, value), self.first)
            return out.zero_()
        sinks = None if sinks is None else sinks.float().tolist()
        # The batch is one row with the tokens of all sequences.
        new = tensors if layer == source else (query,)
        rows = (x.transpose(1, 2)[0] for x in new)
        self.step.attend(
            self.own.places[source], *rows, out=out[0], scale=scale, softcap=softcap, sinks=sinks
        )
        return out

    def get_seq_length(self, layer_idx=0):
        return 0

    def get_mask_sizes(self, query_length, layer_idx=0):
        # The positions of the queries before transformers 5.4, their number since.
        return query_length if isinstance(query_length, int) else query_length.shape[0], 0

    @property
    def is_compileable(self):
        return False


class Engine:
    """Runs prompts of a model in continuous batches over one cache.

    Prompts share the blocks of their common beginning, whatever arrives when. ``format`` is the
    stored format of K and V, the type of the keys unless given; ``memory`` or ``num_blocks`` is the
    size of the cache, 1 GiB unless given. ``context`` is the most tokens of a text, the model's
    unless given, and ``stop`` the tokens that end one, those of its generation config.
    ``max_batch``, ``max_step_tokens``, ``draft_tokens`` and ``max_overtakes`` are those of
    :class:`kvblock.Engine`, ``settings`` further arguments of :class:`kvblock.Cache`.

    Recurrent states of layers with linear attention, scans or convolutions are beside the blocks:
    in ``slots`` for sequences that run, and in ``snapshots`` behind prompts and texts, from which
    other prompts go on. Unless given there are slots for ``max_batch`` sequences and what they
    write in a step, and 4 snapshots for each.

    All calls may come from any thread: the thread that waits for a token computes the steps.
    """

    def __init__(
        self,
        model,
        *,
        format=None,
        context=None,
        stop=None,
        max_batch=8,
        max_step_tokens=512,
        draft_tokens=0,
        max_overtakes=16,
        slots=None,
        snapshots=None,
        **settings,
    ):
        takes = inspect.signature(model.forward).parameters
        if "position_ids" not in takes:
            raise NotImplementedError(f"{type(model).__name__} takes no position_ids")
        self._model = model
        #: Names of arguments, by version: ``cache`` since transformers 5.24.
        self._cache_name = "cache" if "cache" in takes else "past_key_values"
        self._keeps_logits = "logits_to_keep" in takes
        config = model.config.get_text_config(decoder=True)
        self._seen = StepCache(config)
        with self._seen.tracing(model):
            logits = self._logits([0], [0], [0])
        if self._seen.first is None:
            raise ValueError(
                f'the model\'s attention is not "{NAME}": call register() and '
                f'model.set_attn_implementation("{NAME}")'
            )
        settings["states"] = states_of(
            self._seen.states,
            self._seen.parts,
            # One for a sequence that runs, and those that it writes in a step.
            slots=max_batch * (2 + draft_tokens) if slots is None else slots,
            snapshots=max_batch * SNAPSHOTS_OF_SEQUENCE if snapshots is None else snapshots,
            drafts=draft_tokens,
        )
        cache = cache_of(*self._seen.first, self._seen.own, format, **settings)
        self._seen.first = None
        if context is None:
            context = config.max_position_embeddings
        if stop is None:
            stop = model.generation_config.eos_token_id
        stop = [] if stop is None else [stop] if isinstance(stop, int) else list(stop)
        self._engine = kvblock.Engine(
            cache,
            context=context,
            stop=stop,
            vocab=logits.shape[1],
            max_batch=max_batch,
            max_step_tokens=max_step_tokens,
            draft_tokens=draft_tokens,
            max_overtakes=max_overtakes,
        )
        #: Events of the requests that somebody waits for; whether a thread computes a step.
        self._events, self._is_computing = {}, False
        self._changed = threading.Condition()

    @property
    def cache(self) -> kvblock.Cache:
        """The cache, for its counts and events."""
        return self._engine.cache

    def stats(self) -> dict:
        """Returns :meth:`kvblock.Engine.stats`."""
        return self._engine.stats()

    def submit(self, prompt, max_new_tokens, **options) -> list[int]:
        """Appends a prompt, token ids, to the queue; see :meth:`kvblock.Engine.submit`."""
        return self._engine.submit(_ids(prompt), max_new_tokens, **options)

    def cancel(self, request) -> dict | None:
        """Ends a request now, and returns its text so far; see :meth:`kvblock.Engine.cancel`."""
        ended = self._engine.cancel(request)
        if ended is not None:
            self._hand_out([ended | dict(kind="finished", request=request)])
        return ended

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return self._engine.has_work

    def step(self) -> list[dict]:
        """Computes one step, and returns the tokens and ends of requests: see
        :meth:`kvblock.Engine.end_step`.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._is_computing)
            self._is_computing = True
        return self._compute()

    def stream(self, prompt, max_new_tokens, **options):
        """Yields the tokens after a prompt as they come; closing the generator ends the request."""
        if options.get("n", 1) != 1:
            raise ValueError("a stream is one text: n=1")
        (request,) = self._submit_awaited(prompt, max_new_tokens, options)
        try:
            while (event := self._next(request))["kind"] == "token":
                yield event["token"]
        finally:
            self._forget(request)

    def generate(self, prompts, max_new_tokens, **options) -> list[list[int]]:
        """Returns the new tokens after each prompt; ``n`` texts each, one after another."""
        requests, texts = [], []
        try:
            for prompt in prompts:
                requests += self._submit_awaited(prompt, max_new_tokens, options)
            for request in requests:
                while (event := self._next(request))["kind"] == "token":
                    pass
                texts.append(event["tokens"])
        finally:
            for request in requests:
                self._forget(request)
        return texts

    def close(self) -> None:
        """Ends all requests and frees the blocks."""
        self.cache.close()

    def __repr__(self):
        return f"Engine({type(self._model).__name__}, {self._engine!r})"

    def _submit_awaited(self, prompt, max_new_tokens, options):
        # No step may end the request before its queue is there.
        with self._changed:
            requests = self.submit(prompt, max_new_tokens, **options)
            for request in requests:
                self._events[request] = collections.deque()
        return requests

    def _forget(self, request):
        """Ends a request that nobody waits for any more."""
        with self._changed:
            del self._events[request]
        self._engine.cancel(request)

    def _next(self, request):
        """Returns the next event of a request; computes steps until there is one."""
        while True:
            with self._changed:
                events = self._events[request]
                self._changed.wait_for(lambda: events or not self._is_computing)
                if events:
                    return events.popleft()
                self._is_computing = True
            self._compute()

    def _compute(self):
        events = []
        try:
            events = self._engine.step(self._forward)
        finally:
            self._hand_out(events, is_computing=False)
        return events

    def _hand_out(self, events, is_computing=None):
        with self._changed:
            if is_computing is not None:
                self._is_computing = is_computing
            for event in events:
                if event["request"] in self._events:
                    self._events[event["request"]].append(event)
            self._changed.notify_all()

    def _forward(self, batch):
        with self._seen.stepping(batch, self._model.device):
            logits = self._logits(batch.tokens, batch.positions, batch.logit_rows)
        return logits.float().cpu().contiguous()

    def _logits(self, tokens, positions, rows):
        """Runs the model, and returns the logits of some places."""
        of = (torch.tensor(list(numbers), device=self._model.device) for numbers in (tokens, positions))
        ids, positions = (numbers[None] for numbers in of)
        rows = torch.tensor(list(rows), dtype=torch.long, device=self._model.device)
        arguments = {self._cache_name: self._seen, "use_cache": True}
        if self._keeps_logits:
            arguments["logits_to_keep"] = rows
        with torch.no_grad():
            logits = self._model(input_ids=ids, position_ids=positions, **arguments).logits[0]
        return logits if self._keeps_logits else logits[rows]


def _ids(prompt):
    return prompt.flatten().tolist() if isinstance(prompt, torch.Tensor) else list(prompt)
