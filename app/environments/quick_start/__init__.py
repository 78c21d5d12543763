"""A second runtime for an engine: crun, loaded sooner and spared what it did before.

The engine that `megaflow up` starts is told of it (`option`); another one may be: `--add-runtime NAME=PROGRAM`.
Whoever makes containers asks the engine whether it has it (`of`), and goes back to the engine's own when it does not
work there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from weakref import WeakKeyDictionary

import structlog

from app.environments import compiling, crun
from app.environments.engine import Engine
from app.errors import EnvironmentFailed

log = structlog.get_logger()

NAME = "megaflow-quick"
_FILTER_FORMAT = 1
"""Of what the program keeps; to be counted up with it."""
_SOURCE = Path(__file__).parent / "wrapper.c"

Made = TypeVar("Made")


# --- The program -----------------------------------------------------------------------------------------------------


def option(home: Path) -> tuple[str, ...]:
    """What dockerd is started with so that it has the runtime; nothing where it cannot be had."""
    found = program(home)
    return () if found is None else ("--add-runtime", f"{NAME}={found}")


def program(home: Path) -> Path | None:
    """The runtime at `home`/cache/quick-start, compiled when it is missing; None without crun or a compiler."""
    runtime = crun.find()
    if runtime is None:
        log.info("quick_start.unavailable", reason="crun is not installed")
        return None
    cache = home.resolve() / "cache"
    texts = _texts(runtime, crun.light(runtime.resolve(), cache / "crun"))
    folder = cache / "quick-start"
    try:
        return compiling.kept(folder / "runtime", (_SOURCE,), (*compiling.STATIC, *texts, _filters(folder, runtime)))
    except compiling.NotCompiled as error:
        log.warning("quick_start.unavailable", reason=str(error))
        return None


def _texts(runtime: Path, libraries: Path | None) -> tuple[str, ...]:
    """What the program is told: the libraries are for crun as it is now, and not after an upgrade."""
    if libraries is None:
        return (f'-DRUNTIME="{runtime}"',)
    about = runtime.stat()
    known = f"-DRUNTIME_BYTES={about.st_size}", f"-DRUNTIME_CHANGED={about.st_mtime_ns // 1_000_000_000}"
    return f'-DRUNTIME="{runtime}"', f'-DLIBRARIES="{libraries}"', *known


def _filters(folder: Path, runtime: Path) -> str:
    """Where it keeps compiled filters: another crun may compile the same rules to others."""
    about = runtime.stat()
    return f'-DFILTERS="{folder}/filters-{_FILTER_FORMAT}-{about.st_size}-{about.st_mtime_ns // 1_000_000_000}"'


# --- Its use ---------------------------------------------------------------------------------------------------------


class QuickStart:
    """Whether one engine's containers are started by it. Safe for many threads."""

    def __init__(self, engine: Engine) -> None:
        self._open = NAME in (engine.about.get("Runtimes") or {})
        self._proven = False
        self._default = threading.local()

    def runtime(self) -> str | None:
        """For a new container; None: the engine's own."""
        return NAME if self._open and not getattr(self._default, "wanted", False) else None

    def tried(self, make: Callable[[], Made]) -> Made:
        """What `make` gives; by the engine's own runtime, and from then on, when only that one can."""
        try:
            made = make()
        except EnvironmentFailed as error:
            if not self._open or (self._proven and "runtime" not in str(error)):
                raise
            return self._by_default(make, str(error))
        self._proven = True
        return made

    def _by_default(self, make: Callable[[], Made], reason: str) -> Made:
        self._default.wanted = True
        try:
            made = make()  # what fails here, too, is not the runtime's fault
        finally:
            self._default.wanted = False
        if self._open:
            self._open = False
            log.warning("quick_start.given_up", reason=reason)
        return made


def of(engine: Engine) -> QuickStart:
    """What this process knows of the engine."""
    found = _known.get(engine)
    return found if found is not None else _known.setdefault(engine, QuickStart(engine))


_known: WeakKeyDictionary[Engine, QuickStart] = WeakKeyDictionary()
