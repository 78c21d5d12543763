"""The command session: a static helper program inside an environment, and its client.

`prebuilt.binary` gives the helper for a machine, `unix_connector` a connection to it, `SessionClient` everything else.
"""

from __future__ import annotations

from app.environments.session.client import SessionClient
from app.environments.session.connection import Connect, unix_connector
from app.environments.session.shells import SessionProgram, ShellSession

__all__ = [
    "Connect",
    "SessionClient",
    "SessionProgram",
    "ShellSession",
    "unix_connector",
]
