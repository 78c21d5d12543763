"""Reads engines' keys from the gateway's environment or a file, and keeps them out of all output.

The variable NAME holds the key, or `file:PATH`; else NAME_FILE holds a path. A file is read again when it changes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import structlog

from app.errors import LimitInvalid
from app.ledger.model_replicas import check_variable

log = structlog.get_logger()

_CACHED_S = 5.0
_NAMES_MOST = 1000
_SHORTEST = 8
"""Minimum length of a key. Redacting shorter values would garble texts."""
_HIDDEN = "[key]"


def missing_key(keys: Keys, variable: str | None) -> str | None:
    """Returns advice about a key that the gateway lacks. None: the gateway has it, or needs none."""
    if variable is None or keys.value(variable) is not None:
        return None
    return (
        f"expected a key in the gateway's variable {variable}, found none; export {variable}, then `megaflow down` and"
        " `megaflow up` in the same shell"
    )


class Keys:
    """Cache of keys by variable name. For one event loop."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ = os.environ if environ is None else environ
        self._known: dict[str, tuple[float, str | None]] = {}
        self._ever: dict[str, None] = {}

    def value(self, name: str | None) -> str | None:
        """Returns the key. None: the variable has none, or its name is not allowed for keys."""
        if not name:
            return None
        now = time.monotonic()
        cached = self._known.get(name)
        if cached is not None and now - cached[0] < _CACHED_S:
            return cached[1]
        key = self._read(name)
        if key and len(key) >= _SHORTEST:
            self._ever[key] = None
        if len(self._known) >= _NAMES_MOST:  # tasks choose the names: limits the memory
            self._known.clear()
        self._known[name] = (now, key)
        return key

    def redact(self, said: str) -> str:
        """Redacts all keys that were ever used."""
        for key in self._ever:
            said = said.replace(key, _HIDDEN)
        return said

    def redact_bytes(self, said: bytes) -> bytes:
        for key in self._ever:
            said = said.replace(key.encode(), _HIDDEN.encode())
        return said

    def _read(self, name: str) -> str | None:
        try:
            check_variable(name)
        except LimitInvalid as error:
            log.warning("gateway.key_refused", error=str(error))
            return None
        value = self._environ.get(name, "")
        path = value.removeprefix("file:") if value.startswith("file:") else self._environ.get(f"{name}_FILE", "")
        if value and not value.startswith("file:"):
            return value.strip()
        if not path:
            return None
        try:
            return Path(path).read_text().strip() or None
        except (OSError, ValueError) as error:  # no such file, or not a text
            log.warning("gateway.key_unreadable", variable=name, error=type(error).__name__)
            return None
