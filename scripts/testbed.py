"""The tests' surroundings: an engine and a base image for as long as pytest runs. `scripts/test` is its door."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from app.errors import MegaFlowError
from app.settings import Settings
from app.stack import base_image, engine


def main(arguments: Sequence[str]) -> int:
    """Run pytest with `arguments`; returns its exit code, or 69 when CI lacks what it promised."""
    with tempfile.TemporaryDirectory(prefix="mf-") as folder:
        settings = Settings(home=Path(folder) / "h")
        try:
            if not _prepare(settings) and _in_ci():
                return 69
            return subprocess.run([sys.executable, "-m", "pytest", *arguments]).returncode  # noqa: S603 (this interpreter)
        except KeyboardInterrupt:
            return 130
        finally:
            if engine.stop_engine(settings):
                _say("stopped the Docker engine that was started for the tests")


def _prepare(settings: Settings) -> bool:
    found = engine.ensure_engine(settings, may_install=True, report=_say)
    if not found.available:
        _say(f"no Docker engine: {found.why}; try: {found.mend}")
        return False
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
