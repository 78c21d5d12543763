"""Finds out whether this host can run OCI environments, by running one."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
import sys
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from app.environments.prebuilt import binary
from app.environments.runtimes.oci.instance import OciHost, OciInstance, StartOptions
from app.environments.runtimes.oci.runtime import Runtime, runtime_of
from app.environments.runtimes.oci.specification import CAPABILITIES, CAPABILITY_BITS
from app.environments.session.client import SessionClient
from app.environments.session.connection import unix_connector
from app.errors import StationError
from app.host.environment_records import Record, Records
from app.images.layer_store import ImageStore, StoredImage
from app.models.spec import Resources
from app.settings import Settings

log = structlog.get_logger()


@dataclass(frozen=True)
class ProbeResult:
    """Result of a probe: what a host allows."""

    why_not: str | None = None  # why no environment is possible
    users_apart: bool = False  # users inside own nothing on this host
    lasting: bool = True  # the next trial would find the same


_READY_S = 20.0
_PLACE = "oci-trial-"
_YOUNG_S = 60.0
_REFUSED_S = 60.0
"""Seconds for which a refusal is valid."""
_LASTING = (errno.EINVAL, errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENODEV)
"""Kernel errors that will not go away later."""
_LIMITS = Resources(cpus=0.5, memory_bytes=64 << 20, pids=32)

_lock = threading.Lock()
_known: dict[Path, tuple[ProbeResult, float]] = {}  # and until when (monotonic) the result is valid


def available(settings: Settings) -> str | None:
    """Returns why environments of this kind cannot be made here; None when they can. Tried once per home and boot,
    while runtime, helper and namespaces are the same. Each process tries a refusal again, and again after a minute: it
    may have been a momentary lack of memory or disk.

    The trial starts an environment without an image, checks that its limits, its filter of system calls and its
    capabilities apply, and ends it: some 50 ms. For a home's first trial the session's helper is copied, too.
    """
    return probe_host(settings).why_not


def probe_host(settings: Settings) -> ProbeResult:
    """Probes the host: whether environments can be made, and what more is possible."""
    with _lock:
        home = settings.home.resolve()
        known, until = _known.get(home, (ProbeResult(), 0.0))
        if time.monotonic() >= until:
            known = _probe(home)
            believed = known.why_not is None and known.lasting
            _known[home] = (known, math.inf if believed else time.monotonic() + _REFUSED_S)
            if known.why_not is not None:
                log.info("oci.unavailable", reason=known.why_not)
        return known


def _probe(home: Path) -> ProbeResult:
    if sys.platform != "linux":
        return ProbeResult(f"it needs Linux, this is {sys.platform}")
    if os.geteuid() != 0:
        return ProbeResult("it needs root")
    runtime = runtime_of()
    if runtime is None:
        return ProbeResult("no OCI runtime was found; install Debian's `crun`")
    try:
        _sweep(home, runtime)
        note = home / "run" / f"oci-allowed-{_circumstances(runtime, binary(home))}"
        return _noted(note) or _tried_all(home, runtime, note)
    except (StationError, OSError) as error:
        return ProbeResult(f"a trial failed: {error}")


def _noted(note: Path) -> ProbeResult | None:
    try:
        return ProbeResult(users_apart=json.loads(note.read_text())["users_apart"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _tried_all(home: Path, runtime: Runtime, note: Path) -> ProbeResult:
    """Tries separate users first: since Linux 5.19 the kernel can translate the owners of files for overlayfs.

    Only lasting results are noted for other processes: a momentary lack of memory must not end the host's protection.
    """
    refusal = _refused(home, runtime)
    result = ProbeResult(users_apart=refusal is None)
    if refusal is not None:
        log.warning("oci.users_not_apart", reason=refusal.why)
        if (why_not := _tried(home, runtime, users_apart=False)) is not None:
            return ProbeResult(why_not)
    if refusal is not None and not refusal.lasting:
        return ProbeResult(lasting=False)
    fresh = note.with_name(f"{note.name}.{os.getpid()}.{threading.get_ident()}")
    fresh.write_text(json.dumps({"users_apart": result.users_apart}))
    fresh.rename(note)
    return result


@dataclass(frozen=True)
class _Refusal:
    why: str
    lasting: bool


def _refused(home: Path, runtime: Runtime) -> _Refusal | None:
    """Returns why users cannot be separate; a trial that fails is a reason, too."""
    try:
        why = _tried(home, runtime, users_apart=True)
    except (StationError, OSError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        return _Refusal(str(error), isinstance(cause, OSError) and cause.errno in _LASTING)
    return None if why is None else _Refusal(why, lasting=True)


def _circumstances(runtime: Runtime, helper: Path) -> str:
    about = runtime.program.stat()
    kernel_side = [Path("/proc/sys/kernel/random/boot_id").read_text()]
    kernel_side += [os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "pid", "cgroup", "user")]
    parts = [*kernel_side, str(runtime.program), about.st_mtime_ns, about.st_size, helper.name]
    return hashlib.sha256("\0".join(str(part) for part in parts).encode()).hexdigest()[:24]


def _sweep(home: Path, runtime: Runtime) -> None:
    for place in (home / "run").glob(f"{_PLACE}*"):
        with suppress(StationError, OSError):  # the next process tries again
            if time.time() - place.stat().st_mtime < _YOUNG_S:
                continue
            site = OciHost(place, Records(place), ImageStore(place), runtime, "", users_apart=False)
            for body in list(site.records.folder.iterdir()) if site.records.folder.exists() else []:
                OciInstance(site, body.name).end()
            shutil.rmtree(place)


def _tried(home: Path, runtime: Runtime, *, users_apart: bool) -> str | None:
    helper = binary(home)
    place = home / "run" / f"{_PLACE}{uuid.uuid4().hex[:12]}"  # on the same disk as the real ones
    place.mkdir(parents=True)
    site = OciHost.of(place, runtime, helper, users_apart=users_apart)
    body = OciInstance(site, f"trial{uuid.uuid4().hex}")
    try:
        site.records.write(Record(body.id, {}, "trial", "trial"))
        (site.store.layers / "empty").mkdir(parents=True)
        until = time.monotonic() + _READY_S
        body.start(
            StartOptions(StoredImage("trial", ("empty",)), _LIMITS, {}, "/testbed", needs_shell=False, deadline=until)
        )
        return _looked_at(body, site)
    finally:
        with suppress(StationError):
            body.end()
        shutil.rmtree(place, ignore_errors=True)


def _looked_at(body: OciInstance, site: OciHost) -> str | None:
    session = SessionClient(unix_connector(body.place.address), label="(a trial)")
    try:
        session.wait_ready(_READY_S)
        first = body.pid
        if first is None or first not in body.cgroup.processes():
            return "the environment is not in the cgroup that was made for it"
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{first}/status").read_text().splitlines())
        if site.users_apart and (why := _same_users(body, session, status)) is not None:
            return why
    finally:
        session.close()
    return _shared(first, site) or _loose(status)


def _shared(first: int, site: OciHost) -> str | None:
    for name in ("mnt", "net", "uts", "pid", "ipc", *(["user"] if site.users_apart else [])):
        if os.readlink(f"/proc/{first}/ns/{name}") == os.readlink(f"/proc/self/ns/{name}"):
            return f"its namespace of the kind {name!r} is ours"
    return None


def _same_users(body: OciInstance, session: SessionClient, status: dict[str, str]) -> str | None:
    if "0" in status["Uid"].split() + status["Gid"].split():
        return "root inside is root out here"
    session.put("/testbed/owned", b"")
    about = (body.place.upper / "testbed" / "owned").stat()
    return None if (about.st_uid, about.st_gid) == (0, 0) else "owners of files are not translated"


def _loose(status: dict[str, str]) -> str | None:
    allowed = sum(1 << CAPABILITY_BITS[name] for name in CAPABILITIES)
    ours = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    filters = int(status.get("Seccomp_filters", "1")) - int(ours.get("Seccomp_filters", "0"))  # shown since Linux 5.10
    if status.get("Seccomp") != "2" or filters < 1:
        return "the filter of system calls is not in force"
    if status.get("NoNewPrivs") != "1":
        return "new privileges could be gained inside"
    if any(int(status[f"Cap{kind}"], 16) & ~allowed for kind in ("Bnd", "Eff", "Prm", "Inh")):
        return "there are more capabilities inside than were given"
    return None
