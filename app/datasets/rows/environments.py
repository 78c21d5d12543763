"""Builds the environment of a row's task: its image, and the row's settings below `megaflow`."""

from __future__ import annotations

from typing import Any

from app.datasets.base import Reading
from app.datasets.policies import KEY, policies_of
from app.datasets.rows.columns import RowColumns
from app.models.spec import Build, EnvironmentKind, EnvironmentSpec, Network, Reach, Resources

TESTBED = "/testbed"
"""Folder of the repository in SWE-bench's images, and in those modelled on them."""
CONDA = "source /opt/miniconda3/bin/activate\nconda activate testbed"
"""Commands that activate the Python of those images in a shell. Source: swebench 4.1.0, harness/test_spec/python.py."""
_CONDA_PATH = (
    "/opt/miniconda3/envs/testbed/bin:/opt/miniconda3/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)
NOT_TESTS = (".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")
"""File endings that a test command does not name. Source: swebench 4.1.0, NON_TEST_EXTS; the forks have the same."""


def image_by_id(owner: str, instance_id: str, separator: str = "_1776_") -> str:
    """Returns SWE-bench's image name for a task. Source: swebench 4.1.0, TestSpec.instance_image_key."""
    return f"docker.io/{owner}/sweb.eval.x86_64.{instance_id.replace('__', separator).lower()}:latest"


def image_of(columns: RowColumns, *named: str, owner: str) -> str:
    """Returns the image that one of these columns names, otherwise the harness's own name for it."""
    image = next((columns.text(column) for column in named if columns.given(column)), None)
    return image or image_by_id(owner, columns.name())


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
    """Returns an environment of one container, with the row's own `setup` after the dataset's.

    commands: those of the tests; if they activate the conda environment, the agent's commands find its Python, too.
    """
    policies = policies_of(columns.values.get(KEY), columns.place, without=("reward_range",))
    policy_fields: dict[str, Any] = policies.environment()
    policy_fields["setup"] = (*setup, *policies.setup)
    if policy_fields.get("network") not in (None, Network.MODEL_ONLY):  # otherwise none: no dataset's harness sets one
        policy_fields["grading"] = Reach(network=policy_fields["network"], allowed_hosts=policies.allowed_hosts)
    path = {"PATH": _CONDA_PATH} if "conda activate testbed" in commands else {}
    return EnvironmentSpec(
        kind=reading.kind,
        image=image,
        build=build,
        workdir=workdir,
        env=path if reading.kind is EnvironmentKind.DOCKER else {},
        resources=Resources(disk_bytes=policies.disk_bytes),
        **policy_fields,
    )


def script(*parts: str) -> str:
    """Joins the parts that are not empty, one per line."""
    return "\n".join(part for part in parts if part.strip())
