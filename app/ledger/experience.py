"""Records training samples in groups, and delivers each group once.

A group is leased to one consumer. When the lease lapses, the group is offered again and a late commit is refused.
A commit is final. All decisions are made in PostgreSQL, so that a killed consumer loses and duplicates nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from uuid import UUID

from sqlalchemy import Connection, text
from uuid_utils import compat as uuids

from app.errors import SampleRefused, UnknownName
from app.ledger import events, replicas, staleness
from app.ledger.database import Database, sql


@dataclass(frozen=True, slots=True)
class ExperienceRun:
    """Rules for closing a run's groups and delivering them."""

    run_id: UUID
    policy: str
    quorum: int | None = None  # None: as the run was submitted
    drop_equal: bool = False
    allow_scripted: bool = False
    max_staleness: int | None = None  # versions between the live one and the oldest in a group; None: not bounded


@dataclass(frozen=True, slots=True)
class EndedAttempt:
    """An ended attempt of a training run that is not recorded yet."""

    attempt_id: UUID
    task_id: UUID
    number: int
    run_id: UUID
    group_id: UUID
    task: str
    agent: str
    policy: str
    end_reason: str
    reward: float | None  # None: not scored
    reward_parts: dict[str, float]
    unusable: str  # why it cannot become a sample; empty: it can
    calls_key: str | None  # of the artifact `model_calls`


@dataclass(frozen=True, slots=True)
class StoredSamples:
    """Samples made from one attempt."""

    key: str
    samples: int
    tokens: int
    trained_tokens: int
    versions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lease:
    """Groups that a consumer may train on until the lease lapses. `keys`: the files of the groups' samples."""

    id: UUID
    groups: tuple[UUID, ...]
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ExperienceCounts:
    """Counts of a run's groups by state."""

    open: int = 0
    ready: int = 0
    leased: int = 0
    committed: int = 0
    equal: int = 0
    stale: int = 0
    lost: int = 0


_MOST_NAME = 200


def publish(database: Database, policy: str, version: str, weights: str | None = None) -> int:
    """Records a version, which is not live yet; returns its number. Publishing it again gives the same number.

    weights: path on its inference servers, from which they can load the version again.

    Raises: SampleRefused: its name cannot be shown, it was refused before, or a newer one is live; DatabaseUnavailable.
    """
    if not version.strip() or not version.isprintable() or len(version) > _MOST_NAME:
        expected = f"a version's name of 1 to {_MOST_NAME} characters that can be shown"
        raise SampleRefused(f"expected {expected}, found {version[:_MOST_NAME]!r}; nothing was changed")
    with database.begin() as connection:
        values = {"policy": policy, "version": version, "weights": weights}
        sql(connection, "SELECT pg_advisory_xact_lock(hashtextextended('policy:' || :policy, 0))", values)
        statement = "SELECT number, state FROM policy_versions WHERE policy = :policy AND version = :version"
        row = sql(connection, statement, values).first()
        if row is not None and row.state == "refused":
            raise SampleRefused(f"version {version!r} of {policy} was refused before; publish it under a new name")
        if row is not None:
            _refuse_older(connection, policy, version, row.number)
            return int(row.number)
        return int(
            sql(
                connection,
                "INSERT INTO policy_versions (policy, number, version, weights) SELECT :policy,"
                " coalesce((SELECT max(number) + 1 FROM policy_versions WHERE policy = :policy), 0), :version, :weights"
                " RETURNING number",
                values,
            ).scalar_one()
        )


def publish_for_run(database: Database, policy: str, version: str) -> int:
    """Publishes a version as `publish` does. Raises: UnknownName: no run feeds the policy; SampleRefused."""
    if database.sql("SELECT 1 FROM experience_runs WHERE policy = :p LIMIT 1", {"p": policy}).first() is None:
        raise UnknownName(f"unknown policy {policy!r}: no run feeds it; `megaflow experience open` first")
    return publish(database, policy, version)


