"""Installs a Python with packages that runs from any mount point, for frameworks that run inside."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from app.agents.installation import indexes, libraries
from app.agents.installation.once import step, try_out, uv
from app.errors import AgentNotSetUp, AgentUnavailable

RECIPE = "python-1"  # increased when the code below makes another bundle of the same lock
_HERE = Path(__file__).parent
_LEFT_OUT = shutil.ignore_patterns(
    *(
        "__pycache__",
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idlelib",
        "turtledemo",
        "tkinter",
        "ensurepip",
    ),
    *("config-*", "*.a", "_tkinter*", "_test*", "_ctypes_test*", "xxlimited*", "turtle.py"),
)
_ABOUT = (
    "import json, os, sys, sysconfig;"
    "exe = os.path.realpath(getattr(sys, '_base_executable', None) or sys.executable);"
    "print(json.dumps({'version': '%d.%d' % sys.version_info[:2], 'stdlib': sysconfig.get_path('stdlib'),"
    "'executable': exe, 'libraries': sysconfig.get_config_var('LIBDIR') or ''}))"
)


@dataclass(frozen=True, slots=True)
class VenvRequest:
    lock: Path
    version: str  # such as 3.12
    first_use: Sequence[str] = ()
    first_use_env: Mapping[str, str] = field(default_factory=dict)


def fill(place: Path, name: str, wanted: VenvRequest, *, beside: Callable[[Path], None] = lambda _: None) -> None:
    """Makes the bundle in `place`. beside: gets its site-packages and adds files whose requirements count, too.

    Raises: AgentUnavailable.
    """
    base = interpreter(name, wanted.version)
    _copy(base, place)
    programs = libraries.elf_files(place / "python")
    libraries.carry(name, programs, place / "lib", search=[base.libraries])
    python = str(place / "bin" / "python3")
    site = Path(step(name, [python, "-c", "import site; print(site.getsitepackages()[0])"]).strip())
    if not site.is_relative_to(place):
        raise AgentUnavailable(f"agent {name}: expected {base.executable} to run from {place}; found it uses {site}")
    # A lock lists all packages that are needed: other dependencies were left out of it on purpose.
    install = [uv(name), "pip", "install", "--quiet", "--require-hashes", "--no-deps", "--link-mode", "copy"]
    step(
        name,
        [*install, "--python", str(base.executable), "--target", str(site), "-r", str(wanted.lock)],
        env=indexes.environment(),
    )
    beside(site)
    libraries.carry(name, libraries.elf_files(site), place / "lib")
    _compile(python, base, place)
    libraries.needs(name, [place], [place / "lib"]).write(place)
    open_for_all(place)
    if wanted.first_use:
        try_out(name, [python, *wanted.first_use], f"{place}/bin", wanted.first_use_env)


@dataclass(frozen=True, slots=True)
class BasePython:
    """An interpreter of this host."""

    version: str
    executable: Path
    stdlib: Path
    libraries: Path

    @classmethod
    def of(cls, program: str) -> BasePython | None:
        """Returns the interpreter; None: it does not run."""
        try:
            result = subprocess.run(  # noqa: S603  an interpreter of this host
                [program, "-I", "-c", _ABOUT],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=True,
                timeout=60,
            )
            details = json.loads(result.stdout)
        except (OSError, ValueError, subprocess.SubprocessError):
            return None
        return cls(details["version"], Path(details["executable"]), Path(details["stdlib"]), Path(details["libraries"]))


def interpreter(name: str, version: str) -> BasePython:
    """Returns one of that version: ours, uv's, pyenv's or from PATH. Raises: AgentNotSetUp."""
    for program in _candidates(name, version):
        if (base := BasePython.of(program)) is not None and base.version == version:
            return base
    raise AgentNotSetUp(
        f"agent {name}: expected a Python {version} on this host, from which its bundle is made; found none by uv, "
        f"pyenv or PATH; install one, for example with `uv python install {version}`"
    )


def _candidates(name: str, version: str) -> Iterator[str]:
    if version == "{}.{}".format(*sys.version_info[:2]):
        yield sys.executable
    find = [uv(name), "python", "find", "--no-project", "--no-python-downloads", version]
    result = subprocess.run(find, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)  # noqa: S603
    if result.returncode == 0:
        yield result.stdout.strip()
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from map(str, sorted(pyenv.glob(f"versions/{version}*/bin/python{version}")))
    if program := shutil.which(f"python{version}"):
        yield program


def _copy(base: BasePython, place: Path) -> None:
    """Copies the interpreter and its library, without parts that no framework uses, and adds our launcher."""
    root = place / "python"
    program, stdlib = root / "bin" / f"python{base.version}", root / "lib" / f"python{base.version}"
    program.parent.mkdir(parents=True)
    shutil.copyfile(base.executable, program)
    program.chmod(0o755)
    shutil.copytree(base.stdlib, stdlib, ignore=_LEFT_OUT, ignore_dangling_symlinks=True)
    customized = stdlib / "sitecustomize.py"
    customized.unlink(missing_ok=True)
    shutil.copyfile(_HERE / "python_start.py", customized)
    launcher = place / "bin" / "python3"
    launcher.parent.mkdir()
    launcher.write_text((_HERE / "python_launcher.sh").read_text().replace("@VERSION@", base.version))
    launcher.chmod(0o755)


def _compile(python: str, base: BasePython, place: Path) -> None:
    """Makes byte code that is used without a check of its source: file times need not survive a copy.

    A file that cannot be compiled (a template, another version's) is skipped.
    """
    how = [python, "-m", "compileall", "-q", "-f", "-j", "0", "--invalidation-mode", "unchecked-hash"]
    with suppress(AgentUnavailable):
        step("byte code", [*how, str(place)])


def open_for_all(place: Path) -> None:
    """Makes it readable for every user inside, writable only for the owner."""
    for folder, _, names in os.walk(place):
        os.chmod(folder, 0o755)
        for name in names:
            file = Path(folder, name)
            if not file.is_symlink():
                file.chmod(0o755 if file.stat().st_mode & 0o111 else 0o644)
