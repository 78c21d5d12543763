"""The helper's binary: compiled once per source and machine, or named by path."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from app.environments import compiling
from app.errors import EnvironmentFailed

_SOURCE = Path(__file__).parent / "helper"


class HelperUnavailable(EnvironmentFailed):
    """The session helper could not be compiled here; the message names what is missing."""


def binary(home: Path, *, prebuilt: Path | None = None) -> Path:
    """The static helper, executable, at `home`/cache/session/helper-HASH-MACHINE; compiled there when it is missing.

    Safe when several processes ask at once. `prebuilt` is taken as it is.

    Start it inside an environment as one of
      helper --listen SOCKET [--orphan-exit SECONDS]   listens (mode 0600); as PID 1 it is also the init
      helper --listen-fd N [--orphan-exit SECONDS]     the same on a listening socket that it inherits (crun
                                                       --preserve-fds): no path is visible inside
      helper --stdio                                   one lane over stdin and stdout (`docker exec -i`)
      helper --bridge SOCKET                           carries stdin and stdout to a helper that listens

    On this host it also makes user namespaces:
      helper --apart                                   writes a byte when it is in one, and stays until its stdin ends

    Raises: HelperUnavailable: no compiler (Debian: gcc and libc6-dev), or it failed.
    """
    if prebuilt is not None:
        if not os.access(prebuilt, os.X_OK):
            raise HelperUnavailable(f"expected an executable session helper at {prebuilt}, found none.")
        return prebuilt
    try:
        return compiling.kept(home / "cache" / "session" / "helper", _sources())
    except compiling.NotCompiled as error:
        raise HelperUnavailable(f"no session helper, unless a prebuilt one is named: {error}") from error


@functools.cache
def _sources() -> tuple[Path, ...]:
    return tuple(sorted(_SOURCE.glob("*.c")))
