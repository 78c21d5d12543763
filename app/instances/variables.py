"""What instances that are not child processes get of this process's environment, beside the settings."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping

_PASSED_ON = re.compile(
    r"AWS_\w+|PIP_\w+|UV_(DEFAULT_|EXTRA_)?INDEX\w*|UV_INSECURE_HOST|(NPM_CONFIG|npm_config)_\w+"
    r"|HTTPS?_PROXY|NO_PROXY|https?_proxy|no_proxy"
)
"""Credentials of stores, the way to package indexes and out. Keys of models stay with the gateway."""
_CERTIFICATES = (
    *("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("PIP_CERT", "NODE_EXTRA_CA_CERTS", "AWS_CA_BUNDLE"),
)
"""Variables that name a file, which the instance then needs too."""


def passed_on() -> dict[str, str]:
    """Variables of this process for an instance: credentials of stores, indexes, proxies, files of certificates."""
    names = [name for name in os.environ if _PASSED_ON.fullmatch(name) and name not in _CERTIFICATES]
    return {name: os.environ[name] for name in (*names, *certificates())}


def certificates() -> list[str]:
    """Variables of this process that name a file of certificates which exists."""
    return [name for name in _CERTIFICATES if os.path.isfile(os.environ.get(name, ""))]


def exports(variables: Mapping[str, str]) -> bytes:
    """A file for a shell to read."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(variables.items())).encode()
