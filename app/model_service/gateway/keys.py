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
"""Shorter values are no keys, and hiding them would garble texts."""
_HIDDEN = "[key]"


def missing_key(keys: Keys, variable: str | None) -> str | None:
    """What to do about a key that the gateway does not have; None: it has it, or needs none."""
    if variable is None or keys.value(variable) is not None:
        return None
    return (
        f"expected a key in the gateway's variable {variable}, found none; export {variable}, then `megaflow down` and"
        " `megaflow up` in the same shell"
    )


class Keys:
    """The keys that were asked for, by the names of their variables. For one event loop."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ = os.environ if environ is None else environ
        self._known: dict[str, tuple[float, str | None]] = {}
        self._ever: dict[str, None] = {}

    def value(self, name: str | None) -> str | None:
        """The key, or None: there is none by that name (a name that no key may have counts as that)."""
        if not name:
            return None
        now = time.monotonic()
        known = self._known.get(name)
        if known is not None and now - known[0] < _CACHED_S:
            return known[1]
        found = self._read(name)
        if found and len(found) >= _SHORTEST:
            self._ever[found] = None
        if len(self._known) >= _NAMES_MOST:  # tasks name them
            self._known.clear()
        self._known[name] = (now, found)
        return found

    def redact(self, said: str) -> str:
        """The text without any key that was ever used."""
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
        except (OSError, ValueError) as error:  # no such file, or one with something that is no text
            log.warning("gateway.key_unreadable", variable=name, error=type(error).__name__)
            return None
