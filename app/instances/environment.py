"""Selects the variables of this process for an instance on another machine, or in a container."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping

_PASSED_ON = re.compile(
    r"AWS_\w+|PIP_\w+|UV_(DEFAULT_|EXTRA_)?INDEX\w*|UV_INSECURE_HOST|(NPM_CONFIG|npm_config)_\w+"
    r"|HTTPS?_PROXY|NO_PROXY|https?_proxy|no_proxy"
)
"""Variables that an instance gets besides the settings: credentials of stores, access to package indexes and
proxies. Keys of models stay with the gateway."""
CERTIFICATES = (
    *("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("PIP_CERT", "NODE_EXTRA_CA_CERTS", "AWS_CA_BUNDLE"),
)
"""Variables that name a file, which the instance then gets too."""


def passed_on() -> dict[str, str]:
    """Returns variables of this process for an instance, without those that name files. Contains secrets."""
    variables = {name: value for name, value in os.environ.items() if _PASSED_ON.fullmatch(name)}
    return {name: value for name, value in variables.items() if name not in CERTIFICATES}


def exports(variables: Mapping[str, str]) -> bytes:
    """Formats variables as a file that a shell reads: worker_images/worker/bin/entrypoint."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(variables.items())).encode()
