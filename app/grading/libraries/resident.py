"""Serves one grading library: reads a JSON line on standard input, writes one to standard output. Stands alone.

    python -I resident.py SCRIPT CPU_S MEMORY_BYTES

It runs in the library's own environment and imports nothing of MegaFlow. SCRIPT has `NAME` (the distribution),
`describe(row)` and `judge(goal, log, exit_code)`; it may import this module as `resident`. The first output line is
`{"ready": "NAME VERSION"}`. Requests are `{"verb": "describe", "row": …}` and `{"verb": "judge", "goal": …, "log": …,
"exit_code": …}`; replies `{"answer": …}` or `{"error": …, "unknown": whether the library does not know the row,
"column": the column with the unknown value}`.

A log is hostile: a request may use CPU_S seconds of processor time, after which the kernel ends this process, even when
its client has died; memory is limited; neither a connection nor another program can be started.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, BinaryIO

_MOST_FILE_BYTES = 1 << 30  # logs that a library opens as files are in memory, and count as files
_REFUSED = ("socket.connect", "socket.getaddrinfo", "socket.bind", "subprocess.Popen", "os.system", "os.posix_spawn",
            "os.exec", "os.fork", "os.forkpty")  # fmt: skip


class RowUnknown(Exception):
    """Error: the library does not know a value of the row. The message is for people; `column` has the value."""

    def __init__(self, message: str, column: str) -> None:
        super().__init__(message)
        self.column = column


class Absent:
    """Stands for a name of a package that is not installed, since judging does not use it: it cannot be called."""

    def __init__(self, *_: object, **__: object) -> None:
        raise NotImplementedError("expected a grading library to judge and describe only; found it using a package"
                                  " that is left out of its environment")  # fmt: skip


class AbsentModule(ModuleType):
    """A package that is left out: every name in it is `Absent`."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent


def absent(*names: str) -> None:
    """Lets the library import packages that are left out: they fetch datasets, use the network, run containers."""
    for name in names:
        sys.modules[name] = AbsentModule(name)


def bare(*names: str) -> None:
    """Lets submodules of a package be imported without its `__init__`, which would import everything."""
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.submodule_search_locations is None:
            raise ImportError(f"expected the package {name}; found none")
        module = ModuleType(name)
        module.__path__, module.__spec__ = list(spec.submodule_search_locations), spec
        sys.modules[name] = module


def column(row: dict[str, Any], name: str) -> str:
    """Returns a text of the row. Raises: RowUnknown."""
    value = row.get(name)
    if not isinstance(value, str):
        raise RowUnknown(f"expected {name!r} in the row to be a text; found {value!r:.100}", name)
    return value


@contextmanager
def as_file(text: str) -> Iterator[str]:
    """Yields a path where a library can open the text; it is in memory and removed afterwards."""
    descriptor = os.memfd_create("log")
    try:
        with open(descriptor, "w", encoding="utf-8", errors="replace", newline="", closefd=False) as file:
            file.write(text)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _refuse(event: str, _: object) -> None:
    if event in _REFUSED:
        raise PermissionError(f"a grading library may not do this: {event}")


def _bound(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MOST_FILE_BYTES, _MOST_FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _allow_cpu(cpu_s: float) -> None:
    """Limits processor time from now on; the kernel ends the process when it is used up."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most_s = math.ceil(used.ru_utime + used.ru_stime + cpu_s)
    resource.setrlimit(resource.RLIMIT_CPU, (most_s, resource.RLIM_INFINITY))


def _load(script: str) -> Any:
    sys.modules["resident"] = sys.modules[__name__]
    spec = importlib.util.spec_from_file_location("judge", script)
    if spec is None or spec.loader is None:
        raise ImportError(f"expected a script; found {script}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _answer(module: Any, line: bytes) -> dict[str, Any]:
    request = json.loads(line)
    try:
        if request["verb"] == "describe":
            return {"answer": module.describe(request["row"])}
        return {"answer": module.judge(request["goal"], request["log"], request["exit_code"])}
    except RowUnknown as error:
        return {"error": str(error), "unknown": True, "column": error.column}
    except Exception as error:  # noqa: BLE001  every error affects only this request
        return {"error": f"{type(error).__name__}: {error}"[:2000], "unknown": False}


def _send(out: BinaryIO, reply: dict[str, Any]) -> None:
    out.write(json.dumps(reply).encode() + b"\n")
    out.flush()


def main(script: str, cpu_s: float, memory_bytes: int) -> None:
    """Serves requests until the end of input."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of a library is no reply
    _bound(memory_bytes)
    try:
        module = _load(script)
        ready = {"ready": f"{module.NAME} {importlib.metadata.version(module.NAME)}"}
    except Exception as error:  # noqa: BLE001  sent as a reply, since printed output is not read
        _send(out, {"error": f"{type(error).__name__}: {error}"[:2000], "unknown": False})
        return
    sys.addaudithook(_refuse)
    _send(out, ready)
    for line in sys.stdin.buffer:
        _allow_cpu(cpu_s)
        _send(out, _answer(module, line))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
