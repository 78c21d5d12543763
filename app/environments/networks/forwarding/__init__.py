"""Ports of an environment's own loopback that lead to us, whatever networks it has, and if it has none.

`forward` does it for an environment with a network namespace of its own, `forward_here` for one without. The contract
is `Forward` and `Serve` in `app.environments.contract`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from app.environments.contract import Forward, Serve
from app.environments.networks.forwarding import namespace, relay
from app.environments.networks.forwarding.carried import MOST, Carried
from app.environments.networks.forwarding.listening import CONNECTIONS, Listening, listen
from app.environments.networks.forwarding.namespace import Forbidden
from app.environments.networks.forwarding.relay import Stream
from app.errors import EnvironmentFailed

__all__ = ["CONNECTIONS", "Stream", "forward", "forward_here"]


def forward(
    pid: int | None,
    stream: Stream,
    port: int,
    serve: Serve,
    *,
    lives: Callable[[], bool] = lambda: True,
    connections: int = CONNECTIONS,
) -> Forward:
    """Have connections to `port` of an environment's own loopback come to `serve`. Ends with its first process.

    pid: its first process by this host's numbers; None when that is not to be seen from here, or when this worker is
    not root: then a small program inside listens, and connections come over `stream`. lives: whether `pid` is still
    that process, asked once no other can take its number. connections: served at a time; more wait. port: 0 for one
    that is free.
    Raises: EnvironmentFailed: the port is taken, the process is gone, or the program cannot be brought inside.
    """
    if pid is not None:
        with suppress(Forbidden):
            return _by_namespace(pid, port, serve, lives, connections)
    return Carried(relay.start(stream, port, min(connections, MOST)), serve)


def _by_namespace(pid: int, port: int, serve: Serve, lives: Callable[[], bool], connections: int) -> Listening:
    process = namespace.process(pid, lives)
    try:
        listeners = namespace.inside(process, lambda: listen(port))
    except BaseException as error:
        process.close()
        if isinstance(error, OSError):
            raise _not_listening(port, error) from error
        raise
    return Listening(listeners, serve, process=process.detach(), connections=connections)


def forward_here(port: int, serve: Serve, *, connections: int = CONNECTIONS) -> Forward:
    """The same on this host's own loopback, for environments that see no other. Whoever asked for it closes it.

    Raises: EnvironmentFailed: the port is taken.
    """
    try:
        listeners = listen(port)
    except OSError as error:
        raise _not_listening(port, error) from error
    return Listening(listeners, serve, connections=connections)


def _not_listening(port: int, error: OSError) -> EnvironmentFailed:
    return EnvironmentFailed(
        f"expected to listen at port {port} of the environment's loopback, found: {error.strerror or error};"
        " a port that something inside has taken is free again when that has ended, or take another."
    )
