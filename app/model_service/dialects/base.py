"""Defines the interface of a dialect: reads and writes requests and answers.

All dialects convert to one normal form, which is OpenAI's chat message, because trainers use it:
`{"role": "system" | "user" | "assistant" | "tool", "content": str | list of parts}`. An assistant's message may have
`reasoning` (its thoughts, if they are shown) and `tool_calls` (`[{"id", "name", "arguments"}]`, arguments a JSON text).
A tool's message has `tool_call_id` and, if it is known, `is_error`. Parts are `{"type": "text", "text"}` or, for other
content, the dialect's own. Anthropic's signature of thoughts is in `reasoning_signature`. Tools that are no functions
of the agent keep their own form in `given`.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import orjson

from app.errors import SpecInvalid
from app.model_service.dialects.reading import (
    body_of,
    events_with_key,
    list_or_empty,
    model_of,
    parse_json,
    scores_in,
    value_at,
    whole_numbers,
)
from app.models.model_calls import Dialect, TokenUse, VersionSpan

Message = dict[str, Any]
"""A message in the normal form."""


@dataclass(frozen=True, slots=True)
class Request:
    """Request of a model call."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]  # `{"name", "description", "parameters"}`, parameters a JSON schema
    stream: bool
    max_tokens: int | None
    parameters: dict[str, Any] = field(default_factory=dict)  # other options: temperature, …


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer. Token ids and log-probabilities are set if the engine returned them."""

    message: Message
    finish_reason: str  # stop | length | tool_calls | content_filter | "" (it never came)
    usage: TokenUse
    model: str = ""
    prompt_token_ids: tuple[int, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    versions: tuple[VersionSpan, ...] = ()  # of its tokens, if the engine reports them
    complete: bool = True  # False: a stream that was cut


class DialectCodec(ABC):
    """Codec of one dialect. Pure: no I/O, no state."""

    dialect: ClassVar[Dialect]
    title: ClassVar[str]
    """The dialect's name in error messages."""
    own_keys: ClassVar[frozenset[str]]
    """Keys of a request that `Request` has fields for."""

    def request(self, body: Mapping[str, Any]) -> Request:
        """Raises: SpecInvalid: not a request of this dialect; what was expected and what was found."""
        try:
            return Request(
                model=model_of(body, self.title),
                messages=tuple(self._messages(body)),
                tools=tuple(self._tools(body)),
                stream=bool(body.get("stream")),
                max_tokens=self._max_tokens(body),
                parameters={key: value for key, value in body.items() if key not in self.own_keys},
            )
        except _WRONG_SHAPE as error:
            raise SpecInvalid(f"expected a request of {self.title}; {_shape_error(error)}") from error

    @abstractmethod
    def _messages(self, body: Mapping[str, Any]) -> Iterable[Message]: ...

    @abstractmethod
    def _tools(self, body: Mapping[str, Any]) -> Iterable[dict[str, Any]]: ...

    @abstractmethod
    def _max_tokens(self, body: Mapping[str, Any]) -> int | None: ...

    def reply(self, content: bytes, *, streamed: bool) -> Reply:
        """Raises: ValueError: not an answer of this dialect (garbage, an error)."""
        try:
            return self._of_stream(content) if streamed else self._of_body(body_of(content))
        except _WRONG_SHAPE as error:
            raise ValueError(f"expected an answer of {self.title}; {_shape_error(error)}") from error

    @abstractmethod
    def _of_body(self, body: Mapping[str, Any]) -> Reply:
        """Reads a whole answer. Raises: ValueError."""

    @abstractmethod
    def _of_stream(self, content: bytes) -> Reply:
        """Reads a streamed answer, as far as it came. Raises: ValueError."""

    def usage(self, content: bytes, *, streamed: bool) -> TokenUse:
        """Reads only the tokens, cheaply. The `TokenUse` is empty if the engine reports none. Never raises."""
        try:
            return self._usage(events_with_key(content, b"usage") if streamed else [body_of(content)])
        except ValueError:
            return TokenUse()

    @abstractmethod
    def _usage(self, bodies: Sequence[Mapping[str, Any]]) -> TokenUse: ...

    @abstractmethod
    def with_max_tokens(self, body: dict[str, Any], max_tokens: int) -> dict[str, Any]:
        """Returns the request with a limit of at most `max_tokens`; the limit is added if there is none."""

    @abstractmethod
    def whole(self, reply: Reply, *, id: str, request: Request) -> dict[str, Any]:  # noqa: A002
        """Returns the answer as one JSON body."""

    @abstractmethod
    def events(self, reply: Reply, *, id: str, request: Request) -> Iterator[bytes]:  # noqa: A002
        """Yields the answer as server-sent events, in as many pieces as an engine would send."""

    @abstractmethod
    def error(self, status: int, code: str, message: str) -> dict[str, Any]:
        """Returns the body of a refusal, as this dialect's clients understand it.

        `code`: `context_length_exceeded` shows clients that the prompt is too long, in the dialect's own way.
        """

    @abstractmethod
    def error_event(self, status: int, code: str, message: str) -> bytes:
        """Returns a refusal as the last event of a stream."""


