"""What inference servers differ in: fields for token ids and log-probabilities, prompt ids, weights. Data only.

As read in vLLM 0.32 and SGLang 0.5.23, and as seen of `transformers serve` 5.23.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class EngineKind(StrEnum):
    """Servers by name; `models add` finds out which one it is."""

    VLLM = "vllm"
    SGLANG = "sglang"
    TRANSFORMERS = "transformers"  # `transformers serve`
    REPLAY = "replay"
    OPENAI = "openai"  # anything else that speaks OpenAI's dialect, providers for example
    UNKNOWN = ""


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """Fields and paths of one kind; empty: it has no such thing. Paths are below the base URL without /v1."""

    asks: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Fields of a chat call that ask for ids and log-probabilities, each with the keys that it brings into answers."""
    prompt_ids: tuple[str, ...] = ()  # where a chat call takes the ids of its prompt, as a path of keys
    render: str = ""  # tokenizes messages by the model's template; answers `tokens`
    spans: bool = False  # chat answers say which version of the weights wrote which tokens
    update: str = ""  # loads weights from a path
    no_ids: str = ""  # why it gives no token ids
    priority: int = 0  # of a chat call's `priority`: 1: lower ones go first, -1: higher ones; 0: it has no such field


_LOGPROBS = ("logprobs", ("logprobs",))
_VLLM = (("return_token_ids", ("prompt_token_ids", "token_ids")), _LOGPROBS)
_FROM_DISK = "/update_weights_from_disk"

TRAITS = {
    EngineKind.VLLM: EngineTraits(_VLLM, ("kv_transfer_params", "prompt_token_ids"), "/tokenize", priority=1),
    EngineKind.SGLANG: EngineTraits(
        asks=(
            ("return_token_ids", ("token_ids", "response_token_ids")),
            ("return_prompt_token_ids", ("prompt_token_ids",)),
            ("return_meta_info", ("meta_info",)),
            _LOGPROBS,
        ),
        prompt_ids=("input_ids",),
        render="/tokenize",
        spans=True,
        update=_FROM_DISK,
        priority=-1,
    ),
    EngineKind.REPLAY: EngineTraits(_VLLM),
    EngineKind.UNKNOWN: EngineTraits(_VLLM, update=_FROM_DISK),  # one that refuses these fields is no loss to a trainer
    EngineKind.TRANSFORMERS: EngineTraits(
        no_ids="`transformers serve` gives no token ids and silently ignores `logprobs`: it is fit for evaluation only"
    ),
    EngineKind.OPENAI: EngineTraits(no_ids="an engine of the kind `openai` gives no token ids"),
}
