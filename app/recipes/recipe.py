"""A recipe: what an environment's image is made of, as a file says it or as a dataset's own harness does."""

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
"""The release of Debian that has this Python."""
_FILE = "requirements.txt"
"""swebench's word for the repository's own files of requirements."""
_Texts = tuple[PlainText, ...]


class Recipe(Wire):
    """One of `repository` (a path or URL) and `release` (`package==version`; the package alone: its newest release of
    before the task that the task's patches fit) is given."""

    task: str = ""  # DATASET:TASK, which the image is for; a file's own words go before what is derived from it
    image: str = ""  # what the image is called; with a task, by the dataset's rule
    repository: str = ""
    release: Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*(==[A-Za-z0-9.!+_-]+)?)?$")] = ""
    patch: str = ""  # what makes the release the task's base commit, where they differ
    commit: Annotated[str, Field(pattern=r"^([0-9a-f]{40})?$")] = ""
    python: Annotated[str, Field(pattern=r"^3\.\d{1,2}$")] = "3.11"  # the next newer one that Debian has
    packages: _Texts = ()  # pip's requirements, each of which must be there as a wheel
    requirements: _Texts = ()  # files of requirements in the source; what has no wheel is left out and named
    install: _Texts = ("python -m pip install -e .",)  # in /testbed, without a network

    @property
    def image_python(self) -> str:
        """The version that it gets. Raises: SpecInvalid: Debian has none as new."""
        asked = int(self.python.partition(".")[2])
        found = next((one for one in DEBIAN if int(one.partition(".")[2]) >= asked), None)
        if found is None:
            raise SpecInvalid(f"expected a Python of Debian, one of {', '.join(DEBIAN)}; found {self.python}")
        return found

    def checked(self) -> Recipe:
        """Itself. Raises: SpecInvalid: it does not say enough."""
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
    """What a recipe's file says. Raises: SpecInvalid."""
    try:
        said = tomllib.loads(file.read_text(encoding="utf-8"))
        Recipe.model_validate(said)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "(all of it)"
        found = f"; found {str(first['input'])[:120]!r}" if first["loc"] else ""
        raise SpecInvalid(f"{file}: field {field}: {explained(first)}{found}") from error
    except (OSError, ValueError) as error:
        raise SpecInvalid(f"{file}: expected a recipe in TOML (docs/howto/datasets.md); found {error}") from error
    return said


def derived(task: AgentTask, describe: DescribeRow, repository: str, said: Mapping[str, Any]) -> Recipe:
    """The recipe of a row by its dataset's own harness; what `said` has goes before it.

    repository: where the row's repository lies; empty: the source release of its name.

    Raises: SpecInvalid: the harness tells no recipe, and `said` is not enough; UnknownName, GradingFailed.
    """
    goal = task.goal
    if not isinstance(goal, TestsGoal) or task.environment.image is None:
        raise SpecInvalid(f"{task.name}: expected a row with a base commit and an image's name; found another task")
    told: dict[str, Any] = {"image": task.environment.image, "commit": goal.base_commit}
    if goal.judge is JudgeName.SWEBENCH_4:
        row = {**goal.row, "base_commit": goal.base_commit, "test_patch": goal.test_patch}
        told |= _of_harness(task.name, describe(goal.judge, row))
    elif "install" not in said:
        raise SpecInvalid(f"{task.name}: only rows of SWE-bench tell how to install them; say it in a recipe's file")
    name = str(goal.row.get("repo", "")).rpartition("/")[2]
    told |= {"repository": repository} if repository else {"release": name}
    if said.get("repository") or said.get("release"):
        told = {key: value for key, value in told.items() if key not in ("repository", "release")}
    return Recipe.model_validate({**told, **said}).checked()


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
