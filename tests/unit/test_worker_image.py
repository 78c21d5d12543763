"""The worker image's recipe: what its build step imports is in its context, and what compose passes on is passed on."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import app

ROOT = Path(app.__file__).parent.parent
SCRIPT = (ROOT / "scripts" / "worker-image").read_text()
WORKER = ROOT / "worker_images" / "worker"


def _words(variable: str) -> list[str]:
    found = re.search(rf'^{variable}="([^"]+)"$', SCRIPT, re.MULTILINE)
    assert found, variable
    return found[1].split()


@pytest.fixture
def context(tmp_path: Path) -> Path:
    """The folder /build/agents, as scripts/worker-image makes it."""
    ours = tmp_path / "agents" / "app"
    ours.mkdir(parents=True)
    (ours / "__init__.py").touch()
    for part in map(Path, _words("agents_parts")):
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, ours / part.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, ours)
    shutil.copy(WORKER / "install_agents.py", ours.parent / "install.py")
    return ours.parent


def _run(context: Path, program: str) -> subprocess.CompletedProcess[str]:
    # -I keeps the editable MegaFlow's folder and this one's out; the context comes before what is installed.
    start = f"import sys; sys.path.insert(0, {str(context)!r}); sys.dont_write_bytecode = True\n"
    return subprocess.run([sys.executable, "-I", "-c", start + program], capture_output=True, text=True, cwd=context)


def test_the_build_step_finds_all_that_it_imports_in_its_context(context: Path) -> None:
    program = "import install, app; print(app.__file__); print(*(name for name in sys.modules if name[:4] == 'app.'))"
    done = _run(context, program)
    assert done.returncode == 0, done.stderr
    where, names = done.stdout.splitlines()
    assert where == str(context / "app" / "__init__.py")
    assert "app.agents.mini_swe_agent.adapter" in names.split()


def test_the_build_step_installs_with_the_installers_own_signature(context: Path, tmp_path: Path) -> None:
    """Up to the first command of the installation, which is made to fail here: there is no package index in a test."""
    program = (
        "import runpy\n"
        "from app.agents.installation import installer\n"
        "installer.uv = lambda name: '/bin/false'\n"
        f"sys.argv = ['install.py', {str(tmp_path / 'tools')!r}]\n"
        "runpy.run_path('install.py', run_name='__main__')\n"
    )
    done = _run(context, program)
    assert "AgentUnavailable: agent mini-swe-agent: expected `/bin/false venv --quiet" in done.stderr


def test_wheels_are_fetched_for_what_the_build_step_installs_and_nothing_else() -> None:
    """The locks of other frameworks are for a newer Python than the image's."""
    installed = re.findall(r"from app\.agents\.(\w+)\.adapter import", (WORKER / "install_agents.py").read_text())
    assert installed
    assert _words("agents_locks") == [f"app/agents/{name}/requirements.lock" for name in installed]


def test_the_image_has_what_the_gateway_translates_with() -> None:
    assert re.search(r"^litellm==", (WORKER / "requirements.lock").read_text(), re.MULTILINE)


def test_the_services_see_what_agents_and_recordings_need() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    model = services["model"]
    at = model["command"].index("--recordings")
    folder = model["command"][at + 1]
    assert folder == "/var/lib/megaflow/recordings"
    assert "home:/var/lib/megaflow" in model["volumes"]
    assert "home:/var/lib/megaflow" in services["control"]["volumes"]
    names = set(services["pool"]["environment"])
    assert names >= {"MEGAFLOW_SWE_AGENT_SOURCE", "MEGAFLOW_AGENT_MANIFESTS", "PIP_INDEX_URL", "NPM_CONFIG_REGISTRY"}
    assert [name for name, service in services.items() if "OPENAI_API_KEY" in service.get("environment", {})] == [
        "gateway"
    ]


def test_each_of_the_three_services_is_a_profile_and_all_stand_in_the_example() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    parts: dict[str, set[str]] = {}
    for name, service in services.items():
        parts.setdefault(",".join(service.get("profiles", [])), set()).add(name)
    assert parts == {
        "": {"postgres", "redis", "s3", "migrate", "flower"},
        "model": {"gateway", "model", "experience"},
        "agent": {"grading", "beat", "web"},
        "environment": {"control", "pool"},
    }
    common = set(services) - {one for profile, names in parts.items() if profile for one in names}
    assert {one for name in services for one in services[name].get("depends_on", {})} <= common
    (line,) = (one for one in (ROOT / ".env.example").read_text().splitlines() if one.startswith("COMPOSE_PROFILES="))
    assert set(line.partition("=")[2].split(",")) == set(parts) - {""}
