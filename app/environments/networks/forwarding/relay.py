"""The relay's program (`relay.c`, built ahead): brought inside over a stream, started."""

from __future__ import annotations

import platform
import uuid
from collections.abc import Callable, Sequence

from app.environments import prebuilt
from app.errors import EnvironmentFailed
from app.models.shell import InteractiveProgram

Stream = Callable[[Sequence[str]], InteractiveProgram]
"""Starts a program inside, to be talked to: an environment's `stream`."""

_PATIENCE_S = 60.0
_CHUNK_BYTES = 1 << 16
_TAKE = 'umask 077 && cat > "$0" && chmod 700 "$0" && echo taken'


def start(stream: Stream, port: int, connections: int) -> InteractiveProgram:
    """The relay, running inside; its file there is gone again. Whoever gets it closes it. Raises: EnvironmentFailed."""
    place = f"/tmp/.relay-{uuid.uuid4().hex}"
    taking = stream(["sh", "-c", _TAKE, place])
    try:
        program = prebuilt.content("relay", platform.machine())
        for at in range(0, len(program), _CHUNK_BYTES):
            taking.write(program[at : at + _CHUNK_BYTES])
        taking.close_input()
        said = b""
        while part := taking.read(_PATIENCE_S):
            said += part
        if said != b"taken\n":
            raise EnvironmentFailed(f"expected to bring the relay of ports to {place} inside, found: {said!r}.")
    finally:
        taking.close()
    return stream([place, str(port), str(connections)])
