"""Recorded runs: finding the file of an attempt, the answer in it, and saying what differs when there is none.

A recording is a folder with one file per attempt, in the format of the `model_calls` artifact; `file_name` names it.
Nothing is consumed: the same question gets the same answer however often and by however many it is asked.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from app.model_service.dialects.base import Reply, Request
from app.model_service.replay.delivery import Answer, Refusal
from app.model_service.replay.reels import Asked, Reel, Refused, asked, difference
from app.model_service.replay.script import ReplayError, listed
from app.model_service.replay.takes import SUFFIX, file_name, read_takes
from app.model_service.replay.volatile import Digests, steady_message, swapped

_REELS = 256
"""Attempts that are kept in memory; the others are read again when they are asked for."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, as far as the gateway says. `id` tells attempts apart."""

    id: str = ""
    task: str | None = None
    replica: int | None = None
    agent: str = ""


class Recordings:
    """The recorded runs below one folder. For one event loop."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._digests = Digests()
        self._reels: OrderedDict[Path, tuple[int, Reel]] = OrderedDict()
        self._reading = asyncio.Lock()

    def names(self) -> list[str]:
        """The runs that can be played."""
        if self._folder is None or not self._folder.is_dir():
            return []
        return sorted(path.name for path in self._folder.iterdir() if path.is_dir())

    async def answer(self, run: str, request: Request, caller: Caller, *, scripts: Sequence[str] = ()) -> Answer:
        """What the recorded engine said to this conversation, else what it said at this point of the same attempt.

        Raises: ReplayError: no such recording, or nothing in it that fits; the message shows what came closest.
        """
        files, its_own = self._files(run, caller, scripts)
        reels = [(path, await self._reel(path)) for path in files]
        swaps = self._compared(request, run, [reel for _, reel in reels])
        for reel, wanted in swaps:
            if (found := reel.exact(wanted)) is not None:
                return _answer(found, wanted, "exact")
        for reel, wanted in swaps:
            if (its_own or wanted.task in reel.tasks) and (found := reel.by_position(wanted)) is not None:
                return _answer(found, wanted, "position")
        raise await asyncio.to_thread(_miss, run, request, caller, [path for path, _ in reels], swaps)

    def _compared(self, request: Request, run: str, reels: Sequence[Reel]) -> list[tuple[Reel, Asked]]:
        """Frameworks write the model's name into their prompts; here it is another than it was."""
        known = {model: asked(request, self._digests, _swap(run, model)) for model in {reel.model for reel in reels}}
        return [(reel, known[reel.model]) for reel in reels]

    def _files(self, run: str, caller: Caller, scripts: Sequence[str]) -> tuple[list[Path], bool]:
        """Where the answer may be, and whether those are attempts at the caller's task."""
        folder = self._folder / run if self._folder is not None and run not in ("", ".", "..") else None
        if folder is None or not folder.is_dir():
            raise ReplayError(
                "recording_unknown",
                f"expected the name of a recorded run or of a script after 'replay:'; found {run!r}; "
                f"known recordings: {listed(self.names())}; known scripts: {listed(scripts)}; "
                "`megaflow record RUN` makes one",
            )
        if caller.task is not None and caller.replica is not None:
            for agent in (caller.agent, ""):
                own = folder / file_name(caller.task, caller.replica, agent)
                if own.is_file():
                    return [own], True
        every = sorted(folder.glob(f"*{SUFFIX}"))
        if not every:
            raise ReplayError("recording_empty", f"expected files *{SUFFIX} in recording {run!r}; found none")
        of_task = [path for path in every if caller.task and path.name.startswith(f"{quote(caller.task, safe='')}--")]
        return of_task or every, bool(of_task)

    async def _reel(self, path: Path) -> Reel:
        async with self._reading:
            changed_at = _changed_at(path)
            held = self._reels.get(path)
            if held is None or held[0] != changed_at:
                held = (changed_at, await asyncio.to_thread(_read, path))
                self._reels[path] = held
            self._reels.move_to_end(path)
            while len(self._reels) > _REELS:
                self._reels.popitem(last=False)
            return held[1]


def _changed_at(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError as error:
        raise _unreadable(path, error) from error


def _read(path: Path) -> Reel:
    try:
        return Reel(read_takes(path), Digests())
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ReplayError:
    return ReplayError(
        "recording_unreadable",
        f"expected {path.name} to be a recorded attempt; found: {error}; record the run again",
        status=400,
    )


def _swap(run: str, model: str) -> tuple[str, str] | None:
    return (f"replay:{run}", model) if model else None


def _answer(found: Reply | Refused, wanted: Asked, how: str) -> Answer:
    if isinstance(found, Refused):
        return Answer(Refusal(found.status, found.code, found.message), matched=how)
    # Claude Code takes answers of one id for pieces of one message.
    return Answer(found, wanted.key.hex()[:24], matched=how)


def _miss(
    run: str, request: Request, caller: Caller, files: Sequence[Path], swaps: Sequence[tuple[Reel, Asked]]
) -> ReplayError:
    """Reads the nearest attempt again, for only digests are kept."""
    nearness = [(reel.nearest(wanted), at) for at, (reel, wanted) in enumerate(swaps)]
    (take, shared), at = max(nearness, key=lambda item: (item[0][1], -item[1]))
    where = "it has no calls" if take < 0 else ""
    if take >= 0:
        recorded = read_takes(files[at])[take].asked
        swap = _swap(run, recorded.model)
        told = difference(
            [steady_message(message) for message in recorded.messages],
            [steady_message(swapped(message, swap)) for message in request.messages],
            request.messages,
        )
        where = f"its call {take + 1} comes closest, with {shared} messages in common; {told}"
    who = f"task {caller.task!r}, replica {caller.replica}" if caller.task else "a caller that does not say its task"
    return ReplayError(
        "recording_miss",
        f"expected a conversation that recording {run!r} holds; found none for {who} with {len(request.messages)} "
        f"messages; nearest is {files[at].name}: {where}",
    )
