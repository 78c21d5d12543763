"""The gateway's parts by themselves: windows, keys, errors of engines, streams, routes."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from app.agents.external import known_agents
from app.errors import LimitInvalid, SpecInvalid
from app.ledger.model_replicas import plain_url
from app.model_service.gateway import engine_faults
from app.model_service.gateway.callers import token_of
from app.model_service.gateway.congestion import CongestionWindow
from app.model_service.gateway.engines import kv_use_of, waiting_of
from app.model_service.gateway.keys import Keys
from app.model_service.gateway.routes import Routes
from app.model_service.gateway.translation import Interrupted, chunks_of
from app.model_service.gateway.waiting import Place
from app.model_service.serving import CallRefusal, listen
from app.models.model_calls import CallEnd, ModelSession
from app.models.spec import ModelChoice
from app.settings import Settings
from app.submission import specs_for
from tests.building import a_session


async def test_a_long_line_at_the_engine_makes_the_window_smaller_and_a_short_one_does_not() -> None:
    window = CongestionWindow(start=100)
    for _ in range(100):
        assert window.try_enter(Place())
    window.loaded(10)
    assert window.size == 100
    window.loaded(60)
    assert window.size == 50, "what runs, and a tenth"
    assert waiting_of(b'# HELP\nvllm:num_requests_waiting{model_name="m"} 3.0\n') == 3
    assert waiting_of(b"sglang:num_queue_reqs 2.0") == 2
    assert waiting_of(b"python_gc_objects_collected_total 1.0") is None


def test_the_use_of_the_kv_cache_is_that_of_the_fullest_part_and_nothing_where_it_is_not_said() -> None:
    old, new = b'vllm:gpu_cache_usage_perc{engine="0"} 0.25\n', b"vllm:kv_cache_usage_perc 0.5\n"
    assert kv_use_of(b"# HELP\n" + new + b'vllm:kv_cache_usage_perc{engine="1"} 7.5e-01\n') == 0.75
    assert kv_use_of(old) == 0.25
    assert kv_use_of(b"sglang:token_usage 0.1") == 0.1
    assert kv_use_of(b"vllm:num_requests_waiting 3.0\n") is None
    assert kv_use_of(b"sglang:token_usage 17.0") is None


def test_a_key_is_a_variable_or_a_file_that_one_names(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("sk-from-a-file\n")
    keys = Keys(
        {"PLAIN": "sk-plain-value", "BY_VALUE": f"file:{file}", "OTHER_FILE": str(file), "GONE": "file:/no/such/file"}
    )
    assert keys.value("PLAIN") == "sk-plain-value"
    assert keys.value("BY_VALUE") == keys.value("OTHER") == "sk-from-a-file"
    assert keys.value("GONE") is keys.value("NEVER_SET") is keys.value(None) is None
    assert keys.redact("a sk-plain-value b sk-from-a-file") == "a [key] b [key]"
    assert keys.redact_bytes(b"sk-plain-value") == b"[key]"


def test_a_variable_of_ours_is_no_key() -> None:
    keys = Keys({"MEGAFLOW_BROKER_URL": "redis://secret-words", "not a name": "x" * 20})
    assert keys.value("MEGAFLOW_BROKER_URL") is None
    assert keys.value("megaflow_broker_url") is None
    assert keys.value("not a name") is None


@pytest.mark.parametrize(
    ("status", "content", "end"),
    [
        (400, b'{"error": {"code": "context_length_exceeded", "message": "x"}}', CallEnd.CONTEXT_EXHAUSTED),
        (400, b'{"message": "This model\'s maximum context length is 5 tokens"}', CallEnd.CONTEXT_EXHAUSTED),
        (422, b'{"detail": "the request exceeds the available context size"}', CallEnd.CONTEXT_EXHAUSTED),
        (400, b'{"error": "temperature is too large"}', CallEnd.REFUSED),
        (404, b"Not Found", CallEnd.REFUSED),
        (404, b'{"message": "The model `m-1` does not exist."}', CallEnd.NOT_FOUND),
        (400, b'{"error": {"code": "model_not_found", "message": "x"}}', CallEnd.NOT_FOUND),
        (404, b'{"error": {"code": "recording_unknown", "message": "x"}}', CallEnd.NOT_FOUND),
        (404, b'{"error": {"code": "recording_miss", "message": "model m-1"}}', CallEnd.REFUSED),
        (401, b'{"error": {"message": "no"}}', CallEnd.UNAUTHORISED),
        (403, b"", CallEnd.UNAUTHORISED),
        (429, b"", CallEnd.UPSTREAM_BUSY),
        (529, b"", CallEnd.UPSTREAM_BUSY),
        (504, b"", CallEnd.UPSTREAM_TIMEOUT),
        (500, b"maximum context length", CallEnd.UPSTREAM_ERROR),
    ],
)
def test_what_an_engines_error_means(status: int, content: bytes, end: CallEnd) -> None:
    assert engine_faults.end_of(status, engine_faults.message_of(content), "m-1") is end


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(None, None), ("", None), ("3", 3.0), ("0.5", 0.5), ("-1", 0.0), ("9999", 60.0), ("soon", None), ("nan", None)],
)
def test_retry_after(value: str | None, seconds: float | None) -> None:
    assert engine_faults.retry_after_s(value, 60.0) == seconds
    assert engine_faults.retry_after_s("Wed, 21 Oct 2015 07:28:00 GMT", 60.0) == 0.0


def test_a_path_that_is_not_known_is_told_from_a_model_that_is_not_known() -> None:
    assert engine_faults.no_such_path(404, b'{"detail": "Not Found"}', "m-7b")
    assert engine_faults.no_such_path(405, b"", "m-7b")
    assert not engine_faults.no_such_path(404, b'{"error": {"message": "The model `m-7b` does not exist"}}', "m-7b")
    assert not engine_faults.no_such_path(400, b"", "m-7b")


def test_tokens_come_in_two_headers() -> None:
    assert token_of([(b"authorization", b"Bearer abc")]) == "abc"
    assert token_of([(b"x-api-key", b"abc")]) == "abc"
    assert token_of([(b"x-api-key", b"one"), (b"authorization", b"bearer two")]) == "two"
    assert token_of([(b"authorization", b"Basic abc")]) is None
    assert token_of([]) is None


CHUNK = b'data: {"choices":[{"delta":{"content":"hi"}}],"usage":null}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("content", "chunks", "whole"),
    [
        (CHUNK + DONE, 1, True),
        (CHUNK.replace(b"\n", b"\r\n") + DONE, 1, True),
        (b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n', 1, True),
        (CHUNK, 1, False),
        (CHUNK + b'data: {"error": {}}\n\n', 1, False),
        (b": a comment\n\ndata: nonsense\n\n", 0, False),
        (b"", 0, False),
    ],
)
async def test_a_chat_stream_that_ends_early_is_no_answer(content: bytes, chunks: int, whole: bool) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(content), 5):
            yield content[at : at + 5]

    found = []
    try:
        async for chunk in chunks_of(pieces()):
            found.append(chunk)
        ended = True
    except Interrupted:
        ended = False
    assert (len(found), ended) == (chunks, whole)


OURS = "https://provider.test/v1"
THEIRS = "http://other.test/v1"
SECRETS = [
    "http://user:s3cret@engine.test/v1",
    "http://s3cret@engine.test/v1",
    "http://engine.test/v1?key=s3cret",
    "http://engine.test/v1#s3cret",
    "http://engine.test:s3cret/v1",
    "http://engine.test:99999/v1",
    "http://engine.test/v1\ns3cret",
]


def routes_of(**values: Any) -> Routes:
    settings = Settings(model_base_url=OURS, model_api_key_env="PROVIDER_SECRET", **values)
    return Routes(settings, cast(Any, None), cast(Any, None))


def session(base_url: str | None = None, api_key_env: str | None = None) -> ModelSession:
    return a_session(model=ModelChoice(name="m", base_url=base_url, api_key_env=api_key_env))


def key_of(routes: Routes, base_url: str | None, api_key_env: str | None) -> str | None:
    target = routes.choose(session(base_url, api_key_env), "m", {})
    assert target is not None
    return target.api_key_env


async def test_the_settings_key_goes_to_the_settings_engine_alone() -> None:
    routes = routes_of()
    assert key_of(routes, None, None) == "PROVIDER_SECRET"
    assert key_of(routes, THEIRS, None) is None


@pytest.mark.parametrize("url", SECRETS)
async def test_a_url_with_a_secret_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(LimitInvalid) as refused:
        plain_url(url)
    assert "\ns3cret" in url or "s3cret" not in str(refused.value)

    routes = routes_of()
    with pytest.raises(CallRefusal) as told:
        routes.choose(session(url), "m", {})
    assert told.value.end is CallEnd.UNAUTHORISED
    assert "s3cret" not in told.value.message
    assert not list(routes.engines), "so that /health and /metrics cannot show it"


@pytest.mark.parametrize(
    "wrong",
    [ModelChoice(name="m", base_url=SECRETS[0]), ModelChoice(name="m", api_key_env="sk-s3cret value")],
)
def test_a_submission_with_a_secret_is_refused(wrong: ModelChoice) -> None:

    with pytest.raises(SpecInvalid) as refused:
        specs_for([], agent="nop", mode="auto", model=wrong, agents=known_agents(Settings()))
    assert "s3cret" not in str(refused.value)
    good = ModelChoice(name="m", base_url=THEIRS, api_key_env="OTHER_API_KEY")
    assert specs_for([], agent="nop", mode="auto", model=good, agents=known_agents(Settings())) == []


def test_a_server_whose_address_is_taken_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit, match=r"found 127\.0\.0\.1 port"):
        listen(cast("Any", None), "experience", host="127.0.0.1", port=taken.getsockname()[1], grace_s=1)


def test_a_key_file_that_is_no_text_is_no_key(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"\xff\xfe\x00")
    keys = Keys({"ONE": f"file:{tmp_path / 'key'}", "TWO": "file:/no\0where"})
    assert keys.value("ONE") is keys.value("TWO") is None
