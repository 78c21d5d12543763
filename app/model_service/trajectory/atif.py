"""The Agent Trajectory Interchange Format (ATIF, Harbor's RFC 1), version 1.7: one schema for every agent.

The main conversation is the trajectory; the other branches are embedded below it. MegaFlow's own fields are in `extra`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from app.ledger.model_calls import StoredCall
from app.model_service.dialects.base import Message, as_object, is_text, parts_of
from app.model_service.trajectory.tree import Branch, BranchKind, Forest, Join, Node, branches, join

SCHEMA = "ATIF-v1.7"
_FAULTS_SHOWN = 100


@dataclass(frozen=True, slots=True)
class About:
    """Facts that the calls do not contain. `usage` is shown among the final metrics."""

    session_id: str
    agent: str
    version: str
    model: str = ""
    task: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)


def atif(calls: Sequence[StoredCall], about: About) -> dict[str, Any]:
    """Builds the trajectory of an attempt. Without answered calls it has one step with a message about that."""
    forest = join(calls)
    all_branches = branches(forest)
    if not all_branches:
        steps = [{"step_id": 1, "source": "system", "message": "No answer of a model was recorded."}]
        trajectory = _head(about, about.session_id, steps)
    else:
        writers = [_BranchWriter(branch, forest, about) for branch in all_branches]
        for one in writers:
            one.refer(writers)
        trajectory = {**writers[0].trajectory()}
        if writers[1:]:
            trajectory["subagent_trajectories"] = [one.trajectory() for one in writers[1:]]
    trajectory["final_metrics"] = _final(calls, len(trajectory["steps"]), dict(about.usage))
    trajectory["extra"] = {
        **trajectory.get("extra", {}),
        **about.extra,
        **({"task": about.task} if about.task else {}),
        "scripted": any(call.scripted for call in calls),
        **({"faults": _faults(forest.strays)} if forest.strays else {}),
    }
    return trajectory


def _head(about: About, trajectory_id: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
    agent = {"name": about.agent, "version": about.version or "unknown"}
    if about.model:
        agent["model_name"] = about.model
    return {
        "schema_version": SCHEMA,
        "session_id": about.session_id,
        "trajectory_id": trajectory_id,
        "agent": agent,
        "steps": steps,
    }


class _BranchWriter:
    def __init__(self, branch: Branch, forest: Forest, about: About) -> None:
        self._branch = branch
        self._about = about
        self._forest = forest
        self._replies = forest.replies()
        self._steps: list[dict[str, Any]] = []
        self._step_of: dict[Node, dict[str, Any]] = {}
        self._recovered = 0
        self.id = about.session_id if branch.number == 0 else f"{about.session_id}/{branch.number}"
        for node in branch.nodes:
            self._prompt(node.call.messages[self._start(node) :], node.call.started_at)
            self._step_of[node] = self._answer(node)
        last = branch.nodes[-1]
        if unanswered := forest.last_prompts.get(last):
            self._prompt(unanswered, last.call.started_at + timedelta(seconds=last.call.duration_s))

    def trajectory(self) -> dict[str, Any]:
        result = _head(self._about, self.id, self._steps)
        tools = next((node.call.tools for node in self._branch.nodes if node.call.tools), ())
        if tools:
            result["agent"]["tool_definitions"] = [{"type": "function", "function": _function(tool)} for tool in tools]
        calls = [call for node in self._branch.nodes for call in (node.call, *node.repeats)]
        result["final_metrics"] = _final(calls, len(self._steps), {})
        result["extra"] = {"kind": self._branch.kind.value, **self._link}
        if self._recovered:
            result["notes"] = (
                f"{self._recovered} of the agent's steps were never recorded and are taken from later prompts; "
                "they have no metrics."
            )
        return result

    _link: Mapping[str, Any] = {}

    def refer(self, written: Sequence[_BranchWriter]) -> None:
        branch = self._branch
        if branch.of is None or branch.at is None:
            return
        other = written[branch.of]
        step = other._step_of[branch.at]
        self._link = {"of": {"trajectory_id": other.id, "step_id": step["step_id"]}}
        if branch.kind is not BranchKind.SUB_AGENT:
            return
        for result in step.get("observation", {}).get("results", ()):
            if result.get("source_call_id") == branch.tool_call_id:
                result.setdefault("subagent_trajectory_ref", []).append({"trajectory_id": self.id})

    def _prompt(self, messages: Iterable[Message], at: datetime) -> None:
        """Adds the new messages of a call: results go to the steps that requested them, the others become steps."""
        for message in messages:
            match message["role"]:
                case "assistant":
                    self._from_prompt(message)
                case "tool":
                    self._observe(message)
                case role:
                    step = {"source": "system" if role == "system" else "user", **_message(message)}
                    self._add({"timestamp": at.isoformat(), **step})

    def _start(self, node: Node) -> int:
        """Returns the start of a node's own messages: at a fork, those shared with other branches are left to them."""
        if node is not self._branch.nodes[0] or node.parent is None:
            return node.start
        own_ids = [self._forest.identities.of(message) for message in node.call.messages]
        shared = node.start
        for other in node.parent.children:
            theirs = (
                [self._forest.identities.of(message) for message in other.call.messages] if other is not node else []
            )
            while shared < min(len(own_ids), len(theirs)) and own_ids[: shared + 1] == theirs[: shared + 1]:
                shared += 1
        return shared

    def _answer(self, node: Node) -> dict[str, Any]:
        call = node.call
        assert call.reply is not None
        extra: dict[str, Any] = {"call_id": str(call.id), "end": call.end.value, "finish_reason": call.finish_reason}
        if node.join in (Join.EDITED, Join.REWRITTEN):
            extra["joined"] = node.join.value  # the harness changed earlier messages
        if not call.complete:
            extra["cut"] = True
        if call.scripted:
            extra["scripted"] = True
        if call.sampling:
            extra["sampling"] = dict(call.sampling)
        if call.policy_version:
            extra["policy_version"] = call.policy_version
        if node.repeats:
            extra["repeats"] = _faults(node.repeats)
        step = {
            "timestamp": (call.started_at + timedelta(seconds=call.duration_s)).isoformat(),
            "source": "agent",
            **_message(call.reply),
            **_thoughts_and_calls(call.reply),
            "llm_call_count": 1,
            "metrics": _metrics(call),
            "extra": extra,
        }
        name = call.upstream_model or call.model
        if name and name != self._about.model:
            step["model_name"] = name
        return self._add(step)

    def _from_prompt(self, message: Message) -> None:
        step = {"source": "agent", **_message(message), **_thoughts_and_calls(message)}
        if self._forest.identities.of(message) in self._replies:
            step["is_copied_context"] = True
        else:
            step["extra"] = {"recovered": True}
            self._recovered += 1
        self._add(step)

    def _observe(self, message: Message) -> None:
        step = next((one for one in reversed(self._steps) if one["source"] == "agent"), None)
        result: dict[str, Any] = {"content": _message(message)["message"]}
        if message.get("is_error"):
            result["extra"] = {"is_error": True}
        if step is None:
            self._add({"source": "user", "message": result["content"]})
            return
        results = step.setdefault("observation", {"results": []})["results"]
        answered = {one.get("source_call_id") for one in results}
        open_calls = [one["tool_call_id"] for one in step.get("tool_calls", ()) if one["tool_call_id"] not in answered]
        if message.get("tool_call_id") in open_calls:
            result["source_call_id"] = message["tool_call_id"]
        elif open_calls:  # the harness changed the id
            result["source_call_id"] = open_calls[0]
        results.append(result)

    def _add(self, step: dict[str, Any]) -> dict[str, Any]:
        self._steps.append({"step_id": len(self._steps) + 1, **step})
        return self._steps[-1]


