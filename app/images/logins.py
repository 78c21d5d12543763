"""Finds registry credentials: the settings, else those of `docker login`, in its file or a helper program."""

from __future__ import annotations

import json
from typing import Any

import structlog
from docker import auth
from docker.credentials.errors import StoreError
from docker.errors import DockerException

from app.errors import SettingsInvalid
from app.images.references import HUB
from app.settings import Settings

log = structlog.get_logger()

Login = dict[str, str]
"""`username` and `password`, or an `identitytoken`, in the engine's form; empty: anonymous."""
_NO_LOGIN = (DockerException, StoreError, OSError, ValueError, LookupError, TypeError, AttributeError)
"""Errors of a file that cannot be read, or of a helper that fails."""


def login_for(settings: Settings, registry: str) -> Login:
    """Returns the login of a registry as references name it (`ghcr.io`). Raises: SettingsInvalid, without secrets."""
    given = _given(settings).get(registry)
    if given is not None:
        return given
    try:
        return _plain(auth.load_config().resolve_authconfig(registry))
    except _NO_LOGIN as error:
        return _not_read(error)


def logins_of(settings: Settings) -> dict[str, Login]:
    """Returns all logins for pulls, by registry; settings override. Raises: SettingsInvalid, without secrets."""
    try:
        credentials = auth.load_config().get_all_credentials()  # type: ignore[no-untyped-call]
        logins = {server: login for server, entry in credentials.items() if (login := _plain(entry))}
    except _NO_LOGIN as error:
        logins = _not_read(error)
    logins |= _given(settings)
    if HUB in logins:
        logins[auth.INDEX_URL] = logins[HUB]
    return logins


def _given(settings: Settings) -> dict[str, Login]:
    given = settings.registry_auth
    if given is None:
        return {}
    try:
        logins = {str(name): str(login) for name, login in json.loads(given.get_secret_value()).items()}
    except (ValueError, AttributeError):
        raise SettingsInvalid(
            'MEGAFLOW_REGISTRY_AUTH: expected a JSON object {"REGISTRY": "USER:PASSWORD", …}, found something else.'
        ) from None
    split = {name: login.partition(":") for name, login in logins.items()}
    return {name: {"username": user, "password": password} for name, (user, _, password) in split.items()}


def _plain(entry: dict[str, str] | None) -> Login:
    named = {name.lower(): value for name, value in (entry or {}).items()}
    return {name: named[name] for name in ("username", "password", "identitytoken") if named.get(name)}


def _not_read(error: Exception) -> dict[str, Any]:
    """Continues without a login: most images need none. The message of a malformed file may show its content."""
    reason = str(error) if isinstance(error, DockerException | StoreError) else type(error).__name__
    log.warning("registry.logins_not_read", reason=reason)
    return {}
