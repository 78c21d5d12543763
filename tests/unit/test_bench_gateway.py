"""The gateway's benchmark: what load and engine agree on, both as real processes, and every part on a stand-in."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from app.ledger.database import Database
from app.ledger.model_sessions import session_of
from app.model_service.replay.script import choose, load_scripts
from app.models.outcome import Phase, TaskResult
from app.stack.private import PrivateStack
from bench import control_record
from bench.control_record import Part
from bench.environments import plot
from bench.gateway import contenders, idle, memory, ours, overhead, rollout, saturation, stream, wire
from bench.gateway.contenders import BARE, LITELLM, OURS, Contender
from bench.gateway.crew import Crew, Fault
from bench.gateway.engine import content_length
from bench.gateway.wire import Wish


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Contender]:
    with contenders.engine(tmp_path_factory.mktemp("engine")) as running:
        yield running


@pytest.fixture
def crew(engine: Contender, tmp_path: Path) -> Crew:
    """Both gateways are played by the engine itself."""
    present = {name: replace(engine, name=name) for name in (BARE, OURS, LITELLM)}
    return Crew(present, {}, tmp_path, lambda text: None)


# --- What load and engine agree on ----------------------------------------------------------------------------------


@pytest.mark.parametrize("wish", [Wish(), Wish(wait_ms=100), Wish(wait_ms=5, events=200, every_ms=10, hold=True)])
def test_the_engine_reads_the_wish_that_a_conversation_carries(wish: Wish) -> None:
    body = wire.conversation(wish, owner="attempt 3")
    assert wire.wish_in(body(12)) == wish
    assert json.loads(body(12)).get("stream", False) is bool(wish.events)


def test_conversations_differ_in_the_last_message_alone_and_have_one_length() -> None:
    body = wire.conversation(Wish(), owner="attempt 3")
    one, other = body(1), body(999_999)
    assert len(one) == len(other) == len(body)
    before, after = json.loads(one)["messages"], json.loads(other)["messages"]
    assert before[:-1] == after[:-1]
    assert before[-1] != after[-1]


def test_an_answer_is_a_completion_of_about_a_kilobyte_that_carries_its_times() -> None:
    head, tail = wire.answer()
    whole = head + wire.stamp(5, 7) + tail
    assert wire.stamp_in(whole) == (5, 7)
    assert 1000 < len(json.loads(whole)["choices"][0]["message"]["content"]) < 1200
    assert wire.stamp_in(head + tail) is None


def test_events_are_chunks_of_a_completion() -> None:
    head, tail = wire.first_event()
    stream_ = head + wire.stamp(1, 2) + tail + wire.next_events()[0] + wire.last_events(usage=True)
    *chunks, done = [line.removeprefix("data: ") for line in stream_.decode().split("\n\n") if line]
    assert done == "[DONE]"
    assert [json.loads(chunk)["object"] for chunk in chunks] == ["chat.completion.chunk"] * 4
    assert "usage" in json.loads(chunks[-1])
    assert b"usage" not in wire.last_events(usage=False)


def test_a_request_without_a_length_is_refused() -> None:
    assert content_length(b"POST / HTTP/1.1\r\nContent-Length: 12\r\n") == 12
    assert content_length(b"GET / HTTP/1.1\r\nhost: here\r\n") == 0
    with pytest.raises(ValueError, match="chunks"):
        content_length(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n")


# --- Load and engine, as processes ----------------------------------------------------------------------------------


def test_every_call_is_counted_with_what_it_took_beyond_the_engine(crew: Crew) -> None:
    told = crew.put(crew.contenders[BARE], Wish(wait_ms=20), width=4, calls=40)
    assert told is not None
    assert len(told.took_s) == len(told.beyond_s) == 40
    waited_s = 0.5 * 0.02 - 0.002  # at least; the engine's clock for waiting counts in milliseconds
    assert all(0 < beyond <= took - waited_s for beyond, took in zip(told.beyond_s, told.took_s, strict=True))
    assert told.per_s == pytest.approx(40 / told.wall_s)


def test_streams_are_counted_by_their_events_and_by_when_the_first_came(crew: Crew) -> None:
    told = crew.put(crew.contenders[BARE], Wish(events=30, every_ms=1), width=2, calls=6)
    assert told is not None
    assert len(told.first_s) == 6
    assert all(0 < first < took for first, took in zip(told.first_s, told.took_s, strict=True))
    assert told.events == 6 * (30 + 2)  # and the reason of the end, and [DONE]


def test_a_window_leaves_out_the_warm_up(crew: Crew) -> None:
    told = crew.put(crew.contenders[BARE], Wish(wait_ms=10), width=2, seconds=0.5, warm_s=0.3)
    assert told is not None
    assert told.wall_s == 0.5
    assert 0 < len(told.took_s) <= 2 * 0.5 / 0.004


def test_held_streams_end_when_the_engine_is_told(crew: Crew) -> None:
    with crew.putting(crew.contenders[BARE], Wish(events=3, hold=True), width=20, calls=20) as running:
        running.until_begun(30)
        crew.release()
        assert len(running.end().took_s) == 20


def test_who_does_not_answer_falls_out_of_the_part_and_says_why(crew: Crew) -> None:
    crew.contenders[LITELLM] = replace(crew.contenders[LITELLM], port=ours.free_port())
    assert crew.put(crew.contenders[LITELLM], Wish(), width=1, calls=1) is None
    assert "ConnectionRefusedError" in crew.faults[LITELLM]
    assert [contender.name for _, contender in crew.turns(2, (OURS, LITELLM))] == [OURS, OURS]


def test_streams_that_do_not_begin_are_a_fault(crew: Crew) -> None:
    with (
        crew.putting(
            replace(crew.contenders[BARE], port=ours.free_port()), Wish(events=3, hold=True), width=1, calls=1
        ) as running,
        pytest.raises(Fault, match="not all of 1 streams began"),
    ):
        running.until_begun(30)


def test_rounds_begin_with_another_each(crew: Crew) -> None:
    turns = [contender.name for _, contender in crew.turns(2, (BARE, OURS, LITELLM))]
    assert turns == [BARE, OURS, LITELLM, OURS, LITELLM, BARE]


# --- Parts ----------------------------------------------------------------------------------------------------------

PARTS: dict[str, Any] = {
    "overhead": lambda crew: overhead.measure(overhead.Scale(2, 0.3, 0.1, width=4, wait_ms=(20,)), crew),
    "saturation": lambda crew: saturation.measure(saturation.Scale(2, 0.3, 0.1, width=4, streams=2, events=5), crew),
    "stream": lambda crew: stream.measure(stream.Scale(2, 0.3, 0.1, width=2, wait_ms=5, events=5, every_ms=2), crew),
    "idle": lambda crew: idle.measure(idle.Scale(streams=20, probes=5), crew),
    "memory": lambda crew: memory.measure(memory.Scale(400, 200, width=4, calls_per_attempt=2), crew),
}
GOALS = {"overhead": 2, "saturation": 1, "stream": 1, "idle": 1, "memory": 1}


@pytest.mark.extra
@pytest.mark.parametrize("name", PARTS)
def test_a_part_measures_everybody_holds_ours_against_its_goals_and_is_kept(
    name: str, crew: Crew, tmp_path: Path
) -> None:
    part: Part = PARTS[name](crew)
    assert crew.faults == {}
    held = [row for row in part.rows if row.goal is not None]
    assert len(held) == GOALS[name]
    assert all(OURS in row.metric for row in held)
    assert any(LITELLM in row.metric for row in part.rows)
    path = tmp_path / "gateway.json"
    control_record.keep(path, name, part, busy=0.0, took_s=1.0)
    plot.draw(control_record.load(path)[name]["samples"], tmp_path / "picture.png", ours=(OURS,))
    assert (tmp_path / "picture.png").stat().st_size > 0


def test_calls_that_never_come_into_the_ledger_miss_the_goal(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_WRITTEN_S", 0.0)
    monkeypatch.setattr(memory, "_SETTLED_S", 0.0)
    crew.contenders = {OURS: replace(crew.contenders[OURS], recorded=lambda: 3)}
    part = memory.measure(memory.Scale(40, 0, width=2, calls_per_attempt=2), crew)
    (lost,) = [row for row in part.rows if "not in the ledger" in row.metric]
    assert (lost.value, lost.holds) == (40, False)


def test_overhead_is_the_median_over_rounds_of_a_rounds_quantile() -> None:
    quiet, disturbed = [0.001] * 100, [0.5] * 100
    assert overhead._ms([quiet, disturbed, quiet], 0.99) == pytest.approx(1.0)


# --- Ours -----------------------------------------------------------------------------------------------------------


def test_tokens_are_those_of_running_attempts_that_are_not_bounded(database_url: str) -> None:
    database = Database(database_url)
    try:
        tokens = ours.Gateway(cast(PrivateStack, None), database).tokens(3)
        with database.begin() as connection:
            sessions = [session_of(connection, token) for token in tokens]
    finally:
        database.close()
    assert len({session.attempt_id for session in sessions if session and session.live}) == 3
    assert all(session and session.model.name == wire.MODEL for session in sessions)
    assert all(session and (session.limits.max_turns or 0) > 10**8 for session in sessions)


# --- Rollout --------------------------------------------------------------------------------------------------------


def test_the_scripts_are_known_apart_by_their_words_and_end_with_a_submission(tmp_path: Path) -> None:
    for steps in (5, 50):
        (tmp_path / f"{steps}.yaml").write_text(yaml.safe_dump(rollout.script(steps)))
    scripts = load_scripts([tmp_path])
    found, turn = choose(scripts, [{"role": "user", "content": f"Do it. {rollout.words(5)} Begin."}])
    assert (len(found.turns), turn) == (6, 0)
    assert found.turns[-1].submit


def test_a_rollout_is_compared_until_the_agents_end_and_the_rest_is_told_apart() -> None:
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    doors = [Phase.CLAIMED, Phase.ENVIRONMENT_READY, Phase.AGENT_STARTED, Phase.AGENT_ENDED, Phase.TORN_DOWN]
    phases = {door: begin + timedelta(seconds=2 * at) for at, door in enumerate(doors)}
    result = cast(TaskResult, SimpleNamespace(attempts=[SimpleNamespace(phases=phases)]))
    assert rollout.spans(result) == {"whole": 6.0, "environment": 2.0, "agent": 2.0, "rest": 2.0}
    rows = rollout._rows(
        "rollout",
        {rollout.BY_HAND: [{"whole": 6.0}], **{name: [rollout.spans(result)] for name in rollout.OURS.values()}},
    )
    assert [row.value for row in rows if row.goal is not None] == [1.0, 1.0]


def test_the_make_target_is_there() -> None:
    makefile = (contenders.REPOSITORY / "Makefile").read_text()
    assert re.search(r"^bench-gateway: bootstrap", makefile, re.MULTILINE)
