"""The loop: ask the model, run its command, until it submits or something ends it."""

import json
import subprocess
import time

from sweagent import __version__
from sweagent.environment import ROOT, CommandTimeoutError
from sweagent.model import CallLimitError, ContextWindowExceededError, Model

MARK = "<<SWE_AGENT_SUBMISSION>>"


class FormatError(Exception):
    pass


def blocked(call):
    """Commands that the real one refuses to run, because they wait for input or for ever."""
    command = json.loads(call["function"]["arguments"] or "{}").get("command", "").strip()
    return command.startswith(("vim", "vi", "emacs", "nano", "nohup", "gdb", "less", "tail -f"))


class Agent:
    def __init__(self, told, environment, trajectory):
        self._told = told
        self._environment = environment
        self._file = trajectory
        self._model = Model(told)
        self._steps = []
        self._history = []
        self._busy_s = 0.0
        self._timeouts = 0
        self._info = {"swe_agent_version": __version__, "swe_rex_version": "1.4.0"}

    def run(self, problem):
        words = {name.rpartition(".")[2]: text for name, text in self._told.items() if "templates" in name}
        self._history = [
            {"role": "system", "content": words["system_template"]},
            {"role": "user", "content": words["instance_template"].replace("{{problem_statement}}", problem)},
        ]
        status = None
        while status is None:
            try:
                status = self._step(words)
            except CallLimitError:
                status = self._give_up("exit_cost", "Exit due to cost limit")
            except ContextWindowExceededError:
                status = self._give_up("exit_context", "Exit due to context window")
            except CommandTimeoutError:
                status = self._give_up("exit_command_timeout", "Exit due to multiple consecutive command timeouts")
            except FormatError:
                status = self._give_up("exit_format", "Exit due to repeated format/blocklist/bash syntax errors")
            except RuntimeError as error:
                status = self._give_up("exit_error", f"Exit due to runtime error: {error}")
            except Exception as error:
                status = self._give_up("exit_error", f"Exit due to unknown error: {error}")
            self._info |= {"exit_status": status, "model_stats": self._model.stats}
            self._save()
        return self._info

    def _step(self, words):
        """The status that ends it, or None."""
        if self._busy_s > self._told["agent.tools.total_execution_timeout"]:
            return self._give_up("exit_total_execution_time", "Exit due to total execution time exceeded")
        answer, call = self._usable()
        name = call["function"]["name"]
        command = json.loads(call["function"]["arguments"] or "{}").get("command", "") if name == "bash" else name
        if command.strip() == "exit":
            self._note(command, "Exited", answer)
            self._info["submission"] = None
            return "exit_command"
        observation = self._observe(command)
        self._note(command, observation, answer)
        text = words["next_step_template"].replace("{{observation}}", observation)
        self._history += [
            answer,
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "content": text if observation else words["next_step_no_output_template"],
            },
        ]
        if MARK not in observation:
            return None
        self._info["submission"] = (ROOT / "model.patch").read_text() or None
        return "submitted"

    def _usable(self):
        """An answer with exactly one call of a tool; the model may be wrong twice."""
        asked = list(self._history)
        for _ in range(3):
            answer = self._model.ask(asked)
            calls = answer.get("tool_calls") or []
            if len(calls) == 1 and not blocked(calls[0]):
                return {"role": "assistant", "content": answer.get("content") or "", "tool_calls": calls}, calls[0]
            self._note("", "", {"content": answer.get("content") or ""})
            asked += [
                {"role": "assistant", "content": answer.get("content") or ""},
                {"role": "user", "content": "Please call exactly one function."},
            ]
        raise FormatError

    def _observe(self, command):
        limit_s = self._told["agent.tools.execution_timeout"]
        begun = time.monotonic()
        try:
            observation, _ = self._environment.run(command, limit_s)
            self._timeouts = 0
        except CommandTimeoutError:
            self._timeouts += 1
            if self._timeouts >= 3:
                raise
            observation = f"The command '{command}' was cancelled because it took more than {limit_s} seconds."
        self._busy_s += time.monotonic() - begun
        return observation

    def _give_up(self, status, message):
        """Hand in what there is, in the agent's place."""
        self._note("", "", {"content": message})
        subprocess.run(
            f"git add -A && git diff --cached > {ROOT}/model.patch",
            shell=True,
            cwd=f"/{self._told['env.repo.repo_name']}",
            capture_output=True,
            check=False,
        )
        patch = (ROOT / "model.patch").read_text() if (ROOT / "model.patch").exists() else ""
        self._info["submission"] = patch or None
        return f"submitted ({status})" if patch else status

    def _note(self, action, observation, answer):
        said = answer["content"]
        self._steps.append({"action": action, "observation": observation, "response": said, "thought": said})

    def _save(self):
        told = {"trajectory": self._steps, "history": self._history, "info": self._info, "environment": "main"}
        self._file.write_text(json.dumps(told, indent=2))
