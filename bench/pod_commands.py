"""What a command in a pod costs over the stream that stays open, beside an exec for each: milliseconds, median and p95.

python -m bench.pod_commands [COUNT]    against the tests' API server, whose pods are containers of the engine here
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from app.environments.runtimes.kubernetes.cluster import cluster_of
from app.environments.runtimes.kubernetes.provider import KubernetesProvider
from app.models.spec import EnvironmentKind, EnvironmentSpec
from app.settings import Settings
from megaflow.contract.environments.fixture import tags_of
from tests.kubernetes import FakeCluster


def timed(count: int, run: Callable[[], object]) -> str:
    took = []
    for _ in range(count):
        begun = time.perf_counter()
        run()
        took.append((time.perf_counter() - begun) * 1000)
    return f"{statistics.median(took):.1f} ms, p95 {statistics.quantiles(took, n=20)[-1]:.1f} ms"


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    with FakeCluster() as cluster, tempfile.TemporaryDirectory() as folder:
        file = cluster.kubeconfig(Path(folder))
        settings = Settings(home=Path(folder), kubeconfig=file, kubernetes_environments="default")
        spec = EnvironmentSpec(kind=EnvironmentKind.KUBERNETES, image=settings.base_image)
        pod = KubernetesProvider(settings).create(spec, tags_of("bench"), timeout_s=60)

        def by_exec() -> None:
            stream = cluster_of(settings).exec(pod.id, ("/bin/sh", "-c", "true; echo done"))
            assert stream.read_line(30.0) == b"done"
            stream.close()

        print("start by phase, s:", pod.describe()["phases"])
        print("over the stream:  ", timed(count, lambda: pod.run("true", timeout_s=10)))
        print("an exec for each: ", timed(count, by_exec))
        pod.destroy()


if __name__ == "__main__":
    main()
