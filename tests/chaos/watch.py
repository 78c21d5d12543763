"""Looks at the ledger several times a second, in one statement each, and notes every moment in which a promise was
broken: at any time, not only at the end."""

from __future__ import annotations

import threading
from collections import Counter

import psycopg

_BROKEN = """
WITH live AS (
    SELECT a.id, a.task_id, a.state, a.mode, a.instance_id, t.state AS task_state, t.attempts, a.number
    FROM attempts a JOIN tasks t ON t.id = a.task_id WHERE a.state IN ('dispatched', 'running', 'grading')
)
SELECT 'a running attempt without a lease' AS what, count(*) FROM live
    WHERE state = 'running' AND NOT EXISTS (SELECT 1 FROM leases l WHERE l.attempt_id = live.id)
UNION ALL SELECT 'a lease without a running attempt', count(*) FROM leases l
    WHERE NOT EXISTS (SELECT 1 FROM live WHERE live.id = l.attempt_id AND live.state <> 'dispatched')
UNION ALL SELECT 'a task ' || task_state || ' with an attempt ' || state, count(*) FROM live
    WHERE task_state <> CASE state WHEN 'dispatched' THEN 'admitted' ELSE 'running' END GROUP BY task_state, state
UNION ALL SELECT 'a live attempt that is not its task''s latest', count(*) FROM live WHERE number <> attempts
UNION ALL SELECT 'a task with two live attempts', count(*) FROM (
    SELECT 1 FROM live GROUP BY task_id HAVING count(*) > 1) two
UNION ALL SELECT 'a task admitted or running without a live attempt', count(*) FROM tasks t
    WHERE t.state IN ('admitted', 'running') AND NOT EXISTS (SELECT 1 FROM live WHERE live.task_id = t.id)
UNION ALL SELECT 'an instance over its slots', count(*) FROM (
    SELECT 1 FROM live JOIN instances i ON i.id = live.instance_id WHERE live.state = 'running'
    GROUP BY i.id HAVING count(*) > i.slots) over
UNION ALL SELECT 'an attempt in grading without a row of it, or one the other way round', count(*) FROM live
    FULL JOIN gradings g ON g.attempt_id = live.id
    WHERE (live.state = 'grading') IS DISTINCT FROM (g.attempt_id IS NOT NULL)
UNION ALL SELECT 'a running attempt on an instance that has ended', count(*) FROM live
    JOIN instances i ON i.id = live.instance_id
    WHERE live.state = 'running' AND i.state IN ('terminated', 'failed')
"""


class Watch:
    """One thread with a session of its own; survives every outage of the server."""

    def __init__(self, url: str, every_s: float = 0.25) -> None:
        self._url = url
        self.every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.broken: Counter[str] = Counter()  # promise: samples in which it was broken
        self.samples = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with psycopg.connect(self._url, autocommit=True, application_name="chaos-watch") as connection:
                    while not self._stop.wait(self.every_s):
                        self._look(connection)
            except psycopg.Error:
                self._stop.wait(0.2)

    def _look(self, connection: psycopg.Connection) -> None:
        for what, count in connection.execute(_BROKEN).fetchall():
            if count:
                self.broken[what] += 1
        self.samples += 1
