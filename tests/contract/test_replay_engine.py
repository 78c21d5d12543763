"""What every engine must do, run against the replay engine as a real process on loopback."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.model_service.dialects import Message, Reply, Request, codec_for
from app.models.model_calls import Dialect
from tests.dialect_requests import body_of
from tests.services import free_port
from tests.waiting import eventually

SCRIPTS = {
    "frob": """
match: the frobnicator drops the last item
turns:
  - {thought: Let me look, command: "sed -n 1,80p src/frob.py"}
  - {thought: Done., submit: true}
""",
    "faults": """
match: everything breaks
turns:
  - {status: 429, retry_after_s: 2}
  - {status: 401, message: "no such key"}
  - {garbage: true}
  - {delay_s: 0.4, command: "true"}
  - {status: 500}
  - {context_exceeded: true}
  - {thought: This sentence will never be heard to its end, cut: true}
""",
    "silent": """
match: null
turns:
  - {thought: never, delay_s: 3600}
""",
}
BASH_TOOL = {
    "name": "bash",
    "description": "",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
}
DIALECTS = list(Dialect)


@contextmanager
def engine(folder: Path, *more: str) -> Iterator[str]:
    port = free_port()
    argv = [sys.executable, "-m", "app.model_service.replay", "--port", str(port), "--scripts", str(folder), *more]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        eventually(lambda: process.poll() is not None or _answers(url))
        assert process.poll() is None, "the engine ended at once"
        yield url
    finally:
        process.terminate()
        process.wait(10)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").is_success
    except httpx.ConnectError:
        return False


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("scripts")
    for name, content in SCRIPTS.items():
        (folder / f"{name}.yaml").write_text(content)
    with engine(folder) as running:
        yield running


def conversation(text: str, answers: int = 0) -> list[Message]:
    later: list[Message] = [{"role": "assistant", "content": "x"}, {"role": "user", "content": "ok"}]
    return [{"role": "system", "content": "s"}, {"role": "user", "content": text}, *later * answers]


def body(dialect: Dialect, text: str, answers: int = 0, *, model: str = "any", **more: Any) -> dict[str, Any]:
    """A request in a dialect, made by the project's own codec."""
    tools = more.pop("tools", (BASH_TOOL,))
    messages = tuple(more.pop("messages", conversation(text, answers)))
    asked = Request(model, messages, tools, stream=bool(more.pop("stream", False)), max_tokens=None, parameters=more)
    return body_of(dialect, asked)


def ask(url: str, text: str, answers: int = 0, *, dialect: Dialect = Dialect.CHAT, **more: Any) -> httpx.Response:
    headers = more.pop("headers", {})
    return httpx.post(f"{url}/v1/{dialect}", json=body(dialect, text, answers, **more), headers=headers, timeout=30)


def heard(response: httpx.Response, dialect: Dialect = Dialect.CHAT, *, streamed: bool = False) -> Reply:
    assert response.status_code == 200, response.text
    return codec_for(dialect).reply(response.content, streamed=streamed)


def called(reply: Reply) -> list[tuple[str, dict[str, Any]]]:
    return [(call["name"], json.loads(call["arguments"])) for call in reply.message.get("tool_calls", ())]


FROB = "Please fix: the frobnicator drops\nthe last item"
LOOK = [("bash", {"command": "sed -n 1,80p src/frob.py"})]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_turn_is_a_tool_call_with_usage(url: str, dialect: Dialect, *, streamed: bool) -> None:
    more = {"stream_options": {"include_usage": True}} if dialect is Dialect.CHAT else {}
    response = ask(url, FROB, dialect=dialect, stream=streamed, **more)
    assert response.headers["content-type"].startswith("text/event-stream" if streamed else "application/json")
    reply = heard(response, dialect, streamed=streamed)
    assert (reply.message["content"], called(reply)) == ("Let me look", LOOK)
    assert (reply.finish_reason, reply.complete) == ("tool_calls", True)
    assert reply.usage.prompt
    assert reply.usage.completion


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_conversation_goes_on_with_the_ids_that_were_given(url: str, dialect: Dialect) -> None:
    first = heard(ask(url, FROB, dialect=dialect), dialect)
    (call,) = first.message["tool_calls"]
    answered = [*conversation(FROB), first.message, {"role": "tool", "content": "x", "tool_call_id": call["id"]}]
    second = heard(ask(url, "", dialect=dialect, messages=answered), dialect)
    assert second.message["content"] == "Done."


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_same_request_gives_the_same_turn(url: str, dialect: Dialect) -> None:
    first, again, other = (ask(url, FROB, at, dialect=dialect).json() for at in (1, 1, 0))
    assert first["id"] == again["id"] != other["id"]
    for moment in ("created", "created_at"):
        first.pop(moment, None), again.pop(moment, None)
    assert first == again


