"""OpenAI's responses: a conversation of items instead of messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from app.model_service.dialects import responses_reading as reading
from app.model_service.dialects import responses_writing as writing
from app.model_service.dialects.base import Message, Reply, Request
from app.model_service.dialects.chat import error_body
from app.model_service.dialects.parts import event
from app.model_service.dialects.reading import as_answer, as_request, body_of, inside, listed, model_of, number, says
from app.models.model_calls import Dialect, TokenUse

_OF = "responses"
_OWN = frozenset({"model", "input", "instructions", "tools", "stream", "max_output_tokens"})
_LEAST_OUTPUT = 16  # tokens; a smaller wish is refused


class ResponsesCodec:
    """`Dialect.RESPONSES`."""

    dialect: ClassVar[Dialect] = Dialect.RESPONSES

    # --- Reading ----------------------------------------------------------------------------------------------------

    def request(self, body: Mapping[str, Any]) -> Request:
        with as_request(_OF):
            messages: list[Message] = []
            if isinstance(body.get("instructions"), str) and body["instructions"]:
                messages.append({"role": "system", "content": body["instructions"]})
            messages.extend(reading.messages_of(reading.items_of(body)))
            return Request(
                model=model_of(body, _OF),
                messages=tuple(messages),
                tools=tuple(reading.tool_from(tool) for tool in listed(body.get("tools"))),
                stream=bool(body.get("stream")),
                max_tokens=number(body.get("max_output_tokens")),
                parameters={key: value for key, value in body.items() if key not in _OWN},
            )

    def reply(self, content: bytes, *, streamed: bool) -> Reply:
        with as_answer(_OF):
            return reading.of_stream(content) if streamed else reading.of_body(body_of(content))

    def usage(self, content: bytes, *, streamed: bool) -> TokenUse:
        try:
            told = [body_of(content)] if not streamed else [one.get("response") for one in says(content, b"usage")]
        except ValueError:
            return TokenUse()
        found = [usage for one in told if isinstance(usage := inside(one, "usage"), dict)]
        return reading.usage_of(found[-1]) if found else TokenUse()

    # --- Writing ----------------------------------------------------------------------------------------------------

    def limited(self, body: dict[str, Any], max_tokens: int) -> dict[str, Any]:
        wished = number(body.get("max_output_tokens"))
        return {**body, "max_output_tokens": max_tokens if wished is None else min(wished, max_tokens)}

    def renamed(self, body: dict[str, Any], model: str) -> dict[str, Any]:
        return {**body, "model": model}

    def body(self, request: Request) -> dict[str, Any]:
        items = [item for one in request.messages for item in writing.written(one)]
        found: dict[str, Any] = {"model": request.model, "input": items, **request.parameters}
        if request.tools:
            found["tools"] = [writing.written_tool(tool) for tool in request.tools]
        if request.stream:
            found["stream"] = True
        if request.max_tokens is not None:
            found["max_output_tokens"] = max(request.max_tokens, _LEAST_OUTPUT)
        return found

    def whole(self, reply: Reply, *, id: str, request: Request) -> dict[str, Any]:  # noqa: A002
        body = writing.head(reply, id, request)
        body |= {
            "output": list(writing.output_of(reply, id)),
            "usage": writing.usage_told(reply.usage),
            **writing.status_of(reply.finish_reason),
        }
        return body | (writing.token_fields(reply) if request.parameters.get("return_token_ids") else {})

    def events(self, reply: Reply, *, id: str, request: Request) -> Iterator[bytes]:  # noqa: A002
        whole = self.whole(reply, id=id, request=request)
        begun = {**writing.head(reply, id, request), "status": "in_progress"}
        steps: list[tuple[str, dict[str, Any]]] = [
            ("response.created", {"response": begun}),
            ("response.in_progress", {"response": begun}),
        ]
        for at, item in enumerate(whole["output"]):
            steps += [(name, {"output_index": at, **data}) for name, data in writing.item_events(item)]
        last = "response.incomplete" if whole["status"] == "incomplete" else "response.completed"
        steps.append((last, {"response": whole}))
        for number_, (name, data) in enumerate(steps):
            yield event({"type": name, "sequence_number": number_, **data}, name)

    def error(self, status: int, code: str, message: str) -> dict[str, Any]:
        return error_body(status, code, message)

    def error_event(self, status: int, code: str, message: str) -> bytes:
        told = error_body(status, code, message)["error"]
        said_ = {"type": "error", "code": code, "message": told["message"], "param": None, "sequence_number": 0}
        return event(said_, "error")
