"""Finds and removes what an ended stack left: processes, and labelled objects in the engine."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import requests
import structlog
from docker.errors import APIError

from app.environments.networks import firewall
from app.environments.runtimes.oci import Records, end
from app.errors import EngineUnavailable, EnvironmentFailed
from app.instances import provider_named
from app.settings import PREFIX, Settings
from app.stack import postgres, redis
from app.stack.engine import connected
from app.stack.home import MARKER
from app.stack.processes import end as end_all
from app.stack.processes import retrying

log = structlog.get_logger(__name__)

LABEL = "megaflow"
"""Label of all MegaFlow objects in the engine; its value is the installation."""
_PATIENCE_S = 10.0
_AT_ONCE = 8


@dataclass(frozen=True)
class Removed:
    """Numbers of objects removed from the engine."""

    containers: int = 0
    networks: int = 0
    volumes: int = 0
    stuck: tuple[str, ...] = ()  # names of networks that the engine does not remove
    others: int = 0  # instances whose objects stay: they may be another host's

    @property
    def anything(self) -> bool:
        return bool(self.containers or self.networks or self.volumes)


def end_processes(settings: Settings, *, sparing: Collection[int] = ()) -> list[str]:
    """Ends all processes of this installation except the caller, its ancestors and `sparing`; returns descriptions.

    SIGTERM first, SIGKILL after ten seconds. The servers end last, after their clients, and by SIGINT:
    both then save and stop without waiting for clients.
    """
    running = [process for process in processes(settings) if process.pid not in sparing]
    servers = [process for process in running if _is_server(process, settings)]
    others = [process for process in running if process not in servers]
    names = [_describe(process) for process in (*others, *servers)]
    end_all(others, signal.SIGTERM, _PATIENCE_S)
    end_all(servers, signal.SIGINT, _PATIENCE_S)
    return names


def processes(settings: Settings) -> list[psutil.Process]:
    """Returns the processes of this installation, without the caller and its ancestors."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    return [process for process in psutil.process_iter() if process.pid not in own and _is_ours(process, settings)]


