"""What the tests of kvblock.te share: a plain model of a cache, random steps, and lists."""

import itertools
import random
from collections import OrderedDict

import torch
from kvblock.te import InferenceParams

FORMATS = ("bshd", "sbhd", "thd")

MAX_BATCH, MAX_SEQ, PAGE, KV_HEADS, DIM_K, DIM_V = 5, 24, 4, 2, 4, 3
PAGES = MAX_BATCH * MAX_SEQ // PAGE

#: What TransformerEngine's layers, and programs over them, read from outside: of the parameters, of
#: their cache manager, and of the latter where it is paged. The lockstep looks for more in a wheel.
NAMES = {
    "params": {
        "attributes": """max_batch_size max_sequence_length num_heads_kv head_dim_k head_dim_v dtype
            is_paged total_num_pages page_size max_ctx_len cache_manager cache_qkv_format
            input_qkv_format output_qkv_format sequences sequences_pre_step batch_size cu_seqlens_q
            cu_seqlens_kv pre_step_seqlens""",
        "methods": """allocate_memory pre_step get_seqlens_pre_step convert_paged_to_nonpaged step
            reset""",
    },
    "manager": {
        "attributes": """max_batch_size max_seqlen num_heads head_dim_k head_dim_v dtype cache
            sequences batch_indices_post_step""",
        "methods": "allocate_memory pre_step step reset",
    },
    "paged": {
        "attributes": "total_num_pages page_size max_pages_per_seq page_table",
        "methods": """print_cache get_sequence_count get_sequence_lengths has_free_page
            get_page_count get_page_list get_page_table""",
    },
}

#: Steps whose rows TransformerEngine has wrong: after the last step the sequences of its rows with
#: their lengths, and the right ones. Row ``i`` is entry ``i``, a length grows by what came.
WRONG = [
    (
        "arrivals follow a hash set: 7, 9",
        [[(7, 5), (9, 3)]],
        [(9, 3), (7, 5)],
        [(7, 5), (9, 3)],
    ),
    (
        "arrivals follow a hash set: 6, 7, 8",
        [[(6, 2), (7, 3), (8, 4)]],
        [(8, 4), (6, 2), (7, 3)],
        [(6, 2), (7, 3), (8, 4)],
    ),
    (
        "arrivals follow a hash set: 5, 2",
        [[(5, 1), (2, 3)]],
        [(2, 3), (5, 1)],
        [(5, 1), (2, 3)],
    ),
    (
        "live sequences in another order",
        [[(1, 3), (2, 5)], [(2, 1), (1, 1)]],
        [(1, 4), (2, 6)],
        [(2, 6), (1, 4)],
    ),
    (
        "an arrival before live sequences",
        [[(2, 3), (3, 2)], [(0, 10), (2, 1), (3, 1)]],
        [(2, 4), (3, 3), (0, 10)],
        [(0, 10), (2, 4), (3, 3)],
    ),
    (
        "a live sequence with four tokens",
        [[(0, 3)], [(0, 4)]],
        [(0, 4)],
        [(0, 7)],
    ),
    (
        "a live sequence without a token",
        [[(0, 3), (1, 2)], [(0, 0), (1, 1)]],
        [(0, 4), (1, 3)],
        [(0, 3), (1, 3)],
    ),
]


def settings(paged, /, **changes):
    given = dict(
        max_batch_size=MAX_BATCH,
        max_sequence_length=MAX_SEQ,
        num_heads_kv=KV_HEADS,
        head_dim_k=DIM_K,
        head_dim_v=DIM_V,
        dtype=torch.float32,
        max_ctx_len=MAX_SEQ,
    )
    if paged:
        given |= dict(is_paged=True, page_size=PAGE, total_num_pages=PAGES)
    return given | changes


def rows(tokens, dtype, generator):
    """Keys and values of new tokens: any numbers, all different."""
    return tuple(
        torch.randn(tokens, KV_HEADS, dim, generator=generator).to(dtype) for dim in (DIM_K, DIM_V)
    )


def pack(of_rows, qkv_format, batch=None):
    """One tensor of the rows of each sequence; what is padding is not a number."""
    of_rows = list(of_rows)
    if qkv_format == "thd":
        return torch.cat(of_rows)
    longest = max(map(len, of_rows))
    padded = of_rows[0].new_full(
        (batch or len(of_rows), longest, *of_rows[0].shape[1:]), float("nan")
    )
    for row, own in enumerate(of_rows):
        padded[row, : len(own)] = own
    return padded if qkv_format == "bshd" else padded.transpose(0, 1).contiguous()


