"""Gives a joining machine its accounts and settings, and revokes the accounts when it leaves."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

import structlog
from dotenv import dotenv_values

from app.errors import BrokerUnavailable, DatabaseUnavailable, InstallationFailed, SettingsInvalid
from app.instances import broker_users
from app.ledger import host_roles, hosts, instances
from app.ledger.database import Database
from app.ledger.hosts import JoinedHost
from app.ledger.instances import Exit
from app.models.endings import RetryPolicy
from app.models.provider_keys import provider_keys
from app.models.wire import Wire
from app.settings import PREFIX, Settings

log = structlog.get_logger()

FILES = "{files}"
"""Placeholder in a variable for the folder in which the host puts the files."""
_SHARED = (
    "installation", "artifacts_url", "s3_endpoint_url", "gateway_url", "shared_installation",
    "container_runtime", "image_mirror", "registry_auth", "open_network_filter", "open_network_allow",
    "base_image", "task_cpus", "task_memory_bytes", "environment_starts", "image_builds", "image_pulls",
    "engine_patience_s", "command_log_bytes", "lease_s", "republish_s", "sweep_s", "retry_base_s",
    "retry_cap_s", "drain_s", "ephemeral_idle_s", "host_cpu_most", "orphan_s", "model_timeout_s", "gateway_patience_s",
    "grading_slots", "log_level",
)  # fmt: skip
"""Settings that a worker needs with the control plane's values. No other is passed on: some hold secrets."""
_EVERY_S, _REFUSED_S = 3.0, 60.0
"""Time between checks of the accounts; wait after Redis refused to make users, or a role remained."""
_STORE = re.compile(r"AWS_\w+")
_KEYS_OF_ALL = ("AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN", f"{PREFIX}REGISTRY_AUTH")
_CERTIFICATES = ("sslrootcert", "ssl_ca_certs")
_OWN_CERTIFICATES = ("sslcert", "sslkey", "sslpassword", "ssl_certfile", "ssl_keyfile", "ssl_keyfile_password")
_ELSEWHERE = frozenset(
    ["user", "username", "password", "passfile", "service", "servicefile", "host", "hostaddr", "port"]
)
"""Parameters that, in a query, override what is before the path."""


class HostCredentials(Wire):
    """Everything that a host needs to work: its name, a secret to leave, variables, and the files they name."""

    name: str
    secret: str
    variables: dict[str, str]
    files: dict[str, str]


def check(settings: Settings) -> None:
    """Raises: SettingsInvalid: a host elsewhere could not reach what these settings name."""
    _given(settings, "account", "password")


def join(settings: Settings, database: Database, token: str, called: str) -> HostCredentials:
    """Uses up a token. Returns the machine's accounts and other needs. called: as `hosts.admit`.

    Raises: NotSignedIn: the token is unknown, used or expired; SettingsInvalid, InstallationFailed, BrokerUnavailable,
    DatabaseUnavailable. Then no account was made, and the token stays valid.
    """
    account = None
    try:
        with database.begin() as connection:
            host, ours = hosts.admit(connection, token, called, settings.installation)
            variables, files = _given(settings, host.account, ours.password)
            broker_users.add(settings, host.account, hosts.digest(ours.password))
            account = host.account
    except BaseException:
        if account is not None:
            with suppress(BrokerUnavailable, InstallationFailed):  # else the control worker removes it
                broker_users.remove(settings, account)
        raise
    log.warning("hosts.joined", host=host.name)
    return HostCredentials(
        name=host.name, secret=ours.leave, variables=variables | {f"{PREFIX}HOST_NAME": host.name}, files=files
    )


def revoke(settings: Settings, database: Database, host: JoinedHost, why: str) -> None:
    """Revokes a host's accounts and reports its instances as gone. Safe to repeat.

    Raises: DatabaseUnavailable; BrokerUnavailable, InstallationFailed: the user in Redis is left to the control worker.
    """
    with database.begin() as connection:
        hosts.leave(connection, host)
    _clear(settings, database, host, why)


def _clear(settings: Settings, database: Database, host: JoinedHost, why: str) -> None:
    host_roles.remove(database, host.account)
    exits = [Exit(one, None, why) for one in hosts.standing(database, host.name)]
    instances.exited_many(database, exits, RetryPolicy(settings.retry_base_s, settings.retry_cap_s))
    log.warning("hosts.left", host=host.name, why=why)
    broker_users.remove(settings, host.account)


def keep(settings: Settings, database: Database, stop: threading.Event) -> None:
    """Keeps the accounts in line with the ledger until `stop` is set. Several processes may do so at once."""
    drop_from = 0.0
    while not stop.wait(_EVERY_S):
        try:
            if hosts.any_joined(database):
                if time.monotonic() >= drop_from and not hosts.drop_roles(database):
                    drop_from = time.monotonic() + _REFUSED_S
                for host in hosts.ended(database):
                    revoke(settings, database, host, "the instance that its host was has ended")
                if changed := broker_users.restore(settings, hosts.broker_users(database)):
                    log.warning("hosts.broker_users_restored", accounts=changed)
        except (DatabaseUnavailable, BrokerUnavailable) as error:
            log.debug("hosts.away", reason=str(error))
        except InstallationFailed as error:
            log.error("hosts.accounts_refused", reason=str(error))
            stop.wait(_REFUSED_S)


