"""Joins this machine to another's installation: requests accounts, stores them in its home, and returns them."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import TypeAdapter

from app.cli.control import until_gone
from app.errors import (
    DatabaseUnavailable,
    NotSignedIn,
    OptionInvalid,
    SettingsInvalid,
    StackNotRunning,
    WaitTimeout,
)
from app.instances.joining import HostCredentials, keys_of_all, placed
from app.ledger import hosts, instances
from app.ledger.database import Database
from app.remote_http import Ask, WebServer
from app.settings import PREFIX, Settings, host_file, load
from app.settings_checks import write_private
from app.stack import home, supervisor
from app.stopping import nudge

Report = Callable[[str], None]

_PATIENCE_S = 30.0
_LOOK_S = 0.5


def join(
    settings: Settings, url: str, token: str, chosen: dict[str, str], *, plain: bool = False, called: str = ""
) -> HostCredentials:
    """Uses up a join token at the web server `url`, and stores the accounts that it gives in the home. Starts nothing.

    chosen: settings of this host only, by variable. plain: allow http to another machine.

    Raises: SettingsInvalid: this machine has joined already, or has its own stack; NotSignedIn, ServerUnavailable, and
    every refusal of the server. After an error no account remains, unless the answer was lost: then `megaflow worker
    leave NAME` at the installation removes it, and a new token is needed.
    """
    _refuse_unready(settings)
    _refuse_plain(url, plain)
    home.prepare(settings)
    server = WebServer(url, token, _PATIENCE_S)
    request = Ask("POST", "/hosts/join", body={"called": called or socket.gethostname()})
    credentials = server.read(TypeAdapter(HostCredentials), server.ask(request).content)
    try:
        _keep(settings.home, url, credentials, chosen)
    except BaseException:
        WebServer(url, credentials.secret, _PATIENCE_S).ask(Ask("POST", "/hosts/leave", again=True))
        forget(settings.home)
        raise
    load.cache_clear()
    return credentials


def leave(settings: Settings, report: Report, *, wait_s: float, stop: Callable[[], object]) -> tuple[str, list[str]]:
    """Drains this host, ends its programs with `stop`, and returns its accounts to the installation.

    Returns the host's name, and the keys that stay valid; see `joining.keys_of_all`.

    wait_s: how long attempts may take to end. Those that still run then start again elsewhere.

    Raises: StackNotRunning: this machine has not joined. ServerUnavailable: the accounts stay valid, and the files stay
    here: try again, or remove the host at the installation.
    """
    membership = _membership(settings.home)
    try:
        drain(settings, Database(settings.database(), pooled=False), membership["name"], report, wait_s=wait_s)
    except DatabaseUnavailable as error:
        report(f"not drained, since the ledger does not answer: {error}")
    stop()
    try:
        WebServer(membership["server"], membership["secret"], _PATIENCE_S).ask(Ask("POST", "/hosts/leave", again=True))
    except NotSignedIn:
        report("the installation had removed this host already")
    keys = keys_of_all({}, host_file(settings.home))
    forget(settings.home)
    load.cache_clear()
    return str(membership["name"]), keys


def drain(settings: Settings, database: Database, name: str, report: Report, *, wait_s: float) -> None:
    """Makes a host's standing instances take no new attempts; waits until they end. Raises: DatabaseUnavailable."""
    ids = hosts.standing(database, name)
    instances.drain(database, ids, hosts.LEAVES)
    nudge(settings, ids)
    try:
        if ids:
            until_gone(database, ids, wait_s)
    except WaitTimeout as error:
        report(f"{name}: gave up: {error}; its attempts start again elsewhere")


def wait_until_ready(settings: Settings, name: str, *, timeout_s: float) -> bool:
    """Whether all live standing instances of the host become ready within this time."""
    database, until = Database(settings.database(), pooled=False), time.monotonic() + timeout_s
    while time.monotonic() < until:
        ids = hosts.standing(database, name)
        if ids and all(one.state == "ready" for one in instances.live(database, ids)):
            return True
        time.sleep(_LOOK_S)
    return False


def _keep(folder: Path, url: str, made: HostCredentials, chosen: dict[str, str]) -> None:
    certificates = folder / "certificates"
    certificates.mkdir(mode=0o700, exist_ok=True)
    for name, text in made.files.items():
        write_private(certificates / Path(name).name, text)
    membership = {"server": url, "name": made.name, "secret": made.secret}
    write_private(folder / "host.json", json.dumps(membership) + "\n")
    variables = placed(made.variables, certificates) | {f"{PREFIX}JOINED": "true"} | chosen
    write_private(host_file(folder), "".join(f"{name}={_quoted(value)}\n" for name, value in sorted(variables.items())))


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def forget(folder: Path) -> None:
    """Deletes the files that a join has stored."""
    for name in ("host.env", "host.json"):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "certificates", ignore_errors=True)


def _membership(folder: Path) -> dict[str, Any]:
    try:
        membership: dict[str, Any] = json.loads((folder / "host.json").read_text())
    except FileNotFoundError:
        raise StackNotRunning(
            f"expected a machine that joined, found no host.json in {folder}; at the installation itself:"
            " `megaflow worker leave NAME`"
        ) from None
    return membership


def _refuse_unready(settings: Settings) -> None:
    if host_file(settings.home).exists():
        raise SettingsInvalid(
            f"expected a machine that has not joined, found {host_file(settings.home)}; `megaflow worker leave` first,"
            f" or set {PREFIX}HOME to another folder"
        )
    if supervisor.is_running(settings):
        raise SettingsInvalid(
            f"expected a home without a stack, found one that runs in {settings.home}; `megaflow down` first, or set"
            f" {PREFIX}HOME to another folder"
        )


def _refuse_plain(url: str, plain: bool) -> None:
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        local = ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    if parts.scheme != "https" and not local and not plain:
        raise OptionInvalid(
            f"expected an https URL, since credentials travel, found {url!r}; on a network that you trust: --plain-http"
        )
