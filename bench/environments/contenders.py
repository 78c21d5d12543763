"""Who is measured, and how each is had: from the package index into a virtual environment of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from app.host.engine import engine_of
from app.models.spec import Resources
from app.settings import Settings
from bench.peers import compose
from bench.peers.installed import Wanted, folder_with, python_with

DOCKER, OCI, RAW, BARE = "MegaFlow docker", "MegaFlow oci", "raw engine API", "bare local shell"
MINI, REX, REX_EXECUTE = "mini-swe-agent", "SWE-ReX", "SWE-ReX execute()"
HARBOR, INSPECT, SWEBENCH = "Harbor", "Inspect", "swebench harness"
OURS = (DOCKER, OCI)
PEERS = (MINI, REX, REX_EXECUTE, HARBOR, INSPECT, SWEBENCH)
DEFAULT_PATHS = (MINI, REX, HARBOR, INSPECT, SWEBENCH)
"""By which way an agent of that framework acts, unless it is told otherwise."""

REPOSITORY = Path(__file__).parent.parent.parent
_REX = "swe-rex==1.4.0"
_HARBOR = "harbor==0.25.0"
_HARBOR_NEEDS = (
    # What its environments import, and what that imports in turn; its own pins are not to be had on every index.
    *("certifi", "pydantic>=2.12", "shortuuid", "typer", "requests", "pyyaml", "rich", "toml", "tenacity"),
    *("python-dotenv", "jinja2", "dirhash", "packaging", "semver", "fastapi", "uvicorn", "pathspec", "httpx"),
    *("filelock", "platformdirs", "pyjwt", "jsonschema", "typing-extensions"),
)


@dataclass(frozen=True, slots=True)
class Ready:
    """A contender that can be started: its interpreter, its adapter in `bench/peers/environments`, its options."""

    python: str
    adapter: str
    options: dict[str, Any]
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fixtures:
    """What all share: the image, and the limits that ours sets and the raw engine is given, too."""

    settings: Settings
    image: str
    folder: Path
    """Short, and removed at the end."""
    memory: Path | None = None
    """The same in memory, where the host has such a file system."""
    rex_image: str = f"megaflow-bench/swe-rex:{uuid4().hex[:8]}"

    @property
    def limits(self) -> dict[str, Any]:
        wanted = Resources()
        return {
            "cpus": min(wanted.cpus, engine_of(self.settings).cpus),
            "memory_bytes": wanted.memory_bytes,
            "pids": wanted.pids,
        }


def _ours(fixtures: Fixtures, kind: str) -> Ready:
    options = {
        "kind": kind,
        "image": fixtures.image,
        "home": str(fixtures.folder / kind),
        "installation": f"bench-{kind}-{uuid4().hex[:8]}",
    }
    return Ready(sys.executable, "ours", options, {"PYTHONPATH": str(REPOSITORY)})


def _raw(fixtures: Fixtures) -> Ready:
    return Ready(sys.executable, "raw_engine", {"image": fixtures.image, **fixtures.limits})


def _bare(fixtures: Fixtures) -> Ready:
    return Ready(sys.executable, "bare", {"folder": str(fixtures.memory or fixtures.folder)})


def _mini(fixtures: Fixtures) -> Ready:
    python = python_with(Wanted("mini-swe-agent", ("mini-swe-agent==2.4.6",)))
    quiet = {"MSWEA_SILENT_STARTUP": "1", "MSWEA_CONFIGURED": "true"}
    return Ready(str(python), "peer_mini", {"image": fixtures.image}, quiet)


def _rex(fixtures: Fixtures, *, session: bool) -> Ready:
    python = python_with(Wanted("swe-rex", (_REX, "aiohttp")))  # which it imports without saying so
    _rex_image(fixtures)
    quiet = {"SWE_REX_LOG_STREAM_LEVEL": "ERROR"}
    return Ready(str(python), "peer_rex", {"image": fixtures.rex_image, "session": session}, quiet)


def _rex_image(fixtures: Fixtures) -> None:
    """The same image and one layer more: its server has to be inside."""
    engine = engine_of(fixtures.settings)
    if engine.api.images(name=fixtures.rex_image):
        return
    packages = folder_with("swe-rex-image", (_REX,), python_version="3.11")
    (packages / "swerex-remote").write_text(
        "#!/usr/bin/python3\nimport sys\nsys.path.insert(0, '/opt/swe-rex')\n"
        "from swerex.server import main\nsys.exit(main())\n"
    )
    (packages / "swerex-remote").chmod(0o755)
    (packages / "Dockerfile").write_text(
        f"FROM {fixtures.image}\nLABEL megaflow.bench=peer\nCOPY . /opt/swe-rex\n"
        "RUN ln -s /opt/swe-rex/swerex-remote /usr/local/bin/swerex-remote\n"
    )
    for told in engine.api.build(path=str(packages), tag=fixtures.rex_image, rm=True, forcerm=True, decode=True):
        if "error" in told:
            raise RuntimeError(f"the image with SWE-ReX inside could not be built: {told['error']}")


def _harbor(fixtures: Fixtures) -> Ready:
    python = python_with(Wanted("harbor", _HARBOR_NEEDS, forced=(_HARBOR,)))
    return Ready(str(python), "peer_harbor", {"image": fixtures.image}, _compose())


def _inspect(fixtures: Fixtures) -> Ready:
    python = python_with(Wanted("inspect-ai", ("inspect-ai==0.3.285",)))
    return Ready(str(python), "peer_inspect", {"image": fixtures.image}, _compose())


def _compose() -> dict[str, str]:
    folder = compose.config_folder()
    return {} if folder is None else {"DOCKER_CONFIG": folder}


def _swebench(fixtures: Fixtures) -> Ready:
    python = python_with(Wanted("swebench", ("swebench==5.0.2",)))
    return Ready(str(python), "peer_swebench", {"image": fixtures.image})


CONTENDERS: dict[str, Callable[[Fixtures], Ready]] = {
    DOCKER: lambda fixtures: _ours(fixtures, "docker"),
    OCI: lambda fixtures: _ours(fixtures, "oci"),
    RAW: _raw,
    BARE: _bare,
    MINI: _mini,
    REX: lambda fixtures: _rex(fixtures, session=True),
    REX_EXECUTE: lambda fixtures: _rex(fixtures, session=False),
    HARBOR: _harbor,
    INSPECT: _inspect,
    SWEBENCH: _swebench,
}
