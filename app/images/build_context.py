"""The recipe in a build context: found, and replaced by another without a trace in the image."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

from docker.utils.build import PatternMatcher

from app.errors import ImageBuildFailed

_IGNORE = ".dockerignore"


def recipe_file(folder: Path, name: str) -> Path:
    """Raises: ImageBuildFailed: there is no such file in the context."""
    file = (folder / name).resolve()
    if not file.is_relative_to(folder.resolve()) or not file.is_file():
        found = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
        raise ImageBuildFailed(f"expected {name} in the build context, found {found}.")
    return file


def put_recipe(folder: Path, name: str, content: bytes) -> str:
    """Put a recipe into a context in place of `name`, and say what it is called there.

    `name` stays as it is, since a COPY may take it. The builder takes the new one out of the context before it begins,
    as its `.dockerignore` says; to one that a context has itself a line is added.
    """
    ignoring = folder / _IGNORE
    known = ignoring.is_file() and not ignoring.is_symlink()
    if known and _ignored(ignoring, name):  # the builder takes it out: nobody sees what is in it
        recipe_file(folder, name).write_bytes(content)
        return name
    beside = f".dockerfile.{uuid4().hex}"
    (folder / beside).write_bytes(content)
    if known:
        with ignoring.open("ab") as file:
            file.write(f"\n{beside}\n".encode())
    elif not ignoring.exists() and not ignoring.is_symlink():
        ignoring.write_text(f"{_IGNORE}\n{beside}\n")
    return beside


def _ignored(ignoring: Path, name: str) -> bool:
    lines = (line.strip() for line in ignoring.read_text(errors="replace").splitlines())
    patterns = [line for line in lines if line and not line.startswith("#")]
    return bool(PatternMatcher(patterns).matches(name))  # type: ignore[arg-type]  # it wants text, whatever it says
