"""Checks whether the TCP ports of a stack are free."""

from __future__ import annotations

import socket
from collections import defaultdict

from app.errors import InstallationFailed
from app.settings import PREFIX, Settings


def in_use(settings: Settings) -> dict[str, str]:
    """Returns the stack's ports that are in use or assigned twice: by setting name, each with its purpose.

    Call it while the stack is down.
    """
    needed = [(f"{PREFIX}FLOWER_PORT", "Flower", settings.flower_port)]
    needed.append((f"{PREFIX}WEB_PORT", "the web server", settings.web_port))
    needed += [(f"{PREFIX}GATEWAY_PORT", "the model gateway", port) for port in settings.gateway_ports()]
    if settings.replay_url is None:
        needed.append((f"{PREFIX}REPLAY_PORT", "the replay engine", settings.replay_port))
    if settings.metrics_port:
        needed.append((f"{PREFIX}METRICS_PORT", "metrics", settings.metrics_port))
    seen: set[int] = set()
    conflicts: defaultdict[str, list[str]] = defaultdict(list)
    for variable, purpose, port in needed:
        if port in seen or _is_in_use(settings.bind, port):
            conflicts[variable].append(f"{port} for {purpose}")
        seen.add(port)
    return {variable: ", ".join(uses) for variable, uses in conflicts.items()}


def refuse_in_use(settings: Settings) -> None:
    """Raises: InstallationFailed: a port is in use; the message names the setting that chooses another."""
    if conflicts := in_use(settings):
        raise InstallationFailed(
            f"expected free ports on {settings.bind}; taken: {', '.join(conflicts.values())}. "
            f"Set {' and '.join(conflicts)} to free ones, or end who has them."
        )


def _is_in_use(address: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((address, port))
        except (OSError, OverflowError):  # the port is in use or does not exist
            return True
    return False
