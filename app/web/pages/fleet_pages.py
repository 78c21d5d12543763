"""Pages around the runs: comparison, cleanup, models, experience, users' actions."""

from __future__ import annotations

import time

from app.errors import DatabaseUnavailable, MegaFlowError
from app.evaluation.comparison import SAME
from app.ledger import (
    experience,
    instances,
    limits,
    listings,
    model_replicas,
    model_usage,
    pressure,
    receipts,
    results,
    training,
    users,
)
from app.ledger.database import sql
from app.ledger.dropped import dropped
from app.ledger.staleness import LIVE_SINCE
from app.ledger.users import Scope
from app.web import chaos
from app.web.calls import WebCall
from app.web.pages.page import Pages
from app.web.pages.rendering import PageView

pages = Pages()


@pages.get("/compare")
def compared(call: WebCall) -> PageView:
    """Shows two runs task by task; refused, with the reason, if they differ in more than the model."""
    query = call.query
    allow = tuple(name for name in SAME if query.get(f"allow_{name}"))
    values = {
        "first": query.get("first", ""),
        "second": query.get("second", ""),
        "found": None,
        "refusal": "",
        "same": SAME,
        "allow": allow,
        "names": (),
        "runs": results.runs(call.database, 30, user_name=call.whose),
    }
    if values["first"] and values["second"]:
        ids = [call.run(str(values[name])) for name in ("first", "second")]
        values |= {"ids": ids, "names": [results.run_status(call.database, one).name for one in ids]}
        try:
            values["found"] = call.flow.installation.compare(ids[0], ids[1], allow=allow, power=None)
        except DatabaseUnavailable:
            raise
        except MegaFlowError as error:
            values["refusal"] = str(error)
    return PageView("compare.html", values)


@pages.get("/runs/{run}/cleanup")
def cleanup(call: WebCall) -> PageView:
    """Lists the resources that were made for a run, and those removed."""
    return PageView("cleanup.html", {"receipt": receipts.of_run(call.database, call.run())})


@pages.get("/quarantine", Scope.ADMINISTER)
def quarantine(call: WebCall) -> PageView:
    """Shows draining instances, alarms of the audit, quarantined tasks, and the last chaos report."""
    with call.database.begin() as connection:
        statement = """
            SELECT at, kind, run_id, data FROM events WHERE kind IN ('audit.alarm', 'audit.cleared')
            ORDER BY id DESC LIMIT 50"""
        alarms = sql(connection, statement).all()
        tasks = sql(
            connection,
            "SELECT dataset, task, image, reason, changed_at FROM validations WHERE state = 'quarantined'"
            " ORDER BY changed_at DESC LIMIT 200",
        ).all()
    draining = [one for one in instances.live(call.database) if one.draining_why]
    report = chaos.read(call.services.settings.home)
    return PageView("quarantine.html", {"draining": draining, "alarms": alarms, "tasks": tasks, "chaos": report})


_RECENT = f"""
SELECT c.replica, count(*) AS calls, coalesce(sum(c.retries), 0) AS retries, coalesce(sum(w.waited), 0) AS waited_s,
    count(*) FILTER (WHERE c.status = 429 OR c.end_kind = 'upstream_busy') AS busy FROM model_calls c
{model_usage.WAITED} WHERE c.id > :since AND :user IN ('', c.user_name) GROUP BY 1"""  # noqa: S608 (no input)


_CHANGES = """
SELECT at, user_name, subject, reason, (data->>'capacity')::float8::bigint AS capacity FROM user_actions
WHERE action = 'limit.set' AND subject LIKE 'model%' ORDER BY id DESC LIMIT 200"""


@pages.get("/models")
def models(call: WebCall) -> PageView:
    """Shows inference servers, limits, and tokens by user and by model."""
    user = call.whose
    with call.database.begin() as connection:
        replicas = model_replicas.listed(connection)
        by_model = model_usage.usage(connection, "model", user=user)
        by_user = model_usage.usage(connection, "user", user=user)
        loads = {one.url: one for one in pressure.engines(connection)}
        since = listings.id_of(time.time() - listings.ENGINE_S)
        recent = {row.replica: row for row in sql(connection, _RECENT, {"since": since, "user": user or ""})}
    shown = call.visible(limits.show(call.database, call.services.settings))
    uses = [use for use in shown if use.name.startswith("model")]
    with call.database.begin() as connection:
        changes = [row for row in sql(connection, _CHANGES) if not user or row.subject in {use.name for use in uses}]
    now = {"limits": uses, "changes": changes, "loads": loads, "recent": recent}
    return PageView("models.html", {"replicas": replicas, "by_model": by_model, "by_user": by_user, **now})


_VERSIONS = """
SELECT number, version, state, detail, published_at, live_at FROM policy_versions WHERE policy = :policy
ORDER BY number DESC LIMIT 100"""
_STALENESS = f"""
SELECT CASE WHEN g.oldest IS NOT NULL THEN ({LIVE_SINCE}) END AS behind, count(*) AS groups
FROM experience_groups g JOIN experience_runs e USING (run_id)
WHERE g.run_id = :run AND g.state = 'ready' AND g.lease_id IS NULL GROUP BY 1 ORDER BY 1"""  # noqa: S608 (no input)

_GROUPS = """
SELECT t.id, t.name FROM experience_groups g JOIN tasks t ON t.group_id = g.group_id AND t.replica = 0
WHERE g.run_id = :run AND :state = CASE WHEN g.state = 'ready' AND g.lease_id IS NOT NULL THEN 'leased' ELSE g.state END
ORDER BY t.id LIMIT 500"""


@pages.get("/runs/{run}/experience")
def of_training(call: WebCall) -> PageView:
    """Shows the groups, versions, staleness and waste of a training run."""
    run_id = call.run()
    with call.database.begin() as connection:
        row = sql(connection, "SELECT * FROM experience_runs WHERE run_id = :run", {"run": run_id}).first()
        versions = sql(connection, _VERSIONS, {"policy": row.policy if row else ""}).all()
        staleness = sql(connection, _STALENESS, {"run": run_id}).all()
        selection = {"run": run_id, "state": call.query.get("state", "")}
        groups = sql(connection, _GROUPS, selection).all()
    values = {
        "run": results.run_status(call.database, run_id),
        "feeds": row,
        "groups": experience.counts(call.database, run_id) if row else None,
        "versions": versions,
        "asked": selection,
        "listed": groups,
        "staleness": staleness,
        "dropped": dropped(call.database, run_id),
        "figures": training.figures(call.database, run_id, so_far=True),
    }
    return PageView("experience.html", values)


@pages.get("/actions", Scope.ADMINISTER)
def actions(call: WebCall) -> PageView:
    """Lists the actions of users, with time and reason, and the tokens."""
    return PageView(
        "actions.html", {"actions": users.actions(call.database), "tokens": users.all_tokens(call.database)}
    )
