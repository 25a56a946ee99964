"""Recurrent states from Python, with numpy alone: a recurrence in integers, against all tokens."""

import os
import tempfile
import unittest

import kvblock
import numpy

#: Two layers attend to nothing but zeros; the others have a state of two parts.
ATTEND, RECUR = (0, 3), (1, 2)
PARTS = [((3,), "float32"), ((2, 2), "float32")]
#: Integers up to this number are exact in f16 too.
MODULUS = 97


def states(**settings):
    given = dict(layers=RECUR, parts=PARTS, slots=16, snapshots=64, snapshot_format="same")
    return kvblock.States(**(given | settings))


def cache(**settings):
    of = [states(**settings.pop("of", {}))]
    given = dict(layers=4, kv_heads=1, head_dim=4, format="f32", block_size=4, num_blocks=256)
    return kvblock.Cache(**(given | dict(states=of) | settings))


def begin():
    """Returns the state in front of the first token."""
    return [numpy.zeros(shape, dtype="float32") for shape, _ in PARTS]


def advance(state, layer, token):
    """Returns the state behind one more token."""
    first, second = state
    step = numpy.arange(1, 4, dtype="float32")
    first = (first * 3 + step * (token + layer)) % MODULUS
    second = (second.T * 2 + token + first[0]) % MODULUS
    return [first.astype("float32"), second.astype("float32")]


def of_all(layer, tokens):
    state = begin()
    for token in tokens:
        state = advance(state, layer, token)
    return state


def attend(step, tokens):
    for layer in ATTEND:
        rows = numpy.zeros((tokens, 1, 4), dtype="float32")
        step.attend(layer, rows, rows, rows)


def read(step, layer):
    return [step.read_state(layer, part) for part in range(len(PARTS))]


def compute(step, inputs, drafts=0):
    """Stands for a model: every layer goes on from the state that the step returns.

    Without drafts, states are written behind all tokens; else also in front of each draft.
    """
    attend(step, sum(len(tokens) for tokens in inputs))
    for layer in RECUR:
        before = read(step, layer)
        longest = max(len(tokens) for tokens in inputs)
        after = [[part.copy() for part in before] for _ in range(longest + 1)]
        for entry, tokens in enumerate(inputs):
            state = [part[entry] for part in before]
            for count, token in enumerate(tokens, 1):
                state = advance(state, layer, token)
                for later in after[count:]:
                    for part, value in zip(later, state):
                        part[entry] = value
        for part in range(len(PARTS)):
            for tokens in range(longest - drafts, longest):
                step.write_state_after(layer, part, tokens, after[tokens][part])
            step.write_state(layer, part, after[longest][part])


def run(of, seq, tokens, done=0, drafts=0, accepted=None):
    """Computes ``tokens[done:]`` in one step."""
    new = tokens[done:]
    step = of.step([(seq, new)], drafts={seq: drafts})
    compute(step, [new], drafts)
    step.commit(accepted)


def run_to_stops(of, seq, tokens, done):
    """Computes ``tokens[done:]`` in steps that end where the cache says."""
    while done < len(tokens):
        end = min(of.next_stop(seq) or len(tokens), len(tokens))
        run(of, seq, tokens[:end], done)
        done = end


