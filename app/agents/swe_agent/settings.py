"""Writes the file that SWE-agent takes as `--config`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from app.models.spec import Limits

# Where the checkout has no default prompts, or has moved them.
_PLAIN: dict[str, str] = {
    "system_template": "You work on a computer, by the tools that you are given, until the task is done.",
    "instance_template": (
        "The folder {{working_dir}} has a repository in it. This is what is to be done there:\n\n"
        "{{problem_statement}}\n\n"
        "Look at the code first, change what has to be changed, try it out, and run `submit` when you are done."
    ),
    "next_step_template": "{{observation}}",
    "next_step_no_output_template": "The command was successful and has no output.",
}
# Nothing that waits for a key to be pressed, nothing that draws a progress bar.
_CALM = {"PAGER": "cat", "MANPAGER": "cat", "GIT_PAGER": "cat", "LESS": "-R", "TQDM_DISABLE": "1"}


def settings(checkout: Path, seen_at: str, workdir: str, limits: Limits, call: dict[str, Any]) -> bytes:
    """As YAML. `checkout` is on this host, `seen_at` is the same folder where SWE-agent runs.

    The prompts are the checkout's own. The tools are bash and `submit` alone: the default ones download a parser for
    every task. `call`: seconds (`timeout_s`) and tries (`attempts`) of one call of the model.
    """
    return yaml.safe_dump(
        {
            "agent": {
                "templates": {
                    name: text.replace("{{working_dir}}", workdir) for name, text in _templates(checkout).items()
                },
                "tools": {
                    "bundles": [{"path": f"{seen_at}/tools/registry"}, {"path": f"{seen_at}/tools/submit"}],
                    "enable_bash_tool": True,
                    "parse_function": {"type": "function_calling"},
                    "env_variables": _CALM,
                    "execution_timeout": max(1, int(limits.command_timeout_s)),
                    # Its own limit of all commands together stays out of the way of the time that we give.
                    "total_execution_timeout": max(1, int(limits.agent_timeout_s)),
                },
                "model": {
                    # The client's own retries are off: the framework's are the ones that are counted and logged.
                    "completion_kwargs": {"timeout": call["timeout_s"], "max_retries": 0},
                    "retry": {"retries": call["attempts"], "min_wait": 1, "max_wait": 4},
                    "max_input_tokens": 0,  # whether it is too long is for the engine to say
                },
            }
        },
        sort_keys=False,
    ).encode()


def _templates(checkout: Path) -> dict[str, str]:
    """The texts of the checkout's default configuration; ours where it has none."""
    try:
        told = yaml.safe_load((checkout / "config" / "default.yaml").read_bytes())
        found = told["agent"]["templates"]
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return _PLAIN
    texts = {name: found[name] for name in _PLAIN if isinstance(found, dict) and isinstance(found.get(name), str)}
    return texts if "instance_template" in texts else _PLAIN
