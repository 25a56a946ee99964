"""
The compiled half of `kvblock`.
"""

from _typeshed import SupportsGetItem
from os import PathLike
from typing import Any, Final, SupportsFloat, SupportsIndex, final

__all__ = ["VERSION", "Batch", "Cache", "CachePlane", "Calibrator", "Engine", "InferenceConfig", "InferenceParams", "States", "Step", "device_names", "feature_names"]

VERSION: Final[str]
"""
The version of the library.
"""

@final
class Batch:
    """
    The tokens of one step of an engine, one sequence after another.
    """
    def __repr__(self, /) -> str: ...
    @property
    def chunks(self, /) -> list[tuple[int, int, int, int]]:
        """
        For each sequence: its request, the number of its tokens, of drafts at their end, and of
        last tokens that need logits.
        """
    @property
    def logit_rows(self, /) -> Any:
        """
        The places in `tokens` after which logits are needed, a `memoryview` of `int32`.
        """
    @property
    def positions(self, /) -> Any:
        """
        The positions of the tokens in their sequences, a `memoryview` of `int32`.
        """
    @property
    def step(self, /) -> Step:
        """
        The step, which every layer writes and attends with.
        """
    @property
    def tokens(self, /) -> Any:
        """
        The tokens, a `memoryview` of `int32`.
        """

