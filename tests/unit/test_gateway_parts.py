"""The gateway's parts that need no network: windows, keys, what engines say, streams without what nobody asked for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.model_service.gateway import engine_faults
from app.model_service.gateway.callers import token_of
from app.model_service.gateway.congestion import CongestionWindow
from app.model_service.gateway.engines import waiting_of
from app.model_service.gateway.keys import Keys
from app.model_service.gateway.relay import without_usage
from app.model_service.gateway.translation import Interrupted, chunks_of
from app.model_service.serving import CallRefusal, read_request
from app.models.model_calls import CallEnd

# --- Windows --------------------------------------------------------------------------------------------------------


async def test_a_window_doubles_while_nothing_is_lost_and_then_grows_by_one() -> None:
    window = CongestionWindow(start=4)
    for _ in range(4):
        assert window.try_enter()
    assert not window.try_enter()
    for _ in range(4):
        window.accepted()
        window.leave()
    assert window.size > 4, "it was full, and all of it went well"
    grown = window.size
    window.accepted()
    assert window.size == grown, "it is not full: nothing is known of more"
    window.busy(time.monotonic(), 0.01)
    halved = window.size
    assert halved <= grown / 2
    await asyncio.sleep(0.02)
    while window.try_enter():
        pass
    window.accepted()
    assert halved < window.size < halved + 1.001, "slowly from now on"
    window.close()


async def test_a_crowd_that_is_refused_together_halves_it_once() -> None:
    window = CongestionWindow(start=64)
    for _ in range(64):
        assert window.try_enter()
    entered = time.monotonic()
    for _ in range(40):
        window.leave()
        window.busy(entered, 0.01)
    assert window.size == 32.0
    window.close()


async def test_who_waits_goes_in_the_order_of_coming_and_who_leaves_the_line_takes_no_place() -> None:
    window = CongestionWindow(start=1)
    order: list[int] = []
    assert window.try_enter()

    async def one(number: int) -> None:
        await window.enter(10)
        order.append(number)
        window.leave()

    tasks = []
    for number in range(5):
        tasks.append(asyncio.create_task(one(number)))
        while window.waiting <= number:
            await asyncio.sleep(0)
    tasks[1].cancel()
    with pytest.raises(TimeoutError):
        await window.enter(0.01)
    window.leave()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [0, 2, 3, 4]
    assert (window.inside, window.waiting) == (0, 0)


async def test_a_pause_ends_by_itself() -> None:
    window = CongestionWindow(start=4)
    assert window.try_enter()
    window.leave()
    window.busy(time.monotonic(), 0.05)
    assert not window.try_enter()
    begun = time.monotonic()
    await window.enter(10)
    assert time.monotonic() - begun >= 0.04
    window.leave()
    window.close()


async def test_a_long_line_at_the_engine_makes_the_window_smaller_and_a_short_one_does_not() -> None:
    window = CongestionWindow(start=100)
    for _ in range(100):
        assert window.try_enter()
    window.loaded(10)
    assert window.size == 100
    window.loaded(60)
    assert window.size == 50, "what runs, and a tenth"
    assert waiting_of(b'# HELP\nvllm:num_requests_waiting{model_name="m"} 3.0\n') == 3
    assert waiting_of(b"sglang:num_queue_reqs 2.0") == 2
    assert waiting_of(b"python_gc_objects_collected_total 1.0") is None


# --- Keys -----------------------------------------------------------------------------------------------------------


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


# --- What engines and callers say -----------------------------------------------------------------------------------


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


def test_a_request_has_a_model() -> None:
    assert read_request(b'{"model": "m"}') == {"model": "m"}
    for raw in (b"", b"{", b"[]", b'"m"', b"{}", b'{"model": ""}', b'{"model": []}', b"null"):
        with pytest.raises(CallRefusal) as refused:
            read_request(raw)
        assert refused.value.status == 400


# --- Streams --------------------------------------------------------------------------------------------------------

CHUNK = b'data: {"choices":[{"delta":{"content":"hi"}}],"usage":null}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":1}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
async def test_the_usage_is_left_out_however_a_stream_is_cut_into_pieces(size: int) -> None:
    whole = CHUNK + CHUNK + USAGE + DONE

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(whole), size):
            yield whole[at : at + size]

    assert b"".join([piece async for piece in without_usage(pieces())]) == CHUNK + CHUNK + DONE


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
