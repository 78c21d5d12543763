"""Bundles of frameworks: really installed from the package indexes, moved, mounted, asked for by many at once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import pytest

from app.agents.framework import FrameworkBundle
from app.agents.installation import Installer, Needs, require
from app.environments import provider_for
from app.environments.contract import Environment
from app.environments.tools import tool_inside
from app.errors import AgentNotSetUp, AgentUnavailable
from app.models.spec import EnvironmentKind, EnvironmentSpec
from app.settings import Settings
from tests.contract.environment_fixtures import tags_of
from tests.integration.http_server import served

OURS = "{}.{}".format(*sys.version_info[:2])
LOCK = """\
six==1.17.0 \\
    --hash=sha256:4721f391ed90541fddacab5acf947aa0d3dc7d27b2e1e8eda2be8970586c3274 \\
    --hash=sha256:ff70335d468e7eb6ec65b95b99d3a2836546063f63acc5171de367e834932a81
"""
PACKAGE = {"name": "toy", "version": "1.0.0", "private": True, "dependencies": {"is-number": "7.0.0"}}
PACKAGE_LOCK = {
    **{key: PACKAGE[key] for key in ("name", "version")},
    "lockfileVersion": 3,
    "requires": True,
    "packages": {
        "": {key: PACKAGE[key] for key in ("name", "version", "dependencies")},
        "node_modules/is-number": {
            "version": "7.0.0",
            "integrity": (
                "sha512-41Cifkg6e8TylSpdtTpeLVMqvSBEVzTttHvERD741+pnZ8ANv0004MRL43QKPDlK9cGvNp6NZWZUBlbGXYxxng=="
            ),
        },
    },
}
LOOK = """
import json, os, ssl, sqlite3, subprocess, sys, zlib, six
child = subprocess.run([sys.executable, "-c", "import sys, six; print(sys.prefix)"], capture_output=True, text=True)
kept = {name: os.environ.get(name) for name in ("PYTHONPATH", "LD_LIBRARY_PATH", "PYTHONHOME")}
print(json.dumps({"prefix": sys.prefix, "path": sys.path[1:], "child": child.stdout.strip(), "kept": kept,
    "ours": sorted(name for name in os.environ if name.startswith("MEGAFLOW"))}))