@final
class Cache:
    """
    A paged KV cache.

    One cache has the keys and values of many sequences, in blocks that sequences share as far as
    their tokens agree. `num_blocks` blocks of `block_size` tokens are allocated at once, or as many
    as `memory` bytes hold (`"2GiB"`).

    `format` is how rows are stored: `"bf16"`, `"int8"`, `"l4"`, `"int8/l4"` for K and V, with
    options after commas. `windows` gives layers a sliding window: `{layer: tokens before a token's
    own}`. `states` gives layers recurrent states, whose slots and snapshots are allocated beside
    these blocks. `tiers` keep what the device evicts, in chunks of `chunk_blocks` blocks:
    `"host=2GiB"`, `"disk=DIR:200GB"`; they need `model`, bytes that name the weights.

    `device="cuda:0"` takes tensors on that device in place, and in host memory too. All work is
    submitted to `stream`: one of torch or cupy, or a handle, which must stay open as long as the
    cache. Nobody may capture on it. Without one it is torch's current stream, or the legacy default
    stream where torch does not use CUDA yet.

    All calls may come from any thread.
    """
    def __new__(cls, /, *, layers: SupportsIndex, kv_heads: SupportsIndex, head_dim: SupportsIndex, head_dim_v: SupportsIndex | None = None, format: str = "bf16", block_size: SupportsIndex = 16, num_blocks: SupportsIndex | None = None, memory: SupportsIndex | str | None = None, max_seq_len: SupportsIndex | None = None, max_sequences: SupportsIndex | None = None, windows: dict[SupportsIndex, SupportsIndex] | None = None, window_slack: SupportsIndex = 0, sink_tokens: SupportsIndex = 0, prefix_reuse: str = "partial", eviction: str = "reuse-rate", batch_invariant: bool = False, events: SupportsIndex = 0, device: str = "cpu", threads: SupportsIndex | None = None, calibration: str | PathLike[str] | None = None, tiers: SupportsGetItem[int, str] | None = None, wait: str = "compute", chunk_blocks: SupportsIndex | None = None, model: Any | None = None, stream: Any | None = None, states: SupportsGetItem[int, States] | None = None) -> Cache: ...
    def __repr__(self, /) -> str: ...
    def add_stop(self, /, seq: SupportsIndex, len: SupportsIndex) -> None:
        """
        Adds a stop to a running sequence; one at a length that it has reached changes nothing.
        """
    @property
    def block_size(self, /) -> int: ...
    def close(self, /) -> None:
        """
        Frees the blocks now: the cache ends, also for an engine that runs it. An open step is
        rolled back; tiers keep what they have written.
        """
    @property
    def device(self, /) -> str: ...
    def explain_hit(self, /, tokens: SupportsGetItem[int, SupportsIndex], *, salt: bytes | bytearray | None = None, adapter: SupportsIndex | None = None) -> dict:
        """
        Says how far a prompt is cached: `"tokens"` would be reused, `"rows"` are cached by the
        layers that attend, and behind `"state"` tokens the longest recurrent states are, `None` in
        a cache without states. Changes nothing.
        """
    def flush(self, /, timeout: SupportsFloat | SupportsIndex = 60.0) -> bool:
        """
        Writes to the tiers what only the device and host memory have, for at most `timeout`
        seconds. Returns whether all of it is written; call it before the program ends.
        """
    def forget(self, /, tokens: SupportsGetItem[int, SupportsIndex], *, keep: SupportsIndex = 0, salt: bytes | bytearray | None = None, adapter: SupportsIndex | None = None, timeout: SupportsFloat | SupportsIndex = 10.0) -> int:
        """
        Forgets a prompt after its first `keep` tokens, on the device and in all tiers. Returns the
        number of blocks of the device that hold it no more.
        """
    def fork(self, /, parent: SupportsIndex, child: SupportsIndex) -> None:
        """
        Makes a copy of a sequence that shares its blocks until one of them is written.
        """
    @property
    def format(self, /) -> str: ...
    def gather(self, /, seq: SupportsIndex, layer: SupportsIndex, plane: str, out: Any | None = None) -> Any:
        """
        Returns a sequence's rows of one layer, `[1, tokens, kv_heads, head_dim]`; `plane` is `"k"`
        or `"v"`. `out` is a tensor of that shape, a new one of numpy in f32 unless given.
        """
    @property
    def head_dim(self, /) -> int: ...
    @property
    def head_dim_v(self, /) -> int: ...
    def hint(self, /, seq: SupportsIndex, hint: str | None) -> None:
        """
        Says what is expected after the end of a sequence, for the order of eviction: `"ended"`,
        `"idle"` (the user reads), `"tool-call"` or `"within=SECONDS"`; `None` takes it back. It
        pins nothing, and the last word before the end counts.
        """
    def keep_state(self, /, seq: SupportsIndex) -> None:
        """
        Keeps the recurrent states of a sequence as they are, for other prompts with its text, as
        `release` does.
        """
    @property
    def kv_heads(self, /) -> int: ...
    @property
    def layers(self, /) -> int: ...
    def load(self, /, path: str | PathLike[str], *, salt: bytes | bytearray | None = None, adapter: SupportsIndex | None = None) -> tuple[list[int], bytes]:
        """
        Loads a session file: the next prompt that begins with its text reuses its rows. Returns the
        text and the note.
        """
    def next_stop(self, /, seq: SupportsIndex) -> int | None:
        """
        Returns the next length at which a step of a sequence should end, so that its recurrent
        states are kept there for other prompts: in front of the last token of its prompt, where
        rows were cached and the state was not, and at `stops`. `None` if there is no further one.
        A step that ends elsewhere keeps fewer states and no wrong ones.
        """
    def recalibrate(self, /, path: str | PathLike[str]) -> None:
        """
        Replaces the constants of the stored format by those of a file, and encodes the rows of all
        sequences again. What was cached before is not reused any more.
        """
    def release(self, /, seq: SupportsIndex) -> None:
        """
        Ends a sequence. Its blocks stay reusable until others need them.
        """
    def reset(self, /) -> None:
        """
        Ends all sequences.
        """
    def save(self, /, seq: SupportsIndex, path: str | PathLike[str], *, note: bytes | bytearray | None = None) -> int:
        """
        Writes a sequence to a session file, with a note of the caller. Returns its bytes.
        """
    def seq_len(self, /, seq: SupportsIndex) -> int | None:
        """
        Returns the number of a sequence's tokens, `None` for an unknown one.
        """
    def sequences(self, /) -> list[int]:
        """
        Lists the sequences.
        """
    def snapshot(self, /) -> dict:
        """
        Lists all blocks that can be reused, with the number of the first event after them.
        """
    def start(self, /, seq: SupportsIndex, tokens: SupportsGetItem[int, SupportsIndex] | None = None, *, salt: bytes | bytearray | None = None, adapter: SupportsIndex | None = None, reserve: SupportsIndex = 0, reuse: bool = True, stops: SupportsGetItem[int, SupportsIndex] | None = None, hint: str | None = None) -> int:
        """
        Starts a sequence on a prompt and returns the number of its tokens that are cached already:
        steps compute the others. Prompts share blocks only with those of the same `salt` and
        `adapter`; `reserve` allocates slots for that many tokens at once. `stops` are lengths of
        the prompt at which recurrent states are kept for other prompts: see `next_stop`. `hint` is
        what is expected after its end: see `hint`.
        """
    def stats(self, /) -> dict:
        """
        Returns counts since the cache was made: reused tokens, evictions, copies, and those of the
        tiers in `"tiers"`.
        """
    def step(self, /, inputs: SupportsGetItem[int, tuple[SupportsIndex, Any]], *, drafts: dict[SupportsIndex, SupportsIndex] | None = None) -> Step:
        """
        Begins a step: one forward pass over some sequences. `inputs` are pairs of a sequence and
        its new tokens, or their number. Blocks are allocated here, or none at all.

        `with cache.step(..) as step:` commits at the end, and rolls back on an exception.
        """
    @property
    def stream(self, /) -> int | None:
        """
        The handle of the stream on which a cache on a CUDA device works, `None` for other devices.
        The legacy default stream is 0.
        """
    def take_events(self, /) -> list:
        """
        Returns the events since the last call, oldest first; none unless the cache was made with
        `events=`.
        """
    def truncate(self, /, seq: SupportsIndex, len: SupportsIndex) -> None:
        """
        Removes a sequence's tokens from the `len`-th on. With recurrent states, only to a length
        behind which they are kept.
        """
    def usage(self, /) -> dict:
        """
        Returns what is in use now: sequences, tokens, blocks, and in `"states"` the slots and the
        snapshots of each of a cache's `states`.
        """

