"""Programs at work: each asks through the gateway, turn after turn, and comes again when it was refused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
import orjson

from bench.gateway import wire
from bench.gateway.programs.engine import CALL
from bench.gateway.programs.workload import Program, Turn

_AGAIN_S = 0.05
"""After a refusal. Agents wait for some seconds, which is that much of an engine's slower time."""


@dataclass(frozen=True, slots=True)
class DoneCall:
    """One call; times in seconds from the first program's beginning."""

    program: int
    engine: str
    asked_s: float
    began_s: float  # at the engine
    ended_s: float
    tokens: int  # of prompt and answer, as the engine counts them
    cached: int
    prompt: int


@dataclass(frozen=True, slots=True)
class Done:
    """All of it. `job_s`: by program, from its arrival to its last answer. `refused_s`: when calls were refused."""

    job_s: tuple[float, ...]
    calls: tuple[DoneCall, ...]
    refused_s: tuple[float, ...]


class Running:
    """The programs of one round."""

    def __init__(self, url: str, programs: Sequence[Program], tokens: Sequence[str], *, at_once: bool) -> None:
        self._url = url
        self._programs = programs
        self._tokens = tokens
        self._at_once = at_once
        self._calls: list[DoneCall] = []
        self._refused: list[float] = []
        self._began = 0.0

    async def run(self) -> Done:
        """Raises: ExceptionGroup: an answer was neither a completion nor a refusal that passes."""
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http, asyncio.TaskGroup() as group:
            self._began = time.monotonic()
            tasks = [group.create_task(self._program(http, number)) for number in range(len(self._programs))]
        return Done(tuple(task.result() for task in tasks), tuple(self._calls), tuple(self._refused))

    async def _program(self, http: aiohttp.ClientSession, number: int) -> float:
        program = self._programs[number]
        arrives_s = 0.0 if self._at_once else program.at_s
        await asyncio.sleep(self._began + arrives_s - time.monotonic())
        for turn in program.turns:
            await self._turn(http, number, turn)
            ended_s = time.monotonic() - self._began
            await asyncio.sleep(turn.tool_s)
        return ended_s - arrives_s

    async def _turn(self, http: aiohttp.ClientSession, number: int, turn: Turn) -> None:
        content = CALL.format(number, turn.prompt, turn.answer)
        body = {"model": wire.MODEL, "messages": [{"role": "user", "content": content}]}
        headers = {"authorization": f"Bearer {self._tokens[number]}"}
        while True:
            asked_s = time.monotonic() - self._began
            async with http.post(self._url, json=body, headers=headers) as answer:
                raw, status = await answer.read(), answer.status
            if status == 200:
                break
            if status not in {429, 503}:
                raise ValueError(f"HTTP {status}: {raw[:300]!r}")
            self._refused.append(time.monotonic() - self._began)
            await asyncio.sleep(_AGAIN_S)
        said = orjson.loads(raw)
        stamped = wire.stamp_in(raw)
        assert stamped is not None, raw
        cached = said["usage"]["prompt_tokens_details"]["cached_tokens"]
        self._calls.append(
            DoneCall(
                program=number,
                engine=said["system_fingerprint"],
                asked_s=asked_s,
                began_s=stamped[0] / 1e9 - self._began,
                ended_s=stamped[1] / 1e9 - self._began,
                tokens=said["usage"]["total_tokens"],
                cached=cached,
                prompt=turn.prompt,
            )
        )
