"""Run the web server: `python -m app.web --host H --port P`."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence

import structlog

from app import logs
from app.errors import MegaFlowError
from app.ledger.database import Database
from app.model_service.serving import listen
from app.settings import load
from app.web.server import application

log = structlog.get_logger()

_CONNECTIONS = 8
_IDLE_ANSWER_S = 4.0
"""Seconds; with the five for a new connection, a hanging database gives an error 503 within ten."""
_COLLECT_AFTER = 100_000
"""New objects between two garbage collections; at the default of 700 they take most of the time of a large request."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT. Returns 0, or the error's exit code."""
    parser = argparse.ArgumentParser(prog="python -m app.web", description=__doc__)
    parser.add_argument("--host", default=None, help="default: MEGAFLOW_BIND")
    parser.add_argument("--port", type=int, default=None, help="default: MEGAFLOW_WEB_PORT; 0 takes a free one")
    arguments = parser.parse_args(argv)
    try:
        settings = load()
        logs.configure(settings.log_level)
        database = Database(settings.database(), pool_size=_CONNECTIONS, idle_answer_s=_IDLE_ANSWER_S)
        app = application(settings, database)
    except MegaFlowError as error:
        print(f"web: {error}", file=sys.stderr)
        return error.exit_code
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, 50, 100)
    port = settings.web_port if arguments.port is None else arguments.port
    listen(app, "web", host=arguments.host or settings.bind, port=port, grace_s=2, sockets=True)
    database.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
