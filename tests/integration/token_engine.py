"""An engine with token ids, whose template writes tool calls otherwise than its model does, so that prefixes break."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

from tests.integration.gateway_fixture import Engine, streamed

START, END, LINE = 1, 2, 3


class TokenEngine(Engine):
    """Speaks vLLM's fields. Its model says what `says` holds; one token for a word, but a tool call is one token."""

    def __init__(self) -> None:
        super().__init__()
        self.handler = self.completion
        self.more = {"/tokenize": self.tokenize, "/update_weights_from_disk": self.update}
        self.weights = 0.0
        self.updates: list[tuple[str, str]] = []  # path and version
        self.go_on = asyncio.Event()  # cleared: answers wait
        self.go_on.set()
        self.says: list[dict[str, Any]] = []
        self.takes_ids = self.renders = True
        self.strips = False  # its template leaves the words of earlier answers out
        self.spans: list[dict[str, Any]] | None = None
        self.prompts: list[list[int]] = []  # as the model had them
        self.answers: list[list[int]] = []
        self._known: dict[str, int] = {}

    def token(self, word: str) -> int:
        return self._known.setdefault(word, 10 + len(self._known))

    def render(self, messages: list[dict[str, Any]], *, prompt: bool) -> list[int]:
        found: list[int] = []
        for at, message in enumerate(messages):
            words = str(message.get("content") or "").split()
            if self.strips and message["role"] == "assistant" and at + 1 < len(messages):
                words = []
            for call in message.get("tool_calls") or ():
                words += ["<call>", call["function"]["name"], *call["function"]["arguments"].split(), "</call>"]
            found += [START, self.token(message["role"]), *map(self.token, words), END, LINE]
        return found + ([START, self.token("assistant")] if prompt else [])

    def sampled(self, said: dict[str, Any]) -> list[int]:
        """The model's own tokens for an answer."""
        calls = [self.token(f"<call>{call['function']}</call>") for call in said.get("tool_calls") or ()]
        return [*map(self.token, str(said.get("content") or "").split()), *calls, END]

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        if not self.renders:
            return web.json_response({"error": "no messages here"}, status=400)
        return web.json_response({"tokens": self.render(body["messages"], prompt=body["add_generation_prompt"])})

    def scores(self, ids: list[int], weights: float) -> list[float | None]:
        return [None, *(-(token % 7) / 10 - weights for token in ids[1:])]

    async def update(self, request: web.Request) -> web.StreamResponse:
        """`broken` is answered with 200, and then other weights are served; `wide` is refused."""
        body = json.loads(await request.read())
        self.updates.append((body["model_path"], body["weight_version"]))
        if body["model_path"] == "wide":
            return web.json_response(
                {"success": False, "message": "size mismatch for layer 0: [8] and [9]"}, status=400
            )
        self.weights = {"old": 0.0, "new": 1.0, "nan": float("nan")}.get(body["model_path"], 0.5)
        return web.json_response({"success": True, "message": ""})

    async def completion(self, request: web.Request) -> web.StreamResponse:
        if request.match_info["path"] != "completions":
            await self.go_on.wait()
            return await self.chat(request)
        body = json.loads(await request.read())
        scores = [*self.scores(body["prompt"], self.weights), -1.0]
        text = json.dumps({"choices": [{"logprobs": {"token_logprobs": scores}}]})
        return web.Response(text=text, content_type="application/json")

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        prompt = given if given and self.takes_ids else self.render(body["messages"], prompt=True)
        said = self.says.pop(0) if self.says else {"content": "Good day."}
        ids = self.sampled(said)
        self.prompts.append(prompt)
        self.answers.append(ids)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "tool_calls" if said.get("tool_calls") else "stop"}
        if body.get("return_token_ids"):
            choice["token_ids"] = ids
        if body.get("logprobs"):
            choice["logprobs"] = {"content": [{"token": "x", "logprob": -token / 100} for token in ids]}
        if self.spans is not None:
            choice["meta_info"] = {"weight_versions": self.spans}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
        whole = {"id": "c", "model": body["model"], "created": 1, "usage": usage}
        if body.get("return_token_ids"):
            whole["prompt_token_ids"] = prompt
        if not body.get("stream"):
            message = {"role": "assistant", "content": None, **said}
            return web.json_response(whole | {"object": "chat.completion", "choices": [choice | {"message": message}]})
        usage_event = {key: whole[key] for key in ("id", "model", "created", "usage")} | {"choices": []}
        del whole["usage"]
        calls = [{"index": at, **call} for at, call in enumerate(said.get("tool_calls") or ())]
        delta = {"role": "assistant", "content": said.get("content"), **({"tool_calls": calls} if calls else {})}
        events = [whole | {"object": "chat.completion.chunk", "choices": [choice | {"delta": delta}]}, usage_event]
        lines = [b"data: " + json.dumps(one).encode() + b"\n\n" for one in events]
        return await streamed(request, [*lines, b"data: [DONE]\n\n"])


def tool_call(name: str, arguments: str, call_id: str = "call_1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
