"""The command session: a small static helper inside an environment, and its client out here.

`prebuilt.binary` gives the helper for a machine, `unix_connector` a way to it, `SessionClient` everything else.
"""

from __future__ import annotations

from app.environments.session.client import SessionClient
from app.environments.session.connect import Connect, unix_connector
from app.environments.session.interactive import Interactive
from app.environments.session.protocol import SessionStats
from app.environments.session.shells import ShellSession

__all__ = [
    "Connect",
    "Interactive",
    "SessionClient",
    "SessionStats",
    "ShellSession",
    "unix_connector",
]
