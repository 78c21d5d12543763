"""Runs the host of the `simulated` provider: one process, thousands of instances, real queues, ledger and leases.

    python -m app.simulation.host '{"run_s": "lognormal:60,0.5", "crash": 0.01}'

The protocol is the launcher's (launch, terminate, alive), a JSON line each way; messages are real. Only the work of
an instance between a claim and an outcome is left out.
"""

from __future__ import annotations

import gc
import json
import signal
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any
from uuid import UUID

import structlog

from app import logs
from app.celery_app import app as celery_app
from app.errors import MegaFlowError
from app.instances.simulated import socket_path
from app.models.instance import InstanceRequest
from app.models.simulation import Simulation
from app.settings import Settings, load
from app.simulation.fleet import Fleet
from app.simulation.instances import RandomModel

log = structlog.get_logger()

_ANSWER_S = 60.0


class _Refused(MegaFlowError):
    """The provider refuses the request."""


class HostServer(socketserver.ThreadingUnixStreamServer):
    """Server for the control plane's requests. Simulates the provider's own faults."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, settings: Settings, fleet: Fleet, simulation: Simulation) -> None:
        path = socket_path(settings)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        super().__init__(str(path), _Visit)
        path.chmod(0o600)
        self._fleet = fleet
        self._random_model = RandomModel(simulation)
        self._lock = threading.Lock()

    def answer(self, asked: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the reply; None: the reply is lost."""
        match asked["verb"]:
            case "launch":
                return self._launch([InstanceRequest.model_validate(item) for item in asked["requests"]])
            case "terminate":
                self._maybe("terminate_fails")
                self._ask(self._fleet.terminate, UUID(asked["instance_id"]), float(asked["grace_s"]))
                return {}
            case "alive":
                return {str(i): handle for i, handle in self._ask(self._fleet.alive).items()}
            case "counts":
                return dict(self._ask(self._fleet.counts))
            case "behave":
                simulation = Simulation.of(**asked["simulation"])
                with self._lock:
                    self._random_model = RandomModel(simulation)
                self._ask(self._fleet.behave, simulation)
                return {}
            case other:
                raise _Refused(f"expected launch, terminate, alive, counts or behave, found {other!r}")

    def _launch(self, requests: list[InstanceRequest]) -> dict[str, Any] | None:
        self._maybe("no_capacity")
        handles = self._ask(self._fleet.launch, requests)
        with self._lock:
            wait_s, lost = self._random_model.draw("launch_s"), self._random_model.strikes("reply_lost")
        time.sleep(wait_s)
        return None if lost else {str(instance_id): handle for instance_id, handle in handles.items()}

    def _maybe(self, fault: str) -> None:
        with self._lock:
            if self._random_model.strikes(fault):
                raise _Refused(fault.replace("_", " "))

    def _ask(self, act: Callable[..., Any], *values: Any) -> Any:
        """Executes a call on the fleet's thread and returns its result."""
        result: Future[Any] = Future()
        self._fleet.post(lambda: result.set_result(act(*values)))
        return result.result(timeout=_ANSWER_S)


class _Visit(socketserver.StreamRequestHandler):
    server: HostServer
    timeout = 10

    def handle(self) -> None:
        """Handles one request, a JSON line each way."""
        try:
            reply = self.server.answer(json.loads(self.rfile.readline()))
        except _Refused as refused:
            reply = {"refusal": str(refused)}
        except (OSError, ValueError, KeyError) as error:
            log.warning("simulation.bad_request", error=str(error))
            return
        if reply is not None:
            self.wfile.write(json.dumps(reply).encode() + b"\n")


def main(argument: str) -> None:
    """Hosts the simulation that the JSON in `argument` describes, until SIGTERM."""
    simulation = Simulation.of(**json.loads(argument))
    settings = load()
    logs.configure(settings.log_level)
    fleet = Fleet(settings, celery_app, simulation)
    phase = HostServer(settings, fleet, simulation)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: fleet.post(fleet.stop))
    threading.Thread(target=phase.serve_forever, name="phase", daemon=True).start()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)  # ten thousand live attempts make frequent collections expensive
    log.info("simulation.ready", socket=str(socket_path(settings)))
    fleet.run()
    phase.shutdown()
    phase.server_close()
    socket_path(settings).unlink(missing_ok=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "{}")
    except (MegaFlowError, json.JSONDecodeError) as error:
        sys.exit(f"simulation: {error}")
