"""The environment of a row's task: its image, and what the row says below `megaflow`."""

from __future__ import annotations

from typing import Any

from app.datasets.base import Reading
from app.datasets.policies import KEY, policies_of
from app.datasets.rows.columns import RowColumns
from app.models.spec import Build, EnvironmentKind, EnvironmentSpec, Network, Reach, Resources

TESTBED = "/testbed"
"""Where SWE-bench's images, and those made after them, have the repository."""
CONDA = "source /opt/miniconda3/bin/activate\nconda activate testbed"
"""What makes the Python of those images the shell's. Source: swebench 4.1.0, harness/test_spec/python.py."""
_CONDA_PATH = (
    "/opt/miniconda3/envs/testbed/bin:/opt/miniconda3/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)
NOT_TESTS = (".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")
"""Ends of files that a test command does not name. Source: swebench 4.1.0, NON_TEST_EXTS; the forks have the same."""


def image_by_id(owner: str, instance_id: str, separator: str = "_1776_") -> str:
    """The image that SWE-bench's harness names after a task. Source: swebench 4.1.0, TestSpec.instance_image_key."""
    return f"docker.io/{owner}/sweb.eval.x86_64.{instance_id.replace('__', separator).lower()}:latest"


def image_of(columns: RowColumns, *named: str, owner: str) -> str:
    """The image that one of these columns names, else the harness's own name for it."""
    found = next((columns.text(column) for column in named if columns.given(column)), None)
    return found or image_by_id(owner, columns.name())


def environment_of(
    columns: RowColumns,
    reading: Reading,
    *,
    image: str | None = None,
    build: Build | None = None,
    workdir: str = TESTBED,
    setup: tuple[str, ...] = (),
    commands: str = "",
) -> EnvironmentSpec:
    """One container, with the row's own `setup` after the dataset's.

    commands: those of the tests; where they activate the conda environment, the agent's commands find its Python too.
    """
    ours = policies_of(columns.values.get(KEY), columns.place, without=("reward_range",))
    said: dict[str, Any] = ours.environment()
    said["setup"] = (*setup, *ours.setup)
    if said.get("network") not in (None, Network.MODEL_ONLY):  # else none: no dataset's harness says one
        said["grading"] = Reach(network=said["network"], allowed_hosts=ours.allowed_hosts)
    path = {"PATH": _CONDA_PATH} if "conda activate testbed" in commands else {}
    return EnvironmentSpec(
        kind=reading.kind,
        image=image,
        build=build,
        workdir=workdir,
        env=path if reading.kind is EnvironmentKind.DOCKER else {},
        resources=Resources(disk_bytes=ours.disk_bytes),
        **said,
    )


def script(*parts: str) -> str:
    """The parts that say anything, one below the other."""
    return "\n".join(part for part in parts if part.strip())