def _message(message: Message) -> dict[str, Any]:
    """Returns the text. Other parts are shown by their type only, because the calls themselves have them."""
    texts = [
        part["text"] if is_text(part) else f"[{part.get('type', 'part')}]" for part in parts_of(message["content"])
    ]
    return {"message": "\n".join(texts)}


def _thoughts_and_calls(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if message.get("reasoning"):
        fields["reasoning_content"] = message["reasoning"]
    if calls := message.get("tool_calls"):
        fields["tool_calls"] = [
            {"tool_call_id": call["id"], "function_name": call["name"], "arguments": as_object(call["arguments"])}
            for call in calls
        ]
    return fields


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tool[key] for key in ("name", "description", "parameters") if key in tool}


def _metrics(call: StoredCall) -> dict[str, Any]:
    metrics = {
        "prompt_tokens": call.use.prompt,
        "completion_tokens": call.use.completion,
        "cached_tokens": call.use.cached,
        "cost_usd": call.cost_usd,
        "prompt_token_ids": _list(call.prompt_token_ids),
        "completion_token_ids": _list(call.token_ids),
        "logprobs": _list(call.logprobs),
    }
    extra: dict[str, Any] = {"duration_s": round(call.duration_s, 4)}
    if call.first_byte_s is not None:
        extra["first_byte_s"] = round(call.first_byte_s, 4)
    if call.waited_s:
        extra["waited_s"] = dict(call.waited_s)
    if call.use.reasoning is not None:
        extra["reasoning_tokens"] = call.use.reasoning
    return {**{key: value for key, value in metrics.items() if value is not None}, "extra": extra}


def _list(values: Iterable[Any] | None) -> list[Any] | None:
    return None if values is None else list(values)


def _final(calls: Sequence[StoredCall], steps: int, usage: dict[str, Any]) -> dict[str, Any]:
    unpriced = sum(call.cost_usd is None for call in calls)
    metrics: dict[str, Any] = {
        "total_prompt_tokens": sum(call.use.prompt or 0 for call in calls),
        "total_completion_tokens": sum(call.use.completion or 0 for call in calls),
        "total_cached_tokens": sum(call.use.cached or 0 for call in calls),
        "total_steps": steps,
        "extra": {**usage, "model_calls": len(calls), "turns": sum(call.is_turn for call in calls)},
    }
    if unpriced:
        metrics["extra"]["unpriced_calls"] = unpriced
    else:
        metrics["total_cost_usd"] = round(sum(call.cost_usd or 0.0 for call in calls), 6)
    return metrics


def _faults(calls: Sequence[StoredCall]) -> list[dict[str, Any]]:
    return [
        {
            "call_id": str(call.id),
            "at": call.started_at.isoformat(),
            "end": call.end.value,
            **({"status": call.status} if call.status is not None else {}),
            **({"detail": call.detail or call.lost} if call.detail or call.lost else {}),
        }
        for call in calls[:_FAULTS_SHOWN]
    ]
