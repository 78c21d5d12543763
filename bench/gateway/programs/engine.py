"""A scripted engine: so many calls at once, a bounded memory of prefixes, a queue by priority as vLLM has it.

    python -m bench.gateway.programs.engine     (prints its port; ends when its input does)

A request says in its last message whose call it is, how long prompt and answer are. What of the prompt is kept from
the program's last call costs nothing; what was used longest ago is let go first. The answer says when it was worked on.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import os
import re
import sys
import time
from collections import OrderedDict
from itertools import count

import uvloop
from aiohttp import web

from bench.gateway import wire
from bench.gateway.programs import workload

CALL = "[[program={} prompt={} answer={}]]"
_CALL = re.compile(r"\[\[program=(\d+) prompt=(\d+) answer=(\d+)\]\]")


class Engine:
    """Slots, queue and prefixes. For one event loop."""

    def __init__(self) -> None:
        self._free = workload.SLOTS
        self._queue: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = count()
        self._kept: OrderedDict[int, int] = OrderedDict()  # tokens by program

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/chat/completions", self._complete),
            web.get("/metrics", self._metrics),
            web.get("/health", self._health),
        ]

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _metrics(self, request: web.Request) -> web.Response:
        waiting = sum(not place.done() for _, _, place in self._queue)
        return web.Response(text=f"vllm:num_requests_waiting {waiting}.0\n")

    async def _complete(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        found = _CALL.search(body["messages"][-1]["content"])
        assert found is not None
        program, prompt, answer = map(int, found.groups())
        await self._enter(int(body.get("priority", 0)))
        began_ns = time.monotonic_ns()
        try:
            cached = min(self._kept.pop(program, 0), prompt)
            work_s = workload.BASE_S + (prompt - cached) * workload.PROMPT_TOKEN_S + answer * workload.ANSWER_TOKEN_S
            await asyncio.sleep(work_s)
            self._keep(program, prompt + answer)
        finally:
            self._leave()
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        message = {"role": "assistant", "content": wire.stamp(began_ns, time.monotonic_ns()).decode()}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        shared = {"id": "chatcmpl-bench", "object": "chat.completion", "created": 1_700_000_000, "model": wire.MODEL}
        shared["system_fingerprint"] = str(request.url.port)
        return web.json_response(shared | {"choices": [choice], "usage": usage})

    async def _enter(self, priority: int) -> None:
        if self._free:
            self._free -= 1
            return
        place = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (priority, next(self._numbers), place))
        await place

    def _leave(self) -> None:
        while self._queue:
            place = heapq.heappop(self._queue)[2]
            if not place.done():
                place.set_result(None)
                return
        self._free += 1

    def _keep(self, program: int, tokens: int) -> None:
        self._kept[program] = tokens
        while sum(self._kept.values()) > workload.CACHED_TOKENS:
            self._kept.popitem(last=False)


async def _serve() -> None:
    app = web.Application()
    app.add_routes(Engine().routes())
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    over = asyncio.Event()

    def heard() -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            over.set()

    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), heard)
    await over.wait()
    await runner.cleanup()


if __name__ == "__main__":
    uvloop.run(_serve())
