"""The cache from Python, with numpy alone: every call, against attention computed by hand."""

import gc
import math
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import unittest

import kvblock
import numpy

LAYERS, HEADS, KV_HEADS, DIM = 2, 4, 2, 8


def cache(**settings):
    given = dict(layers=LAYERS, kv_heads=KV_HEADS, head_dim=DIM, format="f32", block_size=4)
    given |= settings
    if "memory" not in given:
        given.setdefault("num_blocks", 64)
    return kvblock.Cache(**given)


class Model:
    """Queries, keys and values that follow from a token, its position and the layer."""

    def rows(self, kind, layer, tokens, first, heads):
        rows = numpy.empty((len(tokens), heads, DIM), dtype="float32")
        for index, token in enumerate(tokens):
            seed = [kind, layer, token, first + index]
            rows[index] = numpy.random.default_rng(seed).standard_normal((heads, DIM))
        return rows

    def q(self, layer, tokens, first):
        return self.rows(0, layer, tokens, first, HEADS)

    def k(self, layer, tokens, first):
        return self.rows(1, layer, tokens, first, KV_HEADS)

    def v(self, layer, tokens, first):
        return self.rows(2, layer, tokens, first, KV_HEADS)

    def expected(self, layer, tokens, first, window_left=None):
        """Attention of ``tokens[first:]`` over all of them."""
        q, k, v = (f(layer, tokens, 0) for f in (self.q, self.k, self.v))
        k, v = (numpy.repeat(x, HEADS // KV_HEADS, axis=1) for x in (k, v))
        scores = numpy.einsum("qhd,khd->hqk", q, k) / math.sqrt(DIM)
        at = numpy.arange(len(tokens))
        hidden = at[None] > at[:, None]
        if window_left is not None:
            hidden |= at[None] < at[:, None] - window_left
        scores = numpy.where(hidden[None], -numpy.inf, scores)
        weights = numpy.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return numpy.einsum("hqk,khd->qhd", weights, v)[first:]


MODEL = Model()


def run(of, seq, tokens, done, check=True, windows=None):
    """Computes ``tokens[done:]`` in one step, and compares every layer."""
    new = tokens[done:]
    with of.step([(seq, new)]) as step:
        assert list(step.positions) == list(range(done, len(tokens)))
        for layer in range(LAYERS):
            q, k, v = (f(layer, new, done) for f in (MODEL.q, MODEL.k, MODEL.v))
            out = step.attend(layer, q, k, v)
            if check:
                window = (windows or {}).get(layer)
                expected = MODEL.expected(layer, tokens, done, window)
                numpy.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)


class Steps(unittest.TestCase):
    def test_prompts_and_tokens_attend_to_all_before(self):
        of, tokens = cache(), list(range(11))
        self.assertEqual(of.start(7, tokens), 0)
        run(of, 7, tokens, 0)
        for more in range(20, 29):
            tokens.append(more)
            run(of, 7, tokens, len(tokens) - 1)
        self.assertEqual(of.seq_len(7), 20)
        self.assertEqual(of.sequences(), [7])

    def test_a_prefix_is_computed_once(self):
        of, system = cache(), list(range(100, 116))
        for seq, question in enumerate(([1, 2, 3], [4, 5])):
            tokens = system + question
            reused = of.start(seq, tokens)
            self.assertEqual(reused, 0 if seq == 0 else 16)
            run(of, seq, tokens, reused)
        stats = of.stats()
        self.assertEqual((stats["requests"], stats["hit_tokens"]), (2, 16))
        self.assertEqual(of.start(2, system + [9], salt=b"another tenant"), 0)
        self.assertEqual(of.start(3, system + [9], adapter=1), 0)
        self.assertEqual(of.start(4, system + [9], reuse=False), 0)

    def test_hints_change_no_result(self):
        hints = (None, "ended", "idle", "tool-call", "within=2.5")
        texts = []
        for hint in hints:
            of, tokens = cache(), list(range(100, 120))
            of.start(0, tokens, hint=hint)
            run(of, 0, tokens, 0)
            of.hint(0, "idle")
            of.hint(0, hint)
            of.release(0)
            texts.append(of.start(1, tokens))
        self.assertEqual(texts, [19] * len(hints))
        for wrong in ("soon", "within=-1", ""):
            with self.assertRaisesRegex(ValueError, "unknown return hint"):
                of.start(2, [1], hint=wrong)
            with self.assertRaisesRegex(ValueError, "ended, idle, tool-call, within=SECONDS"):
                of.hint(1, wrong)
        self.assertEqual(of.sequences(), [1])
        with self.assertRaises(Exception) as unknown:
            of.hint(7, "ended")
        self.assertIn("7", str(unknown.exception))

    def test_batches_have_an_entry_for_each_input(self):
        of = cache()
        prompts = {0: [1, 2, 3, 4, 5], 1: [6, 7], 2: [8, 9, 10]}
        for seq, tokens in prompts.items():
            of.start(seq, tokens)
        packed = [(seq, tokens) for seq, tokens in prompts.items()]
        with of.step(packed) as step:
            for layer in range(LAYERS):
                rows = [
                    numpy.concatenate([f(layer, tokens, 0) for tokens in prompts.values()])
                    for f in (MODEL.q, MODEL.k, MODEL.v)
                ]
                out = step.attend(layer, *rows)
                expected = [MODEL.expected(layer, tokens, 0) for tokens in prompts.values()]
                numpy.testing.assert_allclose(out, numpy.concatenate(expected), rtol=2e-5, atol=2e-5)

    def test_axes_are_named_for_four(self):
        tokens = [3, 1, 4, 1, 5]
        packed = [f(0, tokens, 0) for f in (MODEL.q, MODEL.k, MODEL.v)]
        forms = {
            "bshd": [x[None] for x in packed],
            "sbhd": [x[:, None] for x in packed],
            "bhsd": [x[None].swapaxes(1, 2) for x in packed],
        }
        apart = [numpy.ascontiguousarray(x) for x in forms["bhsd"]]
        expected = MODEL.expected(0, tokens, 0)
        for axes, (q, k, v) in [*forms.items(), ("bhsd", apart)]:
            of = cache(layers=1)
            of.start(0)
            with of.step([(0, len(tokens))]) as step:
                out = step.attend(0, q, k, v, axes=axes)
                self.assertEqual(out.shape, q.shape)
                back = {"bshd": out[0], "sbhd": out[:, 0], "bhsd": out[0].swapaxes(0, 1)}[axes]
                numpy.testing.assert_allclose(back, expected, rtol=2e-5, atol=2e-5)
                with self.assertRaisesRegex(ValueError, "axes="):
                    step.attend(0, q, k, v)
                with self.assertRaisesRegex(ValueError, "axes=.bhds."):
                    step.attend(0, q, k, v, axes="bhds")

    def test_rows_are_read_where_they_lie_and_copied_where_they_must(self):
        tokens = [2, 7, 1, 8]
        q, k, v = (f(0, tokens, 0) for f in (MODEL.q, MODEL.k, MODEL.v))
        fused = numpy.concatenate([q, k, v], axis=1)
        parts = fused[:, :HEADS], fused[:, HEADS : HEADS + KV_HEADS], fused[:, HEADS + KV_HEADS :]
        apart = [numpy.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1) for x in (q, k, v)]
        backwards = [numpy.ascontiguousarray(x[::-1])[::-1] for x in (q, k, v)]
        for given in (parts, apart, backwards):
            of = cache(layers=1)
            of.start(0)
            with of.step([(0, 4)]) as step:
                out = step.attend(0, *given)
            numpy.testing.assert_allclose(out, MODEL.expected(0, tokens, 0), rtol=2e-5, atol=2e-5)

    def test_an_output_of_the_caller_is_written(self):
        of, tokens = cache(layers=1), [5, 6, 7]
        of.start(0, tokens)
        q, k, v = (f(0, tokens, 0) for f in (MODEL.q, MODEL.k, MODEL.v))
        out = numpy.full((3, HEADS, DIM), numpy.nan, dtype="float32")
        with of.step([(0, tokens)]) as step:
            step.write(0, k, v)
            self.assertIs(step.attend(0, q, out=out), out)
            numpy.testing.assert_allclose(out, MODEL.expected(0, tokens, 0), rtol=2e-5, atol=2e-5)
            frozen = out.copy()
            frozen.flags.writeable = False
            with self.assertRaisesRegex((ValueError, BufferError), "read-?only"):
                step.attend(0, q, out=frozen)
            with self.assertRaisesRegex(ValueError, "shares memory"):
                step.attend(0, q, out=q)
            with self.assertRaises(ValueError):
                step.attend(0, q, out=out[:, ::-1])

    def test_windows_are_those_of_the_layers(self):
        of, tokens = cache(windows={1: 3}), list(range(30))
        of.start(0, tokens)
        run(of, 0, tokens, 0, windows={1: 3})
        tokens.append(99)
        run(of, 0, tokens, 30, windows={1: 3})

    def test_options_of_attention(self):
        tokens = [1, 2, 3]
        q, k, v = (f(0, tokens, 0) for f in (MODEL.q, MODEL.k, MODEL.v))
        of = cache(layers=1)
        of.start(0, tokens)
        with of.step([(0, tokens)]) as step:
            plain = step.attend(0, q, k, v)
            same = step.attend(0, q, scale=1 / math.sqrt(DIM))
            numpy.testing.assert_array_equal(plain, same)
            for options in (dict(softcap=1.0), dict(sinks=[3.0] * HEADS), dict(scale=0.1)):
                self.assertGreater(numpy.abs(step.attend(0, q, **options) - plain).max(), 1e-3)
            full = step.attend(0, q, causal=False)
            numpy.testing.assert_array_equal(full[2], plain[2])
            self.assertGreater(numpy.abs(full[0] - plain[0]).max(), 1e-3)
            with self.assertRaises(kvblock.PlanError):
                step.attend(0, q, softcap=-1.0)

    def test_drafts_are_kept_as_far_as_accepted(self):
        of, tokens = cache(), [1, 2, 3]
        of.start(0, tokens)
        run(of, 0, tokens, 0)
        drafted = tokens + [4, 50, 60]
        step = of.step([(0, drafted[3:])], drafts={0: 2})
        for layer in range(LAYERS):
            step.attend(layer, *(f(layer, drafted[3:], 3) for f in (MODEL.q, MODEL.k, MODEL.v)))
        step.commit(accepted=[1])
        self.assertEqual(of.seq_len(0), 4)
        run(of, 0, tokens + [4, 5], 4)

    def test_formats_are_text(self):
        expected = MODEL.expected(0, [1, 2, 3, 4], 0)
        for name, error in (("bf16", 0.02), ("int8", 0.05), ("int8/l4", 0.5)):
            of = cache(format=name, head_dim=DIM, layers=1)
            of.start(0)
            q, k, v = (f(0, [1, 2, 3, 4], 0) for f in (MODEL.q, MODEL.k, MODEL.v))
            with of.step([(0, 4)]) as step:
                self.assertLess(numpy.abs(step.attend(0, q, k, v) - expected).max(), error, name)
            self.assertIn(f'format="{name}"', repr(of))
        with self.assertRaisesRegex(ValueError, "format=.l5"):
            cache(format="l5")
        with self.assertRaisesRegex(ValueError, "calibration=FILE"):
            cache(format="int8-tensor")

    def test_constants_are_measured_given_and_replaced(self):
        tokens = [n % 7 for n in range(40)]
        q, k, v = (f(0, tokens, 0) for f in (MODEL.q, MODEL.k, MODEL.v))
        v = v * numpy.float32(50)
        calibrator = kvblock.Calibrator(layers=1, kv_heads=KV_HEADS, head_dim=DIM, skip_first=0)
        with tempfile.TemporaryDirectory() as folder:
            path, narrow = f"{folder}/wide", f"{folder}/narrow"
            with self.assertRaisesRegex(ValueError, "16"):
                calibrator.write(path)
            calibrator.observe(0, q, k, v / 50)
            calibrator.write(narrow, model="tiny")
            calibrator.observe(0, q, k, v, first_position=40)
            self.assertEqual(calibrator.tokens, 80)
            self.assertEqual(repr(calibrator), "Calibrator(80 tokens)")
            calibrator.write(path)
            errors = []
            for constants, later in ((path, None), (narrow, None), (narrow, path)):
                of = cache(format="int8-head", layers=1, calibration=constants)
                of.start(0)
                if later is not None:
                    of.recalibrate(later)
                with of.step([(0, 40)]) as step:
                    step.write(0, k, v)
                errors.append(numpy.abs(of.gather(0, 0, "v")[0] - v).max() / v.max())
            self.assertLess(errors[0], 0.01)
            self.assertGreater(errors[1], 0.5)
            self.assertEqual(errors[2], errors[0])
            with of.step([(0, 1)]) as step:
                with self.assertRaises(kvblock.StateError):
                    of.recalibrate(path)
                step.roll_back()
            with self.assertRaises(FileNotFoundError):
                of.recalibrate(f"{folder}/none")
            with open(f"{folder}/bad", "wb") as file:
                file.write(b"no safetensors")
            with self.assertRaisesRegex(ValueError, "bad"):
                of.recalibrate(f"{folder}/bad")
            other = kvblock.Calibrator(layers=2, kv_heads=KV_HEADS, head_dim=DIM, skip_first=0)
            for layer in (0, 1):
                other.observe(layer, q, k, v)
            other.write(f"{folder}/other")
            with self.assertRaises(kvblock.CalibrationError):
                of.recalibrate(f"{folder}/other")
        for arguments in ((1, q, k, v), (0, q[:, :1], k, v), (0, q, k, v * float("nan"))):
            with self.assertRaises(ValueError):
                calibrator.observe(*arguments)
        with self.assertRaises(TypeError):
            calibrator.observe(0, q.astype("float64"), k, v)
        with self.assertRaises(ValueError):
            kvblock.Calibrator(layers=1, kv_heads=0, head_dim=DIM)

    def test_half_precision_is_used_as_it_is(self):
        of, tokens = cache(layers=1), [1, 2, 3]
        of.start(0)
        q, k, v = (f(0, tokens, 0).astype("float16") for f in (MODEL.q, MODEL.k, MODEL.v))
        with of.step([(0, 3)]) as step:
            out = step.attend(0, q, k, v)
        self.assertEqual(out.dtype, numpy.float16)
        numpy.testing.assert_allclose(out, MODEL.expected(0, tokens, 0), rtol=0.01, atol=0.01)


