"""Flower's configuration: loopback, basic auth, bounded memory. The password is in a file, never on a command line."""

from __future__ import annotations

import secrets
from pathlib import Path

from app.settings import Settings
from app.settings_checks import keep_once, write_private
from app.stack.home import run_folder

_PURGE_OFFLINE_S = 600
_MAX_TASKS = 10_000  # that it remembers, each a few KiB; what is older is in the ledger
_PASSWORD = "flower_password"


def configuration_file(settings: Settings) -> Path:
    return run_folder(settings) / "flowerconfig.py"


def url(settings: Settings) -> str:
    """Where a browser finds it."""
    return f"http://{settings.bind}:{settings.flower_port}"


def password_file(settings: Settings) -> Path | None:
    """Where the password is kept that we made; None: a setting gives it."""
    return None if settings.flower_password is not None else run_folder(settings) / _PASSWORD


def password(settings: Settings) -> str:
    """The password of `settings.flower_user`; made once and kept in `home`/run when no setting gives it."""
    if settings.flower_password is not None:
        return settings.flower_password.get_secret_value()
    return keep_once(run_folder(settings) / _PASSWORD, secrets.token_urlsafe(18))


def prepare(settings: Settings) -> None:
    """Write the configuration that Flower reads at its start."""
    options = {
        "address": settings.bind,
        "port": settings.flower_port,
        "basic_auth": [f"{settings.flower_user}:{password(settings)}"],
        "max_tasks": _MAX_TASKS,
        "purge_offline_workers": _PURGE_OFFLINE_S,
        "persistent": False,
    }
    write_private(configuration_file(settings), "".join(f"{name} = {value!r}\n" for name, value in options.items()))
