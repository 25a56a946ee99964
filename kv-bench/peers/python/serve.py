"""Serves attention of PyTorch and of ggml to the driver beside it, a line of JSON a request.

{"threads": N}            -> {"versions": {..}, "absent": {peer: reason}}
{"case": {..}}            -> {"contenders": [..], "refused": {name: reason}}
{"run": NAME, "times": N} -> {"ns": [..]}; with "out": FILE the outputs are left there

Inputs are read from files that the driver wrote; outputs are f32, [tokens, q_heads, head_dim].
"""
import importlib
import json
import sys
import time
from typing import Any

import numpy

from case import Case, Contender, read

# What a peer's own code may throw when it cannot do a case.
REFUSALS = (RuntimeError, ValueError, TypeError, MemoryError)


class Server:
    def __init__(self, threads: int) -> None:
        self.peers: list[Any] = []
        self.absent: dict[str, str] = {}
        self.versions: dict[str, str] = {}
        self.contenders: dict[str, Contender] = {}
        for name, module in (("torch", "peer_torch"), ("ggml", "peer_ggml")):
            try:
                peer = importlib.import_module(module).Peer(threads)
            except (ImportError, OSError, AttributeError) as error:
                self.absent[name] = f"{error}".splitlines()[0]
            else:
                self.peers.append(peer)
                self.versions[name] = peer.version

    def case(self, case: Case) -> dict[str, Any]:
        self.contenders.clear()
        refused = {}
        arrays = {name: read(case, name) for name in "qkv"} if self.peers else {}
        for peer in self.peers:
            for name, prepare in peer.prepare(case, arrays):
                # At once: it may use what the peer's loop has at hand. What a peer refuses is told,
                # and the others go on.
                try:
                    self.contenders[name] = prepare()
                except REFUSALS as error:
                    refused[name] = str(error).splitlines()[0]
        return {"contenders": list(self.contenders), "refused": refused}

    def run(self, name: str, times: int, out: str | None) -> dict[str, Any]:
        contender = self.contenders[name]
        ns = []
        try:
            for _ in range(times):
                begin = time.perf_counter_ns()
                contender.run()
                ns.append(time.perf_counter_ns() - begin)
            if out:
                numpy.ascontiguousarray(contender.output(), dtype=numpy.float32).tofile(out)
        except REFUSALS as error:
            return {"error": str(error).splitlines()[0]}
        return {"ns": ns}


def main() -> None:
    server = None
    for line in sys.stdin:
        request = json.loads(line)
        if server is None:
            server = Server(request["threads"])
            answer: dict[str, Any] = {"versions": server.versions, "absent": server.absent}
        elif "case" in request:
            answer = server.case(Case(**request["case"]))
        else:
            answer = server.run(request["run"], request["times"], request.get("out"))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
