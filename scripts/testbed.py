"""The tests' surroundings: an engine and a base image for as long as pytest runs. `scripts/test` is its door."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from app.errors import MegaFlowError
from app.settings import Settings
from app.stack import base_image, engine, tools


def main(arguments: Sequence[str]) -> int:
    """Run pytest with `arguments`; returns its exit code, or 69 when CI lacks what it promised."""
    with tempfile.TemporaryDirectory(prefix="mf-") as folder:
        settings = Settings(home=Path(folder) / "h")
        try:
            with _compiled(whole=not arguments):
                prepared = _prepare(settings, extra="extra" in arguments)
            if not prepared and _in_ci():
                return 69
            return _run(arguments)
        except KeyboardInterrupt:
            return 130
        finally:
            if engine.stop_engine(settings):
                _say("stopped the Docker engine that was started for the tests")


_MOST_PROCESSES = 5


@contextmanager
def _compiled(*, whole: bool) -> Iterator[None]:
    """Meanwhile, all tests are compiled once, which every process that collects them would do otherwise."""
    collect = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider"]
    if not whole:
        yield
        return
    with subprocess.Popen(collect, env=_environ(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):  # noqa: S603 (this interpreter)
        yield


def _environ() -> dict[str, str]:
    """Ours, and what is compiled is kept, whatever this machine prefers."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def _run(arguments: Sequence[str]) -> int:
    if list(arguments[:2]) != ["-m", "extra"]:
        return _pytest(arguments)
    beside = _pytest(["-m", "extra and not alone", *arguments[2:]])
    alone = _pytest(["-m", "extra and alone", *arguments[2:], "-n", "0"])
    return max(code for code in (beside, alone) if code != _NONE_CHOSEN or beside == alone)


_NONE_CHOSEN = 5


def _pytest(arguments: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="mf-cache-") as cache:
        command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}"]
        return subprocess.run([*command, *_spread(arguments), *arguments]).returncode  # noqa: S603 (this interpreter)


def _spread(arguments: Sequence[str]) -> list[str]:
    """Options that run whole files beside each other; `-n 0` among the arguments runs one after the other."""
    if any(a.startswith(("-n", "--numprocesses")) for a in arguments):
        return []
    count = str(min(_MOST_PROCESSES, (os.cpu_count() or 1) + 3))  # more: tests wait for what others do
    # In the order of the folders: those with few and long tests come first, so that nobody works alone at the end.
    return ["-n", count, "--dist", "loadfile", "--no-loadscope-reorder"]


PACKAGES = {
    "docker-registry": ("docker-registry",),
    "skopeo": ("skopeo",),
    "docker-compose": ("docker-compose",),
    "gcc": ("gcc", "libc6-dev"),  # the session helper under sanitizers
}
EXTRA_PACKAGES = {
    "chromium": ("chromium",),  # pages in a real browser
    "redis-server": ("redis-server",),  # hosts in network namespaces: servers with TLS
    "/usr/lib/postgresql/15/bin/initdb": ("postgresql-15",),
    "ip": ("iproute2",),
    "slurmctld": ("slurmctld", "slurmd", "slurm-client", "munge"),  # instances as jobs
}
"""Programs that some tests drive, and their Debian packages; the second of tests marked `extra` alone. Without them,
those tests skip, or fail in CI."""


def _install_programs(packages: Mapping[str, Sequence[str]]) -> None:
    absent = [program for program in packages if shutil.which(program) is None]
    missing = [package for program in absent for package in packages[program]]
    if missing and os.geteuid() == 0 and shutil.which("apt-get") is not None:
        _say(f"installing {' and '.join(missing)} from Debian's packages")
        install = ["install", "-y", "--no-install-recommends", *missing]
        done = _apt(install)
        if done.returncode != 0:  # perhaps it has never looked what there is
            _apt(["update"])
            done = _apt(install)
        if done.returncode != 0:
            _say(f"apt-get could not install them: {done.stderr.strip().splitlines()[-1:]}")


def _apt(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    command = ["apt-get", *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, stdin=subprocess.DEVNULL)  # noqa: S603


def _prepare(settings: Settings, *, extra: bool) -> bool:
    _install_programs(PACKAGES | (EXTRA_PACKAGES if extra else {}))
    found = engine.ensure_engine(settings, may_install=True, report=_say)
    if not found.available:
        _say(f"no Docker engine: {found.why}; try: {found.fix}")
        return False
    tools.ensure_tools(settings, may_install=True, report=_say)
    try:
        base_image.ensure_base_image(settings, report=_say)
    except MegaFlowError as error:
        _say(str(error))
        return False
    return True


def _in_ci() -> bool:
    return os.environ.get("CI", "").lower() in {"1", "true", "yes"}


def _say(line: str) -> None:
    print(f"test: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
