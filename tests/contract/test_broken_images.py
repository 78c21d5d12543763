"""What an image itself would start is never started: where that is broken, an environment is what it always is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from app.environments.contract import EnvironmentProvider
from app.models.spec import EnvironmentSpec
from app.settings import Settings
from tests.contract.environment_fixtures import FIXTURES, Fixture, built_image, tags_of

BROKEN = 'ENTRYPOINT ["/nope"]\nCMD ["neither"]\nHEALTHCHECK CMD /nope\n'


@pytest.fixture(scope="module", params=[one.param() for one in FIXTURES if one.isolates])
def fixture(request: pytest.FixtureRequest) -> Fixture:
    """Those that have images."""
    found: Fixture = request.param
    return found


@pytest.fixture(scope="session")
def broken_image(base_image_tag: str) -> Iterator[str]:
    with built_image(f"FROM {base_image_tag}\n{BROKEN}") as tag:
        yield tag


def test_a_broken_entrypoint_of_the_image_is_nobodys_trouble(
    provider: EnvironmentProvider, spec: EnvironmentSpec, settings: Settings, broken_image: str
) -> None:
    wanted = spec.model_copy(update={"image": broken_image, "setup": ("echo prepared >/prepared",)})
    provider.prepare_image(wanted, timeout_s=60)
    environment = provider.create(wanted, tags_of(settings.installation), timeout_s=60)
    try:
        assert environment.run("cat /prepared; echo $GIVEN", timeout_s=20).stdout == b"prepared\nby the task\n"
        with closing(environment.shell()) as shell:
            assert shell.run("pwd", timeout_s=20).stdout == b"/testbed\n"
    finally:
        environment.destroy()
