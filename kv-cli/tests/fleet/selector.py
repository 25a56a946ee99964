"""Dynamo's selection service, asked over standard input and output: a line of JSON for a line.

A `select` has a request's id and tokens, and is answered with the worker that takes it; `prefilled`
and `free` report how far the request is. The first line lists the workers.
"""
import asyncio
import json
import sys

from dynamo._core import SelectionService


async def main():
    service = SelectionService(indexer_threads=1)
    answer = None
    for line in sys.stdin:
        asked = json.loads(line)
        kind = asked.pop("do")
        if kind == "workers":
            records = [await service.upsert_worker(worker) for worker in asked["workers"]]
            answer = [one["lifecycle"] for one in records]
        elif kind == "select":
            answer = await service.select_and_reserve(asked)
        elif kind == "prefilled":
            answer = await service.prefill_complete(asked["selection_id"])
        elif kind == "free":
            answer = await service.free_reservation(asked["selection_id"])
        print(json.dumps(answer), flush=True)


asyncio.run(main())
