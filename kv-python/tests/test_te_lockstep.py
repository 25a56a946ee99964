"""TransformerEngine's own cache and kvblock.te in lockstep. Needs torch, and wheels.

Wheels of transformer-engine are pure Python: `pip download --no-deps transformer-engine==2.20.2`.
They lie in the folder that KVBLOCK_TE_WHEELS names, `target/te` unless set. KVBLOCK_TE_STEPS and
KVBLOCK_TE_SEEDS make the walks longer, which are printed then.
"""

import contextlib
import itertools
import os
import pathlib
import re
import sys
import types
import unittest
import warnings
import zipfile
from collections import OrderedDict
from unittest import mock

try:
    import torch
except ImportError:
    torch = None
else:
    from kvblock.te import InferenceParams, KVCacheManager
    from te_steps import FORMATS, MAX_BATCH, WRONG, Chosen, Model, addressed, feed, pack, settings
    from torch.overrides import TorchFunctionMode

ROOT = pathlib.Path(__file__).parents[2]
WHEELS = pathlib.Path(os.environ.get("KVBLOCK_TE_WHEELS", ROOT / "target" / "te"))
STEPS = int(os.environ.get("KVBLOCK_TE_STEPS", "25"))
SEEDS = int(os.environ.get("KVBLOCK_TE_SEEDS", "1"))


def wheels():
    """The wheels of TransformerEngine, by version."""
    found = {}
    for path in sorted(WHEELS.glob("transformer_engine-*.whl")):
        found[path.name.split("-")[1]] = path
    return found


