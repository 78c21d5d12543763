"""The TCP ports that a stack takes, and whether somebody else has them."""

from __future__ import annotations

import socket

from app.errors import InstallationFailed
from app.settings import PREFIX, Settings


def taken(settings: Settings) -> dict[str, str]:
    """Ports of ours that are in use: the setting that names each, and for whom. Ask while the stack is down."""
    wanted = {f"{PREFIX}FLOWER_PORT": ("Flower", settings.flower_port)}
    if settings.gateway_url is None:
        wanted[f"{PREFIX}GATEWAY_PORT"] = ("the model gateway", settings.gateway_port)
    if settings.model_base_url is None:
        wanted[f"{PREFIX}REPLAY_PORT"] = ("the replay engine", settings.replay_port)
    return {variable: f"{port} for {who}" for variable, (who, port) in wanted.items() if _is_taken(settings.bind, port)}


def refuse_taken(settings: Settings) -> None:
    """Raises: InstallationFailed: a port is in use; the message names the setting that chooses another."""
    if found := taken(settings):
        raise InstallationFailed(
            f"expected free ports on {settings.bind}; taken by somebody else: {', '.join(found.values())}. "
            f"Set {' and '.join(found)} to free ones, or end who has them."
        )


def _is_taken(address: str, port: int) -> bool:
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((address, port))
        except OSError:
            return True
    return False
