"""`megaflow env build`: builds the image of a recipe or a dataset's row, validates it and prints its cost."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from app.cli.orderly import ending_in_order
from app.cli.show import Json, as_json, console, say
from app.cli.tables import Table
from app.cli.validate import validated
from app.client import MegaFlow
from app.datasets.base import Reading
from app.datasets.selection import Selection
from app.datasets.source import open_dataset
from app.errors import MegaFlowError, SpecInvalid, UnknownName
from app.evaluation import Submission, reading_of
from app.models.spec import PatchSolution, TestsGoal
from app.models.validation import Validation, ValidationState
from app.recipes import recipe
from app.recipes.image import BuiltImage, build
from app.settings import Settings, load
from app.stack.base_image import ensure_base_image
from app.stack.home import prepare

_NOT_VALID = 1
"""Exit code when an environment was not built, or is not valid."""

env = typer.Typer(help="Environments: build the images of tasks from sources.", no_args_is_help=True)
env.callback()(lambda: None)  # a group, although it has one command


@dataclass(frozen=True, slots=True)
class BuiltEnvironment:
    """Result for one argument: its task, the image or the error, and the validation."""

    asked: str
    dataset: str = ""
    task: str = ""
    image: BuiltImage | None = None
    error: str = ""
    seconds: float = 0.0  # spent on it, built or not
    validation: Validation | None = None

    @property
    def state(self) -> str:
        return self.validation.state.value if self.validation else "built" if self.image else "not built"

    @property
    def is_usable(self) -> bool:
        return self.image is not None and (not self.task or self.state == ValidationState.VALID)


@env.command(name="build")
def build_environments(
    what: Annotated[list[str], typer.Argument(metavar="FILE|ROW...", help="A recipe in TOML, or DATASET:TASK.")],
    repository: Annotated[
        str, typer.Option(metavar="PATH|URL", help="Repository of the rows; default: a source release.")
    ] = "",
    times: Annotated[int, typer.Option(min=1, max=100, help="Runs of oracle, nop and cheat on each task.")] = 3,
    json: Json = False,
) -> None:
    """Build the images of tasks from a repository or a source release, validate them, and print the cost.

    A release is used where the task's patches apply to it. Exit code 1: one was not built, or is not valid.
    """
    settings = load()
    prepare(settings)
    with ending_in_order(), reading_of(settings, store=False) as reading:
        environments = [_timed(one, repository, reading, settings) for one in what]
    datasets: dict[str, list[str]] = defaultdict(list)
    for one in environments:
        if one.image and one.task:
            datasets[one.dataset].append(one.task)
    states: dict[tuple[str, str], Validation] = {}
    if datasets:
        with MegaFlow(settings) as flow:
            for dataset, names in datasets.items():
                submission = Submission(
                    dataset=dataset, agent="oracle", replicas=times, selection=Selection(only=tuple(names))
                )
                states |= {(dataset, one.task): one for one in validated(flow, submission)[0]}
    environments = [replace(one, validation=states.get((one.dataset, one.task))) for one in environments]
    _print(environments, json=json)
    if not all(one.is_usable for one in environments):
        raise typer.Exit(_NOT_VALID)


def _timed(asked: str, repository: str, reading: Reading, settings: Settings) -> BuiltEnvironment:
    begun = time.monotonic()
    environment = _built(asked, repository, reading, settings)
    return replace(environment, seconds=round(time.monotonic() - begun, 1))


def _built(asked: str, repository: str, reading: Reading, settings: Settings) -> BuiltEnvironment:
    """Builds one environment. A failure is printed and returned; the others go on."""
    fields: dict[str, Any] = {}
    named = asked
    dataset = task = ""
    try:
        file = Path(asked).expanduser()
        if file.suffix == ".toml" and not file.is_file():
            raise SpecInvalid(f"expected a recipe's file or DATASET:TASK; found no file {asked}")
        if file.is_file():
            fields = recipe.read(file)
            named = fields.pop("task", "")
        if not named:
            return BuiltEnvironment(asked, image=_image(recipe.Recipe.model_validate(fields).checked(), settings))
        dataset, _, task = named.rpartition(":")
        opened = open_dataset(dataset, reading)
        entry = next((one for one in opened.entries() if one.name == task), None)
        if entry is None:
            raise UnknownName.of("task", task, [one.name for one in opened.entries()][:20])
        [row] = opened.tasks([task])
        goal, solution = row.goal, row.solution
        patches = {
            "the gold patch": solution.patch if isinstance(solution, PatchSolution) else "",
            "the test patch": goal.test_patch if isinstance(goal, TestsGoal) else "",
        }
        full_recipe = recipe.derived(row, reading.describe, repository, fields)
        say(f"{asked}: building")
        image = _image(
            full_recipe, settings, patches={name: one for name, one in patches.items() if one}, before=entry.created_at
        )
        return BuiltEnvironment(asked, dataset, task, image)
    except MegaFlowError as error:
        say(f"{asked}: not built: {error}")
        return BuiltEnvironment(asked, dataset, task, error=str(error))


def _image(made: recipe.Recipe, settings: Settings, **more: Any) -> BuiltImage:
    def base(ours: Settings, release: str) -> None:
        ensure_base_image(ours, release=release, report=say)

    return build(made, settings, base=base, **more)


def _print(found: Sequence[BuiltEnvironment], *, json: bool) -> None:
    if json:
        as_json({"environments": found, "built": cost_of(found), "kept": cost_of(found, kept=True)})
        return
    right = ["seconds", "fetched MB", "image MB"]
    table = Table("environment", "state", "source", "python", *right, "image", "reason", right=right, keys=1)
    for one in found:
        image, why = one.image, one.validation.reason if one.validation else one.error
        cells = (*((image.source, image.python) if image else ("-", "-")), f"{one.seconds:.0f}")
        sizes = (f"{image.fetched_bytes / 1e6:.0f}", f"{image.image_bytes / 1e6:.0f}") if image else ("-", "-")
        identity = image.image_id.removeprefix("sha256:")[:12] if image else "-"
        table.add_row(one.task or one.asked, one.state, *cells, *sizes, identity, " ".join(why.split())[:300])
    console.print(table)
    for image in (one.image for one in found):
        if image and image.left_out:
            say(f"{image.image}: without {', '.join(image.left_out)}: there is no wheel")
    for word, cost in (("built", cost_of(found)), ("kept", cost_of(found, kept=True))):
        say(f"{cost['count']} {word}: {cost['seconds_each']:.0f} s and {cost['image_bytes_each'] / 1e6:.0f} MB each")


def cost_of(found: Sequence[BuiltEnvironment], *, kept: bool = False) -> dict[str, float]:
    """Returns the cost per built environment (kept: per usable one). Failed builds' time is divided among them."""
    images = [one.image for one in found if one.image]
    count = sum(one.is_usable for one in found) if kept else len(images)
    return {
        "count": count,
        "seconds_each": round(sum(one.seconds for one in found) / max(1, count), 1),
        "fetched_bytes_each": sum(one.fetched_bytes for one in images) // max(1, count),
        "image_bytes_each": sum(one.image_bytes for one in images) // max(1, count),
    }
