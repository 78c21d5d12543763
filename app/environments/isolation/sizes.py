"""Sets variables that tell programs inside how many processors they have: the kernel shows the host's."""

from __future__ import annotations

import math

from app.models.spec import Resources

_COUNTS = (
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "RAYON_NUM_THREADS"),
    *("GOMAXPROCS", "CARGO_BUILD_JOBS", "CMAKE_BUILD_PARALLEL_LEVEL", "PYTEST_XDIST_AUTO_NUM_WORKERS"),
)
"""Variables that numeric libraries, build tools and test runners read; `nproc` reads the first."""


def size_variables(resources: Resources, host_cpus: int) -> dict[str, str]:
    """Returns variables with the task's processors, rounded up; they override the image's, and the task's own them.

    The guaranteed processors count, at most the host's. So a program starts the same number of threads and workers,
    which take memory each, whatever `kill_at` a run has and however busy the host is.

    Source: NeMo Gym #2828: environments that saw all of a host's cores failed in most of their fatal failures.
    """
    count = str(max(1, min(math.ceil(resources.cpus), host_cpus)))
    return {**dict.fromkeys(_COUNTS, count), "MAKEFLAGS": f"-j{count}"}
