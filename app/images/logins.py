"""Finds registry credentials: the settings, else Docker's configuration and its helpers.

A helper is a program `docker-credential-NAME` that is asked for each login (`credsStore`, `credHelpers`).
"""

from __future__ import annotations

import base64
import json
import subprocess
from dataclasses import dataclass, field
from typing import Any

import structlog
from docker import auth
from docker.errors import DockerException

from app.errors import SettingsInvalid
from app.images.references import HUB
from app.settings import Settings

log = structlog.get_logger()

_HELPER_S = 20.0
"""How long a helper may take: one that waits for a person would block the pull."""
_NOT_FOUND = "credentials not found"
"""The words by which every helper says that it has no login for a registry."""
_IS_TOKEN = "<token>"


@dataclass(frozen=True, slots=True)
class Login:
    """Name and password, or an identity token in their place; anonymous when empty.

    fault: why what `docker login` keeps could not be read.
    """

    username: str = ""
    password: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    fault: str = ""

    def __bool__(self) -> bool:
        return bool(self.username or self.token)

    @property
    def basic(self) -> str:
        """Name and password as the header `Authorization` has them."""
        return "Basic " + base64.b64encode(f"{self.username}:{self.password}".encode()).decode()

    def for_engine(self) -> dict[str, str]:
        """As an engine's interface takes it."""
        if self.token:
            return {"identitytoken": self.token}
        return {"username": self.username, "password": self.password} if self.username else {}


def login_for(settings: Settings, registry: str) -> Login:
    """Of a registry by its name in references (`docker.io`, `ghcr.io`, `localhost:5000`).

    Raises: SettingsInvalid. What was found is not shown.
    """
    given = _given(settings).get(registry)
    return _docker_login(registry) if given is None else Login(given["username"], given["password"])


def logins_of(settings: Settings) -> dict[str, dict[str, str]]:
    """All logins that pulls use, by registry, as a build is told them: the settings' win over those of `docker login`.

    Raises: SettingsInvalid. What was found is not shown.
    """
    found = {server: login.for_engine() for server, login in _docker_logins().items()}
    found |= _given(settings)
    if HUB in found:
        found[auth.INDEX_URL] = found[HUB]
    return found


def _given(settings: Settings) -> dict[str, dict[str, str]]:
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


# --- What `docker login` keeps ----------------------------------------------------------------------------------------


def _docker_login(registry: str) -> Login:
    """Anonymous when it cannot be read: most images need no login, and an error tells why there is none."""
    try:
        config = auth.load_config()
        helper = config.get_credential_store(registry)
        login = _from_helper(helper, auth.INDEX_URL if registry == HUB else registry) if helper else None
        return login or _written(config, registry)
    except (DockerException, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        # The message of a wrong file may show what is in it.
        fault = str(error) if isinstance(error, _HelperFailed) else f"its file cannot be read ({type(error).__name__})"
        log.warning("registry.login_not_read", registry=registry, reason=fault)
        return Login(fault=f"what `docker login` keeps could not be used: {fault}")


def _docker_logins() -> dict[str, Login]:
    """By registry. A helper that fails is asked no more: most builds need no login, and a pull would say why."""
    try:
        config = auth.load_config()
        found = {server: _written(config, server) for server in config.auths}
    except (DockerException, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        log.warning("registry.logins_not_read", reason=f"its file cannot be read ({type(error).__name__})")
        return {}
    asked = [(config.creds_store, None)] if config.creds_store else []
    for helper, server in [*asked, *((helper, server) for server, helper in config.cred_helpers.items())]:
        try:
            servers = _listed(helper) if server is None else [server]
            found |= {name: login for name in servers if (login := _from_helper(helper, name))}
        except _HelperFailed as error:
            log.warning("registry.logins_not_read", reason=str(error))
    return {server: login for server, login in found.items() if login}


def _written(config: auth.AuthConfig, registry: str) -> Login:
    entry: dict[str, Any] = auth.AuthConfig({"auths": config.auths}).resolve_authconfig(registry) or {}
    return Login(entry.get("username", ""), entry.get("password", ""), entry.get("IdentityToken", ""))


class _HelperFailed(OSError):
    """Its message holds no secret."""


def _from_helper(name: str, server: str) -> Login | None:
    """None: it has none for this server. Raises: _HelperFailed."""
    answer = _answer(name, "get", server)
    if answer is None:
        return None
    try:
        user, secret = str(answer["Username"]), str(answer["Secret"])
    except (LookupError, TypeError):
        raise _HelperFailed(f"expected a name and a secret of {_program(name)}, found another answer") from None
    return Login(token=secret) if user == _IS_TOKEN else Login(user, secret)


def _listed(name: str) -> list[str]:
    """The servers that it has a login for. Raises: _HelperFailed."""
    answer = _answer(name, "list", "")
    if answer is not None and not isinstance(answer, dict):
        raise _HelperFailed(f"expected servers and their users of {_program(name)}, found another answer")
    return [] if answer is None else list(answer)


def _answer(name: str, verb: str, server: str) -> Any:
    """What it says; None: it has nothing. Raises: _HelperFailed."""
    program = _program(name)
    try:
        done = subprocess.run(  # noqa: S603 (the program that the user's own configuration names)
            [program, verb], input=server.encode(), capture_output=True, timeout=_HELPER_S, check=False
        )
    except OSError as error:
        raise _HelperFailed(f"expected a program {program} on PATH, found none that starts") from error
    except subprocess.TimeoutExpired as error:
        raise _HelperFailed(f"expected an answer of {program} within {_HELPER_S:g} s, found none") from error
    if done.returncode != 0:
        said = (done.stdout or done.stderr).decode(errors="replace").strip()
        if _NOT_FOUND in said.lower():
            return None
        raise _HelperFailed(f"{program} failed ({said[:200] or f'exit code {done.returncode}'})")
    try:
        return json.loads(done.stdout)
    except ValueError:
        what = "a name and a secret" if verb == "get" else "servers and their users"
        raise _HelperFailed(f"expected {what} of {program}, found another answer") from None


def _program(name: str) -> str:
    return f"docker-credential-{name}"