"""


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tools")


@pytest.fixture(scope="module")
def lock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("lock") / "requirements.lock"
    file.write_text(LOCK)
    return file


@pytest.fixture(scope="module")
def python(tools: Path, lock: Path) -> FrameworkBundle:
    return Installer(tools).python("toy", lock, python=OURS, first_use=("-c", "import six"))


@pytest.fixture(scope="module")
def npm(tools: Path, tmp_path_factory: pytest.TempPathFactory) -> FrameworkBundle:
    package = npm_package(tmp_path_factory.mktemp("package"), PACKAGE_LOCK)
    return Installer(tools).npm("toy-node", package, first_use=("-e", "process.exit(0)"))


def npm_package(folder: Path, lock: dict[str, object]) -> Path:
    (folder / "package.json").write_text(json.dumps(PACKAGE))
    (folder / "package-lock.json").write_text(json.dumps(lock))
    return folder


def looked(bundle: Path, **env: str) -> dict[str, object]:
    done = subprocess.run(
        [str(bundle / "bin" / "python3"), "-c", LOOK],
        env={"PATH": "/usr/bin:/bin", **env},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, object] = json.loads(done.stdout)
    return found


# --- Python ---------------------------------------------------------------------------------------------------------


def test_a_python_bundle_runs_from_wherever_it_is(python: FrameworkBundle, tmp_path: Path) -> None:
    moved = tmp_path / "else where" / "moved"
    shutil.copytree(python.folder, moved)
    told = looked(moved, PYTHONPATH="/of/the/image", LD_LIBRARY_PATH="/of/the/image/too")
    assert told["prefix"] == told["child"] == f"{moved}/python"
    assert all(str(place).startswith(f"{moved}/python") for place in told["path"])  # type: ignore[attr-defined]
    assert told["kept"] == {
        "PYTHONPATH": "/of/the/image",
        "LD_LIBRARY_PATH": "/of/the/image/too",
        "PYTHONHOME": None,
    }
    assert told["ours"] == []
    assert looked(moved)["kept"] == {"PYTHONPATH": None, "LD_LIBRARY_PATH": None, "PYTHONHOME": None}


def test_everybody_may_read_it_and_nobody_else_write(python: FrameworkBundle) -> None:
    for path in python.folder.rglob("*"):
        if not path.is_symlink():
            mode = path.stat().st_mode
            assert mode & 0o044 == 0o044, path
            assert not mode & 0o022, path


def test_many_who_ask_at_once_get_one_installation(tools: Path, lock: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from app.agents.installation import Installer;"
        "print(Installer(Path(sys.argv[1])).venv('many', Path(sys.argv[2])).folder)"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(lock)]

    def ask(_: int) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(ask, range(3)))
    assert sum("agent.installed" in answer for answer in answers) == 1
    assert len({answer.splitlines()[-1] for answer in answers}) == 1


def test_what_was_left_half_made_is_made_anew(lock: Path, tmp_path: Path) -> None:
    installer = Installer(tmp_path)
    made = installer.venv("toy", lock).folder
    (made / ".complete").unlink()
    (made / "bin" / "python").unlink()
    assert installer.venv("toy", lock).folder == made
    assert (made / "bin" / "python").exists()
    (made / "bin" / "python").unlink()  # the host's Python went away
    installer.venv("toy", lock)
    assert (made / "bin" / "python").exists()


def test_without_permission_nothing_is_installed(tools: Path, python: FrameworkBundle, lock: Path) -> None:
    looking = Installer(tools, may_install=False)
    assert looking.python("toy", lock, python=OURS) == python
    with pytest.raises(AgentUnavailable, match="installed on this host"):
        looking.python("another", lock, python=OURS)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("six==99.0 --hash=sha256:" + "0" * 64, "no version of six==99.0"),
        ("six==1.17.0 --hash=sha256:" + "0" * 64, "[Hh]ash mismatch"),
        ("six==1.17.0", "hash"),
    ],
)
def test_what_cannot_be_installed_is_told_in_the_indexs_words(text: str, words: str, tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text(text + "\n")
    with pytest.raises(AgentUnavailable, match=words):
        Installer(tmp_path / "tools").venv("toy", lock)
    left = {path.name for path in (tmp_path / "tools").iterdir() if not path.name.startswith(".")}
    assert left == set()


def test_a_python_that_is_not_on_this_host_is_told(lock: Path, tmp_path: Path) -> None:
    with pytest.raises(AgentNotSetUp, match=r"Python 3\.2 on this host"):
        Installer(tmp_path).python("toy", lock, python="3.2")


def test_a_first_use_that_fails_is_no_installation(lock: Path, tmp_path: Path) -> None:
    with pytest.raises(AgentUnavailable, match="No module named 'missing'"):
        Installer(tmp_path).venv("toy", lock, first_use=("-c", "import missing"))
    with pytest.raises(AgentUnavailable):
        Installer(tmp_path, may_install=False).venv("toy", lock)


# --- npm ------------------------------------------------------------------------------------------------------------


def test_an_npm_bundle_has_its_packages_and_its_node(npm: FrameworkBundle, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(npm.folder, moved, symlinks=True)
    script = f"console.log(require('{moved}/node_modules/is-number')(5), process.version)"
    done = subprocess.run([str(moved / "bin" / "node"), "-e", script], env={}, capture_output=True, text=True)
    assert done.stdout.startswith("true v22."), done.stderr


def test_a_package_without_a_hash_is_refused(tmp_path: Path) -> None:
    packages = {"": {}, "node_modules/is-number": {"version": "7.0.0"}}
    (tmp_path / "package").mkdir()
    package = npm_package(tmp_path / "package", {**PACKAGE_LOCK, "packages": packages})
    with pytest.raises(AgentUnavailable, match="is-number"):
        Installer(tmp_path / "tools").npm("toy", package)


# --- Checkouts ------------------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "toyagent").mkdir(parents=True)
    (folder / "toyagent" / "__init__.py").write_text("VERSION = 1\n")
    git(folder, "init", "-q", "-b", "main")
    commit(folder)
    return folder


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=toy", "-c", "user.email=toy@example.org")
    subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True)


def commit(folder: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "change")


def version_of(bundle: FrameworkBundle) -> str:
    done = subprocess.run(
        [str(bundle.folder / "bin" / "python3"), "-c", "import toyagent, six; print(toyagent.VERSION)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.extra
def test_a_checkout_comes_from_git_at_what_was_asked_for(source: Path, lock: Path, tmp_path: Path) -> None:
    git(source, "tag", "one/1.0")
    (source / "toyagent" / "__init__.py").write_text("VERSION = 2\n")
    commit(source)
    installer = Installer(tmp_path / "tools")
    done = subprocess.run(["git", "-C", str(source), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    latest = f"file://{source}@{done.stdout.strip()}"
    bundle = installer.checkout("toyagent", latest, lock, python=OURS)
    assert version_of(bundle) == "2"
    assert not (bundle.folder / "source" / ".git").exists()
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(source, elsewhere)
    assert installer.checkout("toyagent", f"file://{elsewhere}@{done.stdout.strip()}", lock, python=OURS) == bundle
    assert version_of(installer.checkout("toyagent", f"file://{source}@one/1.0", lock, python=OURS)) == "1"
    with pytest.raises(AgentUnavailable, match="missing"):
        installer.checkout("toyagent", f"file://{source}@missing", lock, python=OURS)
    with pytest.raises(AgentNotSetUp, match="URL@REF"):
        installer.checkout("toyagent", str(source), lock, python=OURS)


def test_a_checkout_from_git_is_one_that_does_not_move(source: Path, lock: Path, tmp_path: Path) -> None:
    installer = Installer(tmp_path / "tools")
    with pytest.raises(AgentNotSetUp, match=r"URL@REF; found .*tag or a whole commit"):
        installer.checkout("toyagent", f"file://{source}", lock, python=OURS)
    with pytest.raises(AgentNotSetUp, match=r"https://…@git\.example\.org/toy"):
        installer.checkout("toyagent", "https://me:secret@git.example.org/toy", lock, python=OURS)
    with pytest.raises(AgentUnavailable, match="refs/tags/main"):
        installer.checkout("toyagent", f"file://{source}@main", lock, python=OURS)


# --- In environments ------------------------------------------------------------------------------------------------


@pytest.fixture(params=["docker", "oci"])
def environment(
    request: pytest.FixtureRequest, base_image_tag: str, python: FrameworkBundle, npm: FrameworkBundle, tmp_path: Path
) -> Iterator[Environment]:
    bundles = {bundle.name: bundle.folder for bundle in (python, npm)}
    settings = Settings(home=tmp_path, installation="test-bundles")
    if request.param == "docker":
        settings = settings.model_copy(update={"container_runtime": "docker"})
    provider = provider_for(EnvironmentKind(request.param), settings, lambda _: b"", tools=bundles.__getitem__)
    spec = EnvironmentSpec(image=base_image_tag, tools=tuple(bundles))
    made = provider.create(spec, tags_of(settings.installation), timeout_s=60)
    yield made
    made.destroy()


@pytest.mark.docker
def test_bundles_run_inside(environment: Environment, python: FrameworkBundle, npm: FrameworkBundle) -> None:
    for bundle in (python, npm):
        require(environment, bundle.name, Needs.of(bundle))
    place = tool_inside(EnvironmentKind.DOCKER, python.name, python.folder)
    told = environment.run(f"{place}/bin/python3 -c 'import six, ssl, sqlite3; print(six.__file__)'", timeout_s=60)
    assert told.text().startswith(f"{place}/python/lib")
    place = tool_inside(EnvironmentKind.DOCKER, npm.name, npm.folder)
    script = f'console.log(require("{place}/node_modules/is-number")(5))'
    assert environment.run(f"{place}/bin/node -e '{script}'", timeout_s=60).text() == "true\n"


# --- Indexes ---------------------------------------------------------------------------------------------------------

NAME = "megaflow-toy-of-this-test"  # on no public index
WHEEL = "megaflow_toy_of_this_test-1.0-py3-none-any.whl"


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    """The URL of a package index with one package."""
    page = tmp_path / "www" / "simple" / NAME
    page.mkdir(parents=True)
    about = WHEEL.removesuffix("-py3-none-any.whl") + ".dist-info"
    with zipfile.ZipFile(page / WHEEL, "w") as wheel:
        wheel.writestr("megaflow_toy_of_this_test.py", "WORD = 'toy'\n")
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    (page / "index.html").write_text(f'<a href="{WHEEL}">{WHEEL}</a>')
    with served(partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "www"))) as address:
        yield f"http://{address}/simple"


@pytest.fixture
def toy_lock(tmp_path: Path, index: str) -> Path:
    digest = hashlib.sha256((tmp_path / "www" / "simple" / NAME / WHEEL).read_bytes()).hexdigest()
    file = tmp_path / "requirements.lock"
    file.write_text(f"{NAME}==1.0 --hash=sha256:{digest}\n")
    return file


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Nothing is told to pip and uv but by the test."""
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("UV_NO_CACHE", "1")
    return monkeypatch


