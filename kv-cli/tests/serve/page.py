"""The page of a running `kv serve` in headless Chromium.

Usage: python page.py URL KEY BROWSER [SCREENSHOT.png]

Puts some load on the server, whose API key is KEY, and compares every number that the page shows
with /metrics. Also checks how the page asks for the key, and what it says when reads fail.
"""

import base64
import http.server
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

PATIENCE = 60
KEY = ""


class Browser:
    """Chromium, driven by its DevTools protocol over a pair of pipes."""

    def __init__(self, program):
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, self.to = os.pipe()
        self.back, theirs_out = os.pipe()
        command = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        options = ["--headless", "--no-sandbox", "--disable-gpu"]
        self.process = subprocess.Popen(
            ["bash", "-c", command, program, *options, "--remote-debugging-pipe", f"--user-data-dir={self.profile.name}"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.received, self.calls, self.session = b"", 0, None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.profile.cleanup()

    def call(self, method, **params):
        self.calls += 1
        message = {"id": self.calls, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.received:
                more = os.read(self.back, 1 << 16)
                assert more, "the browser ended"
                self.received += more
            answer, self.received = self.received.split(b"\0", 1)
            answer = json.loads(answer)
            if answer.get("id") == self.calls:
                assert "error" not in answer, (method, answer)
                return answer["result"]

    def open(self, url):
        self.session = None
        target = self.call("Target.createTarget", url=url)["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        size = {"width": 900, "height": 760, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def evaluate(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, expression, expected):
        """Waits until an expression of the page has a value."""
        end = time.monotonic() + PATIENCE
        while (value := self.evaluate(expression)) != expected:
            assert time.monotonic() < end, f"{expression} is {value!r}, not {expected!r}"
            time.sleep(0.05)

    def wait_for_text(self, name, expected):
        self.wait(f"document.getElementById({name!r})?.textContent", expected)


def get(url):
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request) as answer:
        return answer.read()


def metrics(url):
    sums = {}
    for line in get(f"{url}/metrics").decode().splitlines():
        found = re.fullmatch(r"(\w+?)(?:\{.*\})? (\S+)", line)
        if found and not found[1].endswith("_bucket"):
            sums[found[1]] = sums.get(found[1], 0) + float(found[2])
    return sums


def complete(url, prompt, max_tokens):
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 1, "ignore_eos": True}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        assert answer.status == 200, answer.status


def check_key(browser, url):
    browser.open(url)
    browser.wait_for_text("state", "The server asks for its API key.")
    browser.wait("document.getElementById('login').hidden", False)
    for key, words in (("wrong", "The server refused this key."), (KEY, "")):
        browser.evaluate(
            f"document.getElementById('secret').value = {json.dumps(key)};"
            "document.querySelector('#login button').click()"
        )
        if words:
            browser.wait_for_text("refused", words)
    browser.wait_for_text("state", "Live.")
    browser.wait("document.getElementById('login').hidden", True)
    assert browser.evaluate("document.body.className") == ""


def check_numbers(browser, url):
    for at in range(6):
        prompt = f"Once upon a time, there was a little girl named Lily. {'She ran. ' * (at // 2)}"
        complete(url, prompt, 20)
    end = time.monotonic() + PATIENCE
    while metrics(url)["kv_blocks_used"]:
        assert time.monotonic() < end, "blocks stay in use"
        time.sleep(0.05)
    expected = metrics(url)
    for name, metric in {
        "total": "kv_blocks_total",
        "used": "kv_blocks_used",
        "cached": "kv_blocks_cached",
        "running": "kv_requests_running",
        "waiting": "kv_requests_waiting",
        "prompts": "kv_prompt_tokens_total",
        "hits": "kv_hit_tokens_total",
        "generated": "kv_generated_tokens_total",
        "evictions": "kv_evictions_total",
        "preemptions": "kv_preemptions_total",
    }.items():
        browser.wait_for_text(name, f"{expected[metric]:,.0f}")
    assert expected["kv_hit_tokens_total"] > 0 and expected["kv_blocks_cached"] > 0, expected
    ratio = expected["kv_hit_tokens_total"] * 100 / expected["kv_prompt_tokens_total"]
    browser.wait_for_text("ratio", f"{ratio:.1f} %")
    browser.wait_for_text("rate", "0.0")
    total, used, cached = (expected[f"kv_blocks_{state}"] for state in ("total", "used", "cached"))
    free = total - used - cached
    browser.wait_for_text("free", f"{free:,.0f}")
    browser.wait(
        "document.getElementById('map').getAttribute('aria-label')",
        f"Blocks of the pool: {used:.0f} used, {cached:.0f} cached, {free:.0f} free",
    )
    # Every colour of the map covers its part of the squares.
    count = """(() => {
        const map = document.getElementById("map"), context = map.getContext("2d");
        const pixels = new Uint32Array(context.getImageData(0, 0, map.width, map.height).data.buffer);
        const counts = new Map();
        for (const pixel of pixels) counts.set(pixel, (counts.get(pixel) ?? 0) + 1);
        counts.delete(0);
        return [...counts.values()];
    })()"""
    areas = sorted(browser.evaluate(count))
    parts = sorted(part for part in (used, cached, free) if part > 0)
    assert len(areas) == len(parts), (areas, parts)
    for area, part in zip(areas, parts):
        assert abs(area / sum(areas) - part / total) < 0.01, (areas, parts)


class Failing(http.server.BaseHTTPRequestHandler):
    """Serves the page, and answers reads of the metrics with a status, or not at all."""

    page, status = b"", None

    def do_GET(self):
        if self.path == "/":
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(self.page)
        elif self.status is not None:
            self.send_error(self.status)

    def log_message(self, *_):
        pass


def check_failures(browser, url):
    Failing.page = get(f"{url}/")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Failing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for status, words in (
        (None, "The server does not answer."),
        (500, "The server answered 500."),
        (401, "The server asks for its API key."),
    ):
        Failing.status = status
        browser.open(f"http://127.0.0.1:{server.server_port}/")
        browser.wait_for_text("state", words)
        browser.wait_for_text("total", "\u2013")
        assert browser.evaluate("document.body.className") == "away"
        assert browser.evaluate("document.getElementById('login').hidden") == (status != 401)
    server.shutdown()


def screenshot(browser, url, path):
    """Takes a picture after a while of load."""
    stop = threading.Event()

    def load(at):
        while not stop.is_set():
            prompt = f"{'Once upon a time, there was a girl. ' * (at % 4 + 1)}Her name was {at}"
            complete(url, prompt, 100 + 25 * (at + int(time.monotonic()) // 10 % 4))

    loads = [threading.Thread(target=load, args=(at,)) for at in range(12)]
    for one in loads:
        one.start()
    try:
        time.sleep(45)
        assert browser.evaluate("Number(document.getElementById('running').textContent)") > 0
        assert browser.evaluate("Number(document.getElementById('rate').textContent.replace(',', ''))") > 0
        image = base64.b64decode(browser.call("Page.captureScreenshot", format="png")["data"])
    finally:
        stop.set()
        for one in loads:
            one.join()
    assert len(image) > 5000, len(image)
    pathlib.Path(path).write_bytes(image)


if __name__ == "__main__":
    URL, KEY, PROGRAM, *PATHS = sys.argv[1:]
    with Browser(PROGRAM) as chromium:
        check_failures(chromium, URL)
        check_key(chromium, URL)
        check_numbers(chromium, URL)
        for target in PATHS:
            screenshot(chromium, URL, target)
    print("the page shows what /metrics says")
