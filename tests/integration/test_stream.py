"""The stream and its command against a real PostgreSQL: positions, filters, followers, pipes and signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Any
from uuid import UUID, uuid4

import pytest

from app.errors import DatabaseUnavailable, SpecInvalid
from app.ledger import stream
from app.ledger.database import Database
from app.ledger.events import Fact, append, wake_dispatcher
from app.ledger.stream import EventFilter
from tests.integration.rows import kill_sessions, write
from tests.waiting import eventually, in_background

_EVENTS = "import typer; from app.cli.events import events; typer.run(events)"


def tell(
    database: Database, *numbers: int, kind: str = "task.counted", run_id: UUID | None = None, task: UUID | None = None
) -> None:
    with database.begin() as connection:
        append(connection, *(Fact(kind, run_id, task, data={"number": number}) for number in numbers))
        wake_dispatcher(connection)


def numbers(found: stream.Page) -> list[int]:
    return [streamed.event.data["number"] for streamed in found.events]


def test_pages_follow_each_other_and_every_fact_has_a_position_to_resume_from(database: Database) -> None:
    for number in range(10):
        tell(database, number)
    page = stream.read(database, stream.START, 4)
    assert numbers(page) == [0, 1, 2, 3]
    tell(database, 10)
    rest = stream.read(database, page.position, 100)
    assert numbers(rest) == [4, 5, 6, 7, 8, 9, 10], "past the end of the interval that was open, into the next"
    for streamed in (*page.events, *rest.events):
        again = stream.read(database, streamed.position, 100)
        assert numbers(again) == list(range(streamed.event.data["number"] + 1, 11))
    assert stream.read(database, rest.position) == ([], rest.position)


def test_an_idle_stream_stands_still_however_many_transactions_come_to_nothing(database: Database) -> None:
    tell(database, 1)
    before = stream.now(database)
    with database.engine.connect() as connection:
        for _ in range(20):
            append(connection, Fact("task.counted"))
            connection.rollback()
    assert stream.now(database) == before
    assert stream.read(database, before) == ([], before)


def test_facts_of_before_the_stream_are_read_first(database: Database) -> None:
    tell(database, 1)
    write(database, "UPDATE events SET txid = 0")
    assert numbers(stream.read(database, stream.START)) == [1]
    after = stream.read(database, stream.START).position
    tell(database, 2)
    assert numbers(stream.read(database, after)) == [2]


def test_filters_narrow_and_positions_still_move_on(database: Database) -> None:
    run_id, task = uuid4(), uuid4()
    tell(database, 1, kind="attempt.claimed", run_id=run_id, task=task)
    tell(database, 2, kind="attempt.finished", run_id=run_id)
    tell(database, 3, kind="attemptx.claimed")
    tell(database, 4, kind="task.cancel_requested", task=task)
    tell(database, 5, kind="task.cancelxrequested")

    def found(**wanted: Any) -> list[int]:
        return numbers(stream.read(database, stream.START, wanted=EventFilter(**wanted)))

    assert found(kinds=["attempt."]) == [1, 2]
    assert found(kinds=["attempt.claimed", "task.cancel_requested"]) == [1, 4]
    assert found(run_id=run_id) == [1, 2]
    assert found(task_id=task) == [1, 4]
    assert found(kinds=["attempt."], task_id=task) == [1]
    nothing = stream.read(database, stream.START, wanted=EventFilter(["none."]))
    assert nothing == ([], stream.now(database))


def test_what_is_no_position_is_refused(database: Database) -> None:
    for position in ("", "x", "1-2", "1-2-", "-1", "5-3-1", "1.", "1..2", "1;2", "9" * 30, "1\n"):
        with pytest.raises(SpecInvalid, match="found"):
            stream.read(database, position)


def test_what_is_no_kind_is_refused(database: Database) -> None:
    for kind in ("attempt", "Attempt.", "%.", "a.b%", ".", ""):
        with pytest.raises(SpecInvalid, match="expected a kind of event"):
            stream.read(database, stream.START, wanted=EventFilter([kind]))


@contextmanager
def following(database: Database, **how: Any) -> Iterator[list[int]]:
    found: list[int] = []

    def read(stop: threading.Event) -> None:
        for streamed in stream.follow(database, stream.START, stop, **how):
            found.append(streamed.event.data["number"])

    with in_background(read):
        yield found


def test_a_follower_hears_what_comes_also_without_a_notify(database: Database) -> None:
    tell(database, 0)
    with following(database, limit=3) as found:
        for number in range(1, 20):
            tell(database, number)
        with database.begin() as connection:
            append(connection, Fact("task.counted", data={"number": 20}))
        eventually(lambda: len(found) == 21)
    assert found == list(range(21))


def test_a_follower_outlives_the_death_of_its_sessions(database: Database) -> None:
    outages, other = list[DatabaseUnavailable](), Database(database.url)
    with following(database, outage=outages.append) as found:
        for number in range(20):
            tell(other, number)
            if number in (7, 13):
                eventually(lambda n=number: n in found)
                kill_sessions(other)
        eventually(lambda: len(found) >= 20)
    other.close()
    assert found == list(range(20))
    assert outages


@pytest.fixture
def command(database: Database, home_folder: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MEGAFLOW_")}
    environment |= {"MEGAFLOW_DATABASE_URL": database.url, "MEGAFLOW_HOME": str(home_folder)}
    started: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        command = (sys.executable, "-c", _EVENTS, *words)
        started.append(subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def lines(output: IO[str] | None, count: int) -> list[dict[str, Any]]:
    assert output is not None
    return [json.loads(output.readline()) for _ in range(count)]


def test_the_command_prints_lines_from_whose_positions_it_can_go_on(
    database: Database, command: Callable[..., subprocess.Popen[str]]
) -> None:
    task = uuid4()
    tell(database, 1, 2, 3, task=task)
    tell(database, 4, kind="attempt.claimed")
    out, err = command().communicate(timeout=20)
    found = [json.loads(line) for line in out.splitlines()]
    assert [line["data"]["number"] for line in found] == [1, 2, 3, 4], err
    assert set(found[0]) == {
        "position", "id", "at", "kind", "run_id", "task_id", "attempt_id", "instance_id", "data",
    }  # fmt: skip
    assert found[0]["task_id"] == str(task)
    out, err = command("--from", found[1]["position"], "--kind", "attempt.").communicate(timeout=20)
    assert [json.loads(line)["data"]["number"] for line in out.splitlines()] == [4], err


def test_an_interrupt_in_the_middle_of_a_statement_stays_one(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(database, 1)  # leaves a pooled connection, which is asked whether it lives before its next use
    with closing(database.raw()) as connection:
        kind = type(connection)
    bounded = kind._bounded

    def interrupted(self: object, statement: object) -> Iterator[object]:
        for step in bounded(self, statement):
            yield step
            raise KeyboardInterrupt

    monkeypatch.setattr(kind, "_bounded", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stream.now(database)
    monkeypatch.undo()
    assert stream.now(database)


def test_a_follower_ends_cleanly_when_interrupted(
    database: Database, command: Callable[..., subprocess.Popen[str]]
) -> None:
    tell(database, 1)
    process = command("--follow", "--from", "start")
    assert lines(process.stdout, 1)[0]["data"]["number"] == 1
    tell(database, 2)
    assert lines(process.stdout, 1)[0]["data"]["number"] == 2
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=10) == ("", "")
    assert process.returncode == 0


def test_a_follower_ends_cleanly_when_its_reader_has_gone(
    database: Database, command: Callable[..., subprocess.Popen[str]]
) -> None:
    tell(database, 1)
    process = command("--follow", "--from", "start")
    assert lines(process.stdout, 1)
    assert process.stdout is not None
    process.stdout.close()
    tell(database, 2)
    assert process.wait(timeout=10) == 0
    assert process.stderr is not None
    assert process.stderr.read() == ""
