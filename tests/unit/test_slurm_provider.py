"""What sbatch is asked for, and what Slurm's answers mean; with a real one: tests/contract/instances."""

from __future__ import annotations

import threading
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from app.errors import InstanceFailed, LaunchUnclear, NoCapacity
from app.instances.slurm import SlurmInstances, _kind, _number, _task
from app.models.instance import InstanceMode, InstanceRequest
from app.settings import Settings


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("Batch job submission failed: Requested node configuration is not available", NoCapacity),
        ("Memory specification can not be satisfied", NoCapacity),
        ("Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)", NoCapacity),
        ("Batch job submission failed: More processors requested than permitted", NoCapacity),
        ("Batch job submission failed: Unable to contact slurm controller (connect failure)", InstanceFailed),
        ("Batch job submission failed: Socket timed out on send/recv operation", LaunchUnclear),
        ("Batch job submission failed: Connection reset by peer", LaunchUnclear),
        ("Batch job submission failed: Zero Bytes were transmitted or received", LaunchUnclear),
        ("invalid partition specified: nope", InstanceFailed),
        ("unrecognized option '--bogus'", InstanceFailed),
    ],
)
def test_a_refusal_is_told_from_a_lost_answer(said: str, kind: type[InstanceFailed]) -> None:
    assert _kind(said, LaunchUnclear) is kind


def test_a_listed_task_tells_its_end() -> None:
    waiting, comment = _task("15_2|abc|PENDING|0|0:00|ReqNodeNotAvail, UnavailableNodes:n[1-2]|x")
    assert (comment, waiting.lives, waiting.run_s, waiting.exit_code) == ("abc", True, None, None)
    assert _number(waiting) == (15, 2)
    running, _ = _task("15_1|abc|RUNNING|0|1-02:03:04|None")
    assert (running.lives, running.run_s, running.exit_code) == (True, 93784.0, None)
    told, _ = _task("15_0|abc|CANCELLED|19200|0:12|None")
    assert (told.lives, told.exit_code) == (False, 75)
    killed, _ = _task("15_3|abc|FAILED|9|0:12|RaisedSignal:9(Killed)")
    assert killed.exit_code == -9
    done, _ = _task("15_4|abc|COMPLETED|0|0:12|None")
    assert done.exit_code == 0
    never_ran, _ = _task("15|abc|CANCELLED|0|0:00|Resources")
    assert never_ran.exit_code is None
    assert _number(never_ran)[1] > 10_000


def _request(**values: object) -> InstanceRequest:
    return InstanceRequest.model_validate({"instance_id": uuid4(), "mode": InstanceMode.EPHEMERAL} | values)


def test_sizes_come_from_the_class_or_else_from_what_tasks_are_guaranteed(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, task_cpus=1.5, task_memory_bytes=1 << 30, instance_memory_bytes=512 << 20)
    provider = SlurmInstances(settings)
    guaranteed = provider._options(_request(slots=3))
    assert {"--cpus-per-task=5", "--mem=4608M"} <= set(guaranteed)
    own = provider._options(_request(slots=3, cpus=8.0, memory_bytes=2 << 30, gpus=2))
    assert {"--cpus-per-task=8", "--mem=2048M", "--gpus=2"} <= set(own)


def test_a_lifetime_is_over_before_the_walltime_ends_it(tmp_path: Path) -> None:
    provider = SlurmInstances(Settings(home=tmp_path))
    assert "--time=3" in provider._options(_request(lifetime_s=1.0))
    assert "--time=62" in provider._options(_request(lifetime_s=3600.0))
    assert not [option for option in provider._options(_request()) if option.startswith("--time")]


def test_arguments_of_the_installation_and_of_a_class_come_last(tmp_path: Path) -> None:
    settings = Settings(
        home=tmp_path,
        slurm_arguments="--partition=day --account='my lab'",
        slurm_class_arguments={"gpu": "--partition=gpu"},
    )
    provider = SlurmInstances(settings)
    assert provider._options(_request())[-2:] == ("--partition=day", "--account=my lab")
    assert provider._options(_request(resource_class="gpu"))[-1] == "--partition=gpu"
    told = settings.variables()["MEGAFLOW_SLURM_CLASS_ARGUMENTS"]
    assert told == '{"gpu": "--partition=gpu"}'  # as it is read again


class _Listed(SlurmInstances):
    """Slurm's answers are given."""

    state = "RUNNING|0"

    def _run(self, *command: str, stdin: str = "") -> str:
        if command[0] == "sbatch":
            (comment,) = (word.removeprefix("--comment=") for word in command if word.startswith("--comment="))
            self.comment = comment
            return "7;cluster\n"
        return f"7_0|{self.comment}|{self.state}|0:01|None\n" if hasattr(self, "comment") else ""


class _Submitting(_Listed):
    """sbatch answers while squeue is asked: what that says is older."""

    def _run(self, *command: str, stdin: str = "") -> str:
        if command[0] == "squeue" and self._folder.is_dir():
            for folder in self._folder.iterdir():
                (folder / "answered").touch()
            return ""
        return super()._run(*command, stdin=stdin)


def test_a_batch_that_is_being_submitted_has_not_ended(tmp_path: Path) -> None:
    provider, request = _Submitting(Settings(home=tmp_path)), _request()
    folder = provider._write([request])
    heard: list[UUID] = []
    provider._look(lambda instance_id, *_: heard.append(instance_id))
    assert (heard, folder.is_dir()) == ([], True)


def test_one_that_has_ended_is_listed_until_its_exit_code_is_reported(tmp_path: Path) -> None:
    provider, request, stop = _Listed(Settings(home=tmp_path)), _request(), threading.Event()
    assert provider.launch([request]) == {request.instance_id: "7_0"}
    provider.state = "COMPLETED|0"
    assert provider.alive() == {}, "nobody watches: the reconciler finds out"
    heard: list[tuple[int | None, bool]] = []

    def on_exit(instance_id: UUID, code: int | None, _: str) -> None:
        heard.append((code, instance_id in provider.alive()))
        stop.set()

    provider.watch(on_exit, stop)
    assert heard == [(0, True)]
    assert list((tmp_path / "run" / "slurm").iterdir()) == []
