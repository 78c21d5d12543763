"""Checks and answers what a framework asks over the bridge. No I/O but the shell; `bridge` is the transport.

A request is a JSON object with one of the keys `hello`, `command`, `put` and `get`; its other keys say the rest:

    {"hello": "megaflow-bridge/1"}                            -> {"hello": "megaflow-bridge/1", "longest_frame": BYTES}
    {"command": TEXT, "cwd", "env", "timeout_s", "stdin"}     -> {"exit_code", "output", "timed_out", "truncated",
                                                                  "duration_s", "out_of_memory", "logs"}; exit_code
                                                                  is null when it was killed for its time
    {"put": PATH, "content": BASE64, "mode": 420}             -> {"put": PATH}
    {"get": PATH}                                             -> {"content": BASE64}

`output` is stdout, then stderr; `stdin` is base64. `out_of_memory`: processes were killed for the environment's memory
limit meanwhile. `logs`: where a person finds all of an output that was `truncated`, by name. An answer with `error`
says why this one thing cannot be done (no such file, a request that is none); one with `fault` that the environment is
gone, for every request after it too.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable, Mapping
from typing import Any

from app.errors import DiskFull, SpecInvalid
from app.models.shell import CommandResult, Shell

PROTOCOL = "megaflow-bridge/1"
LONGEST_FRAME_BYTES = 64 << 20
_LONGEST_FILE_BYTES = LONGEST_FRAME_BYTES // 4 * 3 - (1 << 10)  # as base64, with some room around it
_LONGEST_TIMEOUT_S = 86_400.0

Answer = dict[str, Any]


class BridgeRefusal(Exception):
    """This one request cannot be answered as wanted; the environment is well."""


def answer(shell: Shell, request: Mapping[str, Any], *, default_timeout_s: float) -> Answer:
    """Raises: whatever the shell raises when the environment is gone."""
    try:
        for key, ask in _REQUESTS.items():
            if key in request:
                return ask(shell, request, default_timeout_s)
        raise BridgeRefusal(
            f"expected one of the keys {', '.join(_REQUESTS)}; found {', '.join(map(repr, request)) or 'none'}"
        )
    except (BridgeRefusal, FileNotFoundError, ValueError, DiskFull, SpecInvalid) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _hello(shell: Shell, request: Mapping[str, Any], _: float) -> Answer:
    if request["hello"] != PROTOCOL:
        raise BridgeRefusal(f"expected the protocol {PROTOCOL}; found {request['hello']!r}")
    return {"hello": PROTOCOL, "longest_frame": LONGEST_FRAME_BYTES}


def _command(shell: Shell, request: Mapping[str, Any], default_timeout_s: float) -> Answer:
    result = shell.run(
        _text(request, "command"),
        cwd=_text(request, "cwd") if request.get("cwd") is not None else None,
        env=_variables(request),
        timeout_s=_timeout(request, default_timeout_s),
        stdin=_bytes(request, "stdin") if request.get("stdin") is not None else None,
    )
    return _wire(result)


def _put(shell: Shell, request: Mapping[str, Any], _: float) -> Answer:
    path, mode = _path(request, "put"), request.get("mode", 0o644)
    if not isinstance(mode, int) or not 0 <= mode <= 0o7777:
        raise BridgeRefusal(f"expected the key 'mode', a number from 0 to 4095 (octal 7777); found {mode!r}")
    shell.put(path, _bytes(request, "content"), mode=mode)
    return {"put": path}


def _get(shell: Shell, request: Mapping[str, Any], _: float) -> Answer:
    content = shell.get(_path(request, "get"))
    if len(content) > _LONGEST_FILE_BYTES:
        raise BridgeRefusal(f"expected a file of at most {_LONGEST_FILE_BYTES} bytes; found {len(content)}")
    return {"content": base64.b64encode(content).decode()}


_REQUESTS: dict[str, Callable[[Shell, Mapping[str, Any], float], Answer]] = {
    "hello": _hello,
    "command": _command,
    "put": _put,
    "get": _get,
}


def _wire(result: CommandResult) -> Answer:
    return {
        "exit_code": result.exit_code,
        "output": result.text(),
        "timed_out": result.timed_out,
        "truncated": result.truncated,
        "duration_s": result.duration_s,
        "out_of_memory": result.out_of_memory,
        "logs": list(result.logs),
    }


def _text(request: Mapping[str, Any], key: str) -> str:
    value = request.get(key)
    if not isinstance(value, str) or "\0" in value:
        raise BridgeRefusal(f"expected the key {key!r}, a text without NUL; found {value!r:.80}")
    return value


def _path(request: Mapping[str, Any], key: str) -> str:
    path = _text(request, key)
    if not path.startswith("/") or path.rstrip("/") == "":
        raise BridgeRefusal(f"expected the key {key!r}, the absolute path of a file; found {path!r:.200}")
    return path


def _bytes(request: Mapping[str, Any], key: str) -> bytes:
    try:
        return base64.b64decode(_text(request, key), validate=True)
    except (binascii.Error, ValueError) as error:
        raise BridgeRefusal(f"expected the key {key!r}, base64; found {error}") from error


def _variables(request: Mapping[str, Any]) -> dict[str, str]:
    found = request.get("env") or {}
    whole = isinstance(found, dict) and all(isinstance(part, str) and "\0" not in part for part in found.values())
    if not whole or not all(name and "=" not in name and "\0" not in name for name in found):
        raise BridgeRefusal(f"expected the key 'env', an object of texts; found {found!r:.80}")
    return dict(found)


def _timeout(request: Mapping[str, Any], default_s: float) -> float:
    wanted = request.get("timeout_s")
    if wanted is None:
        return default_s
    if isinstance(wanted, bool) or not isinstance(wanted, int | float) or not math.isfinite(wanted) or wanted <= 0:
        raise BridgeRefusal(f"expected the key 'timeout_s', seconds above 0; found {wanted!r:.80}")
    return min(float(wanted), _LONGEST_TIMEOUT_S)
