"""Recorded model calls for attempts that called no model: what the gateway would have kept of a conversation."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import UTC, datetime
from uuid import UUID

from app.artifacts.base import ArtifactStore
from app.ledger.model_calls import StoredCall
from app.model_service.trajectory import artifact
from app.models.model_calls import CallEnd, Dialect, TokenUse

_VOCABULARY = 150_000
_TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}
SHORT = ((60, 12), (40, 8))
"""A conversation for measurements that are not about tokens."""


def keep(store: ArtifactStore, key: str, turns: Sequence[tuple[int, int]], version: str, seed: int = 0) -> str:
    """Store a conversation of these lengths, answered by that version of the policy; its key."""
    store.put(key, artifact.export(_calls(turns, version, random.Random(seed))))
    return key


def _calls(turns: Sequence[tuple[int, int]], version: str, dice: random.Random) -> list[StoredCall]:
    """Each prompt begins with all that was said before, as the engine gave it back."""
    ids: list[int] = []
    messages: list[dict[str, object]] = [{"role": "user", "content": "Make the failing test pass."}]
    found = []
    for number, (before, answer) in enumerate(turns):
        prompt = [*ids, *(dice.randrange(_VOCABULARY) for _ in range(before))]
        said = [dice.randrange(_VOCABULARY) for _ in range(answer)]
        call = {"id": f"call_{number}", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
        reply: dict[str, object] = {"role": "assistant", "content": "", "tool_calls": [call]}
        found.append(
            StoredCall(
                id=UUID(int=number + 1),
                attempt_id=UUID(int=0),
                dialect=Dialect.CHAT,
                model="policy",
                started_at=datetime.fromtimestamp(1_700_000_000 + number, UTC),
                end=CallEnd.ANSWERED,
                is_turn=True,
                policy_version=version,
                use=TokenUse(len(prompt), len(said)),
                messages=tuple(messages),
                tools=(_TOOL,),
                reply=reply,
                prompt_token_ids=tuple(prompt),
                token_ids=tuple(said),
                logprobs=tuple(-dice.expovariate(2.0) for _ in said),
            )
        )
        ids = prompt + said
        messages += [reply, {"role": "tool", "tool_call_id": f"call_{number}", "content": f"output {number}"}]
    return found
