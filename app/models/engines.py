"""Describes differences of inference servers: fields for token ids, log-probabilities, prompt ids, weights. Data only.

Sources: code of vLLM 0.32 and SGLang 0.5.23; observed behaviour of `transformers serve` 5.23.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class EngineKind(StrEnum):
    """Kinds of inference servers; `models add` detects the kind."""

    VLLM = "vllm"
    SGLANG = "sglang"
    TRANSFORMERS = "transformers"  # `transformers serve`
    REPLAY = "replay"
    OPENAI = "openai"  # any other server with OpenAI's API, for example a provider
    UNKNOWN = ""


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """Fields and paths of one server kind; empty: not supported. Paths are relative to the base URL without /v1."""

    asks: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Fields of a chat call that request ids and log-probabilities, each with the keys that it adds to responses."""
    prompt_ids: tuple[str, ...] = ()  # path of keys in a chat call for the prompt's token ids
    render: str = ""  # endpoint that tokenizes messages by the model's template; returns `tokens`
    spans: bool = False  # chat responses name the version of the weights that wrote each token
    update: str = ""  # endpoint that loads weights from a path
    no_ids: str = ""  # reason why it gives no token ids
    priority: int = 0  # chat field `priority`: 1: lower values first, -1: higher values first, 0: no such field


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
    EngineKind.UNKNOWN: EngineTraits(_VLLM, update=_FROM_DISK),  # without these fields, of no use to a trainer
    EngineKind.TRANSFORMERS: EngineTraits(
        no_ids="`transformers serve` gives no token ids and silently ignores `logprobs`: it is fit for evaluation only"
    ),
    EngineKind.OPENAI: EngineTraits(no_ids="an engine of the kind `openai` gives no token ids"),
}
