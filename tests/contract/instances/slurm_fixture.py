"""The provider `slurm` before Debian's Slurm; on its nodes a shell script stands where the worker would."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

import pytest

from app.instances.slurm import SlurmInstances
from app.ledger.database import Database
from app.models.instance import InstanceRequest
from app.settings import Settings
from tests.contract.instances.fixture import WORKER, ProviderFixture, leave
from tests.slurm_cluster import SlurmCluster, slurm_cluster
from tests.waiting import eventually

SMALL = "--cpus-per-task=1 --mem=100M"


class SlurmFixture(ProviderFixture):
    abilities = frozenset({"codes", "grace", "capacity", "lost_reply"})
    slow_s = 30.0

    def __init__(self, settings: Settings, database: Database, cluster: SlurmCluster) -> None:
        super().__init__(settings, database, SlurmInstances(settings))
        self.cluster = cluster

    def unreachable(self) -> SlurmInstances:
        return _Elsewhere(self.settings)

    def made(self, instance_id: UUID) -> int:
        """By the line of its task in the list that its batch's comment names."""
        folder, found = self.settings.home / "run" / "slurm", 0
        for index, comment in self._jobs("%K %k"):
            lines = (folder / comment / "instances").read_text().splitlines()
            found += lines[int(index)].startswith(str(instance_id))
        return found

    def shown(self, handle: str) -> str:
        described = self.cluster.ask("scontrol", "show", "job", handle, "--details")
        return described + self.cluster.ask("scontrol", "write", "batch_script", handle.split("_")[0], "-")

    def end(self, instance_id: UUID, handle: str, code: int) -> None:
        leave(self.settings, instance_id, code)

    def take_away(self, handle: str) -> None:
        self.cluster.ask("scancel", handle)

    def left(self) -> list[str]:
        jobs = [" ".join(job) for job in self._jobs("%i %T")]
        return jobs + [str(path) for path in (self.settings.home / "run" / "slurm").glob("*")]

    def await_lifetime(self, request: InstanceRequest) -> None:
        """Walltimes are whole minutes; it is told to stop when at least its lifetime is over."""
        eventually(lambda: not self.made(request.instance_id), "the end of its walltime", within_s=240)

    @contextmanager
    def losing_replies(self) -> Iterator[None]:
        """An sbatch that does its work, and ends as when the controller's answer does not come."""
        words = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
        with self._sbatch(f'"$real" "$@" >&2; echo "{words}" >&2; exit 1'):
            yield

    @contextmanager
    def full(self) -> Iterator[None]:
        """Nodes that have not got so much."""
        provider = self.provider
        assert isinstance(provider, SlurmInstances)
        provider._settings = self.settings.model_copy(update={"slurm_arguments": "--mem=400G"})
        yield
        provider._settings = self.settings

    @contextmanager
    def _sbatch(self, script: str) -> Iterator[None]:
        """Another program of that name before the real one."""
        folder = self.settings.home / "bin"
        folder.mkdir()
        program = folder / "sbatch"
        program.write_text(f"#!/bin/sh\nPATH=${{PATH#*:}}\nreal=$(command -v sbatch)\n{script}\n")
        program.chmod(0o755)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATH", str(folder), prepend=":")
            yield

    def _jobs(self, columns: str) -> list[list[str]]:
        name = f"--name=megaflow-{self.settings.installation}"
        lines = self.cluster.ask("squeue", "--noheader", "--array", name, f"--format={columns}").splitlines()
        return [line.split() for line in lines]


class _Elsewhere(SlurmInstances):
    """Its commands look for the controller at a port where nobody listens."""

    def _run(self, *command: str, stdin: str = "") -> str:
        real = Path(os.environ["SLURM_CONF"]).read_text()
        conf = self._settings.home / "elsewhere.conf"
        conf.write_text(re.sub(r"SlurmctldPort=\d+", "SlurmctldPort=1", real))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_CONF", str(conf))
            return super()._run(*command, stdin=stdin)


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster() as found, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(found.conf))
        yield found


@pytest.fixture
def slurm_fixture(settings: Settings, database: Database, cluster: SlurmCluster) -> SlurmFixture:
    worker = settings.home / "worker"
    worker.write_text(WORKER)
    worker.chmod(0o755)
    return SlurmFixture(
        settings.model_copy(update={"slurm_python": worker, "slurm_arguments": SMALL}), database, cluster
    )