class Extras(unittest.TestCase):
    def test_a_module_without_its_packages_names_the_extra(self):
        for module in ("transformers", "te"):
            code = f"import sys; sys.modules['torch'] = None; import kvblock.{module}"
            ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
            self.assertIn(f"pip install 'kvblock[{module}]'", ran.stderr)


class Life(unittest.TestCase):
    def test_forks_share_until_they_differ(self):
        of, tokens = cache(), list(range(9))
        of.start(0, tokens)
        run(of, 0, tokens, 0)
        used = of.usage()["blocks_used"]
        of.fork(0, 1)
        self.assertEqual(of.usage()["blocks_used"], used)
        run(of, 0, tokens + [1], 9)
        run(of, 1, tokens + [2], 9)
        self.assertEqual(of.stats()["cow_copies"], 1)
        of.truncate(1, 4)
        self.assertEqual(of.seq_len(1), 4)
        run(of, 1, tokens[:4] + [77], 4)
        of.release(0)
        of.reset()
        self.assertEqual((of.sequences(), of.usage()["blocks_used"]), ([], 0))

    def test_an_exception_in_any_layer_rolls_back(self):
        of, tokens = cache(), list(range(6))
        of.start(0, tokens)
        for layer in range(LAYERS + 1):
            with self.assertRaisesRegex(RuntimeError, "out of luck"), of.step([(0, tokens)]) as step:
                for written in range(layer):
                    rows = (f(written, tokens, 0) for f in (MODEL.q, MODEL.k, MODEL.v))
                    step.attend(written, *rows)
                raise RuntimeError("out of luck")
            self.assertEqual((of.seq_len(0), of.usage()["blocks_used"]), (0, 0))
        run(of, 0, tokens, 0)

    def test_a_layer_that_is_not_written_fails_the_commit(self):
        of = cache()
        of.start(0, [1, 2])
        with self.assertRaises(kvblock.PlanError), of.step([(0, [1, 2])]) as step:
            step.write(0, MODEL.k(0, [1, 2], 0), MODEL.v(0, [1, 2], 0))
        run(of, 0, [1, 2], 0)

    def test_only_one_step_is_open(self):
        of = cache()
        of.start(0, [1])
        step = of.step([(0, [1])])
        for call in (
            lambda: of.step([(0, [1])]),
            lambda: of.start(1, [1]),
            lambda: of.release(0),
            lambda: of.fork(0, 1),
            lambda: of.truncate(0, 0),
            lambda: of.reset(),
        ):
            with self.assertRaisesRegex(kvblock.StateError, "a step is open"):
                call()
        self.assertIn("open", repr(step))
        step.roll_back()
        self.assertIn("ended", repr(step))
        for call in (step.commit, step.roll_back, lambda: step.write(0, *[MODEL.k(0, [1], 0)] * 2)):
            with self.assertRaisesRegex(kvblock.StateError, "has ended"):
                call()
        run(of, 0, [1], 0)

    def test_a_forgotten_step_is_rolled_back(self):
        of = cache()
        of.start(0, [1, 2, 3])
        of.step([(0, [1, 2, 3])])
        gc.collect()
        run(of, 0, [1, 2, 3], 0)

    def test_a_full_cache_says_how_full(self):
        of = cache(num_blocks=2)
        of.start(0)
        run(of, 0, [1, 2, 3], 0)
        of.start(1)
        with self.assertRaises(kvblock.Exhausted) as raised:
            of.step([(1, 8)])
        full = raised.exception
        self.assertEqual((full.group, full.needed, full.free, full.evictable), (0, 2, 1, 0))
        self.assertIsInstance(full, MemoryError)
        run(of, 1, [1, 2, 3, 4], 0)

    def test_wrong_arguments_have_names(self):
        q = MODEL.q(0, [1], 0)
        for settings, words in (
            (dict(layers=0), "layers"),
            (dict(num_blocks=0), "0"),
            (dict(num_blocks=4, memory="1MiB"), "either num_blocks= or memory="),
            (dict(memory="lots"), "memory=.lots"),
            (dict(device="abacus"), "abacus"),
            (dict(prefix_reuse="sometimes"), "prefix_reuse"),
            (dict(eviction="random"), "eviction"),
            (dict(windows={5: 1}), "windows has layer 5"),
            (dict(tiers=["host=1MiB"]), "model="),
            (dict(tiers=["tape=1MiB"], model="m"), "tiers="),
            (dict(tiers=["host=1MiB"], model="m", wait="soon"), "wait="),
            (dict(calibration="/no/such/file"), "/no/such/file"),
        ):
            with self.assertRaisesRegex((ValueError, TypeError, OSError), words):
                cache(**settings)
        with self.assertRaises(kvblock.DeviceError):
            cache(device="cuda:63")
        of = cache()
        of.start(0)
        with self.assertRaises(kvblock.PlanError):
            of.start(0)
        with self.assertRaises(kvblock.PlanError):
            of.step([(5, 1)])
        step = of.step([(0, 1)])
        for tensors, error, words in (
            ((q.astype("float64"),) * 3, TypeError, "float64"),
            (([[[1.0]]],) * 3, AttributeError, "shape"),
            ((q[0], q[0], q[0]), ValueError, "shape"),
            ((q, MODEL.k(0, [1], 0)), ValueError, "k and v come together"),
            ((q, q, q), kvblock.PlanError, "expected"),
        ):
            with self.assertRaisesRegex(error, words):
                step.attend(0, *tensors)
        with self.assertRaises(kvblock.PlanError):
            step.attend(9, q, MODEL.k(0, [1], 0), MODEL.v(0, [1], 0))
        with self.assertRaises(OverflowError):
            of.seq_len(-1)

    def test_gathered_rows_are_those_that_were_written(self):
        of, tokens = cache(), list(range(10))
        of.start(3, tokens)
        run(of, 3, tokens, 0)
        for layer in range(LAYERS):
            for plane, rows in (("k", MODEL.k), ("v", MODEL.v)):
                got = of.gather(3, layer, plane)
                numpy.testing.assert_array_equal(got[0], rows(layer, tokens, 0))
        with self.assertRaisesRegex(ValueError, "plane=.q."):
            of.gather(3, 0, "q")
        with of.step([(3, [42])]) as step:
            for layer in range(LAYERS):
                step.write(layer, MODEL.k(layer, [42], 10), MODEL.v(layer, [42], 10))
            out = numpy.empty((1, 12, KV_HEADS, DIM), dtype="float32")
            step.gather(0, "k", out)
            numpy.testing.assert_array_equal(out[0, :11], MODEL.k(0, tokens + [42], 0))
            self.assertFalse(out[0, 11].any())

    def test_events_follow_the_blocks(self):
        of, tokens = cache(events=64), list(range(8))
        of.start(0, tokens)
        run(of, 0, tokens, 0)
        kinds = [(event["kind"], event["index"], event["tier"]) for event in of.take_events()]
        self.assertEqual(kinds, [("stored", 0, "device"), ("stored", 1, "device")])
        snapshot = of.snapshot()
        self.assertEqual((snapshot["next_id"], len(snapshot["blocks"])), (2, 2))
        self.assertEqual(snapshot["blocks"][0]["tokens"], [0, 1, 2, 3])
        of.release(0)
        self.assertGreater(of.forget(tokens), 0)
        self.assertEqual({event["kind"] for event in of.take_events()}, {"removed"})

    def test_repr_says_what_it_is(self):
        of = cache(memory="1MiB")
        self.assertRegex(repr(of), r"Cache\(layers=2, kv_heads=2, head_dim=8, .*blocks=0 of \d+ used")
        self.assertEqual((of.layers, of.kv_heads, of.head_dim, of.block_size), (2, 2, 8, 4))


