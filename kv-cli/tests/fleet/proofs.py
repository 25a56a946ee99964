"""Proofs of events with consumers that nobody here wrote: vllm-router, Dynamo's indexer
and selection service, libzmq.

`cargo xtask fleet` runs them. KV is the program `kv`, DYNAMO the Python that has ai-dynamo-runtime;
the Python that runs this file has vllm-router, pyzmq, msgspec and requests.
"""
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import requests
import zmq
from zmq.utils.monitor import parse_monitor_message

KV = os.environ["KV"]
DYNAMO = os.environ["DYNAMO"]
ROUTER = str(Path(sys.executable).with_name("vllm-router"))
MODEL = "stories260K"
BLOCK = 16
# Longest that a consumer may take to know what an instance has, and the least time between two
# snapshots: a consumer that joins just after another one waits for the next.
KNOWN, SPACING = 2.0, 5.0


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def wait_for(what, is_so, seconds=20.0):
    """Returns the seconds until something is so."""
    begun = time.monotonic()
    while not is_so():
        if time.monotonic() - begun > seconds:
            raise AssertionError(f"{what}: not within {seconds} s")
        time.sleep(0.05)
    return time.monotonic() - begun


def answers(url):
    try:
        return requests.get(url, timeout=5).status_code == 200
    except requests.ConnectionError:
        return False


class Program:
    """A program that ends with the test."""

    def __init__(self, args, folder):
        self.log = tempfile.NamedTemporaryFile(dir=folder, suffix=".log", delete=False)
        self.process = subprocess.Popen(args, stdout=self.log, stderr=subprocess.STDOUT)

    def text(self):
        return Path(self.log.name).read_text(errors="replace")

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.log.close()


class Instance:
    """One `kv serve`, which can be killed and started again at the same addresses."""

    def __init__(self, folder, blocks=256):
        self.folder, self.blocks = folder, blocks
        self.http, self.events, self.replay = (free_port() for _ in range(3))
        self.url = f"http://127.0.0.1:{self.http}"
        self.start()

    def endpoint(self, port):
        return f"tcp://127.0.0.1:{port}"

    def start(self):
        self.program = Program(
            [KV, "serve", "--addr", f"127.0.0.1:{self.http}", "--paged", f"{BLOCK},{self.blocks}",
             "--events", self.endpoint(self.events), "--events-replay", self.endpoint(self.replay)],
            self.folder)
        wait_for("an instance", lambda: answers(self.url + "/health"))

    def complete(self, prompt, **more):
        return complete(self.url, prompt, **more)