def settle(database: Database, policy: str, version: str, *, refused: str = "") -> None:
    """Makes a published version live, or refuses it. refused: the reason; empty: it becomes live.

    Raises: UnknownName: it was not published. SampleRefused: a newer version is live: versions do not go back.
    """
    with database.begin() as connection:
        values = {"policy": policy, "version": version, "refused": refused}
        number = sql(
            connection,
            "SELECT number FROM policy_versions WHERE policy = :policy AND version = :version FOR UPDATE",
            values,
        ).scalar()
        if number is None:
            raise UnknownName(f"unknown version {version!r} of {policy}; publish it first")
        if not refused:
            _refuse_older(connection, policy, version, number)
        sql(
            connection,
            "UPDATE policy_versions SET state = CASE WHEN :refused = '' THEN 'live' ELSE 'refused' END,"
            " detail = :refused, live_at = CASE WHEN :refused = '' THEN coalesce(live_at, clock_timestamp()) END"
            " WHERE policy = :policy AND version = :version",
            values,
        )


def _refuse_older(connection: Connection, policy: str, version: str, number: int) -> None:
    """Raises: SampleRefused: a newer one is live."""
    newest = live_number(connection, policy)
    if newest is not None and newest > number:
        raise SampleRefused(
            f"expected a version after number {newest} of {policy}, which is live; found {version!r}, number {number}:"
            " versions do not go back; publish its weights under a new name"
        )


def live_number(connection: Connection, policy: str) -> int | None:
    """Returns the number of the newest live version; None: there is none."""
    statement = "SELECT max(number) FROM policy_versions WHERE policy = :policy AND state = 'live'"
    number: int | None = sql(connection, statement, {"policy": policy}).scalar()
    return number


def live_weights(connection: Connection, policy: str) -> str | None:
    """Returns the path of the newest live version's weights; None: no live version, or the path is unknown."""
    statement = "SELECT weights FROM policy_versions WHERE policy = :policy AND state = 'live' ORDER BY number DESC"
    path: str | None = sql(connection, f"{statement} LIMIT 1", {"policy": policy}).scalar()
    return path


def open_run(database: Database, run: ExperienceRun) -> None:
    """Makes a run's attempts become samples. Raises: UnknownName; SampleRefused: no training run, or other options."""
    values = asdict(run)
    with database.begin() as connection:
        row = sql(connection, "SELECT purpose, quorum FROM runs WHERE id = :run_id", values).first()
        if row is None:
            raise UnknownName(f"unknown run {run.run_id}; `megaflow runs` lists them")
        if row.purpose != "training":
            raise SampleRefused(f"expected a run with the purpose `training`, found {row.purpose!r}; submit it as one")
        if None not in (run.quorum, row.quorum) and run.quorum != row.quorum:
            raise SampleRefused(f"expected quorum {row.quorum}, as run {run.run_id} has; found {run.quorum}")
        values["quorum"] = run.quorum or row.quorum
        sql(
            connection,
            "INSERT INTO experience_runs (run_id, policy, quorum, drop_equal, allow_scripted)"
            " VALUES (:run_id, :policy, :quorum, :drop_equal, :allow_scripted) ON CONFLICT (run_id) DO NOTHING",
            values,
        )
        if run.max_staleness is not None:
            staleness.bound(connection, run.run_id, run.max_staleness)
        stored = sql(connection, "SELECT * FROM experience_runs WHERE run_id = :run_id", values).one()
        for name in ("policy", "quorum", "drop_equal"):
            if getattr(stored, name) != values[name]:
                raise SampleRefused(
                    f"expected {name} {getattr(stored, name)}, as run {run.run_id} has; found {values[name]}"
                )


