"""What attempts pay for their environments: real ones by every path, as their records tell it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from app.artifacts.bundles import store_bundle
from app.client import MegaFlow
from app.environments.contract import UNSEEN
from app.environments.runtimes.oci import available
from app.errors import SetupFailed
from app.host.engine import engine_of
from app.images.engine_registry import Registries
from app.images.task_images import Images
from app.ledger import ends
from app.ledger.accept import Accepted
from app.models.outcome import Phase
from app.models.spec import AgentTask, Compose, EnvironmentKind, EnvironmentSpec, Limits, Mode, ScriptGoal
from app.settings import Settings
from app.workers import services
from app.workers.attempt_context import AttemptContext
from app.workers.environments import environment_for
from app.workers.lease import StopToken
from app.workers.services import WorkerServices
from megaflow.contract.environments.fixture import sweep_all
from tests.building import claim_of
from tests.integration import phase_times
from tests.integration.docker_fixture import remove_images
from tests.integration.test_images import FROM_BASE, Contexts
from tests.services import MakeSettings, missing

pytestmark = pytest.mark.docker


MADE = {"create", "start", "session", "set_up"}
KINDS = ("docker", "oci", "compose")


@dataclass
class Fixture:
    """Where attempts get their environments, of one kind."""

    flow: MegaFlow
    services: WorkerServices
    scratch: Path

    def had(self, spec: EnvironmentSpec, mode: Mode = Mode.EPHEMERAL) -> dict[str, Any]:
        """What an attempt records that gets such an environment, runs a command in it and gives it back."""
        told: dict[str, Any] = self.attempt(spec, mode, "agent")["agent"]
        return told

    def attempt(self, spec: EnvironmentSpec, mode: Mode, *purposes: str) -> dict[str, Any]:
        """The same for all of them, one after the other."""
        context = self._context(spec, mode)
        for purpose in purposes:
            begun = time.monotonic()
            with environment_for(context, purpose) as environment:
                waited_s = time.monotonic() - begun
                if purpose == "agent":
                    context.record_phase(Phase.ENVIRONMENT_READY, **environment.describe() | context.teardown[purpose])
                assert environment.run("true", timeout_s=20).ok
            _adds_up(context.teardown[purpose], waited_s)
        context.write(ends.record_teardown, {"teardown": context.teardown})
        return context.teardown

    def failed(self, spec: EnvironmentSpec, error: type[Exception]) -> dict[str, Any]:
        """What an attempt records that asks for such an environment and gets none."""
        context, begun = self._context(spec, Mode.EPHEMERAL), time.monotonic()
        with pytest.raises(error), environment_for(context, "agent"):
            raise AssertionError("it came")
        told: dict[str, Any] = context.teardown["agent"]
        _adds_up(told, time.monotonic() - begun)
        context.write(ends.record_teardown, {"teardown": context.teardown})
        return told

    def _context(self, spec: EnvironmentSpec, mode: Mode) -> AttemptContext:
        goal = ScriptGoal(tests=store_bundle(self.services.store, self.scratch))
        limits = Limits(environment_timeout_s=120.0)
        task = AgentTask(name="task", description="Do it.", environment=spec, goal=goal, limits=limits)
        handle = self.flow.enqueue(task, agent="nop", mode=mode)
        claim = claim_of(self.flow.database, Accepted(handle.run_id, (handle.task_id,)), mode)
        return AttemptContext.of(claim, self.services, StopToken(), self.scratch)


def _adds_up(told: dict[str, Any], waited_s: float) -> None:
    assert sum(told["phases"].values()) == pytest.approx(told["ready_s"], abs=0.001)
    assert told["ready_s"] <= waited_s + 0.001
    assert min(told["phases"].values()) >= 0


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def settings(make_settings: MakeSettings, base_image_tag: str, kind: str) -> Settings:
    found = make_settings(base_image=base_image_tag, container_runtime="docker" if kind == "docker" else "auto")
    if kind == "oci" and (why := available(found)) is not None:
        missing(f"environments without a daemon: {why}")
    return found


@pytest.fixture
def fixture(settings: Settings, tmp_path: Path) -> Iterator[Fixture]:
    built = services.build(settings, pooled=True, max_idle=2)
    (tmp_path / "scratch").mkdir()
    with MegaFlow(settings) as flow:
        yield Fixture(flow, built, tmp_path / "scratch")
    built.close()
    sweep_all(settings)


@pytest.fixture
def spec(registry: str, settings: Settings, fixture: Fixture, kind: str, tmp_path: Path) -> Iterator[EnvironmentSpec]:
    """Of an image that only the registry has."""
    contexts, engine = Contexts(), engine_of(settings)
    image_id = Images(settings, fetch_bundle=contexts.fetch).ensure(contexts.spec(FROM_BASE), timeout_s=60)
    name = f"{registry}/some/image-{uuid.uuid4().hex[:8]}"
    engine.api.tag(image_id, name, "v1")
    Registries(engine, settings).push(f"{name}:v1", time.monotonic() + 60)
    engine.api.remove_image(image_id, force=True)
    if kind == "compose":
        (tmp_path / "project").mkdir()
        text = f"services: {{main: {{image: '{name}:v1', command: [sleep, '600']}}}}\n"
        (tmp_path / "project" / "docker-compose.yaml").write_text(text)
        context = store_bundle(fixture.services.store, tmp_path / "project")
        yield EnvironmentSpec(compose=Compose(context=context), workdir="/")
    else:
        of = EnvironmentKind.OCI if kind == "oci" else EnvironmentKind.DOCKER
        yield EnvironmentSpec(kind=of, image=f"{name}:v1", workdir="/")
    fixture.services.pool.close()  # what it keeps stands on the image
    remove_images(engine, settings)


@pytest.mark.extra
def test_a_pull_is_in_the_times_of_the_attempt_that_waited_for_it_and_of_no_other(
    fixture: Fixture, spec: EnvironmentSpec
) -> None:
    told = fixture.attempt(spec, Mode.EPHEMERAL, "agent", "grading")
    first, graded = told["agent"], told["grading"]
    assert (first["path"], first["image_by"]) == ("cold", "pull")
    assert first["phases"].keys() == {"image", *MADE, "other"}
    assert (graded["path"], graded["image_by"]) == ("cold", "here")
    assert graded["phases"].keys() == first["phases"].keys()
    assert graded["after"]["teardown"] > 0
    found = {(one.path, one.phase): one for one in phase_times.table(fixture.flow.database)}
    assert (found["cold", "image"].count, found["cold", "pull"].count) == (2, 1)
    assert found["cold", "pull"].p50_s == pytest.approx(first["phases"]["image"])


def test_who_gets_a_used_one_pays_for_the_hand_out_and_who_gave_it_back_for_the_reset(
    fixture: Fixture, spec: EnvironmentSpec
) -> None:
    first, second = (fixture.had(spec, Mode.PERSISTENT) for _ in range(2))
    if first["reset"]["left"] == [UNSEEN]:
        missing("an engine whose layers can be looked at")
    assert (first["path"], second["path"], second["id"]) == ("cold", "recycled", first["id"])
    assert second["phases"].keys() == {"image", "hand_out", "other"}
    assert first["reset"]["took_s"] > 0
    found = {(one.path, one.phase): one for one in phase_times.table(fixture.flow.database)}
    assert found["cold", "reset"].p50_s == pytest.approx(first["reset"]["took_s"])
    assert found["recycled", "ready"].p50_s == pytest.approx(second["ready_s"])


@pytest.mark.parametrize("kind", ["docker", "oci"], indirect=True)
def test_a_set_up_that_fails_has_its_phases_on_record_and_none_among_those_that_came(
    fixture: Fixture, spec: EnvironmentSpec
) -> None:
    told = fixture.failed(spec.model_copy(update={"setup": ("sleep 0.3; exit 3",)}), SetupFailed)
    assert (told["path"], told["image_by"]) == ("failed", "pull")
    assert told["phases"].keys() >= {"image", "create", "start", "set_up", "other"}
    assert told["phases"]["set_up"] >= 0.3
    came = fixture.had(spec)
    found = {(one.kind, one.path, one.phase): one for one in phase_times.table(fixture.flow.database)}
    assert found[told["kind"], "failed", "set_up"].p50_s == told["phases"]["set_up"]
    assert found[told["kind"], "failed", "pull"].count == 1
    assert found[told["kind"], came["path"], "set_up"].count == 1, "of the same kind as those that came"
    assert found[told["kind"], came["path"], "set_up"].p99_s < 0.3
