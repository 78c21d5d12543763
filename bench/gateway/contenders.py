"""Who is measured: the bare engine, our gateway, LiteLLM's proxy. Each is one process in front of the same engine."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import yaml

from app.errors import MegaFlowError
from bench.gateway import ours, processes, wire
from bench.peers.installed import Wanted, python_with

BARE, OURS, LITELLM = "bare engine", "MegaFlow", "LiteLLM"
NAMES = (BARE, OURS, LITELLM)
PROXIES = (OURS, LITELLM)
_LITELLM = "litellm[proxy]==1.105.3"
_READY_S = 180.0
"""LiteLLM's first start compiles a great deal of Python."""

REPOSITORY = Path(__file__).parent.parent.parent


class Tokens(Protocol):
    """Makes keys for so many attempts."""

    def __call__(self, count: int) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class Contender:
    """Somebody who answers at a port of this host. `pid`: the process that serves."""

    name: str
    port: int
    pid: int
    tokens: Tokens
    path: str = "/v1/chat/completions"
    recorded: Callable[[], int] | None = None
    """Calls that it has in a database by now; None: it keeps none."""


@contextmanager
def engine(folder: Path) -> Iterator[Contender]:
    """The engine that all stand before, which is also the limit of what can be had."""
    command = [sys.executable, "-m", "bench.gateway.engine"]
    with processes.running(command, log=folder / "engine.log", cwd=REPOSITORY) as process:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        if not port.isdigit():
            raise RuntimeError(f"the engine did not start: {(folder / 'engine.log').read_text()[-600:]}")
        yield Contender(BARE, int(port), process.pid, lambda count: ("none",) * count)


@contextmanager
def megaflow(engine: Contender, folder: Path) -> Iterator[Contender]:
    """Ours as `megaflow up` runs it, recording into PostgreSQL."""
    port = ours.free_port()
    with ours.gateway(f"http://127.0.0.1:{engine.port}/v1", port) as running:
        yield Contender(OURS, port, running.pid, running.tokens, recorded=running.recorded)


@contextmanager
def litellm(engine: Contender, folder: Path) -> Iterator[Contender]:
    """LiteLLM's proxy at its leanest: one process as ours, no database, no callbacks, one key for all.

    httptools is lent: its server takes that parser of HTTP where there is one, but it is not among the requirements.
    """
    python = python_with(Wanted("litellm", (_LITELLM, "httptools")))
    key, port = f"sk-{secrets.token_urlsafe(24)}", ours.free_port()
    parameters = {"model": f"openai/{wire.MODEL}", "api_base": f"http://127.0.0.1:{engine.port}/v1", "api_key": "none"}
    configuration = {
        "model_list": [{"model_name": wire.MODEL, "litellm_params": parameters}],
        "general_settings": {"master_key": key},
        "litellm_settings": {"num_retries": 0, "request_timeout": 600, "telemetry": False},
    }
    file = folder / "litellm.yaml"
    file.write_text(yaml.safe_dump(configuration))
    command = [str(python.with_name("litellm")), "--config", str(file), "--host", "127.0.0.1", "--port", str(port)]
    home = folder / "litellm"
    home.mkdir()
    with processes.running(
        [*command, "--num_workers", "1"], log=folder / "litellm.log", env=_variables(python, home), cwd=home
    ) as process:
        _until(process, f"http://127.0.0.1:{port}/health/liveliness", folder / "litellm.log")
        yield Contender(LITELLM, port, process.pid, lambda count: (key,) * count)


def _variables(python: Path, home: Path) -> dict[str, str]:
    """Neither ours nor the user's; nothing is fetched, nothing is logged for each call."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MEGAFLOW_", "PYTHON"))}
    quiet = {"LITELLM_MODE": "PRODUCTION", "LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return {**clean, **quiet, "HOME": str(home), "PATH": f"{python.parent}:{clean.get('PATH', '')}", "NO_DOCS": "True"}


def _until(process: subprocess.Popen[str], url: str, log: Path) -> None:
    """Until it answers. Raises: RuntimeError: it ended, or took too long."""
    give_up = time.monotonic() + _READY_S
    while not ours.answers(url):
        if process.poll() is not None or time.monotonic() > give_up:
            raise RuntimeError(f"it does not answer; it said: {log.read_text(errors='replace').strip()[-600:]}")
        time.sleep(0.2)


@contextmanager
def gathered(
    names: tuple[str, ...], folder: Path, say: Callable[[str], None]
) -> Iterator[tuple[dict[str, Contender], dict[str, str]]]:
    """Everybody who can be had here, the engine first, and why the others cannot."""
    absent: dict[str, str] = {}
    with ExitStack() as stack:
        say("preparing the engine")
        bare = stack.enter_context(engine(folder))
        present = {BARE: bare}
        for name, start in ((OURS, megaflow), (LITELLM, litellm)):
            if name not in names:
                continue
            say(f"preparing {name}")
            try:
                present[name] = stack.enter_context(start(bare, folder))
            except (RuntimeError, MegaFlowError) as error:
                absent[name] = str(error)
                say(f"{name} cannot be measured here: {error}")
        yield present, absent


def versions() -> dict[str, str]:
    return {"LiteLLM": _LITELLM.partition("==")[2]}