_ENDED = text("""
SELECT a.id AS attempt_id, t.id AS task_id, a.number, t.run_id, t.group_id, t.name AS task, t.agent, e.policy,
    coalesce(a.end_reason, '') AS end_reason, (a.verdict->>'reward')::float8 AS reward,
    coalesce(a.verdict->'metrics', '{}') AS reward_parts, c.key AS calls_key,
    CASE WHEN a.verdict IS NULL THEN 'not scored: ' || coalesce(a.end_reason, a.state)
        WHEN a.verdict->>'reward' IS NULL THEN 'its verdict has no reward'
        WHEN a.scripted AND NOT e.allow_scripted THEN 'answered by a script'
        WHEN NOT (a.verdict->>'counts')::bool THEN 'its verdict does not count'
        WHEN c.key IS NULL THEN 'its model calls were not kept'
        ELSE '' END AS unusable
FROM experience_runs e
JOIN tasks t ON t.run_id = e.run_id
JOIN attempts a ON a.task_id = t.id AND a.number = t.attempts
LEFT JOIN artifacts c ON c.attempt_id = a.id AND c.kind = 'model_calls'
WHERE t.state IN ('succeeded', 'failed', 'cancelled') AND e.run_id <> ALL(CAST(:settled AS uuid[]))
    AND NOT EXISTS (SELECT FROM experience_attempts x WHERE x.attempt_id = a.id)
    AND EXISTS (SELECT FROM runs r WHERE r.id = e.run_id)
ORDER BY t.finished_at LIMIT :most
""")


def ended_attempts(database: Database, most: int, settled: Sequence[UUID] = ()) -> list[EndedAttempt]:
    """Returns last attempts of ended tasks that are not recorded yet, of runs that feed a trainer; at most `most`.

    settled: runs to skip; the query reads all tasks of the others.
    """
    values = {"most": most, "settled": list(settled)}
    return [EndedAttempt(**row._mapping) for row in database.sql(_ENDED, values)]


def record(database: Database, ended: EndedAttempt, made: StoredSamples | None, reason: str = "") -> list[UUID] | None:
    """Records the samples of an attempt, or why it has none, and settles its group.

    Returns the running attempts that the group no longer needs and that must be stopped; None: it was recorded before.
    """
    with database.begin() as connection:
        values = {"group": ended.group_id, "run": ended.run_id, "attempt": ended.attempt_id, "task": ended.task_id}
        sql(
            connection,
            "INSERT INTO experience_groups (group_id, run_id) VALUES (:group, :run) ON CONFLICT DO NOTHING",
            values,
        )
        sql(connection, "SELECT 1 FROM experience_groups WHERE group_id = :group FOR UPDATE", values)
        about = values | {"policy": ended.policy, "versions": list(made.versions) if made else []}
        unknown = sql(connection, _UNKNOWN, about).scalars().all()
        if unknown:
            reason = f"written by versions of {ended.policy} that are not on record: {', '.join(map(repr, unknown))}"
        written = sql(
            connection,
            _RECORD,
            about
            | {
                "state": "nothing" if made is None else "stored",
                "reason": reason[:1000],
                "key": made.key if made else None,
                "samples": made.samples if made else 0,
                "tokens": made.tokens if made else 0,
                "trained": made.trained_tokens if made else 0,
                "known": not unknown,
                "reward": ended.reward,
            },
        ).first()
        if written is None:
            return None
        connection.execute(_AGE, values)
        return replicas.settle(connection, ended.group_id)


_UNKNOWN = """
SELECT v FROM unnest(CAST(:versions AS text[])) v JOIN experience_runs e ON e.run_id = :run AND NOT e.allow_scripted
WHERE NOT EXISTS (SELECT FROM policy_versions WHERE policy = :policy AND version = v)"""

# If one of its versions is not on record, `oldest` is null: the attempt's samples count as the stalest possible.
_RECORD = """
INSERT INTO experience_attempts (attempt_id, task_id, group_id, state, reason, key, samples, tokens, trained_tokens,
    reward, oldest)
VALUES (:attempt, :task, :group, :state, :reason, :key, :samples, :tokens, :trained, :reward, (
    SELECT min(number) FROM policy_versions
    WHERE policy = :policy AND version = ANY(CAST(:versions AS text[])) AND :known))
ON CONFLICT DO NOTHING RETURNING 1"""

