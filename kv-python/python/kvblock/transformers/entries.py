"""The recurrent states of an engine's steps.

A step is one row with the tokens of all its entries. Attention knows where an entry ends. A scan
does not: it would go on from one entry into the next. So a module that works on a state runs for
groups of entries with equally many tokens, as the rows of a batch without padding. All other
modules run over the whole row.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import typing

import torch

from kvblock.transformers.states import EAGER, Part, check_parts

#: Over the counts of users of modules whose ``forward`` is taken over.
_LOCK = threading.Lock()


class Group(typing.NamedTuple):
    """Entries of a step with equally many tokens to compute, the rows of a batch."""

    entries: list[int]
    #: Places of the tokens in the step, ``[entries, tokens]``; ``None`` for all tokens in a row.
    places: torch.Tensor | None
    #: For each entry, its tokens of the step up to the end of these.
    ends: list[int]
    #: Whether there are tokens before these.
    goes_on: bool


def groups_of(chunks, positions, device):
    """Lists the groups of a step, in an order in which they can run.

    Drafts run one by one: a commit may keep some of them, with the state behind the last of these.
    """
    parts, first = [], 0
    for entry, (_, tokens, drafts, _) in enumerate(chunks):
        lengths = [tokens - drafts] + [1] * drafts
        for turn, end in enumerate(itertools.accumulate(lengths)):
            begin = end - lengths[turn]
            goes_on = turn > 0 or positions[first] > 0
            parts.append(((turn, lengths[turn], goes_on), entry, first + begin, end))
        first += tokens
    groups = []
    for (_, length, goes_on), alike in itertools.groupby(sorted(parts), key=lambda part: part[0]):
        entries, begins, ends = (list(of) for of in zip(*(part[1:] for part in alike)))
        places = None
        if length != first:
            places = torch.tensor(begins, device=device)[:, None]
            places = places + torch.arange(length, device=device)
        groups.append(Group(entries, places, ends, goes_on))
    return groups


def picked(value, places, tokens):
    """Takes the tokens of a group out of what a module is given, tensors ``[1, tokens, ..]``."""
    if isinstance(value, (tuple, list)):
        return type(value)(picked(one, places, tokens) for one in value)
    if isinstance(value, dict):
        return {name: picked(one, places, tokens) for name, one in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape[:2] != (1, tokens):
        raise NotImplementedError(
            f"a layer with a state is given a tensor {list(value.shape)} in a step of {tokens} "
            "tokens: an engine cannot tell which entry it belongs to"
        )
    return value if places is None else value[0][places]


def joined(results, groups, tokens):
    """Puts together what a module has returned for each group, as for the whole step."""
    first = results[0]
    if first is None or groups[0].places is None:
        return first
    if isinstance(first, (tuple, list)):
        return type(first)(joined(parts, groups, tokens) for parts in zip(*results, strict=True))
    sizes = [tuple(group.places.shape) for group in groups]
    if [getattr(result, "shape", ())[:2] for result in results] != sizes:
        raise NotImplementedError(
            f"a layer with a state returns a {type(first).__name__} that does not begin with the "
            f"entries and tokens that it was given: {sizes}"
        )
    out = first.new_empty(1, tokens, *first.shape[2:])
    for result, group in zip(results, groups):
        out[0, group.places] = result
    return out


class PerEntry:
    """The ``forward`` of a module with a state while engines run a step.

    Calls with another cache than an engine's are those of the module.
    """

    def __init__(self, module):
        self.module, self.users = module, 0
        #: One that somebody has given to this module alone.
        self.before = vars(module).get("forward")

    @EAGER
    def __call__(self, *args, **kwargs):
        given = (*args, *kwargs.values())
        cache = next((one for one in given if isinstance(one, StepStates)), None)
        if cache is None:
            return self._forward(*args, **kwargs)
        return cache.run_by_entry(self._forward, args, kwargs)

    def _forward(self, *args, **kwargs):
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


@contextlib.contextmanager
def by_entry(modules):
    """Lets modules with a state run by entry; other threads may do so at the same time."""
    with _LOCK:
        for module in modules:
            if not isinstance(vars(module).get("forward"), PerEntry):
                module.forward = PerEntry(module)
            module.forward.users += 1
    try:
        yield
    finally:
        with _LOCK:
            for module in modules:
                taken = module.forward
                taken.users -= 1
                if not taken.users:
                    del module.forward
                    if taken.before is not None:
                        module.forward = taken.before


class Trace:
    """The modules that run, and those that enclose every access to the state of a layer."""

    def __init__(self):
        self._running, self._thread = [], threading.get_ident()
        #: The modules around all accesses of a layer, outermost first; the modules that attend.
        self.paths, self.attending = {}, set()

    @contextlib.contextmanager
    def over(self, model):
        """Watches the modules of a model."""
        hooks = []
        for module in model.modules():
            hooks += [
                module.register_forward_pre_hook(self._begin),
                module.register_forward_hook(self._end, always_call=True),
            ]
        try:
            # A graph would know nothing of the hooks, or break at them.
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _begin(self, module, *_args):
        if threading.get_ident() == self._thread:
            self._running.append(module)

    def _end(self, *_args):
        if threading.get_ident() == self._thread:
            self._running.pop()

    def note_state(self, layer):
        """Notes that the state of a layer is read or written."""
        pairs = zip(self.paths.get(layer, self._running), self._running)
        common = itertools.takewhile(lambda pair: pair[0] is pair[1], pairs)
        self.paths[layer] = [module for module, _ in common]

    def note_attention(self):
        """Notes that the keys of a layer come."""
        self.attending.update(map(id, self._running))

    def module_of(self, layer):
        """Returns the innermost module that encloses a layer's work on its state."""
        path = self.paths.get(layer)
        if path is None:
            raise NotImplementedError(f"layer {layer} never asks the cache for its state")
        if not path or id(path[-1]) in self.attending:
            raise NotImplementedError(
                f"layer {layer} works on its state in no module of its own: an engine cannot run "
                "it entry by entry"
            )
        return path[-1]


