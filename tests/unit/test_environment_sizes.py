"""What programs inside are told of their processors."""

from __future__ import annotations

import pytest

from app.environments.isolation.sizes import size_variables
from app.models.spec import Resources


@pytest.mark.parametrize(("cpus", "told"), [(0.5, "1"), (1.0, "1"), (1.5, "2"), (8.0, "8"), (32.0, "16")])
def test_processors_are_told_rounded_up(cpus: float, told: str) -> None:
    found = size_variables(Resources(cpus=cpus).sized(3, Resources()), host_cpus=16)
    assert found.pop("MAKEFLAGS") == f"-j{told}"
    assert set(found.values()) == {told}
    assert {"OMP_NUM_THREADS", "PYTEST_XDIST_AUTO_NUM_WORKERS"} <= found.keys()