# Samples of replicas that end after the quorum count as long as their group is not committed.
_AGE = text("""
UPDATE experience_groups g SET oldest = s.oldest FROM (
    SELECT CASE WHEN bool_and(oldest IS NOT NULL) THEN min(oldest) END AS oldest
    FROM experience_attempts WHERE group_id = :group AND state = 'stored'
) s WHERE g.group_id = :group AND g.state = 'ready'
""")


def next_batch(
    database: Database, run_id: UUID, consumer: str, *, groups: int, lease_s: float, max_staleness: int | None = None
) -> Lease | None:
    """Leases the oldest complete groups, at most `groups`, to a run's only consumer; None: none is ready.

    max_staleness: a bound for this batch, at most the run's own; older groups are set aside as `stale`. A group with
    samples of an unknown version counts as the stalest possible, with or without a bound.

    Raises: UnknownName: the run feeds no trainer. SampleRefused: another consumer; no live version; too high a bound.
    """
    values = {"run": run_id, "consumer": consumer, "most": groups, "lease_s": lease_s}
    with database.begin() as connection:
        run = sql(
            connection,
            "SELECT policy, consumer, allow_scripted, max_staleness FROM experience_runs"
            " WHERE run_id = :run FOR UPDATE",
            values,
        ).first()
        if run is None:
            raise UnknownName(f"run {run_id} feeds no trainer; `megaflow experience open RUN --policy NAME` first")
        if run.consumer not in (None, consumer):
            raise SampleRefused(
                f"expected one trainer for a run; found {consumer!r} beside {run.consumer!r}, which has it: "
                "stop that one, and release it"
            )
        _lapse(connection, run_id)
        staleness.note_batch(connection, run_id, consumer, groups)
        live = live_number(connection, run.policy)
        if live is None and not run.allow_scripted:
            raise SampleRefused(
                f"expected a live version of {run.policy!r}, found none; try `megaflow models publish {run.policy}"
                " --version NAME --probe FILE` before its tasks run"
            )
        behind = staleness.batch_bound(run.max_staleness, max_staleness)
        oldest = None if live is None else staleness.oldest_live(connection, run.policy, behind)
        if not (chosen := staleness.fresh_groups(connection, run_id, groups, oldest, scripted=run.allow_scripted)):
            return None
        lease_id = uuids.uuid7()
        lease = {"lease": lease_id, "groups": list(chosen), **values}
        sql(
            connection,
            "INSERT INTO experience_leases (id, run_id, consumer, expires_at) VALUES (:lease, :run, :consumer,"
            " clock_timestamp() + make_interval(secs => :lease_s))",
            lease,
        )
        sql(connection, "UPDATE experience_groups SET lease_id = :lease WHERE group_id = ANY(:groups)", lease)
        keys = sql(
            connection,
            "SELECT key FROM experience_attempts WHERE group_id = ANY(:groups) AND state = 'stored'"
            " ORDER BY group_id, attempt_id",
            lease,
        ).scalars()
        return Lease(lease_id, tuple(chosen), tuple(keys))


def _lapse(connection: Connection, run_id: UUID) -> None:
    """Ends leases that have expired; their groups are offered again."""
    sql(
        connection,
        "WITH lapsed AS (UPDATE experience_leases SET state = 'lapsed' WHERE run_id = :run AND state = 'open'"
        " AND expires_at <= clock_timestamp() RETURNING id)"
        " UPDATE experience_groups SET lease_id = NULL WHERE lease_id IN (SELECT id FROM lapsed)",
        {"run": run_id},
    )


