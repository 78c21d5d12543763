"""What every engine must do, run against the replay engine as a real process on loopback."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.errors import ModelEndpointUnavailable, SpecInvalid
from app.model_service.probe import check_endpoint

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
  - {status: 429}
  - {status: 401, message: "no such key"}
  - {garbage: true}
  - {delay_s: 0.4, command: "true"}
  - {status: 500}
""",
}
BASH_TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def engine(folder: Path) -> Iterator[str]:
    port = free_port()
    argv = [sys.executable, "-m", "app.model_service.replay", "--port", str(port), "--scripts", str(folder)]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(url, process)
        yield url
    finally:
        process.terminate()
        process.wait(10)


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        assert process.poll() is None, "the engine ended at once"
        try:
            if httpx.get(f"{url}/health").is_success:
                return
        except httpx.ConnectError:
            time.sleep(0.05)
    raise AssertionError("the engine does not answer")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("scripts")
    for name, content in SCRIPTS.items():
        (folder / f"{name}.yaml").write_text(content)
    with engine(folder) as running:
        yield running


def conversation(text: str, answers: int = 0) -> list[dict[str, Any]]:
    later = [{"role": "assistant", "content": "x"}, {"role": "user", "content": "ok"}] * answers
    return [{"role": "system", "content": "s"}, {"role": "user", "content": text}, *later]


def ask(url: str, text: str, answers: int = 0, **body: Any) -> httpx.Response:
    request = {"model": "any", "messages": conversation(text, answers), "tools": [BASH_TOOL], **body}
    return httpx.post(f"{url}/v1/chat/completions", json=request, timeout=10)


FROB = "Please fix: the frobnicator drops\nthe last item"


def test_models_are_listed(url: str) -> None:
    assert [model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]] == ["replay"]


def test_a_turn_is_a_tool_call_with_usage(url: str) -> None:
    completion = ask(url, FROB).json()
    (choice,) = completion["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["message"]["content"] == "Let me look"
    assert choice["finish_reason"] == "tool_calls"
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
        "bash",
        {"command": "sed -n 1,80p src/frob.py"},
    )
    usage = completion["usage"]
    assert usage["prompt_tokens"] > 0
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_the_same_request_gives_the_same_turn(url: str) -> None:
    first, again = ask(url, FROB, 1).json(), ask(url, FROB, 1).json()
    assert first["choices"] == again["choices"]
    assert first["id"] != ask(url, FROB, 0).json()["id"]


def test_parallel_conversations_do_not_disturb_each_other(url: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda at: ask(url, FROB, at % 2).json()["choices"][0]["message"], range(40)))
    said = [answer["content"] for answer in answers]
    assert said == ["Let me look", "Done."] * 20


def test_streaming_tells_the_same_as_the_whole_answer(url: str) -> None:
    whole = ask(url, FROB).json()
    response = ask(url, FROB, stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    (call,) = [call for delta in deltas for call in delta.get("tool_calls", [])]
    message = whole["choices"][0]["message"]
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]
    assert call["function"] == message["tool_calls"][0]["function"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"]][-1] == "tool_calls"
    assert chunks[-1]["usage"] == whole["usage"]


def test_without_tools_the_answer_is_text(url: str) -> None:
    message = ask(url, FROB, tools=None).json()["choices"][0]["message"]
    assert "```bash\nsed -n 1,80p src/frob.py\n```" in message["content"]
    assert "tool_calls" not in message


def test_an_unknown_scenario_says_what_was_expected_and_found(url: str) -> None:
    response = ask(url, "something else entirely")
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (404, "scenario_unknown")
    assert "something else entirely" in error["message"]
    assert "known scripts: faults, frob" in error["message"]


def test_a_conversation_longer_than_its_script_is_refused(url: str) -> None:
    response = ask(url, FROB, 2)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "scenario_over")


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"messages": []}', b'{"messages": ["x"]}', b'{"messages": "x"}'])
def test_a_malformed_request_is_a_400(url: str, body: bytes) -> None:
    response = httpx.post(f"{url}/v1/chat/completions", content=body)
    assert response.status_code == 400
    assert "expected" in response.json()["error"]["message"]


def test_scripted_faults_happen(url: str) -> None:
    assert ask(url, "everything breaks", 0).status_code == 429
    unauthorised = ask(url, "everything breaks", 1)
    assert unauthorised.status_code == 401
    assert unauthorised.json()["error"]["message"] == "no such key"
    garbage = ask(url, "everything breaks", 2)
    assert garbage.status_code == 200
    with pytest.raises(ValueError, match="Expecting value"):
        garbage.json()
    started = time.monotonic()
    assert ask(url, "everything breaks", 3).is_success
    assert time.monotonic() - started >= 0.4
    assert ask(url, "everything breaks", 4).status_code == 500


def test_a_malformed_script_stops_the_engine_with_one_message(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("match: a\nturns: [{comand: ls}]")
    argv = [sys.executable, "-m", "app.model_service.replay", "--port", "0", "--scripts", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    assert done.returncode == SpecInvalid.exit_code
    assert "bad.yaml: turns.0.comand" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_probe_accepts_the_engine(url: str) -> None:
    check_endpoint(f"{url}/v1", "replay", None, 5)
    check_endpoint(f"{url}/v1/", "a name that is not listed", "sk-key", 5)


def test_the_probe_names_an_endpoint_that_is_down() -> None:
    with pytest.raises(ModelEndpointUnavailable, match=r"ConnectError.*start the server"):
        check_endpoint(f"http://127.0.0.1:{free_port()}/v1", "m", None, 2)


def test_the_probe_refuses_a_server_that_is_no_endpoint(url: str) -> None:
    with pytest.raises(ModelEndpointUnavailable, match=r"ends? in /v1"):
        check_endpoint(url, "m", None, 5)


@pytest.mark.parametrize("address", ["not a url", "http://", "ftp://127.0.0.1/v1"])
def test_the_probe_refuses_an_address_that_is_none(address: str) -> None:
    with pytest.raises(ModelEndpointUnavailable):
        check_endpoint(address, "m", None, 2)
