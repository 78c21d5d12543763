"""How fast procrastinate enqueues: `defer` one by one, each a commit, and `batch_defer`.

Run by the peers' interpreter, on an empty database of its own: the schema is applied first.
"""

from __future__ import annotations

import argparse
import json
import time
from importlib.metadata import version

from procrastinate import App, SyncPsycopgConnector


def main() -> None:
    """Print one JSON object: rates per second, and the single calls' seconds."""
    given = _arguments()
    app = App(connector=SyncPsycopgConnector(conninfo=given.database))

    @app.task(name="peer.noop")
    def noop(task: str, body: str) -> None:
        """Nothing: only the way to the queue is measured."""

    body = "x" * given.body_bytes
    with app.open():
        app.schema_manager.apply_schema()
        noop.defer(task="warm", body=body)
        took: list[float] = []
        for number in range(given.singles):
            at = time.perf_counter()
            noop.defer(task=f"task-{number}", body=body)
            took.append(time.perf_counter() - at)
        begun = time.perf_counter()
        for start in range(0, given.count, given.batch):
            numbers = range(start, min(start + given.batch, given.count))
            noop.batch_defer(*({"task": f"task-{number}", "body": body} for number in numbers))
        bulk_s = time.perf_counter() - begun
        found = app.connector.execute_query_one("SELECT count(*) AS jobs FROM procrastinate_jobs")["jobs"]
    assert found == 1 + given.singles + given.count, found
    versions = {name: version(name) for name in ("procrastinate", "psycopg")}
    print(json.dumps({"one_by_one": len(took) / sum(took), "took_s": took, "bulk": given.count / bulk_s, **versions}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--database", required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--singles", type=int, required=True)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--body-bytes", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
