"""Finds out whether this host can run OCI environments, by running one."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import sys
import threading
import time
import uuid
from contextlib import suppress
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


_READY_S = 20.0
_PLACE = "oci-trial-"
_YOUNG_S = 60.0
_REFUSED_S = 60.0
"""Seconds for which a refusal is valid."""
_LIMITS = Resources(cpus=0.5, memory_bytes=64 << 20, pids=32)

_lock = threading.Lock()
_known: dict[Path, tuple[str | None, float]] = {}  # and until when (monotonic) the result is valid


def available(settings: Settings) -> str | None:
    """Returns why environments of this kind cannot be made here; None when they can. Tried once per home and boot,
    while runtime, helper and namespaces are the same. Each process tries a refusal again, and again after a minute: it
    may have been a momentary lack of memory or disk.

    The trial starts an environment without an image, checks that its limits, its filter of system calls and its
    capabilities apply, and ends it: some 50 ms. For a home's first trial the session's helper is copied, too.
    """
    with _lock:
        home = settings.home.resolve()
        why_not, until = _known.get(home, (None, 0.0))
        if time.monotonic() >= until:
            why_not = _probe(home)
            _known[home] = (why_not, math.inf if why_not is None else time.monotonic() + _REFUSED_S)
            if why_not is not None:
                log.info("oci.unavailable", reason=why_not)
        return why_not


def _probe(home: Path) -> str | None:
    if sys.platform != "linux":
        return f"it needs Linux, this is {sys.platform}"
    if os.geteuid() != 0:
        return "it needs root"
    runtime = runtime_of()
    if runtime is None:
        return "no OCI runtime was found; install Debian's `crun`"
    try:
        _sweep(home, runtime)
        note = home / "run" / f"oci-apart-{_circumstances(runtime, binary(home))}"
        if note.exists():
            return None
        why_not = _tried(home, runtime)
        if why_not is None:
            note.touch()
        return why_not
    except (StationError, OSError) as error:
        return f"a trial failed: {error}"


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
            site = OciHost(place, Records(place), ImageStore(place), runtime, "")
            for body in list(site.records.folder.iterdir()) if site.records.folder.exists() else []:
                OciInstance(site, body.name).end()
            shutil.rmtree(place)


def _tried(home: Path, runtime: Runtime) -> str | None:
    helper = binary(home)
    place = home / "run" / f"{_PLACE}{uuid.uuid4().hex[:12]}"  # on the same disk as the real ones
    place.mkdir(parents=True)
    site = OciHost.of(place, runtime, helper)
    body = OciInstance(site, f"trial{uuid.uuid4().hex}")
    try:
        site.records.write(Record(body.id, {}, "trial", "trial"))
        (site.store.layers / "empty").mkdir(parents=True)
        until = time.monotonic() + _READY_S
        body.start(
            StartOptions(StoredImage("trial", ("empty",)), _LIMITS, {}, "/testbed", needs_shell=False, deadline=until)
        )
        return _looked_at(body)
    finally:
        with suppress(StationError):
            body.end()
        shutil.rmtree(place, ignore_errors=True)


def _looked_at(body: OciInstance) -> str | None:
    session = SessionClient(unix_connector(body.place.address), label="(a trial)")
    try:
        session.wait_ready(_READY_S)
        first = body.pid
        if first is None or first not in body.cgroup.processes():
            return "the environment is not in the cgroup that was made for it"
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{first}/status").read_text().splitlines())
        if (why := _same_users(body, session, status)) is not None:
            return why
    finally:
        session.close()
    return _shared(first) or _loose(status)


def _shared(first: int) -> str | None:
    for name in ("mnt", "net", "uts", "pid", "ipc", "user"):
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
