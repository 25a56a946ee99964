"""The openai package, validating every answer strictly, against a running `kv serve`.

Usage: python openai_client.py URL MODEL_FOLDER [TEST ...]

URL is a server of the model folder with the API key "key", whose folder has a chat template.
The class Busy instead expects a server without a key, with --max-queue 1 and --max-batch 1.
"""

import json
import pathlib
import sys
import threading
import unittest
import uuid

import openai
from openai import OpenAI
from openai.types import Completion

URL = FOLDER = None
LONG = "Once upon a time, there was a little girl named Lily. " * 8
MESSAGES = [
    {"role": "system", "content": "You tell stories to children who are about to sleep."},
    {"role": "user", "content": "Once upon a time, there was a little cat named Tom."},
]


def client(key="key", strict=True):
    return OpenAI(
        base_url=f"{URL}/v1",
        api_key=key,
        max_retries=0,
        timeout=120,
        _strict_response_validation=strict,
    )


class Models(unittest.TestCase):
    def test_the_list_has_one_model(self):
        models = client().models.list().data
        self.assertEqual([model.object for model in models], ["model"])
        self.assertEqual(client().models.retrieve(models[0].id), models[0])


class Endpoint(unittest.TestCase):
    """What completions and chats have in common; `ask` makes a request of a subclass's kind."""

    __test__ = False

    @classmethod
    def setUpClass(cls):
        cls.client = client()
        cls.model = cls.client.models.list().data[0].id

    def ask(self, **options):
        options = {"max_tokens": 24, "temperature": 0, **self.prompt(), **options}
        return self.create(model=self.model, **options)

    def texts(self, answer):
        return [self.text(choice) for choice in sorted(answer.choices, key=lambda c: c.index)]

    def streamed(self, **options):
        """Returns the texts, the reasons, and all chunks of a stream."""
        chunks = list(self.ask(stream=True, **options))
        texts, reasons = {}, {}
        for chunk in chunks:
            for choice in chunk.choices:
                self.assertNotIn(choice.index, reasons, "a chunk after the reason")
                texts[choice.index] = texts.get(choice.index, "") + self.delta(choice)
                if choice.finish_reason is not None:
                    reasons[choice.index] = choice.finish_reason
        self.assertEqual(texts.keys(), reasons.keys())
        self.assertEqual(len({chunk.id for chunk in chunks}), 1)
        return [texts[at] for at in sorted(texts)], [reasons[at] for at in sorted(reasons)], chunks

    def refused(self, param, **options):
        with self.assertRaises(openai.BadRequestError, msg=f"{param}: {options}") as caught:
            self.ask(**options)
        self.assertEqual(caught.exception.type, "invalid_request_error")
        self.assertTrue((caught.exception.param or "").startswith(param), caught.exception.body)


