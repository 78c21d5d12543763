"""Finds the persistent pools in which most of what ran lately failed for reasons of the infrastructure."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Connection, text

from app.models.instance import queue_of
from app.models.spec import Mode

LEAST_TASKS = 3
"""Different tasks that failed: one that fails again and again says nothing about its pool."""

# What failed is few and has an index of its own; what ended well is only counted where enough has failed.
_FAILING = text("""
WITH faults AS (
    SELECT resource_class, task_id, instance_id FROM attempts
    WHERE mode = 'persistent' AND end_reason IN ('infrastructure', 'environment_error', 'lost')
        AND gradings = 0 -- else it is a grader that failed
        AND resource_class = ANY(CAST(:classes AS text[]))
        AND finished_at > clock_timestamp() - make_interval(secs => :s)
), suspects AS (
    SELECT resource_class, count(*) AS faults FROM faults GROUP BY 1 HAVING count(DISTINCT task_id) >= :least
), pool AS (
    SELECT id, resource_class FROM instances WHERE state NOT IN ('terminated', 'failed') AND mode = 'persistent'
        AND resource_class IN (SELECT resource_class FROM suspects)
    UNION SELECT instance_id, resource_class FROM faults WHERE instance_id IS NOT NULL
)
SELECT s.resource_class FROM suspects s WHERE 2 * s.faults > (
    SELECT count(*) FROM pool p JOIN attempts a ON a.instance_id = p.id
    WHERE p.resource_class = s.resource_class AND a.finished_at > clock_timestamp() - make_interval(secs => :s))
""")


def failing(connection: Connection, resource_classes: Collection[str], within_s: float) -> frozenset[str]:
    """Of these classes, those in whose pool attempts of several tasks, and most of all, failed in the last seconds."""
    values = {"classes": list(resource_classes), "s": within_s, "least": LEAST_TASKS}
    return frozenset(connection.execute(_FAILING, values).scalars())


def limit_name(resource_class: str) -> str:
    """How it is called beside the limits that tasks of mode `auto` keep away from a pool."""
    return f"pool-failing:{queue_of(Mode.PERSISTENT, resource_class)}"
