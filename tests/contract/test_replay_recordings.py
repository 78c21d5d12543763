"""A recorded attempt played back by the engine as a process: exactly, by place, in any dialect."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.ledger.model_calls import StoredCall
from app.model_service.dialects import Message, Reply, Request, codec_for
from app.model_service.replay.recordings import file_name
from app.model_service.trajectory import export
from app.models.model_calls import CallEnd, Dialect, TokenUse
from tests.contract.test_replay_engine import BASH_TOOL, engine
from tests.dialect_requests import body_of

RUN = "0192-night"
DIALECTS = list(Dialect)
SCRIPT = "match: a sentence that nobody says\nturns: [{submit: true}]"
BEGAN = datetime(2026, 11, 21, 12, 0, 0, tzinfo=UTC)


def told(task: str, day: int, model: str) -> list[Message]:
    system = f"You are powered by the model {model}. Today is 2026-11-{day}."
    return [{"role": "system", "content": system}, {"role": "user", "content": task}]


def output(id_: str, *, spent: float, failed: int = 1) -> Message:
    content = f"{failed} failed in {spent}s, see /tmp/pytest-{uuid.uuid4().hex[:8]}/log"
    return {"role": "tool", "content": content, "tool_call_id": id_}


def answer(text: str, *ids: str) -> Message:
    message: Message = {"role": "assistant", "content": text}
    if ids:
        message["tool_calls"] = [{"id": one, "name": "bash", "arguments": '{"command":"ls -l"}'} for one in ids]
    return message


FIRST, SECOND = "call_Zx81kQw92LmN", "call_77Hq1bTTrePz"


def a_call(messages: list[Message], reply: Message | None, at: int, **more: Any) -> StoredCall:
    values: dict[str, Any] = {
        "id": uuid.uuid4(),
        "attempt_id": uuid.uuid4(),
        "dialect": Dialect.CHAT,
        "model": "big-one",
        "upstream_model": "big-one-0711",
        "started_at": BEGAN + timedelta(seconds=at),
        "end": CallEnd.ANSWERED,
        "status": 200,
        "finish_reason": "tool_calls" if reply and "tool_calls" in reply else "stop",
        "use": TokenUse(1000 + at, 10 + at, 5, 0),
        "messages": tuple(messages),
        "tools": (BASH_TOOL,),
        "reply": reply,
        "token_ids": (1, 2, 3),
        "prompt_token_ids": (4, 5),
    }
    return StoredCall(**(values | more))


def attempt(task: str, name: str) -> list[StoredCall]:
    messages = told(task, 20, "big-one")
    calls = [a_call(messages, None, 0, end=CallEnd.UPSTREAM_ERROR, status=500)]  # that day's trouble
    for at, id_ in enumerate((FIRST, SECOND), 1):
        said = answer(f"{name}: step {at}", id_)
        calls.append(a_call(list(messages), said, at))
        unheard = answer(f"{name}: unheard", id_)
        calls.append(a_call(list(messages), unheard, at, end=CallEnd.CLIENT_GONE))
        messages += [said, output(id_, spent=0.12 * at)]
    calls.append(a_call(list(messages), answer(f"{name}: done"), 9))
    title: list[Message] = [{"role": "user", "content": f"A title for: {task}"}]
    calls.append(a_call(title, answer(f"{name}: title"), 10, tools=()))
    long = [*messages, answer("x"), {"role": "user", "content": "much more"}]
    error = {"error": {"message": "maximum context length is 8192 tokens", "code": "context_length_exceeded"}}
    raw = {"response": str(error).replace("'", '"')}
    calls.append(a_call(long, None, 11, end=CallEnd.CONTEXT_EXHAUSTED, status=400, raw=raw))
    return calls


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recordings")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, recordings: Path) -> Iterator[str]:
    scripts = tmp_path_factory.mktemp("scripts")
    (scripts / "s.yaml").write_text(SCRIPT)
    run = recordings / RUN
    run.mkdir()
    for replica in (0, 1):
        calls = attempt("fix the frobnicator", f"frob {replica}")
        (run / file_name("dj/frob", replica)).write_bytes(export(calls))
    (run / file_name("other", 0)).write_bytes(export(attempt("mend the other thing", "other")))
    with engine(scripts, "--recordings", str(recordings)) as running:
        yield running


def conversation(
    answers: int, *, task: str = "fix the frobnicator", who: str = "frob 0", failed: int = 1
) -> list[Message]:
    """The recorded one on another day, with another model's name, other ids, paths and times."""
    messages = told(task, 21, f"replay:{RUN}")
    for at, id_ in enumerate((FIRST, SECOND)[:answers], 1):
        messages += [answer(f"{who}: step {at}", id_), output(id_, spent=7.9 * at, failed=failed)]
    return messages


def ask(url: str, messages: list[Message], *, dialect: Dialect = Dialect.CHAT, **more: Any) -> httpx.Response:
    task, replica = more.pop("task", None), more.pop("replica", 0)
    headers = {} if task is None else {"X-MegaFlow-Task": task, "X-MegaFlow-Replica": str(replica)}
    tools = more.pop("tools", (BASH_TOOL,))
    asked = Request(
        more.pop("model", f"replay:{RUN}"),
        tuple(messages),
        tools,
        stream=bool(more.pop("stream", False)),
        max_tokens=None,
        parameters=more,
    )
    return httpx.post(f"{url}/v1/{dialect}", json=body_of(dialect, asked), headers=headers, timeout=30)