_WRONG_SHAPE = (KeyError, TypeError, AttributeError, IndexError)


def _shape_error(error: Exception) -> str:
    return f"found one with another shape: {'no ' if isinstance(error, KeyError) else ''}{error}"


_TEXTS = frozenset({"text", "input_text", "output_text"})
_CACHE_KEYS = frozenset({"cache_control", "prompt_cache_breakpoint"})
"""Keys that clients set for an engine's cache. They change from call to call and have no meaning."""
_WORD = re.compile(r"\s*\S+|\s+")
_RAW_ARGUMENTS = "arguments"
"""Key of arguments that are no JSON object, where an object is required."""


def content_of(value: object) -> str | list[dict[str, Any]]:
    """Returns a message's content in the normal form: plain text if there is nothing else, and no empty parts."""
    if not isinstance(value, list):
        return value if isinstance(value, str) else "" if value is None else to_json(value)
    parts = [part for one in value if (part := _part(one)) is not None]
    if not parts:
        return ""
    if len(parts) == 1 and is_text(parts[0]):
        return str(parts[0]["text"])
    return parts


def _part(one: object) -> dict[str, Any] | None:
    if not isinstance(one, dict):
        one = {"type": "text", "text": one if isinstance(one, str) else to_json(one)}
    if one.get("type") in _TEXTS and isinstance(one.get("text"), str):
        return {"type": "text", "text": one["text"]} if one["text"] else None
    return {key: value for key, value in one.items() if key not in _CACHE_KEYS}


def is_text(part: Mapping[str, Any]) -> bool:
    return part.get("type") == "text" and isinstance(part.get("text"), str)


def parts_of(content: object) -> list[dict[str, Any]]:
    """Returns a content as parts."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content) if isinstance(content, list) else []


def text_of(content: object) -> str:
    """Returns the text of a content; parts that are not text are left out."""
    return "".join(part["text"] for part in parts_of(content) if is_text(part))


def assistant(
    content: str | list[dict[str, Any]], *, reasoning: str = "", tool_calls: Sequence[Mapping[str, str]] = ()
) -> Message:
    """Builds an assistant's message in the normal form."""
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning"] = reasoning
    if tool_calls:
        message["tool_calls"] = [dict(call) for call in tool_calls]
    return message


def call_of(call_id: object, name: object, arguments: object) -> dict[str, str]:
    """Builds a tool call in the normal form; `arguments` may be a text or an object."""
    text = arguments if isinstance(arguments, str) else "" if arguments is None else to_json(arguments)
    return {"id": str(call_id or ""), "name": str(name or ""), "arguments": text}


def tool_of(name: object, description: object, parameters: object, **more: Any) -> dict[str, Any]:
    """Builds an offered tool in the normal form."""
    return {
        "name": str(name or ""),
        "description": description if isinstance(description, str) else "",
        "parameters": parameters if isinstance(parameters, dict) else {},
        **more,
    }


def to_json(value: object) -> str:
    """Returns JSON in one line, with the keys in their original order."""
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS).decode()


