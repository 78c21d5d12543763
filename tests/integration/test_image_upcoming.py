"""The forecast of what the queue needs, on a real PostgreSQL: order, replicas, pauses, what is under way."""

from __future__ import annotations

from sqlalchemy import event

from app.ledger import accept, quotas
from app.ledger.accept import NewRun
from app.ledger.database import Database
from app.ledger.upcoming import Upcoming
from app.models.spec import Bundle, Compose, EnvironmentKind, EnvironmentSpec, Mode, TaskSpec
from app.scheduling.dispatcher import Dispatcher
from app.settings import Settings
from tests.building import a_task, dispatched
from tests.integration import rows


def spec(image: str, kind: EnvironmentKind = EnvironmentKind.DOCKER) -> TaskSpec:
    task = a_task(f"task-of-{image}").model_copy(update={"environment": EnvironmentSpec(image=image, kind=kind)})
    return TaskSpec(task=task, agent="nop", mode=Mode.EPHEMERAL)


def submit(
    database: Database, settings: Settings, *images: str, user: str = "alice", priority: int = 0, replicas: int = 1
) -> accept.Accepted:
    new = NewRun([spec(i) for i in images], user_name=user, priority=priority, replicas=replicas)
    return accept.accept(database, new, settings)


def order(database: Database, *, fair: bool = True) -> list[str | None]:
    return [need.environment.image for need in Upcoming(database, fair=fair).needs()]


def test_each_image_comes_once_in_the_order_of_the_queue(database: Database, settings: Settings) -> None:
    submit(database, settings, "a", "b", "a", replicas=3)
    submit(database, settings, "urgent", priority=5)
    found = Upcoming(database).needs()
    assert [(need.environment.image, need.position, need.tasks) for need in found] == [
        ("urgent", 1, 1),
        ("a", 2, 6),
        ("b", 5, 3),
    ]


def test_projects_of_several_containers_are_told_apart(database: Database, settings: Settings) -> None:
    contexts = [Compose(context=Bundle(sha256=digit * 64, size_bytes=1)) for digit in "aba"]
    projects = [*contexts, contexts[0].model_copy(update={"file": "other.yaml"})]
    asked = [
        TaskSpec(
            task=a_task(f"t-{n}").model_copy(update={"environment": EnvironmentSpec(compose=project)}),
            agent="nop",
            mode=Mode.EPHEMERAL,
        )
        for n, project in enumerate(projects)
    ]
    accept.accept(database, NewRun(asked), settings)
    found = [(need.environment.compose, need.position, need.tasks) for need in Upcoming(database).needs()]
    assert found == [(projects[0], 1, 2), (projects[1], 2, 1), (projects[3], 4, 1)]


def test_users_take_turns_unless_it_is_first_come_first_served(database: Database, settings: Settings) -> None:
    submit(database, settings, "a1", "a2", "a3", user="alice")
    submit(database, settings, "b1", "b2", user="bob")
    assert order(database) == ["a1", "b1", "a2", "b2", "a3"]
    assert order(database, fair=False) == ["a1", "a2", "a3", "b1", "b2"]
    quotas.set_quota(database, "bob", weight=4.0)
    assert order(database)[:3] == ["a1", "b1", "b2"]


def test_what_an_attempt_has_or_is_about_to_have_comes_first(database: Database, settings: Settings) -> None:
    run = submit(database, settings, "a", "b")
    submit(database, settings, "c", user="bob")
    dispatched(database, accept.Accepted(run.run_id, run.task_ids[1:], run.names[1:]), Mode.EPHEMERAL)
    found = [(need.environment.image, need.position) for need in Upcoming(database).needs()]
    assert found == [("b", 0), ("c", 1), ("a", 2)]  # alice holds a slot: bob's turn


def test_what_needs_no_image_is_left_out(database: Database, settings: Settings) -> None:
    submit(database, settings, "b", user="bob")
    local = spec("folder", EnvironmentKind.LOCAL)
    accept.accept(database, NewRun([local], user_name="bob"), settings)
    rows.a_task(database, rows.a_run(database))  # a spec that we cannot read
    assert order(database) == ["b"]


def test_only_the_head_of_a_long_queue_is_read_and_specs_only_once(database: Database, settings: Settings) -> None:
    submit(database, settings, *(f"i{n:03}" for n in range(120)))
    upcoming = Upcoming(database)
    asked: list[str] = []
    with database.begin() as connection:
        engine = connection.engine
    event.listen(engine, "before_cursor_execute", lambda *a: asked.append(a[2]))
    assert [need.environment.image for need in upcoming.needs(50)] == [f"i{n:03}" for n in range(50)]
    assert sum("FROM specs" in statement for statement in asked) == 1
    upcoming.needs(50)
    assert sum("FROM specs" in statement for statement in asked) == 1


def test_the_forecast_is_what_the_dispatcher_then_does(database: Database, settings: Settings) -> None:
    for user, images in {"alice": "abcd", "bob": "efg", "carol": "hi"}.items():
        submit(database, settings, *images, user=user, priority=1 if user == "carol" else 0)
    quotas.set_quota(database, "bob", weight=2.0)
    forecast = order(database)
    one_by_one = settings.model_copy(update={"ephemeral_capacity": 100, "dispatch_batch": 1})
    dispatcher = Dispatcher(database, one_by_one, lambda _, requests: {}, lambda items: None)
    while dispatcher.pass_once():
        pass
    with database.begin() as connection:
        found = connection.exec_driver_sql(
            "SELECT s.body::json -> 'task' -> 'environment' ->> 'image' AS image FROM attempts a"
            " JOIN tasks t ON t.id = a.task_id JOIN specs s ON s.digest = t.spec_digest ORDER BY a.dispatched_at"
        )
        assert [row.image for row in found] == forecast