@final
class CachePlane:
    """
    K or V of one layer of a cache on a CUDA device: `[pages, page_size, num_heads_kv, head_dim]`.

    `torch.from_dlpack` and everything else that calls `__dlpack__` makes a tensor over the same
    memory, which lives as long as the last of them. It shows what the cache has written last, and
    is only to be read.
    """
    def __dlpack__(self, /, *, stream: Any | None = None, max_version: tuple[SupportsIndex, SupportsIndex] | None = None, dl_device: tuple[SupportsIndex, SupportsIndex] | None = None, copy: bool | None = None) -> Any:
        """
        Returns the memory in a capsule of `DLPack`. `stream` waits for what the cache has
        submitted: an integer as the protocol has it, -1 for a caller that orders its work itself.
        """
    def __dlpack_device__(self, /) -> tuple[int, int]: ...
    def __repr__(self, /) -> str: ...
    @property
    def shape(self, /) -> tuple[int, int, int, int]:
        """
        The extents.
        """

@final
class Calibrator:
    """
    Observes K, V and Q of some tokens, layer by layer, and computes the constants of stored
    formats: the mean and balance of `l3` to `l6`, and the scales of `fp8-e4m3`, `int8-head`, ..

    A few hundred tokens of ordinary text suffice. The first `skip_first` positions of a sequence do
    not count, 4 unless given: they are outliers, which a full-precision prefix of a cache keeps.
    """
    def __new__(cls, /, *, layers: SupportsIndex, kv_heads: SupportsIndex, head_dim: SupportsIndex, head_dim_v: SupportsIndex | None = None, skip_first: SupportsIndex | None = None) -> Calibrator: ...
    def __repr__(self, /) -> str: ...
    def observe(self, /, layer: SupportsIndex, q: Any, k: Any, v: Any, *, first_position: SupportsIndex = 0) -> None:
        """
        Observes consecutive tokens of one sequence in one layer, as attention gets them: after
        rotary embeddings. All are float32, `[tokens, heads, head_dim]`; `first_position` is the
        position of the first token.
        """
    @property
    def tokens(self, /) -> int:
        """
        The number of counted tokens of the layer that has fewest.
        """
    def write(self, /, path: str | PathLike[str], *, model: str = "") -> None:
        """
        Writes the constants to a safetensors file, for `Cache(calibration=path)`. `model` names the
        weights.
        """

