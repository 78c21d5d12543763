"""Manages the folders of an installation, their permissions, and the environment of its processes."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.errors import SettingsInvalid, StackNotRunning
from app.models.provider_keys import without_keys
from app.settings import PREFIX, Settings
from app.settings_checks import keep_once, name_file, name_of

MARKER = "STACK_OF_MEGAFLOW"
"""Variable that every process of a stack inherits; its value is the home. It is no setting, so it lacks our prefix."""

SOCKET_PATH_BYTES = 107
"""The longest path of a Unix socket on Linux (`sun_path` is 108 bytes with its terminating zero)."""

_PLAIN = re.compile(r"[A-Za-z0-9/._+@~,=-]+")
"""Characters allowed in the home's path: URLs, supervisord.conf and command lines each treat others specially."""


def run_folder(settings: Settings) -> Path:
    """Returns the folder of sockets, pid files and generated configuration. It may be deleted while nothing runs."""
    return settings.home / "run"


def logs_folder(settings: Settings) -> Path:
    return settings.home / "logs"


def prepare(settings: Settings) -> None:
    """Creates the folders of `settings.home`, closed to other users, and its name file. Folders with files stay as is.

    As root, `home` and `home`/run may be traversed (not listed) by others, because the embedded PostgreSQL runs as
    its own user.

    Raises: SettingsInvalid: the home's path does not fit in a URL, supervisord's configuration or a Unix socket, or the
        home cannot be created or written to.
    """
    _refuse_unusable(settings.home)
    passable = 0o711 if os.geteuid() == 0 else 0o700
    folders = [(settings.home, passable), (run_folder(settings), passable), (logs_folder(settings), 0o700)]
    if settings.artifacts_url is None:
        folders.append((settings.home / "artifacts", 0o700))
    try:
        for folder, mode in folders:
            if not folder.is_dir():
                folder.mkdir(parents=True, exist_ok=True)
                folder.chmod(mode)
            elif not any(folder.iterdir()) and folder.stat().st_uid == os.geteuid():
                folder.chmod(stat.S_IMODE(folder.stat().st_mode) & (0o7770 | mode))
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "this user may not write there", str(folder))
        keep_once(name_file(settings.home), name_of(settings.home) + "\n", least=2, mode=0o666)
    except OSError as error:
        raise SettingsInvalid(
            f"{PREFIX}HOME: expected a folder that can be made and written to, found {settings.home}"
            f" ({error.strerror}); try another {PREFIX}HOME"
        ) from error


def _refuse_unusable(home: Path) -> None:
    if not home.is_absolute():
        raise SettingsInvalid(f"{PREFIX}HOME must be an absolute path; found {str(home)!r}")
    if not _PLAIN.fullmatch(str(home)):
        raise SettingsInvalid(f"{PREFIX}HOME may hold letters, digits and / . _ + @ ~ , = - only; found {str(home)!r}")
    check_socket_path(home / "run" / "postgres" / ".s.PGSQL.5432")


def check_socket_path(path: Path) -> None:
    """Raises: SettingsInvalid: the path is longer than the kernel allows for a socket."""
    if (length := len(os.fsencode(path))) > SOCKET_PATH_BYTES:
        raise SettingsInvalid(
            f"the path of a Unix socket may have {SOCKET_PATH_BYTES} bytes; {path} has {length}. "
            f"Set {PREFIX}HOME to a folder with a shorter path."
        )


def passable_by_others(path: Path) -> bool:
    """Whether any user of this machine may traverse `path` and each folder above it."""
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in (path, *path.resolve().parents))


@contextmanager
def exclusively(settings: Settings) -> Iterator[None]:
    """Locks the installation for the block: one `up` or `down` at a time.

    Raises: StackNotRunning: another `up` or `down` holds the lock.
    """
    with (run_folder(settings) / "lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StackNotRunning(
                f"another `megaflow up` or `megaflow down` is working on {settings.home}; try again when it has ended"
            ) from error
        yield


def process_environment(settings: Settings, *, keys: bool = False) -> dict[str, str]:
    """Returns the environment for a process of the stack: this process's, with our variables replaced.

    keys: include the keys of model providers, which only the gateway gets.
    """
    known = os.environ if keys else without_keys(os.environ, {settings.model_api_key_env})
    foreign = {name: value for name, value in known.items() if not name.startswith(PREFIX)}
    return foreign | settings.variables() | {MARKER: str(settings.home), "PYTHONUNBUFFERED": "1"}


def tail(path: Path, *, lines: int = 12, offset: int = 0) -> str:
    """Returns the last lines of a log from byte `offset` on; empty when there is no log."""
    try:
        with path.open("rb") as handle:
            handle.seek(max(offset, path.stat().st_size - 64_000))
            text = handle.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.strip().splitlines()[-lines:])
