"""Detects variables that contain provider keys; only the gateway's process gets them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

EXPECTED = "a name that ends in _KEY, _API_TOKEN or _AUTH_TOKEN"

_KEY = re.compile(
    r"(?!(?:AWS|MEGAFLOW|NPM|PIP|UV|GIT|SSH)_)\w*(?:_KEY|_API_TOKEN|_AUTH_TOKEN)|API_KEY|HF_TOKEN"
    r"|AWS_BEARER_TOKEN_BEDROCK",
    re.IGNORECASE,
)
"""Excludes credentials of stores and package indexes, and MegaFlow's settings: other processes need them."""


def is_key_variable(name: str) -> bool:
    """Whether a variable of this name must be hidden from every process except the gateway."""
    return _KEY.fullmatch(name) is not None


def provider_keys(environ: Mapping[str, str], also: Collection[str] = ()) -> dict[str, str]:
    """Returns the variables with provider keys. also: further names from the settings."""
    return {name: value for name, value in environ.items() if name in also or is_key_variable(name)}


def without_keys(environ: Mapping[str, str], also: Collection[str] = ()) -> dict[str, str]:
    """Returns the variables without provider keys. also: further names from the settings."""
    keys = provider_keys(environ, also)
    return {name: value for name, value in environ.items() if name not in keys}