class Tiers(unittest.TestCase):
    def test_what_the_device_loses_comes_back(self):
        with tempfile.TemporaryDirectory() as folder:
            tiers = ["host=1MiB", f"disk={folder}/kv:4MiB"]
            prompt = list(range(40))
            of = cache(tiers=tiers, model="weights", wait="all", chunk_blocks=2)
            of.start(0, prompt)
            run(of, 0, prompt, 0)
            of.release(0)
            self.assertTrue(of.flush())
            del of
            for model, reused in ((b"weights", 32), ("others", 0)):
                of = cache(tiers=tiers, model=model, wait="all", chunk_blocks=2)
                got = of.start(1, prompt)
                self.assertGreaterEqual(got, reused)
                self.assertEqual(got > 0, reused > 0)
                run(of, 1, prompt, got)
                self.assertEqual(of.stats()["tiers"]["loaded_tokens"] > 0, reused > 0)

    def test_sessions_go_on_in_another_cache(self):
        with tempfile.TemporaryDirectory() as folder:
            path, tokens = pathlib.Path(folder, "chat.kvs"), list(range(13))
            of = cache(model="weights")
            of.start(0, tokens)
            run(of, 0, tokens, 0)
            self.assertGreater(of.save(0, path, note=b"turn 1"), 0)
            other = cache(model="weights")
            text, note = other.load(path)
            self.assertEqual((text, note), (tokens, b"turn 1"))
            reused = other.start(5, tokens + [1])
            self.assertEqual(reused, 13)
            run(other, 5, tokens + [1], reused)
            with self.assertRaises(kvblock.SessionError):
                cache(model="others").load(path)
            with self.assertRaisesRegex(TypeError, "model="):
                cache().load(path)
            path.write_bytes(path.read_bytes()[:1000])
            with self.assertRaises(kvblock.SessionError):
                cache(model="weights").load(path)


