"""Run the gateway: `python -m app.model_service.gateway --host H --port P`."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence

from app import logs
from app.errors import MegaFlowError, SettingsInvalid
from app.ledger.database import Database
from app.model_service.gateway.app import Gateway
from app.model_service.recording.process import StoreProcess
from app.model_service.recording.recorder import Recorder
from app.model_service.serving import listen
from app.settings import load

GRACE_S = 30
"""Seconds that calls may still run after SIGTERM."""
_KEEP_ALIVE_S = 600
"""Long, because agents think for minutes between two calls, and a closed connection costs them a retry."""
_BACKLOG = 4096
_CONNECTIONS = 8
_SWITCH_S = 0.0005
"""Longest time in seconds that another thread keeps the interpreter while the event loop has work. Python's 5 ms would
delay callers, because the threads that record calls need the CPU."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT. Returns 0, or the error's exit code."""
    parser = argparse.ArgumentParser(prog="python -m app.model_service.gateway", description=__doc__)
    parser.add_argument("--host", default=None, help="default: MEGAFLOW_BIND")
    parser.add_argument("--port", type=int, default=None, help="default: MEGAFLOW_GATEWAY_PORT; 0 takes a free one")
    parser.add_argument("--base", default=None, help="its URL in MEGAFLOW_GATEWAY_URL; refuse other gateways' attempts")
    parser.add_argument("--grace", type=int, default=GRACE_S, help="seconds that calls may go on after SIGTERM")
    arguments = parser.parse_args(argv)
    try:
        settings = load()
        port = settings.gateway_port if arguments.port is None else arguments.port
        own = dict(zip(settings.gateway_ports(), settings.gateway_bases(), strict=False))
        base = arguments.base or own.get(port)
        if base is not None and base not in settings.gateway_bases():
            known = ", ".join(settings.gateway_bases())
            raise SettingsInvalid(f"expected --base to be one of MEGAFLOW_GATEWAY_URL ({known}); found {base}")
    except MegaFlowError as error:
        print(f"gateway: {error}", file=sys.stderr)
        return error.exit_code
    logs.configure(settings.log_level)
    sys.setswitchinterval(_SWITCH_S)
    database = Database(settings.database(), pool_size=_CONNECTIONS)

    def recorder() -> Recorder:
        keys = (settings.model_api_key_env,)
        store = StoreProcess(settings.database(), log_level=settings.log_level, key_variables=keys)
        return Recorder(settings, database, store=store)

    gc.collect()
    gc.freeze()  # imported modules stay in memory: repeated scans of them would delay callers
    try:
        listen(
            Gateway(settings, database, recorder=recorder, base=base),
            "gateway",
            host=arguments.host or settings.bind,
            port=port,
            grace_s=arguments.grace,
            loop="uvloop",
            lifespan="on",
            date_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
    finally:
        database.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