def _given(settings: Settings, account: str, password: str) -> tuple[dict[str, str], dict[str, str]]:
    ours = settings.variables()
    shared = {PREFIX + name.upper() for name in _SHARED}
    variables = {name: ours[name] for name in ours if name in shared} | _extra(settings.join_settings)
    files: dict[str, str] = {}
    servers = {f"{PREFIX}DATABASE_URL": settings.database(), f"{PREFIX}BROKER_URL": settings.broker()}
    for name, url in servers.items():
        variables[name] = _signed(name, variables.get(name, url), account, password, files)
    if certificates := variables.get("AWS_CA_BUNDLE"):
        variables["AWS_CA_BUNDLE"] = _as_file(certificates, files)
    for name in ("S3_ENDPOINT_URL", "GATEWAY_URL"):
        for url in variables.get(PREFIX + name, "").split(","):
            _refuse_local(PREFIX + name, urlsplit(url).hostname if url else None, absent=name != "GATEWAY_URL")
    if f"{PREFIX}ARTIFACTS_URL" not in variables:
        raise _unreachable(f"{PREFIX}ARTIFACTS_URL", "this machine's own folder")
    return variables, files


def _extra(file: Path | None) -> dict[str, str]:
    if file is None:
        return {}
    try:
        variables = {name: value or "" for name, value in dotenv_values(file, interpolate=False).items()}
        with file.open():
            pass
    except (OSError, ValueError) as error:
        raise SettingsInvalid(f"{PREFIX}JOIN_SETTINGS: expected a file of lines NAME=VALUE, found: {error}") from error
    known = {PREFIX + name.upper() for name in Settings.model_fields}
    wrong = [name for name in variables if name not in known and not _STORE.fullmatch(name)]
    if wrong := [*wrong, *provider_keys(variables)]:
        raise SettingsInvalid(
            f"{PREFIX}JOIN_SETTINGS: expected settings and variables of the store (AWS_…), found {wrong[0]}"
        )
    return variables


def _signed(name: str, url: str, account: str, password: str, files: dict[str, str]) -> str:
    """Returns the URL with the host's own account, and with the certificates that it gets."""
    parts = urlsplit(url)
    place = parts.netloc.rpartition("@")[2]
    if parts.scheme in ("unix", "redis+socket") or not place:
        raise _unreachable(name, "a Unix socket")
    for one in place.split(","):
        _refuse_local(name, urlsplit(f"//{one}").hostname)
    query = {key: value for key, value in parse_qsl(parts.query) if key not in _OWN_CERTIFICATES}
    if wrong := _ELSEWHERE & query.keys():
        raise SettingsInvalid(
            f"{name}: expected account and place in front of the path (SCHEME://USER:PASSWORD@HOST:PORT/…), found"
            f" `{min(wrong)}` behind the `?`; no host joined"
        )
    for key in _CERTIFICATES:
        if query.get(key, "system") != "system":
            query[key] = _as_file(query[key], files)
    signed = f"{quote(account, safe='')}:{quote(password, safe='')}@{place}"
    return parts._replace(netloc=signed, query=urlencode(query, safe="/{}")).geturl()


def _as_file(path: str, files: dict[str, str]) -> str:
    source = Path(unquote(path))
    try:
        text = source.read_text()
    except (OSError, ValueError) as error:
        raise SettingsInvalid(f"expected certificates in {source}, found: {error}; no host joined") from error
    if "PRIVATE KEY" in text:
        raise SettingsInvalid(f"expected certificates in {source}, found a private key; no host joined")
    number = next((n for n, known in enumerate(files.values(), 1) if known == text), len(files) + 1)
    files[f"authority-{number}.pem"] = text
    return f"{FILES}/authority-{number}.pem"


def _refuse_local(name: str, host: str | None, *, absent: bool = False) -> None:
    if host is None:
        if absent:
            return
        raise _unreachable(name, "none")
    with suppress(ValueError):
        if ip_address(host).is_loopback:
            raise _unreachable(name, host)
    if host == "localhost":
        raise _unreachable(name, host)


def _unreachable(name: str, found: str) -> SettingsInvalid:
    return SettingsInvalid(
        f"{name}: expected an address that other machines reach, found {found}; no host joined. Set it, or name another"
        f" for hosts in the file {PREFIX}JOIN_SETTINGS; docs/howto/cluster.md, Several hosts"
    )


def keys_of_all(given: Mapping[str, str], file: Path | None) -> list[str]:
    """Returns names, in `given` or the file, of keys that leaving does not revoke, since all hosts share them."""
    variables = {**given, **(dotenv_values(file, interpolate=False) if file is not None else {})}
    return [name for name in _KEYS_OF_ALL if variables.get(name)]


def placed(variables: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Returns the variables with the folder of their files filled in."""
    return {name: value.replace(FILES, str(folder)) for name, value in variables.items()}
