"""Sums up the use of models and environments: tokens, dollars, time; by task, run, user, agent or model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Connection

from app.ledger.database import sql
from app.ledger.report_rows import GRADED_ON, GRADING_S, Price, place_usd
from app.models.kinds import UsageBy as By

SUMS = """count(*) AS calls, count(*) FILTER (WHERE c.is_turn) AS turns,
    coalesce(sum(c.prompt_tokens), 0) AS prompt_tokens, coalesce(sum(c.completion_tokens), 0) AS completion_tokens,
    coalesce(sum(c.cached_tokens), 0) AS cached_tokens, coalesce(sum(c.cost_usd), 0) AS cost_usd,
    count(*) FILTER (WHERE c.cost_usd IS NULL) AS unpriced_calls, count(*) FILTER (WHERE c.scripted) AS scripted_calls,
    coalesce(sum(w.waited), 0) AS waited_s,
    coalesce(sum(greatest(c.duration_s - coalesce(w.waited, 0), 0)), 0) AS model_s"""
WAITED = "LEFT JOIN LATERAL (SELECT sum(value::float8) AS waited FROM jsonb_each_text(c.waited)) w ON c.waited <> '{}'"
_WASTE = """coalesce(sum(c.completion_tokens) FILTER (WHERE t.end_reason = 'superseded'), 0) AS waste_tokens,
    coalesce(sum(c.cost_usd) FILTER (WHERE t.end_reason = 'superseded'), 0) AS waste_usd"""
_CALL_KEYS: Mapping[By, str] = {
    "task": "t.name || ' #' || t.replica",
    "run": "r.name",
    "user": "c.user_name",
    "agent": "t.agent",
    "model": "c.model",
}
_IDS: Mapping[By, str] = {"task": "t.id", "run": "t.run_id"}
_ATTEMPT_KEYS: Mapping[By, str] = {**_CALL_KEYS, "user": "t.user_name"}


@dataclass(frozen=True, slots=True)
class UsageRow:
    """Use of one key. `cost_usd`: of the calls whose price is known, None when it is known for none.

    `environment_s`: how long containers (or their substitutes) were held, of agent and grading; `grading_s`: of these,
    the verifier's, and `grading_usd` the cost of its slot. None where it is unknown, as by model.
    """

    key: str
    id: UUID | None = None  # of the task or run
    attempts: int | None = None
    calls: int = 0
    turns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cost_usd: float | None = None
    unpriced_calls: int = 0
    scripted_calls: int = 0  # answered by a replay engine
    waste_tokens: int = 0  # completion tokens of superseded attempts
    waste_usd: float = 0.0  # known cost of superseded attempts
    model_s: float = 0.0
    waited_s: float = 0.0
    environment_s: float | None = None
    grading_s: float | None = None
    grading_usd: float | None = None


def usage(
    connection: Connection,
    by: By,
    *,
    run_id: UUID | None = None,
    user: str | None = None,
    price: Price | None = None,
) -> list[UsageRow]:
    """Returns the use by `by`, most expensive first."""
    given = {name: value for name, value in {"run": run_id, "user": user}.items() if value is not None}
    key_id = _IDS.get(by, "CAST(NULL AS uuid)")
    calls = sql(
        connection,
        f"SELECT {_CALL_KEYS[by]} AS key, {key_id} AS id, {SUMS}, {_WASTE}"  # noqa: S608
        f" FROM model_calls c JOIN tasks t ON t.id = c.task_id JOIN runs r ON r.id = c.run_id {WAITED}"
        f"{_where('c.run_id', 'c.user_name', given)} GROUP BY 1, 2",
        given,
    ).all()
    groups: dict[tuple[str, UUID | None], dict[str, Any]] = {}
    for row in calls:
        facts = dict(row._mapping)
        if facts["unpriced_calls"] and not facts["cost_usd"]:
            facts["cost_usd"] = None
        groups[(facts["key"], facts["id"])] = facts
    if by != "model":
        for row in _held(connection, by, key_id, given):
            facts = groups.setdefault((row.key, row.id), {"key": row.key, "id": row.id})
            hour_usd = place_usd(price, row.provider, row.resource_class, row.slots)
            held = {"attempts": row.attempts, "environment_s": row.held_s, "grading_s": row.grading_s}
            held |= {"grading_usd": None if hour_usd is None else row.grading_s * hour_usd / 3600}
            facts |= {name: _added(facts.get(name), value) for name, value in held.items()}
    rows = [UsageRow(**facts) for facts in groups.values()]
    return sorted(rows, key=lambda row: (-(row.cost_usd or 0.0), -row.prompt_tokens, row.key))


def _added(known: Any, more: Any) -> Any:
    """Adds two numbers; None counts as unknown and is skipped."""
    return known if more is None else more + (known or 0)


def _held(connection: Connection, by: By, key_id: str, given: Mapping[str, Any]) -> list[Any]:
    """Returns attempts by the instance that graded, and the time for which they held environments: from the first one's
    start to the last one's end, without the wait for a grader."""
    where = _where("t.run_id", "t.user_name", given)
    return list(
        sql(
            connection,
            f"SELECT {_ATTEMPT_KEYS[by]} AS key, {key_id} AS id, count(*) AS attempts,"  # noqa: S608
            " sum(greatest(extract(epoch FROM coalesce((a.phases->>'stored')::timestamptz, a.finished_at)"
            " - (a.phases->>'image_ready')::timestamptz"
            " - coalesce((a.phases->>'grading_started')::timestamptz - (a.phases->>'grading_queued')::timestamptz,"
            " interval '0')), 0))::float8 AS held_s,"
            f" coalesce(sum({GRADING_S}), 0) AS grading_s, g.provider, g.resource_class, g.slots"
            f" FROM attempts a JOIN tasks t ON t.id = a.task_id JOIN runs r ON r.id = t.run_id {GRADED_ON}"
            f"{where}{' AND' if where else ' WHERE'} a.claimed_at IS NOT NULL"
            " GROUP BY 1, 2, g.provider, g.resource_class, g.slots",
            given,
        )
    )


def _where(run: str, user: str, given: Mapping[str, Any]) -> str:
    conditions = {"run": f"{run} = :run", "user": f"{user} = :user"}
    chosen = [condition for name, condition in conditions.items() if name in given]
    return f" WHERE {' AND '.join(chosen)}" if chosen else ""