def in_child(of, answers):
    # One of the parent's that nobody has: its threads are not here, and not waited for.
    gc.collect()
    try:
        of.usage()
        answers.put("no error")
    except kvblock.ForkedError as error:
        answers.put(error.parent)


class Threads(unittest.TestCase):
    def test_eight_threads_share_a_cache(self):
        of, failures = cache(num_blocks=512), []
        lock = threading.Lock()

        def work(number):
            try:
                tokens = [number]
                with lock:
                    of.start(number, tokens)
                for more in range(12):
                    # One step is open at a time; what is not a step runs beside it.
                    with lock:
                        run(of, number, tokens, len(tokens) - 1)
                    tokens.append(100 * number + more)
                    of.stats(), of.usage(), of.seq_len(number), repr(of)
                with lock:
                    of.release(number)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        self.assertEqual((failures, of.usage()["blocks_used"]), ([], 0))
        self.assertFalse(any(thread.is_alive() for thread in threads))

    def test_a_signal_waits_for_the_call_and_ends_the_step(self):
        of, tokens = cache(), list(range(64))
        of.start(0, tokens)

        def interrupt(_number, _frame):
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            with self.assertRaises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 0.02)
                while True:
                    with of.step([(0, tokens)]) as step:
                        for layer in range(LAYERS):
                            rows = (f(layer, tokens, 0) for f in (MODEL.q, MODEL.k, MODEL.v))
                            step.attend(layer, *rows)
                        step.roll_back()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        gc.collect()
        self.assertEqual(of.usage()["blocks_used"], 0)
        run(of, 0, tokens, 0)

    @unittest.skipUnless(hasattr(os, "fork"), "no fork on this system")
    def test_a_forked_child_is_told(self):
        of = cache()
        of.start(0, [1])
        run(of, 0, [1], 0)
        context = multiprocessing.get_context("fork")
        answers = context.Queue()
        gc.disable()
        self.addCleanup(gc.enable)
        garbage = [cache(threads=2)]
        garbage.append(garbage)
        del garbage
        child = context.Process(target=in_child, args=(of, answers))
        child.start()
        self.assertEqual(answers.get(timeout=20), os.getpid())
        child.join(20)
        self.assertEqual(child.exitcode, 0)
        run(of, 0, [1, 2], 1)


class Module(unittest.TestCase):
    def test_it_says_what_it_has(self):
        self.assertIn("cpu", kvblock.features())
        self.assertEqual(kvblock.devices()[0], "cpu")
        self.assertRegex(kvblock.__version__, r"\d+\.\d+\.\d+")
        for name in kvblock.__all__:
            self.assertTrue(hasattr(kvblock, name), name)

    def test_it_imports_nothing_large(self):
        code = "import sys, kvblock; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
        self.assertEqual(subprocess.run([sys.executable, "-c", code]).returncode, 0)


if __name__ == "__main__":
    unittest.main()
