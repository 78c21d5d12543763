"""The demo dataset on three hosts that share nothing but the network; hosts that die, fall silent, leave."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.system import Cluster, cluster

pytestmark = pytest.mark.extra


@pytest.fixture(scope="module")
def spread() -> Iterator[Cluster]:
    """Two hosts that have joined, beside the head."""
    with cluster(2) as found:
        for host in found.hosts:
            assert "takes tasks" in host.join(found.head, "--slots", "3")
        yield found


def test_the_demo_dataset_runs_on_hosts_that_joined(spread: Cluster) -> None:
    assert spread.slots() == {"host0": 3, "host1": 3}
    words = ("submit", "demo", "--agent", "oracle", "--mode", "persistent", "--environment", "local", "--wait")
    print(spread.head.megaflow(*words).stdout)
