"""Installs Debian packages."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from app.models.provider_keys import without_keys

_PATIENCE_S = 900.0


def install(packages: Sequence[str], log: Path) -> bool:
    """Installs packages, if needed after updating apt's index; returns whether all are installed."""
    if _apt(["install", *packages], log):
        return True
    _apt(["update"], log)
    return _apt(["install", *packages], log)


def _apt(words: list[str], log: Path) -> bool:
    command = ["apt-get", words[0], "-y", "--no-install-recommends", *words[1:]]
    with log.open("ab") as output, suppress(subprocess.TimeoutExpired):
        result = subprocess.run(  # noqa: S603 (constants of this package)
            command,
            env=without_keys(os.environ) | {"DEBIAN_FRONTEND": "noninteractive"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=_PATIENCE_S,
        )
        return result.returncode == 0
    return False