def renew(database: Database, lease_id: UUID, *, lease_s: float) -> None:
    """Extends a lease to `lease_s` seconds from now. Raises: UnknownName; SampleRefused: it is no longer open."""
    states = database.sql(
        "UPDATE experience_leases SET expires_at = CASE WHEN state = 'open' THEN clock_timestamp()"
        " + make_interval(secs => :lease_s) ELSE expires_at END WHERE id = :lease RETURNING state",
        {"lease": lease_id, "lease_s": lease_s},
    )
    if (state := states.scalar()) is None:
        raise UnknownName(f"unknown lease {lease_id}")
    if state != "open":
        raise SampleRefused(f"expected an open lease, found that {lease_id} has lapsed or is committed")


def commit(database: Database, lease_id: UUID, version: str) -> None:
    """Records that a lease's groups were trained on, which is final. Repeating with the same version changes nothing.

    Raises: SampleRefused: the lease has lapsed or was committed with another version; the version was refused, or a
        newer one is live or was committed before. UnknownName: no such lease, or the version was not published.
    """
    values = {"lease": lease_id, "version": version}
    with database.begin() as connection:
        lease = sql(
            connection, "SELECT state, version FROM experience_leases WHERE id = :lease FOR UPDATE", values
        ).first()
        if lease is None:
            raise UnknownName(f"unknown lease {lease_id}")
        if lease.state == "committed" and lease.version == version:
            return
        statement = (
            "SELECT p.policy, p.number, p.state FROM policy_versions p JOIN experience_runs r ON r.policy = p.policy"
            " JOIN experience_leases l ON l.run_id = r.run_id WHERE l.id = :lease AND p.version = :version"
        )
        known = sql(connection, statement, values).first()
        if known is None:
            raise UnknownName(f"unknown version {version!r} of the run's policy; publish it before the commit")
        if lease.state != "open":
            what = f"committed with version {lease.version!r}" if lease.state == "committed" else "lapsed"
            raise SampleRefused(f"expected an open lease; found that {lease_id} is {what}: nothing was committed now")
        if known.state == "refused":
            raise SampleRefused(
                f"version {version!r} of {known.policy} was refused; publish its weights under a new name"
            )
        _refuse_older(connection, known.policy, version, known.number)
        staleness.refuse_going_back(connection, lease_id, version, known.number)
        sql(
            connection,
            "UPDATE experience_leases SET state = 'committed', committed_at = clock_timestamp(), version = :version"
            " WHERE id = :lease",
            values,
        )
        sql(connection, "UPDATE experience_groups SET state = 'committed' WHERE lease_id = :lease", values)
        events.wake_dispatcher(connection)  # tasks may be waiting for a new policy version


def release(database: Database, run_id: UUID, consumer: str) -> None:
    """Frees a run for another consumer: open leases lapse at once. Raises: SampleRefused: another consumer has it."""
    with database.begin() as connection:
        values = {"run": run_id, "consumer": consumer}
        statement = "SELECT consumer FROM experience_runs WHERE run_id = :run FOR UPDATE"
        if (holder := sql(connection, statement, values).scalar()) not in (None, consumer):
            raise SampleRefused(f"expected {holder!r}, which has the run, found {consumer!r}; nothing was released")
        sql(
            connection,
            "UPDATE experience_leases SET expires_at = clock_timestamp() WHERE run_id = :run AND consumer = :consumer"
            " AND state = 'open'",
            values,
        )
        _lapse(connection, run_id)
        sql(
            connection,
            "UPDATE experience_runs SET consumer = NULL WHERE run_id = :run AND consumer = :consumer",
            values,
        )


def counts(database: Database, run_id: UUID) -> ExperienceCounts:
    """Counts the groups of a run by state."""
    statement = (
        "SELECT CASE WHEN state = 'ready' AND lease_id IS NOT NULL THEN 'leased' ELSE state END AS what,"
        " count(*) AS n FROM experience_groups WHERE run_id = :run GROUP BY 1"
    )
    return ExperienceCounts(**{row.what: row.n for row in database.sql(statement, {"run": run_id})})
