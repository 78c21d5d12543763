"""Serves the small policy with OpenAI's chat: token ids and log-probabilities out, weights from a file in.

    python -m bench.training.engine WEIGHTS --port PORT --seed N

Calls that wait are answered together. `/update_weights_from_disk` loads other weights between two batches.
"""

from __future__ import annotations

import argparse
import asyncio
import uuid
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from app.errors import SampleRefused
from app.model_service.training.trainer import load_weights
from bench.training.policy import TinyPolicy, generate, prompt_ids, said, tool_call

NAME = "tiny"
_GATHER_S = 0.003
"""Calls that come within this long after the first are answered with it."""


class Engine:
    """One model, and the calls that wait for it."""

    def __init__(self, model: torch.nn.Module, seed: int) -> None:
        """model: token ids, sequences × tokens, to logits over the policy's vocabulary."""
        self._model = model
        self._chance = torch.Generator().manual_seed(seed)
        self._waiting: list[tuple[list[int], asyncio.Future[tuple[list[int], list[float]]]]] = []
        self._turn = asyncio.Lock()
        self.version = "v0"
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/update_weights_from_disk", self.update_weights, methods=["POST"]),
            ]
        )

    async def answer(self, prompt: list[int]) -> tuple[list[int], list[float], str]:
        mine: asyncio.Future[tuple[list[int], list[float]]] = asyncio.get_running_loop().create_future()
        self._waiting.append((prompt, mine))
        await asyncio.sleep(_GATHER_S)
        async with self._turn:
            version = self.version
            if not mine.done():
                batch, self._waiting = self._waiting, []
                answers = await asyncio.to_thread(generate, self._model, [ids for ids, _ in batch], self._chance)
                for (_, waiting), found in zip(batch, answers, strict=True):
                    waiting.set_result(found)
        ids, scores = mine.result()
        return ids, scores, version

    async def update(self, weights: Path, version: str) -> None:
        """weights: a file, or a folder with `model.safetensors`."""
        async with self._turn:
            load_weights(self._model, weights / "model.safetensors" if weights.is_dir() else weights)
            self.version = version

    async def chat(self, request: Request) -> JSONResponse:
        body: dict[str, Any] = await request.json()
        prompt = prompt_ids(body["messages"])
        ids, scores, version = await self.answer(prompt)
        text, command = said(ids)
        call_id = f"call_{uuid.uuid4().hex[:12]}"
        message = {"role": "assistant", "content": text}
        if command is not None:
            message["tool_calls"] = [tool_call(command, call_id)]  # type: ignore[assignment]
        content = [{"token": f"token_id:{token}", "logprob": score} for token, score in zip(ids, scores, strict=True)]
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": "tool_calls" if command else "stop",
            "token_ids": ids,
            "logprobs": {"content": content},
        }
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
        return JSONResponse(
            {
                "id": f"chatcmpl-{uuid.uuid4().hex}",
                "object": "chat.completion",
                "created": 0,
                "model": NAME,
                "choices": [choice],
                "usage": usage,
                "prompt_token_ids": prompt,
                "weight_version": version,
            }
        )

    async def completions(self, request: Request) -> JSONResponse:
        """Scores a prompt of token ids, as a probe asks for it (`echo` with `logprobs`); nothing is generated."""
        ids: list[int] = (await request.json())["prompt"]
        async with self._turn:
            with torch.no_grad():
                scores = torch.log_softmax(self._model(torch.tensor([ids[:-1]])).float(), -1)
        told = scores.gather(-1, torch.tensor([ids[1:]])[..., None]).flatten().tolist()
        return JSONResponse({"choices": [{"index": 0, "text": "", "logprobs": {"token_logprobs": [None, *told]}}]})

    async def update_weights(self, request: Request) -> JSONResponse:
        body = await request.json()
        try:
            await self.update(Path(body["model_path"]), str(body["weight_version"]))
        except (SampleRefused, OSError) as error:
            return JSONResponse({"success": False, "message": str(error)}, 400)
        return JSONResponse({"success": True, "message": ""})

    async def models(self, request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": NAME, "object": "model"}]})


def main() -> None:
    """Serve until told to stop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    model = TinyPolicy().eval()
    load_weights(model, asked.weights)
    uvicorn.run(Engine(model, asked.seed).app, host="127.0.0.1", port=asked.port, log_level="warning")


if __name__ == "__main__":
    main()