USE = ("-c", "import megaflow_toy_of_this_test")


@pytest.mark.parametrize("by", ["variable", "file"])
def test_what_pip_was_told_suffices(
    by: str, told: pytest.MonkeyPatch, index: str, toy_lock: Path, tmp_path: Path
) -> None:
    if by == "variable":
        told.setenv("PIP_INDEX_URL", index)
    else:
        file = tmp_path / "pip.conf"
        file.write_text(f"[global]\nindex-url = {index}\n")
        told.setenv("PIP_CONFIG_FILE", str(file))
    made = Installer(tmp_path / "tools").venv("toy", toy_lock, first_use=USE)
    assert list(made.folder.glob("lib/python*/site-packages/megaflow_toy_of_this_test.py"))


def test_bundles_that_are_ready_are_used_and_never_written_to(
    told: pytest.MonkeyPatch, index: str, toy_lock: Path, tmp_path: Path
) -> None:
    told.setenv("PIP_INDEX_URL", index)
    ready, own = tmp_path / "ready", tmp_path / "own"
    made = Installer(ready).venv("toy", toy_lock).folder
    assert Installer(own, may_install=False, ready=ready).venv("toy", toy_lock).folder == made
    assert not own.exists()
    (made / ".complete").unlink()
    before = sorted(made.rglob("*"))
    with pytest.raises(AgentUnavailable, match="installed on this host"):
        Installer(own, may_install=False, ready=ready).venv("toy", toy_lock)
    assert Installer(own, ready=ready).venv("toy", toy_lock).folder.parent == own
    assert sorted(made.rglob("*")) == before