@final
class Engine:
    """
    Runs requests over a cache, in continuous batches.

    The engine takes the cache over: it decides which tokens each step has, starts and ends the
    sequences, reuses prompts, and preempts the youngest request when blocks run out. The cache's
    own calls that read still work; those that change sequences raise `StateError`.

    `context` is the most tokens of a sequence. A step has at most `max_batch` sequences and
    `max_step_tokens` tokens. `stop` are the tokens that end a text. `vocab` is the number of logits
    of a row, if it is to be checked. `draft_tokens` are proposed for each sequence and step from
    its own text. A request without room may be overtaken by `max_overtakes` younger ones.

    All calls may come from any thread.
    """
    def __new__(cls, /, cache: Cache, *, context: SupportsIndex, max_batch: SupportsIndex = 8, max_step_tokens: SupportsIndex = 512, stop: SupportsGetItem[int, SupportsIndex] | None = None, vocab: SupportsIndex | None = None, draft_tokens: SupportsIndex = 0, max_overtakes: SupportsIndex = 16) -> Engine: ...
    def __repr__(self, /) -> str: ...
    def begin_step(self, /) -> Batch | None:
        """
        Begins a step and returns its batch, `None` without work. The step stays open until
        `end_step` or `roll_back`.
        """
    @property
    def cache(self, /) -> Cache:
        """
        The cache, for its counts and events.
        """
    def cancel(self, /, request: SupportsIndex) -> dict | None:
        """
        Ends a request now, and returns its text so far; `None` for one that has ended.
        """
    def end_step(self, /, logits: Any | None = None, *, tokens: SupportsGetItem[int, SupportsGetItem[int, SupportsIndex]] | None = None) -> list:
        """
        Ends the step and returns what it gave, a list of dictionaries: `kind` is `"token"` or
        `"finished"`.

        `logits` is float32 `[rows, vocab]`, a row for each of `Batch.logit_rows`; or `tokens` has
        the tokens that the caller has chosen: for each chunk that needs logits, the accepted drafts
        and the token after them. If they are refused, the step is rolled back and the next one
        repeats it.
        """
    @property
    def has_work(self, /) -> bool:
        """
        Whether a request waits or runs.
        """
    def roll_back(self, /) -> None:
        """
        Rolls the open step back: its requests go on as if it had not begun. Does nothing without
        an open step.
        """
    def stats(self, /) -> dict:
        """
        Returns counts of the requests and steps, the seconds of the steps, and the counts of the
        cache.
        """
    def step(self, /, forward: Any) -> list:
        """
        Runs one step: begins it, calls `forward(batch)` for its logits, ends it, and returns what
        it gave; an empty list without work. An exception of `forward` rolls the step back.
        """
    def submit(self, /, prompt: SupportsGetItem[int, SupportsIndex], max_new_tokens: SupportsIndex, *, n: SupportsIndex = 1, temperature: SupportsFloat | SupportsIndex = 0.0, top_p: SupportsFloat | SupportsIndex = 1.0, seed: SupportsIndex = 0, num_beams: SupportsIndex = 1, length_penalty: SupportsFloat | SupportsIndex = 1.0, salt: bytes | bytearray | None = None, ignore_stop: bool = False, stops: SupportsGetItem[int, SupportsIndex] | None = None, hint: str | None = None) -> list[int]:
        """
        Appends a request to the queue and returns the numbers of its texts: one, or `n` texts after
        one prompt, which is computed once.

        `temperature` 0 takes the most likely token; otherwise the first tokens of share `top_p` of
        the probability are sampled from, with `seed`. `num_beams` above 1 searches instead. Prompts
        share blocks only with those of the same `salt`. `stops` are lengths of the prompt,
        ascending, at which recurrent states are kept for other prompts, beside the cache's own.
        `hint` is what is expected after the end: see `Cache.hint`.
        """

@final
class InferenceConfig:
    """
    The checked arguments of TransformerEngine's `InferenceParams`.

    `dtype` is `"f32"`, `"f16"` or `"bf16"`.
    """
    def __new__(cls, /, max_batch_size: SupportsIndex, max_sequence_length: SupportsIndex, num_heads_kv: SupportsIndex | None = None, head_dim_k: SupportsIndex | None = None, dtype: str | None = None, head_dim_v: SupportsIndex | None = None, is_paged: bool = False, total_num_pages: SupportsIndex | None = None, page_size: SupportsIndex | None = None, max_ctx_len: SupportsIndex | None = None, qkv_format: str = "bshd") -> InferenceConfig: ...
    def __repr__(self, /) -> str: ...
    @property
    def head_dim_k(self, /) -> int: ...
    @property
    def head_dim_v(self, /) -> int: ...
    @property
    def is_paged(self, /) -> bool: ...
    @property
    def max_batch_size(self, /) -> int: ...
    @property
    def max_ctx_len(self, /) -> int | None: ...
    @property
    def max_pages_per_seq(self, /) -> int:
        """
        Entries of one row of the page table: pages of the longest sequence, 1 when not paged.
        """
    @property
    def max_sequence_length(self, /) -> int: ...
    @property
    def num_heads_kv(self, /) -> int: ...
    @property
    def page_size(self, /) -> int | None: ...
    @property
    def total_num_pages(self, /) -> int | None: ...

