"""The engine over a tiny model in numpy. Needs numpy."""

import random
import threading
import unittest

import kvblock
import numpy

VOCAB, HEADS, KV_HEADS, DIM = 23, 4, 2, 8
_random = numpy.random.default_rng(5)
EMBED = _random.standard_normal((VOCAB, DIM)).astype("float32")
Q, K, V, OUT = (
    _random.standard_normal((DIM, columns)).astype("float32")
    for columns in (HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM, VOCAB)
)


def rows(tokens, positions):
    """Returns q, k and v of tokens at positions."""
    x = EMBED[numpy.asarray(tokens)] + numpy.sin(numpy.asarray(positions))[:, None]
    x = x.astype("float32")
    return (
        (x @ Q).reshape(-1, HEADS, DIM),
        (x @ K).reshape(-1, KV_HEADS, DIM),
        (x @ V).reshape(-1, KV_HEADS, DIM),
    )


def forward(batch):
    q, k, v = rows(batch.tokens, batch.positions)
    out = batch.step.attend(0, q, k, v)
    return out[numpy.asarray(batch.logit_rows)].sum(1) @ OUT


def logits(text):
    """Returns the logits after a text, computed without a cache."""
    q, k, v = rows(text, range(len(text)))
    k, v = (numpy.repeat(x, HEADS // KV_HEADS, axis=1) for x in (k, v))
    scores = numpy.einsum("hd,thd->ht", q[-1], k) / numpy.sqrt(DIM)
    weights = numpy.exp(scores - scores.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    return numpy.einsum("ht,thd->hd", weights, v).sum(0) @ OUT


def continued(prompt, new, stop=()):
    text = list(prompt)
    while len(text) < len(prompt) + new:
        text.append(int(logits(text).argmax()))
        if text[-1] in stop:
            break
    return text[len(prompt) :]


def engine(num_blocks=256, cache=None, **settings):
    cache = dict(layers=1, kv_heads=KV_HEADS, head_dim=DIM, format="f32", block_size=4) | (
        cache or {}
    )
    settings = dict(context=64) | settings
    return kvblock.Engine(kvblock.Cache(num_blocks=num_blocks, **cache), **settings)


def run(of):
    """Runs all requests, and returns the results of those that ended."""
    done = {}
    while of.has_work:
        for event in of.step(forward):
            if event["kind"] == "finished":
                done[event["request"]] = event
    return done


class Texts(unittest.TestCase):
    def test_texts_are_those_of_a_model_without_a_cache(self):
        of = engine(max_batch=4, max_step_tokens=9)
        prompts = [[n % VOCAB for n in range(at, at + 3 + at % 7)] for at in range(9)]
        numbers = [of.submit(prompt, 6)[0] for prompt in prompts]
        self.assertEqual(numbers, list(range(9)))
        done = run(of)
        for number, prompt in enumerate(prompts):
            self.assertEqual(done[number]["tokens"], continued(prompt, 6))
            self.assertEqual(done[number]["finish"], "length")

    def test_a_few_blocks_preempt_and_the_texts_stay(self):
        of = engine(num_blocks=14, max_batch=6)
        prompts = [[at, 1, 2, 3, 4, 5] for at in range(6)]
        for prompt in prompts:
            of.submit(prompt, 20)
        done = run(of)
        self.assertEqual([done[at]["tokens"] for at in range(6)], [continued(p, 20) for p in prompts])
        self.assertGreater(of.stats()["preemptions"], 0)
        self.assertEqual(of.cache.usage()["blocks_used"], 0)

    def test_a_system_prompt_is_computed_once(self):
        of = engine()
        system = [n % VOCAB for n in range(32)]
        computed = 0
        for question in ([1, 2], [3, 4]):
            of.submit(system + question, 3)
            while (batch := of.begin_step()) is not None:
                computed += len(batch.tokens)
                of.end_step(forward(batch))
        self.assertEqual(of.cache.stats()["hit_tokens"], 32)
        self.assertEqual(computed, 32 + 2 * (2 + 3 - 1))

    def test_salts_share_nothing(self):
        of = engine()
        prompt = [n % VOCAB for n in range(16)] + [3]
        for salt in (b"one", b"two", b"one"):
            of.submit(prompt, 2, salt=salt)
            run(of)
        self.assertEqual(of.cache.stats()["hit_tokens"], 16)

    def test_hints_change_no_text(self):
        of, texts = engine(), []
        for hint in (None, "ended", "within=0.5"):
            number = of.submit([1, 2, 3, 4, 5], 4, hint=hint)[0]
            texts.append(run(of)[number]["tokens"])
        self.assertEqual(texts, [texts[0]] * 3)
        with self.assertRaisesRegex(ValueError, "unknown return hint"):
            of.submit([1, 2], 4, hint="later")
        self.assertFalse(of.has_work)

    def test_further_texts_share_the_prompt(self):
        of = engine()
        numbers = of.submit([1, 2, 3, 4, 5], 4, n=3, temperature=1.0, seed=7)
        self.assertEqual(len(numbers), 3)
        done = run(of)
        texts = {tuple(done[number]["tokens"]) for number in numbers}
        self.assertGreater(len(texts), 1)
        again = engine()
        again.submit([1, 2, 3, 4, 5], 4, temperature=1.0, seed=7)
        self.assertEqual(run(again)[0]["tokens"], done[0]["tokens"])

    def test_beams_find_a_likelier_text(self):
        of = engine()
        of.submit([1, 2, 3], 5, num_beams=4)
        beams = run(of)[0]["beams"]
        self.assertEqual(len(beams), 4)

        def log_prob(tokens):
            total = 0.0
            for at, token in enumerate(tokens):
                row = logits([1, 2, 3] + tokens[:at]).astype("float64")
                total += row[token] - row.max() - numpy.log(numpy.exp(row - row.max()).sum())
            return total

        for beam in beams:
            self.assertAlmostEqual(beam["log_prob"], log_prob(beam["tokens"]), places=3)
        self.assertGreaterEqual(beams[0]["log_prob"], log_prob(continued([1, 2, 3], 5)) - 1e-4)

    def test_a_stop_token_ends_a_text_unless_it_is_ignored(self):
        text = continued([4, 5], 8)
        stop = text[3]
        of = engine(stop=[stop])
        of.submit([4, 5], 8)
        of.submit([4, 5], 8, ignore_stop=True)
        done = run(of)
        self.assertEqual((done[0]["tokens"], done[0]["finish"]), (continued([4, 5], 8, [stop]), "stop"))
        self.assertEqual(done[1]["tokens"], text)

    def test_drafts_change_no_text(self):
        of = engine(draft_tokens=3)
        prompt = [1, 2, 3, 1, 2, 3, 1, 2]
        of.submit(prompt, 30)
        self.assertEqual(run(of)[0]["tokens"], continued(prompt, 30))
        self.assertGreater(of.stats()["drafted_tokens"], 0)

    def test_the_caller_may_choose_tokens(self):
        of = engine()
        of.submit([1, 2, 3], 3)
        while (batch := of.begin_step()) is not None:
            forward(batch)
            chosen = [[9] for _, _, _, needed in batch.chunks if needed]
            events = of.end_step(tokens=chosen)
        self.assertEqual(events[-1]["tokens"], [9, 9, 9])

    def test_tiers_bring_what_the_device_evicted(self):
        tiers = dict(tiers=["host=1MiB"], model="m", chunk_blocks=1, wait="all")
        of = engine(num_blocks=12, cache=tiers)
        prompt = [n % VOCAB for n in range(24)]
        of.submit(prompt, 2)
        first = run(of)[0]["tokens"]
        self.assertTrue(of.cache.flush(10))
        for other in range(4):
            of.submit([(n * 5 + other) % VOCAB for n in range(30)], 2)
        run(of)
        of.submit(prompt, 2)
        self.assertEqual(next(iter(run(of).values()))["tokens"], first)
        self.assertGreater(of.cache.stats()["host_hit_tokens"], 0)


class Steps(unittest.TestCase):
    def test_what_fails_is_rolled_back_and_repeated(self):
        of = engine()
        of.submit([1, 2, 3], 4)
        with self.assertRaises(ZeroDivisionError):
            of.step(lambda batch: 1 / 0)
        bad = numpy.full((1, VOCAB), numpy.nan, dtype="float32")
        for logits, kind in (
            (bad, kvblock.PlanError),
            (numpy.zeros((2, VOCAB), dtype="float32"), kvblock.PlanError),
            (numpy.zeros((1, VOCAB)), TypeError),
            (numpy.zeros(VOCAB, dtype="float32"), ValueError),
            (None, TypeError),
        ):
            with self.assertRaises(kind):
                of.step(lambda batch: (forward(batch), logits)[1])
        # A layer that was not written.
        with self.assertRaises(kvblock.PlanError):
            of.step(lambda batch: numpy.zeros((1, VOCAB), dtype="float32"))
        self.assertEqual(run(of)[0]["tokens"], continued([1, 2, 3], 4))

    def test_a_held_step_refuses_what_would_disturb_it(self):
        of = engine()
        of.submit([1, 2, 3], 2)
        self.assertEqual(repr(of.cache)[:6], "Cache(")
        batch = of.begin_step()
        with self.assertRaises(kvblock.StateError):
            of.begin_step()
        with self.assertRaises(kvblock.StateError):
            batch.step.commit()
        with self.assertRaises(kvblock.StateError):
            batch.step.roll_back()
        of.roll_back()
        with self.assertRaises(kvblock.StateError):
            forward(batch)
        with self.assertRaises(kvblock.StateError):
            of.end_step(numpy.zeros((1, VOCAB), dtype="float32"))
        self.assertEqual(run(of)[0]["tokens"], continued([1, 2, 3], 2))

    def test_a_step_ends_itself_alone(self):
        for fails in (False, True):
            of = engine()
            of.submit([1, 2, 3], 2)
            others = []

            def another(batch):
                logits = forward(batch)
                of.roll_back()
                others.append(of.begin_step())
                if fails:
                    raise OSError("a model that fails")
                return logits

            with self.assertRaises(OSError if fails else kvblock.StateError):
                of.step(another)
            # The step that was begun meanwhile goes on.
            of.end_step(forward(others[0]))
            self.assertEqual(run(of)[0]["tokens"], continued([1, 2, 3], 2))

    def test_the_cache_of_an_engine_is_read_alone(self):
        cache = kvblock.Cache(
            layers=1, kv_heads=KV_HEADS, head_dim=DIM, format="f32", num_blocks=16, events=64
        )
        of = kvblock.Engine(cache, context=64)
        for call in (
            lambda: cache.start(1),
            lambda: cache.step([(1, 1)]),
            lambda: cache.reset(),
            lambda: cache.release(0),
            lambda: cache.fork(0, 1),
            lambda: kvblock.Engine(cache, context=64),
        ):
            with self.assertRaises(kvblock.StateError):
                call()
        of.submit(list(range(16)) + [1], 2)
        run(of)
        self.assertEqual([event["kind"] for event in cache.take_events()], ["stored"])
        self.assertEqual(len(cache.snapshot()["blocks"]), 1)
        self.assertEqual(cache.sequences(), [])

    def test_close_frees_the_blocks(self):
        of = engine()
        of.submit([1, 2, 3], 2)
        batch = of.begin_step()
        of.cache.close()
        self.assertIn("closed", repr(of.cache))
        self.assertIn("closed", repr(of))
        for call in (of.begin_step, of.stats, of.cache.usage, lambda: forward(batch)):
            with self.assertRaises(kvblock.StateError):
                call()
        of.cache.close()

    def test_a_cancelled_request_frees_its_blocks_at_once(self):
        of = engine()
        of.submit([1, 2, 3, 4, 5], 10)
        of.submit([6, 7], 2)
        of.step(forward)
        ended = of.cancel(0)
        self.assertEqual(ended["finish"], "cancelled")
        self.assertEqual(ended["tokens"], continued([1, 2, 3, 4, 5], 1))
        self.assertIsNone(of.cancel(0))
        self.assertEqual(run(of)[1]["tokens"], continued([6, 7], 2))

    def test_requests_that_never_fit_are_refused_with_numbers(self):
        of = engine(num_blocks=4)
        with self.assertRaises(kvblock.RequestError) as refused:
            of.submit([1] * 10, 30)
        error = refused.exception
        self.assertEqual((error.group, error.needed, error.available), (0, 10, 4))
        for prompt, new, options in (
            ([], 1, {}),
            ([1] * 64, 1, {}),
            ([1], 1, dict(n=2, num_beams=2)),
        ):
            with self.assertRaises(kvblock.RequestError) as refused:
                of.submit(prompt, new, **options)
            self.assertIsNone(refused.exception.needed)
        for options in (
            dict(n=0),
            dict(num_beams=0),
            dict(temperature=-1.0),
            dict(temperature=float("nan")),
            dict(top_p=1.5),
            dict(length_penalty=float("inf")),
        ):
            with self.assertRaises(ValueError):
                of.submit([1], 1, **options)
        self.assertFalse(of.has_work)
        with self.assertRaises(kvblock.RequestError):
            engine(vocab=VOCAB).submit([VOCAB], 1)
        for name in ("context", "max_batch", "max_step_tokens"):
            with self.assertRaises(ValueError):
                engine(**{name: 0})


class Random(unittest.TestCase):
    def test_random_requests_cancels_and_failures(self):
        for seed in range(6):
            self.one(random.Random(seed))

    def one(self, choose):
        of = engine(
            num_blocks=choose.choice([14, 40]),
            max_batch=choose.choice([1, 3, 8]),
            max_step_tokens=choose.choice([1, 5, 64]),
            draft_tokens=choose.choice([0, 2]),
        )
        asked, done = {}, {}

        def failing(batch):
            if choose.random() < 0.2:
                raise OSError("a model that fails")
            return forward(batch)

        for _ in range(60):
            if choose.random() < 0.3:
                start = choose.randrange(4)
                prompt = [(start + n) % VOCAB for n in range(choose.randrange(1, 20))]
                new = choose.randrange(1, 12)
                for number in of.submit(prompt, new):
                    asked[number] = (prompt, new)
            if choose.random() < 0.05 and asked:
                number = choose.choice(list(asked))
                ended = of.cancel(number)
                if ended is not None:
                    done[number] = ended
            try:
                events = of.step(failing)
            except OSError:
                continue
            done.update((e["request"], e) for e in events if e["kind"] == "finished")
        done.update(run(of))
        self.assertEqual(sorted(done), sorted(asked))
        for number, (prompt, new) in asked.items():
            text = done[number]["tokens"]
            expected = continued(prompt, new)
            if done[number]["finish"] == "cancelled":
                expected = expected[: len(text)]
            self.assertEqual(text, expected)
        self.assertEqual(of.cache.usage()["blocks_used"], 0)
        self.assertEqual(of.cache.sequences(), [])

    def test_requests_may_come_from_other_threads(self):
        of = engine(max_batch=3)
        prompts = [[at, 2, 3] for at in range(16)]
        numbers = {}

        def submit(at):
            numbers[at] = of.submit(prompts[at], 5)[0]

        threads = [threading.Thread(target=submit, args=(at,)) for at in range(16)]
        for thread in threads:
            thread.start()
        done = {}
        while len(done) < 16:
            done.update(run(of))
        for thread in threads:
            thread.join()
        for at, number in numbers.items():
            self.assertEqual(done[number]["tokens"], continued(prompts[at], 5))


if __name__ == "__main__":
    unittest.main()