def test_tokens_are_counted_before_the_call(url: str) -> None:
    asked = body(Dialect.MESSAGES, FROB)
    counted = httpx.post(f"{url}/v1/messages/count_tokens", json=asked).json()["input_tokens"]
    assert counted == heard(ask(url, FROB, dialect=Dialect.MESSAGES), Dialect.MESSAGES).usage.prompt


def test_a_script_is_chosen_by_the_models_name(url: str) -> None:
    for name in ("scenario-frob", "replay:frob", "openai/scenario-frob"):
        assert called(heard(ask(url, "nothing of the kind", model=name))) == LOOK
    for name in ("scenario-nobody", "replay:nobody"):
        refused = ask(url, FROB, model=name)
        assert refused.status_code == 404
        assert "known scripts: faults, frob, silent" in refused.json()["error"]["message"]


def test_an_unknown_scenario_says_what_was_expected_and_found(url: str) -> None:
    response = ask(url, "something else entirely")
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (404, "scenario_unknown")
    assert "something else entirely" in error["message"]
    assert "known scripts: faults, frob, silent" in error["message"]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("content", [b"{", b"[]", b'{"model": "m"}', b'{"model": "m", "messages": "x", "input": 7}'])
def test_a_malformed_request_is_a_400(url: str, dialect: Dialect, content: bytes) -> None:
    response = httpx.post(f"{url}/v1/{dialect}", content=content)
    assert response.status_code == 400
    assert "expected" in response.json()["error"]["message"]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_scripted_errors_happen_in_the_callers_dialect(url: str, dialect: Dialect) -> None:
    busy = ask(url, "everything breaks", 0, dialect=dialect)
    assert (busy.status_code, busy.headers["retry-after"]) == (429, "2")
    assert busy.json()["error"]["type"] == "rate_limit_error"
    unauthorised = ask(url, "everything breaks", 1, dialect=dialect)
    assert (unauthorised.status_code, unauthorised.json()["error"]["message"]) == (401, "no such key")
    assert ask(url, "everything breaks", 4, dialect=dialect).status_code == 500
    too_long = ask(url, "everything breaks", 5, dialect=dialect)
    words = "prompt is too long" if dialect is Dialect.MESSAGES else "maximum context length"
    assert too_long.status_code == 400
    assert words in too_long.json()["error"]["message"]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_garbage_is_no_answer(url: str, dialect: Dialect) -> None:
    garbage = ask(url, "everything breaks", 2, dialect=dialect)
    assert garbage.status_code == 200
    with pytest.raises(ValueError):  # noqa: PT011 -- whatever a reader of the dialect says
        codec_for(dialect).reply(garbage.content, streamed=False)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_is_cut_in_its_middle(url: str, dialect: Dialect, *, streamed: bool) -> None:
    asked = body(dialect, "everything breaks", 6, stream=streamed)
    got = b""
    with httpx.stream("POST", f"{url}/v1/{dialect}", json=asked, timeout=30) as response:
        assert response.status_code == 200
        try:
            for part in response.iter_raw():
                got += part
            pytest.fail("the answer came to its end")
        except httpx.RemoteProtocolError:
            pass
    if streamed:
        assert not codec_for(dialect).reply(got, streamed=True).complete
    else:
        with pytest.raises(ValueError):  # noqa: PT011 -- half a JSON text
            json.loads(got)
    assert httpx.get(f"{url}/health").is_success


def test_silence_ends_when_the_caller_hangs_up_or_the_engine_stops(tmp_path: Path) -> None:
    (tmp_path / "silent.yaml").write_text(SCRIPTS["silent"])
    asked = body(Dialect.MESSAGES, "x", model="replay:silent")
    with ThreadPoolExecutor(1) as pool:
        with engine(tmp_path) as url:
            for _ in range(3):
                with pytest.raises(httpx.ReadTimeout):
                    httpx.post(f"{url}/v1/messages", json=asked, timeout=httpx.Timeout(30, read=0.2))
            waiting = pool.submit(httpx.post, f"{url}/v1/messages", json=asked, timeout=60)
            assert httpx.get(f"{url}/health").is_success
        assert waiting.exception(60) is not None or waiting.result().status_code >= 500
