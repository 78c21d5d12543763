"""How settings are written as variables, what is said of those that are wrong, and what a home keeps once."""

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
    """As it is read from a variable."""
    match value:
        case SecretStr():
            return value.get_secret_value()
        case tuple():  # folders and files are split at colons, names and URLs at commas
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
    """The host in a URL by which this machine reaches what listens on an address."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bind, bind)
    return f"[{host}]" if ":" in host else host


def explain(error: ValidationError) -> str:
    """What is wrong with which variable; the value is not shown, it may be a secret."""
    own = [e for e in error.errors() if e["loc"] and e["type"] != "default_factory_not_called"]
    found = [f"{PREFIX}{str(e['loc'][0]).upper()}: {explained(e)}" for e in own]
    return f"settings are wrong: {'; '.join(found)}."


def refuse_unknown(environ: Mapping[str, str], fields: Iterable[str]) -> None:
    """Raises: SettingsInvalid: a variable of this prefix that no setting has."""
    known = {PREFIX + name.upper() for name in fields}
    unknown = sorted(name for name in environ if name.startswith(PREFIX) and name not in known)
    if unknown:
        near = {name: get_close_matches(name, known, n=1) for name in unknown}
        meant = [f"did you mean {found[0]}?" for found in near.values() if found]
        hint = " ".join(meant) if len(meant) == len(unknown) else f"known: {', '.join(sorted(known))}"
        raise SettingsInvalid(f"unknown settings {', '.join(unknown)}; {hint}")


def keep_once(file: Path, text: str, *, least: int = 16, mode: int = 0o600) -> str:
    """What `file` holds; `text`, when there is none or less than `least`, as its maker was killed. Raises: OSError."""
    with suppress(FileNotFoundError):
        if len(kept := file.read_text()) >= least:
            return kept
        file.unlink()
    made = file.with_name(f"{file.name}.{os.getpid()}")
    write_private(made, text, mode)
    with suppress(FileExistsError):  # another process was faster
        os.link(made, file)
    made.unlink()
    return file.read_text()


def write_private(file: Path, text: str, mode: int = 0o600) -> None:
    """Write a file anew, for its owner alone. Raises: OSError."""
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as made:
        made.write(text)


def name_file(home: Path) -> Path:
    """Where a home has its name from its first `megaflow up` on."""
    return home / "installation"


def name_of(home: Path) -> str:
    """What a home's installation is called when nothing else is said: after its folder, and no two folders alike.

    A stack's log without the file is of a version that called every home `default`.
    """
    used = os.path.isfile(home / "logs" / "supervisord.log")  # looked at first: a new home gets the file before its log
    with suppress(OSError):
        if name := name_file(home).read_text().strip():
            return name
    real = os.path.realpath(home)
    word = re.sub(r"[^a-z0-9]+", "-", os.path.basename(real).lower())[:24].strip("-")
    return "default" if used else f"{word or 'home'}-{hashlib.sha256(os.fsencode(real)).hexdigest()[:8]}"