def complete(url, prompt, **more):
    """Returns the tokens of a prompt, and those of it that were cached."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, **more}
    answer = requests.post(url + "/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def tokens(seed, count):
    draw = random.Random(str(seed))
    return [draw.randrange(3, 500) for _ in range(count)]


def share_of(ask):
    """Returns the share of tokens that are cached where twelve users ask, six at a time."""
    draw = random.Random(5)
    users = [tokens(("user", user), 240) for user in range(12)]
    prompts = [draw.choice(users) + tokens(turn, 17) for turn in range(240)]
    with ThreadPoolExecutor(6) as pool:
        done = list(pool.map(ask, prompts))
    return sum(hit for _, hit in done) / sum(count for count, _ in done)


class Fleet(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def program(self, args):
        program = Program(args, self.folder)
        self.addCleanup(program.kill)
        return program

    def instances(self, count, **more):
        made = [Instance(self.folder, **more) for _ in range(count)]
        for one in made:
            self.addCleanup(lambda one=one: one.program.kill())
        return made

    def router(self, instances, policy="kv_aware"):
        port, metrics = free_port(), free_port()
        args = [ROUTER, "--host", "127.0.0.1", "--port", str(port), "--policy", policy,
                "--prometheus-port", str(metrics), "--worker-urls", *[one.url for one in instances]]
        if policy == "kv_aware":
            args += ["--kv-event-block-size", str(BLOCK), "--kv-event-model", MODEL]
            for one in instances:
                args += ["--kv-event-source", f"{one.url}={one.endpoint(one.events)}",
                         "--kv-event-replay-source", f"{one.url}={one.endpoint(one.replay)}"]
        self.program(args)
        url = f"http://127.0.0.1:{port}"
        wait_for("the router", lambda: answers(url + "/health"))
        return url

    def start_indexer(self):
        """Returns the port of an indexer without instances."""
        port = free_port()
        self.program([DYNAMO, "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"])
        wait_for("the indexer", lambda: answers(f"http://127.0.0.1:{port}/health"))
        return port

    def indexer(self, instances):
        url = f"http://127.0.0.1:{self.start_indexer()}"

        def register(number, one):
            body = {"instance_id": number, "model_name": MODEL, "block_size": BLOCK,
                    "endpoint": one.endpoint(one.events),
                    "replay_endpoint": one.endpoint(one.replay)}
            answer = requests.post(url + "/register", json=body, timeout=5)
            self.assertEqual(answer.status_code, 201, answer.text)

        for number, one in enumerate(instances, 1):
            register(number, one)

        def matched(prompt):
            """Returns the tokens that each instance has of a prompt, by its number."""
            body = {"model_name": MODEL, "token_ids": prompt}
            answer = requests.post(url + "/query", json=body, timeout=5).json()
            found = answer.get("instances", {})
            return {int(name): of["longest_matched"] for name, of in found.items()}

        return matched

    def selector(self, instances):
        """Returns a function that asks Dynamo's selection service."""
        service = subprocess.Popen(
            [DYNAMO, Path(__file__).with_name("selector.py")], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.addCleanup(service.communicate)
        one_at_a_time = threading.Lock()

        def ask(**request):
            with one_at_a_time:
                print(json.dumps(request), file=service.stdin, flush=True)
                return json.loads(service.stdout.readline())

        workers = [{"worker_id": number, "model_name": MODEL, "block_size": BLOCK,
                    "endpoint": one.url, "kv_events_endpoint": one.endpoint(one.events),
                    "replay_endpoint": one.endpoint(one.replay)}
                   for number, one in enumerate(instances)]
        self.assertEqual(set(ask(do="workers", workers=workers)), {"schedulable"})
        return ask

    def test_consumers_that_start_late_know_what_idle_instances_have(self):
        first, second = self.instances(2)
        prompt = tokens(1, 320)
        second.complete(prompt)
        matched = self.indexer([first, second])
        took = wait_for("the indexer knows", lambda: matched(prompt) == {2: 320}, KNOWN)
        time.sleep(SPACING)
        url = self.router([first, second])
        time.sleep(KNOWN)
        self.assertEqual(complete(url, prompt + [7]), (321, 320))
        print(f"the indexer knew after {took:.1f} s")

    def test_an_instance_that_was_killed_is_forgotten_and_others_answer(self):
        first, second = self.instances(2)
        prompt = tokens(2, 320)
        second.complete(prompt)
        matched = self.indexer([first, second])
        url = self.router([first, second])
        wait_for("the indexer knows", lambda: matched(prompt) == {2: 320}, KNOWN)
        time.sleep(SPACING + KNOWN)
        self.assertEqual(complete(url, prompt + [7])[1], 320)
        second.program.kill()
        # The router has to find the others by itself.
        self.assertEqual(first.complete(tokens(3, 40)), (40, 0))
        second.start()
        took = wait_for("the indexer forgets", lambda: not matched(prompt), KNOWN)
        time.sleep(KNOWN)
        # Whichever instance computes it, the router and the indexer find it again.
        self.assertEqual(complete(url, prompt + [7])[1], 0)
        wait_for("the indexer knows", lambda: max(matched(prompt).values(), default=0) == 320, KNOWN)
        self.assertEqual(complete(url, prompt + [8])[1], 320)
        print(f"the indexer forgot after {took:.1f} s")

    def test_the_indexer_knows_what_the_cache_has(self):
        """Few blocks, so that most are evicted again; prompts share beginnings of all lengths."""
        (one,) = self.instances(1, blocks=48)
        matched, draw = self.indexer([one]), random.Random(4)
        known = [tokens(seed, 200) for seed in range(12)]
        found = 0
        for _ in range(300):
            of = draw.choice(known)
            prompt = of[:draw.randrange(1, 200)] + tokens(draw.random(), draw.randrange(1, 60))
            salt = {"cache_salt": "tenant"} if draw.random() < 0.2 else {}
            one.complete(prompt, **salt)
            # The last token of a prompt is computed, cached or not: it ends no block here.
            prompt = draw.choice(known)[:draw.randrange(1, 12) * BLOCK + draw.randrange(1, BLOCK)]
            time.sleep(0.05)
            matched_blocks, cached = matched(prompt).get(1, 0) // BLOCK, one.complete(prompt)[1]
            self.assertEqual(matched_blocks, cached // BLOCK)
            found += matched_blocks > 0
        self.assertGreater(found, 50)

    def test_the_indexer_knows_what_every_tier_has(self):
        """10,000 random operations on caches of many kinds, and 1,000 questions: a test of kv-tier."""
        port = self.start_indexer()
        subprocess.run(
            ["cargo", "test", "--quiet", "-p", "kv-tier", "--test", "engine", "--", "--ignored",
             "--nocapture", "indexer"],
            env={**os.environ, "KV_INDEXER": f"127.0.0.1:{port}"}, check=True)

    def test_events_beat_round_robin(self):
        """Requests come at once: beside idle instances the router sends all to one."""
        shares = {}
        for policy in ["round_robin", "kv_aware"]:
            url = self.router(self.instances(3, blocks=80), policy)
            shares[policy] = share_of(lambda prompt: complete(url, prompt, max_tokens=16))
        instances = self.instances(3, blocks=80)
        selector = self.selector(instances)

        def reserve_and_complete(prompt):
            request = {"model_name": MODEL, "token_ids": prompt, "selection_id": str(uuid.uuid4())}
            worker = selector(do="select", **request)["worker_id"]
            done = instances[worker].complete(prompt, max_tokens=16)
            # Without a stream the prefill's end is not seen.
            selector(do="prefilled", selection_id=request["selection_id"])
            selector(do="free", selection_id=request["selection_id"])
            return done

        shares["select_service"] = share_of(reserve_and_complete)
        print("cached", shares)
        for policy, times in {"kv_aware": 1.3, "select_service": 1.15}.items():
            self.assertGreaterEqual(shares[policy], times * shares["round_robin"])

    def test_texts_are_routed_by_their_tokens(self):
        instances = self.instances(3)
        url = self.router(instances)
        text = "Once upon a time, there was a little girl named Lily. She liked to play. " * 4
        complete(url, text)
        time.sleep(1)
        for number in range(6):
            count, cached = complete(url, text + str(number))
            self.assertGreater(cached, count - 2 * BLOCK)

    def test_libzmq_stays_connected_and_a_stopped_one_delays_nobody(self):
        (one,) = self.instances(1)
        stopped = self.program([sys.executable, "-c", (
            "import sys, time, zmq; sub = zmq.Context().socket(zmq.SUB);"
            "sub.subscribe(b''); sub.connect(sys.argv[1]); time.sleep(600)"),
            one.endpoint(one.events)])
        context = zmq.Context()
        self.addCleanup(context.destroy, linger=0)
        reader = context.socket(zmq.SUB)
        reader.setsockopt(zmq.HEARTBEAT_IVL, 500)
        reader.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2000)
        monitor = reader.get_monitor_socket()
        reader.subscribe(b"")
        reader.connect(one.endpoint(one.events))
        self.assertTrue(reader.poll(5000))
        stopped.process.send_signal(signal.SIGSTOP)
        numbers, stored, end, turn = [], 0, time.monotonic() + 10, 0
        while time.monotonic() < end:
            one.complete(tokens(("turn", turn), 200))
            turn += 1
            while reader.poll(20):
                _, number, payload = reader.recv_multipart()
                numbers.append(int.from_bytes(number, "big"))
                _, events, rank = msgspec.msgpack.decode(payload)
                self.assertEqual(rank, 0)
                stored += sum(len(e["block_hashes"]) for e in events if e["type"] == "BlockStored")
        self.assertEqual(numbers, list(range(numbers[0], numbers[0] + len(numbers))))
        self.assertGreaterEqual(numbers[0], 1_600_000_000_000 << 20)
        self.assertGreaterEqual(stored, 12 * (turn - 1))
        seen = []
        while monitor.poll(0):
            seen.append(parse_monitor_message(monitor.recv_multipart())["event"])
        reader.disable_monitor()
        self.assertEqual(seen.count(zmq.EVENT_HANDSHAKE_SUCCEEDED), 1)
        self.assertNotIn(zmq.EVENT_DISCONNECTED, seen)


if __name__ == "__main__":
    unittest.main(verbosity=2)
