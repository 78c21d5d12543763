"""What engines of instances do: one starts the same instance twice, one never starts what it has taken."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress

from app.models.instance import InstanceMode, InstanceRequest
from app.models.spec import Mode
from app.stack.home import process_environment
from tests.chaos.case import case
from tests.chaos.fixture import Fixture
from tests.chaos.programs import wait_for
from tests.chaos.work import Work
from tests.slurm_cluster import absent_programs, slurm_cluster

_SLOW = Work(seconds=3.0, max_attempts=8)


@case("instance-registers-twice", within_s=90)
def instance_registers_twice(fixture: Fixture) -> None:
    """A second worker comes up as the same instance, in both modes, as where an engine starts a job again: an ephemeral
    instance still takes one attempt. Then the first of each pair is killed, and the second one must leave."""
    fixture.start()
    fixture.submit(3, mode=Mode.EPHEMERAL, work=_SLOW, name="e")
    fixture.submit(9, mode=Mode.PERSISTENT, work=_SLOW, name="p")
    firsts = [row.instance_id for row in fixture.acting(5)]
    rows = fixture.rows("SELECT id, mode, slots FROM instances WHERE id = ANY(:ids)", ids=firsts)
    twins = [_twin(fixture, InstanceRequest(instance_id=r.id, mode=InstanceMode(r.mode), slots=r.slots)) for r in rows]
    pool = next(row.id for row in rows if row.mode == "persistent")
    log = fixture.settings.home / "logs" / f"twin-{pool}.log"
    wait_for(lambda: " ready." in log.read_text(), 90)  # on a busy machine the others have ended by then
    fixture.submit(12, mode=Mode.PERSISTENT, work=_SLOW, name="more")
    if not wait_for(lambda: "received" in log.read_text(), 60):
        fixture.wrong.append("the second worker of the pool took nothing while the first lived")
    fixture.struck("SIGKILL to the first of each pair")
    living = "SELECT handle::int FROM instances WHERE id = ANY(:ids) AND state NOT IN ('terminated', 'failed')"
    for row in fixture.rows(living, ids=firsts):  # the number of one that has ended may be another process's by now
        with suppress(ProcessLookupError):
            os.kill(row.handle, signal.SIGKILL)
    if not wait_for(lambda: all(twin.poll() is not None for twin in twins), 60):
        fixture.wrong.append("a second worker stayed when its instance had ended")
        for twin in twins:
            twin.send_signal(signal.SIGABRT)  # its threads' stacks go to its log
            twin.wait()


def _twin(fixture: Fixture, request: InstanceRequest) -> subprocess.Popen[bytes]:
    log = fixture.settings.home / "logs" / f"twin-{request.instance_id}.log"
    command = [sys.executable, "-m", "app.workers.instance", request.model_dump_json()]
    environment = process_environment(fixture.settings) | {"PYTHONFAULTHANDLER": "1"}
    with log.open("wb") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output)


_SLURM = {
    "ephemeral_provider": "slurm",
    "persistent_instances": 0,
    "queue_timeout_s": 5.0,
    "boot_timeout_s": 60.0,
    "slurm_arguments": "--cpus-per-task=1 --mem=300M --partition=closed",
}


@case("slurm-queue-never-starts", settings=_SLURM, within_s=120)
def slurm_queue_never_starts(fixture: Fixture) -> None:
    """Slurm keeps all jobs in its queue: each is ended after a while as "no capacity" and another one asked for, until
    the queue opens. None is left in the queue at the end."""
    if absent_programs():
        fixture.wrong.append(f"not run, for lack of {', '.join(absent_programs())}: apt-get install slurmctld munge …")
        return
    with slurm_cluster() as cluster:
        fixture.programs.start("launcher")
        command = (f"SLURM_CONF={cluster.conf}", sys.executable, "-m", "app.control.worker")
        fixture.programs.run("control", ("/usr/bin/env", *command))
        fixture.submit(4, mode=Mode.EPHEMERAL, name="e")
        refused = "SELECT 1 FROM events WHERE kind = 'instance.failed' AND data->>'why' LIKE 'no capacity%'"
        fixture.eventually(f"{refused} HAVING count(*) >= 4", within_s=90)
        fixture.struck("the queue opens")
        cluster.ask("scontrol", "update", "partitionname=closed", "state=up")
        fixture.wait(120)
        fixture.settle()
        if not wait_for(lambda: not cluster.ask("squeue", "--noheader"), 30):
            fixture.wrong.append(f"left in Slurm's queue: {cluster.ask('squeue', '--noheader')}")
