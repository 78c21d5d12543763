"""A cloud that is full, asked too often, loses answers, or knows us no more: never two machines, none forgotten."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from app.instances.ec2.provider import SPOT
from app.ledger import classes
from app.models.spec import Mode
from tests.chaos.case import case
from tests.chaos.fixture import Fixture
from tests.chaos.programs import wait_for
from tests.chaos.work import Work
from tests.contract.instances.ec2_fixture import made_queue
from tests.ec2_machines import REGION, CloudFault, FaultyCloud, Machines, client, faulty_cloud, machines
from tests.moto_server import serving_moto

_ON_EC2 = {
    "ephemeral_provider": "ec2",
    "persistent_instances": 0,
    "ec2_template": "megaflow",
    "ec2_types": ("c7i.2xlarge", "c7a.2xlarge"),
    "web_url": "https://megaflow.example.org",
    "worker_image": "megaflow/worker:chaos",
    "boot_timeout_s": 60.0,
}
_ROOT = Path(__file__).parents[3]


@contextmanager
def _cloud(fixture: Fixture) -> Iterator[tuple[FaultyCloud, Machines]]:
    """Moto, its machines, and a control worker that reaches it through the relay. At the end nothing may be left."""
    log = fixture.settings.home / "logs" / "moto.log"
    # No join here, since everything is on this host: the instance's own request is what it runs by.
    environ = os.environ | fixture.settings.variables()

    def boot(words: Sequence[str], handle: str) -> subprocess.Popen[bytes]:
        request = words[words.index("--instance") + 1]
        with (log.parent / f"{handle}.log").open("wb") as output:
            command = [sys.executable, "-m", "app.workers.instance", request, "alone"]
            return subprocess.Popen(
                command, env=environ, cwd=_ROOT, stdout=output, stderr=output, start_new_session=True
            )

    with serving_moto(log) as endpoint, faulty_cloud(endpoint) as cloud:
        client("ec2", endpoint).create_launch_template(
            LaunchTemplateName="megaflow", LaunchTemplateData={"ImageId": "ami-12c6146b"}
        )
        with machines(endpoint, fixture.settings.worker_image, boot) as ran:
            variables = {"AWS_ENDPOINT_URL": cloud.endpoint, "AWS_DEFAULT_REGION": REGION}
            variables |= {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": "nothing"}
            variables |= {"MEGAFLOW_EC2_EVENTS": made_queue(endpoint)} if fixture.settings.ec2_spot else {}
            given = (f"{name}={value}" for name, value in variables.items())
            fixture.programs.start("launcher")
            fixture.programs.run("control", ("/usr/bin/env", *given, sys.executable, "-m", "app.control.worker"))
            yield cloud, ran
            _judge(fixture, cloud, ran)
            fixture.programs.stop_all()


def _judge(fixture: Fixture, cloud: FaultyCloud, ran: Machines) -> None:
    fixture.wait(120)
    fixture.settle()
    fixture.struck_at += cloud.struck
    if not wait_for(lambda: not ran.standing(), 30):
        fixture.wrong += [f"machine {one['InstanceId']} stands, and is paid for" for one in ran.standing()]
    twice = [name for name, count in ran.started.items() if count > 1]
    fixture.wrong += [f"instance {name} had {ran.started[name]} machines" for name in twice]
    fixture.notes.append(f"{sum(ran.started.values())} machines, {len(cloud.struck)} calls spoilt")


def _spoilt(fixture: Fixture, *faults: CloudFault, mended_after: int = 0, within_s: float = 40) -> None:
    """Tasks on a cloud with faults; where `mended_after` of them have struck, they end."""
    with _cloud(fixture) as (cloud, _):
        cloud.faults[:] = faults
        fixture.submit(6, mode=Mode.EPHEMERAL, work=Work(seconds=0.3), name="e", exclusive=True)
        if mended_after:
            if not wait_for(lambda: len(cloud.struck) >= mended_after, within_s):
                fixture.wrong.append(f"only {len(cloud.struck)} of {mended_after} calls were spoilt")
            time.sleep(1)
            cloud.faults.clear()


@case("ec2-no-capacity-anywhere", settings=_ON_EC2, within_s=150, least_faults=6)
def no_capacity_anywhere(fixture: Fixture) -> None:
    """Every type is refused for lack of capacity, in every zone, for a while: tasks wait, nothing is made; then they
    run."""
    _spoilt(fixture, CloudFault("RunInstances", "InsufficientInstanceCapacity", 500), mended_after=6)


@case("ec2-throttled", settings=_ON_EC2, within_s=150, least_faults=8)
def throttled(fixture: Fixture) -> None:
    """Every call of the cloud is refused as one too many for a while, lists and endings among them."""
    _spoilt(fixture, CloudFault("", "RequestLimitExceeded", 503), mended_after=8)


@case("ec2-reply-lost", settings=_ON_EC2, within_s=150, least_faults=4)
def reply_lost(fixture: Fixture) -> None:
    """Machines are made, and the answers are lost: they are found by their tags, and no second one is made."""
    _spoilt(fixture, CloudFault("RunInstances", times=4))


@case("ec2-credentials-expire", settings=_ON_EC2, within_s=150, least_faults=4)
def credentials_expire(fixture: Fixture) -> None:
    """Credentials lapse with machines under way, and are renewed: what runs goes on, what waits is started then."""
    with _cloud(fixture) as (cloud, ran):
        fixture.submit(3, mode=Mode.EPHEMERAL, work=Work(seconds=6), name="before", exclusive=True)
        wait_for(lambda: len(ran.started) >= 3, 60)
        cloud.faults.append(CloudFault("", "ExpiredToken", 403))
        fixture.submit(3, mode=Mode.EPHEMERAL, work=Work(seconds=0.3), name="after", exclusive=True)
        if not wait_for(lambda: len(cloud.struck) >= 4, 40):
            fixture.wrong.append("no call met the lapsed credentials")
        time.sleep(3)
        cloud.faults.clear()


_STANDING = {"persistent_provider": "ec2", "persistent_instances": 1, "ec2_spot": True}


@case("ec2-spot-taken-back", settings=_ON_EC2 | _STANDING, within_s=150, least_faults=2)
def spot_taken_back(fixture: Fixture) -> None:
    """A standing spot machine that is warned of takes nothing new, and another one does; then it is taken away, and
    what it still ran runs again there."""
    with _cloud(fixture) as (_, ran):
        fixture.submit(5, mode=Mode.PERSISTENT, work=Work(seconds=20), name="p", exclusive=True)
        running = "SELECT i.id, i.handle FROM attempts a JOIN instances i ON i.id = a.instance_id"
        running += " WHERE a.state = 'running' AND a.phases ? 'agent_started'"
        first = fixture.eventually(f"{running} AND (SELECT count(*) FROM attempts WHERE state = 'running') = 3", 60)[0]
        ran.tell(SPOT, first.handle)
        fixture.struck("a warning")
        fixture.eventually(f"{running} AND i.id <> :id", 40, id=first.id)
        fixture.struck("the machine is taken back")
        ran.ec2.terminate_instances(InstanceIds=[first.handle])
        fixture.wait(120)
        classes.set_class(fixture.database, classes.STANDARD, pool_min=0, pool_max=0, pool_cooldown_s=0.5)
    had = "SELECT count(*) AS had, count(*) FILTER (WHERE state = 'lost') AS lost FROM attempts WHERE instance_id = :id"
    if (found := tuple(fixture.rows(had, id=first.id)[0])) != (3, 3):
        fixture.wrong.append(f"expected that the warned instance had 3 attempts and lost them, found {found}")
