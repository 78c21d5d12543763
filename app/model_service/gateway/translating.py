"""Translates requests and answers. Importing this imports litellm."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager, suppress
from typing import Any

import litellm
import orjson
from litellm.llms.anthropic.pass_through.adapters.streaming_iterator import AnthropicStreamWrapper
from litellm.llms.anthropic.pass_through.adapters.transformation import AnthropicAdapter
from litellm.responses.litellm_completion_transformation.streaming_iterator import LiteLLMCompletionStreamingIterator
from litellm.responses.litellm_completion_transformation.transformation import LiteLLMCompletionResponsesConfig
from litellm.types.utils import ModelResponse, ModelResponseStream

from app.model_service.dialects.reading import parse_json
from app.model_service.gateway.translation import Interrupted, chunks_of
from app.model_service.serving import CallRefusal
from app.models.model_calls import CallEnd

litellm.suppress_debug_info = True  # it prints advice to standard output

_KNOWN = frozenset(
    (
        *("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "max_tokens", "max_completion_tokens"),
        *("temperature", "top_p", "top_k", "stop", "stream", "stream_options", "response_format", "reasoning_effort"),
        *("seed", "user"),
    )
)
"""Fields that engines know. Other fields of another dialect mean nothing to them, and strict engines refuse them."""
_PROVIDER = "openai"
_UNCOUNTED = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
_DRAIN_S = 2.0


class Messages:
    """Translation of one call from Anthropic's messages to chat completions and back. Each method raises CallRefusal.

    `events` ends with its source. If the source was cut, the last events are missing.
    """

    def __init__(self) -> None:
        self._adapter = AnthropicAdapter()
        self._names: dict[str, str] = {}
        self._model = ""

    def request(self, body: dict[str, Any]) -> dict[str, Any]:
        self._model = body["model"]
        with _request_errors():
            chat, self._names = self._adapter.translate_completion_input_params_with_tool_mapping(
                _copy(body), custom_llm_provider=_PROVIDER
            )
        return _chat(dict(chat or {}))

    def whole(self, content: bytes) -> bytes:
        with _answer_errors():
            body = dict(self._adapter.translate_completion_output_params(_answer(content), self._names) or {})
        body["model"] = self._model
        return orjson.dumps(_plain_json(body))

    async def events(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        chunks: Any = _Chunks(pieces, self._model)
        wrapper = AnthropicStreamWrapper(completion_stream=chunks, model=self._model, tool_name_mapping=self._names)
        async with aclosing(_until_broken(wrapper, chunks, pieces)) as events:
            async for event in events:
                yield _event(event) if isinstance(event, dict) else event


class Responses:
    """Translation of one call from OpenAI's responses to chat completions and back."""

    def __init__(self) -> None:
        self._input: Any = None
        self._options: Any = {}
        self._model = ""

    def request(self, body: dict[str, Any]) -> dict[str, Any]:
        self._model = body["model"]
        options = _copy(body)
        if options.get("previous_response_id"):
            raise CallRefusal(
                400,
                "not_translated",
                "expected the whole conversation in `input`, found `previous_response_id`: this engine keeps no state",
            )
        self._input, self._options = options.pop("input", ""), options
        with _request_errors():
            chat = LiteLLMCompletionResponsesConfig.transform_responses_api_request_to_chat_completion_request(
                model=self._model,
                input=self._input,
                responses_api_request=self._options,
                custom_llm_provider=_PROVIDER,
                stream=True if options.get("stream") else None,
            )
        return _chat(chat)

    def whole(self, content: bytes) -> bytes:
        with _answer_errors():
            response = LiteLLMCompletionResponsesConfig.transform_chat_completion_response_to_responses_api_response(
                chat_completion_response=_answer(content),
                request_input=self._input,
                responses_api_request=self._options,
            )
            body = response.model_dump(mode="json", exclude_none=True)
        body["model"] = self._model
        return orjson.dumps(body)

    async def events(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        chunks: Any = _Chunks(pieces, self._model)
        iterator = LiteLLMCompletionStreamingIterator(
            model=self._model,
            litellm_custom_stream_wrapper=chunks,
            request_input=self._input,
            responses_api_request=self._options,
            custom_llm_provider=_PROVIDER,
        )
        async with aclosing(_until_broken(iterator, chunks, pieces)) as events:
            async for event in events:
                body = event.model_dump(mode="json", exclude_none=True)
                if isinstance(body.get("response"), dict):
                    body["response"]["model"] = self._model
                yield _event(body)


class _Chunks:
    logging_obj = None
    chunks: list[ModelResponseStream] | None = None
    messages = None

    def __init__(self, pieces: AsyncIterator[bytes], model: str) -> None:
        self.broken: Exception | None = None
        self._chunks = chunks_of(pieces)
        self._model = model

    def __aiter__(self) -> _Chunks:
        return self

    async def __anext__(self) -> ModelResponseStream:
        try:
            return ModelResponseStream(**await self._chunks.__anext__())
        except StopAsyncIteration:
            raise
        except Exception as error:  # litellm may swallow it and end the stream itself
            self.broken = error
            raise


async def _until_broken(events: Any, chunks: _Chunks, pieces: AsyncIterator[bytes]) -> AsyncGenerator[Any, None]:
    """Yields a translator's events, up to where its source broke.

    Raises: CallRefusal: its source or the translator failed, other than by an early end.
    """
    async with aclosing(pieces) as source:  # type: ignore[type-var]
        try:
            with _answer_errors():
                async for event in events:
                    if chunks.broken is not None:
                        break
                    yield event
                if chunks.broken is not None:
                    raise chunks.broken
        except Interrupted as interrupted:
            if interrupted.why:
                raise CallRefusal(502, "engine_error", interrupted.why, CallEnd.UPSTREAM_ERROR) from interrupted
        with suppress(TimeoutError):  # after the last event only the end of the stream may come
            async with asyncio.timeout(_DRAIN_S):
                async for _ in source:
                    pass


def warm() -> None:
    """Makes one call of each kind: litellm imports most of its modules at its first use."""
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    answer = {"id": "x", "object": "chat.completion", "created": 1, "model": "m"}
    answer["choices"] = [{"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}]
    chunk = {**answer, "object": "chat.completion.chunk"}
    answer["usage"] = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    chunk["choices"] = [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}]

    async def stream() -> AsyncIterator[bytes]:
        yield b"data: " + orjson.dumps(chunk) + b"\n\ndata: [DONE]\n\n"

    async def all_of(translation: Messages | Responses) -> None:
        async for _ in translation.events(stream()):
            pass

    for translation, request in ((Messages(), body), (Responses(), {"model": "m", "input": "x"})):
        translation.request(request)
        translation.whole(orjson.dumps(answer))
        asyncio.run(all_of(translation))


def _copy(body: dict[str, Any]) -> dict[str, Any]:
    """Copies a request: litellm modifies its input, and a call may be sent twice."""
    copy: dict[str, Any] = orjson.loads(orjson.dumps(body))
    return copy


def _chat(said: dict[str, Any]) -> dict[str, Any]:
    body = {key: _plain_json(value) for key, value in said.items() if key in _KNOWN and value is not None}
    effort = body.get("reasoning_effort")
    if isinstance(effort, dict):
        effort = effort.get("effort")
    if effort is not None:
        body["reasoning_effort"] = "low" if effort == "minimal" else effort  # few engines know `minimal`
    chat: dict[str, Any] = orjson.loads(orjson.dumps(body))
    for message in chat["messages"]:
        message.pop("thinking_blocks", None)  # its signatures are another provider's; `reasoning_content` has the text
        for call in message.get("tool_calls") or ():
            call.pop("index", None)
    return chat


def _plain_json(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", exclude_none=True)
    if isinstance(value, dict):
        return {key: _plain_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_json(one) for one in value]
    return value


def _answer(content: bytes) -> ModelResponse:
    """Parses an answer. Missing usage becomes zeros: litellm and clients need numbers."""
    body = parse_json(content)
    return ModelResponse(**{**body, "usage": body.get("usage") or _UNCOUNTED})


def _event(body: dict[str, Any]) -> bytes:
    return (
        b"event: " + str(body.get("type", "message")).encode() + b"\ndata: " + orjson.dumps(_plain_json(body)) + b"\n\n"
    )


@contextmanager
def _request_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        message = f"the request cannot be said in chat completions: {str(error)[:500]}"
        raise CallRefusal(400, "not_translated", message) from error


@contextmanager
def _answer_errors() -> Iterator[None]:
    try:
        yield
    except (Interrupted, CallRefusal):
        raise
    except Exception as error:
        message = f"the engine's answer cannot be translated: {str(error)[:500]}"
        raise CallRefusal(502, "not_translated", message, CallEnd.UPSTREAM_ERROR) from error