class States(unittest.TestCase):
    def check(self, of, seq, tokens):
        """Compares the state of a sequence with that of all its tokens."""
        self.assertEqual(of.seq_len(seq), len(tokens))
        step = of.step([(seq, [1])])
        for layer in RECUR:
            for part, expected in zip(read(step, layer), of_all(layer, tokens)):
                numpy.testing.assert_array_equal(part[0], expected)
        step.roll_back()

    def test_a_sequence_begins_with_zeros_and_goes_on(self):
        of, tokens = cache(), [5, 6, 7]
        of.start(0, tokens)
        step = of.step([(0, tokens)])
        self.assertEqual(step.read_state(1, 0).tolist(), [[0, 0, 0]])
        self.assertEqual(step.read_state(2, 1).shape, (1, 2, 2))
        compute(step, [tokens])
        step.commit()
        for token in range(20, 30):
            tokens = tokens + [token]
            run(of, 0, tokens, len(tokens) - 1)
        self.check(of, 0, tokens)

    def test_batches_have_an_entry_for_each_input(self):
        of, texts = cache(), {0: [1, 2, 3, 4], 1: [9], 2: [7, 8]}
        for seq, tokens in texts.items():
            of.start(seq, tokens)
        with of.step(list(texts.items())) as step:
            compute(step, list(texts.values()))
        for seq, tokens in texts.items():
            self.check(of, seq, tokens)

    def test_forks_share_a_slot_until_one_goes_on(self):
        of, tokens = cache(), [5, 6, 7, 8, 9]
        of.start(0, tokens)
        run(of, 0, tokens)
        used = of.usage()["states"][0]["slots_used"]
        of.fork(0, 1)
        self.assertEqual(of.usage()["states"][0]["slots_used"], used)
        run(of, 1, tokens + [11], 5)
        self.assertEqual(of.usage()["states"][0]["slots_used"], used + 1)
        self.check(of, 0, tokens)
        self.check(of, 1, tokens + [11])

    def test_a_step_that_is_rolled_back_leaves_the_state(self):
        of, tokens = cache(), [5, 6, 7]
        of.start(0, tokens)
        run(of, 0, tokens)
        step = of.step([(0, [1, 2])])
        compute(step, [[1, 2]])
        step.roll_back()
        with self.assertRaisesRegex(ValueError, "out of luck"):
            with of.step([(0, [3])]) as step:
                compute(step, [[3]])
                raise ValueError("out of luck")
        self.assertEqual(of.usage()["states"][0]["slots_used"], 1)
        self.check(of, 0, tokens)

    def test_drafts_leave_the_state_behind_the_last_one_that_stays(self):
        for accepted in range(1, 5):
            of, tokens = cache(of=dict(drafts=3)), [5, 6, 7, 8, 9]
            of.start(0, tokens)
            run(of, 0, tokens)
            run(of, 0, tokens + [10, 11, 12, 13], 5, drafts=3, accepted=[accepted])
            kept = tokens + [10, 11, 12, 13][:accepted]
            self.check(of, 0, kept)
            run(of, 0, kept + [20], len(kept))
            self.check(of, 0, kept + [20])

    def test_prompts_go_on_from_every_length(self):
        of, tokens = cache(), list(range(30, 43))
        for end in range(1, len(tokens)):
            seq = 100 + end
            reused = of.start(seq, tokens[:end])
            run(of, seq, tokens[:end], reused)
            of.release(seq)
        for length in range(1, len(tokens)):
            prompt = tokens[:length] + [1, 2]
            hit = of.explain_hit(prompt)
            self.assertEqual(hit, dict(tokens=length, rows=length, state=length))
            self.assertEqual(of.start(length, prompt), length)
            run(of, length, prompt, length)
            self.check(of, length, prompt)
            of.release(length)
        stats = of.stats()
        self.assertEqual((stats["stateless_tokens"], stats["evicted_snapshots"]), (0, 0))
        self.assertEqual(stats["stored_snapshots"], of.usage()["states"][0]["snapshots_cached"])

    def test_a_snapshot_in_f16_is_half_as_large_and_as_exact_for_small_integers(self):
        of, tokens = cache(of=dict(snapshot_format="f16")), list(range(10))
        of.start(0, tokens)
        run_to_stops(of, 0, tokens, 0)
        of.release(0)
        self.assertEqual(of.start(1, tokens), 9)
        run(of, 1, tokens, 9)
        self.check(of, 1, tokens)

    def test_a_snapshot_in_int8_is_off_by_half_a_step_of_its_largest_value(self):
        of, tokens = cache(of=dict(snapshot_format="int8")), list(range(10))
        self.assertEqual(states(snapshot_format="int8").snapshot_format, "int8")
        written = numpy.array([[12.7, -3.21, 0.06]], dtype="float32")
        of.start(0, tokens)
        step = of.step([(0, tokens[:9])])
        compute(step, [tokens[:9]])
        step.write_state(RECUR[0], 0, written)
        step.commit()
        of.release(0)
        self.assertEqual(of.start(1, tokens), 9)
        step = of.step([(1, tokens[9:])])
        kept = numpy.asarray(step.read_state(RECUR[0], 0))
        step.roll_back()
        self.assertLess(numpy.abs(kept - written).max(), 0.051)
        self.assertFalse((kept == written).all())

    def test_stops_are_where_states_are_kept(self):
        of, tokens = cache(), list(range(20))
        of.start(0, tokens, stops=[11, 6])
        stops = []
        done = 0
        while (end := of.next_stop(0)) is not None:
            stops.append(end)
            run(of, 0, tokens[:end], done)
            done = end
        self.assertEqual(stops, [6, 11, 19])
        self.assertEqual(of.stats()["stored_snapshots"], 3)
        of.release(0)
        for length, found in ((19, 19), (18, 11), (10, 6), (5, 0)):
            hit = of.explain_hit(tokens[:length] + [99])
            self.assertEqual(hit, dict(tokens=found, rows=length, state=found))
        self.assertIsNone(of.next_stop(7))

    def test_rows_without_a_state_are_counted_and_named_as_the_next_stop(self):
        of, tokens = cache(), list(range(12))
        of.start(0, tokens)
        run(of, 0, tokens)
        self.assertEqual(of.explain_hit(tokens), dict(tokens=0, rows=11, state=0))
        self.assertEqual(of.start(1, tokens), 0)
        self.assertEqual(of.next_stop(1), 11)
        self.assertEqual(of.stats()["stateless_tokens"], 11)

    def test_a_running_state_is_kept_when_the_caller_says(self):
        of, tokens = cache(), list(range(12))
        of.start(0, tokens[:8])
        run(of, 0, tokens[:8])
        self.assertEqual(of.explain_hit(tokens), dict(tokens=0, rows=8, state=0))
        of.keep_state(0)
        self.assertEqual(of.explain_hit(tokens), dict(tokens=8, rows=8, state=8))
        of.add_stop(0, 10)
        self.assertEqual(of.next_stop(0), 10)
        run_to_stops(of, 0, tokens, 8)
        of.release(0)
        self.assertEqual(of.explain_hit(tokens[:11] + [50])["tokens"], 10)
        with self.assertRaises(kvblock.PlanError):
            of.keep_state(5)
        with self.assertRaises(kvblock.PlanError):
            of.add_stop(5, 3)

    def test_a_sequence_that_is_released_for_another_goes_on(self):
        of, tokens = cache(of=dict(slots=3)), list(range(9))
        of.start(0, tokens)
        run(of, 0, tokens)
        of.start(1, [50, 51])
        run(of, 1, [50, 51])
        of.fork(0, 2)
        run(of, 2, tokens + [60], 9)
        with self.assertRaises(kvblock.Exhausted) as full:
            of.step([(1, [52])])
        self.assertEqual((full.exception.needed, full.exception.free), (1, 0))
        of.release(0)
        run(of, 1, [50, 51, 52], 2)
        of.release(2)
        self.assertEqual(of.start(0, tokens + [70]), 9)
        of.release(1)
        run(of, 0, tokens + [70], 9)
        self.check(of, 0, tokens + [70])

    def test_a_text_goes_back_to_where_its_state_is_kept(self):
        of, tokens = cache(), list(range(12))
        of.start(0, tokens, stops=[6])
        run_to_stops(of, 0, tokens, 0)
        with self.assertRaisesRegex(kvblock.PlanError, "8.* 6"):
            of.truncate(0, 8)
        self.check(of, 0, tokens)
        of.truncate(0, 6)
        run(of, 0, tokens[:6] + [40], 6)
        self.check(of, 0, tokens[:6] + [40])

    def test_the_oldest_snapshots_make_room(self):
        of = cache(of=dict(snapshots=2))
        for first in (10, 20, 30):
            of.start(0, [first, 1, 2])
            run(of, 0, [first, 1, 2])
            of.release(0)
        self.assertEqual(of.stats()["evicted_snapshots"], 1)
        fill = of.usage()["states"][0]
        self.assertEqual((fill["snapshots_total"], fill["snapshots_cached"]), (2, 2))
        hits = [of.explain_hit([first, 1, 2, 3])["tokens"] for first in (10, 20, 30)]
        self.assertEqual(sorted(hits), [0, 3, 3])

    def test_a_text_has_no_more_snapshots_than_it_may(self):
        of, tokens = cache(of=dict(per_path=1)), list(range(20))
        of.start(0, tokens, stops=[5, 10])
        run_to_stops(of, 0, tokens, 0)
        self.assertEqual(of.usage()["states"][0]["snapshots_cached"], 1)
        self.assertEqual(of.explain_hit(tokens)["tokens"], 19)

    def test_a_grid_is_where_snapshots_are(self):
        of, tokens = cache(of=dict(grid=8)), list(range(20))
        of.start(0, tokens)
        self.assertEqual(of.next_stop(0), 16)
        run_to_stops(of, 0, tokens, 0)
        self.assertEqual(of.explain_hit(tokens), dict(tokens=16, rows=19, state=16))

    def test_a_session_has_the_kept_state(self):
        tokens = list(range(10))
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "session")
            of = cache(model="weights")
            of.start(0, tokens)
            run(of, 0, tokens)
            of.keep_state(0)
            of.save(0, path)
            later = cache(model="weights")
            text, _ = later.load(path)
            self.assertEqual(text, tokens)
            self.assertEqual(later.start(0, tokens + [50]), 10)
            run(later, 0, tokens + [50], 10)
            self.check(later, 0, tokens + [50])

    def test_an_engine_stops_where_states_are_kept(self):
        of = cache()
        engine = kvblock.Engine(of, context=64)

        def model(batch):
            inputs, at = [], 0
            for _, count, *_ in batch.chunks:
                inputs.append(list(batch.tokens[at : at + count]))
                at += count
            compute(batch.step, inputs)
            logits = numpy.zeros((len(batch.logit_rows), 100), dtype="float32")
            # The next token follows from the state: a wrong one is a wrong text.
            states = batch.step.read_state(1, 0)
            self.assertEqual(len(states), len(batch.chunks))
            logits[:, 7] = 1
            return logits

        prompt = list(range(12))
        for _ in range(2):
            engine.submit(prompt, max_new_tokens=3)
            while engine.has_work:
                engine.step(model)
        stats = engine.stats()
        self.assertEqual((stats["hit_tokens"], stats["stateless_tokens"]), (11, 0))

    def test_layers_may_attend_and_have_a_state(self):
        rows = numpy.zeros((3, 1, 4), dtype="float32")
        state = numpy.ones((1, 2), dtype="float32")
        for windows in ({}, {1: 8}):
            of = kvblock.States(layers=[0, 1], parts=[((2,), "float32")], slots=4, attention=True)
            both = kvblock.Cache(
                layers=3, kv_heads=1, head_dim=4, num_blocks=8, states=[of], windows=windows
            )
            both.start(0, [1, 2, 3])
            with both.step([(0, [1, 2, 3])]) as step:
                for layer in range(3):
                    step.attend(layer, rows, rows, rows)
                for layer in range(2):
                    step.write_state(layer, 0, state)
            self.assertEqual(both.seq_len(0), 3)
            self.assertEqual(both.gather(0, 1, "k").shape, (1, 3, 1, 4))

    def test_no_layer_needs_to_attend(self):
        of = kvblock.States(layers=[0, 1], parts=[((2,), "float32")], slots=4, snapshots=4)
        alone = kvblock.Cache(
            layers=2, kv_heads=1, head_dim=1, num_blocks=8, block_size=4, states=[of]
        )
        self.assertEqual(alone.start(0, [1, 2, 3, 4, 5]), 0)
        state = numpy.array([[3, 4]], dtype="float32")
        with alone.step([(0, [1, 2, 3, 4, 5])]) as step:
            for layer in range(2):
                step.write_state(layer, 0, state)
        alone.release(0)
        self.assertEqual(alone.start(1, [1, 2, 3, 4, 5, 6]), 5)
        step = alone.step([(1, [6])])
        numpy.testing.assert_array_equal(step.read_state(1, 0), state)

    def test_memory_is_that_of_the_layers_that_attend(self):
        few = kvblock.Cache(layers=2, kv_heads=1, head_dim=4, memory="64KiB")
        more = kvblock.Cache(layers=4, kv_heads=1, head_dim=4, memory="64KiB", states=[states()])
        totals = [of.usage()["blocks_total"] for of in (few, more)]
        self.assertEqual(totals[0], totals[1])

    def test_tensors_of_other_types_and_apart(self):
        parts = [((4, 6), "float16")]
        of = [kvblock.States(layers=[1], parts=parts, slots=4)]
        cached = kvblock.Cache(layers=2, kv_heads=1, head_dim=4, num_blocks=8, states=of)
        cached.start(0, [1])
        rows = numpy.zeros((1, 1, 4), dtype="float32")
        values = numpy.arange(24, dtype="float32").reshape(1, 6, 4).swapaxes(1, 2)
        with cached.step([(0, [1])]) as step:
            step.attend(0, rows, rows, rows)
            step.write_state(1, 0, values)
        step = cached.step([(0, [2])])
        out = numpy.full((3, 4, 6), 5, dtype="float16")
        self.assertIs(step.read_state(1, 0, out), out)
        numpy.testing.assert_array_equal(out[0], values[0])
        self.assertEqual(out[1:].min(), 5)