class Common:
    """Tests of both kinds of completion."""

    def test_usage_counts_every_token(self):
        answer = self.ask(max_tokens=7)
        self.assertEqual(answer.model, self.model)
        self.assertEqual(answer.usage.completion_tokens, 7)
        self.assertEqual(answer.choices[0].finish_reason, "length")
        self.assertGreater(answer.usage.prompt_tokens, 0)
        total = answer.usage.prompt_tokens + answer.usage.completion_tokens
        self.assertEqual(answer.usage.total_tokens, total)

    def test_a_stream_says_the_same(self):
        answer = self.ask()
        texts, reasons, chunks = self.streamed()
        self.assertEqual(texts, self.texts(answer))
        self.assertEqual(reasons, [answer.choices[0].finish_reason])
        self.assertTrue(all(chunk.usage is None for chunk in chunks))

    def test_usage_comes_last_if_asked(self):
        answer = self.ask()
        _, reasons, chunks = self.streamed(stream_options={"include_usage": True})
        *others, last = chunks
        self.assertEqual(last.choices, [])
        self.assertTrue(all(chunk.usage is None and chunk.choices for chunk in others))
        self.assertEqual(last.usage.completion_tokens, answer.usage.completion_tokens)
        self.assertEqual(last.usage.prompt_tokens, answer.usage.prompt_tokens)
        self.assertEqual([c.finish_reason for c in others[-1].choices], reasons)

    def test_the_bytes_of_a_stream_end_with_done(self):
        with self.ask(stream=True, raw=True) as answer:
            kind = answer.headers["content-type"]
            lines = [line for line in answer.iter_lines() if line]
        self.assertTrue(kind.startswith("text/event-stream"), kind)
        self.assertEqual(lines[-1], "data: [DONE]")
        events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        self.assertIsNotNone(events[-1]["choices"][0]["finish_reason"])

    def test_a_seed_repeats_and_another_does_not(self):
        hot = {"temperature": 1.0, "max_tokens": 40}
        first = self.texts(self.ask(seed=7, **hot))
        self.assertEqual(self.texts(self.ask(seed=7, **hot)), first)
        self.assertEqual(self.streamed(seed=7, **hot)[0], first)
        others = [self.texts(self.ask(seed=seed, **hot)) for seed in (8, 9, 10)]
        self.assertTrue(any(other != first for other in others))

    def test_a_tiny_top_p_leaves_the_best_token(self):
        best = self.texts(self.ask())
        self.assertEqual(self.texts(self.ask(temperature=1.0, top_p=1e-6, seed=3)), best)

    def test_n_texts_have_their_own_index(self):
        same = self.ask(n=3)
        self.assertEqual(self.texts(same), self.texts(self.ask()) * 3)
        hot = {"n": 3, "temperature": 1.0, "max_tokens": 40, "seed": 5}
        answer = self.ask(**hot)
        texts = self.texts(answer)
        self.assertEqual(sorted(choice.index for choice in answer.choices), [0, 1, 2])
        self.assertEqual(len(set(texts)), 3)
        self.assertEqual(self.streamed(**hot)[0], texts)
        _, reasons, chunks = self.streamed(stream_options={"include_usage": True}, **hot)
        self.assertEqual(reasons, [c.finish_reason for c in sorted(answer.choices, key=lambda c: c.index)])
        self.assertEqual(chunks[-1].usage, answer.usage)
        self.assertEqual(answer.usage.prompt_tokens, same.usage.prompt_tokens)

    def test_a_stop_string_ends_the_text_before_it(self):
        whole = self.texts(self.ask(max_tokens=60))[0]
        pieces = [self.delta(c) for chunk in self.ask(max_tokens=60, stream=True) for c in chunk.choices]
        pieces = [piece for piece in pieces if piece]
        self.assertGreater(len(pieces), 20)
        for at in range(3, 20, 4):
            # Across the border of two tokens, and of three.
            for stop in (
                pieces[at][-1:] + pieces[at + 1][:1],
                pieces[at][-1:] + pieces[at + 1] + pieces[at + 2][:1],
            ):
                end = whole.find(stop)
                for given in (stop, [stop], ["never said", stop]):
                    answer = self.ask(max_tokens=60, stop=given)
                    self.assertEqual(self.texts(answer), [whole[:end]], stop)
                    self.assertEqual(answer.choices[0].finish_reason, "stop")
                self.assertEqual(self.streamed(max_tokens=60, stop=stop)[:2], ([whole[:end]], ["stop"]))

    def test_a_stop_string_that_only_begins_is_text(self):
        whole = self.texts(self.ask())
        for stop in (whole[0][-3:] + "\0", whole[0][4:9] + "\0"):
            self.assertEqual(self.texts(self.ask(stop=stop)), whole)
            self.assertEqual(self.streamed(stop=stop)[0], whole)

    def test_ignore_eos_goes_on(self):
        answer = self.ask(max_tokens=300, extra_body={"ignore_eos": True})
        self.assertEqual(answer.usage.completion_tokens, 300)
        self.assertEqual(answer.choices[0].finish_reason, "length")

    def test_the_second_time_is_cached_and_another_salt_is_not(self):
        def cached(salt):
            answer = self.ask(extra_body={"cache_salt": salt})
            return answer.usage.prompt_tokens_details.cached_tokens

        one, other = uuid.uuid4().hex, uuid.uuid4().hex
        self.assertEqual(cached(one), 0)
        again = cached(one)
        self.assertGreater(again, 0)
        self.assertEqual(cached(other), 0)
        self.assertEqual(cached(other), again)
        *_, last = self.ask(
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"cache_salt": one},
        )
        self.assertEqual(last.usage.prompt_tokens_details.cached_tokens, again)

    def test_neutral_options_change_nothing(self):
        best = self.texts(self.ask())
        for options in (
            {"frequency_penalty": 0, "presence_penalty": 0},
            {"logit_bias": {}},
            {"n": 1, "top_p": 1, "user": "somebody"},
            {"stop": None, "seed": None},
        ):
            self.assertEqual(self.texts(self.ask(**options)), best, options)

    def test_unknown_fields_are_ignored(self):
        extra = {"a_field_of_tomorrow": {"of": ["any", "kind"]}, "min_p": 0.0}
        self.assertEqual(self.texts(self.ask(extra_body=extra)), self.texts(self.ask()))

    def test_unsupported_fields_are_named(self):
        for field, value in (
            ("frequency_penalty", 0.5),
            ("presence_penalty", -0.5),
            ("logit_bias", {"403": 5}),
        ):
            self.refused(field, **{field: value})

    def test_wrong_values_are_named(self):
        for field, value in (
            ("temperature", -1),
            ("temperature", "hot"),
            ("top_p", 1.5),
            ("max_tokens", -5),
            ("n", 0),
            ("stop", 7),
            ("seed", "x"),
            ("stream_options", 3),
        ):
            self.refused(field, **{field: value})
        self.refused("cache_salt", extra_body={"cache_salt": ""})

    def test_a_wrong_key_is_refused(self):
        for key in ("wrong", "ke", "keyy"):
            with self.assertRaises(openai.AuthenticationError) as caught:
                self.ask(of=client(key))
            self.assertEqual(caught.exception.code, "invalid_api_key")

    def test_another_model_is_not_found(self):
        with self.assertRaises(openai.NotFoundError) as caught:
            self.create(model="another", max_tokens=1, **self.prompt())
        self.assertEqual((caught.exception.code, caught.exception.param), ("model_not_found", "model"))
        with self.assertRaises(openai.NotFoundError):
            self.client.models.retrieve("another")

    def test_a_client_may_leave_a_stream(self):
        stream = self.ask(stream=True, max_tokens=300, extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
        self.assertEqual(self.ask(max_tokens=2).usage.completion_tokens, 2)


class Completions(Common, Endpoint):
    __test__ = True

    def prompt(self):
        return {"prompt": LONG}

    def create(self, of=None, raw=False, **options):
        if options.get("stream") and not raw:
            return self.checked(client(strict=False).completions.create(**options))
        completions = (of or self.client).completions
        return (completions.with_streaming_response if raw else completions).create(**options)

    def checked(self, stream):
        """Checks chunks as strictly as the package does, but for one field: its type of a completion
        takes no null as the reason, which OpenAI's own server says in all chunks but the last."""
        with stream:
            for chunk in stream:
                fields = chunk.to_dict()
                for choice in fields["choices"]:
                    if choice["finish_reason"] is None:
                        choice["finish_reason"] = "length"
                Completion.model_validate(fields)
                yield chunk

    def text(self, choice):
        return choice.text

    delta = text

    def test_token_ids_and_lists_of_one_are_the_same_prompt(self):
        golden = json.loads((pathlib.Path(FOLDER) / "golden.json").read_text())
        for case in golden["cases"]:
            if not case["prompt"]:
                continue
            options = {"max_tokens": 20, "extra_body": {"ignore_eos": True}}
            answers = [
                self.ask(prompt=prompt, **options)
                for prompt in (
                    case["prompt"],
                    [case["prompt"]],
                    case["prompt_ids"],
                    [case["prompt_ids"]],
                )
            ]
            for answer in answers:
                self.assertEqual(answer.usage.prompt_tokens, len(case["prompt_ids"]))
                self.assertEqual(self.texts(answer), self.texts(answers[0]))

    def test_several_prompts_have_their_texts_in_order(self):
        prompts = [LONG, "The sun was", "Once upon a time"]
        alone = [self.ask(prompt=prompt) for prompt in prompts]
        together = self.ask(prompt=prompts)
        self.assertEqual(self.texts(together), [text for one in alone for text in self.texts(one)])
        self.assertEqual(self.streamed(prompt=prompts)[0], self.texts(together))
        for count in ("prompt_tokens", "completion_tokens"):
            total = sum(getattr(one.usage, count) for one in alone)
            self.assertEqual(getattr(together.usage, count), total)
        hot = self.ask(prompt=prompts[:2], n=2, temperature=1, seed=4, max_tokens=40)
        self.assertEqual(len(set(self.texts(hot))), 4)

    def test_the_object_has_its_name(self):
        self.assertEqual(self.ask().object, "text_completion")
        self.assertTrue(all(chunk.object == "text_completion" for chunk in self.ask(stream=True)))

    def test_neutral_options_of_completions_change_nothing(self):
        best = self.texts(self.ask())
        for options in ({"echo": False}, {"best_of": 1}, {"logprobs": None}, {"suffix": None}):
            self.assertEqual(self.texts(self.ask(**options)), best, options)
        self.assertEqual(self.texts(self.ask(n=2, best_of=2)), best * 2)

    def test_unsupported_fields_of_completions_are_named(self):
        for field, value in (
            ("best_of", 2),
            ("echo", True),
            ("logprobs", 1),
            ("suffix", "and they lived happily ever after"),
        ):
            self.refused(field, **{field: value})

    def test_prompts_that_are_wrong_are_named(self):
        for prompt in ([], [[]], ["one", 7], [512], [-1], 7, {"a": 1}):
            self.refused("prompt", prompt=prompt)

    def test_a_prompt_that_never_fits_is_refused_with_numbers(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            self.ask(prompt=[403] * 600)
        self.assertEqual(caught.exception.code, "context_length_exceeded")
        self.assertRegex(caught.exception.message, "600")
        self.assertRegex(caught.exception.message, "512")


class Chats(Common, Endpoint):
    __test__ = True

    def prompt(self):
        return {"messages": MESSAGES}

    def create(self, of=None, raw=False, **options):
        completions = (of or self.client).chat.completions
        return (completions.with_streaming_response if raw else completions).create(**options)

    def text(self, choice):
        return choice.message.content

    def delta(self, choice):
        return choice.delta.content or ""

    def test_the_answer_is_the_assistants(self):
        answer = self.ask()
        self.assertEqual(answer.object, "chat.completion")
        self.assertEqual(answer.choices[0].message.role, "assistant")
        self.assertFalse(answer.choices[0].message.tool_calls)

    def test_the_role_comes_first_and_once(self):
        for n in (1, 3):
            chunks = list(self.ask(stream=True, n=n))
            self.assertTrue(all(chunk.object == "chat.completion.chunk" for chunk in chunks))
            seen = set()
            for choice in (choice for chunk in chunks for choice in chunk.choices):
                expected = None if choice.index in seen else "assistant"
                self.assertEqual(choice.delta.role, expected)
                seen.add(choice.index)
            self.assertEqual(seen, set(range(n)))

    def test_the_template_makes_the_prompt(self):
        written = "System: Be kind.\nUser: Hello\nAssistant:"
        messages = [{"role": "system", "content": " Be kind. "}, {"role": "user", "content": "Hello"}]
        chat = self.ask(messages=messages)
        plain = self.client.completions.create(
            model=self.model, prompt=written, max_tokens=24, temperature=0
        )
        self.assertEqual(self.texts(chat), [plain.choices[0].text])
        self.assertEqual(chat.usage.prompt_tokens, plain.usage.prompt_tokens)

    def test_parts_of_text_are_text(self):
        parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in MESSAGES]
        self.assertEqual(self.texts(self.ask(messages=parts)), self.texts(self.ask()))

    def test_max_completion_tokens_is_the_newer_name(self):
        answer = self.ask(max_tokens=None, max_completion_tokens=5)
        self.assertEqual(answer.usage.completion_tokens, 5)

    def test_neutral_options_of_chats_change_nothing(self):
        best = self.texts(self.ask())
        for options in (
            {"response_format": {"type": "text"}},
            {"logprobs": False},
            {"tools": []},
            {"modalities": ["text"]},
        ):
            self.assertEqual(self.texts(self.ask(**options)), best, options)

    def test_unsupported_fields_of_chats_are_named(self):
        tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
        for field, value in (
            ("tools", [tool]),
            ("logprobs", True),
            ("response_format", {"type": "json_object"}),
            ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}),
        ):
            self.refused(field, **{field: value})

    def test_images_are_refused(self):
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        self.refused("messages", messages=[{"role": "user", "content": [image]}])

    def test_messages_that_are_wrong_are_named(self):
        for messages in (
            [],
            "Hello",
            [7],
            [{"role": "user"}],
            [{"content": "x"}],
            [{"role": 7, "content": "x"}],
            [{"role": "user", "content": 7}],
            [{"role": "user", "content": [{"type": "text"}]}],
        ):
            self.refused("messages", messages=messages)


class Busy(unittest.TestCase):
    def test_a_full_queue_is_a_rate_limit(self):
        asker, answers = client(), []
        model = asker.models.list().data[0].id
        barrier = threading.Barrier(20)

        def ask():
            barrier.wait()
            try:
                answers.append(
                    asker.completions.create(
                        model=model,
                        prompt="The sun",
                        max_tokens=400,
                        temperature=0,
                        extra_body={"ignore_eos": True},
                    ).usage.completion_tokens
                )
            except openai.RateLimitError as error:
                answers.append((error.code, error.response.headers["retry-after"].isdigit()))

        askers = [threading.Thread(target=ask) for _ in range(20)]
        for one in askers:
            one.start()
        for one in askers:
            one.join()
        self.assertEqual(len(answers), 20)
        self.assertEqual(set(answers), {400, ("queue_full", True)})


if __name__ == "__main__":
    URL, FOLDER = sys.argv[1:3]
    unittest.main(argv=sys.argv[:1] + sys.argv[3:], verbosity=2)
