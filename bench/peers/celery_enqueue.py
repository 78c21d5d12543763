"""How fast Celery enqueues: `apply_async` one by one on a producer that is kept, and in kombu's batches.

Run by the peers' interpreter. A message survives what Redis survives: with an append-only file written every second,
up to a second of accepted tasks is lost with the machine.
"""

from __future__ import annotations

import argparse
import json
import time
from importlib.metadata import version

from celery import Celery


def main() -> None:
    """Print one JSON object: rates per second, and the single calls' seconds."""
    given = _arguments()
    app = Celery("peer", broker=given.broker)
    app.conf.update(task_ignore_result=True, task_serializer="json")
    queue = f"peer-{given.body_bytes}"

    @app.task(name="peer.noop")
    def noop(task: str, body: str) -> None:
        """Nothing: only the way to the queue is measured."""

    body = "x" * given.body_bytes
    with app.connection_for_write() as connection, app.amqp.Producer(connection) as producer:
        noop.apply_async(("warm", body), queue=queue, producer=producer)
        took: list[float] = []
        for number in range(given.singles):
            at = time.perf_counter()
            noop.apply_async((f"task-{number}", body), queue=queue, producer=producer)
            took.append(time.perf_counter() - at)
        begun = time.perf_counter()
        with producer.batch(max_size=given.batch):
            for number in range(given.count):
                noop.apply_async((f"task-{number}", body), queue=queue, producer=producer)
        bulk_s = time.perf_counter() - begun
        found = connection.default_channel.client.llen(queue)
        connection.default_channel.client.delete(queue)
    assert found == 1 + given.singles + given.count, found
    versions = {name: version(name) for name in ("celery", "kombu", "redis")}
    print(json.dumps({"one_by_one": len(took) / sum(took), "took_s": took, "bulk": given.count / bulk_s, **versions}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--broker", required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--singles", type=int, required=True)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--body-bytes", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