class Refusals(unittest.TestCase):
    def test_settings(self):
        for settings, error, why in (
            (dict(parts=[((3,), "int8")]), ValueError, "type of a part=.int8.*float32"),
            (dict(snapshot_format="f8"), ValueError, "snapshot_format=.f8.*same"),
            (dict(grid=0), ValueError, "grid=0"),
            (dict(parts=[]), kvblock.SpecError, "a part of a state"),
            (dict(parts=[((1, 2, 3, 4), "float32")]), kvblock.SpecError, "axes"),
            (dict(parts=[((0,), "float32")]), kvblock.SpecError, "values of a part"),
            (dict(slots=0), kvblock.SpecError, "slots of states"),
            (dict(slots=3, drafts=2), kvblock.SpecError, "slots of states"),
            (dict(per_path=0), kvblock.SpecError, "snapshots of a path"),
            (dict(layers=[9]), kvblock.SpecError, "9"),
            (dict(layers=[]), kvblock.SpecError, "layers of states"),
            (dict(layers=[1, 1]), kvblock.SpecError, "layer 1"),
        ):
            with self.subTest(settings), self.assertRaisesRegex(error, why):
                cache(of=settings)
        with self.assertRaises(TypeError):
            kvblock.Cache(layers=2, kv_heads=1, head_dim=4, num_blocks=8, states=["no"])

    def test_calls_change_nothing(self):
        of = cache()
        of.start(0, [1, 2, 3])
        step = of.step([(0, [1, 2, 3])])
        state = numpy.zeros((1, 3), dtype="float32")
        read_only = state.copy()
        read_only.flags.writeable = False
        for call, error, why in (
            (lambda: step.read_state(0, 0), kvblock.PlanError, "layer 0"),
            (lambda: step.read_state(9, 0), kvblock.PlanError, "9"),
            (lambda: step.read_state(1, 2), kvblock.PlanError, "no part 2.* 2"),
            (lambda: step.read_state(1, 0, read_only), ValueError, "out is read-only"),
            (lambda: step.read_state(1, 0, state[:, ::2]), ValueError, "out has strides"),
            (lambda: step.read_state(1, 0, state.astype("float64")), TypeError, "float32"),
            (lambda: step.write_state(0, 0, state), kvblock.PlanError, "layer 0"),
            (lambda: step.write_state(1, 1, state), kvblock.PlanError, r"\[1, 3\].*\[1, 2, 2\]"),
            (lambda: step.write_state(1, 0, state[0]), ValueError, r"shape \[3\]"),
            (lambda: step.write_state(1, 0, state[:0]), kvblock.PlanError, r"\[0, 3\]"),
            (lambda: step.write_state(1, 0, [1, 2, 3]), TypeError, "a list"),
            (lambda: step.write_state_after(1, 0, 0, state), kvblock.PlanError, "0"),
            (lambda: step.write_state_after(1, 0, 9, state), kvblock.PlanError, "9"),
            (lambda: of.keep_state(0), kvblock.StateError, "step is open"),
        ):
            with self.assertRaisesRegex(error, why):
                call()
        with self.assertRaisesRegex(kvblock.PlanError, "(?s)layer"):
            step.commit()
        with self.assertRaisesRegex(kvblock.StateError, "ended"):
            step.read_state(1, 0)
        run(of, 0, [1, 2, 3])
        self.assertEqual(of.seq_len(0), 3)

    def test_a_cache_without_states_says_so(self):
        of = kvblock.Cache(layers=1, kv_heads=1, head_dim=4, num_blocks=8)
        of.start(0, [1, 2])
        self.assertNotIn("states", of.usage())
        self.assertIsNone(of.next_stop(0))
        self.assertEqual(of.explain_hit([1, 2]), dict(tokens=0, rows=0, state=None))
        step = of.step([(0, [1, 2])])
        with self.assertRaisesRegex(kvblock.PlanError, "layer 0"):
            step.read_state(0, 0)

    def test_settings_can_be_read(self):
        of = states(snapshot_format="f16", drafts=2, grid=4, per_path=3, attention=True)
        self.assertEqual(of.layers, list(RECUR))
        self.assertEqual(of.parts, [([3], "float32"), ([2, 2], "float32")])
        self.assertEqual((of.slots, of.snapshots, of.snapshot_format), (16, 64, "f16"))
        self.assertEqual((of.drafts, of.grid, of.per_path, of.attention), (2, 4, 3, True))
        self.assertIn("slots=16", repr(of))


if __name__ == "__main__":
    unittest.main()
