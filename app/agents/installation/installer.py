"""Defines the installer that adapters call; it makes four kinds of bundles."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from app.agents.framework import FrameworkBundle
from app.agents.installation import checkouts, indexes, node, pythons
from app.agents.installation.once import ToolStore, digest_of, step, try_out, uv


class Installer(ToolStore):
    """Bundles of this host, in `folder`, each in `NAME-DIGEST`; the digest covers everything that it is made from.

    If several processes need a bundle at once, one installs and the others wait; an installation that a kill left
    incomplete is repeated. A finished bundle never changes, so a changed lock file gives a new folder. Without
    `may_install` nothing is made: a missing bundle raises AgentUnavailable at once (for preparing ahead). `ready` is a
    second folder of bundles, read-only: the image's own.

    In each method `name` is the bundle's (also in `EnvironmentSpec.tools`), and `first_use` are arguments for its
    interpreter, run once at the end with `first_use_env` and a temporary home folder, and no other variables of
    MegaFlow: they prove that the framework starts. A lock file is the output of `uv pip compile --generate-hashes`.

    Each raises AgentUnavailable: a requirement is missing on this host, or the installation fails; with the message of
    the package index.
    """

    def venv(
        self,
        name: str,
        lock: Path,
        *,
        first_use: Sequence[str] = (),
        first_use_env: Mapping[str, str] | None = None,
    ) -> FrameworkBundle:
        """Makes a virtual environment of our own Python, for OUTSIDE. Programs are in TOOL/bin. Not mountable."""
        return self._venv(name, lock, first_use, first_use_env or {})

    def install_library(self, name: str, lock: Path) -> Path:
        """Makes a virtual environment of only the packages of `lock`, no other dependencies. Returns its interpreter.

        For a library of which a part is used, whose other parts would need hundreds of megabytes.
        """
        return self._venv(name, lock, (), {}, "--no-deps").folder / "bin" / "python"

    def _venv(
        self, name: str, lock: Path, first_use: Sequence[str], first_use_env: Mapping[str, str], *flags: str
    ) -> FrameworkBundle:
        """Compiles byte code even with PYTHONDONTWRITEBYTECODE: otherwise every start would compile it."""

        def make(place: Path) -> None:
            program, python, ours = uv(name), str(place / "bin" / "python"), sys.executable
            create = [program, "venv", "--quiet", "--allow-existing", "--no-python-downloads", "--python", ours]
            step(name, [*create, str(place)])
            install = [program, "pip", "install", "--quiet", "--compile-bytecode", "--require-hashes"]
            step(name, [*install, "--python", python, *flags, "-r", str(lock)], env=indexes.environment())
            if first_use:
                try_out(name, [python, *first_use], f"{place}/bin", first_use_env)

        # The interpreter is a link into the base Python: an upgrade of the host may have removed it, and a container
        # that shares the folder has another.
        base = "{} {}.{}".format(Path(sys.executable).resolve(), *sys.version_info[:2])
        digest = digest_of(name, [lock, base])
        return FrameworkBundle(name, self.ensure(name, digest, make, fit=lambda it: (it / "bin" / "python").exists()))

    def python(
        self,
        name: str,
        lock: Path,
        *,
        python: str = "3.12",
        first_use: Sequence[str] = (),
        first_use_env: Mapping[str, str] | None = None,
    ) -> FrameworkBundle:
        """Makes a Python that runs from any mount point, with the packages of `lock`: start TOOL/bin/python3.

        python: the version; an interpreter of it must be on this host (uv, pyenv, PATH). TOOL/bin/python3 is a launcher
        that hides the image's PYTHONPATH and the like from our interpreter and restores them for the commands that it
        starts; `sys.executable` is the launcher. Start console programs as `-m MODULE`.
        """
        venv_request = pythons.VenvRequest(lock, python, first_use, first_use_env or {})
        digest = digest_of(name, [lock, python, pythons.RECIPE])
        return FrameworkBundle(name, self.ensure(name, digest, lambda place: pythons.fill(place, name, venv_request)))

    def npm(
        self,
        name: str,
        package: Path,
        *,
        with_node: bool = True,
        first_use: Sequence[str] = (),
    ) -> FrameworkBundle:
        """Installs the packages of a folder with package.json and package-lock.json, in TOOL/node_modules.

        The lock has integrity hashes and no registry addresses (`npm install --package-lock-only
        --omit-lockfile-registry-resolved`). Install scripts do not run. with_node: adds TOOL/bin/node; otherwise
        `first_use` is a program with its arguments. Arguments that name a file of TOOL are made absolute.
        """
        return node.bundle(self, name, package, with_node, first_use)

    def checkout(
        self,
        name: str,
        source: str,
        lock: Path,
        *,
        python: str = "3.12",
        first_use: Sequence[str] = (),
        first_use_env: Mapping[str, str] | None = None,
    ) -> FrameworkBundle:
        """Installs a framework that is on no package index: its checkout in TOOL/source, importable, and `lock`'s
        packages.

        source: a URL for git with `@REF`: a tag or a whole commit, fetched once, without its `.git`. The rest is as
        with `python`.
        """
        venv_request = pythons.VenvRequest(lock, python, first_use, first_use_env or {})
        return checkouts.bundle(self, name, source, venv_request)
