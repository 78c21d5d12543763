"""Reads for a training loop the run of each step, its state and its results."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import text

from app.errors import DatabaseUnavailable, LimitInvalid
from app.ledger import experience, staleness
from app.ledger.database import Database, Leadership


class LoopLock:
    """Lets only one process run the loop of a name, by a lock that PostgreSQL frees when the process exits."""

    def __init__(self, database: Database, name: str) -> None:
        digest = hashlib.sha256(name.encode()).digest()
        key = 3 << 30 | int.from_bytes(digest[:4]) >> 2  # above the keys of instances, see `connections.key_of`
        self._name, self._lead = name, Leadership(database, key, silent_s=0)  # a step may take hours

    def hold(self) -> None:
        """Takes the lock, or checks that it is still held; a lost connection is replaced.

        Raises: LimitInvalid: another process has it; DatabaseUnavailable.
        """
        try:
            held = self._lead.held()
        except DatabaseUnavailable:
            held = self._lead.held()
        if not held:
            self.close()
            raise LimitInvalid(
                f"expected one `megaflow train` of {self._name!r}, found that another runs; wait for it or end it"
            )

    def close(self) -> None:
        self._lead.release()


def run_of(database: Database, user_name: str, idempotency_key: str) -> UUID | None:
    """Returns the run that was accepted with a key; None: there is none yet."""
    statement = "SELECT id FROM runs WHERE user_name = :user AND idempotency_key = :key"
    run_id: UUID | None = database.sql(statement, {"user": user_name, "key": idempotency_key}).scalar()
    return run_id


def version_state(database: Database, policy: str, version: str) -> str | None:
    """Returns `published`, `live` or `refused`; None: the version is not on record."""
    statement = "SELECT state FROM policy_versions WHERE policy = :policy AND version = :version"
    state: str | None = database.sql(statement, {"policy": policy, "version": version}).scalar()
    return state


def reached(database: Database, policy: str, version: str) -> str | None:
    """Returns the state as `version_state`, or `live` if a newer version is live: this one can never go live then."""
    statement = (
        "SELECT CASE WHEN EXISTS (SELECT FROM policy_versions n WHERE n.policy = p.policy AND n.number >= p.number"
        " AND n.state = 'live') THEN 'live' ELSE state END FROM policy_versions p"
        " WHERE policy = :policy AND version = :version"
    )
    state: str | None = database.sql(statement, {"policy": policy, "version": version}).scalar()
    return state


def committed_version(database: Database, run_id: UUID) -> str | None:
    """Returns the version that a run's groups were last committed with; None: none was."""
    statement = (
        "SELECT version FROM experience_leases WHERE run_id = :run AND state = 'committed'"
        " ORDER BY committed_at DESC LIMIT 1"
    )
    version: str | None = database.sql(statement, {"run": run_id}).scalar()
    return version


def groups_going(database: Database, run_id: UUID) -> int:
    """Counts incomplete groups that may be completed: a task has not ended, or its samples are not on record yet."""
    statement = """
        SELECT count(DISTINCT t.group_id) FROM tasks t LEFT JOIN experience_groups g ON g.group_id = t.group_id
        WHERE t.run_id = :run AND coalesce(g.state, 'open') = 'open' AND (t.finished_at IS NULL OR (t.attempts > 0
            AND NOT EXISTS (SELECT FROM experience_attempts x JOIN attempts a ON a.id = x.attempt_id
                WHERE a.task_id = t.id AND a.number = t.attempts)))"""
    return int(database.sql(statement, {"run": run_id}).scalar_one())


def groups_left(database: Database, run_id: UUID) -> int:
    """Counts groups that may still be trained on, including leased ones."""
    going = groups_going(database, run_id)  # first: a group completed meanwhile counts twice rather than not at all
    counts = experience.counts(database, run_id)
    return going + counts.ready + counts.leased


def settled_runs(database: Database) -> list[UUID]:
    """Returns runs whose tasks have all ended and are on record; a retry of its tasks adds more records."""
    statement = (
        "SELECT e.run_id FROM experience_runs e WHERE NOT EXISTS (SELECT FROM tasks t LEFT JOIN attempts a"
        " ON a.task_id = t.id AND a.number = t.attempts WHERE t.run_id = e.run_id"
        " AND (t.state NOT IN ('succeeded', 'failed', 'cancelled') OR a.id IS NOT NULL"
        " AND NOT EXISTS (SELECT FROM experience_attempts x WHERE x.attempt_id = a.id)))"
    )
    return list(database.sql(statement).scalars())


