"""Serve the replay engine until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from app.errors import SpecInvalid
from app.model_service.replay.server import create_app
from app.model_service.serving import listen

_GRACE_S = 1  # seconds that a stopping server waits for delayed answers


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or the error's exit code when a script is malformed."""
    parser = argparse.ArgumentParser(prog="python -m app.model_service.replay", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True, help="0 takes a free one; the log says which")
    parser.add_argument("--scripts", type=Path, nargs="+", required=True, metavar="DIR")
    parser.add_argument("--recordings", type=Path, metavar="DIR", help="recorded runs, each in a folder of its own")
    arguments = parser.parse_args(argv)
    try:
        app = create_app(arguments.scripts, arguments.recordings)
    except SpecInvalid as error:
        print(f"replay: {error}", file=sys.stderr)
        return error.exit_code
    logging.getLogger("uvicorn.error").addFilter(_no_scripted_cuts)
    listen(app, "replay", host=arguments.host, port=arguments.port, grace_s=_GRACE_S, timeout_keep_alive=75)
    return 0


def _no_scripted_cuts(record: logging.LogRecord) -> bool:
    """Drops the server's complaints about unfinished answers, which are intended here."""
    return "without completing response" not in record.getMessage()


if __name__ == "__main__":
    sys.exit(main())
