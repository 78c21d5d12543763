"""Forwards ports of an environment's loopback to this process, whatever its network.

`forward` is for an environment with a network namespace of its own, `forward_here` for one without. The contract is
`Forward` and `Serve` in `app.environments.contract`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress

from app.environments.contract import Forward, Serve
from app.environments.networks.forwarding import namespace
from app.environments.networks.forwarding.listening import CONNECTIONS, ListeningForward, listen
from app.environments.networks.forwarding.relayed import MOST, OpenStream, RelayedForward, start_relay
from app.errors import EnvironmentFailed

__all__ = ["CONNECTIONS", "OpenStream", "forward", "forward_here"]


def forward(
    pid: int | None,
    stream: OpenStream,
    port: int,
    serve: Serve,
    *,
    lives: Callable[[], bool] = lambda: True,
    connections: int = CONNECTIONS,
    machine: str | None = None,
) -> Forward:
    """Forwards connections to `port` of an environment's own loopback to `serve`. Ends with its first process.

    pid: its first process by this host's numbers; None: not visible from here. Then, or when this worker is not root, a
    small program inside listens, and connections come over `stream`. lives: whether `pid` is still that process, called
    once its number cannot be reused. connections: served at a time; more wait. port: 0 for any free port. machine: the
    environment's processor (`uname -m`); None: this host's.
    Raises: EnvironmentFailed: the port is taken, the process has ended, or the program cannot be brought inside.
    """
    if pid is not None:
        with suppress(namespace.NetworkForbidden):
            return _by_namespace(pid, port, serve, lives, connections)
    return RelayedForward(start_relay(stream, port, min(connections, MOST), machine), serve)


def _by_namespace(pid: int, port: int, serve: Serve, lives: Callable[[], bool], connections: int) -> ListeningForward:
    process = namespace.pin(pid, lives)
    try:
        listeners = namespace.inside(process, lambda: _listen(port))
    except BaseException:
        process.close()
        raise
    return ListeningForward(listeners, serve, process=process.detach(), connections=connections)


def forward_here(port: int, serve: Serve, *, connections: int = CONNECTIONS) -> Forward:
    """Forwards a port of this host's own loopback; its opener closes it. Raises: EnvironmentFailed: port taken."""
    return ListeningForward(_listen(port), serve, connections=connections)


def _listen(port: int) -> list[socket.socket]:
    try:
        return listen(port)
    except OSError as error:
        raise EnvironmentFailed(
            f"expected to listen at port {port} of the environment's loopback, found: {error.strerror or error};"
            " a port that something inside has taken is free again when that has ended, or take another."
        ) from error
