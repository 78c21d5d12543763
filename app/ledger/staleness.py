"""Delays groups of a training run whose samples would be too many versions old when they are handed out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import Connection, text

from app.errors import SampleRefused
from app.ledger import events
from app.ledger.database import Database, sql
from app.ledger.events import Fact


@dataclass(frozen=True, slots=True)
class PolicyBound:
    """Bound on the groups that a training run begins ahead of its trainer, so that their samples do not get too old.

    A group's age in versions, when its samples are handed out, is at most the number of batches trained meanwhile. So
    `max_staleness` batches may be ahead of the next one: begun, and neither trained on nor set aside.
    """

    begun: int  # groups
    most: int  # groups
    replicas: int  # of a group
    begun_waiting: int  # tasks of begun groups
    held: int  # tasks of the others

    @property
    def room(self) -> int:
        """Number of tasks that may be admitted; those of begun groups come first."""
        return self.begun_waiting + max(0, self.most - self.begun) * self.replicas


_POLICY = text("""
SELECT count(DISTINCT group_id) FILTER (WHERE group_started) - (SELECT count(*) FROM experience_groups g
        WHERE g.run_id = :run AND g.state IN ('committed', 'equal', 'stale', 'lost')) AS begun,
    ceil(count(*)::numeric / count(DISTINCT group_id))::int AS replicas,
    count(*) FILTER (WHERE state = 'pending' AND group_started) AS begun_waiting,
    count(*) FILTER (WHERE state = 'pending' AND NOT group_started) AS held
FROM tasks WHERE run_id = :run
""")


def policy_bound(connection: Connection, run_id: UUID, most: int) -> PolicyBound:
    """Computes a run's bound from all of its tasks. most: groups that may be ahead."""
    return PolicyBound(most=most, **connection.execute(_POLICY, {"run": run_id}).one()._mapping)


def batch_bound(own: int | None, asked: int | None) -> int | None:
    """Returns the bound of one batch. own: the run's. Raises: SampleRefused: `asked` exceeds the run's."""
    if own is not None and asked is not None and asked > own:
        raise SampleRefused(f"expected max_staleness of at most {own}, which is the run's, found {asked}")
    return own if asked is None else asked


def refuse_going_back(connection: Connection, lease_id: UUID, version: str, number: int) -> None:
    """Refuses to commit a version older than the newest that the lease's run has committed. Raises: SampleRefused."""
    newest = sql(
        connection,
        "SELECT max(p.number) FROM experience_leases l JOIN experience_runs r ON r.run_id = l.run_id"
        " JOIN experience_leases c ON c.run_id = l.run_id AND c.state = 'committed'"
        " JOIN policy_versions p ON p.policy = r.policy AND p.version = c.version WHERE l.id = :lease",
        {"lease": lease_id},
    ).scalar()
    if newest is not None and number < newest:
        raise SampleRefused(
            f"expected a version after number {newest}, which was committed; found {version!r}, number {number}:"
            " versions do not go back"
        )


def bound(connection: Connection, run_id: UUID, max_staleness: int) -> None:
    """Sets a run's bound; a trainer that starts again may take older or newer samples than before.

    Raises: SampleRefused: it is negative.
    """
    if max_staleness < 0:
        raise SampleRefused(f"expected max_staleness of at least 0, found {max_staleness}")
    values = {"run": run_id, "bound": max_staleness}
    sql(connection, "UPDATE experience_runs SET max_staleness = :bound WHERE run_id = :run", values)
    sql(
        connection,
        "UPDATE tasks SET bounded = true WHERE id = ANY(ARRAY(SELECT id FROM tasks WHERE run_id = :run AND NOT bounded"
        " ORDER BY id FOR UPDATE))",
        values,
    )


def note_batch(connection: Connection, run_id: UUID, consumer: str, groups: int) -> None:
    """Records how many groups the trainer takes: those requested and those under lease (a step of several batches)."""
    sql(
        connection,
        "UPDATE experience_runs SET consumer = :consumer, batch_groups = n.groups FROM (SELECT :groups + count(*)"
        " AS groups FROM experience_groups WHERE run_id = :run AND state = 'ready' AND lease_id IS NOT NULL) n"
        " WHERE run_id = :run AND (consumer, batch_groups) IS DISTINCT FROM (:consumer, n.groups)",
        {"run": run_id, "consumer": consumer, "groups": groups},
    )


LIVE_SINCE = """SELECT count(*) FROM policy_versions p
    WHERE p.policy = e.policy AND p.number > g.oldest AND p.live_at IS NOT NULL"""
"""SQL for the staleness of a group `g` of the experience run `e`; only where `g.oldest` is a number."""

# A group that lacks a number for one of its versions counts as older than all others, whose numbers begin at 0.
_SET_ASIDE = text("""
UPDATE experience_groups SET state = 'stale' WHERE run_id = :run AND state = 'ready' AND lease_id IS NULL
    AND NOT coalesce(oldest >= :least, :unversioned)
""")
_FRESH = text("""
SELECT group_id FROM experience_groups WHERE run_id = :run AND state = 'ready' AND lease_id IS NULL
    AND coalesce(oldest >= :least, :unversioned) ORDER BY closed_at, group_id LIMIT :most FOR UPDATE
""")


def oldest_live(connection: Connection, policy: str, behind: int | None) -> int | None:
    """Returns the number of the live version `behind` versions before the newest; refused versions do not count.

    None: without a bound.
    """
    if behind is None:
        return None
    statement = (
        "SELECT number FROM policy_versions WHERE policy = :policy AND live_at IS NOT NULL"
        " ORDER BY number DESC OFFSET :behind LIMIT 1"
    )
    return sql(connection, statement, {"policy": policy, "behind": behind}).scalar() or 0


def fresh_groups(
    connection: Connection, run_id: UUID, most: int, oldest: int | None, *, scripted: bool
) -> Sequence[UUID]:
    """Returns the first complete groups, at most `most`; those that are too old are set aside as `stale`.

    oldest: number of the oldest version allowed in them; None: any on record or, with `scripted`, also none, as scripts
    have no version.
    """
    values = {"run": run_id, "most": most, "least": oldest or 0, "unversioned": scripted and oldest is None}
    connection.execute(_SET_ASIDE, values)
    return connection.execute(_FRESH, values).scalars().all()


def set_lost(database: Database, lease_id: UUID, key: str, why: str) -> None:
    """Returns an open lease's groups, but marks the group of an unreadable file of samples as `lost`."""
    values = {"lease": lease_id, "key": key, "why": f"{key}: {why}"[:1000]}
    with database.begin() as connection:
        given = "UPDATE experience_leases SET state = 'lapsed' WHERE id = :lease AND state = 'open' RETURNING run_id"
        if (run_id := sql(connection, given, values).scalar()) is None:
            return
        lost = sql(
            connection,
            "UPDATE experience_groups SET state = 'lost', detail = :why WHERE lease_id = :lease AND group_id IN"
            " (SELECT group_id FROM experience_attempts WHERE key = :key) RETURNING group_id",
            values,
        )
        for group_id in lost.scalars():
            events.append(connection, Fact("group.lost", run_id, data={"group": str(group_id)}))
        sql(connection, "UPDATE experience_groups SET lease_id = NULL WHERE lease_id = :lease", values)
