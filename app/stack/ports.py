"""Checks whether the TCP ports of a stack are free."""

from __future__ import annotations

import socket
from collections import defaultdict

from app.errors import InstallationFailed
from app.settings import PREFIX, Settings


def in_use(settings: Settings) -> dict[str, str]:
    """The stack's ports that are in use, or wanted twice: the setting that names each, and for whom.

    Ask while the stack is down.
    """
    wanted = [(f"{PREFIX}FLOWER_PORT", "Flower", settings.flower_port)]
    wanted.append((f"{PREFIX}WEB_PORT", "the web server", settings.web_port))
    wanted += [(f"{PREFIX}GATEWAY_PORT", "the model gateway", port) for port in settings.gateway_ports()]
    if settings.replay_url is None:
        wanted.append((f"{PREFIX}REPLAY_PORT", "the replay engine", settings.replay_port))
    if settings.metrics_port:
        wanted.append((f"{PREFIX}METRICS_PORT", "metrics", settings.metrics_port))
    seen: set[int] = set()
    found: defaultdict[str, list[str]] = defaultdict(list)
    for variable, who, port in wanted:
        if port in seen or _is_in_use(settings.bind, port):
            found[variable].append(f"{port} for {who}")
        seen.add(port)
    return {variable: ", ".join(those) for variable, those in found.items()}


def refuse_in_use(settings: Settings) -> None:
    """Raises: InstallationFailed: a port is in use; the message names the setting that chooses another."""
    if found := in_use(settings):
        raise InstallationFailed(
            f"expected free ports on {settings.bind}; taken: {', '.join(found.values())}. "
            f"Set {' and '.join(found)} to free ones, or end who has them."
        )


def _is_in_use(address: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((address, port))
        except (OSError, OverflowError):  # in use, or there is no such port
            return True
    return False
