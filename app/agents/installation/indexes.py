"""Finds the package index for uv and npm: their own setting, else the one that this host's pip uses."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from app.models.provider_keys import without_keys

_SCOPES = (":env:", "install", "global")  # pip's own order
_TOLD = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_NO_INDEX", "UV_OFFLINE")
_AUTHORITIES = (Path("/etc/ssl/certs/ca-certificates.crt"), Path("/etc/pki/tls/certs/ca-bundle.crt"))
_TIMEOUT_S = 60.0


def environment() -> dict[str, str]:
    """Returns this process's variables plus those that let uv and npm reach the index; set values stay.

    Like scripts/bootstrap. Keys of model providers are left out. npm's registry is not pip's index: set
    NPM_CONFIG_REGISTRY if the public one is unreachable.
    """
    env = without_keys(os.environ)
    settings = _pip_settings()
    if not any(env.get(name) for name in _TOLD) and (index := _first(settings, "index-url")):
        env["UV_DEFAULT_INDEX"] = index
    if not env.get("SSL_CERT_FILE") and (authorities := _first(settings, "cert")):
        env["SSL_CERT_FILE"] = authorities
    # uv trusts its own list of authorities; the host's list, which pip uses, may also contain a company's.
    if any(file.is_file() for file in _AUTHORITIES):
        env.setdefault("UV_SYSTEM_CERTS", "true")
    # Node has its own authorities; those of this host are added.
    if env.get("SSL_CERT_FILE"):
        env.setdefault("NODE_EXTRA_CA_CERTS", env["SSL_CERT_FILE"])
    return env


def _first(told: Mapping[str, str], name: str) -> str | None:
    return next((told[f"{scope}.{name}"] for scope in _SCOPES if told.get(f"{scope}.{name}")), None)


def _pip_settings() -> dict[str, str]:
    """Returns pip's settings from its variables and files, by `SCOPE.NAME`; empty when there is no pip here."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    try:
        result = subprocess.run(  # noqa: S603  our own command
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    settings = {}
    for line in result.stdout.splitlines():
        name, _, value = line.partition("=")
        try:
            settings[name] = str(ast.literal_eval(value))
        except (ValueError, SyntaxError):
            continue
    return settings
