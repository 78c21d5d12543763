"""Harbor's verifier in an environment of its own: which image, which tests, what is handed over.

The keys are those of harbor 0.25.0 (models/task/config.py, verifier_mode.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from app.datasets.base import Reading
from app.errors import DatasetInvalid
from app.models.spec import Bundle, EnvironmentSpec, Network, ScriptGoal
from tests.unit.dataset_adapters import load
from tests.unit.task_folders import harbor

BUNDLE = Bundle(sha256="0" * 64, size_bytes=1)
IMAGE = '[environment]\ndocker_image = "example.org/task:1"\nmemory_mb = 512\nallow_internet = false\n'


def goal_of(folder: Path, toml: str, **more: str) -> ScriptGoal:
    (read,) = load(str(harbor(folder / "task", toml, more)), Reading(pack=lambda folder: BUNDLE))
    assert isinstance(read.goal, ScriptGoal)
    return read.goal


def apart(goal: ScriptGoal) -> EnvironmentSpec:
    assert goal.environment is not None
    return goal.environment


def test_without_a_word_the_tests_run_where_the_agent_worked(tmp_path: Path) -> None:
    goal = goal_of(tmp_path, 'artifacts = ["/app/out"]\n' + IMAGE)
    assert (goal.environment, goal.artifacts) == (None, ())


def test_separate_is_a_fresh_copy_of_the_tasks_environment(tmp_path: Path) -> None:
    toml = 'artifacts = ["/app/out", {source = "/app/log", destination = "log"}]\n' + IMAGE
    goal = goal_of(tmp_path, toml + '[verifier]\nenvironment_mode = "separate"\n')
    spec = apart(goal)
    assert (spec.image, spec.network, spec.resources.memory_bytes) == ("example.org/task:1", Network.NONE, 512 << 20)
    assert goal.artifacts == ("/logs/artifacts", "/app/out", "/app/log")
    assert not goal.brings_tests


def test_an_environment_of_its_own_means_separate_and_its_image_has_the_tests(tmp_path: Path) -> None:
    toml = IMAGE + '[verifier.environment]\ndocker_image = "example.org/judge:1"\ncpus = 2\n'
    goal = goal_of(tmp_path, toml)
    spec = apart(goal)
    assert (spec.image, spec.resources.cpus, goal.brings_tests) == ("example.org/judge:1", 2.0, True)
    assert spec.network is Network.OPEN, "the format's default, of a table of its own"


def test_a_recipe_beside_the_tests_builds_the_verifier(tmp_path: Path) -> None:
    files = {"tests/Dockerfile": "FROM x\nWORKDIR /judge\n"}
    goal = goal_of(tmp_path, IMAGE + '[verifier]\nenvironment_mode = "separate"\n', **files)
    spec = apart(goal)
    assert (spec.image, spec.build is not None, spec.workdir, goal.brings_tests) == (None, True, "/judge", True)


COMPOSE = "services: {main: {image: a, working_dir: /srv}, shop: {image: b}}"


@pytest.mark.parametrize(
    ("toml", "files", "image", "several"),
    [
        ('[verifier.environment]\ndocker_image = "judge"\n', {}, "judge", False),
        ('[verifier]\nenvironment_mode = "separate"\n', {"tests/Dockerfile": "FROM x\n"}, None, False),
        ('[verifier]\nenvironment_mode = "separate"\n', {}, None, True),
    ],
    ids=["image", "recipe", "copy"],
)
def test_an_agent_in_several_containers_is_judged_apart_in_one_or_in_a_copy_of_all(
    tmp_path: Path, toml: str, files: dict[str, str], image: str | None, *, several: bool
) -> None:
    goal = goal_of(tmp_path, toml, **{"environment/compose.yaml": COMPOSE}, **files)
    spec = apart(goal)
    assert (spec.image, spec.compose is not None, goal.brings_tests) == (image, several, not several)
    assert not several or spec.workdir == "/srv"


@pytest.mark.parametrize(
    ("toml", "files", "said"),
    [
        (
            '[verifier]\nenvironment_mode = "shared"\n[verifier.environment]\ndocker_image = "x"\n',
            {},
            "environment_mode",
        ),
        ('[verifier]\nenvironment_mode = "separate"\n', {"tests/docker-compose.yaml": "services: {}"}, "in one"),
        ('[verifier]\nenvironment_mode = "separate"\nservice = "main"\n', {}, "service"),
        (
            "[verifier.environment]\ncpus = 2\n",
            {"environment/compose.yaml": COMPOSE},
            "verifier.environment.docker_image",
        ),
        ('[[verifier.collect]]\nservice = "main"\ncommand = "true"\n', {}, "verifier.collect"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    tmp_path: Path, toml: str, files: dict[str, str], said: str
) -> None:
    with pytest.raises(DatasetInvalid, match=said):
        goal_of(tmp_path, IMAGE + toml, **files)


@pytest.mark.parametrize("source", ["out", "/app/../etc/shadow"])
def test_an_artifact_is_an_absolute_path(tmp_path: Path, source: str) -> None:
    toml = f'artifacts = ["{source}"]\n{IMAGE}[verifier]\nenvironment_mode = "separate"\n'
    with pytest.raises(DatasetInvalid, match="artifacts: expected absolute paths"):
        goal_of(tmp_path, toml)
