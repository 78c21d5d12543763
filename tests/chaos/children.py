"""Processes of ours: started so that they die with us, whatever ends us, and waited for when they are stopped."""

from __future__ import annotations

import ctypes
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
"""Where `-m` finds the launchers."""
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_STARTER = ThreadPoolExecutor(1, thread_name_prefix="starter")
"""The kernel's promise to end a child with its parent is about the thread that made it: this one stays."""


def spawn(
    command: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    user: str | None = None,
    dies_by: signal.Signals = signal.SIGTERM,
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own; the kernel sends it `dies_by` when we die."""
    log.parent.mkdir(parents=True, exist_ok=True)
    return _STARTER.submit(_spawn, command, log, env, user, dies_by).result()


def _spawn(
    command: Sequence[str], log: Path, env: Mapping[str, str] | None, user: str | None, dies_by: signal.Signals
) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd="/" if user else ROOT,
            env=None if env is None else dict(env),
            user=user,
            group=user,
            extra_groups=None if user is None else [],
            start_new_session=True,
            preexec_fn=_following(dies_by),
        )


def _following(dies_by: signal.Signals) -> Callable[[], None]:
    def follow() -> None:
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, int(dies_by))

    return follow


def end(process: subprocess.Popen[bytes], first: signal.Signals = signal.SIGTERM, *, patience_s: float = 20) -> bool:
    """Send `first`, wait, and kill what stays. True when it went by itself."""
    if process.poll() is not None:
        return True
    process.send_signal(signal.SIGCONT)
    process.send_signal(first)
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    return True
