"""The demo dataset on "EC2": a host in a namespace of its own for each of moto's machines joins by its user data."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from uuid import UUID

import pytest

from app.datasets.selection import Selection
from app.evaluation.submission import Submission, run_of
from app.images.build_sources import fetch_sources
from app.ledger import hosts
from app.models.spec import EnvironmentKind, Mode
from tests.cluster import system
from tests.cluster.system import Cluster, cluster, wait_until
from tests.contract.instances.ec2_fixture import made_queue, made_template
from tests.ec2_machines import REGION, Machines, machines

pytestmark = [pytest.mark.extra, pytest.mark.alone, pytest.mark.timeout(900)]

_ROOT = Path(__file__).parents[2]
_PORT = system.PORTS["s3"]  # one moto for all of Amazon


@pytest.fixture(scope="module")
def cloud() -> Iterator[tuple[Cluster, Machines]]:
    """A head whose ephemeral instances are machines, and an account in which machines run."""
    head_address = f"10.77.{os.getpid() % 200}.11"  # of the first host of a network
    endpoint = f"http://{head_address}:{_PORT}"
    settings = {
        "ephemeral_provider": "ec2",
        "ec2_template": "megaflow",
        "ec2_types": ("c7i.2xlarge", "c7a.2xlarge"),
        "ec2_events": f"{endpoint}/123456789012/megaflow",
        "boot_timeout_s": 120.0,
        "sweep_s": 2.0,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ENDPOINT_URL_EC2", "AWS_ENDPOINT_URL_SQS"):
            patch.setitem(system._KEYS, name, endpoint)
        for name, value in (("AWS_ACCESS_KEY_ID", "x"), ("AWS_SECRET_ACCESS_KEY", "x"), ("AWS_DEFAULT_REGION", REGION)):
            patch.setenv(name, value)
        with cluster(0, **settings) as found:
            assert found.head.machine.address == head_address
            made_template(endpoint)
            made_queue(endpoint)
            _fetch_sources(found.head.home / "cache")
            image = found.head.settings.worker_image
            with machines(endpoint, image, lambda words, handle: _boot(found, words, handle)) as ran:
                yield found, ran


def _fetch_sources(cache: Path) -> None:
    """What the demo's images are built from: hosts in a namespace reach no package index."""
    for listing in (_ROOT / "app/datasets/demo/swebench/images").glob("*/sources.txt"):
        shutil.copytree(listing.parent, context := cache / listing.parent.name)
        fetch_sources(context, cache=cache / "sources")


def _boot(found: Cluster, words: Sequence[str], handle: str) -> subprocess.Popen[bytes]:
    """A machine: a host of its own, which sees nothing of the head."""
    folder = found.head.home.parent
    machine = found.network.host(f"ip-{handle[-8:]}", hidden=(found.head.home, folder / "redis", folder / "postgres"))
    assert words[0] == "megaflow"
    home = folder / handle
    shutil.copytree(found.head.home / "cache" / "sources", home / "cache" / "sources")
    environ = system._plain(os.environ) | {"MEGAFLOW_HOME": str(home)}
    with (folder / f"{handle}.log").open("wb") as log:
        command = machine.command(sys.executable, "-m", *words)
        return subprocess.Popen(command, env=environ, cwd=_ROOT, stdout=log, stderr=log, start_new_session=True)


def _accept(found: Cluster, count: int) -> UUID:
    chosen = Submission(
        dataset="demo",
        agent="oracle",
        mode=Mode.EPHEMERAL,
        environment=EnvironmentKind.LOCAL,
        selection=Selection(limit=count),
    )
    return found.flow.accept(run_of(chosen, found.head.settings, found.flow.database)).id


def _rows(found: Cluster, statement: str) -> list[tuple[object, ...]]:
    with found.flow.database.begin() as connection:
        return [tuple(row) for row in connection.exec_driver_sql(statement)]


def test_the_demo_runs_on_machines_that_join_once_and_are_gone_afterwards(cloud: tuple[Cluster, Machines]) -> None:
    found, ran = cloud
    run_id = _accept(found, 2)
    ended = found.flow.run(run_id).results(timeout=400)
    assert {result.reward for result in ended} == {1.0}, ended
    wait_until(lambda: not ran.standing(), "every machine is gone", 60)
    assert set(ran.started.values()) == {1}  # never two of one instance
    assert len(ran.started) >= 2
    worked = "SELECT DISTINCT i.provider, i.state, i.exit_code FROM instances i WHERE i.attempt_id IS NOT NULL"
    assert _rows(found, worked) == [("ec2", "terminated", 0)]  # as the workers told it themselves
    wait_until(lambda: not hosts.joined(found.flow.database), "their accounts are taken back", 60)
