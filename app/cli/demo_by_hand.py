"""What the demo does beside its runs: an image that goes to a registry and comes back, a snapshot of an environment."""

from __future__ import annotations

import ctypes
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from docker.errors import APIError

from app.artifacts import open_store
from app.artifacts.bundles import fetch_bundle
from app.client import MegaFlow
from app.environments import provider_for
from app.environments.base import Environment, Tags
from app.environments.engine import engine_of
from app.environments.image_store.stock import without_engine
from app.environments.image_store.sync import Outcome, Sync, items_of
from app.environments.image_store.watermark import disk_of
from app.errors import EnvironmentFailed, ImageUnavailable, InstallationFailed, MegaFlowError
from app.models.spec import AgentTask, Bundle, EnvironmentSpec
from app.settings import Settings
from app.workers.image_care import StandingGate

REGISTRY = "docker-registry"
"""The program, and Debian's package that has it."""
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_LIBC = ctypes.CDLL(None)
_READY_S = 15.0
_LIFE_S = 300.0
_COMMAND_S = 30.0
_WORD = "what was here before the snapshot"


@dataclass(frozen=True, slots=True)
class Sent:
    """An image in a registry, and the task that now asks for it there."""

    task: AgentTask
    image: str


@dataclass(frozen=True, slots=True)
class ByHand:
    """sent: what is in a registry now. did: what came about, in words. wrong: what did not, and should have."""

    sent: Sent | None = None
    did: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Place:
    """A registry that stands at HOST:PORT. at: None: there is none, which `why` says; `wrong`: there should be."""

    at: str | None
    why: str = ""
    wrong: bool = False


def place(settings: Settings, held: ExitStack) -> Place:
    """held: it stands until this ends. For the main thread: it ends with the one that started it, too."""
    try:
        if without_engine(settings) or disk_of(engine_of(settings)) is None:
            return Place(None, "no image went to a registry: it takes a container engine on this host")
        if (at := held.enter_context(registry())) is None:
            return Place(None, f"no image went to a registry: Debian's `{REGISTRY}` is not installed")
    except MegaFlowError as error:
        return Place(None, f"UNEXPECTED: no registry for an image: {error}", wrong=True)
    return Place(at)


def by_hand(flow: MegaFlow, task: AgentTask, to: Place, held: ExitStack) -> ByHand:
    """All of it, with the task's image. held: the image has its name in the registry until this ends."""
    at, did, wrong = None, [], []
    try:
        made_again(flow.settings, task.environment, timeout_s=task.limits.environment_timeout_s)
        did.append("a snapshot of an environment was made into another")
    except MegaFlowError as error:
        wrong.append(f"UNEXPECTED: no environment was made of a snapshot: {error}")
    if to.at is None:
        (wrong if to.wrong else did).append(to.why)
        return ByHand(None, tuple(did), tuple(wrong))
    try:
        at = sent(flow, task, to.at)
        held.callback(forget, flow.settings, at.image)
        did.append(f"the image of {task.name} went to a registry, for an attempt to pull it from there")
    except MegaFlowError as error:
        wrong.append(f"UNEXPECTED: no image went to a registry: {error}")
    return ByHand(at, tuple(did), tuple(wrong))


# --- A registry -----------------------------------------------------------------------------------------------------


@contextmanager
def registry() -> Iterator[str | None]:
    """HOST:PORT of one that stands for the block, empty at first; None: the program is not installed.

    Raises: InstallationFailed: it does not answer.
    """
    program = shutil.which(REGISTRY)
    if program is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="megaflow-registry-") as name:
        folder = Path(name)
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        storage, http = f"{{filesystem: {{rootdirectory: {folder / 'data'}}}}}", f"{{addr: '{address}'}}"
        (folder / "config.yml").write_text(f"version: 0.1\nstorage: {storage}\nhttp: {http}\n")
        with (folder / "log").open("wb") as log:
            command = (program, "serve", str(folder / "config.yml"))
            process = subprocess.Popen(  # noqa: S603 (found by its name alone)
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                preexec_fn=lambda: _LIBC.prctl(_DIE_WITH_PARENT, signal.SIGKILL),
            )
        try:
            _await(process, address, folder / "log")
            yield address
        finally:
            process.kill()  # what it keeps goes with the folder
            process.wait()


def _await(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    host, _, port = address.rpartition(":")
    give_up = time.monotonic() + _READY_S
    while True:
        with socket.socket() as trial:
            if trial.connect_ex((host, int(port))) == 0:
                return
        if process.poll() is not None or time.monotonic() > give_up:
            said = log.read_text(errors="replace")[-500:]
            raise InstallationFailed(f"expected {REGISTRY} at {address}; it does not answer, and said: {said}")
        time.sleep(0.05)


def sent(flow: MegaFlow, task: AgentTask, to: str) -> Sent:
    """Do what `megaflow images sync` does for the task's image; then this host does not know it by that name.

    Raises: ImageUnavailable: it is not in the registry; EngineUnavailable, EnvironmentFailed.
    """
    settings = flow.settings
    (item,) = items_of([task.environment], to, settings.base_image)
    gate = StandingGate(flow.database, settings.lease_s)
    done = Sync(settings, to, fetch_bundle=_bundles(settings), gate=gate).one(item)
    if item.target is None or done.outcome is Outcome.FAILED:
        raise ImageUnavailable(f"the image of {task.name} was not brought to {to}: {done.message}")
    forget(settings, item.target)
    asking = task.environment.model_copy(update={"build": None, "image": item.target})
    return Sent(task.model_copy(update={"environment": asking}), item.target)


def forget(settings: Settings, image: str) -> None:
    """Take the name away from the engine's image; its other names keep it."""
    engine = engine_of(settings)
    with engine.named(f"forget the name {image}", EnvironmentFailed), suppress(APIError):  # it has no such name
        engine.api.remove_image(image)


# --- A snapshot -----------------------------------------------------------------------------------------------------


def made_again(settings: Settings, spec: EnvironmentSpec, *, timeout_s: float) -> None:
    """Make an environment, write into it, keep its files, end it, and find them in another that is made of them.

    Raises: StationError: one of these could not be done; EnvironmentFailed: something else was found.
    """
    provider = provider_for(spec.kind, settings, _bundles(settings))
    provider.prepare_image(spec, timeout_s=timeout_s)
    with _ended(provider.create(spec, _tags(settings), timeout_s=timeout_s)) as environment:
        environment.put("/tmp/kept", _WORD.encode())
        snapshot = environment.snapshot(_tags(settings))
    try:
        with _ended(provider.create_from(snapshot, spec, _tags(settings), timeout_s=timeout_s)) as environment:
            found = environment.run("cat /tmp/kept", timeout_s=_COMMAND_S).text()
    finally:
        provider.remove_snapshot(snapshot)
    if found != _WORD:
        raise EnvironmentFailed(f"expected {_WORD!r} in an environment that was made of a snapshot, found {found!r}.")


@contextmanager
def _ended(environment: Environment) -> Iterator[Environment]:
    try:
        yield environment
    finally:
        environment.destroy()


def _tags(settings: Settings) -> Tags:
    """Of nobody: should this process be killed, the sweeper takes it at its deadline."""
    return Tags.ahead(settings.installation, uuid.uuid4(), time.time() + _LIFE_S)


def _bundles(settings: Settings) -> Callable[[Bundle], bytes]:
    store = open_store(settings.artifacts(), endpoint_url=settings.s3_endpoint_url)
    return lambda bundle: fetch_bundle(store, bundle)
