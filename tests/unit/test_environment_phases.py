"""What counts in which phase of an environment's times."""

from __future__ import annotations

import time

import pytest

from app.environments.contract import Times, noting
from app.environments.isolation.fingerprint import Fingerprint, _parsed, differences
from app.environments.isolation.sizes import size_variables
from app.images.pull_source import PullSource, noted, tell
from app.models.spec import Resources


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What `time.monotonic` says."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_no_second_counts_twice(clock: list[float]) -> None:
    times = Times()
    with times.measure("create"):
        clock[0] += 1
        with times.measure("start"):
            clock[0] += 2
            with times.measure("session"):
                clock[0] += 4
        with times.measure("session"):
            clock[0] += 8
        clock[0] += 16
    with times.measure("create"):
        clock[0] += 32
    assert times.phases == {"create": 49.0, "start": 2.0, "session": 12.0}


def test_what_was_measured_is_noted_whichever_it_was_of_and_no_second_twice(clock: list[float]) -> None:
    outer, inner = Times(), Times()

    def fails() -> None:
        with outer.measure("set_up"):
            clock[0] += 1
            with inner.measure("create"):
                clock[0] += 2
            clock[0] += 4
            raise OSError("no")

    with noting() as noted:
        with noted.measure("image"):
            clock[0] += 8
        with pytest.raises(OSError, match="no"):
            fails()
    assert noted.phases == {"image": 8.0, "create": 2.0, "set_up": 5.0}
    assert outer.phases == {"set_up": 7.0}
    with outer.measure("session"):
        clock[0] += 1
    assert "session" not in noted.phases


def test_a_reset_one_begins_anew_when_it_is_handed_on_and_one_that_is_in_use_does_not(clock: list[float]) -> None:
    used, in_use = Times(phases={"reset": 3.0, "start": 1.0}), Times(phases={"create": 3.0})
    for times in (used, in_use):
        with times.handed_on():
            clock[0] += 2
    assert used.phases == {"hand_out": 2.0}
    assert in_use.phases == {"create": 3.0}


def test_the_longest_way_of_an_image_is_told_to_whoever_asked_for_it() -> None:
    with noted() as nothing:
        pass
    with noted() as both:
        tell(PullSource.BUILD)
        with noted() as inner:
            tell(PullSource.PULL)
    tell(PullSource.BUILD)
    assert (nothing.longest, inner.longest, both.longest) == (PullSource.HERE, PullSource.PULL, PullSource.BUILD)


@pytest.mark.parametrize(("cpus", "told"), [(0.5, "1"), (1.0, "1"), (1.5, "2"), (8.0, "8"), (32.0, "16")])
def test_processors_are_told_rounded_up(cpus: float, told: str) -> None:
    found = size_variables(Resources(cpus=cpus).sized(3, Resources()), host_cpus=16)
    assert found.pop("MAKEFLAGS") == f"-j{told}"
    assert set(found.values()) == {told}
    assert {"OMP_NUM_THREADS", "PYTEST_XDIST_AUTO_NUM_WORKERS"} <= found.keys()


_TABLE = """
==> /proc/net/tcp <==
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
"""


def looked_at(*listening: str) -> Fingerprint:
    """The table of sockets with these listening."""
    rows = [f"   {n}: {address} 00000000:0000 0A 00000000:00000000" for n, address in enumerate(listening)]
    return Fingerprint(_parsed(_TABLE + "\n".join(rows) + "\n"))


def test_the_engines_resolver_may_listen_at_another_port_after_a_start() -> None:
    assert differences(looked_at("0B00007F:A58B"), looked_at("0B00007F:B5FB")) == ()


def test_one_more_beside_the_resolver_is_a_difference() -> None:
    (found,) = differences(looked_at("0B00007F:A58B"), looked_at("0B00007F:B5FB", "0B00007F:1F90"))
    assert found == "sockets: tcp 0B00007F:any port came"


def test_elsewhere_the_port_counts() -> None:
    found = differences(looked_at("0100007F:A58B"), looked_at("0100007F:B5FB"))
    assert found == ("sockets: tcp 0100007F:B5FB came", "sockets: tcp 0100007F:A58B went")
