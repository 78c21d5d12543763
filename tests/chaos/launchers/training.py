"""The two programs of the training loop's case: an engine with token ids, and a trainer that trains nothing.

python -m tests.chaos.launchers.training engine PORT LOG
python -m tests.chaos.launchers.training trainer RUN POLICY
"""

from __future__ import annotations

import json
import sys
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import UUID

from app.client import MegaFlow
from app.errors import MegaFlowError
from app.experience.hand_out import Experience
from app.ledger import experience

_COMMANDS = ("echo done > answer; echo ok", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
_TRAIN_S = 0.3


def ids_of(text: str) -> list[int]:
    """Token ids of a text: one for each word, by a rule that anybody can repeat."""
    return [zlib.crc32(word.encode()) & 0xFFFF for word in text.split()]


def _rendered(messages: list[dict[str, Any]]) -> tuple[list[int], int]:
    """A conversation's token ids, and how many answers are in it. An answer is what was sampled, token by token."""
    found: list[int] = []
    turns = 0
    for message in messages:
        if message["role"] == "assistant":
            found += [len(found), *ids_of(_COMMANDS[min(turns, 1)]), 2]
            turns += 1
        else:
            found += [1, *ids_of(str(message.get("content") or ""))]
    return found, turns


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    log: Path
    lock = threading.Lock()

    def do_GET(self) -> None:
        self._answer({"object": "list", "data": [{"id": "policy", "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        prompt, turns = _rendered(body["messages"])
        command = _COMMANDS[min(turns, 1)]
        answer = [len(prompt), *ids_of(command), 2]
        with self.lock, self.log.open("a") as file:
            file.write(json.dumps({"prompt": prompt, "answer": answer}) + "\n")
        arguments = json.dumps({"command": command})
        call = {"id": f"call_{len(prompt)}", "type": "function", "function": {"name": "bash", "arguments": arguments}}
        content = [{"token": f"token_id:{token}", "logprob": -0.5} for token in answer]
        self._answer(
            {
                "id": f"chatcmpl-{time.time_ns()}",
                "object": "chat.completion",
                "created": 0,
                "model": "policy",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "", "tool_calls": [call]},
                        "finish_reason": "tool_calls",
                        "token_ids": answer,
                        "logprobs": {"content": content},
                    }
                ],
                "usage": {
                    "prompt_tokens": len(prompt),
                    "completion_tokens": len(answer),
                    "total_tokens": len(prompt) + len(answer),
                },
                "prompt_token_ids": prompt,
                "weight_version": "v0",
            }
        )

    def _answer(self, what: dict[str, Any]) -> None:
        content = json.dumps(what).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def _serve(port: str, log: str) -> None:
    _Handler.log = Path(log)
    ThreadingHTTPServer(("127.0.0.1", int(port)), _Handler).serve_forever()


def _train(run: str, policy: str) -> None:
    """Take batches, publish the next version, commit; through outages, and from the start again after a kill."""
    with MegaFlow() as flow:
        while True:
            try:
                handed = flow.experience(flow.run(UUID(run)), policy=policy, consumer="trainer", lease_s=3.0)
                _work(flow, handed, UUID(run), policy)
            except (MegaFlowError, OSError) as error:
                print(f"again: {error}", flush=True)
                time.sleep(0.3)


def _work(flow: MegaFlow, handed: Experience, run: UUID, policy: str) -> None:
    while True:
        batch = handed.next_batch(1, wait_s=2.0)
        if batch is None:
            continue
        rows = [row for rows in batch.groups().values() for row in rows]
        assert rows, "a group without samples was handed out"
        time.sleep(_TRAIN_S)
        version = f"v{experience.counts(flow.database, run).committed + 1}"
        handed.publish(version)  # once more, where it was killed between the two
        handed.commit(batch, version)
        print(f"{batch.lease.id} {version}", flush=True)


if __name__ == "__main__":
    {"engine": _serve, "trainer": _train}[sys.argv[1]](*sys.argv[2:])