def as_object(arguments: str) -> dict[str, Any]:
    """Converts arguments to an object, for dialects that require one; `as_text` is the inverse."""
    try:
        value = parse_json(arguments)
    except ValueError:
        return {_RAW_ARGUMENTS: arguments} if arguments else {}
    return value if isinstance(value, dict) else {_RAW_ARGUMENTS: arguments}


def as_text(arguments: object) -> str:
    """Converts arguments that were an object to text."""
    if (
        isinstance(arguments, dict)
        and set(arguments) == {_RAW_ARGUMENTS}
        and isinstance(arguments[_RAW_ARGUMENTS], str)
    ):
        return str(arguments[_RAW_ARGUMENTS])
    return arguments if isinstance(arguments, str) else to_json({} if arguments is None else arguments)


def pieces(text: str) -> list[str]:
    """Splits a text as an engine would send it: about a word at a time."""
    return _WORD.findall(text)


def spread(values: Sequence[Any] | None, count: int) -> Iterator[list[Any]]:
    """Splits `values` into `count` lists, in order and about equally; all are empty if there are no values."""
    items = values or ()
    for at in range(count):
        yield list(items[at * len(items) // count : (at + 1) * len(items) // count])


def event(data: Mapping[str, Any], name: str = "") -> bytes:
    """Returns one server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + orjson.dumps(data) + b"\n\n"


TOKENS = "megaflow.tokens"
"""Type of the event with `token_fields`, which ends the record of a translated stream."""


def token_fields(reply: Reply) -> dict[str, Any]:
    """Returns token ids, log-probabilities and versions, which only chat completions have fields for."""
    tokens = {"prompt_token_ids": reply.prompt_token_ids, "token_ids": reply.token_ids, "logprobs": reply.logprobs}
    versions = {"weight_versions": [asdict(span) for span in reply.versions]} if reply.versions else {}
    return {key: list(value) for key, value in tokens.items() if value is not None} | versions


def tokens_in(body: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the output of `token_fields`, for a `Reply`."""
    return {
        "prompt_token_ids": whole_numbers(body.get("prompt_token_ids")),
        "token_ids": whole_numbers(body.get("token_ids")),
        "logprobs": scores_in(body.get("logprobs")),
        "versions": spans_in(body.get("weight_versions")),
    }


def spans_in(value: object) -> tuple[VersionSpan, ...]:
    """Reads which version of the weights wrote which tokens; the trainer checks that the spans fit."""
    return tuple(
        VersionSpan(str(one["version"]), one["start"], one["end"])
        for one in list_or_empty(value)
        if value_at(one, "version") is not None and whole_numbers([value_at(one, "start"), value_at(one, "end")])
    )


_DIGEST_BYTES = 16
_IDS = frozenset({"id", "tool_call_id", "call_id", "tool_use_id", "item_id", "cache_control", "signature", "status"})


def exact_digest(value: object) -> str:
    """Returns the digest of a value in its exact form; the order of keys does not matter."""
    content = orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    return hashlib.sha256(content).hexdigest()[: 2 * _DIGEST_BYTES]


def meaning_digest(message: Message) -> str:
    """Returns a digest that is equal for messages with the same meaning, however a client wrote them.

    Clients move the marks of their caches, replace ids, write a text plain or as a part, and print arguments with
    other blanks. Thoughts do not count, because few clients send them back.
    """
    return exact_digest(_meaning(message))


def _meaning(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message["role"], "content": _content(message.get("content"))}
    if calls := message.get("tool_calls"):
        fields["calls"] = [[call.get("name"), _arguments(call.get("arguments"))] for call in calls]
    return fields


def _content(content: object) -> list[Any]:
    """Returns the parts: neighbouring texts are joined; blanks around them and empty parts do not count."""
    parts: list[Any] = []
    text = ""
    for part in parts_of(content):
        if is_text(part):
            text += part["text"]
            continue
        parts += [text.strip()] if text.strip() else []
        text = ""
        parts.append(_without_ids(part))
    return [*parts, text.strip()] if text.strip() else parts


def _arguments(text: object) -> Any:
    try:
        return parse_json(text) if isinstance(text, str) and text else {}
    except ValueError:
        return text


def _without_ids(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_ids(one) for key, one in value.items() if key not in _IDS}
    return [_without_ids(one) for one in value] if isinstance(value, list) else value