def remove_from_engine(
    settings: Settings, sparing: Collection[str] = (), *, only: Collection[str] | None = None
) -> Removed:
    """Removes all containers, networks and volumes with this installation's label, and its networks' packet rules.

    sparing: instances on other hosts. Their objects stay, and also objects that belong to no instance.
    only: instances of this host, where unknown other hosts may share the engine: all other objects stay.
    Does nothing when no engine answers.
    """
    chosen = {"label": f"{LABEL}={settings.installation}"}
    try:
        with connected(settings) as client, ThreadPoolExecutor(_AT_ONCE) as threads:
            api = client.api

            def remove_all(ids: Iterable[str], remove: Callable[[str], object]) -> int:
                return sum(threads.map(lambda one: _remove(remove, one), list(ids)))

            container_list = api.containers(all=True, filters=chosen)
            networks, volume_list = api.networks(filters=chosen), api.volumes(filters=chosen)["Volumes"] or ()
            owners = {_instance(one) for one in (*container_list, *networks, *volume_list)}
            others = (owners - set(only) if only is not None else owners & set(sparing)) - {""}
            shared = bool(others)  # other hosts use this engine, too

            def ours(things: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
                return [one for one in things if not shared or _instance(one) not in {"", *others}]

            containers = remove_all(
                (one["Id"] for one in ours(container_list)), lambda one: api.remove_container(one, v=True, force=True)
            )
            names = [str(one["Name"]) for one in ours(networks)]
            stuck = tuple(name for name in names if not _remove_network(api.remove_network, name))
            volumes = [one["Name"] for one in ours(volume_list)]
            removed = Removed(
                containers=containers,
                networks=len(names) - len(stuck),
                volumes=remove_all(volumes, lambda one: api.remove_volume(one, force=True)),
                stuck=stuck,
                others=len(others) if only is not None else 0,
            )
            if not shared:
                firewall.remove(settings.installation)
            return removed
    except (EngineUnavailable, requests.ConnectionError):
        return Removed()


def _instance(thing: dict[str, Any]) -> str:
    return str((thing.get("Labels") or {}).get(f"{LABEL}.instance", ""))


def end_environments(settings: Settings) -> int:
    """Ends all environments of this installation that run without an engine; returns their number."""
    home = settings.home.resolve()
    ended = 0
    for one in list(Records(home).all()):
        if one.installation in (
            settings.installation,
            "",
        ):  # without labels: its creator was killed during the creation
            try:
                end(home, one.id)
                ended += 1
            except EnvironmentFailed as error:
                log.error("leftovers.environment_stays", environment=one.id, reason=str(error))
    return ended


def end_instances(settings: Settings) -> int:
    """Ends this installation's instances at the settings' remote providers (cluster, cloud); returns their number.

    Raises: MegaFlowError: a provider cannot be reached; its instances end themselves when no ledger answers.
    """
    count = 0
    for name in {settings.ephemeral_provider, settings.persistent_provider} - {"process", "docker", "simulated"}:
        provider = provider_named(name, settings)
        for instance_id, handle in provider.alive().items():
            provider.terminate(instance_id, handle, grace_s=settings.drain_s)
            count += 1
    return count


def strangers_in_engine(settings: Settings) -> int:
    """Returns the number of running containers of others: if there are any, the engine must not be stopped."""
    try:
        with connected(settings) as client:
            running = client.api.containers()
    except (EngineUnavailable, requests.ConnectionError):
        return 0
    return sum(one.get("Labels", {}).get(LABEL) != settings.installation for one in running)


def _is_ours(process: psutil.Process, settings: Settings) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return _is_server(process, settings) or _lives_in(process, settings.home) or _carries(process, settings.home)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False  # ended, or another user's


def _carries(process: psutil.Process, home: Path) -> bool:
    """Whether our stack started it, or it is one of our programs started by hand on this home.

    MEGAFLOW_HOME in the environment is not enough: a user who exports it also has it in an editor and a shell.
    """
    environment = process.environ()
    if environment.get(MARKER) == str(home):
        return True
    pairs = pairwise(process.cmdline())
    is_program = any((a == "-m" and b.startswith("app.")) or (a, b) == ("-A", "app.celery_app") for a, b in pairs)
    return environment.get(PREFIX + "HOME") == str(home) and is_program


def _lives_in(process: psutil.Process, home: Path) -> bool:
    """Whether its program is a file in the home, such as an agent framework's interpreter."""
    program = (process.cmdline() or [""])[0]
    return Path(program).is_relative_to(home)


def _is_server(process: psutil.Process, settings: Settings) -> bool:
    # Both overwrite their environment with their process title; the working folder, their data, identifies the owner.
    data = {"postgres": postgres.data_folder(settings), "redis-server": redis.data_folder(settings)}
    try:
        return process.name() in data and Path(process.cwd()) == data[process.name()].resolve()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {process.name()}"
    except psutil.NoSuchProcess:
        return str(process.pid)


class _StillCounted(Exception):
    """Raised when the engine forbids a removal: older ones count a container that is gone in its network."""


def _remove_network(remove: Callable[[str], object], name: str) -> bool:
    """Returns False when the engine still counts a container in it after 10 s: older engines count removed ones."""
    try:
        retrying(_StillCounted, _PATIENCE_S)(_remove_uncounted, remove, name)
    except _StillCounted:
        return False
    return True


def _remove_uncounted(remove: Callable[[str], object], name: str) -> None:
    try:
        _remove(remove, name)
    except APIError as error:
        if error.status_code == 403:
            raise _StillCounted from error
        raise


def _remove(remove: Callable[[str], object], one: str) -> bool:
    try:
        remove(one)
    except APIError as error:
        if error.status_code not in (404, 409):  # removed already, or just being removed by another process
            raise
        return False
    return True
