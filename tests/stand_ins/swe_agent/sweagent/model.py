"""Asks an OpenAI-compatible endpoint; its errors have the names that the real one's client gives them."""

import json
import os
import time
import urllib.error
import urllib.request

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": text,
            "parameters": {
                "type": "object",
                "properties": {need: {"type": "string"} for need in needs},
                "required": list(needs),
            },
        },
    }
    for name, text, needs in (
        ("bash", "runs a command", ("command",)),
        ("submit", "hands in what was changed", ()),
    )
]


class ContextWindowExceededError(Exception):
    pass


class CallLimitError(Exception):
    pass


class ModelError(Exception):
    """As litellm's, `str` of which begins with `litellm.NAME`."""

    def __init__(self, name, message, again):
        super().__init__(f"litellm.{name}: {name}: OpenAIException - {message}")
        self.again = again


class Model:
    def __init__(self, told):
        self._told = told
        self.stats = {"instance_cost": 0.0, "tokens_sent": 0, "tokens_received": 0, "api_calls": 0}

    def ask(self, messages):
        tries = self._told["agent.model.retry.retries"]
        for number in range(1, tries + 1):
            try:
                answer = self._call(messages)
                break
            except ModelError as error:
                if not error.again or number == tries:
                    raise
                time.sleep(self._told["agent.model.retry.min_wait"])
        use = answer.get("usage") or {}
        self.stats["tokens_sent"] += use.get("prompt_tokens", 0)
        self.stats["tokens_received"] += use.get("completion_tokens", 0)
        self.stats["api_calls"] += 1
        if 0 < self._told["agent.model.per_instance_call_limit"] < self.stats["api_calls"]:
            raise CallLimitError("Per instance call limit exceeded")
        return answer["choices"][0]["message"]

    def _call(self, messages):
        body = {"model": self._told["agent.model.name"].removeprefix("openai/"), "messages": messages, "tools": TOOLS}
        request = urllib.request.Request(
            f"{self._told['agent.model.api_base']}/chat/completions",
            json.dumps({**body, "temperature": 0.0, "top_p": 1.0}).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=self._told["agent.model.completion_kwargs"]["timeout"]) as got:
                answer = json.loads(got.read())
            answer["choices"][0]["message"]["role"]
        except urllib.error.HTTPError as error:
            text = error.read().decode("utf-8", "replace")
            if "maximum context length" in text:
                raise ContextWindowExceededError(text) from error
            names = {400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError", 429: "RateLimitError"}
            name = names.get(error.code, "InternalServerError")
            raise ModelError(name, text, again=name not in ("AuthenticationError", "NotFoundError")) from error
        except TimeoutError as error:
            raise ModelError("Timeout", "Request timed out", again=True) from error
        except OSError as error:
            raise ModelError("InternalServerError", f"Connection error: {error}", again=True) from error
        except (ValueError, LookupError, TypeError) as error:
            raise ModelError("APIError", f"cannot read the answer: {error}", again=False) from error
        return answer
