"""Taking over a container that another process of this host has handed over."""

from __future__ import annotations

import os
from contextlib import suppress

from docker.errors import DockerException
from requests import RequestException

from app.environments.base import Tags, Ticket
from app.environments.container import KIND, DockerEnvironment
from app.environments.engine import Engine
from app.environments.tools import Tool
from app.environments.ways import MountedEntrance
from app.errors import EnvironmentFailed, StationError
from app.models.spec import EnvironmentSpec


def take_over(
    engine: Engine, spec: EnvironmentSpec, ticket: Ticket, tags: Tags, tools: tuple[Tool, ...]
) -> DockerEnvironment:
    """See `base.Taking`. One that does not answer is removed: nobody else has it. Closes the ticket's files.

    Raises: EnvironmentFailed: it is gone, or the ticket is not one for this engine's containers.
    """
    if ticket.kind != KIND:
        _close(ticket)
        raise EnvironmentFailed(f"expected a ticket of the kind {KIND!r}, found {ticket.kind!r}.")
    try:
        entrance = MountedEntrance.taken(engine, ticket.body["entrance"], ticket.descriptors)
    except (KeyError, TypeError, ValueError) as error:
        _close(ticket)
        raise _unreadable(error) from error
    try:
        environment = DockerEnvironment.taken(engine, spec, ticket.body, entrance, tools)
    except (KeyError, TypeError, ValueError) as error:
        entrance.close()
        raise _unreadable(error) from error
    except BaseException:
        entrance.close()
        with suppress(DockerException, RequestException, StationError):  # what stays is the sweeper's
            engine.remove(str(ticket.body["id"]))
        raise
    try:
        environment.adopt(tags)
    except BaseException:
        with suppress(StationError):
            environment.destroy()
        raise
    return environment


def _unreadable(error: Exception) -> EnvironmentFailed:
    return EnvironmentFailed(f"this ticket cannot be read ({error!r}); was another version here?")


def _close(ticket: Ticket) -> None:
    for descriptor in ticket.descriptors:
        with suppress(OSError):
            os.close(descriptor)
