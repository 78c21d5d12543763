"""Hosts whose pools registered themselves: nothing but their connection tells that they are gone."""

from __future__ import annotations

import signal
import sys
import time
from contextlib import suppress

import psutil

from app.models.spec import Mode
from tests.chaos.case import case
from tests.chaos.fixture import Fixture
from tests.chaos.programs import wait_for
from tests.chaos.work import Work

_PATIENT = {"lease_s": 90.0, "persistent_instances": 0, "persistent_slots": 4}
"""No lease lapses within the case."""
_POOL = (sys.executable, "-m", "megaflow", "worker", "persistent", "--slots", "4")


@case("host-taken-away", settings=_PATIENT, within_s=60)
def host_taken_away(fixture: Fixture) -> None:
    """SIGKILL to a pool and all below it, while it works: what it ran is done by the other pool, long before any lease
    could lapse."""
    fixture.start()
    for name in ("pool-1", "pool-2"):
        fixture.programs.run(name, _POOL)
    ready = "SELECT count(*) FROM instances WHERE provider = 'static' AND state = 'ready'"
    if not wait_for(lambda: fixture.rows(ready)[0][0] == 2, 60):
        raise RuntimeError("the pools did not become ready")
    time.sleep(4)  # a connection that the control worker never saw is missed only with the lease
    fixture.submit(6, mode=Mode.PERSISTENT, work=Work(seconds=4.0), name="p", exclusive=True)
    pid = fixture.programs.pids["pool-1"]
    mine = (
        "SELECT count(*) FROM attempts a JOIN instances i ON i.id = a.instance_id"
        " WHERE a.state = 'running' AND a.phases ? 'agent_started' AND split_part(i.handle, chr(58), 2) = :pid"
    )
    if not wait_for(lambda: fixture.rows(mine, pid=str(pid))[0][0] > 0, 40):
        raise RuntimeError("the pool was given nothing")
    fixture.struck("SIGKILL")
    below = psutil.Process(pid).children(recursive=True)
    fixture.programs.kill("pool-1", kept=False)
    for one in below:
        with suppress(psutil.NoSuchProcess):
            one.send_signal(signal.SIGKILL)