def heard(response: httpx.Response, dialect: Dialect = Dialect.CHAT, *, streamed: bool = False) -> Reply:
    assert response.status_code == 200, response.text
    return codec_for(dialect).reply(response.content, streamed=streamed)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_conversation_is_answered_as_it_was_in_any_dialect(url: str, dialect: Dialect, *, streamed: bool) -> None:
    more = {"stream_options": {"include_usage": True}} if dialect is Dialect.CHAT else {}
    for at, words in enumerate(["frob 0: step 1", "frob 0: step 2", "frob 0: done"]):
        response = ask(url, conversation(at), dialect=dialect, task="dj/frob", stream=streamed, **more)
        assert response.headers["x-megaflow-replay"] == "exact"
        reply = heard(response, dialect, streamed=streamed)
        assert reply.message["content"] == words
        ids = [call["id"] for call in reply.message.get("tool_calls", ())]
        assert ids == [[FIRST], [SECOND], []][at]
        assert reply.usage.prompt == 1000 + [1, 2, 9][at]


def test_token_ids_come_back_with_the_answer(url: str) -> None:
    reply = heard(ask(url, conversation(0), task="dj/frob", return_token_ids=True))
    assert (reply.token_ids, reply.prompt_token_ids, reply.model) == ((1, 2, 3), (4, 5), "big-one-0711")


def test_replicas_have_their_own_answers(url: str) -> None:
    said = [heard(ask(url, conversation(0), task="dj/frob", replica=at)).message["content"] for at in (0, 1)]
    assert said == ["frob 0: step 1", "frob 1: step 1"]


def test_a_caller_who_does_not_say_its_task_is_known_by_its_words(url: str) -> None:
    other = conversation(0, task="mend the other thing")
    assert heard(ask(url, other)).message["content"] == "other: step 1"
    gone_on = conversation(1, task="mend the other thing", who="other", failed=3)
    response = ask(url, gone_on)
    assert (heard(response).message["content"], response.headers["x-megaflow-replay"]) == ("other: step 2", "position")


def test_what_a_command_printed_may_differ_where_the_place_is_known(url: str) -> None:
    response = ask(url, conversation(2, failed=4), task="dj/frob")
    assert (heard(response).message["content"], response.headers["x-megaflow-replay"]) == ("frob 0: done", "position")


def test_the_answers_of_another_task_are_not_taken_by_their_place(url: str) -> None:
    strangers = conversation(1, task="a task that nobody recorded")
    assert ask(url, strangers, task="unheard").json()["error"]["code"] == "recording_miss"
    assert ask(url, strangers).json()["error"]["code"] == "recording_miss"
    assert heard(ask(url, conversation(1), task="renamed")).message["content"] == "frob 0: step 2"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_refusal_that_lay_in_the_request_comes_again(url: str, dialect: Dialect) -> None:
    long = [*conversation(2), answer("x"), {"role": "user", "content": "much more"}]
    refused = ask(url, long, dialect=dialect, task="dj/frob")
    words = "prompt is too long" if dialect is Dialect.MESSAGES else "maximum context length is 8192"
    assert refused.status_code == 400
    assert words in refused.json()["error"]["message"]


def test_answers_to_different_turns_have_different_ids_and_the_same_turn_the_same(url: str) -> None:
    ids = [ask(url, conversation(at), task="dj/frob").json()["id"] for at in (0, 1, 0)]
    assert ids[0] == ids[2] != ids[1]


def test_a_miss_names_the_task_and_its_file(url: str) -> None:
    beyond = [*conversation(2, failed=4), answer("frob 0: done"), {"role": "user", "content": "go on"}]
    refused = ask(url, [*beyond, answer("and"), {"role": "user", "content": "on"}], task="dj/frob")
    told_ = refused.json()["error"]
    assert (refused.status_code, told_["code"]) == (404, "recording_miss")
    assert "dj%2Ffrob--0" in told_["message"]


def test_an_unknown_recording_names_what_there_is(url: str) -> None:
    for name in ("nothing", "..", "%2e%2e", ""):
        refused = ask(url, conversation(0), model=f"replay:{name}")
        assert refused.status_code == 404
        assert f"known recordings: {RUN}" in refused.json()["error"]["message"]


def test_a_file_that_is_no_recording_is_told_and_a_new_one_is_seen(url: str, recordings: Path) -> None:
    folder = recordings / "late"
    folder.mkdir()
    assert ask(url, conversation(0), model="replay:late").json()["error"]["code"] == "recording_empty"
    target = folder / file_name("dj/frob", 0)
    target.write_bytes(b"not zstd")
    broken = ask(url, conversation(0), model="replay:late", task="dj/frob")
    assert (broken.status_code, broken.json()["error"]["code"]) == (400, "recording_unreadable")
    target.write_bytes(export(attempt("fix the frobnicator", "late")))
    mended = ask(url, told("fix the frobnicator", 3, "replay:late"), model="replay:late", task="dj/frob")
    assert heard(mended).message["content"] == "late: step 1"
