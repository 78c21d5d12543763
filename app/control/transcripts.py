"""Checks the transcripts of runs that have ended, each run in a process of its own.

    python -m app.control.transcripts RUN

Reading half a gigabyte of them takes seconds and memory that the control worker's threads cannot spare.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import closing
from queue import Empty, SimpleQueue
from uuid import UUID

import structlog

from app import logs
from app.installation import LedgerInstallation
from app.ledger.database import Database
from app.settings import Settings, load

log = structlog.get_logger()


class TranscriptChecks:
    """Checks the added runs; `run` blocks until `stop` is set. Runs left over are checked by their first report."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self._settings, self._database = settings, database
        self._ended: SimpleQueue[UUID] = SimpleQueue()
        self.add = self._ended.put

    def run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                run_id = self._ended.get(timeout=1.0)
            except Empty:
                continue
            if not self._called_a_model(run_id):
                continue
            with_parent = ["setpriv", "--pdeathsig", "TERM"]  # ends it with this thread or process
            command = [*with_parent, sys.executable, "-m", __name__, str(run_id)]
            with subprocess.Popen(command, env=os.environ | self._settings.variables()) as child:  # noqa: S603
                while child.poll() is None and not stop.wait(0.2):
                    pass
                child.terminate()
            if child.returncode and not stop.is_set():
                log.warning("transcripts.not_checked", run_id=str(run_id), exit_code=child.returncode)

    def _called_a_model(self, run_id: UUID) -> bool:
        statement = "SELECT FROM tasks WHERE run_id = :run AND model IS NOT NULL LIMIT 1"
        return self._database.sql(statement, {"run": run_id}).first() is not None


def main(arguments: Sequence[str]) -> None:
    """Checks one run's transcripts and stores the findings."""
    os.nice(10)  # the control worker's threads come first
    settings, run_id = load(), UUID(arguments[0])
    logs.configure(settings.log_level)
    with (
        closing(Database(settings.database())) as database,
        closing(LedgerInstallation(settings, database)) as installation,
    ):
        installation.transcripts(run_id)


if __name__ == "__main__":
    main(sys.argv[1:])
