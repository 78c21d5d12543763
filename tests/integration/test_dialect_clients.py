"""What we write is what the providers' own clients read: answers whole and streamed, refusals, broken endings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer

import anthropic
import openai
import orjson
import pytest

from app.model_service.dialects import codec_for
from app.model_service.dialects.base import DialectCodec, Reply, Request
from app.models.model_calls import Dialect, TokenUse
from tests.integration.http_server import Handler, running

SAID = Reply(
    message={
        "role": "assistant",
        "content": "I shall look at both.",
        "reasoning": "Two files, so two calls.",
        "tool_calls": [
            {"id": "call_1", "name": "bash", "arguments": '{"command":"cat a"}'},
            {"id": "call_2", "name": "bash", "arguments": '{"command":"cat b","timeout":3}'},
        ],
    },
    finish_reason="tool_calls",
    usage=TokenUse(prompt=120, completion=30, cached=100, reasoning=7),
    model="m",
    prompt_token_ids=(1, 2, 3),
    token_ids=(4, 5),
    logprobs=(-0.25, -0.5),
)
TOOL = {"type": "object", "properties": {"command": {"type": "string"}}}

Play = Callable[[DialectCodec, Request], tuple[int, bytes, str]]


def _answer(codec: DialectCodec, asked: Request) -> tuple[int, bytes, str]:
    if asked.stream:
        return 200, b"".join(codec.events(SAID, id="a1", request=asked)), "text/event-stream"
    return 200, orjson.dumps(codec.whole(SAID, id="a1", request=asked)), "application/json"


class _Server(ThreadingHTTPServer):
    play: Play = staticmethod(_answer)
    asked: Request | None = None


class _Handler(Handler):
    server: _Server

    def respond(self) -> None:
        dialect = Dialect(self.path.split("?", 1)[0].removeprefix("/v1/"))
        codec = codec_for(dialect)
        self.server.asked = codec.request(orjson.loads(self.body()))
        status, content, kind = self.server.play(codec, self.server.asked)
        self.answer(status, content, {"Content-Type": kind})


@pytest.fixture
def server() -> Iterator[_Server]:
    with running(_Server(("127.0.0.1", 0), _Handler)) as server:
        yield server


@pytest.fixture
def openai_client(server: _Server) -> Iterator[openai.OpenAI]:
    base = f"http://127.0.0.1:{server.server_port}/v1"
    with openai.OpenAI(base_url=base, api_key="k", max_retries=0) as client:
        yield client


@pytest.fixture
def anthropic_client(server: _Server) -> Iterator[anthropic.Anthropic]:
    base = f"http://127.0.0.1:{server.server_port}"
    with anthropic.Anthropic(base_url=base, api_key="k", max_retries=0) as client:
        yield client


CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": "look"}],
    "tools": [{"type": "function", "function": {"name": "bash", "parameters": TOOL}}],
}


def test_openai_reads_a_chat_completion(server: _Server, openai_client: openai.OpenAI) -> None:
    found = openai_client.chat.completions.create(**CHAT, logprobs=True)
    message = found.choices[0].message
    assert message.content == "I shall look at both."
    assert [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls] == [
        (call["id"], call["name"], call["arguments"]) for call in SAID.message["tool_calls"]
    ]
    assert found.choices[0].finish_reason == "tool_calls"
    assert [token.logprob for token in found.choices[0].logprobs.content] == [-0.25, -0.5]
    assert found.usage.prompt_tokens_details.cached_tokens == 100
    assert found.usage.completion_tokens_details.reasoning_tokens == 7
    assert message.reasoning_content == "Two files, so two calls."
    assert server.asked.tools[0]["name"] == "bash"


def test_openai_reads_a_streamed_chat_completion(openai_client: openai.OpenAI) -> None:
    with openai_client.chat.completions.stream(**CHAT, stream_options={"include_usage": True}) as stream:
        found = stream.get_final_completion()
    message = found.choices[0].message
    assert message.content == "I shall look at both."
    assert [call.function.arguments for call in message.tool_calls] == [
        '{"command":"cat a"}',
        '{"command":"cat b","timeout":3}',
    ]
    assert [call.id for call in message.tool_calls] == ["call_1", "call_2"]
    assert found.usage.total_tokens == 150


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (400, openai.BadRequestError),
        (401, openai.AuthenticationError),
        (404, openai.NotFoundError),
        (429, openai.RateLimitError),
        (500, openai.InternalServerError),
    ],
)
def test_openai_understands_a_refusal(
    server: _Server, openai_client: openai.OpenAI, status: int, expected: type[openai.APIStatusError]
) -> None:
    server.play = lambda codec, _: (status, orjson.dumps(codec.error(status, "some_code", "why")), "application/json")
    with pytest.raises(expected) as refused:
        openai_client.chat.completions.create(**CHAT)
    assert refused.value.code == "some_code"
    with pytest.raises(expected):
        openai_client.responses.create(model="m", input="look")


def test_openai_sees_an_error_in_the_middle_of_a_stream(server: _Server, openai_client: openai.OpenAI) -> None:
    server.play = _broken_off
    with pytest.raises(openai.APIError, match="engine went away"):
        list(openai_client.chat.completions.create(**CHAT, stream=True))


def _broken_off(codec: DialectCodec, asked: Request) -> tuple[int, bytes, str]:
    events = list(codec.events(SAID, id="a1", request=asked))[:4]
    told = codec.error_event(502, "upstream_error", "the engine went away")
    return 200, b"".join([*events, told]), "text/event-stream"


RESPONSES = {
    "model": "m",
    "input": "look",
    "tools": [{"type": "function", "name": "bash", "parameters": TOOL, "strict": False}],
}


def test_openai_reads_a_response(openai_client: openai.OpenAI) -> None:
    _check(openai_client.responses.create(**RESPONSES))


def test_openai_reads_a_streamed_response(openai_client: openai.OpenAI) -> None:
    with openai_client.responses.stream(**RESPONSES) as stream:
        kinds = [event.type for event in stream]
        found = stream.get_final_response()
    _check(found)
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.function_call_arguments.done") == 2


def _check(found: openai.types.responses.Response) -> None:
    assert found.output_text == "I shall look at both."
    assert [item.type for item in found.output] == ["reasoning", "message", "function_call", "function_call"]
    assert [item.arguments for item in found.output[2:]] == [call["arguments"] for call in SAID.message["tool_calls"]]
    assert found.status == "completed"
    assert found.usage.input_tokens_details.cached_tokens == 100
    assert found.usage.output_tokens_details.reasoning_tokens == 7


MESSAGES = {
    "model": "m",
    "max_tokens": 100,
    "messages": [{"role": "user", "content": "look"}],
    "tools": [{"name": "bash", "input_schema": TOOL}],
}


def test_anthropic_reads_a_message(server: _Server, anthropic_client: anthropic.Anthropic) -> None:
    _check_message(anthropic_client.messages.create(**MESSAGES))
    assert server.asked.max_tokens == 100


def test_anthropic_reads_a_streamed_message(anthropic_client: anthropic.Anthropic) -> None:
    with anthropic_client.messages.stream(**MESSAGES) as stream:
        found = stream.get_final_message()
    _check_message(found)


def _check_message(found: anthropic.types.Message) -> None:
    assert [block.type for block in found.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert found.content[0].thinking == "Two files, so two calls."
    assert found.content[1].text == "I shall look at both."
    assert [block.input for block in found.content[2:]] == [{"command": "cat a"}, {"command": "cat b", "timeout": 3}]
    assert found.stop_reason == "tool_use"
    assert (found.usage.input_tokens, found.usage.cache_read_input_tokens, found.usage.output_tokens) == (20, 100, 30)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (400, anthropic.BadRequestError),
        (401, anthropic.AuthenticationError),
        (429, anthropic.RateLimitError),
        (529, anthropic.InternalServerError),
    ],
)
def test_anthropic_understands_a_refusal(
    server: _Server, anthropic_client: anthropic.Anthropic, status: int, expected: type[anthropic.APIStatusError]
) -> None:
    told = "context_length_exceeded" if status == 400 else "some_code"
    server.play = lambda codec, _: (status, orjson.dumps(codec.error(status, told, "9 tokens")), "application/json")
    with pytest.raises(expected) as refused:
        anthropic_client.messages.create(**MESSAGES)
    assert ("prompt is too long" in str(refused.value)) == (status == 400)