@final
class InferenceParams:
    """
    A cache that TransformerEngine's calls drive. Sequences are numbers, layers too.
    """
    def __new__(cls, /, config: InferenceConfig, *, device: str = "cpu", threads: SupportsIndex | None = None, stream: Any | None = None) -> InferenceParams: ...
    def __repr__(self, /) -> str: ...
    def allocate_memory(self, /, layer: SupportsIndex) -> bool:
        """
        Gives a layer its memory, zeroed; `False`, and nothing changes, when it has some already.
        """
    def attend(self, /, layer: SupportsIndex, q: Any, out: Any | None = None, *, qkv_format: str, scale: SupportsFloat | SupportsIndex | None = None, softcap: SupportsFloat | SupportsIndex | None = None, sinks: SupportsGetItem[int, SupportsFloat | SupportsIndex] | None = None, window: SupportsIndex | None = None, causal: bool = True) -> Any:
        """
        Attends the step's queries over the rows of one layer, the step's own included. Returns
        `out`, a new tensor like `q` on its device unless one is given, which a `q` on CUDA needs
        that is not of torch.
        """
    def gather(self, /, layer: SupportsIndex, k: Any, v: Any) -> None:
        """
        Reads all rows of one layer, the step's own included, into `[batch, tokens, num_heads_kv,
        head_dim]`; zero past a length.
        """
    def num_free_pages(self, /) -> int:
        """
        Returns the number of pages that no sequence holds; free slots when not paged.
        """
    def page_table(self, /) -> bytearray:
        """
        Returns the pages of every row as `int32`, `[max_batch_size, max_pages_per_seq]`: 0 past a
        row's pages and past the batch.
        """
    def pages(self, /, sequence: SupportsIndex) -> list[int]:
        """
        Returns the pages of a sequence in token order; none for an unknown one.
        """
    def planes(self, /, layer: SupportsIndex) -> tuple[CachePlane, CachePlane]:
        """
        Returns K and V of a layer of a cache on a CUDA device, `[pages, page_size, num_heads_kv,
        head_dim]`: the memory itself. When not paged, each sequence has a page of its longest
        length.
        """
    def pre_step(self, /, step: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex]]) -> None:
        """
        Ends the step before and prepares the next, entry by entry `(sequence, new tokens)`.
        """
    def reset(self, /) -> None:
        """
        Forgets every sequence; layers keep their memory.
        """
    def roll_back(self, /) -> None:
        """
        Takes the prepared step back, if there is one.
        """
    def sequences(self, /) -> list[tuple[int, int, int]]:
        """
        Returns the batch, `(sequence, tokens before the step, tokens after it)` by row.
        """
    def step(self, /, layer: SupportsIndex, new_k: Any, new_v: Any, qkv_format: str) -> None:
        """
        Writes the keys and values of the step's tokens into one layer.
        """
    @property
    def stream(self, /) -> int | None:
        """
        The handle of the stream on which a cache on a CUDA device works, `None` for other devices.
        The legacy default stream is 0.
        """

@final
class States:
    """
    Recurrent states of some layers, for `Cache(states=[..])`.

    A state is the result of all tokens before it: the window of a convolution, the matrix of a
    linear attention. `parts` are its tensors, `(shape, type)` with up to three axes and
    `"float32"`, `"float16"` or `"bfloat16"`. The layers have no keys and values unless
    `attention` is set or `windows` of the cache has them.

    `slots` are running states: one for each sequence with tokens, and one for each entry of a step,
    with one more for each draft up to `drafts`. `snapshots` are copies behind prompts, from which
    other prompts go on; none unless set, and then no prompt is reused. `snapshot_format` is
    `"f16"`, which halves float32, `"int8"`, which leaves about a quarter of it, or `"same"`.
    `per_path` bounds the snapshots along one text. `grid` takes them behind multiples of that many
    tokens alone.
    """
    def __new__(cls, /, *, layers: SupportsGetItem[int, SupportsIndex], parts: SupportsGetItem[int, tuple[SupportsGetItem[int, SupportsIndex], str]], slots: SupportsIndex, snapshots: SupportsIndex = 0, snapshot_format: str = "f16", per_path: SupportsIndex | None = None, drafts: SupportsIndex = 0, grid: SupportsIndex = 1, attention: bool = False) -> States: ...
    def __repr__(self, /) -> str: ...
    @property
    def attention(self, /) -> bool: ...
    @property
    def drafts(self, /) -> int: ...
    @property
    def grid(self, /) -> int: ...
    @property
    def layers(self, /) -> list[int]: ...
    @property
    def parts(self, /) -> list[tuple[list[int], str]]:
        """
        The tensors of a layer's state, `(shape, type)`.
        """
    @property
    def per_path(self, /) -> int | None: ...
    @property
    def slots(self, /) -> int: ...
    @property
    def snapshot_format(self, /) -> str:
        """
        The form of snapshots.
        """
    @property
    def snapshots(self, /) -> int: ...