def why_nothing(database: Database, run_id: UUID) -> str:
    """Returns the most frequent reason why attempts of a run have no committed sample."""
    statement = """
        SELECT coalesce(nullif(x.reason, ''), g.state, t.end_reason, t.state) AS reason, count(*) AS n FROM tasks t
        LEFT JOIN experience_groups g ON g.group_id = t.group_id LEFT JOIN experience_attempts x ON x.task_id = t.id
        WHERE t.run_id = :run GROUP BY 1 ORDER BY 2 DESC LIMIT 1"""
    row = database.sql(statement, {"run": run_id}).one()
    return f"{row.n} times {row.reason}"


@dataclass(frozen=True, slots=True)
class StoredSample:
    """File of one attempt's samples, with its group, agent and replica."""

    group_id: UUID
    key: str
    agent: str
    replica: int


def stored_samples(database: Database, run_id: UUID) -> list[StoredSample]:
    """Returns all files of a run's samples, group by group."""
    statement = """
        SELECT x.group_id, x.key, t.agent, t.replica FROM experience_attempts x JOIN tasks t ON t.id = x.task_id
        WHERE t.run_id = :run AND x.state = 'stored' ORDER BY x.group_id, x.attempt_id"""
    return [StoredSample(**row._mapping) for row in database.sql(statement, {"run": run_id})]


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Results of a step's run. `used`: attempts whose samples are committed or leased, of all `attempts`."""

    scored: int
    reward: float | None  # mean over the scored tasks
    solved: float | None  # share of the scored tasks
    attempts: int
    used: int
    tokens: int  # of the policy itself, in the used attempts
    seconds: float  # from the run's acceptance to its last complete group
    staleness: int | None  # most versions from a group's oldest to the live one when it was handed out

    @property
    def waste(self) -> float:
        """Share of attempts that are not trained on."""
        return 1 - self.used / self.attempts if self.attempts else 0.0


_FIGURES = text(f"""
WITH used AS (
    SELECT g.group_id, g.closed_at, x.trained_tokens, CASE WHEN g.oldest IS NOT NULL THEN ({staleness.LIVE_SINCE}
        AND p.live_at <= coalesce(l.created_at, g.closed_at) AND p.version IS DISTINCT FROM l.version) END AS age
    FROM experience_runs e JOIN experience_groups g ON g.run_id = e.run_id
    LEFT JOIN experience_leases l ON l.id = g.lease_id
    JOIN experience_attempts x ON x.group_id = g.group_id AND x.state = 'stored'
    WHERE e.run_id = :run AND (g.lease_id IS NOT NULL OR :so_far AND g.state = 'ready')
), scored AS (
    SELECT (verdict->>'reward')::float8 AS reward FROM tasks WHERE run_id = :run AND (verdict->>'counts')::bool
)
SELECT (SELECT count(*) FROM scored) AS scored, (SELECT avg(reward) FROM scored) AS reward,
    (SELECT avg(CASE WHEN reward >= 1 THEN 1.0 ELSE 0.0 END)::float8 FROM scored) AS solved,
    (SELECT count(*) FROM attempts a JOIN tasks t ON t.id = a.task_id
        LEFT JOIN experience_groups g ON g.group_id = t.group_id LEFT JOIN experience_attempts x ON x.attempt_id = a.id
        WHERE t.run_id = :run AND NOT (:so_far AND a.number = t.attempts AND coalesce(g.state, 'open') = 'open'
            AND coalesce(x.state, 'stored') = 'stored')) AS attempts,
    count(*) AS used, coalesce(sum(trained_tokens), 0)::bigint AS tokens,
    coalesce(extract(epoch FROM max(closed_at) - (SELECT created_at FROM runs WHERE id = :run)), 0)::float8 AS seconds,
    max(age) AS staleness
FROM used
""")  # noqa: S608 (no input)


def figures(database: Database, run_id: UUID, *, so_far: bool = False) -> StepFigures:
    """Reads the figures of a step's run. so_far: it still runs; complete groups count as used, open ones do not."""
    return StepFigures(**database.sql(_FIGURES, {"run": run_id, "so_far": so_far}).one()._mapping)
