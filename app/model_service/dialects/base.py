"""The contract of a dialect: reading what an agent sends and an engine answers, and writing both.

All dialects meet in one normal form, which is OpenAI's chat message, because it is what trainers take:
`{"role": "system" | "user" | "assistant" | "tool", "content": str | list of parts}`, an assistant's with `reasoning`
(its thoughts, where they are shown) and `tool_calls` (`[{"id", "name", "arguments"}]`, arguments a JSON text), a tool's
with `tool_call_id` and, where it is told, `is_error`. Parts are `{"type": "text", "text"}` or, for what is not text,
the dialect's own. Anthropic's signature of thoughts stands in `reasoning_signature`. Tools that are no functions of the
agent's keep their own form in `given`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from app.models.model_calls import Dialect, TokenUse

Message = dict[str, Any]
"""In the normal form."""


@dataclass(frozen=True, slots=True)
class Request:
    """A call as asked for."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]  # `{"name", "description", "parameters"}`, parameters a JSON schema
    stream: bool
    max_tokens: int | None
    parameters: dict[str, Any] = field(default_factory=dict)  # what else was asked for: temperature, …


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, put together. Token ids and log-probabilities are there when the engine gave them."""

    message: Message
    finish_reason: str  # stop | length | tool_calls | content_filter | "" (it never came)
    usage: TokenUse
    model: str = ""
    prompt_token_ids: tuple[int, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    complete: bool = True  # False: a stream that was cut


class DialectCodec(Protocol):
    """One dialect. Pure: no I/O, nothing remembered."""

    dialect: ClassVar[Dialect]

    # --- Reading ---
    def request(self, body: Mapping[str, Any]) -> Request:
        """Raises: SpecInvalid: not a request of this dialect; what was expected and what was found."""
        ...

    def reply(self, content: bytes, *, streamed: bool) -> Reply:
        """Raises: ValueError: not an answer of this dialect (garbage, an error)."""
        ...

    def usage(self, content: bytes, *, streamed: bool) -> TokenUse:
        """Only the tokens, cheaply; nothing known when they are not told. Never raises."""
        ...

    # --- Writing ---
    def limited(self, body: dict[str, Any], max_tokens: int) -> dict[str, Any]:
        """The request with no larger wish than `max_tokens`; a wish is added where there is none."""
        ...

    def renamed(self, body: dict[str, Any], model: str) -> dict[str, Any]:
        """The request for the model of that name."""
        ...

    def body(self, request: Request) -> dict[str, Any]:
        """A request in this dialect."""
        ...

    def whole(self, reply: Reply, *, id: str, request: Request) -> dict[str, Any]:  # noqa: A002
        """The answer as one JSON body."""
        ...

    def events(self, reply: Reply, *, id: str, request: Request) -> Iterator[bytes]:  # noqa: A002
        """The answer as server-sent events, in as many pieces as an engine would send."""
        ...

    def error(self, status: int, code: str, message: str) -> dict[str, Any]:
        """The body of a refusal, as this dialect's clients understand it.

        `code`: `context_length_exceeded` makes clients see that the prompt is too long, however the dialect says that.
        """
        ...

    def error_event(self, status: int, code: str, message: str) -> bytes:
        """The same in the middle of a stream, as its last event."""
        ...