@final
class Step:
    """
    A step of a cache, from `Cache.step` on.

    Every layer writes the keys and values of the step's tokens and attends their queries over
    everything that their sequences have. `with` commits the step at its end.
    """
    def __enter__(self, /) -> Step: ...
    def __exit__(self, /, kind: type | None, _error: Any | None, _trace: Any | None) -> bool:
        """
        Commits, or rolls back if an exception has ended the block.
        """
    def __repr__(self, /) -> str: ...
    def attend(self, /, layer: SupportsIndex, q: Any, k: Any | None = None, v: Any | None = None, out: Any | None = None, *, scale: SupportsFloat | SupportsIndex | None = None, softcap: SupportsFloat | SupportsIndex | None = None, sinks: SupportsGetItem[int, SupportsFloat | SupportsIndex] | None = None, causal: bool = True, axes: str | None = None) -> Any:
        """
        Writes the keys and values of one layer, and attends its queries. Returns `out`, a new
        tensor like `q` on its device unless one is given, which a `q` on CUDA needs that is not of
        torch.

        `[tokens, heads, head_dim]` has the tokens of all sequences one after another. `axes` names
        the order of tensors with 4 axes, with one entry for each input: `"bshd"`, `"sbhd"`,
        `"bhsd"`. Without `k` and `v`, the layer attends to what `write` has written. `scale` is
        `1 / sqrt(head_dim)` unless it is given; the window is the layer's.
        """
    def commit(self, /, accepted: SupportsGetItem[int, SupportsIndex] | None = None) -> None:
        """
        Ends the step: its tokens are cached. `accepted` are the tokens of each input that stay,
        where drafts were computed.
        """
    def gather(self, /, layer: SupportsIndex, plane: str, out: Any) -> Any:
        """
        Returns all rows of one layer, the step's own included: `[inputs, tokens, kv_heads,
        head_dim]`, zero past the end of a sequence. `plane` is `"k"` or `"v"`.
        """
    @property
    def positions(self, /) -> Any:
        """
        The positions of the step's tokens in their sequences, a `memoryview` of `int32`, which
        `numpy.asarray` and `torch.tensor` take. Rotary embeddings need them.
        """
    def read_state(self, /, layer: SupportsIndex, part: SupportsIndex, out: Any | None = None) -> Any:
        """
        Returns a part of a layer's recurrent state as it was before this step, `[inputs, ..]`:
        zeros for a sequence that begins. `out` is a tensor of that shape, a new one of numpy in f32
        unless given.
        """
    def roll_back(self, /) -> None:
        """
        Ends the step as if it had not begun.
        """
    def write(self, /, layer: SupportsIndex, k: Any, v: Any, *, axes: str | None = None) -> None:
        """
        Writes the keys and values of one layer.
        """
    def write_state(self, /, layer: SupportsIndex, part: SupportsIndex, state: Any) -> None:
        """
        Writes a part of a layer's recurrent state behind all new tokens of each input, `[inputs,
        ..]`. A step commits once every part of every layer with a state is written.
        """
    def write_state_after(self, /, layer: SupportsIndex, part: SupportsIndex, tokens: SupportsIndex, state: Any) -> None:
        """
        Writes a part of a layer's recurrent state behind the first `tokens` new tokens of each
        input, for drafts of which `commit` may keep only these.
        """

def device_names() -> list[str]:
    """
    Lists the devices that this build can open here, by name.
    """

def feature_names() -> list[str]:
    """
    Lists the backends that this build has.
    """
