"""Substitutes variables in a compose file: those that common harnesses set, and none of the host's.

Source: the Compose Specification, "Interpolation".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from app.compose_file.refusals import FileContext

HARNESS = "/.harness"
"""Parent of the folders that a harness would mount from its host. Here they are created in the container, empty."""

USUAL: Mapping[str, str] = {
    # Harbor
    "CONTEXT_DIR": ".",
    "TEST_DIR": "/tests",
    "MAIN_IMAGE_NAME": "megaflow-main",
    "PREBUILT_IMAGE_NAME": "megaflow-main",
    "HOST_VERIFIER_LOGS_PATH": f"{HARNESS}/verifier",
    "ENV_VERIFIER_LOGS_PATH": "/logs/verifier",
    "HOST_AGENT_LOGS_PATH": f"{HARNESS}/agent",
    "ENV_AGENT_LOGS_PATH": "/logs/agent",
    "HOST_ARTIFACTS_PATH": f"{HARNESS}/artifacts",
    "ENV_ARTIFACTS_PATH": "/logs/artifacts",
    "CPUS": "",  # empty: the task's own limits apply
    "MEMORY": "",
    # Terminal-Bench
    "T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME": "megaflow-main",
    "T_BENCH_TASK_DOCKER_CLIENT_CONTAINER_NAME": "megaflow-main",
    "T_BENCH_TASK_DOCKER_NAME_PREFIX": "megaflow-main",
    "T_BENCH_TEST_DIR": "/tests",
    "T_BENCH_TASK_LOGS_PATH": f"{HARNESS}/logs",
    "T_BENCH_CONTAINER_LOGS_PATH": "/logs",
    "T_BENCH_TASK_AGENT_LOGS_PATH": f"{HARNESS}/agent-logs",
    "T_BENCH_CONTAINER_AGENT_LOGS_PATH": "/agent-logs",
}
"""Variables that the templates of Harbor and Terminal-Bench use."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BRACE = re.compile("[{}]")
_EXPRESSION = re.compile(rf"({_NAME.pattern})(?:(:?)([-+?])(.*))?", re.DOTALL)
_MAX_NODES = 20_000
"""Limit of values, as YAML aliases make a small file large."""
_MAX_CHARACTERS = 4 << 20
_MAX_DEPTH = 64


class Substitution:
    """Replaces variables with their values, everywhere but in keys."""

    def __init__(self, context: FileContext, variables: Mapping[str, str] = USUAL) -> None:
        self._context = context
        self._variables = variables
        self._nodes = 0
        self._characters = 0

    def everywhere(self, value: Any, where: str = "", depth: int = 0) -> Any:
        """Returns the same tree with the variables in its texts replaced."""
        self._nodes += 1
        if self._nodes > _MAX_NODES or depth > _MAX_DEPTH:
            if self._nodes < 2 * _MAX_NODES or depth > _MAX_DEPTH:
                self._nodes = 2 * _MAX_NODES
                self._context.refuse(where[:80], f"at most {_MAX_NODES} values, {_MAX_DEPTH} deep", "more")
            return None
        if isinstance(value, str):
            self._characters += len(value)
            if self._characters > _MAX_CHARACTERS:
                self._context.refuse(where[:80], f"at most {_MAX_CHARACTERS} characters in all", "more")
                return ""
            return self.text(value, where)
        if isinstance(value, dict):
            return {
                str(key): self.everywhere(one, f"{where}.{key}".lstrip("."), depth + 1) for key, one in value.items()
            }
        if isinstance(value, list):
            return [self.everywhere(one, f"{where}[{number}]", depth + 1) for number, one in enumerate(value)]
        return value

    def text(self, text: str, where: str, depth: int = 0) -> str:
        """Replaces the variables in one text. Refuses malformed expressions."""
        parts, at = [], 0
        while (dollar := text.find("$", at)) >= 0:
            parts.append(text[at:dollar])
            at = dollar + 1
            name = _NAME.match(text, at)
            if text.startswith("$", at):
                value, at = "$", at + 1
            elif text.startswith("{", at):
                inner, at = _braced(text, at)
                value = self._expression(inner, where, text, depth)
            elif name is not None:
                value, at = self._value(name[0], where), name.end()
            else:
                value = self._refuse(where, text)
            parts.append(value)
        return "".join([*parts, text[at:]])

    def _expression(self, inner: str, where: str, text: str, depth: int) -> str:
        match = _EXPRESSION.fullmatch(inner) if depth < _MAX_DEPTH else None
        if match is None:
            return self._refuse(where, text)
        name, colon, operator, default = match.groups()
        if operator is None:
            return self._value(name, where)
        value = self._variables.get(name)
        is_set = bool(value) if colon else value is not None  # with `:`, an empty value counts as unset
        if operator == "+":
            return self.text(default, where, depth + 1) if is_set else ""
        if operator == "-":
            return value or "" if is_set else self.text(default, where, depth + 1)
        if not is_set:
            self._context.refuse(where, f"no need for the variable {name}: it has no value here", text)
        return value or ""

    def _value(self, name: str, where: str) -> str:
        if name not in self._variables:
            self._context.note(where, f"the variable {name} is empty here")
        return self._variables.get(name, "")

    def _refuse(self, where: str, text: str) -> str:
        self._context.refuse(where, "`${NAME}`, `${NAME:-default}` or `$$`", text)
        return ""


def _braced(text: str, at: int) -> tuple[str, int]:
    """Returns the content of the braces opening at `at`, and their end; empty and the text's end if they stay open."""
    depth = 0
    for brace in _BRACE.finditer(text, at):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[at + 1 : brace.start()], brace.end()
    return "", len(text)
