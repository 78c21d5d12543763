"""Makes virtual environments for what runs on the worker: frameworks, grading libraries."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from app.agents.framework import FrameworkBundle
from app.agents.installation import indexes
from app.agents.installation.once import ToolStore, digest_of, step, try_out, uv


def bundle(
    tool_store: ToolStore,
    name: str,
    lock: Path,
    first_use: Sequence[str],
    first_use_env: Mapping[str, str],
    *,
    flags: Sequence[str] = (),
) -> FrameworkBundle:
    """See `Installer.venv`. Compiled, whatever PYTHONDONTWRITEBYTECODE says: or every start would compile it.

    flags: further ones of `uv pip install`.
    """

    def make(place: Path) -> None:
        program, python = uv(name), str(place / "bin" / "python")
        create = [program, "venv", "--quiet", "--allow-existing", "--no-python-downloads", "--python", sys.executable]
        step(name, [*create, str(place)])
        install = [program, "pip", "install", "--quiet", "--compile-bytecode", "--require-hashes", "--python", python]
        step(name, [*install, *flags, "-r", str(lock)], env=indexes.environment())
        if first_use:
            try_out(name, [python, *first_use], f"{place}/bin", first_use_env)

    # The interpreter is a link into the base Python: an upgrade of the host may have taken it away, and a container
    # that shares the folder has another.
    base = "{} {}.{}".format(Path(sys.executable).resolve(), *sys.version_info[:2])
    place = tool_store.ensure(
        name, digest_of(name, [lock, base]), make, fit=lambda it: (it / "bin" / "python").exists()
    )
    return FrameworkBundle(name, place)
