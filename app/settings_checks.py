"""Formats and checks settings, explains invalid ones, and reads the name of a home."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import SecretStr, ValidationError

from app.errors import SettingsInvalid, explained

PREFIX = "MEGAFLOW_"


def as_text(value: object) -> str:
    """Formats a setting's value as an environment variable has it."""
    match value:
        case SecretStr():
            return value.get_secret_value()
        case tuple():  # colons separate paths, commas separate names and URLs
            return (":" if any(isinstance(part, Path) for part in value) else ",").join(map(str, value))
        case dict():
            return json.dumps(value)
        case _:
            return str(value)


def is_base(url: str) -> bool:
    """Whether this is http(s)://HOST[:PORT] and nothing more."""
    try:
        parts = urlsplit(url)
        port_is_well = parts.port is None or parts.port > 0
    except ValueError:
        return False
    more = (parts.path.rstrip("/"), parts.query, parts.fragment, parts.username, parts.password)
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port_is_well and not any(more)


def reached(bind: str) -> str:
    """Returns the host by which this machine reaches a server that listens on the address `bind`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bind, bind)
    return f"[{host}]" if ":" in host else host


def explain(error: ValidationError) -> str:
    """Formats which variables are wrong and why. Values are not shown: they may be secrets."""
    own = [e for e in error.errors() if e["loc"] and e["type"] != "default_factory_not_called"]
    problems = [f"{PREFIX}{str(e['loc'][0]).upper()}: {explained(e)}" for e in own]
    return f"settings are wrong: {'; '.join(problems)}."


def refuse_unknown(environ: Mapping[str, str], fields: Iterable[str]) -> None:
    """Raises: SettingsInvalid: a variable of this prefix that no setting has."""
    known = {PREFIX + name.upper() for name in fields}
    unknown = sorted(name for name in environ if name.startswith(PREFIX) and name not in known)
    if unknown:
        near = {name: get_close_matches(name, known, n=1) for name in unknown}
        meant = [f"did you mean {matches[0]}?" for matches in near.values() if matches]
        hint = " ".join(meant) if len(meant) == len(unknown) else f"known: {', '.join(sorted(known))}"
        raise SettingsInvalid(f"unknown settings {', '.join(unknown)}; {hint}")


def keep_once(file: Path, text: str, *, least: int = 16, mode: int = 0o600) -> str:
    """Reads `file`; replaces it by `text` if it has under `least` characters (its writer died). Raises: OSError."""
    with suppress(FileNotFoundError):
        if len(content := file.read_text()) >= least:
            return content
        file.unlink()
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    write_private(temporary, text, mode)
    with suppress(FileExistsError):  # another process was faster
        os.link(temporary, file)
    temporary.unlink()
    return file.read_text()


def write_private(file: Path, text: str, mode: int = 0o600) -> None:
    """Replaces a file, by default readable only by its owner. Raises: OSError."""
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as stream:
        stream.write(text)


def name_file(home: Path) -> Path:
    """Returns the file with a home's name; the first `megaflow up` writes it."""
    return home / "installation"


def name_of(home: Path) -> str:
    """Returns an installation's default name: derived from the path of its home, so different for each home."""
    with suppress(OSError):
        if name := name_file(home).read_text().strip():
            return name
    real = os.path.realpath(home)
    word = re.sub(r"[^a-z0-9]+", "-", os.path.basename(real).lower())[:24].strip("-")
    return f"{word or 'home'}-{hashlib.sha256(os.fsencode(real)).hexdigest()[:8]}"