class StepStates:
    """The half of the cache of an engine's step that has states."""

    layers: list

    def __init__(self, states):
        #: Layers with a state, with their numbers in the blocks; its parts, and the modules that
        #: work on it.
        self.states, self.parts, self.modules = states, [], []
        self._begin_states()

    def _begin_states(self):
        """Begins a step, or the pass without one that shows what a state consists of."""
        #: The step, its groups, the tokens of each entry, and the group that runs.
        self.step, self._groups, self._lengths, self._group = None, [], [], None
        #: Of the module that runs: states behind the tokens that have run, by layer; those that
        #: drafts follow, by layer and tokens.
        self._behind, self._in_front = {}, {}
        #: Layers whose states are in tensors, and those whose states are in their slots.
        self._loaded, self._stored = set(), set()
        for index in self.states:
            self.layers[index].clear()

    @contextlib.contextmanager
    def tracing(self, model):
        """Lets a model run without a step, and notes what its states consist of."""
        self.trace = Trace()
        with self.trace.over(model) if self.states else contextlib.nullcontext():
            yield
        self.modules = list(dict.fromkeys(self.trace.module_of(index) for index in self.states))
        for index in self.states:
            parts = [part for part, _ in self.layers[index].states()]
            self.parts = self.parts or parts
            check_parts(index, parts, self.parts)

    @contextlib.contextmanager
    def stepping(self, batch, device):
        """Lets a model run a step of an engine."""
        self._begin_states()
        self.step = batch.step
        if self.states:
            self._lengths = [tokens for _, tokens, *_ in batch.chunks]
            self._groups = groups_of(batch.chunks, batch.positions, device)
        try:
            with by_entry(self.modules):
                yield
        finally:
            self._begin_states()

    def run_by_entry(self, forward, args, kwargs):
        """Runs a module for the groups of the step, one after another."""
        if self.step is None or self._group is not None:
            return forward(*args, **kwargs)
        results, tokens = [], sum(self._lengths)
        try:
            for group in self._groups:
                self._group = group
                named = picked(kwargs, group.places, tokens)
                results.append(forward(*picked(args, group.places, tokens), **named))
                self._take(group)
        finally:
            self._group = None
        for index in list(self._behind):
            self._store(index)
        return joined(results, self._groups, tokens)

    def _touch(self, index):
        """Gives a layer its states in front of the group that runs, when it first asks."""
        if self.step is None:
            self.trace.note_state(index)
            return
        if self._group is None or index in self._stored:
            raise RuntimeError(
                f"layer {index} works on its state where it did not when the engine was made"
            )
        if index in self._loaded:
            return
        if index not in self._behind:
            self._behind[index] = self._read(index)
        self._loaded.add(index)
        if self._group.goes_on:
            states = zip(self.parts, self._behind[index], strict=True)
            entries = self._group.entries
            self.layers[index].load([(part, tensor[entries]) for part, tensor in states])

    def _read(self, index):
        """Reads the states of a layer in front of the step."""
        entries, states = len(self._lengths), []
        for place, part in enumerate(self.parts):
            out = part.like.new_empty(entries, *part.like.shape[1:])
            states.append(self.step.read_state(self.states[index], place, out))
        return states

    def _take(self, group):
        """Takes the states behind a group that has run."""
        for index in self._loaded:
            states = self.layers[index].states()
            check_parts(index, [part for part, _ in states], self.parts)
            behind = self._behind[index]
            for tensor, (_, new) in zip(behind, states):
                tensor[group.entries] = new
            for entry, end in zip(group.entries, group.ends):
                if end < self._lengths[entry]:
                    kept = self._in_front.setdefault((index, end), {})
                    kept[entry] = [tensor[entry].clone() for tensor in behind]
            self.layers[index].clear()
        self._loaded.clear()

    def _store(self, index):
        """Writes the states of a layer to their slots."""
        number, behind = self.states[index], self._behind.pop(index)
        for end in sorted(end for layer, end in self._in_front if layer == index):
            kept = self._in_front.pop((index, end))
            for place, tensor in enumerate(behind):
                # Entries without a draft behind this token are not read.
                rows = torch.zeros_like(tensor)
                for entry, states in kept.items():
                    rows[entry] = states[place]
                self.step.write_state_after(number, place, end, rows)
        for place, tensor in enumerate(behind):
            self.step.write_state(number, place, tensor)
        self._stored.add(index)

    # What a model calls.

    def get_conv_state(self, layer_idx, state_idx=0):
        return self._get("conv", layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx, state_idx=0):
        return self._get("recurrent", layer_idx, state_idx)

    @EAGER
    def _get(self, kind, index, of):
        self._touch(index)
        return self.layers[index].lend(kind, of)

    @EAGER
    def update_conv_state(self, conv_states, layer_idx, *args, **kwargs):
        self._touch(layer_idx)
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    @EAGER
    def update_recurrent_state(self, recurrent_states, layer_idx, *args, **kwargs):
        self._touch(layer_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)

    def has_previous_state(self, *args, **kwargs):
        return self._group is not None and self._group.goes_on
