"""What runs in a contender's own process: it reads what to measure, one JSON object a line, and answers likewise.

    python loop.py ADAPTER OPTIONS        (OPTIONS: JSON for the adapter; `book`: a file for the names of what it makes)

Everything is timed here, beside the contender's code, so that the way to the benchmark is in no figure.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from engine import Engine
from live import Absent, Contender, Live

_GONE_S = 60.0
_MOST_SAMPLES = 5_000


def main() -> None:
    """Serve until the input ends; then nothing of ours is left in the engine."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a contender prints must not come between
    options = json.loads(sys.argv[2])
    measures: Measures | None = None
    try:
        for line in sys.stdin:
            request = json.loads(line)
            try:
                measures = measures or Measures(_contender(options), options["book"])
                answer = {"answer": measures.do(request.pop("do"), request)}
            except Exception as error:  # noqa: BLE001 the boundary to another process: told there, whatever it is
                answer = {"error": f"{type(error).__name__}: {error}"[-1500:]}
            print(json.dumps(answer), file=channel)
    finally:
        if measures is not None:
            measures.end()


def _contender(options: dict[str, Any]) -> Contender:
    made: Contender = importlib.import_module(sys.argv[1]).contender(options)
    return made


class Measures:
    """What can be asked for. Environments that `open` made stay until `close`."""

    def __init__(self, contender: Contender, book: str) -> None:
        self._contender = contender
        self._engine = Engine()
        self._book = book
        self._seen: list[str] = []
        self._open: list[Live] = []

    def do(self, name: str, arguments: dict[str, Any]) -> Any:
        known: dict[str, Callable[..., Any]] = {
            "hello": self.hello,
            "lives": self.lives,
            "open": self.open,
            "close": self.close,
            "steps": self.steps,
            "flood": self.flood,
            "files": self.files,
            "task": self.task,
            "crowd": self.crowd,
            "left": self.left,
            **self._contender.extra(),
        }
        return known[name](**arguments)

    def hello(self) -> dict[str, str]:
        """One life, so that everything is warm; its answers are looked at."""
        live = self._start()
        try:
            code, output = live.run("printf 'hel'; printf 'lo\\n'")
            if code != 0 or output.strip() != b"hello":
                raise RuntimeError(f"expected exit code 0 and `hello`, found {code} and {output[:200]!r}")
        finally:
            self._discard(live)
        return self._contender.versions()

    def lives(self, count: int, stop: bool) -> dict[str, Any]:
        """From nothing to the first command's end, one after the other; with `stop`, also the end, as it does it."""
        first: list[float] = []
        returned: list[float] = []
        gone: list[float] = []
        cpu_s = 0.0
        for _ in range(count):
            begun, before = time.perf_counter(), _cpu_s()
            live = self._start()
            _true(live)
            first.append(time.perf_counter() - begun)
            cpu_s += _cpu_s() - before
            if stop:
                begun = time.perf_counter()
                live.stop()
                returned.append(time.perf_counter() - begun)
                self._await_gone(live)
                gone.append(time.perf_counter() - begun)
            else:
                self._discard(live)
        return {"first_s": first, "stop_s": returned, "gone_s": gone, "cpu_s": cpu_s / count}

    def open(self, count: int, width: int) -> dict[str, Any]:
        """Start many, `width` at a time, each until its first command's end."""
        took: list[float] = []
        reasons: list[str] = []

        def one(_: int) -> None:
            begun = time.perf_counter()
            try:
                live = self._start()
                self._open.append(live)
                _true(live)
                took.append(time.perf_counter() - begun)
            except Exception as error:  # noqa: BLE001 counted, and told: whatever a contender raises
                reasons.append(f"{type(error).__name__}: {error}"[-300:])

        begun = time.perf_counter()
        _together(one, count, width)
        wall_s = time.perf_counter() - begun
        if not took:
            raise RuntimeError(f"none of {count} started: {reasons[0]}")
        return {"took_s": took, "wall_s": wall_s, "failed": len(reasons), "reason": reasons[0] if reasons else ""}

    def close(self, gently: bool) -> dict[str, Any]:
        """End what is open: all at once as the contender does, or behind its back."""
        leaving, self._open = self._open, []
        took: list[float] = []

        def one(live: Live) -> None:
            begun = time.perf_counter()
            if gently:
                live.stop()
            else:
                self._discard(live)
            took.append(time.perf_counter() - begun)

        begun = time.perf_counter()
        with ThreadPoolExecutor(16) as threads:
            list(threads.map(one, leaving))
        return {"took_s": took, "wall_s": time.perf_counter() - begun}

    def steps(self, count: int) -> dict[str, Any]:
        """`true` again and again in the first that is open."""
        live, took = self._open[0], []
        before = _cpu_s()
        for _ in range(count):
            begun = time.perf_counter()
            _true(live)
            took.append(time.perf_counter() - begun)
        return {"took_s": took, "cpu_s": (_cpu_s() - before) / count}

    def flood(self, seconds: float) -> dict[str, Any]:
        """`true` again and again in all that are open, at once."""
        took: list[list[float]] = [[] for _ in self._open]
        barrier = threading.Barrier(len(self._open) + 1)

        def one(live: Live, mine: list[float]) -> None:
            barrier.wait()
            until = time.perf_counter() + seconds
            while (begun := time.perf_counter()) < until:
                _true(live)
                mine.append(time.perf_counter() - begun)

        with ThreadPoolExecutor(len(self._open)) as threads:
            futures = [threads.submit(one, *pair) for pair in zip(self._open, took, strict=True)]
            barrier.wait()
            before, begun = _cpu_s(), time.perf_counter()
            for future in futures:
                future.result()
            wall_s, cpu_s = time.perf_counter() - begun, _cpu_s() - before
        every = sorted(second for mine in took for second in mine)
        return {
            "steps": len(every),
            "per_s": len(every) / wall_s,
            "p50_s": every[int(0.5 * (len(every) - 1))],
            "p99_s": every[int(0.99 * (len(every) - 1))],
            "cpu_s": cpu_s / len(every),
        }

    def files(self, size_bytes: int, count: int) -> dict[str, Any]:
        """One file in and out again; what it cannot do is missing, with the reason."""
        live, content = self._open[0], base64.b64encode(os.urandom(750_000)) * (size_bytes // 1_000_000)
        found: dict[str, Any] = {"in_s": [], "out_s": [], "absent": {}}
        place = "/tmp/bench-file"
        # Text, because one of them reads files as text and so changes line ends.
        live.run(f"rm -f {place}; base64 -w 0 /dev/urandom 2>/dev/null | head -c {size_bytes} > {place}.made")
        for _ in range(count):
            _timed(found, "in", lambda: live.put(place, content))
            _timed(found, "out", lambda: _of_size(live.get(f"{place}.made"), size_bytes))
        code, output = live.run(f"stat -c %s {place} 2>/dev/null")
        live.run(f"rm -f {place} {place}.made")  # one of them works in the host's own folder
        if "in" not in found["absent"] and (code != 0 or int(output) != size_bytes):
            raise RuntimeError(f"expected a file of {size_bytes} bytes inside, found {output!r}")
        return found

    def task(self, commands: list[str]) -> dict[str, Any]:
        """A whole agent task: start, all commands, end."""
        begun, before = time.perf_counter(), _cpu_s()
        live = self._start()
        try:
            _true(live)
            at = time.perf_counter()
            start_s, failed = at - begun, 0
            for command in commands:
                code, _ = live.run(command)
                failed += code != 0
            steps_s, at = time.perf_counter() - at, time.perf_counter()
            live.stop()
            stop_s = time.perf_counter() - at
        except BaseException:
            self._discard(live)
            raise
        return {
            "whole_s": start_s + steps_s + stop_s,
            "start_s": start_s,
            "steps_s": steps_s,
            "stop_s": stop_s,
            "failed": failed,
            "cpu_s": _cpu_s() - before,
        }

    def crowd(self, count: int, width: int, commands: list[str]) -> dict[str, Any]:
        """Whole lives, `width` at a time."""
        took: list[float] = []
        reasons: list[str] = []

        def one(_: int) -> None:
            begun = time.perf_counter()
            try:
                live = self._start()
                try:
                    for command in commands:
                        code, _output = live.run(command)
                        if code != 0:
                            raise RuntimeError(f"`{command}` gave {code}")
                finally:
                    live.stop()
                took.append(time.perf_counter() - begun)
            except Exception as error:  # noqa: BLE001 counted, and told: whatever a contender raises
                reasons.append(f"{type(error).__name__}: {error}"[-300:])

        before, begun = _cpu_s(), time.perf_counter()
        _together(one, count, width)
        return {
            "took_s": took[:_MOST_SAMPLES],
            "wall_s": time.perf_counter() - begun,
            "failed": len(reasons),
            "reason": reasons[0] if reasons else "",
            "cpu_s": (_cpu_s() - before) / count,
        }

    def left(self) -> dict[str, int]:
        """Containers of ours that the engine still has."""
        self._seen = [name for name in self._seen if self._engine.exists(name)]
        return {"left": len(self._seen) - sum(1 for live in self._open if live.container)}

    def end(self) -> None:
        self.close(gently=False)
        self._contender.close()

    def _start(self) -> Live:
        live = self._contender.start()
        if live.container:
            self._seen.append(live.container)
            with open(self._book, "a", encoding="utf-8") as book:
                book.write(f"{live.container}\n")
        return live

    def _discard(self, live: Live) -> None:
        """Without the contender's own grace periods: they are no part of what is measured now."""
        if live.ends_quickly:
            live.stop()
            return
        self._engine.remove(live.container)
        for network in live.networks():
            self._engine.remove_network(network)
        live.forget()

    def _await_gone(self, live: Live) -> None:
        until = time.monotonic() + _GONE_S
        while live.container and self._engine.exists(live.container):
            if time.monotonic() > until:
                raise RuntimeError(f"still there {_GONE_S:.0f} s after its end")
            time.sleep(0.002)


def _true(live: Live) -> None:
    code, output = live.run("true")
    if code != 0:
        raise RuntimeError(f"`true` gave {code}: {output[:200]!r}")


def _timed(found: dict[str, Any], way: str, work: Callable[[], object]) -> None:
    begun = time.perf_counter()
    try:
        work()
        found[f"{way}_s"].append(time.perf_counter() - begun)
    except Absent as error:
        found["absent"][way] = str(error)


def _of_size(content: bytes, size_bytes: int) -> None:
    if len(content) != size_bytes:
        raise RuntimeError(f"expected {size_bytes} bytes, found {len(content)}")


def _together(one: Callable[[int], None], count: int, width: int) -> None:
    with ThreadPoolExecutor(width) as threads:
        list(threads.map(one, range(count)))


def _cpu_s() -> float:
    """Processor seconds of this process and of its children that have ended."""
    mine, theirs = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return mine.ru_utime + mine.ru_stime + theirs.ru_utime + theirs.ru_stime


if __name__ == "__main__":
    main()