def addressed(plane, table, lengths):
    """The rows of each sequence in what ``step`` has returned, found by the page table."""
    found = []
    for row, length in enumerate(lengths):
        pages = table[row, : -(-length // plane.shape[1])].long()
        found.append(plane[pages].flatten(0, 1)[:length])
    return found


class Model:
    """What a cache has to hold: the rows of every sequence, by layer and plane."""

    def __init__(self, layers, dtype, seed):
        self.layers, self.dtype = layers, dtype
        self.generator = torch.Generator().manual_seed(seed)
        self.cached = {}

    def step(self, step):
        """Ends and begins sequences. Returns the new rows: ``[layer][sequence] = (k, v)``."""
        self.cached = {seq: self.cached.get(seq, {}) for seq in step}
        new = {layer: {} for layer in self.layers}
        for layer, (seq, tokens) in itertools.product(self.layers, step.items()):
            new[layer][seq] = rows(tokens, self.dtype, self.generator)
            old = self.cached[seq].get(layer)
            both = new[layer][seq] if old is None else map(torch.cat, zip(old, new[layer][seq]))
            self.cached[seq][layer] = tuple(both)
        return new

    def lengths(self):
        return [len(cached[self.layers[0]][0]) for cached in self.cached.values()]

    def check(self, case, params, layer, output):
        """Compares what ``step`` returns with what is cached."""
        lengths = self.lengths()
        planes = output[:2]
        table = params.cache_manager.page_table
        whole = params.convert_paged_to_nonpaged(layer)
        for plane, (rows_of, converted) in enumerate(zip(planes, whole)):
            case.assertEqual(converted.shape[:2], (len(lengths), MAX_SEQ))
            found = addressed(rows_of, table, lengths)
            for row, (seq, cached) in enumerate(self.cached.items()):
                right = cached[layer][plane]
                case.assertTrue(torch.equal(found[row], right), (seq, layer, plane))
                case.assertTrue(torch.equal(converted[row, : len(right)], right), (seq, layer))
                if isinstance(params, InferenceParams):
                    case.assertFalse(converted[row, len(right) :].any())
        sums = [0, *itertools.accumulate(lengths)]
        case.assertEqual(output[3].tolist(), sums + sums[-1:] * (MAX_BATCH - len(lengths)))


def feed(case, params, model, step, qkv_format, batch=None, place=lambda rows: rows):
    """Runs a step over all layers, and compares each with the model. ``place`` is where rows go."""
    before = dict(zip(model.cached, model.lengths())) if model.cached else {}
    params.pre_step(OrderedDict(step))
    new = model.step(step)
    case.assertEqual(list(params.sequences), list(step))
    case.assertEqual(list(params.sequences.values()), model.lengths())
    pre = [before.get(seq, 0) for seq in step]
    case.assertEqual(list(params.sequences_pre_step.values()), pre)
    case.assertEqual(params.get_seqlens_pre_step().tolist()[: len(pre)], pre)
    case.assertEqual(params.batch_size, len(step))
    sums = [0, *itertools.accumulate(step.values())]
    for layer in model.layers:
        if not step:
            break
        k, v = (pack([new[layer][s][i] for s in step], qkv_format, batch) for i in (0, 1))
        k, v = place(k), place(v)
        output = params.step(layer, k, v, qkv_format)
        case.assertEqual(output[2].tolist(), sums + sums[-1:] * (MAX_BATCH - len(step)))
        case.assertEqual(output[4], MAX_SEQ)
        expected = {"bshd": "bshd", "sbhd": "sbhd_2bshd", "thd": "thd_2bshd"}[qkv_format]
        case.assertEqual((output[5], params.output_qkv_format), (expected, expected))
        outer = [PAGES, PAGE]
        if not params.is_paged:
            outer = [MAX_BATCH if qkv_format == "thd" else batch or len(step), MAX_SEQ]
        shapes = [list(plane.shape) for plane in output[:2]]
        case.assertEqual(shapes, [[*outer, KV_HEADS, dim] for dim in (DIM_K, DIM_V)])
        model.check(case, params, layer, output)


class Chosen:
    """Random steps: arrivals, departures, chunks of a prompt, single tokens, none."""

    def __init__(self, seed):
        self.random, self.next, self.lengths = random.Random(seed), 0, {}

    def step(self, most=MAX_BATCH, in_order=False, least=0):
        draw = self.random
        stay = [s for s in self.lengths if draw.random() < 0.8 and self.lengths[s] < MAX_SEQ]
        tokens = {s: 1 for s in stay[:most]}
        for seq in tokens:
            if draw.random() < 0.25:
                room = MAX_SEQ - self.lengths[seq]
                tokens[seq] = draw.randint(0 if in_order is False else 1, min(room, 7))
        while len(tokens) < most and (len(tokens) < least or draw.random() < 0.4):
            self.next += draw.randint(1, 3)
            tokens[self.next] = draw.randint(1, MAX_SEQ // 2)
        entries = list(tokens.items())
        if not in_order:
            draw.shuffle(entries)
        self.lengths = {s: self.lengths.get(s, 0) + n for s, n in entries}
        return OrderedDict(entries)
