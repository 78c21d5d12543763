"""Writes Flower's configuration: loopback, basic auth, bounded memory. The password is in a file, never in `argv`."""

from __future__ import annotations

import secrets
from pathlib import Path

from app.settings import Settings
from app.settings_checks import keep_once, write_private
from app.stack.home import run_folder

_PURGE_OFFLINE_S = 600
_MAX_TASKS = 10_000  # in memory, a few KiB each; older tasks are in the ledger
_PASSWORD = "flower_password"


def configuration_file(settings: Settings) -> Path:
    return run_folder(settings) / "flowerconfig.py"


def url(settings: Settings) -> str:
    """Returns Flower's URL for a browser."""
    return f"http://{settings.bind}:{settings.flower_port}"


def password_file(settings: Settings) -> Path | None:
    """Returns the file of the generated password; None: the password comes from a setting."""
    return None if settings.flower_password is not None else run_folder(settings) / _PASSWORD


def password(settings: Settings) -> str:
    """Returns the password of `settings.flower_user`; without a setting, generates one once in `home`/run."""
    if settings.flower_password is not None:
        return settings.flower_password.get_secret_value()
    return keep_once(run_folder(settings) / _PASSWORD, secrets.token_urlsafe(18))


def prepare(settings: Settings) -> None:
    """Writes the configuration that Flower reads at its start."""
    options = {
        "address": settings.bind,
        "port": settings.flower_port,
        "basic_auth": [f"{settings.flower_user}:{password(settings)}"],
        "max_tasks": _MAX_TASKS,
        "purge_offline_workers": _PURGE_OFFLINE_S,
        "persistent": False,
    }
    write_private(configuration_file(settings), "".join(f"{name} = {value!r}\n" for name, value in options.items()))
