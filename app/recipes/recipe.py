"""Defines recipes: the parts of an environment's image, from a file or derived from a dataset's own harness."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from app.datasets.base import DescribeRow
from app.errors import SpecInvalid, explained
from app.models.spec import AgentTask, JudgeName, PlainText, TestsGoal, Wire

DEBIAN = {"3.9": "bullseye", "3.11": "bookworm", "3.13": "trixie"}
"""Debian release by its version of Python."""
_FILE = "requirements.txt"
"""swebench's marker for the repository's own requirements files."""
_Texts = tuple[PlainText, ...]


class Recipe(Wire):
    """Recipe with exactly one of `repository` (path or URL) and `release` (`package==version`; the package alone: its
    newest release from before the task to which the task's patches apply)."""

    task: str = ""  # DATASET:TASK of the image; a file's values override those derived from it
    image: str = ""  # the image's name; with a task, by the dataset's rule
    repository: str = ""
    release: Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*(==[A-Za-z0-9.!+_-]+)?)?$")] = ""
    patch: str = ""  # patch from the release to the task's base commit, where they differ
    commit: Annotated[str, Field(pattern=r"^([0-9a-f]{40})?$")] = ""
    python: Annotated[str, Field(pattern=r"^3\.\d{1,2}$")] = "3.11"  # or the next newer version that Debian has
    packages: _Texts = ()  # pip requirements, each must have a wheel
    requirements: _Texts = ()  # requirements files in the source; lines without a wheel are left out and listed
    install: _Texts = ("python -m pip install -e .",)  # in /testbed, without a network

    @property
    def image_python(self) -> str:
        """Returns the image's Python version. Raises: SpecInvalid: Debian has none that is new enough."""
        minor = int(self.python.partition(".")[2])
        version = next((one for one in DEBIAN if int(one.partition(".")[2]) >= minor), None)
        if version is None:
            raise SpecInvalid(f"expected a Python of Debian, one of {', '.join(DEBIAN)}; found {self.python}")
        return version

    def checked(self) -> Recipe:
        """Returns the recipe itself. Raises: SpecInvalid: it is incomplete or contradictory."""
        if bool(self.repository) == bool(self.release):
            raise SpecInvalid("expected one of `repository` and `release` in a recipe; found both, or neither")
        if self.repository and not self.commit:
            raise SpecInvalid("expected `commit`, 40 hex digits, beside `repository`; found none")
        if self.patch and not self.release:
            raise SpecInvalid("expected `release` beside `patch`; found none: a repository's commit stays as it is")
        if not self.image:
            raise SpecInvalid("expected `image` in a recipe without a `task`: what to call it; found none")
        return self


def read(file: Path) -> dict[str, Any]:
    """Reads a recipe's file. Raises: SpecInvalid."""
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
        Recipe.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "(all of it)"
        received = f"; found {str(first['input'])[:120]!r}" if first["loc"] else ""
        raise SpecInvalid(f"{file}: field {field}: {explained(first)}{received}") from error
    except (OSError, ValueError) as error:
        raise SpecInvalid(f"{file}: expected a recipe in TOML (docs/howto/datasets.md); found {error}") from error
    return values


def derived(task: AgentTask, describe: DescribeRow, repository: str, said: Mapping[str, Any]) -> Recipe:
    """Derives a row's recipe from its dataset's own harness; values in `said` override derived ones.

    repository: path or URL of the row's repository; empty: the source release of its name.

    Raises: SpecInvalid: the harness gives no recipe, and `said` is incomplete; UnknownName, GradingFailed.
    """
    goal = task.goal
    if not isinstance(goal, TestsGoal) or task.environment.image is None:
        raise SpecInvalid(f"{task.name}: expected a row with a base commit and an image's name; found another task")
    values: dict[str, Any] = {"image": task.environment.image, "commit": goal.base_commit}
    if goal.judge is JudgeName.SWEBENCH_4:
        row = {**goal.row, "base_commit": goal.base_commit, "test_patch": goal.test_patch}
        values |= _of_harness(task.name, describe(goal.judge, row))
    elif "install" not in said:
        raise SpecInvalid(f"{task.name}: only rows of SWE-bench tell how to install them; say it in a recipe's file")
    name = str(goal.row.get("repo", "")).rpartition("/")[2]
    values |= {"repository": repository} if repository else {"release": name}
    if said.get("repository") or said.get("release"):
        values = {key: value for key, value in values.items() if key not in ("repository", "release")}
    return Recipe.model_validate({**values, **said}).checked()


def _of_harness(name: str, answer: Mapping[str, Any]) -> dict[str, Any]:
    packages = str(answer["packages"]).split("\n")
    if any(one.endswith((".yml", ".yaml")) for one in packages):
        raise SpecInvalid(f"{name}: its harness installs a file of conda's; name the packages in a recipe's file")
    files = str(answer["requirements"]).split("\n") if _FILE in packages else []
    return {
        "python": answer["python"] or "3.11",
        "packages": [one for one in packages if one and one != _FILE],
        "requirements": files,
        "install": [one for one in (answer["pre_install"], answer["install"]) if one],
    }
