"""Ours, through the contract that every kind of environment fulfils: the one file here that imports this project."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

from live import Live, Simple

from app import logs
from app.environments.contract import Environment, EnvironmentProvider, Tags
from app.environments.pool import EnvironmentPool
from app.environments.sweeper import Sweeper
from app.models.spec import EnvironmentSpec
from app.settings import Settings

TIMEOUT_S = 300.0


class Ours:
    """`kind`: `docker` or `oci`, each with a home of its own."""

    def __init__(self, options: dict[str, Any]) -> None:
        logs.configure(logging.getLevelName(logging.INFO))  # as a worker has it
        self._settings = Settings(home=Path(options["home"]), installation=options["installation"])
        self._kind = options["kind"]
        self._spec = EnvironmentSpec(image=options["image"])
        self._provider = provider(self._kind, self._settings)
        self._image_id = self._provider.prepare_image(self._spec, timeout_s=TIMEOUT_S)
        self._remembers = False

    def start(self) -> Live:
        return OurLive(self._create(self._spec), in_engine=self._kind == "docker", remembers=self._remembers)

    def _create(self, spec: EnvironmentSpec) -> Environment:
        return self._provider.create(spec, self._tags(), timeout_s=TIMEOUT_S)

    def _tags(self) -> Tags:
        return Tags(self._settings.installation, uuid4(), uuid4(), uuid4(), uuid4(), time.time() + 3600)

    def versions(self) -> dict[str, str]:
        with_it = self._create(self._spec)
        told = with_it.describe()
        with_it.destroy()
        runtime = {"runtime": str(told["runtime"])} if "runtime" in told else {}
        return {"megaflow": version("megaflow"), **runtime}

    def extra(self) -> dict[str, Callable[..., Any]]:
        return {"pooled": self.pooled, "remember": self.remember, "setups": self.setups, "swept": self.swept}

    def close(self) -> None:
        self.swept()

    # --- What only this one knows ---------------------------------------------------------------------------------

    def remember(self, on: bool) -> None:
        """Whether commands go to one shell that remembers, in what is started from now on; else each to a new one."""
        self._remembers = on

    def pooled(self, count: int) -> dict[str, Any]:
        """Seconds of: a hand-out by the pool, of an environment used before; the reset in between; the teardown.

        The pool is called here and nowhere else.
        """
        handed: list[float] = []
        reset: list[float] = []
        ended: list[float] = []
        pool = EnvironmentPool(max_idle=1)
        take = partial(pool.acquire, self._provider, self._spec, image_id=self._image_id, timeout_s=TIMEOUT_S)
        environment, _ = take(tags=self._tags(), allow_reuse=True)
        try:
            for _ in range(count):
                environment.run("mkdir -p /testbed/left && date > /testbed/left/x; sleep 300 &", timeout_s=TIMEOUT_S)
                begun = time.perf_counter()
                proof = pool.release(environment, reuse=True)
                reset.append(time.perf_counter() - begun)
                if proof is None or not proof.clean:
                    raise RuntimeError(f"expected a clean reset, found {proof}")
                begun = time.perf_counter()
                environment, _ = take(tags=self._tags(), allow_reuse=True)
                handed.append(time.perf_counter() - begun)
        finally:
            pool.close()
        for _ in range(count):
            single = self._create(self._spec)
            begun = time.perf_counter()
            single.destroy()
            ended.append(time.perf_counter() - begun)
        return {"handout_s": handed, "recycle_s": reset, "teardown_s": ended}

    def setups(self, tasks: int, replicas: int, width: int, setup_s: float) -> dict[str, Any]:
        """How often set-ups ran. Each leaves a name that the kernel made up: as many names, as many set-ups."""
        name = "cat /proc/sys/kernel/random/uuid > /testbed/.set-up"
        salt = uuid4().hex  # of this round: what an earlier one kept does not serve
        specs = [
            self._spec.model_copy(
                update={"setup": (f": {salt} task {task}; mkdir -p /testbed; sleep {setup_s}; {name}",)}
            )
            for task in range(tasks)
        ]
        wanted = [spec for spec in specs for _ in range(replicas)]

        def one(spec: EnvironmentSpec) -> tuple[bytes, float]:
            begun = time.perf_counter()
            environment = self._create(spec)
            took_s = time.perf_counter() - begun
            try:
                return environment.get("/testbed/.set-up"), took_s
            finally:
                environment.destroy()

        begun = time.perf_counter()
        with ThreadPoolExecutor(width) as threads:
            found = list(threads.map(one, wanted))
        return {
            "asked": len(wanted),
            "ran": len({content for content, _ in found}),
            "wall_s": time.perf_counter() - begun,
            "took_s": [took for _, took in found],
        }

    def swept(self) -> dict[str, Any]:
        """How many were left: what a sweep of everything finds."""
        return {"left": Sweeper(self._settings).sweep(set(), read_at=time.time() + 3600).removed}


def provider(kind: str, settings: Settings) -> EnvironmentProvider:
    if kind == "oci":
        from app.environments.runtimes.oci import OciProvider, available

        if (why := available(settings)) is not None:
            raise RuntimeError(f"not possible here: {why}")
        return OciProvider(settings, fetch_bundle=lambda bundle: b"")
    from app.environments.runtimes.docker.provider import DockerProvider

    return DockerProvider(settings, fetch_bundle=lambda bundle: b"")


class OurLive(Simple):
    ends_quickly = True

    def __init__(self, environment: Environment, *, in_engine: bool, remembers: bool = False) -> None:
        self._environment = environment
        self._run = environment.shell().run if remembers else environment.run
        self.container = environment.id if in_engine else ""

    def run(self, command: str) -> tuple[int, bytes]:
        done = self._run(command, timeout_s=TIMEOUT_S)
        return (124 if done.exit_code is None else done.exit_code), done.stdout + done.stderr

    def put(self, path: str, content: bytes) -> None:
        self._environment.put(path, content)

    def get(self, path: str) -> bytes:
        return self._environment.get(path)

    def stop(self) -> None:
        self._environment.destroy()


contender = Ours