def copy_to_kv_cache(
    new_k, new_v, k_cache, v_cache, table, cu_new, cu_cached, qkv_format, *sizes_and_reindex
):
    """What TransformerEngine's kernel of this name does, from its signature."""
    *_, max_pages, must_reindex = sizes_and_reindex
    cu_new, cu_cached, is_paged = cu_new.tolist(), cu_cached.tolist(), max_pages > 1
    if not is_paged and must_reindex:
        # Slots of the step before, finished sequences last.
        for row, slot in enumerate(table.tolist()[: len(cu_new) - 1]):
            for cache in (k_cache, v_cache):
                cache[row] = cache[slot].clone()
    for row in range(len(cu_new) - 1):
        count, end = cu_new[row + 1] - cu_new[row], cu_cached[row + 1] - cu_cached[row]
        for token in range(count):
            at = end - count + token
            source = [(row, token), (token, row), (cu_new[row] + token,)][qkv_format]
            target = (row, at)
            if is_paged:
                page = k_cache.shape[1]
                target = (int(table[row, at // page]), at % page)
            k_cache[target], v_cache[target] = new_k[source], new_v[source]


class Original:
    """TransformerEngine's inference module of a wheel, on the CPU.

    Replaced are the kernel that copies rows, einops, and the device.
    """

    def __init__(self, wheel):
        name = "transformer_engine/pytorch/attention/"
        with zipfile.ZipFile(wheel) as archive:
            source = archive.read(name + "inference.py").decode()
            self.others = "".join(
                archive.read(entry).decode()
                for entry in archive.namelist()
                if entry.endswith(".py") and not entry.endswith("attention/inference.py")
            )
        numbers = dict(zip(FORMATS, range(3)))
        stubs = {
            "transformer_engine_torch": dict(copy_to_kv_cache=copy_to_kv_cache),
            "transformer_engine": {},
            "transformer_engine.pytorch": {},
            "transformer_engine.pytorch.cpp_extensions": {},
            "transformer_engine.pytorch.cpp_extensions.fused_attn": dict(QKVFormat=numbers),
            "transformer_engine.pytorch.attention": {},
            "transformer_engine.pytorch.attention.custom_ops": dict(
                copy_to_kv_cache=copy_to_kv_cache, QKV_FORMAT_VALUE=numbers
            ),
            "einops": dict(rearrange=lambda x, pattern, b: x.reshape(b, -1, *x.shape[2:])),
        }
        modules = {}
        for module, contents in stubs.items():
            modules[module] = types.ModuleType(module)
            vars(modules[module]).update(contents)
        names = {"__name__": "inference"}
        with mock.patch.dict(sys.modules, modules):
            exec(compile(source, "inference.py", "exec"), names)
        self.names = types.SimpleNamespace(**names)

    @contextlib.contextmanager
    def on_cpu(self):
        class OnCpu(TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                kwargs = dict(kwargs or {})
                if kwargs.get("device") is not None:
                    kwargs["device"] = "cpu"
                return function(*args, **kwargs)

        with (
            mock.patch("torch.cuda.current_device", lambda: "cpu"),
            warnings.catch_warnings(),
            OnCpu(),
        ):
            warnings.simplefilter("ignore", UserWarning)
            yield


class Walk:
    """One random walk of TransformerEngine and of the mirror, step by step.

    TransformerEngine counts one token for a live sequence and orders arrivals by a hash set. A
    chunk is an arrival with its whole text there, and steps have the order of its rows.
    """

    def __init__(self, case, original, is_paged, qkv_format, seed):
        self.case, self.original, self.qkv_format = case, original, qkv_format
        dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
        given = settings(is_paged, dtype=dtype, qkv_format=qkv_format)
        self.of = InferenceParams(**given)
        with original.on_cpu():
            self.te = original.names.InferenceParams(**given)
        case.assertEqual(repr(self.of), repr(self.te))
        self.chosen, self.model = Chosen(seed), Model((1, 2), dtype, seed)
        for layer in self.model.layers:
            self.of.allocate_memory(layer)
            self.te.allocate_memory(layer)
        #: The names of the sequences there.
        self.aliases, self.fresh = {}, itertools.count(1)
        self.steps = self.chunks = self.resets = 0

    def step(self):
        draw = self.chosen.random
        if draw.random() < 0.04:
            self.resets += 1
            self.of.reset()
            self.te.reset()
            self.model.cached, self.chosen.lengths, self.aliases = {}, {}, {}
            return
        # Where it is paged, TransformerEngine takes no empty step.
        before = dict(self.chosen.lengths)
        step = self.chosen.step(in_order=True, least=int(self.of.is_paged))
        step = self.arrange(step, before)
        # The numbers of the chosen sequences in the order of the rows.
        self.chosen.lengths = {seq: self.chosen.lengths[seq] for seq in step}
        of_te = OrderedDict()
        for seq, tokens in step.items():
            is_chunk = seq in before and tokens != 1
            self.chunks += is_chunk
            of_te[self.aliases[seq]] = tokens + (before[seq] if is_chunk else 0)
        self.te.pre_step(of_te)
        self.case.assertEqual(list(self.te.sequences), list(of_te), "the walk chose a wrong order")
        self.run(step, of_te, draw)
        self.steps += 1

    def arrange(self, step, before):
        """Orders a step as the rows of TransformerEngine will be, and names its sequences there."""
        tracked = self.te.cache_manager.sequences
        kept = {self.aliases[seq]: seq for seq in step if seq in before and step[seq] == 1}
        live = [kept[alias] for alias in tracked if alias in kept]
        new = [seq for seq in step if seq not in live]
        aliases = {seq: self.aliases[seq] for seq in live}
        left = OrderedDict.fromkeys(name for name in tracked if name in aliases.values())
        while True:
            # Some numbers have no order that their set keeps.
            names = [next(self.fresh) for _ in new]
            for order in itertools.permutations(names):
                entries = OrderedDict.fromkeys([*aliases.values(), *order])
                if list(entries.keys() - left.keys()) == list(order):
                    self.aliases = aliases | dict(zip(new, order))
                    return OrderedDict((seq, step[seq]) for seq in [*live, *new])

    def run(self, step, of_te, draw):
        case, of, te, model = self.case, self.of, self.te, self.model
        batch = draw.choice((None, MAX_BATCH))
        feed(case, of, model, step, self.qkv_format, batch)
        count = len(step)
        case.assertEqual(list(of.sequences.values()), list(te.sequences.values()))
        case.assertEqual(of.cu_seqlens_kv.tolist(), te.cu_seqlens_kv.tolist())
        pairs = enumerate(zip(step.values(), of_te.values()))
        same = [row for row, (ours, theirs) in pairs if ours == theirs]
        for ours, theirs in (
            (of.cu_seqlens_q.diff(), te.cu_seqlens_q.diff()),
            (of.get_seqlens_pre_step(), te.get_seqlens_pre_step()),
        ):
            case.assertEqual(ours[same].tolist(), theirs[same].tolist())
        if len(same) == count:
            case.assertEqual(of.cu_seqlens_q.tolist(), te.cu_seqlens_q.tolist())
        if of.is_paged:
            manager = te.cache_manager
            pages = [manager.get_page_count(alias) for alias in of_te]
            case.assertEqual([of.cache_manager.get_page_count(seq) for seq in step], pages)
            case.assertEqual(of.cache_manager.has_free_page(), manager.has_free_page())
        for layer in model.layers if step else ():
            self.compare(layer, step, of_te, batch)

    def compare(self, layer, step, of_te, batch):
        """Steps a layer of TransformerEngine, and compares what both return."""
        case, of, te, model = self.case, self.of, self.te, self.model
        tensors = []
        for entries in (of_te, step):
            for plane in (0, 1):
                new = []
                for seq, tokens in zip(step, entries.values()):
                    cached = model.cached[seq][layer][plane]
                    new.append(cached[len(cached) - tokens :])
                tensors.append(pack(new, self.qkv_format, batch))
        theirs = te.step(layer, *tensors[:2], self.qkv_format)
        # The mirror has taken these before: a layer's step may be repeated.
        ours = of.step(layer, *tensors[2:], self.qkv_format)
        case.assertEqual([x.shape for x in ours[:4]], [x.shape for x in theirs[:4]])
        case.assertEqual([x.dtype for x in ours[:4]], [x.dtype for x in theirs[:4]])
        case.assertEqual(ours[4:], theirs[4:])
        lengths = model.lengths()
        if of.is_paged:
            tables = of.cache_manager.page_table, te.cache_manager.page_table
            case.assertEqual(*[(table.shape, table.dtype) for table in tables])
            whole = of.convert_paged_to_nonpaged(layer), te.convert_paged_to_nonpaged(layer)
        else:
            managers = of.cache_manager, te.cache_manager
            tables = [manager.batch_indices_post_step[:, None] for manager in managers]
            case.assertTrue(torch.equal(*tables))
            whole = ours, theirs
        for plane in (0, 1):
            both = zip((ours, theirs), tables)
            found = [addressed(planes[plane], table, lengths) for planes, table in both]
            case.assertTrue(all(map(torch.equal, *found)))
            for row, length in enumerate(lengths):
                pair = [planes[plane][row, :length] for planes in whole]
                case.assertTrue(torch.equal(*pair))


@unittest.skipIf(torch is None, "torch is not installed")
class Lockstep(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.originals = {version: Original(wheel) for version, wheel in wheels().items()}
        if not cls.originals:
            raise unittest.SkipTest(f"there is no wheel of transformer-engine in {WHEELS}")

    def each(self, call):
        """Calls with every version, form and seed, and adds what is returned."""
        totals = {version: [] for version in self.originals}
        of = itertools.product(self.originals.items(), (False, True), FORMATS, range(SEEDS))
        for (version, original), is_paged, qkv_format, seed in of:
            with self.subTest(version, is_paged=is_paged, qkv_format=qkv_format, seed=seed):
                with original.on_cpu():
                    totals[version].append(call(original, is_paged, qkv_format, seed))
        if "KVBLOCK_TE_STEPS" in os.environ:
            for version, counts in totals.items():
                print(f"{self.id()}, {version}: {[sum(count) for count in zip(*counts)]}")

    def test_random_steps_agree(self):
        def run(*of):
            walk = Walk(self, *of)
            while walk.steps < STEPS:
                walk.step()
            return walk.steps, walk.chunks, walk.resets

        self.each(run)

    def test_its_class_takes_this_manager(self):
        def run(original, is_paged, qkv_format, seed):
            params = original.names.InferenceParams(
                **settings(is_paged, qkv_format=qkv_format, custom_cache_manager=KVCacheManager)
            )
            if not is_paged:
                # It gathers where it is paged alone.
                manager = params.cache_manager
                params.convert_paged_to_nonpaged = manager.convert_paged_to_nonpaged
            model, chosen = Model((1, 2), torch.float32, seed), Chosen(1000 + seed)
            for layer in model.layers:
                self.assertNotIn(layer, params.cache_manager.cache)
                params.allocate_memory(layer)
                self.assertIn(layer, params.cache_manager.cache)
            for number in range(STEPS):
                if number % 20 == 19:
                    params.reset()
                    model.cached, chosen.lengths = {}, {}
                batch = chosen.random.choice((None, MAX_BATCH))
                feed(self, params, model, chosen.step(), qkv_format, batch)
            return (STEPS,)

        self.each(run)

    def test_it_is_wrong_where_the_list_says(self):
        for version, original in self.originals.items():
            for (name, steps, answer, _), is_paged in itertools.product(WRONG, (False, True)):
                with self.subTest(name, version=version, is_paged=is_paged), original.on_cpu():
                    params = original.names.InferenceParams(**settings(is_paged))
                    for step in steps:
                        params.pre_step(OrderedDict(step))
                    self.assertEqual(list(params.sequences.items()), answer)

    def test_all_that_its_layers_read_is_there(self):
        for version, original in self.originals.items():
            read = {
                "params": set(re.findall(r"\binference_params\.(\w+)", original.others)),
                "manager": set(re.findall(r"\bcache_manager\.(\w+)", original.others)),
            }
            self.assertTrue({"step", "is_paged"} <= read["params"], version)
            self.assertTrue({"cache", "page_table"} <= read["manager"], version)
            params = InferenceParams(**settings(True))
            for kind, object in (("params", params), ("manager", params.cache_manager)):
                for name in read[kind]:
                    self.assertTrue(hasattr(object, name), (version, name))


if __name__ == "__main__":
    unittest.main()
