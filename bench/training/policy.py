"""A policy of about 100,000 parameters with a tokenizer of words, small enough to learn in seconds on a CPU.

It knows one kind of conversation: a task, commands of which one is right, what they print. Its chat template keeps of
every message the words that it knows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

COMMANDS = ("./a", "./b", "./c", "./d")
_SPECIAL = ("<pad>", "<user>", "<tool>", "<assistant>", "<end>")
_WORDS = ("box", "run", "submit", "open", "closed", *COMMANDS, *"0123456789")
VOCABULARY = (*_SPECIAL, *_WORDS)
_IDS = {word: number for number, word in enumerate(VOCABULARY)}
END = _IDS["<end>"]
LONGEST = 96
"""Tokens of a conversation."""
MOST_ANSWER = 6
_SPLIT = re.compile(r"\./[a-d]|[a-z]+|[0-9]")
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


class TinyPolicy(nn.Module):
    """A decoder: two layers, width 64. Token ids, sequences × tokens, to logits over `VOCABULARY`."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(len(VOCABULARY), width)
        self.places = nn.Embedding(LONGEST, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, token_ids: Tensor) -> Tensor:
        length = token_ids.shape[1]
        causal = nn.Transformer.generate_square_subsequent_mask(length)
        seen = self.tokens(token_ids) + self.places(torch.arange(length))
        hidden = self.norm(self.body(seen, mask=causal, is_causal=True))
        return functional.linear(hidden, self.tokens.weight)


def words_of(text: str) -> list[int]:
    """The known words of a text; of a long one the last paragraph, where agents put the task."""
    return [_IDS[word] for word in _SPLIT.findall(text.rsplit("\n\n", 1)[-1]) if word in _IDS]


def prompt_ids(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """The chat template: roles, known words, and the policy's own answers by their commands."""
    found: list[int] = []
    for message in messages:
        role = message["role"]
        if role == "assistant":
            found += [_IDS["<assistant>"], *_answer_ids(message), END]
        elif role in ("user", "tool"):
            found += [_IDS[f"<{role}>"], *words_of(str(message.get("content") or ""))]
    return [*found, _IDS["<assistant>"]][-LONGEST + MOST_ANSWER :]


def _answer_ids(message: Mapping[str, Any]) -> list[int]:
    """What an answer that comes back was: its text is what the policy wrote."""
    return words_of(str(message.get("content") or ""))


def said(answer: Sequence[int]) -> tuple[str, str | None]:
    """An answer's words, and the command that it means; None: it means none."""
    words = [VOCABULARY[token] for token in answer if token != END]
    text = " ".join(words)
    if words == ["submit"]:
        return text, SUBMIT
    if len(words) == 2 and words[0] == "run" and words[1] in COMMANDS:
        return text, words[1]
    return text, None


def tool_call(command: str, call_id: str) -> dict[str, Any]:
    arguments = json.dumps({"command": command})
    return {"id": call_id, "type": "function", "function": {"name": "bash", "arguments": arguments}}


@torch.no_grad()
def generate(
    model: nn.Module, prompts: Sequence[Sequence[int]], seeds: torch.Generator
) -> list[tuple[list[int], list[float]]]:
    """An answer to each prompt at temperature 1: its token ids, `<end>` included, and their log-probabilities."""
    rows = [list(prompt) for prompt in prompts]
    found: list[tuple[list[int], list[float]]] = [([], []) for _ in rows]
    for _ in range(MOST_ANSWER):
        going = [number for number, (ids, _) in enumerate(found) if not ids or ids[-1] != END]
        if not going:
            break
        longest = max(len(rows[number]) for number in going)
        ids = torch.zeros(len(going), longest, dtype=torch.long)
        for place, number in enumerate(going):
            ids[place, : len(rows[number])] = torch.tensor(rows[number])
        logits = model(ids)
        last = torch.stack([logits[place, len(rows[number]) - 1] for place, number in enumerate(going)])
        scores = torch.log_softmax(last.float(), -1)
        drawn = torch.multinomial(scores.exp(), 1, generator=seeds).squeeze(-1)
        for place, number in enumerate(going):
            token = int(drawn[place])
            rows[number].append(token)
            found[number][0].append(token)
            found[number][1].append(float(scores[place, token]))
    return found


def started() -> TinyPolicy:
    """The policy of seed 0 that knows the form of an answer."""
    torch.manual_seed(0)
    model = TinyPolicy()
    warm_start(model, 0)
    return model


def warm_start(model: nn.Module, seed: int, steps: int = 150) -> None:
    """Teach the form of an answer, not which is right: a random command, then `submit` in half of the cases."""
    chance = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def draw(most: int) -> int:
        return int(torch.randint(most, (1,), generator=chance))

    for _ in range(steps):
        rows = []
        for _ in range(64):
            task = [_IDS["<user>"], _IDS["box"], _IDS[str(draw(10))]]
            first = [_IDS["<assistant>"], _IDS["run"], _IDS[COMMANDS[draw(len(COMMANDS))]], END]
            printed = [_IDS["<tool>"], _IDS["open" if draw(4) == 0 else "closed"]]
            second = [_IDS["submit"], END] if draw(10) < 5 else [_IDS["run"], _IDS[COMMANDS[draw(4)]], END]
            rows.append(([*task, *first, *printed, _IDS["<assistant>"], *second], len(task) + 1, len(second)))
        longest = max(len(ids) for ids, _, _ in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        own = torch.zeros(len(rows), longest, dtype=torch.bool)
        for number, (row, first_at, second_length) in enumerate(rows):
            ids[number, : len(row)] = torch.tensor(row)
            own[number, first_at : first_at + 3] = True
            own[number, len(row) - second_length : len(row)] = True
        loss = functional.cross_entropy(model(ids[:, :-1])[own[:, 1:]], ids[:, 1:][own[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
